"""The dense kernels on a GPU: gated activations, moe_sum, gemv, router_gemm, against float64 and the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

import kestrel_moe
from kestrel_moe.linear import _max_router_tokens
from kestrel_runtime import backend
from kestrel_runtime.testing import (
    assert_close_to_f64,
    assert_waits_for_the_launch_before,
    canary,
    fp8_code_distance,
    graph_replay,
    large_allocation,
    normal,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)
ROWS = (0, 1, 3, 16, 257, 740)
WIDTHS = (1, 7, 8, 60, 1024, 1030, 4096, 5000)
LONG = (16384, 16392, 40001)
Tensor = torch.Tensor


def normal_cdf(h: Tensor) -> Tensor:
    return 0.5 * torch.special.erfc(-h / math.sqrt(2))


def tanh_cdf(h: Tensor) -> Tensor:
    return torch.sigmoid(2 * math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))


GATED: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor], int]] = {
    "gelu_residual": (kestrel_moe.gelu_residual, normal_cdf, 1),
    "gelu_residual tanh": (partial(kestrel_moe.gelu_residual, approximate="tanh"), tanh_cdf, 1),
    "silu_and_mul": (kestrel_moe.silu_and_mul, torch.sigmoid, 0),
    "gelu_and_mul": (kestrel_moe.gelu_and_mul, normal_cdf, 0),
    "gelu_and_mul tanh": (partial(kestrel_moe.gelu_and_mul, approximate="tanh"), tanh_cdf, 0),
}
FP8: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "gelu_residual": kestrel_moe.gelu_residual_fp8,
    "gelu_residual tanh": partial(kestrel_moe.gelu_residual_fp8, approximate="tanh"),
    "silu_and_mul": kestrel_moe.silu_and_mul_fp8,
    "gelu_and_mul": kestrel_moe.gelu_and_mul_fp8,
    "gelu_and_mul tanh": partial(kestrel_moe.gelu_and_mul_fp8, approximate="tanh"),
}
EACH_GATED = pytest.mark.parametrize("name", GATED)


def exactly_gated(name: str, x: Tensor) -> Tensor:
    h, g = x.double().chunk(2, dim=-1)
    return h * GATED[name][1](h) * (g + GATED[name][2])


def composed(name: str, x: Tensor) -> Tensor:
    """PyTorch's own composition in x's dtype."""
    h, g = x.chunk(2, dim=-1)
    if name == "silu_and_mul":
        return torch.nn.functional.silu(h) * g
    return torch.nn.functional.gelu(h, approximate="tanh" if "tanh" in name else "none") * (g + GATED[name][2])


# ---- gated activations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
@EACH_GATED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_rows_are_as_accurate_as_torch_and_stay_in_bounds(name: str, dtype: torch.dtype, rows: int) -> None:
    for width in WIDTHS if rows < 700 else (1024,):
        x = normal(rows, 2 * width, dtype=dtype, scale=3.0)
        out, assert_intact = canary((rows, width), dtype, "cuda")
        assert GATED[name][0](x, out=out) is out
        assert_intact()
        assert_close_to_f64(out, exactly_gated(name, x), composed(name, x))


@pytest.mark.parametrize("name", ["gelu_residual", "silu_and_mul"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_among_few_and_among_many(dtype: torch.dtype, name: str) -> None:
    x = normal(2200, 2048, dtype=dtype)  # beyond 2^18 packs another kernel has them
    out, assert_intact = canary((2200, 1024), dtype, "cuda")
    GATED[name][0](x, out=out)
    assert_intact()
    for start in (0, 1100, 2100):
        assert torch.equal(out[start : start + 100], GATED[name][0](x[start : start + 100]))


@EACH_GATED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_rounding_from_the_far_left_to_the_far_right(name: str, dtype: torch.dtype) -> None:
    h = torch.linspace(-9, 9, 40_000, device="cuda").to(dtype)
    x = torch.stack((h, torch.full_like(h, 1.5)), dim=1)
    got, exact = GATED[name][0](x).double(), exactly_gated(name, x)
    info = torch.finfo(dtype)
    allowed = (0.5 * info.eps + 2.0**-16) * exact.abs() + info.smallest_normal * info.eps + 2.0**-31
    assert bool(((got - exact).abs() <= allowed).all())


@EACH_GATED
def test_nan_and_inf_stay_in_their_row(name: str) -> None:
    x = normal(9, 256)
    alone = GATED[name][0](x)
    x[1, 3], x[2, 200], x[3], x[4, :128], x[5, 5] = math.nan, math.inf, -math.inf, 1e4, math.inf
    got = GATED[name][0](x)
    assert torch.equal(got[[0, 6, 7, 8]], alone[[0, 6, 7, 8]])
    with backend("reference"):
        expected = GATED[name][0](x)
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("rows", "width"), [(0, 64), (1, 1024), (3, 7), (16, 60), (257, 1024), (257, 1030), (740, 4096), (5, 12_000)]
)
@EACH_GATED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_codes_and_scales_are_those_of_the_reference(name: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x = normal(rows, 2 * width, dtype=dtype, scale=2.0)
    if rows > 2:
        x[1], x[2] = 0.0, math.nan
    codes, scale = FP8[name](x)
    with backend("reference"):
        want_codes, want_scale = FP8[name](x)
    torch.testing.assert_close(scale, want_scale, rtol=2**-19, atol=0, equal_nan=True)  # each within 2^-20 of float64
    distance = fp8_code_distance(codes, want_codes)
    assert int(distance.max() if distance.numel() else 0) <= 1
    assert int((distance > 0).sum()) <= max(1, codes.numel() // 10_000)


@pytest.mark.parametrize("width", LONG)
def test_fp8_rows_of_any_length(width: int) -> None:
    x = normal(3, 2 * width)
    codes, scale = kestrel_moe.silu_and_mul_fp8(x)
    exact = exactly_gated("silu_and_mul", x)
    assert bool(((codes.double() * scale - exact).abs() <= scale * 16 * 1.01 + exact.abs() * 2**-4).all())
    out = kestrel_moe.silu_and_mul(x)
    assert_close_to_f64(out, exact, composed("silu_and_mul", x))


def test_strided_batches_and_views() -> None:
    x = normal(6, 40, 2 * 72)
    expected = kestrel_moe.gelu_residual(x.contiguous())
    for view in (x[:, ::3], x[::2, 1:30], x.transpose(0, 1), normal(5, 40, 200)[..., 1:145], normal(144)):
        got = kestrel_moe.gelu_residual(view)
        assert torch.equal(got, kestrel_moe.gelu_residual(view.contiguous().view(-1, 144)).view(got.shape))
    out = torch.empty(40, 6, 72, dtype=x.dtype, device="cuda").transpose(0, 1)
    assert torch.equal(kestrel_moe.gelu_residual(x, out=out), expected)
    one = x[0].clone()
    kestrel_moe.gelu_residual(one, out=one[:, :72])
    assert torch.equal(one[:, :72], expected[0])


# ---- moe_sum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_are_those_of_the_reference_bit_for_bit(dtype: torch.dtype) -> None:
    for tokens, choices, width in ((0, 8, 64), (1, 8, 2048), (3, 1, 7), (16, 9, 2048), (257, 6, 60), (740, 8, 2048),
                                   (5, 0, 32), (4, 40, 1030)):  # fmt: skip
        x = normal(tokens, choices, width, dtype=dtype)
        out, assert_intact = canary((tokens, width), dtype, "cuda")
        kestrel_moe.moe_sum(x, out)
        assert_intact()
        with backend("reference"):
            assert torch.equal(out, kestrel_moe.moe_sum(x))
    wide = normal(20, 8, 300, dtype=dtype)
    for view in (wide[:, ::2, 4:260], wide[..., 1:250], wide.transpose(0, 1)):
        assert torch.equal(kestrel_moe.moe_sum(view), kestrel_moe.moe_sum(view.contiguous()))


# ---- few tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 3, 8, 9, 16, 17, 32, 33, 100])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("outputs", "width"), [(1, 8), (16, 32), (17, 40), (64, 2048), (100, 1000), (4096, 4096)])
def test_few_tokens_are_as_accurate_as_the_vendor_s_product(
    outputs: int, width: int, dtype: torch.dtype, tokens: int
) -> None:
    weight = normal(outputs, width, dtype=dtype, scale=width**-0.5, seed=1)
    bias = normal(outputs, dtype=dtype, seed=2)
    x = normal(tokens, width, dtype=dtype)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    out, assert_intact = canary((tokens, outputs), dtype, "cuda")
    kestrel_moe.gemv(x, weight, bias, out=out)
    assert_intact()
    assert_close_to_f64(out, exact, torch.nn.functional.linear(x, weight) + bias)


ROUTERS = [(1, 8), (8, 4096), (17, 1000), (64, 2048), (128, 2880), (256, 7168), (513, 72), (520, 3000)]


def assert_exact_logits(logits: Tensor, x: Tensor, weight: Tensor) -> None:
    # tensor cores cut their sums off at the 24th bit: at most width / 64 instructions a warp, one such loss each
    product, most = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    allowed = (x.shape[1] / 64 + 16) * 2.0**-23 * most + 1e-30
    assert bool(((logits.double() - product).abs() <= allowed).all())


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 16, 17, 31, 33, 64, 65, 127, 129, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("experts", "width"), ROUTERS)
def test_logits_are_float32_sums_and_a_token_s_are_the_same_in_any_batch(
    experts: int, width: int, dtype: torch.dtype, tokens: int
) -> None:
    most = min(_max_router_tokens(dtype, experts, width), 800)
    weight, x = normal(experts, width, dtype=dtype, seed=1), normal(most, width, dtype=dtype)
    with_all = kestrel_moe.router_gemm(x, weight)
    assert_exact_logits(with_all, x, weight)
    for start in (0, most - tokens) if tokens <= most else ():
        logits, assert_intact = canary((tokens, experts), torch.float32, "cuda")
        kestrel_moe.router_gemm(x[start : start + tokens], weight, out=logits)
        assert_intact()
        assert torch.equal(logits, with_all[start : start + tokens])


@pytest.mark.parametrize("tokens", [1, 5, 16, 20, 70])
def test_logits_of_strided_rows_leave_what_lies_between_them(tokens: int) -> None:
    x, weight = normal(2 * 70, 1024 + 24)[::2, 8:1032], normal(3 * 40, 1024 + 16)[::3, 16:]
    wide, assert_intact = canary((tokens, 47), torch.float32, "cuda")
    kestrel_moe.router_gemm(x[:tokens], weight, out=wide[:, 3:43])
    assert_intact()
    assert bool(wide[:, :3].isnan().all())
    assert bool(wide[:, 43:].isnan().all())
    assert torch.equal(wide[:, 3:43], kestrel_moe.router_gemm(x[:tokens].contiguous(), weight.contiguous()))


@pytest.mark.parametrize("tokens", [3, 12, 60, 300])
def test_nan_and_inf_of_a_token_stay_in_its_logits(tokens: int) -> None:
    x, weight = normal(tokens, 2880), normal(72, 2880, seed=1)
    clean = kestrel_moe.router_gemm(x, weight)
    x[1, 2879], x[2, :] = math.nan, math.inf
    logits = kestrel_moe.router_gemm(x, weight)
    assert bool(logits[1].isnan().all())
    assert not bool(logits[2].isfinite().any())
    assert torch.equal(logits[3:], clean[3:])
    assert torch.equal(logits[0], clean[0])


MANY = [(4096, 2048, 128), (1500, 4096, 8), (1025, 512, 300), (2, 512, 1030), (16, 4096, 2048), (8, 4096, 4096)]


@pytest.mark.parametrize(
    ("tokens", "width", "experts", "dtype"),
    [(*sizes, torch.bfloat16) for sizes in MANY] + [(65, 512, 128, torch.float32)],
)
def test_many_tokens_or_experts_are_the_vendor_s_product_in_float32(
    tokens: int, width: int, experts: int, dtype: torch.dtype
) -> None:
    assert tokens > _max_router_tokens(dtype, experts, width)
    x, weight = normal(tokens, width, dtype=dtype), normal(experts, width, dtype=dtype, seed=1)
    logits, assert_intact = canary((tokens, experts), torch.float32, "cuda")
    kestrel_moe.router_gemm(x, weight, out=logits)
    assert_intact()
    assert_exact_logits(logits, x, weight)
    wide, assert_intact = canary((tokens, experts + 7), torch.float32, "cuda")
    kestrel_moe.router_gemm(x, weight, out=wide[:, 3 : 3 + experts])
    assert_intact()
    assert bool(wide[:, :3].isnan().all())
    assert bool(wide[:, 3 + experts :].isnan().all())
    assert_exact_logits(wide[:, 3 : 3 + experts], x, weight)


def test_gemv_of_a_token_is_the_same_among_any_others() -> None:
    weight, x = normal(70, 1000, seed=1), normal(32, 1000)
    y = torch.cat([kestrel_moe.gemv(x[i : i + 4], weight) for i in range(0, 32, 4)])
    for tokens in (1, 2, 3, 4):
        assert torch.equal(kestrel_moe.gemv(x[5 : 5 + tokens], weight), y[5 : 5 + tokens])
    tall = normal(2100, 1000, seed=3)  # more outputs take other blocks
    y_tall = kestrel_moe.gemv(x[:4], tall)
    assert all(torch.equal(kestrel_moe.gemv(x[i : i + 1], tall)[0], y_tall[i]) for i in range(4))
    x[7] = math.nan
    assert torch.equal(kestrel_moe.gemv(x[4:8], weight)[:3], y[4:7])
    assert torch.equal(kestrel_moe.gemv(x[0], weight), y[0])
    assert torch.equal(kestrel_moe.gemv(x[:12].view(3, 4, 1000)[:, 1], weight), y[1:12:4])


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize(("outputs", "width"), [(1, 4), (17, 40), (64, 2048), (2100, 1000)])
def test_few_tokens_in_float32_are_float32_sums(outputs: int, width: int, tokens: int) -> None:
    weight, bias = normal(outputs, width, dtype=torch.float32, seed=1), normal(outputs, dtype=torch.float32, seed=2)
    x = normal(4, width, dtype=torch.float32)
    out, assert_intact = canary((tokens, outputs), torch.float32, "cuda")
    kestrel_moe.gemv(x[:tokens], weight, bias, out=out)
    assert_intact()
    exact = x[:tokens].double() @ weight.double().T + bias.double()
    magnitude = x[:tokens].double().abs() @ weight.double().abs().T + bias.double().abs()
    # a thread adds up to width / 32 terms in turn, then come five lanes, eight warps and the bias
    assert bool(((out.double() - exact).abs() <= (width / 32 + 14 + 1) * 2.0**-24 * magnitude).all())
    assert torch.equal(out, kestrel_moe.gemv(x, weight, bias)[:tokens])


# ---- every op --------------------------------------------------------------------------------------------------------

CALLS: dict[str, tuple[Callable[..., object], tuple[tuple[int, ...], ...]]] = {
    "gelu_residual": (kestrel_moe.gelu_residual, ((40, 2048),)),
    "silu_and_mul": (kestrel_moe.silu_and_mul, ((40, 2048),)),
    "gelu_and_mul_fp8": (kestrel_moe.gelu_and_mul_fp8, ((40, 2048),)),
    "moe_sum": (kestrel_moe.moe_sum, ((40, 8, 512),)),
    "gemv": (kestrel_moe.gemv, ((4, 512), (64, 512), (64,))),
    "router_gemm": (kestrel_moe.router_gemm, ((40, 2048), (64, 2048))),
    **{  # each kernel of a dense layer
        f"fused_linear_residual {t}": (kestrel_moe.fused_linear_residual, ((t, 512), (64, 512), (64,), (t, 64)))
        for t in (3, 40, 400)
    },
    **{
        f"fused_mlp {t}": (kestrel_moe.fused_mlp, ((t, 512), (320, 512), (320,), (512, 320), (512,), (t, 512)))
        for t in (3, 40, 400)
    },
}
EACH_CALL = pytest.mark.parametrize("name", CALLS)


def arguments(name: str, offset: float = 0.0) -> list[Tensor]:
    return [normal(*shape) + offset for shape in CALLS[name][1]]


def assert_same(got: object, expected: object) -> None:
    for a, b in zip(got, expected, strict=True) if isinstance(got, tuple) else ((got, expected),):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@EACH_CALL
def test_a_replayed_graph_sees_new_contents(name: str) -> None:
    first, second = arguments(name), arguments(name, 0.5)
    expected = CALLS[name][0](*second)
    assert_same(graph_replay(CALLS[name][0], first, second), expected)


@EACH_CALL
def test_runs_and_streams_agree(name: str) -> None:
    call, args = CALLS[name][0], arguments(name)
    expected = call(*args)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = [call(*args) for _ in range(20)]
    stream.synchronize()
    for each in got:
        assert_same(each, expected)


@EACH_CALL
def test_compiled_without_a_graph_break(name: str) -> None:
    torch.compiler.reset()  # the cases share the code below, of which torch compiles no more than eight forms
    call, args = CALLS[name][0], arguments(name)
    assert_same(torch.compile(lambda *a: call(*a), fullgraph=True)(*args), call(*args))


@EACH_CALL
def test_an_input_written_by_the_launch_just_before_is_read_after_the_wait(name: str) -> None:
    """moe_sum, which lets the next kernel start early, writes the input."""
    call, args = CALLS[name][0], arguments(name)
    sources = [torch.stack((args[0], torch.full_like(args[0], i))).view(1, 2, -1) for i in range(7)]

    def chain(i: int, between: Callable[[], None]) -> tuple[Tensor, ...]:
        kestrel_moe.moe_sum(sources[i], args[0].view(1, -1))
        between()
        got = call(*args)
        return got if isinstance(got, tuple) else (got,)

    assert_waits_for_the_launch_before(chain, contents=7)


@large_allocation(gib=5)
@pytest.mark.parametrize("name", ["gelu_residual", "moe_sum", "router_gemm"])
def test_a_row_stride_past_two_to_the_31(name: str) -> None:
    stride = 2**31 + 64
    buffer = torch.empty(stride + 4096, dtype=torch.bfloat16, device="cuda")
    buffer[:4096], buffer[stride:] = normal(4096), normal(4096) + 1
    x = buffer.as_strided((2, 2048), (stride, 1))
    if name == "moe_sum":
        x = buffer.as_strided((2, 4, 512), (stride, 512, 1))
    call, others = CALLS[name][0], arguments(name)[1:]
    assert torch.equal(call(x, *others), call(x.clone(), *others))
    if name == "router_gemm":
        assert torch.equal(call(others[0], x), call(others[0], x.clone()))  # and of the weight
