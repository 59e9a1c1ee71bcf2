"""The kernels of w4a16_linear on a GPU, against float64, and what they promise about bits."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from w4_cases import random
from w4_cases import weight as of_size

from kestrel_quant import W4Weight, pack_w4, reference, w4a16_linear
from kestrel_quant._launch import kernels
from kestrel_quant._w4_layout import unpack_codes
from kestrel_quant._w4_plan import MAX_STREAM_CTAS, PAIR_TILES, STREAM_TILES, TILES, Plan, Tile, plan
from kestrel_quant.w4a16 import from_codes
from kestrel_runtime import UnsupportedError, backend
from kestrel_runtime.testing import (
    assert_close_to_f64,
    assert_runs_repeat,
    assert_same_bits,
    assert_waits_for_the_launch_before,
    canary,
    graph_replay,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

# N, K, G: partial tiles of rows and of K, one group, groups across pipeline stages, one step for many slices of K.
SHAPES = [
    (8, 8, 8),
    (136, 192, 32),
    (1000, 1088, 64),
    (264, 1024, 256),
    (4304, 1152, 1152),
    (1152, 4304, 4304),
    (256, 512, 128),
    (4096, 1024, 32),
    (4096, 4096, 128),
    (14336, 512, 128),
]

module = importlib.import_module("kestrel_quant.w4a16")
# Each tile without slices of K, with a cluster of two, and with three slices and a second kernel; clusters of eight.
# Each tile of persistent CTAs: few, which share tiles or have several, and as many as there can be. Each tile of pairs.
FORMS = (
    {"mma": Plan("mma")}
    | {
        f"{tile.tokens}x{tile.rows} {splits}": Plan("wgmma", number, splits, scratch=int(splits == 3))
        for number, tile in enumerate(TILES)
        for splits in ((1, 2, 3, 8) if tile.ctas == 2 else (1, 2, 3))
    }
    | {
        f"stream {tile.tokens}x{tile.rows} {ctas}": Plan("stream", number, ctas=ctas)
        for number, tile in enumerate(STREAM_TILES)
        for ctas in (15, 113, MAX_STREAM_CTAS)
    }
    | {
        f"pairs {tile.tokens}x{tile.rows}x{tile.step}": Plan("pairs", number, 2)
        for number, tile in enumerate(PAIR_TILES)
    }
)
FORCED = {
    name: of
    for name, of in FORMS.items()
    if of.kernel == "mma"
    or (of.kernel == "wgmma" and of.splits == 2 + of.tile % 2)
    or of.ctas == (15, 113)[of.tile % 2]
    or of.kernel == "pairs"
}


def tile_of(forced: Plan) -> Tile:
    return {"wgmma": TILES, "stream": STREAM_TILES, "pairs": PAIR_TILES}[forced.kernel][forced.tile]


def run_as_planned(by: Callable[[int, int, int, int], Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """`by` plans the calls, and the vendor's GEMM runs only where it is the plan."""
    dequant, planned = kernels.w4_dequant, [""]

    def noted(t: int, n: int, k: int, sms: int) -> Plan:
        chosen = by(t, n, k, sms)
        planned[0] = chosen.kernel
        return chosen

    def of_vendor(*arguments: Any) -> None:
        if planned[0] != "vendor":
            pytest.fail(f"the vendor's GEMM runs in place of {planned[0]}")
        dequant(*arguments)

    monkeypatch.setattr(module, "plan", noted)
    monkeypatch.setattr(kernels, "w4_dequant", of_vendor)


def force(of: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel runs, whatever the shape. "mma": up to 128 tokens, and then the vendor's GEMM."""
    if of.kernel == "mma":
        run_as_planned(lambda t, n, k, _: plan(t, n, k, 0), monkeypatch)
        return
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is of sm_90")
    tile = tile_of(of)

    def chosen(t: int, n: int, k: int, sms: int) -> Plan:
        if of.kernel == "pairs" and k > tile.step:
            return of._replace(ctas=2 * -(-t // tile.tokens) * -(-n // tile.rows))
        if of.kernel == "pairs":  # a single step of K: another kernel
            return Plan("wgmma", min(of.tile, len(TILES) - 1))
        if of.kernel == "stream":
            ctas = min(of.ctas, sms)
            return of._replace(ctas=ctas, scratch=MAX_STREAM_CTAS + ctas * tile.tokens * tile.rows)
        floats = -(-t // tile.tokens) * tile.tokens * -(-n // tile.rows) * tile.rows * of.splits
        return of._replace(scratch=floats if of.scratch else 0)

    run_as_planned(chosen, monkeypatch)


@pytest.fixture(params=FORCED.values(), ids=FORCED)
def forced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The kernel that runs: each tile once."""
    of: Plan = request.param
    force(of, monkeypatch)
    return of


def tokens_of(forced: Plan) -> tuple[int, ...]:
    """Numbers of tokens around the limits of a tile, or of the kernels' ranges."""
    if forced.kernel == "mma":
        return (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 300)
    of_tile = tile_of(forced).tokens
    return (1, of_tile - 1, of_tile + 1)


def ranges_of_same_bits(forced: Plan) -> list[range]:
    if forced.kernel == "mma":  # without wgmma: of few rows on Hopper, 1 to 16
        return [range(1, 17), range(17, 65), range(65, 129)]
    of_tile = tile_of(forced).tokens
    return [range(1 + first, 1 + first + of_tile) for first in (0, of_tile, 2 * of_tile)]


weight = partial(of_size, size=1 / 64)


@pytest.mark.parametrize("of", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("dtype", "symmetric"), [(torch.bfloat16, True), (torch.float16, False)], ids=str)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_linear_is_as_close_as_torch(
    monkeypatch: pytest.MonkeyPatch, of: Plan, n: int, k: int, group: int, dtype: torch.dtype, symmetric: bool
) -> None:
    force(of, monkeypatch)
    w = weight(n, k, group, dtype, symmetric)
    exact_weight = reference.w4_dequant(w.codes, w.scales, w.zeros, group, torch.float32).double()
    tokens = tokens_of(of)
    x, bias = random(max(tokens), k, dtype=dtype), None if symmetric else random(n, dtype=dtype)
    exact = F.linear(x.double(), exact_weight, None if bias is None else bias.double())
    baseline = F.linear(x, exact_weight.to(dtype), bias)
    for t in tokens:
        out, assert_intact = canary((t, n), dtype, "cuda")
        assert w4a16_linear(x[:t], w, bias, out=out) is out
        assert_close_to_f64(out, exact[:t], baseline[:t])
        assert_intact()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("scale", "of_x"), [(4364.0, 2.0**-16), (2.0**-24, 1024.0), (2.0**-10, 2.0**13)])
def test_fp16_has_no_overflow_inside(forced: Plan, scale: float, of_x: float, symmetric: bool) -> None:
    """Weights up to 65460, subnormal scales, and x up to fp16's largest: the result alone is rounded to fp16."""
    w = weight(512, 1024, 128, torch.float16, symmetric=False)
    zeros = None if symmetric else torch.zeros_like(w.zeros)  # codes of 15 are then the largest weights
    w = W4Weight(w.codes, torch.full_like(w.scales, scale), w.shape, w.group_size, zeros, None)
    exact_weight = reference.w4_dequant(w.codes, w.scales, w.zeros, 128, torch.float32).double()
    for tokens in (1, 16, 48, 100, 300):
        x = (random(tokens, 1024, dtype=torch.float32, seed=tokens).clamp(-4, 4) * of_x).clamp(-65504, 65504).half()
        exact = F.linear(x.double(), exact_weight)
        assert float(exact.abs().max()) < 60000
        rounds = forced.kernel != "mma" or tokens > 128  # weights
        of_weights = 2.0**-11 * F.linear(x.double().abs(), exact_weight.abs()) * rounds + 2.0**-21 * float(
            F.linear(x.double().abs(), exact_weight.abs() + 16 * scale).max()
        )
        error = (w4a16_linear(x, w).double() - exact).abs() - (2.0**-11 * exact.abs() + 2.0**-25 + of_weights)
        assert float(error.max()) <= 0, (tokens, float(error.max()))


@pytest.mark.parametrize("exponent", [-78, -30, 20, 34, 60])
def test_bf16_takes_scales_of_any_size(forced: Plan, exponent: int) -> None:
    w, x = weight(512, 1024, 128, torch.bfloat16), random(100, 1024)
    codes = unpack_codes(w.codes, 512, 1024)
    w = from_codes(codes, w.scales.t() * 2.0**exponent, 128)
    exact_weight = reference.w4_dequant(w.codes, w.scales, w.zeros, 128, torch.float32).double()
    baseline = F.linear(x, exact_weight.bfloat16())
    assert_close_to_f64(w4a16_linear(x, w), F.linear(x.double(), exact_weight), baseline)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_groups_of_zeros_add_nothing(forced: Plan, dtype: torch.dtype, symmetric: bool) -> None:
    w, x = weight_with_zeros(dtype, symmetric), random(300, 1024, dtype=dtype, seed=1)
    x[:, :8] *= 1000
    other = torch.cat((x[:, :512], random(300, 512, dtype=dtype, seed=2)), 1)
    for tokens in tokens_of(forced):
        one, two = w4a16_linear(x[:tokens], w), w4a16_linear(other[:tokens], w)
        assert not bool(one[:, ::3].any())
        assert torch.equal(one[:, 1::3], two[:, 1::3])


def weight_with_zeros(dtype: torch.dtype, symmetric: bool) -> W4Weight:
    """[512, 1024]: rows 0, 3, ... are 0, and the right halves of rows 1, 4, ..."""
    original = random(512, 1024, dtype=dtype)
    original[::3], original[1::3, 512:] = 0, 0
    w = pack_w4(original, symmetric=symmetric)
    assert not bool(w.scales[:, ::3].any())
    assert not bool(w.scales[4:, 1::3].any())
    return w


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_groups_of_zeros_are_dequantised_to_zeros(dtype: torch.dtype, symmetric: bool) -> None:
    w, got = weight_with_zeros(dtype, symmetric), torch.empty(512, 1024, dtype=dtype, device="cuda")
    kernels.w4_dequant(got, w.codes, w.scales, w.zeros, w.group_size)
    assert torch.equal(got, w.dequantize())
    assert not bool(got[::3].any())
    assert not bool(got[1::3, 512:].any())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_a_weight_is_its_codes_times_scales(n: int, k: int, group: int, dtype: torch.dtype, symmetric: bool) -> None:
    w = weight(n, k, group, dtype, symmetric)
    exact = reference.w4_dequant(w.codes, w.scales, w.zeros, group, torch.float32).double()
    assert_same_bits(w.dequantize(), exact.to(dtype))
    got = torch.empty(n, k, dtype=dtype, device="cuda")
    kernels.w4_dequant(got, w.codes, w.scales, w.zeros, group)
    assert_same_bits(got, exact.to(dtype))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_within_a_range_of_tokens_a_row_is_the_same(forced: Plan, group: int) -> None:
    w, x = weight(1024, 2048, group, torch.bfloat16, symmetric=False), random(768, 2048)
    for tokens in ranges_of_same_bits(forced):
        want = w4a16_linear(x[: tokens[-1]], w)
        for t in (*tokens[:: 1 if len(tokens) <= 16 else 9], tokens[-1]):
            assert_same_bits(w4a16_linear(x[:t], w), want[:t], f"{t} tokens")
            assert_same_bits(w4a16_linear(x[tokens[-1] - t : tokens[-1]], w), want[-t:], f"the last {t} tokens")


LARGE = [
    *((2048, 2048), (3072, 1024), (3840, 1024), (4096, 4096), (4224, 6144), (4096, 6272), (5120, 1536), (8192, 2048)),
    *((8192, 12288), (8456, 8192), (12288, 4096), (14336, 1024), (18944, 3584), (22016, 1024), (25352, 1024)),
]


@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize(("dtype", "symmetric"), [(torch.bfloat16, True), (torch.float16, False)], ids=str)
def test_up_to_16_tokens_a_row_of_a_large_weight_is_the_same_in_its_range(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], dtype: torch.dtype, symmetric: bool
) -> None:
    run_as_planned(plan, monkeypatch)
    w, x = weight(*shape, 128, dtype, symmetric), random(16, shape[1], dtype=dtype)
    exact_weight = reference.w4_dequant(w.codes, w.scales, w.zeros, 128, torch.float32).double()
    for most, fewer in ((8, (1, 2, 7)), (16, (9, 10, 15))):
        rows = x[:most]
        want = w4a16_linear(rows, w)
        assert_close_to_f64(want, F.linear(rows.double(), exact_weight), F.linear(rows, exact_weight.to(dtype)))
        for t in fewer:
            assert_same_bits(w4a16_linear(rows[:t], w), want[:t], f"{t} tokens")
            assert_same_bits(w4a16_linear(rows[most - t :], w), want[-t:], f"the last {t} tokens")


@pytest.mark.parametrize("shape", [(2048, 2048), (2560, 2560), (4096, 4096), (6144, 4096), (14336, 1024)])
@pytest.mark.parametrize(("first", "most"), [(17, 32), (33, 64), (65, 96), (97, 128), (289, 320), (385, 416)])
def test_within_a_range_a_row_of_the_planned_kernel_is_the_same(
    monkeypatch: pytest.MonkeyPatch, first: int, most: int, shape: tuple[int, int]
) -> None:
    run_as_planned(plan, monkeypatch)
    w, x = weight(*shape, 128, torch.bfloat16), random(most, shape[1])
    want = w4a16_linear(x, w)
    for t in (first, first + 1, most - 1):
        assert_same_bits(w4a16_linear(x[:t], w), want[:t], f"{t} tokens")
        assert_same_bits(w4a16_linear(x[most - t :], w), want[-t:], f"the last {t} tokens")


@pytest.mark.parametrize("tokens", [1, 16, 32, 64, 100, 130, 250, 300])
def test_runs_repeat(forced: Plan, tokens: int) -> None:
    w, x = weight(4096, 4096, 128, torch.bfloat16), random(tokens, 4096)
    assert_runs_repeat(w4a16_linear, x, w, runs=5)


def test_scratch_memory_may_hold_anything_and_is_not_left(forced: Plan) -> None:
    if forced.kernel == "pairs":
        pytest.skip("pairs need none")
    w, x = weight(4096, 4096, 128, torch.bfloat16), random(33, 4096)
    want = w4a16_linear(x, w)
    out, out_intact = canary((33, 4096), torch.bfloat16, "cuda")
    scratch, intact = canary((8 * 256 * 4224,), torch.float32, "cuda")
    kernels.w4a16_linear(out, x, w.codes, w.scales, w.zeros, w.group_size, None, None, scratch, *forced[1:4])
    assert_same_bits(out, want)
    out_intact()
    intact()


@pytest.mark.parametrize("tokens", [20, 40, 150])
def test_a_nan_stays_in_its_row(forced: Plan, tokens: int) -> None:
    w, x = weight(264, 1024, 128, torch.bfloat16), random(tokens, 1024)
    want = w4a16_linear(x, w)
    x[3, 700] = torch.nan
    got = w4a16_linear(x, w)
    assert bool(got[3].isnan().all())
    got[3] = want[3]
    assert_same_bits(got, want)


def test_views_leading_dimensions_and_unaligned_results(forced: Plan) -> None:
    w, wide = weight(264, 1024, 128, torch.bfloat16), random(2, 3, 1104)
    x = wide[..., 8:1032]
    want = w4a16_linear(x.reshape(6, 1024).contiguous(), w)
    assert_same_bits(w4a16_linear(x, w).view(6, 264), want)
    out, assert_intact = canary((6, 270), torch.bfloat16, "cuda")
    w4a16_linear(x.reshape(6, 1024), w, out=out[:, 3:267])
    assert_same_bits(out[:, 3:267].contiguous(), want)
    assert bool(out[:, :3].isnan().all() and out[:, 267:].isnan().all())
    assert_intact()


@pytest.mark.parametrize("tokens", [20, 33, 64, 129, 200])
def test_rows_of_x_may_overlap_or_lie_apart(forced: Plan, tokens: int) -> None:
    w, row = weight(264, 1088, 64, torch.float16, symmetric=False), random(1088, dtype=torch.float16)
    want = w4a16_linear(row.repeat(tokens, 1), w)
    assert_same_bits(w4a16_linear(row.expand(tokens, 1088), w), want)
    wide = random(tokens, 1096, dtype=torch.float16)[:, 8:]
    assert_same_bits(w4a16_linear(wide, w), w4a16_linear(wide.contiguous(), w))


@pytest.mark.parametrize("tokens", [1, 64, 200, 300])
def test_an_activation_order_permutes_the_columns(forced: Plan, tokens: int) -> None:
    w, x = weight(264, 1024, 128, torch.bfloat16), random(tokens, 1024)
    order = torch.randperm(1024, device="cuda")
    permuted = W4Weight(w.codes, w.scales, w.shape, w.group_size, w.zeros, order)
    assert_same_bits(w4a16_linear(x, permuted), w4a16_linear(x[:, order], w))
    assert_same_bits(permuted.dequantize()[:, order], w.dequantize())


@pytest.mark.parametrize("tokens", [4, 64, 300])
def test_a_replayed_graph_sees_new_values(forced: Plan, tokens: int) -> None:
    w = weight(1024, 2048, 128, torch.bfloat16)
    x, new = random(tokens, 2048), random(tokens, 2048, seed=1)
    got = graph_replay(lambda x: w4a16_linear(x, w), [x], [new])
    assert_same_bits(got, w4a16_linear(new, w))


@pytest.mark.parametrize("tokens", [8, 64, 200])
def test_x_is_read_after_the_launch_before(forced: Plan, tokens: int) -> None:
    up, down = weight(2048, 1024, 128, torch.bfloat16), weight(1024, 2048, 128, torch.bfloat16)
    inputs = [random(tokens, 1024, seed=seed) for seed in range(2)]

    def chain(i: int, between: Callable[[], None]) -> tuple[torch.Tensor, ...]:
        first = w4a16_linear(inputs[i], up)
        between()
        second = w4a16_linear(first, down)
        between()
        return first, second, w4a16_linear(second, up)

    assert_waits_for_the_launch_before(chain)


@pytest.mark.parametrize("shape", [(1024, 4096), (4096, 4096), (8192, 2048), (14336, 1024)])
@pytest.mark.parametrize(
    "tokens", [1, 16, 17, 32, 33, 64, 65, 128, 129, 192, 256, 257, 384, 512, 513, 640, 700, 1100, 2048]
)
def test_the_planned_kernel_is_as_close_as_torch(
    monkeypatch: pytest.MonkeyPatch, tokens: int, shape: tuple[int, int]
) -> None:
    run_as_planned(plan, monkeypatch)
    w, x = weight(*shape, 128, torch.bfloat16), random(tokens, shape[1])
    exact_weight = reference.w4_dequant(w.codes, w.scales, w.zeros, 128, torch.float32).double()
    baseline = F.linear(x, exact_weight.bfloat16())
    assert_close_to_f64(w4a16_linear(x, w), F.linear(x.double(), exact_weight), baseline)


@pytest.mark.parametrize("splits", [3, 8])
def test_persistent_ctas_refuse_slices_of_k(splits: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is of sm_90")
    w, x, scratch = weight(1024, 1024, 128, torch.bfloat16), random(64, 1024), torch.zeros(1 << 22, device="cuda")
    out = torch.full((64, 1024), torch.nan, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(UnsupportedError, match="slices of K with persistent CTAs"):
        kernels.w4a16_linear(out, x, w.codes, w.scales, w.zeros, 128, None, None, scratch, 0, splits, 32)
    assert bool(out.isnan().all())


@pytest.mark.parametrize(
    ("n", "k", "group", "dtype"),
    [(6, 12, 4, torch.bfloat16), (16, 64, 32, torch.float32), (12, 64, 64, torch.float16), (16, 96, 48, torch.float16)],
)
def test_cases_without_a_kernel_run_the_reference(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    w, x = weight(n, k, group, dtype), random(3, k, dtype=dtype)
    with pytest.raises(UnsupportedError):
        w4a16_linear(x, w)
    with backend("auto"):
        got = w4a16_linear(x, w)
    exact = reference.w4_dequant(w.codes, w.scales, w.zeros, group, torch.float32).double()
    assert_close_to_f64(got, F.linear(x.double(), exact), F.linear(x, exact.to(dtype)))


def test_a_weight_packed_on_the_gpu_is_the_one_packed_on_the_cpu() -> None:
    original = random(40, 256)
    for symmetric in (True, False):
        here, there = pack_w4(original, 64, symmetric=symmetric), pack_w4(original.cpu(), 64, symmetric=symmetric)
        assert_same_bits(here.codes.cpu(), there.codes)
        assert_same_bits(here.scales.cpu(), there.scales)
