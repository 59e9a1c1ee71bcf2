"""Every sampling op: no rows, bad input, registration, torch.compile."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_oracle import (
    FILTERS,
    distributions,
    sample_probs,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import kestrel_sampling
from kestrel_runtime.testing import BadInput, assert_rejects, opcheck
from kestrel_sampling import (
    min_p_sampling_from_probs,
    reference_sampling,
    sample_from_logits,
    sampling_from_probs,
    softmax,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
    topk_fwd,
)


def test_no_rows() -> None:
    empty = torch.empty(0, 10)
    for options in FILTERS[:9]:
        if not {"min_p", "top_k"} <= set(options):
            assert sample_probs(options, empty, torch.empty(0, dtype=torch.int64)).shape == (0,)
    assert sample_from_logits(empty).shape == (0,)
    assert top_p_renorm_probs(empty, 0.5).shape == top_k_renorm_probs(empty, 5).shape == (0, 10)


def test_the_references_read_nothing_on_the_host_but_for_top_p() -> None:
    with FakeTensorMode():  # a read of a value would raise here
        logits, seeds, floats = torch.empty(3, 100), torch.empty(3, dtype=torch.int64), torch.empty(3)
        key = (seeds, 0, None, 5, 0)
        draws = [
            reference_sampling.sampling_from_probs(logits, *key),
            reference_sampling.top_k_sampling_from_probs(logits, seeds, 0, *key),
            reference_sampling.min_p_sampling_from_probs(logits, floats, 0.0, *key),
            reference_sampling.sample_from_logits(logits, floats, 0.0, seeds, 0, None, 1.0, floats, 0.0, False, *key),
        ]
        rows = [
            reference_sampling.softmax(logits, floats),
            reference_sampling.top_p_renorm_probs(logits, floats, 0.0),
            reference_sampling.top_k_renorm_probs(logits, seeds, 0),
        ]
    assert all(ids.shape == valid.shape == (3,) for ids, valid in draws)
    assert all(result.shape == (3, 100) for result in rows)


# ---- the contract ----------------------------------------------------------------------------------------------------

PROBS = distributions(3, 8)
ONES = torch.ones(3, dtype=torch.int64)
Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Callable[[], Call]:
    return lambda: (args, kwargs)


GOOD_CALLS: dict[str, Call] = {
    "sampling_from_probs": ((PROBS,), {"seed": 1, "offset": 2, "return_valid": True}),
    "top_k_sampling_from_probs": ((PROBS, 3), {"seed": 1, "offset": None, "generator": None}),
    "top_k_top_p_sampling_from_probs": ((PROBS, 3, 0.9), {"filter_apply_order": "joint", "seed": 1}),
    "min_p_sampling_from_probs": ((PROBS, 0.1), {"seed": ONES, "offset": ONES}),
    "sample_from_logits": (
        (PROBS, 1.0, 5, 0.9, 0.1),
        {"filter_apply_order": "joint", "seed": 1, "return_valid": False},
    ),
    "softmax": ((PROBS, 0.5), {"out": None}),
    "top_p_renorm_probs": ((PROBS, 0.5), {"out": None}),
    "top_k_renorm_probs": ((PROBS, 5), {"out": None}),
}
FIRST = {op: "logits" if op in ("sample_from_logits", "softmax") else "probs" for op in GOOD_CALLS}


def with_first(op: str, value: Any) -> Callable[[], Call]:
    args, kwargs = GOOD_CALLS[op]
    return lambda: ((value, *args[1:]), kwargs)


def with_flag(op: str, value: Any) -> Callable[[], Call]:
    args, kwargs = GOOD_CALLS[op]
    return lambda: (args, {**kwargs, "return_valid": value})


# The tensors of each op, all given: every one beside the others may be elsewhere.
KEYS = {"seed": ONES, "offset": ONES}
TENSORS: dict[str, dict[str, torch.Tensor]] = {
    "sampling_from_probs": {"probs": PROBS, **KEYS},
    "top_k_sampling_from_probs": {"probs": PROBS, "top_k": ONES, **KEYS},
    "top_p_sampling_from_probs": {"probs": PROBS, "top_p": PROBS[:, 0].clone(), **KEYS},
    "top_k_top_p_sampling_from_probs": {"probs": PROBS, "top_k": ONES, "top_p": PROBS[:, 0].clone(), **KEYS},
    "min_p_sampling_from_probs": {"probs": PROBS, "min_p": PROBS[:, 0].clone(), **KEYS},
    "sample_from_logits": {
        "logits": PROBS,
        "temperature": PROBS[:, 0].clone(),
        "top_k": ONES,
        "top_p": PROBS[:, 1].clone(),
        "min_p": PROBS[:, 2].clone(),
        **KEYS,
    },
    "softmax": {"logits": PROBS, "temperature": PROBS[:, 0].clone(), "out": PROBS.clone()},
    "top_p_renorm_probs": {"probs": PROBS, "top_p": PROBS[:, 0].clone(), "out": PROBS.clone()},
    "top_k_renorm_probs": {"probs": PROBS, "top_k": ONES, "out": PROBS.clone()},
}


def without_key(op: str, **key: Any) -> Callable[[], Call]:
    return lambda: (GOOD_CALLS[op][0], key)


BAD_KEYS = [
    (op, case)
    for op in GOOD_CALLS
    if "sampl" in op
    for case in (
        BadInput("generator a number", "generator", without_key(op, generator=5), TypeError, "Generator"),
        BadInput(
            "generator and seed", "generator", without_key(op, generator=torch.Generator(), seed=1), fragment="seed"
        ),
        BadInput("fractional seed", "seed", without_key(op, seed=1.5), TypeError, "integer"),
        BadInput("seed as text", "seed", without_key(op, seed="x"), TypeError, "integer"),
        BadInput("seed a flag", "seed", without_key(op, seed=True), TypeError, "integer"),
        BadInput("seed of 65 bits", "seed", without_key(op, seed=2**64), ValueError, "<= 18446744073709551615"),
        BadInput("float seeds", "seed", without_key(op, seed=torch.ones(3)), TypeError, "int64"),
        BadInput("int32 seeds", "seed", without_key(op, seed=ONES.int()), TypeError, "int64"),
        BadInput("seeds of others", "seed", without_key(op, seed=ONES[:2]), ValueError, "(3,)"),
        BadInput("fractional offset", "offset", without_key(op, seed=1, offset=0.5), TypeError, "integer"),
        BadInput("float offsets", "offset", without_key(op, seed=1, offset=torch.ones(3)), TypeError, "int64"),
        BadInput("offset alone", "offset", without_key(op, offset=3), ValueError, "seed"),
    )
]
BAD_INPUTS = [
    *BAD_KEYS,
    *(
        (op, case)
        for op, first in FIRST.items()
        for case in (
            BadInput("no tensor", first, with_first(op, [1.0]), TypeError, "tensor"),
            BadInput("float64", first, with_first(op, PROBS.double()), TypeError, "float64"),
            BadInput("one dimension", first, with_first(op, PROBS[0]), ValueError, "2-D"),
            BadInput("no entries", first, with_first(op, PROBS[:, :0]), ValueError, "entry"),
            BadInput("transposed", first, with_first(op, torch.rand(8, 3).t()), ValueError, "contiguous"),
        )
    ),
    *(
        (op, BadInput("return_valid as text", "return_valid", with_flag(op, "no"), TypeError, "True or False"))
        for op in GOOD_CALLS
        if "sampl" in op
    ),
    ("top_k_sampling_from_probs", BadInput("fractional k", "top_k", call(PROBS, 1.5), TypeError, "integer")),
    ("top_k_sampling_from_probs", BadInput("k of 64 bits", "top_k", call(PROBS, 2**63), ValueError, f"<= {2**63 - 1}")),
    ("top_k_sampling_from_probs", BadInput("k in float", "top_k", call(PROBS, torch.ones(3)), TypeError, "int32")),
    ("top_k_sampling_from_probs", BadInput("k for others", "top_k", call(PROBS, ONES[:2]), ValueError, "(3,)")),
    ("top_k_top_p_sampling_from_probs", BadInput("no k", "top_k", call(PROBS, None, 0.9), TypeError, "integer")),
    ("top_k_top_p_sampling_from_probs", BadInput("p in int", "top_p", call(PROBS, 3, ONES), TypeError, "float32")),
    (
        "top_k_top_p_sampling_from_probs",
        BadInput(
            "unknown order", "filter_apply_order", call(PROBS, 3, 0.9, filter_apply_order="k"), ValueError, "'joint'"
        ),
    ),
    ("min_p_sampling_from_probs", BadInput("nan", "min_p", call(PROBS, math.nan), ValueError, "nan")),
    ("min_p_sampling_from_probs", BadInput("huge", "min_p", call(PROBS, 10**400), ValueError, "magnitude")),
    ("min_p_sampling_from_probs", BadInput("fp16", "min_p", call(PROBS, torch.ones(3).half()), TypeError, "float32")),
    ("sample_from_logits", BadInput("below zero", "temperature", call(PROBS, -1.0), ValueError, ">= 0")),
    ("sample_from_logits", BadInput("as column", "temperature", call(PROBS, torch.ones(3, 1)), ValueError, "1-D")),
    ("sample_from_logits", BadInput("k as bool", "top_k", call(PROBS, 1.0, True), TypeError, "integer")),
    ("sample_from_logits", BadInput("p as text", "top_p", call(PROBS, 1.0, 0, "x"), TypeError, "number")),
    ("sample_from_logits", BadInput("p is nan", "top_p", call(PROBS, top_p=math.nan), ValueError, "nan")),
    ("sample_from_logits", BadInput("p in int", "top_p", call(PROBS, top_p=ONES), TypeError, "float32")),
    ("sample_from_logits", BadInput("p for others", "top_p", call(PROBS, top_p=torch.ones(2)), ValueError, "(3,)")),
    ("sample_from_logits", BadInput("no min_p", "min_p", call(PROBS, min_p=None), TypeError, "number")),
    ("sample_from_logits", BadInput("min_p is nan", "min_p", call(PROBS, min_p=math.nan), ValueError, "nan")),
    ("sample_from_logits", BadInput("min_p fp16", "min_p", call(PROBS, min_p=ONES.half()), TypeError, "float32")),
    ("sample_from_logits", BadInput("min_p column", "min_p", call(PROBS, min_p=PROBS[:, :1]), ValueError, "1-D")),
    ("sample_from_logits", BadInput("order as flag", "filter_apply_order", call(PROBS, filter_apply_order=True))),
    ("softmax", BadInput("below zero", "temperature", call(PROBS, -0.5), ValueError, ">= 0")),
    ("softmax", BadInput("bf16 out", "out", call(PROBS, out=PROBS.bfloat16()), TypeError, "float32")),
    ("top_p_renorm_probs", BadInput("no p", "top_p", call(PROBS, None), TypeError, "number")),
    ("top_p_renorm_probs", BadInput("short out", "out", call(PROBS, 0.5, out=PROBS[:2]), ValueError, "(3, 8)")),
    ("top_k_renorm_probs", BadInput("k as float", "top_k", call(PROBS, 5.0), TypeError, "integer")),
    ("top_k_renorm_probs", BadInput("k elsewhere", "top_k", call(PROBS, ONES.to("meta")), ValueError, "device")),
]
ODD_VALUES = [
    None, True, 0, -1, 2**70, 2.5, math.nan, "x", [1], PROBS, PROBS[0], PROBS[:0], PROBS.t(), PROBS.half(),
    PROBS.double(), ONES, ONES[:1], ONES.int(), torch.ones(3), torch.tensor(1.0), torch.Generator(),
]  # fmt: skip


@pytest.mark.parametrize(("op", "case"), [pytest.param(op, case, id=f"{op}-{case.name}") for op, case in BAD_INPUTS])
def test_a_bad_input_is_named(op: str, case: BadInput) -> None:
    assert_rejects(getattr(kestrel_sampling, op), case)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, tensors in TENSORS.items() for name in tensors])
def test_a_tensor_elsewhere_is_named(op: str, name: str) -> None:
    tensors = TENSORS[op]
    getattr(kestrel_sampling, op)(**{key: value.clone() for key, value in tensors.items()})
    mixed = {key: value.to("meta") if key == name else value.clone() for key, value in tensors.items()}
    first, second, *_ = tensors  # the first sets the standard: with it elsewhere, the next one is the one at fault
    blamed = second if name == first else name
    message = rf"^{op}: argument '{blamed}': expected device (cpu|meta) as \w+ has, got (cpu|meta)$"
    with pytest.raises(ValueError, match=message):
        getattr(kestrel_sampling, op)(**mixed)
    if "out" in mixed and name != "out":
        assert torch.equal(mixed["out"], tensors["out"])


@pytest.mark.parametrize("op", GOOD_CALLS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_passed_either_works_or_is_named(op: str, data: st.DataObject) -> None:
    args, kwargs = GOOD_CALLS[op]
    values = dict(enumerate(args)) | kwargs
    for which in data.draw(st.lists(st.sampled_from(list(values)), min_size=1, max_size=2)):
        value = data.draw(st.sampled_from(ODD_VALUES))
        values[which] = value.clone() if torch.is_tensor(value) else value
    try:
        getattr(kestrel_sampling, op)(*(values[i] for i in range(len(args))), **{k: values[k] for k in kwargs})
    except (ValueError, TypeError) as error:
        if not re.match(rf"{op}: argument '\w+': expected .+, got .+", str(error), re.DOTALL):
            raise AssertionError("the message names neither op nor argument") from error


VIEW = distributions(8, 40)[::2, 3:33]  # [4, 30]
ROWS, COUNTS, KEY = torch.rand(4), torch.arange(4), (torch.arange(4), 0, None, 7, 1)
REGISTERED: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("sampling_from_probs", (VIEW, *KEY), {}),
    ("top_k_sampling_from_probs", (VIEW.half(), COUNTS, 0, *KEY), {}),
    ("top_k_top_p_sampling_from_probs", (VIEW, None, 5, ROWS, 0.0, True, *KEY), {}),
    ("min_p_sampling_from_probs", (VIEW.bfloat16(), ROWS, 0.0, *KEY), {}),
    ("sample_from_logits", (VIEW, ROWS, 0.0, COUNTS.int(), 0, None, 0.9, ROWS, 0.0, False, *KEY), {}),
    ("softmax", (VIEW, ROWS, 0.0), {}),
    ("softmax", (VIEW.half(), None, 0.5), {"out": torch.empty(4, 30)}),
    ("top_p_renorm_probs", (VIEW, ROWS, 0.0), {}),
    ("top_p_renorm_probs", (VIEW, None, 0.5), {"out": torch.empty(4, 30)}),
    ("top_k_renorm_probs", (VIEW.bfloat16(), COUNTS, 0), {}),
    ("top_k_renorm_probs", (VIEW, None, 5), {"out": torch.empty(4, 30)}),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), REGISTERED)
def test_registration_agrees_with_torch(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    packet = getattr(torch.ops.kestrel_sampling, op)
    opcheck(packet.out if kwargs else packet.default, args, kwargs)


def test_public_functions_compile_into_one_graph() -> None:
    def everything(logits: torch.Tensor, seeds: torch.Tensor) -> list[torch.Tensor]:
        probs = softmax(logits, 0.7)
        key = {"seed": seeds, "offset": 3}
        return [
            probs,
            sampling_from_probs(probs, **key),
            top_k_sampling_from_probs(probs, 3, **key),
            top_k_top_p_sampling_from_probs(probs, 3, 0.9, filter_apply_order="joint", **key),
            min_p_sampling_from_probs(probs, 0.1, **key),
            *sample_from_logits(logits, 0.8, 5, 0.9, 0.01, return_valid=True, **key),
            top_p_renorm_probs(probs, 0.9),
            top_k_renorm_probs(probs, 3, out=torch.empty_like(probs)),
            *topk_fwd(logits, 3, softmax=True),
        ]

    logits = torch.randn(3, 8)
    for got, expected in zip(
        torch.compile(everything, fullgraph=True)(logits, ONES), everything(logits, ONES), strict=True
    ):
        assert torch.equal(got, expected)


SCALARS: dict[str, tuple[Callable[..., Any], tuple[float, ...]]] = {
    "temperature": (lambda rows, t: sample_from_logits(rows, t, seed=1), (0.7, 0.8, 2)),
    "top_k": (lambda rows, k: sample_from_logits(rows, top_k=k, seed=1), (3, 5)),
    "top_p": (lambda rows, p: sample_from_logits(rows, top_p=p, seed=1), (0.7, 0.8)),
    "min_p": (lambda rows, p: sample_from_logits(rows, min_p=p, seed=1), (0.1, 0.2)),
    "seed": (lambda rows, s: sample_from_logits(rows, seed=s), (3, 5)),
    "seed beyond 63 bits": (lambda rows, s: sample_from_logits(rows, seed=s), (2**63, 2**64 - 1)),
    "offset": (lambda rows, o: sample_from_logits(rows, seed=1, offset=o), (3, 5)),
    "top_p of top_p_sampling": (lambda rows, p: top_p_sampling_from_probs(rows, p, seed=1), (0.7, 0.8)),
    "min_p of min_p_sampling": (lambda rows, p: min_p_sampling_from_probs(rows, p, seed=1), (0.1, 0.2)),
    "top_k of top_k_sampling": (lambda rows, k: top_k_sampling_from_probs(rows, k, seed=1), (3, 5)),
    "both of top_k_top_p_sampling": (lambda rows, k: top_k_top_p_sampling_from_probs(rows, k, k / 10, seed=1), (3, 5)),
    "seed of sampling": (lambda rows, s: sampling_from_probs(rows, seed=s), (3, 5)),
    "temperature of softmax": (softmax, (0.7, 0.8)),
    "top_p of renorm": (top_p_renorm_probs, (0.7, 0.8)),
    "top_k of renorm": (top_k_renorm_probs, (3, 5)),
}


@pytest.mark.parametrize("name", SCALARS)
def test_a_scalar_may_change_between_compiled_calls(name: str) -> None:
    function, values = SCALARS[name]
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    rows = distributions(4, 40)
    assert [compiled(rows, v).tolist() for v in values] == [function(rows, v).tolist() for v in values]


def test_a_generator_under_compile_is_refused_by_name() -> None:
    generator = torch.Generator()
    draw = lambda rows: sample_from_logits(rows, generator=generator)  # noqa: E731
    compiled = torch.compile(draw, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="sample_from_logits: argument 'generator': expected None under torch.compile"):
        compiled(torch.randn(2, 8))
