"""The kernels of w4a16_linear on a GPU, against float64, and what they promise about bits."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kestrel_quant import W4Weight, pack_w4, reference, w4a16_linear
from kestrel_quant._launch import kernels
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
TOKENS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 192, 256, 300, 400, 600)


module = importlib.import_module("kestrel_quant.w4a16")


@pytest.fixture(autouse=True, params=["small weights", "large weights"])
def wgmma(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the kernel for large weights runs: on sm_90, here for weights of any size."""
    if request.param == "small weights":
        monkeypatch.setattr(module, "_WGMMA", ())
        return False
    monkeypatch.setattr(module, "_WGMMA", ((range(17, 513), 0),))
    return torch.cuda.get_device_capability() == (9, 0)


def ranges_of_same_bits(wgmma: bool) -> list[range]:
    if wgmma:
        ends = (0, 16, 32, 64, 128, 256, 384, 512)
        return [range(first + 1, last + 1) for first, last in itertools.pairwise(ends)]
    return [range(1, 17), range(17, 65), range(65, 129)]


def weight(n: int, k: int, group: int, dtype: torch.dtype, symmetric: bool = True) -> W4Weight:
    g = torch.Generator("cuda").manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), generator=g, device="cuda")
    scales = ((torch.rand(n, k // group, generator=g, device="cuda") + 0.5) / 64).to(dtype)
    zeros = None if symmetric else torch.randint(0, 17, (n, k // group), generator=g, device="cuda")
    return from_codes(codes, scales, group, zeros)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_linear_is_as_close_as_torch(n: int, k: int, group: int, dtype: torch.dtype, symmetric: bool) -> None:
    w = weight(n, k, group, dtype, symmetric)
    exact_weight = reference.w4_dequant(w.codes, w.scales, w.zeros, group, torch.float32).double()
    assert_same_bits(w.dequantize(), exact_weight.to(dtype))
    x, bias = random(max(TOKENS), k, dtype=dtype), None if symmetric else random(n, dtype=dtype)
    exact = F.linear(x.double(), exact_weight, None if bias is None else bias.double())
    baseline = F.linear(x, exact_weight.to(dtype), bias)
    for tokens in TOKENS:
        out, assert_intact = canary((tokens, n), dtype, "cuda")
        assert w4a16_linear(x[:tokens], w, bias, out=out) is out
        assert_close_to_f64(out, exact[:tokens], baseline[:tokens])
        assert_intact()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_within_a_range_of_tokens_a_row_is_the_same(group: int, wgmma: bool) -> None:
    w, x = weight(1024, 2048, group, torch.bfloat16, symmetric=False), random(512, 2048)
    for tokens in ranges_of_same_bits(wgmma):
        want = w4a16_linear(x[: tokens[-1]], w)
        for t in tokens[:: 1 if len(tokens) < 100 else 9]:
            assert_same_bits(w4a16_linear(x[:t], w), want[:t], f"{t} tokens")
            assert_same_bits(w4a16_linear(x[tokens[-1] - t : tokens[-1]], w), want[-t:], f"the last {t} tokens")


@pytest.mark.parametrize("tokens", [1, 16, 32, 64, 100, 130, 250, 300])
def test_runs_repeat(tokens: int) -> None:
    w, x = weight(4096, 4096, 128, torch.bfloat16), random(tokens, 4096)
    assert_runs_repeat(w4a16_linear, x, w, runs=5)


def test_scratch_memory_may_hold_anything_and_is_not_left(wgmma: bool) -> None:
    w, x = weight(4096, 4096, 128, torch.bfloat16), random(33, 4096)
    want = w4a16_linear(x, w)
    out, out_intact = canary((33, 4096), torch.bfloat16, "cuda")
    scratch, intact = canary((8 * 256 * 4096,), torch.float32, "cuda")
    kernels.w4a16_linear(out, x, w.codes, w.scales, w.zeros, w.group_size, None, scratch, wgmma)
    assert_same_bits(out, want)
    out_intact()
    intact()


@pytest.mark.parametrize("tokens", [20, 40, 150])
def test_a_nan_stays_in_its_row(tokens: int) -> None:
    w, x = weight(264, 1024, 128, torch.bfloat16), random(tokens, 1024)
    want = w4a16_linear(x, w)
    x[3, 700] = torch.nan
    got = w4a16_linear(x, w)
    assert bool(got[3].isnan().all())
    got[3] = want[3]
    assert_same_bits(got, want)


def test_views_leading_dimensions_and_unaligned_results() -> None:
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
def test_rows_of_x_may_overlap_or_lie_apart(tokens: int) -> None:
    w, row = weight(264, 1088, 64, torch.float16, symmetric=False), random(1088, dtype=torch.float16)
    want = w4a16_linear(row.repeat(tokens, 1), w)
    assert_same_bits(w4a16_linear(row.expand(tokens, 1088), w), want)
    wide = random(tokens, 1096, dtype=torch.float16)[:, 8:]
    assert_same_bits(w4a16_linear(wide, w), w4a16_linear(wide.contiguous(), w))


@pytest.mark.parametrize("tokens", [1, 64, 200, 300])
def test_an_activation_order_permutes_the_columns(tokens: int) -> None:
    w, x = weight(264, 1024, 128, torch.bfloat16), random(tokens, 1024)
    order = torch.randperm(1024, device="cuda")
    permuted = W4Weight(w.codes, w.scales, w.shape, w.group_size, w.zeros, order)
    assert_same_bits(w4a16_linear(x, permuted), w4a16_linear(x[:, order], w))
    assert_same_bits(permuted.dequantize()[:, order], w.dequantize())


@pytest.mark.parametrize("tokens", [4, 64, 300])
def test_a_replayed_graph_sees_new_values(tokens: int) -> None:
    w = weight(1024, 2048, 128, torch.bfloat16)
    x, new = random(tokens, 2048), random(tokens, 2048, seed=1)
    got = graph_replay(lambda x: w4a16_linear(x, w), [x], [new])
    assert_same_bits(got, w4a16_linear(new, w))


@pytest.mark.parametrize("tokens", [8, 64, 200])
def test_x_is_read_after_the_launch_before(tokens: int) -> None:
    up, down = weight(2048, 1024, 128, torch.bfloat16), weight(1024, 2048, 128, torch.bfloat16)
    inputs = [random(tokens, 1024, seed=seed) for seed in range(2)]

    def chain(i: int, between: Callable[[], None]) -> tuple[torch.Tensor, ...]:
        first = w4a16_linear(inputs[i], up)
        between()
        second = w4a16_linear(first, down)
        between()
        return first, second, w4a16_linear(second, up)

    assert_waits_for_the_launch_before(chain)


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
