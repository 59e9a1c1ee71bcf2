"""Parameters of the sampling ops: a number or a tensor of one per row, and the keys of the random numbers."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from kestrel_runtime import check, launches_directly

_GENERATOR_KEY = 0x6B65737472656C  # keeps our random numbers apart from those that torch draws from the same generator
_generator_lock = threading.Lock()
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
# The functions behind those of torch.cuda, which take longer; a torch without CUDA lacks them.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_current_stream_is_capturing = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


class Filters(NamedTuple):
    """What a draw does to logits: each parameter a tensor, or None and a number. The defaults do nothing."""

    temperature: torch.Tensor | None = None
    temperature_value: float = 1.0
    top_k: torch.Tensor | None = None
    top_k_value: int = 0
    top_p: torch.Tensor | None = None
    top_p_value: float = 1.0
    min_p: torch.Tensor | None = None
    min_p_value: float = 0.0
    joint: bool = False


FilterFields = tuple[
    torch.Tensor | None, float, torch.Tensor | None, int, torch.Tensor | None, float, torch.Tensor | None, float, bool
]
"""The fields of Filters: a plain tuple takes less time to make."""


class Keys(NamedTuple):
    """Seed and offset of every row: each a tensor, or None and a number.

    With an ``offset_stride``, row b uses ``offset_value + b * offset_stride``.
    """

    seed: torch.Tensor | None
    seed_value: int
    offset: torch.Tensor | None
    offset_value: int
    offset_stride: int = 0


KeyFields = tuple[torch.Tensor | None, int, torch.Tensor | None, int, int]
"""The fields of Keys: a plain tuple takes less time to make."""


def number_or_tensor(op: str, name: str, value: float | torch.Tensor) -> tuple[torch.Tensor | None, float]:
    """A float parameter as (tensor, 0.0) or (None, number). The op rounds the number to float32, as the tensor is."""
    if type(value) is float and value == value:  # the common case takes no checks
        return None, value
    if isinstance(value, torch.Tensor):
        return value, 0.0
    check.number(op, name, value)
    return None, float(value)


def temperature_or_tensor(op: str, value: float | torch.Tensor) -> tuple[torch.Tensor | None, float]:
    """A temperature as (tensor, 0.0) or (None, number >= 0)."""
    if type(value) is float and value >= 0.0:  # the common case takes no checks
        return None, value
    if not isinstance(value, torch.Tensor):
        check.number(op, "temperature", value, minimum=0)
    return number_or_tensor(op, "temperature", value)


def count_or_tensor(op: str, name: str, value: int | torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """A count as (tensor, 0) or (None, number)."""
    if type(value) is int and -(2**63) <= value < 2**63:
        return None, value
    if isinstance(value, torch.Tensor):
        return value, 0
    check.number(op, name, value, integer=True, minimum=-(2**63), maximum=2**63 - 1)
    return None, value


def filters_of(
    op: str,
    temperature: float | torch.Tensor,
    top_k: int | torch.Tensor,
    top_p: float | torch.Tensor,
    min_p: float | torch.Tensor,
    filter_apply_order: str,
) -> FilterFields:
    """The filters of a call."""
    if (  # the common case takes no further checks
        type(temperature) is float
        and temperature >= 0.0
        and type(top_k) is int
        and -(2**63) <= top_k < 2**63
        and type(top_p) is float
        and top_p == top_p  # no NaN
        and type(min_p) is float
        and min_p == min_p
        and type(filter_apply_order) is str
        and filter_apply_order == "top_k_first"
    ):
        return None, temperature, None, top_k, None, top_p, None, min_p, False
    return (
        *temperature_or_tensor(op, temperature),
        *count_or_tensor(op, "top_k", top_k),
        *number_or_tensor(op, "top_p", top_p),
        *number_or_tensor(op, "min_p", min_p),
        is_joint(op, filter_apply_order),
    )


def is_joint(op: str, filter_apply_order: str) -> bool:
    """Whether top-k and top-p both apply to the whole row."""
    if isinstance(filter_apply_order, str) and filter_apply_order == "top_k_first":
        return False
    check.choice(op, "filter_apply_order", filter_apply_order, ("top_k_first", "joint"))
    return True


def integer_or_tensor(op: str, name: str, value: int | torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """An integer parameter as (tensor, 0) or (None, number); 64-bit unsigned numbers wrap to signed."""
    if type(value) is int and 0 <= value < 2**63:  # the common case takes no checks
        return None, value
    if isinstance(value, torch.Tensor):
        return value, 0
    check.number(op, name, value, integer=True, minimum=-(2**63), maximum=2**64 - 1)
    return None, value - 2**64 if value >= 2**63 else value


def is_capturing(device: int) -> bool:
    """Whether a CUDA graph is captured on the stream of ``device``, which need not be the current device."""
    if device == _current_device():
        return bool(_current_stream_is_capturing())
    with torch.cuda.device(device):
        return bool(_current_stream_is_capturing())


def keys(
    op: str,
    probs: torch.Tensor,
    generator: torch.Generator | None,
    seed: int | torch.Tensor | None,
    offset: int | torch.Tensor | None,
    return_valid: bool,
    name: str = "probs",
) -> KeyFields:
    """The keys of a call.

    Without a seed they come from the generator, and the rows have successive offsets. With one, the offset is 0 unless
    given. Nothing synchronises.
    """
    if type(return_valid) is not bool:
        check.flag(op, "return_valid", return_valid)
    if seed is None and offset is None and _is_eager(probs, generator):
        return _reserved_keys(probs, generator)
    if isinstance(seed, torch.Tensor) and isinstance(offset, torch.Tensor) and generator is None:
        return seed, 0, offset, 0, 0  # as in a captured graph; the launch checks them
    if type(probs) is not torch.Tensor or probs.dim() != 2:
        check.tensor(op, name, probs, ndim=2)
    compiling = _is_compiling()
    if not compiling and probs.is_cuda and is_capturing(probs.get_device()):
        for argument, value in (("seed", seed), ("offset", offset)):
            if not isinstance(value, torch.Tensor):
                check.fail(
                    op, argument, "a tensor while a CUDA graph is captured (a replay must see new numbers)", value
                )
    if seed is None:
        if offset is not None:
            check.fail(op, "offset", "None without a seed", check.shown(offset))
        return _keys_from_generator(op, probs, generator, compiling)
    if generator is not None:
        check.fail(op, "generator", "None with a seed", "a generator")
    return (
        *integer_or_tensor(op, "seed", seed),
        *integer_or_tensor(op, "offset", 0 if offset is None else offset),
        0,
    )


def _is_eager(probs: torch.Tensor, generator: torch.Generator | None) -> bool:
    """Whether a call without a seed is an eager one on the current GPU: such arguments need no further check."""
    return (
        type(probs) is torch.Tensor
        and probs.is_cuda
        and not _is_compiling()
        and not _dispatch_modes()
        and _transforms() is None
        and probs.dim() == 2
        and probs.get_device() == _current_device()
        and not _current_stream_is_capturing()
        and (generator is None or (type(generator) is torch.Generator and generator.device.type == "cuda"))
    )


def keys_of_an_eager_call(
    rows: torch.Tensor,
    generator: torch.Generator | None,
    seed: int | torch.Tensor | None,
    offset: int | torch.Tensor | None,
) -> KeyFields | None:
    """The keys of a plain eager call on the current GPU, as in Keys, or None where :func:`keys` must look at it."""
    if type(rows) is not torch.Tensor or not rows.is_cuda or rows.requires_grad or not launches_directly():
        return None
    if rows.get_device() != _current_device() or _current_stream_is_capturing():
        return None
    if offset is not None or rows.dim() != 2:
        return None
    if seed is None:
        return _reserved_keys(rows, generator) if generator is None or type(generator) is torch.Generator else None
    return (None, seed, None, 0, 0) if type(seed) is int and 0 <= seed < 2**63 and generator is None else None


def _reserved_keys(probs: torch.Tensor, generator: torch.Generator | None) -> KeyFields:
    """The seed of a CUDA generator, which holds a Philox key and a counter on the host. Reserves a value per row."""
    source = generator or torch.cuda.default_generators[probs.get_device()]
    with _generator_lock:
        counter = source.get_offset()
        source.set_offset(counter + (probs.shape[0] + 3) // 4 * 4)  # torch requires multiples of 4
    value = source.initial_seed() ^ _GENERATOR_KEY  # 64 bits, unsigned
    return None, value - 2**64 if value >= 2**63 else value, None, counter, 1


def _keys_from_generator(op: str, probs: torch.Tensor, generator: torch.Generator | None, compiling: bool) -> KeyFields:
    """One seed for all rows, and successive offsets."""
    if generator is not None:
        if compiling:
            check.fail(op, "generator", "None under torch.compile (give seed and offset as tensors)", "a generator")
        if not isinstance(generator, torch.Generator):
            check.fail(op, "generator", "a torch.Generator", type(generator).__name__, TypeError)
        if generator.device.type != probs.device.type:
            check.fail(op, "generator", f"a generator on {probs.device.type}", generator.device.type)
    if not compiling and probs.is_cuda and type(probs) is torch.Tensor and not _dispatch_modes() and not _transforms():
        return _reserved_keys(probs, generator)
    seed = torch.randint(2**63 - 1, (1,), generator=generator, dtype=torch.int64, device=probs.device)
    return seed, 0, None, 0, 1


def check_probs(op: str, probs: torch.Tensor, name: str = "probs") -> None:
    """[B, V] floats, V at least 1."""
    check.tensor(op, name, probs, dtype=check.FLOATS, ndim=2, last_contiguous=True)
    if probs.shape[1] == 0:
        check.fail(op, name, "at least one entry per row", f"shape {tuple(probs.shape)}")


def check_parameter(
    op: str,
    name: str,
    value: torch.Tensor | None,
    rows: torch.Tensor,
    *dtypes: torch.dtype,
    rows_name: str = "probs",
) -> None:
    """A parameter given as a tensor: [1] or [B], of one of the dtypes, where the rows are."""
    if value is not None:
        check.tensor(op, name, value, dtype=dtypes, ndim=1, last_contiguous=True)
        check.shape(op, name, value, (1 if value.shape[0] == 1 else rows.shape[0],))
        check.same(op, "device", **{rows_name: rows, name: value})


def shape_of_draw(probs: torch.Tensor, *_parameters: object) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 [B] and valid bool [B]; the references need V as a number."""
    return (
        torch.empty(probs.shape[:1], dtype=torch.int32, device=probs.device),
        torch.empty(probs.shape[:1], dtype=torch.bool, device=probs.device),
    )


def check_keys(
    op: str,
    rows: torch.Tensor,
    seed: torch.Tensor | None,
    offset: torch.Tensor | None,
    offset_stride: int,
    rows_name: str = "probs",
) -> None:
    """Seeds and offsets given as tensors: int64 [1] or [B]."""
    check_parameter(op, "seed", seed, rows, torch.int64, rows_name=rows_name)
    check_parameter(op, "offset", offset, rows, torch.int64, rows_name=rows_name)
    if offset_stride not in (0, 1):
        check.fail(op, "offset_stride", "0 or 1", offset_stride)


def check_filters(
    op: str,
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> None:
    """Check what filters rows of logits."""
    check_parameter(op, "temperature", temperature, logits, torch.float32, rows_name="logits")
    check_parameter(op, "top_k", top_k, logits, *check.INTEGERS, rows_name="logits")
    check_parameter(op, "top_p", top_p, logits, torch.float32, rows_name="logits")
    check_parameter(op, "min_p", min_p, logits, torch.float32, rows_name="logits")
