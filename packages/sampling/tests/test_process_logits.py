"""process_logits against the formulas of vLLM and transformers, token by token and rounded to float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sampling_oracle import DTYPES, rounded

from kestrel_runtime.testing import LAYOUTS, assert_runs_repeat, assert_same_bits, in_layout
from kestrel_sampling import process_logits, sample_from_logits

INF = math.inf


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logits_of(rows: int, width: int, seed: int = 3) -> torch.Tensor:
    return 4 * torch.randn(rows, width, generator=generator(seed))


def by_hand(
    row: list[float],
    *,
    prompt: list[int] = [],  # noqa: B006
    output: list[int] = [],  # noqa: B006
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: list[tuple[int, float]] = [],  # noqa: B006
    allowed: set[int] | None = None,
) -> list[float]:
    """One row. float64 holds each operation on two float32 numbers closely enough to round it as float32 does."""
    result = []
    for token, logit in enumerate(row):
        added = [value for id_, value in bias if id_ == token]
        if added:
            logit = rounded(logit + sum(added))
        if token in prompt or token in output:
            logit = rounded(logit / rounded(repetition) if logit > 0 else logit * rounded(repetition))
        if token in output:
            logit = rounded(logit - rounded(rounded(frequency) * output.count(token)))
            logit = rounded(logit - rounded(presence))
        result.append(logit if allowed is None or token in allowed else -INF)
    return result


def bitmask_of(allowed: list[set[int]], width: int) -> torch.Tensor:
    """The words that xgrammar and llguidance write: token i is bit i % 32 of word i // 32."""
    words = [[0] * -(-width // 32) for _ in allowed]
    for row, ids in zip(words, allowed, strict=True):
        for i in ids:
            row[i // 32] |= 1 << i % 32
    return torch.tensor([[w - 2**32 if w >= 2**31 else w for w in row] for row in words], dtype=torch.int32)


# ---- the formulas ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 5, 33, 111])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_all_steps_together_are_those_by_hand(width: int, dtype: torch.dtype, ids: torch.dtype) -> None:
    rows, length = 4, 40
    logits = logits_of(rows, width).to(dtype)
    tokens = torch.randint(-1, width + 1, (rows, length), generator=generator(1)).to(ids)  # -1 and V are padding
    lengths, prompts = torch.tensor([40, 17, 0, 25]), torch.tensor([10, 17, 5, 0])
    repetition, presence = torch.tensor([1.3, 0.7, 1.1, 1.0]), torch.tensor([0.5, -0.25, 1.0, 0.3])
    frequency = torch.tensor([0.1, 0.2, -0.3, 0.7])
    bias_ids = torch.randint(-1, width + 1, (rows, 6), generator=generator(2)).to(ids)
    bias_values = torch.randn(rows, 6, generator=generator(4))
    masks = [{i for i in range(width) if (i * (b + 2)) % 3 != 1} for b in range(rows)]
    got = process_logits(
        logits, token_ids=tokens, lengths=lengths, prompt_lengths=prompts, repetition_penalty=repetition,
        presence_penalty=presence, frequency_penalty=frequency, bias_ids=bias_ids, bias_values=bias_values,
        bitmask=bitmask_of(masks, width),
    )  # fmt: skip
    assert got.dtype == torch.float32
    for b in range(rows):
        history = tokens[b].tolist()[: lengths[b]]
        want = by_hand(
            logits[b].tolist(), prompt=history[: prompts[b]], output=history[prompts[b] :],
            repetition=repetition[b].item(), presence=presence[b].item(), frequency=frequency[b].item(),
            bias=list(zip(bias_ids[b].tolist(), bias_values[b].tolist(), strict=True)), allowed=masks[b],
        )  # fmt: skip
        assert_same_bits(got[b], torch.tensor(want), f"row {b}")


@pytest.mark.parametrize("penalty", [0.5, 1.2, 1.7, 3.0])
def test_repetition_is_that_of_transformers(penalty: float) -> None:
    transformers = pytest.importorskip("transformers")
    logits, tokens = logits_of(5, 1000), torch.randint(0, 1000, (5, 300), generator=generator(5))
    want = transformers.RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits.clone())
    assert_same_bits(process_logits(logits, token_ids=tokens, repetition_penalty=penalty), want)


def test_bias_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    logits, bias = logits_of(2, 50), {4: 1.7, 30: -100.0, 49: 1e-3}
    want = transformers.SequenceBiasLogitsProcessor({(id_,): value for id_, value in bias.items()})(
        torch.zeros(2, 1, dtype=torch.int64), logits.clone()
    )
    ids, values = torch.tensor([list(bias)] * 2), torch.tensor([list(bias.values())] * 2)
    assert_same_bits(process_logits(logits, bias_ids=ids, bias_values=values), want)


def penalised_as_in_vllm(
    logits: torch.Tensor, prompt: torch.Tensor, output: torch.Tensor, rep: torch.Tensor, pres: torch.Tensor,
    freq: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """vLLM's apply_penalties, written anew: dense counts in float32, padding is the id V."""
    width = logits.shape[1]
    counts = torch.nn.functional.one_hot(output, width + 1)[..., :width].sum(1)
    in_prompt = torch.nn.functional.one_hot(prompt, width + 1)[..., :width].sum(1) > 0
    scale = torch.where(in_prompt | (counts > 0), rep[:, None], 1.0)
    logits = torch.where(logits > 0, logits / scale, logits * scale)
    logits = logits - freq[:, None] * counts
    return logits - pres[:, None] * (counts > 0)


def test_penalties_are_those_of_vllm() -> None:
    rows, width = 6, 777
    logits = logits_of(rows, width)
    tokens = torch.randint(0, width, (rows, 500), generator=generator(7))
    place, lengths = torch.arange(500), torch.tensor([500, 0, 60, 200, 300, 1])
    prompts = torch.tensor([100, 0, 60, 0, 299, 0])
    prompt = torch.where(place < torch.minimum(prompts, lengths)[:, None], tokens, width)
    output = torch.where((place >= prompts[:, None]) & (place < lengths[:, None]), tokens, width)
    rep, pres, freq = (s + torch.rand(rows, generator=generator(n)) for n, s in ((8, 0.6), (9, -0.5), (10, -0.5)))
    got = process_logits(
        logits, token_ids=tokens, lengths=lengths, prompt_lengths=prompts, repetition_penalty=rep,
        presence_penalty=pres, frequency_penalty=freq,
    )  # fmt: skip
    assert_same_bits(got, penalised_as_in_vllm(logits, prompt, output, rep, pres, freq))


def test_the_steps_run_in_the_order_of_the_docstring() -> None:
    logits = torch.tensor([[-1.0, 1.0, 2.0, 5.0]])
    options = {
        "token_ids": torch.tensor([[0, 1, 1]]), "repetition_penalty": 2.0, "frequency_penalty": 0.25,
        "presence_penalty": 0.5, "bias_ids": torch.tensor([[0, 1, 3]]), "bias_values": torch.tensor([[3.0, -2.0, INF]]),
        "bitmask": torch.tensor([[0b0111]], dtype=torch.int32),
    }  # fmt: skip
    # (-1 + 3) / 2 - 0.25 - 0.5 and (1 - 2) * 2 - 0.5 - 0.5; the mask comes after an infinite bias
    assert process_logits(logits, **options).tolist() == [[0.25, -3.0, 2.0, -INF]]


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [0.7, 1 / 3, 1.9])
def test_a_number_and_a_tensor_of_it_give_the_same(name: str, value: float) -> None:
    logits, tokens = logits_of(3, 40), torch.randint(0, 40, (3, 30), generator=generator(1))
    want = process_logits(logits, token_ids=tokens, **{name: value})
    assert not torch.equal(want, logits)
    for tensor in (torch.tensor([value]), torch.tensor([value] * 3)):
        assert_same_bits(process_logits(logits, token_ids=tokens, **{name: tensor}), want)


def test_only_the_repetition_penalty_counts_the_prompt() -> None:
    logits, tokens = torch.ones(1, 3), torch.tensor([[0, 0, 1, 1]])
    given = {"token_ids": tokens, "prompt_lengths": torch.tensor([2])}
    assert process_logits(logits, repetition_penalty=2.0, **given).tolist() == [[0.5, 0.5, 1.0]]
    assert process_logits(logits, presence_penalty=2.0, **given).tolist() == [[1.0, -1.0, 1.0]]
    assert process_logits(logits, frequency_penalty=2.0, **given).tolist() == [[1.0, -3.0, 1.0]]
    assert process_logits(logits, frequency_penalty=2.0, token_ids=tokens).tolist() == [[-3.0, -3.0, 1.0]]


@pytest.mark.parametrize(("length", "counted"), [(-3, 0), (0, 0), (2, 2), (4, 4), (900, 4)])
def test_a_length_beyond_the_history_is_its_end(length: int, counted: int) -> None:
    lengths = torch.tensor([length], dtype=torch.int32)
    got = process_logits(torch.zeros(2, 1), token_ids=torch.zeros(2, 4).int(), lengths=lengths, frequency_penalty=1.0)
    assert got.tolist() == [[-float(counted)]] * 2


def test_repeated_bias_ids_add_up_before_the_one_rounding() -> None:
    ids = torch.tensor([[2, 2, 2, 0, -1, 3]])
    values = torch.tensor([[1e8, 0.5, -1e8, 2.0, 9.0, 9.0]])
    assert process_logits(torch.zeros(1, 3), bias_ids=ids, bias_values=values).tolist() == [[2.0, 0.0, 0.5]]


# ---- the bitmask -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 111, 51200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_whose_bit_is_off_become_minus_infinity(width: int, dtype: torch.dtype) -> None:
    logits = logits_of(3, width).to(dtype)
    allowed = torch.rand(3, width, generator=generator(width)) < 0.5
    mask = bitmask_of([set(row.nonzero().flatten().tolist()) for row in allowed], width)
    assert_same_bits(process_logits(logits, bitmask=mask), torch.where(allowed, logits.float(), -INF))


def test_a_row_of_minus_one_allows_all_and_bits_past_the_vocabulary_mean_nothing() -> None:
    logits = logits_of(2, 40)
    assert_same_bits(process_logits(logits, bitmask=torch.full((2, 2), -1, dtype=torch.int32)), logits)
    past = torch.tensor([[0, 0], [0, -256]], dtype=torch.int32)  # bits 40 to 63 alone
    assert process_logits(logits, bitmask=past).eq(-INF).all()


def test_a_row_without_an_allowed_token_samples_0_and_is_not_valid() -> None:
    mask = bitmask_of([set(), {37}, {3, 5}], 40)
    masked = process_logits(logits_of(3, 40), bitmask=mask)
    assert masked[0].eq(-INF).all()
    ids, valid = sample_from_logits(masked, seed=1, return_valid=True)
    assert ids[:2].tolist() == [0, 37]
    assert ids[2] in (3, 5)
    assert valid.tolist() == [False, True, True]


def test_a_masked_token_is_minus_infinity_even_where_its_logit_is_nan() -> None:
    logits = torch.tensor([[math.nan, INF, -INF, 1.0]])
    mask = torch.tensor([[0b1000]], dtype=torch.int32)
    assert process_logits(logits, bitmask=mask).tolist() == [[-INF, -INF, -INF, 1.0]]


# ---- rows, layouts, outputs ------------------------------------------------------------------------------------------


def some_options(rows: int, width: int) -> dict[str, Any]:
    return {
        "token_ids": torch.randint(-1, width, (rows, 20), generator=generator(1)),
        "lengths": torch.arange(rows) + 15,
        "prompt_lengths": torch.arange(rows),
        "repetition_penalty": 1.5,
        "presence_penalty": torch.full((rows,), 0.25),
        "frequency_penalty": 0.125,
        "bias_ids": torch.randint(0, width, (rows, 4), generator=generator(2)),
        "bias_values": torch.randn(rows, 4, generator=generator(3)),
        "bitmask": torch.randint(-(2**31), 2**31, (rows, -(-width // 32)), generator=generator(4)).int(),
    }


def test_nan_and_infinity_stay_where_no_mask_is() -> None:
    logits = torch.tensor([[math.nan, INF, -INF, 0.0], [1.0, math.nan, 1.0, -INF]])
    tokens = torch.tensor([[0, 1, 2], [0, 3, 3]])
    got = process_logits(logits, token_ids=tokens, repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=1.0)
    want = torch.tensor([[math.nan, INF, -INF, 0.0], [-1.5, math.nan, 1.0, -INF]])
    assert torch.equal(got.nan_to_num(99, INF, -INF), want.nan_to_num(99, INF, -INF))


def test_tokens_outside_the_history_keep_their_bits_whatever_the_penalty() -> None:
    logits = torch.tensor([[-0.0, 1.0, -0.0, -0.0]])
    got = process_logits(
        logits, token_ids=torch.tensor([[1]]), repetition_penalty=1.5, frequency_penalty=torch.tensor([INF]),
        bias_ids=torch.tensor([[1]]), bias_values=torch.tensor([[0.0]]),
    )  # fmt: skip
    assert_same_bits(got, torch.tensor([[-0.0, -INF, -0.0, -0.0]]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_are_read_in_place_and_not_written(layout: str, dtype: torch.dtype) -> None:
    logits, options = logits_of(4, 70).to(dtype), some_options(4, 70)
    want = process_logits(logits, **options)
    keep_1d = ("lengths", "prompt_lengths", "presence_penalty")
    views = {k: in_layout(v, layout) if torch.is_tensor(v) and k not in keep_1d else v for k, v in options.items()}
    wide = torch.full((8, 90), -7.0, dtype=dtype)
    wide[::2, 10:80] = logits
    before = wide.clone()
    assert_same_bits(process_logits(wide[::2, 10:80], **views), want)
    assert torch.equal(wide, before)
    one_for_all = options["bitmask"][:1].expand(4, -1)
    assert_same_bits(process_logits(logits, bitmask=one_for_all), process_logits(logits, bitmask=one_for_all.clone()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_may_be_the_logits_and_is_rounded_once(dtype: torch.dtype) -> None:
    logits, options = logits_of(4, 70).to(dtype), some_options(4, 70)
    want = process_logits(logits, **options)
    out = torch.full((4, 80), -7.0)
    process_logits(logits, **options, out=out[:, 5:75])
    assert_same_bits(out[:, 5:75], want)
    assert bool((out[:, :5] == -7).all() and (out[:, 75:] == -7).all())
    own = logits.clone()
    assert process_logits(own, **options, out=own) is own
    assert_same_bits(own, want.to(dtype))


def test_a_row_does_not_depend_on_its_batch_and_runs_repeat() -> None:
    logits, options = logits_of(4, 70), some_options(4, 70)
    full = assert_runs_repeat(process_logits, logits, **options)
    alone = {k: v[2:3] if torch.is_tensor(v) else v for k, v in options.items()}
    assert_same_bits(process_logits(logits[2:3], **alone), full[2:3])


@pytest.mark.parametrize(("rows", "length", "biases"), [(0, 20, 3), (0, 0, 0), (3, 0, 0)])
def test_nothing_to_count_leaves_the_logits(rows: int, length: int, biases: int) -> None:
    logits = logits_of(rows, 40)
    got = process_logits(
        logits, token_ids=torch.empty(rows, length).int(), repetition_penalty=2.0, presence_penalty=1.0,
        bias_ids=torch.empty(rows, biases).long(), bias_values=torch.empty(rows, biases),
        bitmask=torch.full((rows, 2), -1, dtype=torch.int32),
    )  # fmt: skip
    assert_same_bits(got, logits)


def test_without_options_it_is_a_copy_in_float32() -> None:
    for dtype in DTYPES:
        logits = logits_of(2, 9).to(dtype)
        got = process_logits(logits)
        assert_same_bits(got, logits.float())
        assert got.data_ptr() != logits.data_ptr()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_banned_token_is_never_drawn(temperature: float) -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0, 0.0]]).expand(300, -1)
    draw: Callable[[torch.Tensor], torch.Tensor] = lambda rows: sample_from_logits(  # noqa: E731
        rows, temperature, seed=2, offset=torch.arange(300)
    )
    assert 0 in draw(logits)
    bias = {"bias_ids": torch.tensor([[0]]).expand(300, -1), "bias_values": torch.full((300, 1), -INF)}
    assert 0 not in draw(process_logits(logits, **bias))
    assert set(draw(process_logits(logits, bitmask=torch.full((300, 1), 0b1110, dtype=torch.int32))).tolist()) <= {1, 2}
