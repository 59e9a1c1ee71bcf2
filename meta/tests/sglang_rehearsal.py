"""SGLang's own classes with both backends "kestrel": on the CPU for test_integrations_sglang.py, or `cuda` as argument.

Prints JSON: for each case how far attention is from SGLang's torch_native backend, and what the sampler drew.
"""

from __future__ import annotations

import importlib.machinery
import itertools
import json
import os
import sys
import types


def without_torchvision() -> None:
    """SGLang imports torchvision for images; a build for this torch may be absent."""
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        return
    for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
        module = types.ModuleType(f"torchvision{name}")
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(module.__name__, None), []
        module.__getattr__ = lambda name: type(name, (), {}) if not name.startswith("__") else _absent(name)
        sys.modules[module.__name__] = module


def _absent(name: str):
    raise AttributeError(name)


def attention(device: str, dtype, page: int, **of_layer) -> list[float]:
    """Largest errors of a prefill, a prefill behind a context, decoding, and decoding over a graph's tensors.

    On a GPU queries and results are bf16, and the last step is a CUDA graph.
    """
    import torch
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    on_gpu = device == "cuda"
    heads, kv_heads, size, context, requests = 4, 2, 64 if on_gpu else 16, 64, 3
    layer = RadixAttention(heads, size, 0.3, kv_heads, layer_id=0, **of_layer)
    pools = []
    for _ in range(2):
        pool = MHATokenToKVPool(256, page, dtype, kv_heads, size, 1, device, False)
        tokens = ReqToTokenPool(4, context, device, False)
        order = torch.randperm(256 // page, generator=torch.Generator().manual_seed(1))[: 3 * context // page] + 1
        slots = (order[:, None] * page + torch.arange(page)).view(requests, context).to(device)
        tokens.req_to_token[torch.tensor([2, 0, 3], device=device)] = slots.to(tokens.req_to_token.dtype)
        pools.append((pool, tokens))
    model = types.SimpleNamespace(context_len=context)
    runners = [
        types.SimpleNamespace(
            device=device, req_to_token_pool=tokens, token_to_kv_pool=pool, page_size=page, model_config=model
        )
        for pool, tokens in pools
    ]
    ours, theirs = ATTENTION_BACKENDS["kestrel"](runners[0]), TorchNativeAttnBackend(runners[1])
    ours.init_cuda_graph_state(4, 4)
    random = torch.Generator().manual_seed(0)
    rows, held = torch.tensor([2, 0, 3], device=device), torch.zeros(3, dtype=torch.int64, device=device)
    errors = []
    for counts, graph in (([5, 19, 1], False), ([7, 1, 3], False), (None, False), (None, True)):
        new = torch.tensor(counts or [1, 1, 1], device=device)
        at = [slots[r, int(h) : int(h + n)] for r, (h, n) in enumerate(zip(held, new, strict=True))]
        held = held + new
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND if counts else ForwardMode.DECODE,
            batch_size=3,
            input_ids=torch.zeros(int(new.sum()), dtype=torch.int64, device=device),
            req_pool_indices=rows,
            seq_lens=held,
            out_cache_loc=torch.cat(at),
            seq_lens_sum=int(held.sum()),
        )
        if counts:
            batch.extend_seq_lens, batch.extend_prefix_lens = new, held - new
            batch.extend_seq_lens_cpu = counts
        total = int(new.sum())
        q, k, v = (torch.randn(total, n * size, generator=random) for n in (heads, kv_heads, kv_heads))
        states = [q, k.view(total, kv_heads, size), v.view(total, kv_heads, size)]
        states = [x.to(device, torch.bfloat16 if on_gpu else torch.float32) for x in states]
        found = []
        for backend in (ours, theirs):
            if graph and backend is ours:
                backend.init_forward_metadata_out_graph(batch, in_capture=True)
                backend.init_forward_metadata_in_graph(batch)
            else:
                backend.init_forward_metadata(batch)
            run = backend.forward_extend if counts else backend.forward_decode
            inputs = [x.clone() for x in states]
            if graph and on_gpu and backend is ours:
                found.append(replayed(lambda: run(*inputs, layer, batch)).float())  # noqa: B023
            else:
                found.append(run(*inputs, layer, batch).float())
        errors.append(float((found[0] - found[1]).abs().max()))
    return errors


REFUSED = {
    "keys of an encoder": {"is_cross_attention": True},
    "irope": {"use_irope": True},
    "temperature by position": {"xai_temperature_len": 64},
    "another cap": {"logit_cap": 30.0, "logit_capping_method": "sigmoid"},
}
"""Settings of a layer that the backend has no kernel for, by name."""


def refusals() -> dict[str, str]:
    """What the backend says to each."""
    from sglang.srt.layers.radix_attention import RadixAttention

    from kestrel_kernels.integrations.sglang.attention import KestrelAttention

    said = {}
    for name, settings in REFUSED.items():
        layer = RadixAttention(4, 16, 0.3, 2, layer_id=0)
        for attribute, value in settings.items():
            setattr(layer, attribute, value)
        try:
            object.__new__(KestrelAttention)._begin(layer, {})
        except NotImplementedError as error:
            said[name] = str(error)
    return said


def replayed(work):
    """The result of a CUDA graph of this work; it stores the same keys again."""
    import torch

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    result.zero_()
    graph.replay()
    return result


def sampler(device: str) -> dict:
    """A sampler without SGLang's process groups: what requests with seeds draw, alone and together."""
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.sampler import _CUSTOM_SAMPLER_FACTORIES
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from kestrel_kernels.integrations.sglang.sampler import KestrelSampler

    made = KestrelSampler.__new__(KestrelSampler)
    torch.nn.Module.__init__(made)
    made.rl_on_policy_target = None
    made._sync_token_ids_across_tp = lambda ids, info: None

    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(device)

    def draw(rows, seeds, positions):
        def tensor(values):
            return torch.tensor(values, device=device)

        info = SamplingBatchInfo(
            temperatures=torch.full((len(rows), 1), 0.8, device=device),
            top_ps=torch.full((len(rows),), 0.9, device=device),
            top_ks=tensor([[1 << 30], [1], [5], [3]])[rows].view(-1),
            min_ps=torch.zeros(len(rows), device=device),
            is_all_greedy=False,
            is_any_greedy=True,
            need_top_p_sampling=True,
            need_top_k_sampling=True,
            need_min_p_sampling=False,
            vocab_size=50,
            sampling_seed=None if seeds is None else tensor(seeds),
        )
        output = LogitsProcessorOutput(next_token_logits=logits[rows].clone())
        return made(output, info, False, [], [], tensor(positions)).tolist()

    seeds, positions = [7, 8, 9, 10], [3, 4, 5, 6]
    together = draw([0, 1, 2, 3], seeds, positions)
    alone = [draw([row], [seeds[row]], [positions[row]])[0] for row in range(4)]
    many = [draw([2], [seed], [0])[0] for seed in range(40)]
    return {
        "together": together,
        "alone": alone,
        "greedy": int(logits[1].argmax()),
        "of_top_5": sorted(set(many) - set(logits[2].topk(5).indices.tolist())),
        "distinct": len(set(many)),
        "unseeded": len(draw([0, 1, 2, 3], None, positions)),
        "registered": "kestrel" in _CUSTOM_SAMPLER_FACTORIES,
    }


def main(device: str = "cpu") -> dict:
    without_torchvision()
    import torch

    from kestrel_kernels.integrations import sglang as integration

    integration.register()
    integration.register()
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, SAMPLING_BACKEND_CHOICES

    errors = {}
    layers = {"plain": {}, "window": {"sliding_window_size": 6}}
    for (name, of_layer), page in itertools.product(layers.items(), (1, 16)):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        errors[f"{name}, page {page}"] = attention(device, dtype, page, **of_layer)
    errors["fp8, page 16"] = attention(device, torch.float8_e4m3fn, 16)
    chosen = ["kestrel" in ATTENTION_BACKEND_CHOICES, "kestrel" in SAMPLING_BACKEND_CHOICES]
    return {"errors": errors, "chosen": chosen, "refused": refusals(), "sampler": sampler(device)}


if __name__ == "__main__":
    print("\n" + json.dumps(main(*sys.argv[1:])), flush=True)
    os._exit(0)
