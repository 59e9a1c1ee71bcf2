"""The demo's decoder against the plain torch module, on text that training never saw."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from logit_bounds import ROUNDING_OF_TINY
from torch.nn import functional as F

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bits_per_byte(windows, prefill):
    def measure(logits_of) -> float:
        total = 0.0
        for window in windows:
            logits = logits_of(window[:-1])
            total += F.cross_entropy(logits.float(), window[1:]).item()
        return total / len(windows) / math.log(2)

    return measure


@pytest.fixture(scope="module")
def plain_bits(plain, bits_per_byte) -> float:
    with torch.no_grad():
        return bits_per_byte(lambda tokens: plain(tokens[None])[0])


@pytest.fixture(scope="module")
def demo_bits(decoder, prefill, bits_per_byte):
    def measure(dtype: torch.dtype, **options: object) -> float:
        model = decoder(dtype, **options)
        return bits_per_byte(lambda tokens: prefill(model, [tokens.tolist()]))

    return measure


@pytest.fixture(scope="module")
def bf16_bits(demo_bits) -> float:
    return demo_bits(torch.bfloat16)


def relative_perplexity(bits: float, other: float) -> float:
    return abs(2 ** (bits - other) - 1)


def test_the_model_has_learnt_something(plain_bits):
    assert 0.5 < plain_bits < 1.5, "bits per byte of held-out Python"


def test_perplexity_in_float32_is_the_plain_modules(demo_bits, plain_bits):
    assert relative_perplexity(demo_bits(torch.float32), plain_bits) < 1e-5  # asked for: 0.1 %


def test_perplexity_in_bf16_is_close(bf16_bits, plain_bits):
    assert relative_perplexity(bf16_bits, plain_bits) < 0.005


def test_perplexity_in_fp16_is_close(demo_bits, plain_bits):
    assert relative_perplexity(demo_bits(torch.float16), plain_bits) < 0.005


@pytest.mark.parametrize("option", [{"kv_cache": "fp8"}, {"fp8_experts": True}])
def test_perplexity_with_fp8_is_close_to_bf16(option, demo_bits, bf16_bits):
    bits = demo_bits(torch.bfloat16, **option)
    assert bits != bf16_bits, "FP8 changes something"
    assert relative_perplexity(bits, bf16_bits) < 0.02


def test_greedy_text_is_the_plain_modules_byte_for_byte(plain, decoder, held_out):
    from kestrel_kernels.demo.generate import Sampling, generate

    prompt = held_out[:70].tolist()
    ours = [token for [token] in generate(decoder(), [prompt], 60, Sampling(temperature=0.0))]
    with torch.no_grad():
        assert ours == plain.greedy(torch.tensor(prompt), 60).tolist()


@pytest.mark.parametrize("kv_cache", ["auto", "fp8", "int8", "int4"])
def test_where_pages_lie_changes_no_bit(kv_cache, decoder, prefill, held_out):
    tokens = held_out[:140].tolist()
    logits = [
        prefill(decoder(torch.bfloat16, kv_cache=kv_cache, order_seed=seed), [tokens], chunk=50)
        for seed in (None, 1, 2)
    ]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_what_unused_pages_hold_changes_no_bit(decoder, prefill, held_out):
    tokens = held_out[:100].tolist()
    clean, poisoned = decoder(order_seed=3), decoder(order_seed=3)
    for store in poisoned.cache.layers:
        store.keys.fill_(float("nan"))
        store.values.fill_(float("nan"))
    assert torch.equal(prefill(clean, [tokens], chunk=60), prefill(poisoned, [tokens], chunk=60))


@pytest.mark.parametrize(("chunk", "length"), [(1, 40), (7, 130), (64, 130)])
def test_prefill_in_chunks_and_decoding_equal_one_prefill(chunk, length, decoder, prefill, held_out):
    tokens = held_out[:length].tolist()
    whole = prefill(decoder(), [tokens])
    torch.testing.assert_close(prefill(decoder(), [tokens], chunk=chunk), whole, **ROUNDING_OF_TINY)


def test_a_batch_of_ragged_sequences_equals_each_alone(decoder, prefill, held_out):
    sequences = [held_out[start : start + n].tolist() for start, n in ((0, 1), (5000, 37), (9000, 200), (20000, 3))]
    model = decoder(order_seed=4)
    together = prefill(model, sequences).split([len(sequence) for sequence in sequences])
    assert model.cache.free == 1024
    for sequence, logits in zip(sequences, together, strict=True):
        torch.testing.assert_close(logits, prefill(model, [sequence]), **ROUNDING_OF_TINY)


@pytest.mark.parametrize("kv_cache", ["int8", "int4"])
def test_a_batch_over_integer_caches_equals_each_sequence_alone(kv_cache, decoder, prefill, held_out):
    """But for codes that a last bit turns; another sequence's page or tail would be off by a logit."""
    sequences = [held_out[start : start + n].tolist() for start, n in ((0, 1), (5000, 70), (9000, 130), (20000, 3))]
    model = decoder(order_seed=4, kv_cache=kv_cache)
    together = prefill(model, sequences).split([len(sequence) for sequence in sequences])
    for sequence, logits in zip(sequences, together, strict=True):
        assert (logits - prefill(model, [sequence])).abs().mean() < 0.05


def test_fewer_kv_heads_and_head_widths_that_are_not_the_models(plain_model):
    """Random weights: a shape in which nothing coincides, so that no transposition can hide."""
    from kestrel_kernels.demo.cache import PagedCache
    from kestrel_kernels.demo.config import DecoderConfig
    from kestrel_kernels.demo.model import Decoder, Step
    from kestrel_kernels.demo.weights import assemble

    shape = plain_model.Shape(
        width=48,
        layers=3,
        dense_layers=2,
        heads=4,
        kv_heads=2,
        head_size=16,
        rotary_size=8,
        rotary_base=500.0,
        dense_inner=80,
        experts=5,
        experts_per_token=3,
        expert_inner=24,
        vocabulary=77,
        context=64,
    )
    plain = plain_model.PlainModel(shape)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    state = plain.state_dict()
    config = DecoderConfig(**dataclasses.asdict(shape))
    weights = assemble(config, lambda name, _: state[name].clone(), fp8_experts=False)
    model = Decoder(weights, PagedCache(weights, 64))
    tokens = torch.randint(77, (50,), generator=generator)
    table = model.cache.reserve([50])
    with torch.no_grad():
        ours = model(tokens, Step.prefill(table, [50]))
        torch.testing.assert_close(ours, plain(tokens[None])[0], **ROUNDING_OF_TINY)


def test_linear_layers_in_4_bits_cost_little_perplexity(decoder, demo_bits, bf16_bits):
    from kestrel_quant import W4Weight

    packed = decoder(torch.bfloat16, w4_layers=True).weights
    first, last = packed.layers[0], packed.layers[-1]
    dense = first.feed_forward
    for linear in (first.qkv, first.tau, first.out, dense.up, dense.down, packed.head):
        assert isinstance(linear.weight, W4Weight)
    assert isinstance(last.feed_forward.router.weight, torch.Tensor)
    bits = demo_bits(torch.bfloat16, w4_layers=True)
    print(f"perplexity {2 ** (bits - bf16_bits) - 1:+.3%}")
    assert 0 < relative_perplexity(bits, bf16_bits) < 0.05
