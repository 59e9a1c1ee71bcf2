"""Linear layers with 4-bit weights on a GPU: numbers of rows, values and strides that every op must take."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from w4_cases import exact_weight, random, weight

from kestrel_quant import W4Weight, w4a16_linear, w4a16_token
from kestrel_quant._w4_plan import plan
from kestrel_runtime import backend
from kestrel_runtime.testing import (
    ROW_KINDS,
    assert_close_to_f64,
    assert_same_bits,
    canary,
    large_allocation,
    rows_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

HALVES = (torch.bfloat16, torch.float16)
# One token, few, a tile of wgmma, persistent CTAs, and more tokens than the kernels take.
TOKENS = (1, 3, 16, 40, 257, 740, 4096, 4100)


VALUES = pytest.mark.parametrize("value", ROW_KINDS)


def assert_within(got: torch.Tensor, x: torch.Tensor, w: W4Weight, bias: torch.Tensor | None = None) -> None:
    """Each weight rounded to x's dtype, but by w4a16_kernel; float32 sums, one rounding of the result.

    Where weights are rounded, sums of products with a symmetric bf16 weight may be kept at 2^-40 of their size: what is
    below 2^-86 loses bits.
    """
    dense, eps = exact_weight(w), torch.finfo(got.dtype).eps
    exact = F.linear(x.double(), dense, None if bias is None else bias.double())
    magnitude = F.linear(x.double().abs(), dense.abs(), None if bias is None else bias.double().abs())
    sms = (
        torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.get_device_capability() == (9, 0) else 0
    )
    rounds = plan(len(x), *w.shape, sms).kernel != "mma"  # weights
    scaled = rounds and w.zeros is None and got.dtype == torch.bfloat16  # sums, by 2^-40
    least = 2.0**-86 if scaled else torch.finfo(got.dtype).smallest_normal * eps
    fits = exact.abs() < 0.99 * torch.finfo(got.dtype).max
    bound = (0.5 * eps * rounds + x.shape[1] * 2.0**-23) * magnitude + 0.51 * eps * exact.abs()
    excess = (got.double() - exact).abs() - bound
    assert bool(fits.any())
    assert float(excess[fits].max()) <= least


@VALUES
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    ("dtype", "symmetric"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True)]
)
def test_rows_of_any_value(dtype: torch.dtype, symmetric: bool, tokens: int, value: str) -> None:
    w = weight(1000, 2048, 128, dtype, symmetric)
    x = rows_of(value, random(tokens, 2048, dtype=torch.float32, seed=tokens), dtype)
    out, assert_intact = canary((tokens, 1000), dtype, "cuda")
    w4a16_linear(x, w, out=out)
    assert_intact()
    assert_within(out, x, w)
    if value == "zero":
        assert not bool(out.any())


@VALUES
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_token_of_any_value(dtype: torch.dtype, value: str) -> None:
    w, bias = weight(1008, 2048, 128, dtype), random(1008, dtype=dtype)
    x = rows_of(value, random(1, 2048, dtype=torch.float32, seed=1), dtype)
    out, assert_intact = canary((1, 1008), dtype, "cuda")
    w4a16_token(x, w, bias, out=out)
    assert_intact()
    assert_within(out, x, w, bias)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("tokens", [3, 16, 40, 257, 740, 4100])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_inf_and_nan_stay_in_their_row(dtype: torch.dtype, tokens: int, value: float) -> None:
    w, x = weight(1000, 2048, 128, dtype), random(tokens, 2048, dtype=dtype)
    want = w4a16_linear(x, w)
    x[1, 700], x[2] = value, value
    got = w4a16_linear(x, w)
    assert not bool(got[1:3].isfinite().any())
    assert bool(got[2].isnan().all())  # of infinities with both signs
    got[1:3] = want[1:3]
    assert_same_bits(got, want)


@pytest.mark.parametrize("shape", [(0, 1024), (0, 3, 1024), (2, 0, 1024)], ids=str)
@pytest.mark.parametrize("op", [w4a16_linear, w4a16_token], ids=lambda op: op.__name__)
def test_no_rows_give_an_empty_result(op: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> None:
    w = weight(256, 1024, 128, torch.bfloat16)
    got = op(torch.empty(shape, dtype=torch.bfloat16, device="cuda"), w)
    assert got.shape == (*shape[:-1], 256)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_leading_dimensions_that_do_not_merge(dtype: torch.dtype) -> None:
    w, x = weight(264, 1024, 128, dtype), random(5, 40, 1024, dtype=dtype).transpose(0, 1)
    assert_same_bits(w4a16_linear(x, w), w4a16_linear(x.contiguous(), w))
    out = torch.empty(5, 40, 264, dtype=dtype, device="cuda").transpose(0, 1)
    assert w4a16_linear(x, w, out=out) is out
    assert_same_bits(out.contiguous(), w4a16_linear(x.contiguous(), w))


EACH_KERNEL = pytest.mark.parametrize(
    ("op", "tokens"), [(w4a16_token, 1), *((w4a16_linear, tokens) for tokens in (1, 40, 100, 300, 4100))]
)


@EACH_KERNEL
def test_compiled_without_a_graph_break(op: Callable[..., torch.Tensor], tokens: int) -> None:
    torch.compiler.reset()  # the cases share the code below, of which torch compiles no more than eight forms
    w, x, bias = weight(1024, 2048, 128, torch.bfloat16), random(tokens, 2048), random(1024, seed=1)
    with backend("auto"):
        got = torch.compile(lambda x: op(x, w, bias), fullgraph=True)(x)
    assert_same_bits(got, op(x, w, bias))


@EACH_KERNEL
def test_runs_on_the_current_stream(op: Callable[..., torch.Tensor], tokens: int) -> None:
    w, x, stream = weight(1024, 2048, 128, torch.bfloat16), random(tokens, 2048), torch.cuda.Stream()
    want, late = op(x, w), torch.zeros_like(x)
    busy = torch.zeros(1 << 26, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(8):
            busy.add_(1)  # long enough that a launch on another stream would come first
        late.copy_(x)
        got = op(late, w)
    stream.synchronize()
    assert_same_bits(got, want)


@large_allocation(gib=6)
@pytest.mark.parametrize("tokens", [3, 24, 40, 130, 400, 4100])
def test_rows_beyond_two_to_the_31_elements(tokens: int) -> None:
    n, k = 1024, 2048
    stride = 2**31 // (tokens - 1) // 8 * 8 + 8
    w, x = weight(n, k, 128, torch.bfloat16), random(tokens, k)
    want = w4a16_linear(x, w)
    assert_close_to_f64(want, F.linear(x.double(), exact_weight(w)), F.linear(x, exact_weight(w).bfloat16()))
    buffer = torch.empty((tokens - 1) * stride + n + k, dtype=torch.bfloat16, device="cuda")
    far, out = buffer.as_strided((tokens, k), (stride, 1)), buffer.as_strided((tokens, n), (stride, 1), k)
    far.copy_(x)
    w4a16_linear(far, w, out=out)
    assert_same_bits(out.contiguous(), want)


@large_allocation(gib=8)
def test_a_weight_of_more_than_two_to_the_31_elements() -> None:
    n, k = 65552, 32896
    g = torch.Generator("cuda").manual_seed(0)
    codes = torch.randint(-(2**31), 2**31, (n // 16, k // 64, 32, 4), generator=g, device="cuda", dtype=torch.int32)
    scales = ((torch.rand(k // 128, n, generator=g, device="cuda") + 0.5) / 1024).bfloat16()
    w = W4Weight(codes, scales, (n, k), 128, None, None)
    last = W4Weight(codes[-4:], scales[:, -64:].contiguous(), (64, k), 128, None, None)
    dense = exact_weight(last)
    for tokens in (1, 16, 24, 64, 200, 400, 4100):
        x = random(tokens, k)
        got = w4a16_linear(x, w)[:, -64:]
        assert_close_to_f64(got, F.linear(x.double(), dense), F.linear(x, dense.bfloat16()))
        del got
    got = w4a16_token(random(1, k), w)[:, -64:]
    assert_close_to_f64(got, F.linear(random(1, k).double(), dense), F.linear(random(1, k), dense.bfloat16()))
