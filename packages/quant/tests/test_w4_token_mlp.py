"""w4a16_token_mlp by reference: the feed-forward of a decoder layer, and what a kernel is given."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

from kestrel_quant import W4Weight, pack_w4, w4a16_token_mlp
from kestrel_runtime import UnsupportedError

module = importlib.import_module("kestrel_quant.w4a16_token_mlp")

K, I, J, GROUP = 256, 128, 384, 128


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(n: int, k: int, dtype: torch.dtype = torch.float32) -> W4Weight:
    return pack_w4((random(n, k, seed=n + k) / k**0.5).to(dtype), GROUP)


@pytest.mark.parametrize("with_attention", [True, False])
@pytest.mark.parametrize("activation", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_attention_norm_gate_and_both_residuals(activation, with_attention):
    x, norm_weight, gate_up, down = random(1, K, seed=1), 1 + random(K, seed=2) / 4, made(2 * I, K), made(K, I)
    biases = random(2 * I, seed=3), random(K, seed=4)
    options, stream = {}, x.double()
    if with_attention:
        options = {
            "attention": random(1, J, seed=5),
            "attention_weight": made(K, J),
            "attention_bias": random(K, seed=6),
        }
        stream = stream + F.linear(
            options["attention"].double(),
            options["attention_weight"].dequantize().double(),
            options["attention_bias"].double(),
        )
    normed = F.rms_norm(stream, (K,), norm_weight.double() + 0.5, 1e-5)
    h, g = F.linear(normed, gate_up.dequantize().double(), biases[0].double()).chunk(2, -1)
    act = F.silu(h) if activation == "silu_and_mul" else F.gelu(h, approximate="tanh" if "tanh" in activation else "none")
    wanted = stream + F.linear(act * g, down.dequantize().double(), biases[1].double())
    options |= {"gate_up_bias": biases[0], "down_bias": biases[1], "norm_eps": 1e-5, "norm_weight_bias": 0.5}
    found = w4a16_token_mlp(x, gate_up, down, norm_weight, activation=activation, **options)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert w4a16_token_mlp(x, gate_up, down, norm_weight, activation=activation, out=x, **options) is x
    assert torch.equal(x, found)


@pytest.fixture
def launch(monkeypatch):
    """The op's launch without the binary; returns the shapes of result, gates, x and attention that a kernel gets."""
    given = []

    class Kernels:
        def w4a16_token_mlp(self, out, gates, x, *rest):
            given.append([tuple(tensor.shape) for tensor in (out, gates, x, rest[-6])])

    monkeypatch.setattr(module, "kernels", Kernels())

    def call(x, attention, up=None):
        parts = [module._parts(w) for w in (up or made(2 * I, K), made(K, I), made(K, J))]
        options = (torch.ones(K), None, None, 1e-6, 0.0, "silu_and_mul")
        module._w4a16_token_mlp.kernel_op.launch(x, *parts[0], *parts[1], *options, attention, *parts[2])
        return given.pop()

    return call


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("lead", [(), (1,), (1, 1)])
def test_a_kernel_takes_no_token_and_one_in_any_number_of_dimensions(launch, tokens, lead):
    shapes = [(tokens, size) for size in (K, I, K, J)]
    assert launch(torch.ones(*lead, tokens, K), torch.ones(*lead, tokens, J)) == shapes


def test_a_kernel_takes_no_more_tokens_and_no_other_order_of_columns(launch):
    with pytest.raises(UnsupportedError, match="more than one token"):
        launch(torch.ones(2, 1, K), torch.ones(2, 1, J))
    up = made(2 * I, K)
    permuted = W4Weight(up.codes, up.scales, up.shape, up.group_size, up.zeros, torch.arange(K).flip(0))
    with pytest.raises(UnsupportedError, match="another order"):
        launch(torch.ones(1, K), torch.ones(1, J), permuted)
