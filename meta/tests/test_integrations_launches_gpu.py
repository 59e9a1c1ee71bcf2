"""How many kernels a layer of a decode step launches on a GPU, counted in a CUDA graph of the step."""

from __future__ import annotations

import ctypes

import pytest
import torch

from kestrel_kernels.integrations import transformers as integration
from kestrel_kernels.integrations.transformers import KestrelCache, generate
from kestrel_moe import fused_linear_residual, silu_and_mul
from kestrel_norm import rms_norm_linear
from kestrel_quant import pack_w4, w4a16_token

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0)"),
]

KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL
SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 512, "head_dim": 128}


def kernels_of(work) -> int:
    """The kernels that `work` launches; it launches and copies nothing else."""
    for _ in range(2):  # libraries set up state on first use
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        work()
    driver, handle, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    kind, kinds = ctypes.c_int(), []
    for node in nodes:
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds.append(kind.value)
    assert set(kinds) == {KERNEL_NODE}
    return len(kinds)


def kernels_of_a_step(tiny_transformer, layers, batch, w4):
    model = tiny_transformer("llama", num_hidden_layers=layers, **SIZES).to("cuda", torch.bfloat16)
    if w4:
        integration.quantize(model)
    integration.apply(model)
    ids = torch.randint(1, 512, (batch, 9), generator=torch.Generator().manual_seed(0)).cuda()
    cache = KestrelCache(model.config, max_tokens=64, max_batch=batch)
    generate(model, ids, past_key_values=cache, max_new_tokens=4, do_sample=False, eos_token_id=[], cuda_graph=False)
    with torch.no_grad():
        return kernels_of(cache.decoding[1]._step)


@pytest.mark.parametrize(("w4", "batch", "kernels"), [(True, 1, 6), (False, 5, 7), (False, 16, 7)])
def test_a_decode_layer_is_so_many_kernels(tiny_transformer, w4, batch, kernels):
    steps = [kernels_of_a_step(tiny_transformer, layers, batch, w4) for layers in (1, 3)]
    assert steps[1] - steps[0] == 2 * kernels


def random(*shape):
    return torch.randn(shape, device="cuda").mul_(shape[-1] ** -0.5).bfloat16()


@pytest.mark.parametrize(("width", "inner"), [(1024, 2048), (4096, 14336)])
def test_a_4_bit_mlp_of_one_token_is_two_kernels(width, inner):
    up, down = pack_w4(random(2 * inner, width)), pack_w4(random(width, inner))
    x, norm = random(1, width), random(width)

    def mlp():
        h = w4a16_token(x, up, norm_weight=norm, activation="silu_and_mul")
        w4a16_token(h, down, residual=x, out=x)

    assert kernels_of(mlp) == 2


@pytest.mark.parametrize("tokens", [1, 4, 8, 16])
@pytest.mark.parametrize(("width", "inner", "kernels"), [(1024, 2048, 3), (4096, 14336, 4)])
def test_an_mlp_of_few_tokens_is_three_kernels_or_four_with_a_large_weight(width, inner, kernels, tokens):
    """A large weight of gate and up streams in a kernel of its own, which starts beside the norm."""
    up, down, x, norm = random(2 * inner, width), random(width, inner), random(tokens, width), random(width)

    def mlp():
        fused_linear_residual(silu_and_mul(rms_norm_linear(x, norm, up)), down, None, x, out=x)

    assert kernels_of(mlp) == kernels
