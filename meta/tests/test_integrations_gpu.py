"""Models of transformers on the kernels: logits beside the model's own, and replayed steps beside eager ones."""

from __future__ import annotations

import pytest
import torch

from kestrel_kernels.integrations import transformers as integration
from kestrel_kernels.integrations.transformers import KestrelCache, few_tokens, generate, modules
from kestrel_kernels.integrations.transformers import cache as cache_module
from kestrel_kernels.integrations.transformers.w4 import W4Linear
from kestrel_runtime import backend, trace

pytestmark = pytest.mark.gpu

KINDS = ["auto", "fp8", "int8", "int4"]
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 2048, "head_dim": 64}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
    "mistral": {"sliding_window": 33},
    "mixtral": {"num_local_experts": 8},
    "gemma2": {"sliding_window": 33, "query_pre_attn_scalar": 64},
    "gemma3_text": {"sliding_window": 33, "query_pre_attn_scalar": 64},
    "phi3": {"pad_token_id": 0},
}


@pytest.fixture
def make(tiny_transformer):
    def make(family):
        model = tiny_transformer(family, **{**SIZES, **FAMILIES[family]}).to("cuda", torch.bfloat16)
        for parameter in model.parameters():  # the tiny model's weights are scaled for a width of 32
            parameter.data = parameter / 3 if parameter.ndim > 1 else parameter
        return model

    return make


@pytest.fixture
def prompt():
    ids = torch.randint(1, 2048, (3, 70), generator=torch.Generator().manual_seed(0)).cuda()
    mask = torch.ones_like(ids)
    mask[1, :20], mask[2, :69] = 0, 0
    return ids, mask


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_near_to_float32_as_the_models_own(make, prompt, family):
    ids, mask = prompt
    keep, model = mask.bool(), make(family)
    with torch.no_grad():
        exact = model.float()(ids, attention_mask=mask).logits[keep]
        model.bfloat16()
        if family != "gemma2":  # there sdpa leaves the softcap out
            model.set_attn_implementation("sdpa")
        own = (model(ids, attention_mask=mask).logits[keep].float() - exact).norm(dim=-1)
        integration.apply(model)
        ours = (model(ids, attention_mask=mask).logits[keep].float() - exact).norm(dim=-1)
    assert ours.median() <= 1.5 * own.median()  # of the rows: a router's near tie may choose another expert for one


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
def test_replayed_steps_draw_what_eager_steps_draw(make, prompt, family, kind):
    model = make(family)
    integration.apply(model)
    settings = {"max_new_tokens": 12, "do_sample": True, "top_k": 30, "top_p": 0.9, "seed": 3, "kv_cache": kind}
    eager = generate(model, *prompt, cuda_graph=False, eos_token_id=[], **settings)
    assert torch.equal(generate(model, *prompt, eos_token_id=[], **settings), eager)


def test_replayed_steps_of_4_bit_layers_draw_what_eager_steps_draw(make, prompt):
    model = make("llama")
    assert integration.quantize(model, group_size=64)
    assert integration.apply(model).left == []
    settings = {"max_new_tokens": 12, "do_sample": True, "top_k": 30, "seed": 3, "eos_token_id": []}
    eager = generate(model, *prompt, cuda_graph=False, **settings)
    assert torch.equal(generate(model, *prompt, **settings), eager)


def test_a_model_that_reads_a_value_on_the_host_runs_eagerly_and_leaves_torch_as_it_was(make, prompt):
    model = make("llama")
    integration.apply(model)
    settings = {"max_new_tokens": 12, "do_sample": True, "top_k": 30, "seed": 3, "eos_token_id": []}
    eager, before = generate(model, *prompt, cuda_graph=False, **settings), torch.cuda.current_stream()
    value = torch.ones((), device="cuda")
    model.register_forward_pre_hook(lambda *_: value.item() and None)
    with pytest.warns(UserWarning, match="decode steps run without a CUDA graph"):
        assert torch.equal(generate(model, *prompt, **settings), eager)
    assert torch.cuda.current_stream() == before
    assert 0 <= float(torch.rand(1, device="cuda")) < 1  # torch's generator raises in an unfinished capture


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_serves_many_calls(make, prompt, kind):
    model = make("llama")
    integration.apply(model)
    ids, mask = prompt
    cache = KestrelCache(model.config, kv_cache=kind, max_tokens=100, max_batch=3)
    graphs = []
    for length in (70, 41, 64):
        cache.reset()
        part = ids[:, -length:], mask[:, -length:]
        found = generate(model, *part, past_key_values=cache, max_new_tokens=10, eos_token_id=[])
        assert torch.equal(found, generate(model, *part, kv_cache=kind, max_new_tokens=10, eos_token_id=[]))
        assert cache.get_seq_length() == length + 9
        assert cache.lengths.tolist() == [length + 9, min(length, 50) + 9, 10]
        graphs.append(cache.decoding[1].graph)
    assert graphs[0] is not None
    assert graphs[0] is graphs[1] is graphs[2]


def test_a_call_that_ends_early_leaves_the_cache_as_it_should_be(make, prompt):
    model = make("llama")
    integration.apply(model)
    ids = prompt[0][:1]
    plain = generate(model, ids, max_new_tokens=8, eos_token_id=[])
    eos = int(plain[0, 74])
    cache = KestrelCache(model.config, max_tokens=100)
    found = generate(model, ids, past_key_values=cache, max_new_tokens=20, eos_token_id=eos)
    assert int(found[0, -1]) == eos
    assert cache.decoding[1].graph is not None
    assert cache.get_seq_length() == found.shape[1] - 1 == cache.lengths.item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [(70,), (40, 30)], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_prompts_run_kernels_and_see_what_pytorch_sees(make, prompt, family, pieces, kind):
    model, (ids, mask) = make(family), prompt
    integration.apply(model)
    positions, found = (mask.cumsum(1) - 1).clamp(min=0), []
    for way in ("kernel", "dense"):
        with pytest.MonkeyPatch.context() as patched, backend("kernel"), trace() as counts, torch.no_grad():
            if way == "dense":
                patched.setattr(cache_module, "serves", lambda *tensors: False)
            cache, parts, start = KestrelCache(model.config, kv_cache=kind, max_tokens=70), [], 0
            for count in pieces:
                stop = start + count
                part = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
                parts.append(model(ids[:, start:stop], past_key_values=cache, **part).logits)
                start = stop
        served = sum(of_op["kernel"] for op, of_op in counts.items() if op.startswith("kestrel_attention.flash"))
        assert (served > 0) == (way == "kernel")
        found.append(torch.cat(parts, 1)[mask.bool()].float())
    apart = (found[0] - found[1]).norm(dim=-1) / found[1].norm(dim=-1)
    assert apart.median() < 0.03  # of tokens: bf16 rounds differently, and integer codes may flip


@pytest.mark.parametrize(("w4", "batch"), [(False, 5), (False, 16), (True, 1)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
def test_steps_of_few_tokens_are_as_near_to_float32_as_the_other_path(make, family, w4, batch, monkeypatch):
    model = make(family)
    if w4:
        integration.quantize(model)
    ids = torch.randint(1, 2048, (batch, 40), generator=torch.Generator().manual_seed(1)).cuda()
    integration.apply(model)

    def steps():
        cache, found = KestrelCache(model.config, max_tokens=64), []
        with torch.no_grad(), backend("kernel"), modules.in_place(), trace() as counts:
            for part in (ids[:, :20], *ids[:, 20:].split(1, 1)):
                found.append(model(input_ids=part, past_key_values=cache, use_cache=True).logits[:, -1].float())
        return torch.stack(found), counts

    ours, counts = steps()
    taken = "kestrel_quant.w4a16_token" if w4 else "kestrel_norm.rms_norm_linear"
    assert counts[taken]["kernel"] > 0
    monkeypatch.setattr(few_tokens, "serves", lambda x: False)
    other, counts = steps()
    assert taken not in counts
    integration.restore(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, W4Linear):
            linear = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
            linear.weight.data = layer.packed.dequantize()
            if layer.bias is not None:
                linear.bias.data = layer.bias.data
            model.set_submodule(name, linear)
    model.float().set_attn_implementation("eager")
    with torch.no_grad():
        exact = model(ids).logits[:, 19:].transpose(0, 1)
    errors = [(each - exact).norm(dim=-1).median() for each in (ours, other)]
    assert errors[0] <= 1.3 * errors[1], errors


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (1, 0, 3, 2, 4)], ids=["LBHNC", "BLNHC"])
@pytest.mark.parametrize("size", [64, 128])
def test_sections_of_vllms_int4_pages_hold_what_plain_tensors_hold(size, order):
    from kestrel_attention import flash_attn_with_kvcache
    from kestrel_kernels.integrations.vllm import int4
    from kestrel_kvcache import gather_cache, int4_cache_write

    blocks, heads, lengths = 9, 2, (70, 128, 5, 200)
    shape = (3, blocks, heads, 64, int4.bytes_of_a_cell(size))
    memory = torch.zeros([shape[axis] for axis in order], dtype=torch.uint8, device="cuda")
    keys, values, scales = int4.sections(memory.permute([order.index(axis) for axis in range(5)])[1], size)
    plain = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (keys, values, *scales.values())]
    random = torch.Generator("cuda").manual_seed(0)
    table = torch.full((4, 4), -1, dtype=torch.int32, device="cuda")
    pages = iter(torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist())
    for b, length in enumerate(lengths):
        for page in range(-(-length // 64)):
            table[b, page] = next(pages)
    rows = torch.tensor([2, 0, 3, 1], dtype=torch.int32, device="cuda")
    slots = torch.cat(
        [table[b, torch.arange(n) // 64] * 64 + torch.arange(n).cuda() % 64 for b, n in enumerate(lengths)]
    )
    of_token = torch.cat([rows[b].expand(n) for b, n in enumerate(lengths)])
    new = [torch.randn(sum(lengths), heads, size, generator=random, device="cuda").bfloat16() for _ in range(2)]
    query = torch.randn(4, 1, 4 * heads, size, generator=random, device="cuda").bfloat16()
    names, found = ("k_scale", "v_scale", "k_zero", "v_zero"), []
    for k, v, *of in ((keys, values, *scales.values()), plain):
        options = dict(zip(names, of, strict=True)) | {
            "k_tail": torch.zeros(4, 64, heads, size, device="cuda").bfloat16()
        }
        more = [options[name] for name in ("k_scale", "k_zero", "v_scale", "v_zero", "k_tail")]
        int4_cache_write(*new, k, v, *more, slots, of_token)
        counts = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        with trace() as served:
            attended = flash_attn_with_kvcache(
                query, k, v, cache_seqlens=counts, block_table=table, causal=True, seq_ids=rows, **options
            )
            read = gather_cache(k, v, table[3], lengths[3], seq_ids=rows[3:], **options)
        assert not any(each["reference"] for each in served.values())
        found.append([attended, *read, *(x.clone() for x in (k, v, *of))])
    assert found[0][0].isfinite().all()
    assert found[0][0].abs().sum() > 0
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
