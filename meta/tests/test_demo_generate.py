"""The loop around the decoder: sampling, stopping, batches, and requests that do not fit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

PROMPT = b"\0import os\n\n\ndef walk("


def run(decoder, prompts, new_tokens, *, stop=None, **sampling):
    from kestrel_kernels.demo.generate import Sampling, generate

    return list(generate(decoder, prompts, new_tokens, Sampling(**sampling), stop=stop))


def test_the_same_seed_draws_the_same_text(decoder):
    model = decoder()
    first, again, other = (run(model, [list(PROMPT)], 16, seed=seed) for seed in (5, 5, 6))
    assert first == again != other


def test_every_step_draws_with_random_words_of_its_own(decoder):
    """Equal logits at every step: without a counter that advances, all steps would draw one token."""
    from kestrel_kernels.demo.generate import Chooser, Sampling

    choose = Chooser(Sampling(temperature=1.0, top_p=1.0, seed=3), 2, decoder())
    drawn = torch.stack([choose(torch.zeros(2, 256))[1] for _ in range(20)])
    assert choose.draw.tolist() == [20]
    for row in range(2):
        assert len(drawn[:, row].unique()) > 10, f"sequence {row}: {drawn[:, row].tolist()}"


def test_a_sequence_draws_the_same_text_in_a_batch(decoder):
    model = decoder(order_seed=1)
    prompts = [list(PROMPT), list(b"\0class Point:\n    def __init__(self, x, y"), [0]]
    together = run(model, prompts, 12, seed=7)
    for index, prompt in enumerate(prompts):
        alone = run(model, [prompt], 12, seed=7 + index)
        assert [tokens[index] for tokens in together] == [token for [token] in alone]


def test_temperature_0_is_greedy_and_the_nucleus_of_a_tiny_p_too(decoder):
    model = decoder()
    greedy = run(model, [list(PROMPT)], 12, temperature=0.0)
    assert run(model, [list(PROMPT)], 12, temperature=1.0, top_p=1e-6) == greedy


def test_generation_ends_where_the_document_ends(decoder):
    model = decoder()
    with torch.no_grad():
        model.weights.head.bias[0] += 1000  # byte 0 wins at once
    assert run(model, [list(PROMPT)], 30, stop=0) == [[0]]
    assert run(model, [list(PROMPT)], 3) == [[0], [0], [0]]


def test_pages_come_back_also_when_the_text_is_abandoned(decoder):
    from kestrel_kernels.demo.generate import Sampling, generate

    model = decoder(tokens=60)
    tokens = generate(model, [list(PROMPT)], 20, Sampling())
    next(tokens)
    assert model.cache.free == 60 - len(PROMPT) - 19
    tokens.close()
    assert model.cache.free == 60
    run(model, [list(PROMPT)], 60 - len(PROMPT) + 1)  # the last token is not cached
    assert model.cache.free == 60


def test_logits_that_are_not_numbers_give_an_error_not_a_token(decoder):
    from kestrel_kernels.demo.config import DemoError

    model = decoder()
    with torch.no_grad():
        model.weights.head.bias.fill_(float("nan"))
    for temperature in (0.0, 1.0):
        with pytest.raises(DemoError, match="expected finite logits"):
            run(model, [list(PROMPT)], 5, temperature=temperature)


@pytest.mark.parametrize(
    ("prompts", "new_tokens", "message"),
    [
        ([[]], 5, "--prompt: expected at least one character, got none"),
        ([], 5, "prompts: expected at least one, got none"),
        ([[65]], 0, "--max-new-tokens: expected at least 1, got 0"),
        ([[65, 256]], 5, "--prompt: expected tokens below 256, got 256"),
        ([[-1]], 5, "--prompt: expected tokens below 256, got -1"),
        ([[65] * 1025], 1, r"expected at most 1024 tokens .* got 1025 and 1 new ones"),
        ([[65] * 1000], 26, r"expected at most 1024 tokens .* got 1000 and 26 new ones"),
        ([[65] * 50, [65] * 60], 10, r"expected pages for 128 tokens \(2 sequences\), got 100 free pages of 100"),
    ],
)
def test_requests_that_do_not_fit_are_refused(prompts, new_tokens, message, decoder):
    from kestrel_kernels.demo.config import DemoError

    model = decoder(tokens=100)
    with pytest.raises(DemoError, match=message):
        run(model, prompts, new_tokens)
    assert model.cache.free == 100


@pytest.mark.parametrize("kv_cache", ["auto", "fp8", "int8", "int4"])
def test_one_new_token_needs_no_page_behind_the_prompt(kv_cache, decoder):
    model = decoder(kv_cache=kv_cache)
    prompts = [[65] * 64, [65] * 3]
    assert run(model, prompts, 1) == run(model, prompts, 2)[:1]


def test_the_whole_context_can_be_used(decoder):
    assert len(run(decoder(), [[65] * 1020], 5)) == 5


def test_a_decode_step_reads_nothing_on_the_host():
    """Fake tensors hold no values, so whatever asked for one would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from kestrel_kernels.demo.cache import PagedCache
    from kestrel_kernels.demo.config import PRESETS
    from kestrel_kernels.demo.generate import Chooser, Sampling
    from kestrel_kernels.demo.model import Decoder, Step
    from kestrel_kernels.demo.weights import random

    with FakeTensorMode():
        config = dataclasses.replace(PRESETS["tiny"], layers=2)  # one dense, one with experts
        weights = random(config, torch.bfloat16, torch.device("cpu"), fp8_experts=True)
        cache = PagedCache(weights, 64, kind="fp8", sequences=2)
        model = Decoder(weights, cache)
        table = cache.reserve([10, 3])
        for temperature in (0.0, 1.0):
            choose = Chooser(Sampling(temperature), 2, model)
            ids, positions = torch.zeros(2, dtype=torch.int32), torch.tensor([4, 2])
            for _ in range(2):
                ids, _ = choose(model(ids, Step.decode(table, positions)))
                positions = positions + 1
            assert ids.shape == (2,)


def test_bytes_become_text_as_soon_as_a_character_is_complete():
    from kestrel_kernels.demo.config import PRESETS
    from kestrel_kernels.demo.generate import Text
    from kestrel_kernels.demo.request import encode

    text = Text(PRESETS["tiny"])
    assert [text.add(byte) for byte in "aé€\U0001f40d".encode()] == list("a") + ["", "é", "", "", "€"] + [""] * 3 + [
        "🐍"
    ]
    assert text.add(0xC3) == ""
    assert text.add(ord("x")) == "�x"
    assert text.add(0xE2) == ""
    assert text.end() == "�"
    assert encode("é") == [0, 0xC3, 0xA9]
    assert Text(PRESETS["moondream3"]).add(50000) == "50000 "
