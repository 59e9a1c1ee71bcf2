"""Buffers for tests: poisoned outputs, canaries around them, copies that keep layout and aliasing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

INTEGER_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CANARY_ELEMENTS = 256


def poison(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor of values that no result has: NaN for floats, bytes of 0x7F for FP8 and integers."""
    result = torch.empty(tuple(shape), dtype=dtype, device=device)
    width = result.element_size()
    if dtype.is_floating_point and width > 1:
        return result.fill_(float("nan"))
    if dtype == torch.bool:
        return result.fill_(True)
    result.view(INTEGER_OF_WIDTH[width]).fill_(0x7F)
    return result


def canary(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, Callable[[], None]]:
    """A poisoned tensor in the middle of a larger buffer, and a function that asserts the surroundings untouched."""
    count = torch.Size(shape).numel()
    buffer = torch.empty(count + 2 * _CANARY_ELEMENTS, dtype=dtype, device=device)
    bits = buffer.view(INTEGER_OF_WIDTH[buffer.element_size()])
    bits.fill_(0x5A)
    middle = buffer[_CANARY_ELEMENTS : _CANARY_ELEMENTS + count].view(tuple(shape))
    middle.copy_(poison(shape, dtype, device))

    def assert_intact() -> None:
        before, after = bits[:_CANARY_ELEMENTS], bits[_CANARY_ELEMENTS + count :]
        assert bool((before == 0x5A).all()), "written before the start of the tensor"
        assert bool((after == 0x5A).all()), "written past the end of the tensor"

    return middle, assert_intact


def canaries(
    *specs: tuple[Sequence[int], torch.dtype], device: torch.device | str = "cpu"
) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """One :func:`canary` for each (shape, dtype), and one function that asserts the surroundings of all untouched."""
    made = [canary(shape, dtype, device) for shape, dtype in specs]

    def assert_intact() -> None:
        for index, (tensor, check) in enumerate(made):
            try:
                check()
            except AssertionError as error:
                raise AssertionError(f"buffer {index} of shape {tuple(tensor.shape)}: {error}") from None

    return [tensor for tensor, _ in made], assert_intact


def twins(values: Iterable[Any], device: torch.device | str | None = None) -> list[Any]:
    """The values, with tensors over copies of their whole storages, perhaps on another device.

    Strides, offsets and requires_grad are kept, and views of one storage stay views of one storage. Meta tensors stay
    what they are.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def twin(x: Any) -> Any:
        if isinstance(x, (tuple, list)):
            return type(x)(map(twin, x))
        if not isinstance(x, torch.Tensor) or x.is_meta or x.layout != torch.strided:
            return x
        storage, target = x.untyped_storage(), torch.device(device or x.device)
        if storage.data_ptr() not in storages:
            source = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
            storages[storage.data_ptr()] = source.to(target, copy=True).untyped_storage()
        copy = torch.empty(0, dtype=x.dtype, device=target)
        copy.set_(storages[storage.data_ptr()], x.storage_offset(), x.shape, x.stride())
        return copy.requires_grad_(x.requires_grad)

    return [twin(x) for x in values]


LAYOUTS = ("contiguous", "transposed", "sliced")


def in_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The values of ``x`` with other strides; the last dimension stays contiguous.

    "transposed": the first two of three or more dimensions are stored in exchanged order. "sliced": every row is part
    of a longer one, and the first does not begin where the storage begins.
    """
    if layout == "transposed" and x.ndim > 2:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "contiguous" or x.ndim == 0 or layout == "transposed":
        return x.contiguous()
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 16)
    part = wide[..., 8 : 8 + x.shape[-1]] if x.ndim > 1 else wide[8 : 8 + x.shape[0]]
    return part.copy_(x)
