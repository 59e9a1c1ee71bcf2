"""How fast an op could be at all on the GPU present: one launch, and its bytes or its operations.

A reference, not a proof: the rates are what the vendor's own large copies and products reach, and programmatic
dependent launch goes below the price of a plain launch. GPUs that nobody measured have no limit here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """What was measured on one kind of GPU."""

    launch_us: float
    """A launch inside a CUDA graph whose kernel does next to nothing, one after the other."""
    bytes_per_us: float
    operations_per_us: dict[str, float]
    """Of the tensor cores, by precision: the rate of the vendor's product of 8192^3."""


LIMITS = {
    "NVIDIA H200": Limit(launch_us=1.05, bytes_per_us=4.3e6, operations_per_us={"bf16": 705e6, "fp8": 1430e6}),
}


def limit_of(gpu: str) -> Limit | None:
    """The limit of a GPU by its full name, or None for one that was not measured."""
    return LIMITS.get(gpu)


def limit_us(
    limit: Limit | None, traffic: int | None, operations: int | None, launches: float = 1, precision: str = "bf16"
) -> float | None:
    """Microseconds of `launches` launches and of the bytes or the operations, whichever take longer.

    >>> round(limit_us(limit_of("NVIDIA H200"), 2 * 2048 * 4096 * 2, 0), 2)  # rms_norm of 2048 rows of 4096, bf16
    8.85
    """
    if limit is None or traffic is None:
        return None
    moving = traffic / limit.bytes_per_us
    computing = (operations or 0) / limit.operations_per_us[precision]
    return launches * limit.launch_us + max(moving, computing)
