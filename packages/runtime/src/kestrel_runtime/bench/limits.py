"""The limit of an op on the GPU present: one launch, plus its bytes or its operations.

It is a reference, not a strict bound: the rates are those of the vendor's large copies and GEMMs, and programmatic
dependent launch takes less time than a plain launch. GPUs without measured rates have no limit.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """The measured rates of one kind of GPU."""

    launch_us: float
    """A launch inside a CUDA graph, in a chain of kernels that do almost nothing."""
    bytes_per_us: float
    operations_per_us: dict[str, float]
    """The rate of the tensor cores by precision, from the vendor's GEMM of 8192^3."""


LIMITS = {
    "NVIDIA H200": Limit(launch_us=1.05, bytes_per_us=4.3e6, operations_per_us={"bf16": 705e6, "fp8": 1430e6}),
    "NVIDIA H100 80GB HBM3": Limit(
        launch_us=1.02, bytes_per_us=3.0e6, operations_per_us={"bf16": 774e6, "fp8": 1439e6}
    ),
}

TARGET_GPU = "NVIDIA H200"
"""The GPU of the targets in the definitions; rows of other GPUs have no target."""


def limit_of(gpu: str) -> Limit | None:
    """The limit of a GPU by its full name, or None if it was not measured."""
    return LIMITS.get(gpu)


def limit_us(
    limit: Limit | None, traffic: int | None, operations: int | None, launches: float = 1, precision: str = "bf16"
) -> float | None:
    """Microseconds of `launches` launches plus the bytes or the operations, whichever take longer.

    >>> round(limit_us(limit_of("NVIDIA H200"), 2 * 2048 * 4096 * 2, 0), 2)  # rms_norm of 2048 rows of 4096, bf16
    8.85
    """
    if limit is None or traffic is None:
        return None
    moving = traffic / limit.bytes_per_us
    computing = (operations or 0) / limit.operations_per_us[precision]
    return launches * limit.launch_us + max(moving, computing)
