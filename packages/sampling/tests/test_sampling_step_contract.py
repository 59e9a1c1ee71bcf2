"""The ops before and after a draw: bad input, registration, torch.compile, nothing read on the host."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode

import kestrel_sampling
from kestrel_runtime import UnsupportedError, backend
from kestrel_runtime.testing import (
    BadInput,
    assert_registered,
    assert_rejects,
    assert_works_or_is_named,
    cases_of,
    derived_bad_inputs,
    odd_calls,
    opcheck,
)
from kestrel_sampling import (
    chain_speculative_sampling,
    process_and_sample,
    process_logits,
    sample_from_logits,
    sample_with_logprobs,
    softmax,
    token_logprobs,
)

LOGITS = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
PER_ROW = torch.tensor([0.5, 1.0, 2.0])
COUNTS = torch.tensor([4, 0, 7])
HISTORY = torch.arange(30).view(3, 10)
MASK = torch.tensor([[-1, -1], [7, 0], [0, 3]], dtype=torch.int32)
PROBS = torch.softmax(LOGITS, -1).expand(3, 3, 40).contiguous()
ZEROS = torch.zeros(3, dtype=torch.int32)

PROCESS: dict[str, Any] = {
    "logits": LOGITS, "token_ids": HISTORY, "lengths": COUNTS, "prompt_lengths": COUNTS.int(),
    "repetition_penalty": PER_ROW, "presence_penalty": 0.5, "frequency_penalty": PER_ROW,
    "bias_ids": HISTORY.int(), "bias_values": torch.ones(3, 10), "bitmask": MASK, "out": torch.empty(3, 40),
}  # fmt: skip
LOGPROBS: dict[str, Any] = {
    "logits": LOGITS, "ids": COUNTS, "top_n": 5, "temperature": PER_ROW, "top_k": COUNTS, "top_p": 0.9,
    "min_p": PER_ROW, "filter_apply_order": "joint",
}  # fmt: skip
CHAIN: dict[str, Any] = {
    "draft_probs": PROBS[:, :2], "draft_token_ids": HISTORY[:, :2], "target_probs": PROBS,
    "maybe_output_accepted_token_num": ZEROS, "maybe_output_emitted_draft_token_num": ZEROS + 1,
    "generator": None, "seed": COUNTS, "offset": 3, "return_valid": True,
}  # fmt: skip
DRAWN: dict[str, Any] = {
    "logits": LOGITS, "temperature": PER_ROW, "top_k": COUNTS, "top_p": 0.9, "min_p": PER_ROW, "top_n": 5,
    "processed": True, "filter_apply_order": "joint", "generator": None, "seed": COUNTS, "offset": 3,
}  # fmt: skip
STEP = {name: value for name, value in PROCESS.items() if name not in ("bias_ids", "bias_values", "out")} | DRAWN
GOOD: dict[Callable[..., Any], dict[str, Any]] = {
    process_logits: PROCESS,
    token_logprobs: LOGPROBS,
    sample_with_logprobs: DRAWN,
    chain_speculative_sampling: CHAIN,
    process_and_sample: STEP,
}


def own(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if torch.is_tensor(value) else value for name, value in kwargs.items()}


process, logprobs, drawn, chain, one_step = (cases_of(kwargs) for kwargs in GOOD.values())
ACCEPTED, EMITTED = "maybe_output_accepted_token_num", "maybe_output_emitted_draft_token_num"
BAD: dict[Callable[..., Any], list[BadInput]] = {
    process_logits: [
        process("float64", "logits", LOGITS.double(), TypeError, "float64"),
        process("one dimension", "logits", LOGITS[0], fragment="2-D"),
        process("no entries", "logits", LOGITS[:, :0], fragment="entry"),
        process("transposed", "logits", torch.rand(40, 3).t(), fragment="contiguous"),
        process("float ids", "token_ids", HISTORY.float(), TypeError, "int32 or int64"),
        process("ids of others", "token_ids", HISTORY[:2], fragment="(3, any)"),
        process("one row of ids", "token_ids", HISTORY[0], fragment="2-D"),
        process("strided ids", "token_ids", HISTORY[:, ::2], fragment="stride"),
        process("lengths in float", "lengths", PER_ROW, TypeError, "int32 or int64"),
        process("lengths of others", "lengths", COUNTS[:2], fragment="(3,)"),
        process("lengths as column", "lengths", COUNTS[:, None], fragment="1-D"),
        process("prompts of others", "prompt_lengths", COUNTS[:2], fragment="(3,)"),
        process("no history", "token_ids", None, (ValueError,), "repetition_penalty"),
        process("lengths alone", "lengths", COUNTS, fragment="None without token_ids", token_ids=None,
                repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0),
        process("prompts alone", "prompt_lengths", COUNTS, fragment="None without token_ids", token_ids=None,
                lengths=None, repetition_penalty=1, presence_penalty=0, frequency_penalty=0),
        process("presence alone", "token_ids", None, fragment="presence_penalty", repetition_penalty=1.0),
        process("frequency alone", "token_ids", None, fragment="frequency_penalty", repetition_penalty=1.0,
                presence_penalty=0.0),
        process("zero", "repetition_penalty", 0.0, fragment="> 0"),
        process("negative", "repetition_penalty", -1, fragment="> 0"),
        process("text", "presence_penalty", "x", TypeError, "number"),
        process("nan", "frequency_penalty", float("nan"), fragment="nan"),
        process("fp16", "presence_penalty", PER_ROW.half(), TypeError, "float32"),
        process("of others", "frequency_penalty", PER_ROW[:2], fragment="(3,)"),
        process("bias without values", "bias_values", None, fragment="bias_ids"),
        process("bias without ids", "bias_ids", None, fragment="bias_values"),
        process("other number of values", "bias_values", torch.ones(3, 9), fragment="(3, 10)"),
        process("values in bf16", "bias_values", torch.ones(3, 10).bfloat16(), TypeError, "float32"),
        process("bias ids in float", "bias_ids", torch.ones(3, 10), TypeError, "int32 or int64"),
        process("int64 words", "bitmask", MASK.long(), TypeError, "int32"),
        process("a word too few", "bitmask", MASK[:, :1], fragment="(3, 2)"),
        process("a word too many", "bitmask", MASK[:, [0, 1, 1]], fragment="(3, 2)"),
        process("a flag for each token", "bitmask", torch.ones(3, 40).bool(), TypeError, "int32"),
        process("bf16 out of float32", "out", LOGITS.bfloat16(), TypeError, "float32"),
        process("short out", "out", LOGITS[:2], fragment="(3, 40)"),
        process("one row for all", "out", torch.empty(40).expand(3, 40), fragment="share memory"),
    ],
    token_logprobs: [
        logprobs("float64", "logits", LOGITS.double(), TypeError, "float64"),
        logprobs("one dimension", "logits", LOGITS[0], fragment="2-D"),
        logprobs("float ids", "ids", PER_ROW, TypeError, "int32 or int64"),
        logprobs("ids of others", "ids", COUNTS[:2], fragment="(3,)"),
        logprobs("one id for all", "ids", COUNTS[:1], fragment="(3,)"),
        logprobs("ids as column", "ids", COUNTS[:, None], fragment="1-D"),
        logprobs("more than there are", "top_n", 41, fragment="<= 40"),
        logprobs("negative", "top_n", -1, fragment=">= 0"),
        logprobs("fractional", "top_n", 1.5, TypeError, "integer"),
        logprobs("below zero", "temperature", -1.0, fragment=">= 0"),
        logprobs("in fp16", "temperature", PER_ROW.half(), TypeError, "float32"),
        logprobs("k in float", "top_k", PER_ROW, TypeError, "int32"),
        logprobs("p for others", "top_p", PER_ROW[:2], fragment="(3,)"),
        logprobs("nan", "min_p", float("nan"), fragment="nan"),
        logprobs("unknown order", "filter_apply_order", "k", fragment="'joint'"),
    ],
    sample_with_logprobs: [
        drawn("float64", "logits", LOGITS.double(), TypeError, "float64"),
        drawn("one dimension", "logits", LOGITS[0], fragment="2-D"),
        drawn("more than there are", "top_n", 41, fragment="<= 40"),
        drawn("negative", "top_n", -1, fragment=">= 0"),
        drawn("below zero", "temperature", -1.0, fragment=">= 0"),
        drawn("a number", "processed", 1, TypeError, "True or False"),
        drawn("p for others", "top_p", PER_ROW[:2], fragment="(3,)"),
        drawn("int32 seeds", "seed", ZEROS, TypeError, "int64"),
        drawn("unknown order", "filter_apply_order", "k", fragment="'joint'"),
    ],
    chain_speculative_sampling: [
        chain("float64", "target_probs", PROBS.double(), TypeError, "float64"),
        chain("two dimensions", "target_probs", PROBS[0], fragment="3-D"),
        chain("no positions", "target_probs", PROBS[:, :0], fragment="at least one position"),
        chain("no entries", "target_probs", PROBS[:, :, :0], fragment="at least one"),
        chain("as many as draft tokens", "target_probs", PROBS[:, :2], fragment="(3, 3, any)"),
        chain("transposed", "target_probs", torch.rand(3, 40, 3).transpose(1, 2), fragment="contiguous"),
        chain("draft in float64", "draft_probs", PROBS[:, :2].double(), TypeError, "float64"),
        chain("draft of other width", "draft_probs", PROBS[:, :2, :39], fragment="(3, 2, 40)"),
        chain("one more than draft tokens", "draft_probs", PROBS, fragment="(3, 2, 40)"),
        chain("float ids", "draft_token_ids", torch.ones(3, 2), TypeError, "int32 or int64"),
        chain("ids of others", "target_probs", PROBS, fragment="(2, 3, any)", draft_token_ids=HISTORY[:2, :2]),
        chain("one row of ids", "draft_token_ids", COUNTS, fragment="2-D"),
        chain("int64 counts", ACCEPTED, COUNTS, TypeError, "int32"),
        chain("counts of others", EMITTED, ZEROS[:2], fragment="(3,)"),
        chain("one count for all", ACCEPTED, ZEROS[:1].expand(3), fragment="stride"),
        chain("the same counts twice", EMITTED, ZEROS, fragment="shares no memory"),
        chain("generator and seed", "generator", torch.Generator(), fragment="seed"),
        chain("offset alone", "offset", 3, fragment="seed", seed=None),
        chain("int32 seeds", "seed", ZEROS, TypeError, "int64"),
        chain("valid as text", "return_valid", "no", TypeError, "True or False"),
    ],
    process_and_sample: [
        one_step("float64", "logits", LOGITS.double(), TypeError, "float64"),
        one_step("one row for all", "logits", LOGITS[:1].expand(3, 40), fragment="share memory"),
        one_step("ids of others", "token_ids", HISTORY[:2], fragment="(3, any)"),
        one_step("no history", "token_ids", None, (ValueError,), "repetition_penalty"),
        one_step("lengths of others", "lengths", COUNTS[:2], fragment="(3,)"),
        one_step("zero", "repetition_penalty", 0.0, fragment="> 0"),
        one_step("fp16", "presence_penalty", PER_ROW.half(), TypeError, "float32"),
        one_step("a word too few", "bitmask", MASK[:, :1], fragment="(3, 2)"),
        one_step("more than there are", "top_n", 41, fragment="<= 40"),
        one_step("below zero", "temperature", -1.0, fragment=">= 0"),
        one_step("a number", "processed", 1, TypeError, "True or False"),
        one_step("int32 seeds", "seed", ZEROS, TypeError, "int64"),
        one_step("unknown order", "filter_apply_order", "k", fragment="'joint'"),
    ],
}  # fmt: skip
CASES = [(function, case) for function, cases in BAD.items() for case in cases]
DERIVED = [(function, case) for function, kwargs in GOOD.items() for case in derived_bad_inputs(function, (), kwargs)]


@pytest.mark.parametrize(
    ("function", "case"), [pytest.param(f, case, id=f"{f.__name__}-{case.name}") for f, case in (*CASES, *DERIVED)]
)
def test_a_bad_input_is_named_before_anything_is_written(function: Callable[..., Any], case: BadInput) -> None:
    kwargs = case.make()[1]
    written = [kwargs.get(name) for name in ("out", "logits", ACCEPTED, EMITTED)]
    before = [x.clone() if torch.is_tensor(x) and x.layout == torch.strided else None for x in written]
    assert_rejects(function, case)
    for x, copy in zip(written, before, strict=True):
        if copy is not None and not x.is_meta:
            assert torch.equal(x.nan_to_num(7), copy.nan_to_num(7))


@pytest.mark.parametrize("function", GOOD, ids=lambda f: f.__name__)
def test_whatever_is_passed_either_works_or_is_named(function: Callable[..., Any]) -> None:
    @settings(max_examples=80, deadline=None)
    @given(call=odd_calls((), own(GOOD[function])))
    def check(call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        assert_works_or_is_named(function, *call)

    check()


# ---- registration ----------------------------------------------------------------------------------------------------

WIDE = torch.randn(8, 60)[::2, 3:43]  # [4, 40]
ROWS, IDS, WORDS = torch.rand(4), torch.arange(12).view(4, 3), torch.arange(8).view(4, 2).int()
FIRST, LAST = IDS[:, 0].clone(), IDS[:, 2].int()
NEUTRAL = (None, 1.0, None, 0.0, None, 0.0)
PENALTIES = (ROWS, 0.0, None, 0.5, ROWS, 0.0)
KEY = (FIRST, 0, None, 7, 1)
CHAINS, TOTALS = torch.softmax(torch.randn(4, 3, 40), -1), (FIRST.int(), LAST)
REGISTERED: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("process_logits", (WIDE, None, None, None, *NEUTRAL, None, None, None), {}),
    ("process_logits", (WIDE.half(), IDS, FIRST, None, *PENALTIES, IDS, IDS.float(), WORDS), {}),
    ("process_logits", (WIDE, IDS.int(), None, LAST[:1], *NEUTRAL, None, None, WORDS), {"out": torch.empty(4, 40)}),
    ("token_logprobs", (WIDE.bfloat16(), FIRST, 5, ROWS, 0.0, None, 9, None, 0.9, ROWS, 0.0, True), {}),
    ("token_logprobs", (WIDE, LAST, 0, None, 1.0, FIRST, 0, ROWS, 0.0, None, 0.0, False), {}),
    ("sample_with_logprobs", (WIDE, ROWS, 0.0, None, 9, None, 0.9, ROWS, 0.0, True, 3, True, *KEY), {}),
    ("sample_with_logprobs", (WIDE.half(), None, 0.5, FIRST, 0, ROWS, 0.0, None, 0.0, False, 0, False, *KEY), {}),
    (
        "process_and_sample",
        (
            WIDE.clone(),
            IDS,
            FIRST,
            None,
            *PENALTIES,
            WORDS,
            ROWS,
            0.0,
            None,
            9,
            None,
            0.9,
            ROWS,
            0.0,
            True,
            3,
            True,
            *KEY,
        ),
        {},
    ),
    (
        "process_and_sample",
        (
            WIDE.half(),
            None,
            None,
            None,
            *NEUTRAL,
            None,
            None,
            0.5,
            FIRST,
            0,
            ROWS,
            0.0,
            None,
            0.0,
            False,
            0,
            False,
            *KEY,
        ),
        {},
    ),
    ("chain_speculative_sampling", (CHAINS[:, 1:].half(), IDS[:, :2], CHAINS, *TOTALS, *KEY), {}),
    ("chain_speculative_sampling", (None, IDS[:, :2].int(), CHAINS.bfloat16(), *TOTALS, *KEY), {}),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), REGISTERED)
def test_registration_agrees_with_torch(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    packet = getattr(torch.ops.kestrel_sampling, op)
    opcheck(packet.out if kwargs else packet.default, args, kwargs)


def test_every_op_is_registered_checked_and_documented() -> None:
    assert_registered(kestrel_sampling)


def step(logits: torch.Tensor, history: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """A step of an engine; history and key change from call to call."""
    processed = process_logits(logits, token_ids=history, lengths=lengths, repetition_penalty=1.3, bitmask=mask)
    ids, valid = sample_from_logits(processed, 0.8, 10, seed=lengths, return_valid=True)
    found = token_logprobs(logits, ids, 2)
    target = softmax(processed, 0.8)[:, None].expand(-1, 3, -1)
    both = sample_with_logprobs(processed, 0.8, 10, top_n=2, seed=lengths)
    chained = chain_speculative_sampling(None, history[:, :2], target, seed=lengths, offset=1)
    penalised = {"token_ids": history, "lengths": lengths, "repetition_penalty": 1.3, "bitmask": mask}
    one_call = process_and_sample(logits.clone(), 0.8, 10, **penalised, top_n=2, seed=lengths)
    return [processed, ids, valid, *found, *token_logprobs(processed, ids, 3, 0.8, 10), *both, *chained, *one_call]


def test_a_step_compiles_into_one_graph() -> None:
    args = (LOGITS, HISTORY, COUNTS, torch.full((3, 2), -1, dtype=torch.int32))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*args), step(*args), strict=True):
        assert torch.equal(got, want)


def test_one_call_is_both_ops_of_a_step() -> None:
    for options in ({"top_k": 9}, {"top_p": 0.7, "processed": True}, {"temperature": 0.0, "min_p": 0.1}):
        for dtype in (torch.float32, torch.bfloat16):
            logits = LOGITS.to(dtype)
            known = {name: STEP[name] for name in PROCESS if name in STEP and name != "logits"}
            one, other = logits.clone(), logits.clone()
            process_logits(one, **known, out=one)
            want = sample_with_logprobs(one, **options, top_n=4, seed=COUNTS, offset=2)
            got = process_and_sample(other, **options, **known, top_n=4, seed=COUNTS, offset=2)
            for x, y in zip(got, want, strict=True):
                assert torch.equal(x.nan_to_num(7), y.nan_to_num(7))


def test_counts_given_to_a_compiled_call_are_written() -> None:
    def call(ids: torch.Tensor, target: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return chain_speculative_sampling(None, ids, target, counts[0], counts[1], seed=1)[0]

    counts, want = torch.ones(2, 3, dtype=torch.int32), torch.ones(2, 3, dtype=torch.int32)
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(HISTORY[:, :2], PROBS, counts)
    assert torch.equal(got, call(HISTORY[:, :2], PROBS, want))
    assert torch.equal(counts, want)


def test_nothing_is_read_on_the_host() -> None:
    with FakeTensorMode() as mode:  # a read of a value would raise here
        args = [mode.from_tensor(x) for x in (LOGITS, HISTORY, COUNTS, MASK)]
        processed, *_ = results = step(*args)
        draft = mode.from_tensor(PROBS)
        chain_speculative_sampling(draft[:, :2], args[1][:, :2], draft, seed=args[2], offset=args[2])
        for function in (process_logits, token_logprobs, sample_with_logprobs, process_and_sample):
            fake = {k: mode.from_tensor(v) if torch.is_tensor(v) else v for k, v in GOOD[function].items()}
            function(**fake)
    assert processed.shape == (3, 40)
    assert len(results) == 26


def test_the_references_read_nothing_on_the_host() -> None:
    from kestrel_sampling import reference_logits, reference_speculative

    with FakeTensorMode():
        logits, ids, floats, words = torch.empty(3, 40), torch.empty(3).long(), torch.empty(3), torch.empty(3, 2).int()
        history, probs, counts = torch.empty(3, 2).long(), torch.empty(3, 3, 40), torch.empty(2, 3).int()
        processed = reference_logits.process_logits(
            logits, history, ids, ids, floats, 0.0, floats, 0.0, None, 0.5, history, history.float(), words
        )
        found = reference_logits.token_logprobs(logits, ids, 5, floats, 0.0, ids, 0, floats, 0.0, floats, 0.0, False)
        key = (ids, 0, None, 5, 0)
        for draft in (None, probs[:, :2]):
            out, valid = reference_speculative.chain_speculative_sampling(draft, history, probs, *counts, *key)
            assert (out.shape, valid.shape) == ((3, 3), (3,))
    assert processed.shape == (3, 40)
    assert [tuple(x.shape) for x in found] == [(3,), (3,), (3, 5), (3, 5)]


@pytest.mark.parametrize("function", GOOD, ids=lambda f: f.__name__)
def test_the_kernel_backend_refuses_cpu_tensors(function: Callable[..., Any]) -> None:
    with backend("kernel"), pytest.raises(UnsupportedError, match=function.__name__):
        function(**own(GOOD[function]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(**own(GOOD[function]))
