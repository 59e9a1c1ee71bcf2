"""w4a16_token against float64: norm, product with the exact weight, gate, residual."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kestrel_quant import W4Weight, pack_w4, reference, w4a16_linear, w4a16_token, w4a16_token_covers
from kestrel_quant.w4a16 import from_codes
from kestrel_runtime import UnsupportedError

module = importlib.import_module("kestrel_quant.w4a16_token")

K, N, GROUP = 256, 64, 128


def made(symmetric: bool = True, dtype: torch.dtype = torch.float32) -> W4Weight:
    g = torch.Generator().manual_seed(0)
    return pack_w4((torch.randn(N, K, generator=g) / 16 + 0.02).to(dtype), GROUP, symmetric=symmetric)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gated(product: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "none":
        return product
    h, g = product.chunk(2, -1)
    if activation == "silu_and_mul":
        return F.silu(h) * g
    return F.gelu(h, approximate="tanh" if "tanh" in activation else "none") * g


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("activation", ["none", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize("weight_bias", [None, 0.0, 1.0])
@pytest.mark.parametrize("with_more", [True, False])
def test_norm_product_gate_and_residual(dtype, symmetric, activation, weight_bias, with_more):
    w = made(symmetric, dtype)
    exact = reference.w4_dequant(w.codes, w.scales, w.zeros, GROUP, torch.float32).double()
    x = random(1, K, seed=1, dtype=dtype)
    bias = random(N, seed=2, dtype=dtype) if with_more else None
    results = N if activation == "none" else N // 2
    residual = random(1, results, seed=3, dtype=dtype) if with_more else None
    norm, normed = {}, x
    if weight_bias is not None:
        norm = {"norm_weight": random(K, seed=4, dtype=dtype), "norm_eps": 0.25, "norm_weight_bias": weight_bias}
        rms = (x.double().square().mean(-1, keepdim=True) + 0.25).sqrt()
        normed = (x.double() / rms * (norm["norm_weight"].double() + weight_bias)).to(dtype)
    product = F.linear(normed.double(), exact, None if bias is None else bias.double())
    wanted = gated(product, activation)
    wanted = wanted if residual is None else wanted + residual.double()
    got = w4a16_token(x, w, bias, activation=activation, residual=residual, **norm)
    # The norm may round an element to its neighbour: an error of eps of it, times a weight and the other half.
    # A float32 sum of 256 products in blocks takes 16 roundings of the sum of magnitudes at most.
    eps = torch.finfo(dtype).eps
    of_norm = 0 if weight_bias is None else 0.2 * eps
    of_product = (of_norm + 16 * 2**-24) * F.linear(normed.double().abs(), exact.abs())
    if activation != "none":
        (a, b), (h, g) = of_product.chunk(2, -1), product.chunk(2, -1)
        # exp or erfc, its argument, the quotient and the products: fewer than 8 roundings of |h g|
        of_product = 1.2 * a * g.abs() + b * h.abs() + 8 * 2**-24 * (h * g).abs()
    assert got.dtype == dtype
    assert bool(((got.double() - wanted).abs() <= 0.51 * eps * wanted.abs() + of_product).all())


@pytest.mark.parametrize(("activation", "exact"), [("gelu_and_mul", -5 * 0.5 * math.erfc(5 / math.sqrt(2)))])
def test_the_left_tail_of_a_gate_keeps_its_digits(activation, exact):
    bias = torch.zeros(N)
    bias[0], bias[N // 2] = -5.0, 1.0  # the product of zeros and a weight
    assert w4a16_token(torch.zeros(K), made(), bias, activation=activation)[0].item() == pytest.approx(exact, rel=1e-5)


def test_without_more_it_is_the_linear_layer():
    w, bias = made(symmetric=False), random(N, seed=1)
    x = random(2, 3, K, seed=2)
    assert torch.equal(w4a16_token(x, w, bias), w4a16_linear(x, w, bias))
    flipped = torch.arange(K).flip(0)
    permuted = W4Weight(w.codes, w.scales, w.shape, w.group_size, w.zeros, flipped)
    assert torch.equal(w4a16_token(x, permuted), w4a16_token(x[..., flipped], w))


def test_the_residual_may_be_the_result():
    w, x, residual = made(), random(1, 1, K, seed=1), random(1, 1, N, seed=2)
    expected = w4a16_token(x, w, residual=residual)
    assert w4a16_token(x, w, residual=residual, out=residual) is residual
    assert torch.equal(residual, expected)
    square = from_codes(torch.ones(K, K, dtype=torch.int64), torch.ones(K, K // GROUP), GROUP)
    with pytest.raises(ValueError, match="w4a16_token: argument 'out': .* shares no memory with 'x'"):
        w4a16_token(x, square, out=x)


def test_a_row_of_several_has_the_norm_of_its_own():
    w, x = made(), random(3, K, seed=5)
    norm = {"norm_weight": torch.ones(K)}
    whole = w4a16_token(x, w, **norm)
    for row in range(3):  # sums below 4 in another order: 8 units in the last place
        torch.testing.assert_close(w4a16_token(x[row : row + 1], w, **norm)[0], whole[row], rtol=0, atol=8 * 2**-22)


@pytest.fixture
def launch(monkeypatch):
    """The op's launch without the binary; returns the shapes of x, result and residual that a kernel gets."""
    given = []

    class Kernels:
        def w4a16_token(self, out, x, *rest):
            given.append([tuple(tensor.shape) for tensor in (x, out, rest[-1])])

    monkeypatch.setattr(module, "kernels", Kernels())

    def call(x, w, residual, out=None):
        parts = (w.codes, w.scales, w.zeros, w.permutation, w.group_size)
        module._w4a16_token.kernel_op.launch(x, *parts, None, None, 1e-6, 0.0, "none", residual, out=out)
        return given.pop()

    return call


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("lead", [(), (1,), (1, 1)])
def test_a_kernel_takes_no_token_and_one_in_any_number_of_dimensions(launch, tokens, lead):
    x, residual = torch.ones(*lead, tokens, K), torch.ones(*lead, tokens, N)
    assert launch(x, made(), residual, residual) == [(tokens, K), (tokens, N), (tokens, N)]


def test_a_kernel_takes_no_more_tokens_in_three_dimensions(launch):
    with pytest.raises(UnsupportedError, match="more than one token"):
        launch(torch.ones(2, 1, K), made(), torch.ones(2, 1, N))


@pytest.mark.parametrize("name", ["residual", "out"])
@pytest.mark.parametrize("shape", [(1, N), (N,), (1, 1, 1, N), (1, N, 1)])
def test_a_shape_that_two_dimensions_hide_is_refused_before_the_kernel(launch, name, shape):
    given = {"residual": torch.ones(1, 1, N), "out": torch.ones(1, 1, N), name: torch.ones(shape)}
    with pytest.raises(ValueError, match=rf"w4a16_token: argument '{name}': expected shape \(1, 1, {N}\)"):
        launch(torch.ones(1, 1, K), made(), **given)


def weight_of(n: int, k: int, group: int, dtype: torch.dtype = torch.bfloat16) -> W4Weight:
    """A weight without values."""
    w = from_codes(torch.ones(16, 64, dtype=torch.int64), torch.ones(16, 1, dtype=dtype), 64)
    return replace(w, shape=(n, k), group_size=group)


@pytest.mark.parametrize(
    ("w", "options", "covers"),
    [
        pytest.param(weight_of(32, 256, 128), {"norm": True, "gated": True}, True, id="tiles of both halves"),
        pytest.param(weight_of(16, 256, 256, torch.float16), {}, True, id="one tile"),
        pytest.param(weight_of(16, 256, 128), {"gated": True}, False, id="half a tile of each half"),
        pytest.param(weight_of(24, 256, 128), {}, False, id="half a tile more"),
        pytest.param(weight_of(16, 192, 192), {}, True, id="whole rows"),
        pytest.param(weight_of(16, 256, 64), {}, False, id="groups of 64"),
        pytest.param(weight_of(16, 256, 128, torch.float32), {}, False, id="float32"),
        pytest.param(weight_of(16, 252, 252), {}, False, id="K of 252"),
        pytest.param(weight_of(16, 8192, 128), {"norm": True}, True, id="the widest norm"),
        pytest.param(weight_of(16, 8320, 128), {"norm": True}, False, id="a wider norm"),
        pytest.param(weight_of(16, 8320, 128), {}, True, id="a wider row"),
        pytest.param(weight_of(16, 40064, 128), {}, False, id="a row beyond shared memory"),
        pytest.param(replace(weight_of(16, 256, 128), permutation=torch.arange(256)), {}, False, id="permuted"),
    ],
)
def test_the_weights_that_the_kernel_takes(w, options, covers):
    assert w4a16_token_covers(w, **options) is covers
