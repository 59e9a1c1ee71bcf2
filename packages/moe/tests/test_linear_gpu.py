"""fused_linear_residual and fused_mlp on a GPU, with every kernel: against float64, in bounds, repeatable."""

from __future__ import annotations

import importlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kestrel_moe
from kestrel_moe import linear
from kestrel_moe._dense_plan import Kernel, Plan
from kestrel_quant import pack_w4
from kestrel_runtime import backend
from kestrel_runtime.testing import assert_close_to_f64, canary, graph_replay, large_allocation, normal

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)
COLUMNS = (64, 96, 112, 128, 144, 160, 192, 208, 224, 256)
TILES = (
    *(Plan(Kernel.COOPERATIVE, columns) for columns in COLUMNS),
    *(Plan(Kernel.PING_PONG, columns) for columns in (128, 144, 160)),
)
CLUSTERS = (
    (1, 1, 1),
    (2, 1, 1),
    (1, 2, 1),
    (2, 2, 1),
    (4, 1, 1),
    (1, 4, 1),
    (1, 1, 2),
    (2, 1, 2),
    (1, 2, 2),
    (2, 2, 2),
)
PLANS = [
    tile._replace(cluster_rows=rows, cluster_columns=columns, splits=splits)
    for tile in TILES
    for rows, columns, splits in CLUSTERS
    if (tile.kernel == Kernel.COOPERATIVE or splits == 1) and tile.columns % (8 * rows) == 0
] + [Plan(Kernel.STREAM, splits=splits) for splits in (1, 2, 3, 5, 8)]
VENDOR_EPILOGUE = Plan(Kernel.VENDOR_EPILOGUE)
PLANS.append(VENDOR_EPILOGUE)
# One CTA's tile and less; more tiles than CTAs; K of one step and of many; ends of K and N within a tile.
SIZES = [
    *((5, 8, 8), (16, 1000, 1160), (27, 4304, 392), (129, 200, 200), (300, 4304, 72)),
    *((729, 1152, 1152), (1000, 1000, 4304), (2900, 1160, 1000)),
]
Tensor = torch.Tensor


def layer(tokens: int, width: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weight = normal(outputs, width, dtype=dtype, scale=max(width, 1) ** -0.5, seed=1)
    return (
        normal(tokens, width, dtype=dtype),
        weight,
        normal(outputs, dtype=dtype, seed=2),
        normal(tokens, outputs, dtype=dtype, seed=3),
    )


def gelu(h: Tensor, activation: str) -> Tensor:
    return F.gelu(h, approximate="tanh" if activation == "gelu_tanh" else "none")


def of_layers(args: tuple[Tensor | None, ...], activation: str) -> Tensor:
    x, w1, b1, w2, b2, residual = args
    y = F.linear(gelu(F.linear(x, w1, b1), activation), w2, b2)
    return y if residual is None else y + residual


def double(args: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if a is None else a.double() for a in args)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_tile_and_cluster_is_as_accurate_as_torch(
    dtype: torch.dtype, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("tiles are for an H100 or H200")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError(f"the vendor's product ran in place of {plan}")

    by_vendor = linear.by_vendor
    monkeypatch.setattr(linear, "choose", lambda x, outputs, width: plan)
    for tokens, outputs, width in SIZES:
        uncovered = plan.kernel != Kernel.STREAM and plan.splits > -(-width // 64)  # one step of K for two CTAs
        monkeypatch.setattr(linear, "by_vendor", by_vendor if uncovered else refuse)
        x, weight, bias, residual = layer(tokens, width, outputs, dtype)
        exact = F.linear(x.double(), weight.double(), bias.double()) + residual.double()
        out, assert_intact = canary((tokens, outputs), dtype, "cuda")
        kestrel_moe.fused_linear_residual(x, weight, bias, residual, out=out)
        assert_intact()
        assert_close_to_f64(out, exact, F.linear(x, weight, bias) + residual)
        assert torch.equal(kestrel_moe.fused_linear_residual(x, weight, bias, residual), out)
        kestrel_moe.fused_linear_residual(x, weight, bias, residual, out=residual)
        assert torch.equal(residual, out)


@pytest.mark.parametrize("tokens", [0, 1, 3, 16, 40, 200, 700, 4100])
@pytest.mark.parametrize(("outputs", "width", "group"), [(1024, 2048, 128), (264, 1088, 64), (24, 96, 96)])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_4_bit_layer_is_as_accurate_as_torch(
    dtype: torch.dtype, outputs: int, width: int, group: int, tokens: int
) -> None:
    x, weight, bias, residual = layer(tokens, width, outputs, dtype)
    for symmetric, with_bias in ((True, False), (False, True)):
        w, b = pack_w4(weight, group, symmetric=symmetric), bias if with_bias else None
        values = replace(w, scales=w.scales.float()).dequantize().double()
        exact = F.linear(x.double(), values, None if b is None else b.double()) + residual.double()
        out, assert_intact = canary((tokens, outputs), dtype, "cuda")
        assert kestrel_moe.fused_linear_residual(x, w, b, residual, out=out) is out
        assert_intact()
        assert_close_to_f64(out, exact, F.linear(x, values.to(dtype), b) + residual)
        total = residual.clone()
        kestrel_moe.fused_linear_residual(x, w, b, total, out=total)
        assert torch.equal(total, out)
        assert torch.equal(kestrel_moe.fused_linear_residual(x[:, None], w, b, residual[:, None])[:, 0], out)


@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
def test_a_4_bit_layer_compiles_and_is_captured(tokens: int) -> None:
    torch.compiler.reset()
    x, weight, _, residual = layer(tokens, 2048, 1024, torch.bfloat16)
    w, new = pack_w4(weight), [normal(tokens, size, dtype=torch.bfloat16, seed=7) for size in (2048, 1024)]
    with backend("auto"):
        compiled = torch.compile(lambda x, r: kestrel_moe.fused_linear_residual(x, w, None, r), fullgraph=True)
        got = compiled(x, residual)
    assert torch.equal(got, kestrel_moe.fused_linear_residual(x, w, None, residual))
    got = graph_replay(lambda x, r: kestrel_moe.fused_linear_residual(x, w, None, r), [x, residual], new)
    assert torch.equal(got, kestrel_moe.fused_linear_residual(new[0], w, None, new[1]))


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 5, 16, 33, 64, 129, 257, 1030])
@pytest.mark.parametrize(("width", "inner"), [(8, 8), (40, 24), (33, 7), (1152, 4304), (2048, 512), (72, 1000)])
@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_mlp_is_as_accurate_as_torch(
    dtype: torch.dtype, activation: str, width: int, inner: int, tokens: int
) -> None:
    x, w1, b1, _ = layer(tokens, width, inner, dtype)
    _, w2, b2, residual = layer(tokens, inner, width, dtype)
    for args in ((x, w1, b1, w2, b2, residual), (x, w1, None, w2, None, None), (x, w1, None, w2, b2, residual)):
        out, assert_intact = canary((tokens, width), dtype, "cuda")
        assert kestrel_moe.fused_mlp(*args, activation=activation, out=out) is out
        assert_intact()
        baseline = of_layers(args, activation)
        if dtype == torch.float32:  # the order of sums decides
            bound = (inner + width) * 2.0**-22
            torch.testing.assert_close(out, of_layers(double(args), activation).float(), rtol=bound, atol=bound)
        else:
            assert_close_to_f64(out, of_layers(double(args), activation), baseline)
        assert torch.equal(kestrel_moe.fused_mlp(*args, activation=activation), out)


@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("activation", "by_torch"), [("gelu_tanh", 0), ("gelu", 2)])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_vendor_s_product_has_an_epilogue_but_for_gelu_with_erf(
    dtype: torch.dtype,
    activation: str,
    by_torch: int,
    with_bias: bool,
    with_residual: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("chosen on an H100 or H200")
    module = importlib.import_module("kestrel_moe.fused_mlp")
    layers = []

    def by_vendor(*args: Any, **more: Any) -> None:
        layers.append(args)
        linear.by_vendor(*args, **more)

    monkeypatch.setattr(module, "choose", lambda *_: VENDOR_EPILOGUE)
    monkeypatch.setattr(module, "by_vendor", by_vendor)
    for tokens, width, inner in ((33, 1152, 4304), (300, 72, 200), (1030, 512, 1000)):
        layers.clear()
        x, w1, b1, _ = layer(tokens, width, inner, dtype)
        _, w2, b2, residual = layer(tokens, inner, width, dtype)
        args = (x, w1, b1 if with_bias else None, w2, b2 if with_bias else None, residual if with_residual else None)
        out, assert_intact = canary((tokens, width), dtype, "cuda")
        kestrel_moe.fused_mlp(*args, activation=activation, out=out)
        assert_intact()
        assert_close_to_f64(out, of_layers(double(args), activation), of_layers(args, activation))
        assert len(layers) == by_torch


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_vendor_s_epilogue_gives_the_same_bits_for_any_strides(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("chosen on an H100 or H200")
    monkeypatch.setattr(linear, "choose", lambda x, outputs, width: VENDOR_EPILOGUE)
    x, weight, bias, residual = layer(700, 520, 264, dtype)
    expected = kestrel_moe.fused_linear_residual(x, weight, bias, residual)
    far_x = torch.empty(1400, 1000, dtype=dtype, device="cuda")[::2, 8:528]
    far_weight = torch.empty(264, 600, dtype=dtype, device="cuda")[:, 8:528]
    far_x.copy_(x)
    far_weight.copy_(weight)
    out, assert_intact = canary((700, 304), dtype, "cuda")
    got = kestrel_moe.fused_linear_residual(far_x, far_weight, bias, residual, out=out[:, 16:280])
    assert_intact()
    assert torch.equal(got, expected)
    assert bool(out[:, :16].isnan().all())
    assert bool(out[:, 280:].isnan().all())


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_vendor_s_epilogue_rounds_once_where_the_result_is_the_residual(
    dtype: torch.dtype, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("chosen on an H100 or H200")
    monkeypatch.setattr(linear, "choose", lambda x, outputs, width: VENDOR_EPILOGUE)
    monkeypatch.setattr(linear, "by_vendor", None)
    for tokens, width, outputs in ((64, 3584, 3584), (700, 520, 264), (33, 4304, 1152), (1458, 1152, 1152)):
        x, weight, bias, residual = layer(tokens, width, outputs, dtype)
        bias = bias if with_bias else None
        expected = kestrel_moe.fused_linear_residual(x, weight, bias, residual)
        out, assert_intact = canary((tokens, outputs), dtype, "cuda")
        out.copy_(residual)
        kestrel_moe.fused_linear_residual(x, weight, bias, out, out=out)
        assert_intact()
        assert torch.equal(out, expected)


def test_a_product_beyond_the_largest_number_may_be_within_it_after_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("chosen on an H100 or H200")
    monkeypatch.setattr(linear, "choose", lambda x, outputs, width: VENDOR_EPILOGUE)
    x = 2 * torch.eye(64, dtype=torch.float16, device="cuda")
    weight, out = torch.full_like(x, 65504), torch.full_like(x, -65504)
    kestrel_moe.fused_linear_residual(x, weight, None, out, out=out)
    assert torch.equal(out, weight)  # 2 * 65504 - 65504


@pytest.mark.parametrize("in_place", [True, False])
def test_threads_with_streams_of_their_own_get_their_own_bias_and_residual(
    in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("chosen on an H100 or H200")
    monkeypatch.setattr(linear, "choose", lambda x, outputs, width: VENDOR_EPILOGUE)
    monkeypatch.setattr(linear, "by_vendor", None)
    x, weight, _, _ = layer(257, 512, 264, torch.bfloat16)
    biases = [normal(264, seed=seed) for seed in range(12)]
    residuals = [normal(257, 264, seed=50 + seed) for seed in range(12)]
    expected = [
        kestrel_moe.fused_linear_residual(x, weight, bias, residual)
        for bias, residual in zip(biases, residuals, strict=True)
    ]
    torch.cuda.synchronize()

    def results(first: int) -> list[tuple[int, Tensor]]:
        stream, found = torch.cuda.Stream(), []
        with torch.cuda.stream(stream):
            for turn in range(40):
                number = (first + turn * 5) % 12
                residual = residuals[number].clone() if in_place else residuals[number]
                out = residual if in_place else None
                got = kestrel_moe.fused_linear_residual(x, weight, biases[number], residual, out=out)
                found.append((number, got))
        stream.synchronize()
        return found

    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(results, range(4)):
            for number, got in found:
                assert torch.equal(got, expected[number])


def test_a_captured_product_keeps_the_bias_that_it_was_captured_with(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("chosen on an H100 or H200")
    monkeypatch.setattr(linear, "choose", lambda x, outputs, width: VENDOR_EPILOGUE)
    monkeypatch.setattr(linear, "by_vendor", None)
    x, weight, bias, residual = layer(257, 512, 264, torch.bfloat16)
    other = normal(264, seed=7)
    expected = kestrel_moe.fused_linear_residual(x, weight, bias, residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kestrel_moe.fused_linear_residual(x, weight, bias, residual)
    kestrel_moe.fused_linear_residual(x, weight, other, residual)
    graph.replay()
    assert torch.equal(out, expected)


FIRST_CALL_IN_A_CAPTURE = """
import torch, kestrel_moe
from kestrel_moe import linear
from kestrel_moe._dense_plan import Kernel, Plan
linear.choose = lambda x, outputs, width: Plan(Kernel.VENDOR_EPILOGUE)
linear.by_vendor = None
x, weight, residual = (torch.ones(size, dtype=torch.bfloat16, device="cuda") for size in ((64, 64), (64, 64), (64, 64)))
graph, out = torch.cuda.CUDAGraph(), torch.zeros_like(residual)
with torch.cuda.graph(graph):
    kestrel_moe.fused_linear_residual(x, weight, None, residual, out=out)
graph.replay()
assert bool((out == 65).all())
"""


def test_the_first_call_of_the_vendor_s_epilogue_may_be_captured() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("chosen on an H100 or H200")
    subprocess.run([sys.executable, "-c", FIRST_CALL_IN_A_CAPTURE], check=True)


@pytest.mark.parametrize("tokens", [1, 3, 40, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows_and_rows_that_are_not_aligned(dtype: torch.dtype, tokens: int) -> None:
    x, weight = normal(2 * tokens, 600, dtype=dtype), normal(3 * 64, 600, dtype=dtype, scale=0.05, seed=1)
    residual = normal(tokens, 200, dtype=dtype, seed=2)
    for start in (0, 8, 3):  # from 3 on nothing is aligned
        views = x[::2, start : start + 512], weight[::3, start : start + 512], None, residual[:, start : start + 64]
        expected = kestrel_moe.fused_linear_residual(*(None if v is None else v.contiguous() for v in views))
        wide, assert_intact = canary((tokens, 104), dtype, "cuda")
        out = wide[:, start : start + 64]
        kestrel_moe.fused_linear_residual(*views, out=out)
        assert_intact()
        assert bool(wide[:, :start].isnan().all())
        assert bool(wide[:, start + 64 :].isnan().all())
        x_rows, weight_rows, _, residual_rows = views
        exact = F.linear(x_rows.double(), weight_rows.double()) + residual_rows.double()
        if dtype == torch.float32:  # sums in any order
            largest = F.linear(x_rows.double().abs(), weight_rows.double().abs()) + residual_rows.double().abs()
            assert bool(((out.double() - exact).abs() <= 513 * 2.0**-24 * largest).all())
        else:
            assert_close_to_f64(out, exact, F.linear(x_rows, weight_rows) + residual_rows)
        if start != 3:
            assert torch.equal(out, expected)


def test_leading_dimensions_and_one_row_for_all_tokens() -> None:
    x, weight, bias, residual = layer(6 * 20, 512, 64, torch.bfloat16)
    expected = kestrel_moe.fused_linear_residual(x, weight, bias, residual)
    for shape in ((6, 20), (2, 3, 20)):
        got = kestrel_moe.fused_linear_residual(x.view(*shape, 512), weight, bias, residual.view(*shape, 64))
        assert torch.equal(got, expected.view(*shape, 64))
    swapped = x.view(6, 20, 512).transpose(0, 1), residual.view(6, 20, 64).transpose(0, 1)
    assert torch.equal(
        kestrel_moe.fused_linear_residual(swapped[0], weight, bias, swapped[1]),
        expected.view(6, 20, 64).transpose(0, 1),
    )
    row = kestrel_moe.fused_linear_residual(x[:1].expand(30, 512), weight, bias, residual[:1].expand(30, 64))
    assert bool((row == row[0]).all())


@pytest.mark.parametrize("tokens", [3, 100, 800])
def test_nan_and_inf_of_a_token_stay_in_its_row(tokens: int) -> None:
    x, w1, b1, _ = layer(tokens, 512, 1024, torch.bfloat16)
    _, w2, b2, residual = layer(tokens, 1024, 512, torch.bfloat16)
    clean = kestrel_moe.fused_mlp(x, w1, b1, w2, b2, residual)
    x[1, 511], x[2, :] = float("nan"), float("inf")
    got = kestrel_moe.fused_mlp(x, w1, b1, w2, b2, residual)
    assert bool(got[1].isnan().all())
    assert not bool(got[2].isfinite().any())
    assert torch.equal(got[3:], clean[3:])
    assert torch.equal(got[0], clean[0])


@pytest.mark.parametrize("overlap", ["x", "residual"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_result_that_overlaps_an_input_is_refused(dtype: torch.dtype, overlap: str) -> None:
    x, w1, b1, _ = layer(40, 64, 64, dtype)
    shared = normal(41, 64, dtype=dtype)
    args: dict[str, Any] = {"x": x, "w1": w1, "b1": b1, "w2": w1, "b2": b1, "residual": x.clone()}
    args[overlap] = shared[:40]
    before = shared.clone()
    with pytest.raises(ValueError, match=f"shares no memory with '{overlap}'"):
        kestrel_moe.fused_mlp(**args, out=shared[1:])
    assert torch.equal(shared, before)


@pytest.mark.parametrize("tokens", [3, 40, 400])
def test_a_bias_may_start_anywhere(tokens: int) -> None:
    x, weight, _, residual = layer(tokens, 512, 64, torch.bfloat16)
    for start in (1, 4):
        bias = normal(64 + start, seed=2)[start:]
        exact = F.linear(x.double(), weight.double(), bias.double()) + residual.double()
        got = kestrel_moe.fused_linear_residual(x, weight, bias, residual)
        assert_close_to_f64(got, exact, F.linear(x, weight, bias) + residual)


@large_allocation(gib=5)
@pytest.mark.parametrize("tokens", [3, 400])
def test_rows_beyond_two_to_the_31_elements(tokens: int) -> None:
    stride = 2**31 // (tokens - 1) // 8 * 8 + 8
    x, weight, bias, residual = layer(tokens, 512, 64, torch.bfloat16)
    expected = kestrel_moe.fused_linear_residual(x, weight, bias, residual)
    buffer = torch.empty((tokens - 1) * stride + 640, dtype=x.dtype, device="cuda")
    far_x, far_residual, out = (
        buffer.as_strided((tokens, columns), (stride, 1), start) for columns, start in ((512, 0), (64, 512), (64, 576))
    )
    far_x.copy_(x), far_residual.copy_(residual)
    kestrel_moe.fused_linear_residual(far_x, weight, bias, far_residual, out=out)
    assert torch.equal(out, expected)
