"""Group sizes of any magnitude, autocast, shared memory, and weights that cannot be packed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kestrel_quant
from kestrel_quant import fp8_dequant, fp8_quant, int4_dequant, int4_quant, int8_dequant, int8_quant, pack_w4
from kestrel_quant.fp8_quant import _fp8_quant, _fp8_quant_static
from kestrel_runtime import Binary, UnsupportedError
from kestrel_runtime.testing import assert_same_bits

X, ONE = torch.linspace(-3, 3, 32).view(2, 16), torch.ones(1)

# -- group sizes ------------------------------------------------------------------------------------------------------

HUGE = [17, 300_000_000, 2**31, 2**62, 2**63 - 1]
GROUPED: dict[str, Callable[[int], Any]] = {
    "fp8_quant": lambda group: fp8_quant(X, granularity="group", group_size=group),
    "fp8_quant, column-major": lambda group: fp8_quant(
        X, granularity="group", group_size=group, column_major_scales=True
    ),
    "int4_quant": lambda group: int4_quant(X, group_size=group),
    "fp8_dequant": lambda group: fp8_dequant(*fp8_quant(X, granularity="group"), group_size=group),
    "int4_dequant": lambda group: int4_dequant(*int4_quant(X), group_size=group),
}


@pytest.mark.parametrize("group", HUGE)
@pytest.mark.parametrize("name", GROUPED)
def test_a_group_larger_than_a_row_is_the_row(name: str, group: int) -> None:
    """It takes no memory: 2^62 elements of padding could not be had."""
    assert_same_bits(GROUPED[name](group), GROUPED[name](16))


@pytest.mark.parametrize("group", HUGE[1:])
def test_no_bytes_have_empty_groups(group: int) -> None:
    codes = torch.zeros(2, 0, dtype=torch.uint8)
    assert int4_dequant(codes, torch.zeros(2, 0), group_size=group).shape == (2, 0)
    assert fp8_dequant(codes.view(torch.float8_e4m3fn), torch.ones(1), group_size=group).shape == (2, 0)


@pytest.mark.parametrize("group", [2**63, 2**70, -(2**63) - 1])
@pytest.mark.parametrize("name", GROUPED)
def test_a_group_beyond_64_bits_is_named(name: str, group: int) -> None:
    op = name.partition(",")[0]
    with pytest.raises(ValueError, match=f"^{op}: argument 'group_size': expected .+, got .+"):
        GROUPED[name](group)


# -- autocast ---------------------------------------------------------------------------------------------------------

W4 = pack_w4(torch.linspace(-1, 1, 96).view(6, 16), 8)
CALLS: dict[str, Callable[[], Any]] = {
    "fp8_quant": lambda: fp8_quant(X),
    "fp8_quant by a scale": lambda: fp8_quant(X, torch.ones(1) / 3),
    "fp8_quant of groups": lambda: fp8_quant(X, granularity="group", group_size=5),
    "int8_quant": lambda: int8_quant(X),
    "int4_quant": lambda: int4_quant(X, group_size=6),
    "fp8_dequant": lambda: (fp8_dequant(*fp8_quant(X), dtype=torch.float32),),
    "int8_dequant": lambda: (int8_dequant(*int8_quant(X), dtype=torch.float32),),
    "int4_dequant": lambda: (int4_dequant(*int4_quant(X), dtype=torch.float32),),
    "w4a16_linear": lambda: (kestrel_quant.w4a16_linear(X, W4, torch.linspace(0, 1, 6)),),
    "W4Weight.dequantize": lambda: (W4.dequantize(),),
    "pack_w4": lambda: (pack_w4(X, 4).codes, pack_w4(X, 4).scales),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_an_op_means_the_same_inside_autocast(name: str, dtype: torch.dtype) -> None:
    want = CALLS[name]()
    with torch.autocast("cpu", dtype):
        got = CALLS[name]()
    assert_same_bits(got, want)


# -- launches ---------------------------------------------------------------------------------------------------------

F8, F32, U8, I8, BF16 = torch.float8_e4m3fn, torch.float32, torch.uint8, torch.int8, torch.bfloat16
LAUNCHES: dict[str, tuple[Any, tuple[Any, ...], list[Any]]] = {  # op, arguments, what the entry point is given
    "rows": (_fp8_quant, (X, "row", 5, None, False), [(F8, 2, 16), (F32, 2, 1), None, X, "row", 5, None, False]),
    "tensor": (
        _fp8_quant, (X, "tensor", 5, None, False), [(F8, 2, 16), (F32, 1), (F32, 512), X, "tensor", 5, None, False]
    ),
    "groups": (_fp8_quant, (X, "group", 5, None, False), [(F8, 2, 16), (F32, 2, 4), None, X, "group", 5, None, False]),
    "column-major groups": (
        _fp8_quant, (X, "group", 6, None, True), [(F8, 2, 16), (F32, 3, 4), None, X, "group", 6, None, True]
    ),
    "a scale": (_fp8_quant_static, (X, ONE), [(F8, 2, 16), X, ONE]),
    "FP8": (fp8_dequant, (X.to(F8), ONE, 5), [(BF16, 2, 16), (F8, 2, 16), ONE, 5]),
    "int8 rows": (int8_quant, (X,), [(I8, 2, 16), (F32, 2, 1), None, X, "row"]),
    "int8 tensor": (int8_quant, (X, "tensor"), [(I8, 2, 16), (F32, 1), (F32, 512), X, "tensor"]),
    "int8": (int8_dequant, (X.to(I8), ONE), [(BF16, 2, 16), (I8, 2, 16), ONE]),
    "int4 groups": (int4_quant, (X, 5), [(U8, 2, 8), (F32, 2, 4), X, 5]),
    "int4": (int4_dequant, (X.to(U8), ONE, 5), [(BF16, 2, 32), (U8, 2, 16), ONE, 5]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_gives_the_entry_point_results_of_the_right_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, arguments, expected = LAUNCHES[name]
    given: list[Any] = []

    class Entries:
        def __getattr__(self, entry: str) -> Any:
            assert entry == op.__name__.lstrip("_")
            return lambda *arguments: given.extend(arguments)

    launch, keywords = op.kernel_op.launch, {}
    if not op.__name__.startswith("_"):  # the options of a public function are keywords
        options = [name for name in inspect.signature(op).parameters if name in ("granularity", "group_size")]
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        keywords, arguments = dict(zip(options, arguments[len(tensors) :], strict=False)), tuple(tensors)
    monkeypatch.setattr(sys.modules[launch.__module__], "kernels", Entries())
    launch(*arguments, **keywords)
    for got, wanted in zip(given, expected, strict=True):
        if isinstance(wanted, tuple):
            assert (got.dtype, *got.shape) == wanted
            assert got.is_contiguous()
        else:
            assert got is wanted or (not isinstance(wanted, torch.Tensor) and got == wanted)


# -- results that share memory ----------------------------------------------------------------------------------------

ROWS = [
    pytest.param((0, 1), id="one row for all"),
    pytest.param((1, 1), id="rows that start one element apart"),
    pytest.param((15, 1), id="rows that share one element"),
]
DEQUANTISATIONS = {
    "fp8_dequant": (fp8_dequant, lambda: fp8_quant(X)),
    "int8_dequant": (int8_dequant, lambda: int8_quant(X)),
    "int4_dequant": (int4_dequant, lambda: int4_quant(X)),
}


@pytest.mark.parametrize("strides", ROWS)
@pytest.mark.parametrize("name", DEQUANTISATIONS)
def test_an_out_whose_rows_overlap_is_refused(name: str, strides: tuple[int, int]) -> None:
    op, quantised = DEQUANTISATIONS[name]
    memory = torch.zeros(64)
    with pytest.raises(ValueError, match=f"{name}: argument 'out': .* whose elements do not share memory"):
        op(*quantised(), dtype=torch.float32, out=memory.as_strided((2, 16), strides))
    assert not memory.any()


@pytest.mark.parametrize("name", DEQUANTISATIONS)
def test_an_out_over_the_codes_is_refused(name: str) -> None:
    op, quantised = DEQUANTISATIONS[name]
    codes, scale = quantised()
    memory = torch.zeros(2, 16)
    inside = memory.view(torch.uint8)[:, : codes.shape[1]]
    inside.copy_(codes.view(torch.uint8))
    before = memory.clone()
    with pytest.raises(ValueError, match=f"{name}: argument 'out': .* shares no memory with 'q'"):
        op(inside.view(codes.dtype), scale, dtype=torch.float32, out=memory)
    assert torch.equal(memory.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("name", DEQUANTISATIONS)
def test_the_entry_point_refuses_an_out_over_the_codes_in_the_same_words(name: str) -> None:
    op, quantised = DEQUANTISATIONS[name]
    try:
        function = Binary("kestrel_quant").function(name)
    except UnsupportedError as error:
        pytest.skip(str(error))
    codes, scale = quantised()
    memory = torch.zeros(2, 16)
    inside = memory.view(torch.uint8)[:, : codes.shape[1]].view(codes.dtype)
    with pytest.raises(ValueError, match="shares no memory") as python:
        op(inside, scale, dtype=torch.float32, out=memory)
    with pytest.raises(ValueError, match="shares no memory") as cpp:
        function(memory, inside, scale, *(() if name == "int8_dequant" else (128,)))
    assert str(cpp.value) == str(python.value)


@pytest.mark.parametrize("strides", ROWS)
def test_a_linear_layer_refuses_an_out_whose_rows_overlap(strides: tuple[int, int]) -> None:
    out = torch.zeros(64).as_strided((2, 6), (min(strides[0], 5), 1))
    with pytest.raises(ValueError, match="w4a16_linear: argument 'out': .* whose elements do not share memory"):
        kestrel_quant.w4a16_linear(X, W4, out=out)


def test_a_linear_layer_refuses_an_out_over_its_input() -> None:
    square = pack_w4(torch.linspace(-1, 1, 256).view(16, 16), 8)
    x = X.clone()
    with pytest.raises(ValueError, match="w4a16_linear: argument 'out': .* shares no memory with 'x'"):
        kestrel_quant.w4a16_linear(x, square, out=x)
    assert torch.equal(x, X)


@pytest.mark.parametrize("scale", [None, torch.ones(1), torch.ones(2, 1)], ids=["computed", "one", "per row"])
def test_messages_name_the_function_that_was_called(scale: torch.Tensor | None) -> None:
    """A given scale is another op inside."""
    with pytest.raises(ValueError, match=r"^fp8_quant: argument 'x': expected .*requires_grad"):
        fp8_quant(X.clone().requires_grad_(), scale)


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(torch.ones(4, 16).to_sparse(), id="sparse"),
        pytest.param(torch.ones(4, 16, device="meta"), id="meta"),
        pytest.param(torch.complex(torch.ones(4, 16), torch.ones(4, 16)).conj().imag, id="negated view"),
    ],
)
def test_a_weight_without_plain_values_is_named(weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"^pack_w4: argument 'weight': expected .+, got .+"):
        pack_w4(weight, 4)


@pytest.mark.parametrize("argument", ["qzeros", "g_idx"])
def test_a_checkpoint_without_values_is_named(argument: str) -> None:
    given: dict[str, Any] = {
        "qweight": torch.zeros(2, 8, dtype=torch.int32, device="meta"),
        "scales": torch.ones(2, 8, device="meta"),
    }
    shape = (2, 1) if argument == "qzeros" else (16,)
    given[argument] = torch.zeros(shape, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=f"^w4_from_gptq: argument '{argument}': expected .+, got device meta"):
        kestrel_quant.w4_from_gptq(**given)
    if argument == "qzeros":
        given["qweight"] = torch.zeros(16, 1, dtype=torch.int32, device="meta")
        with pytest.raises(ValueError, match="^w4_from_awq: argument 'qzeros': expected .+, got device meta"):
            kestrel_quant.w4_from_awq(**given)


def test_weights_compare_by_identity() -> None:
    """Their tensors have no truth value that an equality of fields could use."""
    same, other = pack_w4(X, 4), pack_w4(X, 4)
    assert same == same
    assert same != other
    assert len({same, other}) == 2


def test_a_trained_parameter_is_packed_without_its_gradient() -> None:
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 64).view(4, 16))
    packed = pack_w4(weight, 4)
    assert not packed.scales.requires_grad
    assert torch.equal(packed.dequantize(), pack_w4(weight.detach(), 4).dequantize())
    assert kestrel_quant.w4a16_linear(X, packed).shape == (2, 4)


def test_scales_of_a_checkpoint_are_kept_without_their_gradient() -> None:
    words, zeros = torch.zeros(16, 1, dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    scales = torch.nn.Parameter(torch.ones(2, 8))
    assert not kestrel_quant.w4_from_awq(words, scales, zeros).scales.requires_grad
    assert not kestrel_quant.w4_from_gptq(words.view(2, 8), scales).scales.requires_grad
