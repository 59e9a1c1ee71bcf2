"""The kernel of rms_norm_linear on a GPU, and the composition beyond it, against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kestrel_norm import rms_norm, rms_norm_linear
from kestrel_runtime import Binary
from kestrel_runtime.testing import (
    assert_close_to_f64,
    assert_runs_repeat,
    assert_same_bits,
    assert_waits_for_the_launch_before,
    canary,
    graph_replay,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels_only")]

BF16 = torch.bfloat16
# N, M: whole tiles; partial tiles of rows; partial blocks of K, fewer blocks than slices; unaligned; one result.
SHAPES = [
    (3584, 3584),
    (3584, 18944),
    (4096, 1000),
    (1152, 4304),
    (1032, 516),
    (200, 131),
    (64, 8),
    (8, 1),
    (1001, 264),
    (8192, 264),
    (16384, 128),
]
TOKENS = (0, 1, 2, 7, 8, 9, 16, 17, 32, 33, 63, 64, 65, 300)


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def arguments(t: int, n: int, m: int, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return random(t, n, dtype=dtype), random(n, dtype=dtype, seed=1), random(m, n, dtype=dtype, seed=2)


def exact(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm_weight.double()
    return normed @ weight.double().t()


def torch_itself(x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(F.rms_norm(x, norm_weight.shape, norm_weight, 1e-6), weight)


def assert_right(got: torch.Tensor, x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor) -> None:
    """The error is at most 1.1 times that of torch for as many rows; with few elements, within a bound.

    Each norm is rounded once, a sum of N products is off by at most N * 2^-24 of their magnitudes, and the result is
    rounded once.
    """
    want = exact(x, norm_weight, weight)
    if want.numel() >= 4096:
        assert_close_to_f64(got, want, torch_itself(x, norm_weight, weight))
        return
    eps = torch.finfo(x.dtype).eps
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm_weight.double()
    magnitudes = normed.abs() @ weight.double().abs().t()
    bound = (0.51 * eps + x.shape[-1] * 2.0**-24) * magnitudes + 0.51 * eps * want.abs()
    assert bool(((got.double() - want).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "m"), SHAPES)
def test_any_number_of_rows_is_as_close_as_torch_and_nothing_else_is_written(
    n: int, m: int, dtype: torch.dtype
) -> None:
    x, norm_weight, weight = arguments(max(TOKENS), n, m, dtype)
    for tokens in TOKENS:
        out, assert_intact = canary((tokens, m), dtype, "cuda")
        assert rms_norm_linear(x[:tokens], norm_weight, weight, out=out) is out
        assert_right(out, x[:tokens], norm_weight, weight)
        assert_intact()


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [8, 16, 32])
@pytest.mark.parametrize("scale", [1e-4, 3e3])
def test_rows_of_any_magnitude(scale: float, tokens: int, dtype: torch.dtype) -> None:
    """In fp16, x times the norm's weight alone would overflow, or lose its bits."""
    x, norm_weight, weight = arguments(tokens, 3584, 512, dtype)
    x = (x.float() * scale * torch.linspace(0.1, 1, tokens, device="cuda")[:, None]).to(dtype)
    norm_weight, weight = norm_weight * 8, weight / 60
    assert_right(rms_norm_linear(x, norm_weight, weight), x, norm_weight, weight)


@pytest.mark.parametrize("tokens", [3, 100])
def test_float32_rows(tokens: int) -> None:
    args = arguments(tokens, 1000, 264, torch.float32)
    assert_close_to_f64(rms_norm_linear(*args), exact(*args), torch_itself(*args))


@pytest.mark.parametrize("tokens", [33, 65, 700])
def test_many_rows_have_the_bits_of_norm_and_product(tokens: int) -> None:
    x, norm_weight, weight = arguments(tokens, 3584, 3584)
    assert_same_bits(rms_norm_linear(x, norm_weight, weight), torch.mm(rms_norm(x, norm_weight), weight.T))


@pytest.mark.parametrize("tokens", [1, 16, 33, 64, 65])
def test_runs_repeat(tokens: int) -> None:
    assert_runs_repeat(rms_norm_linear, *arguments(tokens, 3584, 3584), runs=5)


@pytest.mark.parametrize("tokens", [8, 16, 32])
def test_a_row_does_not_depend_on_the_others_of_its_tile(tokens: int) -> None:
    x, norm_weight, weight = arguments(tokens, 3584, 1024)
    want = rms_norm_linear(x, norm_weight, weight)
    fewest = tokens // 2 + 1
    assert_same_bits(rms_norm_linear(x[:fewest], norm_weight, weight), want[:fewest])
    x[1, 700] = torch.nan
    got = rms_norm_linear(x, norm_weight, weight)
    assert bool(got[1].isnan().all())
    got[1] = want[1]
    assert_same_bits(got, want)


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "wider buffer": lambda: random(6, 1104)[:, 8:1032],
    "unaligned": lambda: random(6, 1104)[:, 3:1027],
    "three dimensions": lambda: random(2, 3, 1024),
    "transposed": lambda: random(3, 4, 1024).transpose(0, 1),
    "four dimensions that do not merge": lambda: random(2, 3, 4, 1024)[:, :2],
    "one row repeated": lambda: random(1, 1024).expand(5, 1024),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_and_unaligned_results(view: str) -> None:
    x, norm_weight, weight = VIEWS[view](), random(1024, seed=1), random(264, 1024, seed=2)
    flat = x.reshape(-1, 1024)
    got = rms_norm_linear(x, norm_weight, weight)
    assert got.shape == (*x.shape[:-1], 264)
    assert_right(got.view(-1, 264), flat, norm_weight, weight)
    out, assert_intact = canary((*x.shape[:-1], 270), BF16, "cuda")
    rms_norm_linear(x, norm_weight, weight, out=out[..., 3:267])
    assert_right(out[..., 3:267].reshape(-1, 264), flat, norm_weight, weight)
    assert bool(out[..., :3].isnan().all() and out[..., 267:].isnan().all())
    assert_intact()


def test_a_weight_of_separate_rows() -> None:
    x, norm_weight, wide = random(5, 1024), random(1024, seed=1), random(264, 1104, seed=2)
    want = rms_norm_linear(x, norm_weight, wide[:, 8:1032].contiguous())
    assert_same_bits(rms_norm_linear(x, norm_weight, wide[:, 8:1032]), want)


@pytest.mark.parametrize("tokens", [4, 40, 300])
def test_a_replayed_graph_sees_new_values(tokens: int) -> None:
    x, norm_weight, weight = arguments(tokens, 2048, 1024)
    new = random(tokens, 2048, seed=5)
    got = graph_replay(lambda x: rms_norm_linear(x, norm_weight, weight), [x], [new])
    assert_same_bits(got, rms_norm_linear(new, norm_weight, weight))


def test_x_is_read_after_the_launch_before() -> None:
    norm_weights = [random(2048, seed=1), random(1024, seed=2)]
    up, down = random(1024, 2048, seed=3) / 45, random(2048, 1024, seed=4) / 32
    inputs = [random(8, 2048, seed=seed) for seed in range(2)]

    def chain(i: int, between: Callable[[], None]) -> tuple[torch.Tensor, ...]:
        first = rms_norm_linear(inputs[i], norm_weights[0], up)
        between()
        second = rms_norm_linear(first, norm_weights[1], down)
        between()
        return first, second, rms_norm_linear(second, norm_weights[0], up)

    assert_waits_for_the_launch_before(chain)


def test_which_calls_are_one_launch() -> None:
    kernel = Binary("kestrel_norm").rms_norm_linear

    def covered(tokens: int, n: int, dtype: torch.dtype = BF16) -> bool:
        x, norm_weight, weight = arguments(tokens, n, 264, dtype)
        return bool(kernel(torch.empty(tokens, 264, dtype=dtype, device="cuda"), x, norm_weight, weight, 1e-6))

    assert not covered(65, 3584)
    assert not covered(4, 3580)
    assert not covered(4, 3584, torch.float32)
    if torch.cuda.get_device_capability() == (9, 0):
        assert all(covered(tokens, 8192) for tokens in (1, 8, 16))
        assert not covered(17, 8192)
