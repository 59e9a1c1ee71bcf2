"""rms_norm_linear on a GPU: row counts, values and strides that every op must take, and its ranges of equal bits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kestrel_norm import rms_norm_linear
from kestrel_runtime import backend
from kestrel_runtime.testing import (
    ROW_KINDS,
    assert_close_to_f64,
    assert_same_bits,
    canary,
    large_allocation,
    normal,
    rows_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

HALVES = (torch.bfloat16, torch.float16)
TOKENS = (1, 3, 16, 32, 257, 740, 4096)
N, M = 2048, 1000
Tensor = torch.Tensor


def weights(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return normal(N, dtype=dtype, seed=1), normal(M, N, dtype=dtype, scale=N**-0.5, seed=2)


@pytest.mark.parametrize("value", ROW_KINDS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rows_of_any_value(dtype: torch.dtype, tokens: int, value: str) -> None:
    x, (norm_weight, weight) = rows_of(value, normal(tokens, N, dtype=torch.float32), dtype), weights(dtype)
    out, assert_intact = canary((tokens, M), dtype, "cuda")
    rms_norm_linear(x, norm_weight, weight, out=out)
    assert_intact()
    rms = (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    normed = x.double() / rms * norm_weight.double()
    exact = F.linear(normed, weight.double())
    if value == "zero":
        assert not bool(out.any())
    elif tokens > 16 and value != "denormal":
        assert_close_to_f64(out, exact, F.linear(F.rms_norm(x, (N,), norm_weight, 1e-6), weight))
    else:
        info = torch.finfo(dtype)
        step = info.smallest_normal * info.eps * (1 / rms + 1)  # of a norm, or x times the norm's weight, if denormal
        of_norm = (0.51 * info.eps + N * 2.0**-24) * normed.abs() + step
        bound = F.linear(of_norm, weight.double().abs()) + 0.51 * info.eps * exact.abs()
        assert bool(((out.double() - exact).abs() <= bound + info.smallest_normal * info.eps).all())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("tokens", [3, 16, 32, 257, 740])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_inf_and_nan_stay_in_their_row(dtype: torch.dtype, tokens: int, value: float) -> None:
    x, (norm_weight, weight) = normal(tokens, N, dtype=dtype), weights(dtype)
    want = rms_norm_linear(x, norm_weight, weight)
    x[1, 700], x[2] = value, value
    got = rms_norm_linear(x, norm_weight, weight)
    assert bool(got[1:3].isnan().all())  # inf times its rstd, 0
    got[1:3] = want[1:3]
    assert_same_bits(got, want)


@pytest.mark.parametrize(("n", "m"), [(3584, 3584), (3584, 18944), (2048, 1000), (4096, 6144), (8192, 264)])
def test_within_its_ranges_a_row_is_the_same(n: int, m: int) -> None:
    """1 to 8 rows, 9 to 16, 17 to 32, whichever kernel they take."""
    x, norm_weight, weight = normal(32, n), normal(n, seed=1), normal(m, n, scale=n**-0.5, seed=2)
    for first, last in ((1, 8), (9, 16), (17, 32)):
        want = rms_norm_linear(x[:last], norm_weight, weight)
        for tokens in range(first, last):
            assert_same_bits(rms_norm_linear(x[:tokens], norm_weight, weight), want[:tokens], f"{tokens} rows")
            assert_same_bits(rms_norm_linear(x[last - tokens : last], norm_weight, weight), want[-tokens:], "the last")


@pytest.mark.parametrize("tokens", [4, 12, 24, 300])
def test_compiled_without_a_graph_break(tokens: int) -> None:
    torch.compiler.reset()
    x, (norm_weight, weight) = normal(tokens, N), weights(torch.bfloat16)
    with backend("auto"):
        got = torch.compile(lambda x: rms_norm_linear(x, norm_weight, weight), fullgraph=True)(x)
    assert_same_bits(got, rms_norm_linear(x, norm_weight, weight))


@pytest.mark.parametrize("tokens", [4, 12, 24, 300])
def test_runs_on_the_current_stream(tokens: int) -> None:
    x, stream, (norm_weight, weight) = normal(tokens, N), torch.cuda.Stream(), weights(torch.bfloat16)
    want, late, busy = rms_norm_linear(x, norm_weight, weight), torch.zeros_like(x), torch.zeros(1 << 26, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(8):
            busy.add_(1)  # long enough that a launch on another stream would come first
        late.copy_(x)
        got = rms_norm_linear(late, norm_weight, weight)
    stream.synchronize()
    assert_same_bits(got, want)


@large_allocation(gib=6)
@pytest.mark.parametrize("tokens", [3, 12, 24, 400])
def test_rows_beyond_two_to_the_31_elements(tokens: int) -> None:
    stride = 2**31 // (tokens - 1) // 8 * 8 + 8
    x, (norm_weight, weight) = normal(tokens, N), weights(torch.bfloat16)
    want = rms_norm_linear(x, norm_weight, weight)
    buffer = torch.empty((tokens - 1) * stride + N + M, dtype=x.dtype, device="cuda")
    far, out = buffer.as_strided((tokens, N), (stride, 1)), buffer.as_strided((tokens, M), (stride, 1), N)
    far.copy_(x)
    rms_norm_linear(far, norm_weight, weight, out=out)
    assert_same_bits(out.contiguous(), want)


@large_allocation(gib=6)
def test_a_weight_of_more_than_two_to_the_31_elements() -> None:
    outputs, width = 65544, 32776
    weight = normal(64, width, scale=width**-0.5, seed=1).repeat(1025, 1)[:outputs]
    last, norm_weight = weight[-64:], normal(width, seed=2)
    for tokens in (1, 8, 16, 32, 100):
        x = normal(tokens, width)
        got = rms_norm_linear(x, norm_weight, weight)[:, -64:]
        normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm_weight.double()
        own = F.linear(F.rms_norm(x, (width,), norm_weight, 1e-6), last)
        assert_close_to_f64(got, F.linear(normed, last.double()), own)
