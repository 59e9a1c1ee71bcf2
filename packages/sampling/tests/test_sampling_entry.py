"""The C++ entry points refuse bad input in the words of the checks; CPU tensors reach all but their last check."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import tvm_ffi

from kestrel_runtime import Binary, UnsupportedError
from kestrel_runtime.testing import (
    BadInput,
    assert_launch_agrees,
    assert_refused,
    cases_of,
    derived_bad_inputs,
    refusal_params,
)
from kestrel_sampling import _launch, softmax, top_k_renorm_probs, top_p_renorm_probs
from kestrel_sampling._parameters import Filters, Keys, shape_of_draw
from kestrel_sampling.chain_speculative_sampling import _chain_speculative_sampling
from kestrel_sampling.probabilities import _check_softmax
from kestrel_sampling.process_and_sample import _process_and_sample
from kestrel_sampling.process_logits import _process_logits
from kestrel_sampling.sample_from_logits import _check_sample_from_logits
from kestrel_sampling.sample_with_logprobs import _sample_with_logprobs
from kestrel_sampling.token_logprobs import _token_logprobs, shape_of_logprobs
from kestrel_sampling.topk import _check_topk_fwd

pytestmark = pytest.mark.skipif(Binary("kestrel_sampling").manifest is None, reason="needs the built binary")

ROWS = torch.rand(3, 8)
LONGS = torch.ones(3, dtype=torch.int64)


def sample_args(**changed: Any) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "offset")
    return {"logits": ROWS, **dict.fromkeys(names), "offset_stride": 0, **changed}


BAD: dict[str, dict[str, Any]] = {
    "float64": sample_args(logits=ROWS.double()),
    "one dimension": sample_args(logits=ROWS[0]),
    "a stride": sample_args(logits=ROWS[:, ::2]),
    "no entries": sample_args(logits=ROWS[:, :0]),
    "an integer temperature": sample_args(temperature=LONGS),
    "a temperature too few": sample_args(temperature=ROWS[0, :2]),
    "a float k": sample_args(top_k=ROWS[:, 0].contiguous()),
    "a table of k": sample_args(top_k=LONGS[None]),
    "a p too many": sample_args(top_p=torch.rand(4)),
    "a double p": sample_args(top_p=torch.rand(3).double()),
    "a strided min_p": sample_args(min_p=ROWS[:, 0]),
    "an int32 seed": sample_args(seed=LONGS.int()),
    "an offset too many": sample_args(offset=torch.ones(5, dtype=torch.int64)),
    "an offset stride of two": sample_args(offset_stride=2),
}


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    return f"{raised.type.__name__}: {raised.value}"


@pytest.mark.parametrize("name", BAD)
def test_a_draw_refuses_as_its_check_does(name: str) -> None:
    a = BAD[name]
    checked = message_of(
        lambda: _check_sample_from_logits(
            a["logits"], a["temperature"], 1.0, a["top_k"], 0, a["top_p"], 1.0, a["min_p"], 0.0, False,
            a["seed"], 0, a["offset"], 0, a["offset_stride"],
        )
    )  # fmt: skip
    ids, valid = torch.empty(3, dtype=torch.int32), torch.empty(3, dtype=torch.bool)
    entered = message_of(
        lambda: _launch.binary.sample(
            "sample_from_logits", ids, valid, a["logits"], True, a["temperature"], 1.0, a["top_k"], 0, a["top_p"], 1.0,
            a["min_p"], 0.0, False, a["seed"], 0, a["offset"], 0, a["offset_stride"], 0, 0,
        )
    )  # fmt: skip
    assert entered == checked


def test_the_device_comes_last() -> None:
    keys = Keys(None, 1, None, 0)
    with pytest.raises(ValueError, match=r"op: argument 'probs': expected a CUDA tensor, got cpu"):
        _launch.draw("op", ROWS, keys)
    with pytest.raises(ValueError, match=r"softmax: argument 'logits': expected a CUDA tensor, got cpu"):
        _launch.probabilities("softmax", ROWS, None, logits=True)


OUTS = {
    "float64": torch.empty(3, 8).double(),
    "a column too few": torch.empty(3, 7),
    "a stride": torch.empty(3, 16)[:, ::2],
    "one row for all": torch.empty(8).expand(3, 8),
    "rows that overlap": torch.empty(24).as_strided((3, 8), (7, 1)),
}


@pytest.mark.parametrize("name", OUTS)
def test_a_wrong_out_is_refused_as_by_the_check(name: str) -> None:
    checked = message_of(lambda: _check_softmax(ROWS, None, 1.0, OUTS[name]))
    assert message_of(lambda: _launch.probabilities("softmax", ROWS, OUTS[name], logits=True)) == checked


@pytest.mark.parametrize("op", [softmax, top_p_renorm_probs, top_k_renorm_probs], ids=lambda op: op.__name__)
def test_an_out_that_overlaps_the_rows_without_being_them_is_refused(op: Callable[..., object]) -> None:
    buffer = torch.rand(4, 8)
    rows, out = buffer[:3], buffer[1:]
    first = "logits" if op is softmax else "probs"
    message = f"argument 'out': expected a tensor to write that shares no memory with '{first}', got tensors that"
    before = buffer.clone()
    with pytest.raises(ValueError, match=message):
        op(rows, 1, out=out)
    with pytest.raises(ValueError, match=message):
        _launch.probabilities(op.__name__, rows, out, logits=op is softmax)
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("split", [(3, 0), (16, 0), (-1, 0), (1, 7), (2, 1024), (0, -32)])
def test_a_split_that_no_kernel_has_is_refused(split: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"op: argument '(blocks|threads)': expected .*, got"):
        _launch.draw("op", ROWS, Keys(None, 1, None, 0), blocks=split[0], threads=split[1])
    with pytest.raises(ValueError, match=r"op: argument '(blocks|threads)': expected .*, got"):
        _launch.binary.probabilities("op", ROWS, ROWS, False, None, 1.0, None, 0, None, 1.0, *split)


@pytest.mark.parametrize("scores", [ROWS.double(), ROWS[:, ::2]])
def test_top_k_of_long_rows_refuses_as_its_check_does(scores: torch.Tensor) -> None:
    values, indices = torch.empty(3, 2, dtype=scores.dtype), torch.empty(3, 2, dtype=torch.int32)
    entered = message_of(lambda: _launch.binary.topk_rows(scores, values, indices, False))
    assert entered == message_of(lambda: _check_topk_fwd(scores, 2))


def test_top_k_refuses_more_than_there_are() -> None:
    values, indices = torch.empty(3, 9), torch.empty(3, 9, dtype=torch.int32)
    entered = message_of(lambda: _launch.binary.topk_rows(ROWS, values, indices, False))
    assert entered == message_of(lambda: _check_topk_fwd(ROWS, 9))


# ---- the ops around the draw -----------------------------------------------------------------------------------------

HISTORY, VALUES, MASK = torch.arange(12).view(3, 4), torch.ones(3, 4), torch.full((3, 1), -1, dtype=torch.int32)
ONES, CHAINS = torch.ones(3), torch.softmax(torch.rand(3, 3, 8), -1)
ZEROS = torch.zeros(2, 3, dtype=torch.int32)
PROCESS: dict[str, Any] = {
    "logits": ROWS, "token_ids": HISTORY, "lengths": LONGS, "prompt_lengths": LONGS.int(), "repetition_penalty": ONES,
    "repetition_penalty_value": 0.0, "presence_penalty": None, "presence_penalty_value": 0.5, "frequency_penalty": ONES,
    "frequency_penalty_value": 0.0, "bias_ids": HISTORY.int(), "bias_values": VALUES, "bitmask": MASK,
    "out": torch.empty(3, 8),
}  # fmt: skip
LOGPROBS: dict[str, Any] = {
    "logits": ROWS, "ids": LONGS, "top_n": 2, "temperature": ONES, "temperature_value": 0.0, "top_k": LONGS,
    "top_k_value": 0, "top_p": ONES, "top_p_value": 0.0, "min_p": None, "min_p_value": 0.1, "joint": False,
}  # fmt: skip
DRAWN: dict[str, Any] = {
    "logits": ROWS, "temperature": ONES, "temperature_value": 0.0, "top_k": None, "top_k_value": 3, "top_p": ONES,
    "top_p_value": 0.0, "min_p": None, "min_p_value": 0.1, "joint": False, "top_n": 2, "processed": True,
    "seed": LONGS, "seed_value": 0, "offset": None, "offset_value": 3, "offset_stride": 1,
}  # fmt: skip
CHAIN: dict[str, Any] = {
    "draft_probs": CHAINS[:, :2], "draft_token_ids": HISTORY[:, :2], "target_probs": CHAINS.half(),
    "maybe_output_accepted_token_num": ZEROS[0], "maybe_output_emitted_draft_token_num": ZEROS[1], "seed": LONGS,
    "seed_value": 0, "offset": None, "offset_value": 3, "offset_stride": 1,
}  # fmt: skip
STEP = {name: value for name, value in PROCESS.items() if name not in ("bias_ids", "bias_values", "out")} | DRAWN
OTHER_STEP = STEP | {"top_k": LONGS}  # which takes the launches of two ops
process, logprobs, drawn, chain, step = map(cases_of, (PROCESS, LOGPROBS, DRAWN, CHAIN, STEP))


def derived(function: Callable[..., Any], kwargs: dict[str, Any]) -> list[BadInput]:
    """Without those of numbers and flags, which the public function checks."""
    cases = derived_bad_inputs(function, (), kwargs)
    unchecked = ("joint", "processed")
    return [case for case in cases if case.argument not in unchecked and not case.argument.endswith("_value")]


ACCEPTED, EMITTED = "maybe_output_accepted_token_num", "maybe_output_emitted_draft_token_num"
REFUSED: dict[Callable[..., Any], list[BadInput]] = {
    _process_logits: [
        process("no entries", "logits", ROWS[:, :0], fragment="entry"),
        process("ids of others", "token_ids", HISTORY[:2], fragment="(3, any)"),
        process("lengths alone", "lengths", LONGS, token_ids=None),
        process("prompts alone", "prompt_lengths", LONGS, token_ids=None, lengths=None),
        process("a penalty too few", "presence_penalty", ONES[:2], fragment="(3,)"),
        process("bias without values", "bias_values", None, fragment="bias_ids"),
        process("bias without ids", "bias_ids", None, fragment="bias_values"),
        process("another number of values", "bias_values", VALUES[:, :3], fragment="(3, 4)"),
        process("a word too many", "bitmask", MASK.expand(3, 2).contiguous(), fragment="(3, 1)"),
        process("int64 words", "bitmask", MASK.long(), TypeError, "int32"),
        process("bf16 out of float32", "out", torch.empty(3, 8).bfloat16(), TypeError, "float32"),
        process("fp16 out of bf16", "out", torch.empty(3, 8).half(), TypeError, "bfloat16", logits=ROWS.bfloat16()),
        process("one row for all", "out", torch.empty(8).expand(3, 8), fragment="share memory"),
        *derived(_process_logits, PROCESS),
    ],
    _token_logprobs: [
        logprobs("float ids", "ids", ONES, TypeError, "int32 or int64"),
        logprobs("ids of others", "ids", LONGS[:2], fragment="(3,)"),
        logprobs("more than there are", "top_n", 9, fragment="<= 8"),
        logprobs("k in float", "top_k", ONES, TypeError, "int32"),
        *derived(_token_logprobs, LOGPROBS),
    ],
    _sample_with_logprobs: [
        drawn("no entries", "logits", ROWS[:, :0], fragment="entry"),
        drawn("more than there are", "top_n", 9, fragment="<= 8"),
        drawn("int32 seeds", "seed", ZEROS[0], TypeError, "int64"),
        drawn("a p too many", "top_p", torch.rand(4), fragment="(3,)"),
        drawn("an offset stride of two", "offset_stride", 2, fragment="0 or 1"),
        *derived(_sample_with_logprobs, DRAWN),
    ],
    _chain_speculative_sampling: [
        chain("as many as draft tokens", "target_probs", CHAINS[:, :2], fragment="(3, 3, any)"),
        chain("no entries", "target_probs", CHAINS[:, :, :0], fragment="at least one"),
        chain("draft of another width", "draft_probs", CHAINS[:, :2, :7], fragment="(3, 2, 8)"),
        chain("int64 counts", ACCEPTED, LONGS, TypeError, "int32"),
        chain("counts of others", EMITTED, ZEROS[0, :2], fragment="(3,)"),
        chain("int32 seeds", "seed", ZEROS[0], TypeError, "int64"),
        chain("an offset stride of two", "offset_stride", 2, fragment="0 or 1"),
        *derived(_chain_speculative_sampling, CHAIN),
    ],
    _process_and_sample: [
        step("no entries", "logits", ROWS[:, :0], fragment="entry"),
        step("ids of others", "token_ids", HISTORY[:2], fragment="(3, any)"),
        step("lengths alone", "lengths", LONGS, token_ids=None),
        step("a penalty too few", "presence_penalty", ONES[:2], fragment="(3,)"),
        step("int64 words", "bitmask", MASK.long(), TypeError, "int32"),
        step("more than there are", "top_n", 9, fragment="<= 8"),
        step("a p too many", "top_p", torch.rand(4), fragment="(3,)"),
        *derived(_process_and_sample, STEP),
        *derived(_process_and_sample, OTHER_STEP),
    ],
}


@pytest.mark.parametrize(("function", "case", "path"), refusal_params(REFUSED, ("check", "launch")))
def test_the_ops_around_the_draw_refuse_as_their_checks_do(
    function: Callable[..., Any], case: BadInput, path: str
) -> None:
    assert_refused(function, case, path)


BUFFER = torch.zeros(4, 8)
OVERLAPS: list[tuple[Callable[..., Any], BadInput]] = [
    (_process_logits, process("a row later", "out", BUFFER[1:], logits=BUFFER[:3])),
    (_process_logits, process("over the bias", "out", BUFFER[1:], bias_values=BUFFER[:3, :4])),
    (_process_logits, process("over a penalty", "out", BUFFER[1:], repetition_penalty=BUFFER[2, :3])),
    (_process_and_sample, step("one row for all", "logits", ROWS[:1].expand(3, 8))),
    (_process_and_sample, step("over a penalty", "logits", BUFFER[1:], repetition_penalty=BUFFER[2, :3])),
    (_process_and_sample, step("over the seeds", "logits", BUFFER[1:], seed=BUFFER[2, :6].view(torch.int64))),
    *(
        (_process_and_sample, step(f"over {name}", "logits", BUFFER[1:], **{"top_k": LONGS, name: value}))
        for name, value in (
            *((name, BUFFER[2, :3]) for name in ("temperature", "top_p", "min_p")),
            *((name, BUFFER[2, :6].view(torch.int64)) for name in ("top_k", "seed", "offset")),
        )
    ),
    (_chain_speculative_sampling, chain("the same counts twice", EMITTED, ZEROS[0])),
]


@pytest.mark.parametrize(("function", "case"), [pytest.param(f, case, id=case.name) for f, case in OVERLAPS])
def test_the_ops_around_the_draw_refuse_overlaps(function: Callable[..., Any], case: BadInput) -> None:
    assert_launch_agrees(function, case)


WRONG: list[tuple[type[Exception], str, Any]] = [
    (ValueError, "temperature", ONES[:2]),
    (TypeError, "temperature", ONES.double()),
    (ValueError, "top_k", LONGS[:2]),
    (ValueError, "top_p", torch.ones(4)),
    (TypeError, "min_p", LONGS),
    (TypeError, "seed", ZEROS[0]),
    (ValueError, "offset", LONGS[None]),
    (ValueError, "offset_stride", 2),
    (ValueError, "top_n", 9),
]


@pytest.mark.parametrize(("error", "name", "value"), WRONG)
@pytest.mark.parametrize("top_k", [{}, {"top_k": None, "top_k_value": 0}, {"top_k": LONGS}], ids=("3", "off", "tensor"))
def test_wrong_arguments_of_the_draw_are_found_by_the_launch_that_writes_penalties(
    top_k: dict[str, Any], error: type[Exception], name: str, value: object
) -> None:
    launch = _process_and_sample.kernel_op.launch  # type: ignore[attr-defined]
    with pytest.raises(error, match=f"^process_and_sample: argument '{name}': "):
        launch(**STEP | top_k | {name: value})


# ---- how many launches a step takes ----------------------------------------------------------------------------------


class Capsule:
    """What tvm_ffi.from_dlpack reads: a tensor on the CPU that passes for one on a GPU, of which nothing is read."""

    def __init__(self, x: torch.Tensor) -> None:
        self.capsule = torch.utils.dlpack.to_dlpack(x)
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        device_type = pointer_of(self.capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)  # behind the address
        ctypes.c_int32.from_address(device_type).value = 2  # kDLCUDA

    def __dlpack__(self, **_options: object) -> object:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def as_if_on_gpu(x: torch.Tensor) -> Any:
    return tvm_ffi.from_dlpack(Capsule(x))


def enter(name: str, top_k: torch.Tensor | None, top_k_value: int, rows: int = 3, top_n: int = 2) -> bool:
    """Call sample_with_logprobs or process_and_sample, for logits [rows, 2000], without a GPU."""
    logits = torch.empty(rows, 2000)
    results = (*shape_of_draw(logits), *shape_of_logprobs(logits, torch.empty(0), top_n))
    processing = (None, None, None, None, 1.0, None, 0.0, None, 0.0, None) if name == "process_and_sample" else ()
    filters = (None, 1.0, None if top_k is None else as_if_on_gpu(top_k), top_k_value, None, 1.0, None, 0.0, False)
    return bool(
        getattr(_launch.binary, name)(
            *map(as_if_on_gpu, results), as_if_on_gpu(logits), *processing, *filters, True, None, 1, None, 0, 0
        )
    )


@pytest.mark.parametrize("top_k", [LONGS, LONGS.int(), 0, -1, 1025, 2000, 2001, 2**62], ids=str)
def test_a_draw_that_one_launch_does_not_cover_is_left_to_the_caller(top_k: int | torch.Tensor) -> None:
    given = (top_k, 0) if isinstance(top_k, torch.Tensor) else (None, top_k)
    assert enter("sample_with_logprobs", *given) is False


@pytest.mark.parametrize("name", ["sample_with_logprobs", "process_and_sample"])
@pytest.mark.parametrize("top_k", [0, 3])
def test_more_log_probabilities_than_kernels_cover_are_found_before_anything_is_launched(name: str, top_k: int) -> None:
    with pytest.raises(UnsupportedError, match="top_n up to 1024"):
        enter(name, None, top_k, top_n=1025)
    assert enter(name, None, top_k, rows=0, top_n=1025) is True


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("temperature", [None, torch.tensor([0.5, math.nan, -math.inf])], ids=str)
def test_the_launches_of_other_draws_have_the_filters_of_their_log_probabilities(
    temperature: torch.Tensor | None, processed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, tuple[Any, ...]]] = []
    for name in ("process_and_sample", "sample", "token_logprobs"):
        monkeypatch.setitem(_launch.binary.__dict__, name, lambda *given, name=name: calls.append((name, given)))
    given = STEP | {"top_k": LONGS, "temperature": temperature, "processed": processed}
    ids, valid, *logprobs = _process_and_sample.kernel_op.launch(**given)  # type: ignore[attr-defined]
    assert [name for name, _ in calls] == ["process_and_sample", "sample", "token_logprobs"]
    filters = [given[name] for name in Filters._fields]
    draw, found = calls[1][1], calls[2][1]
    assert_same_objects(draw, ("process_and_sample", ids, valid, ROWS, True, *filters, LONGS, 0, None, 3, 1, 0, 0))
    if processed:
        assert_same_objects(found, (*logprobs, ROWS, ids, *filters))
    else:  # a temperature of 1, but NaN where it is: such a row has no log-probability
        assert_same_objects(found[:6], (*logprobs, ROWS, ids))
        assert found[7:] == Filters()[1:]
        ones = None if temperature is None else [1.0, "nan", 1.0]
        assert ones == (None if found[6] is None else ["nan" if x != x else x for x in found[6].tolist()])


def assert_same_objects(got: tuple[Any, ...], want: tuple[Any, ...]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one is other or (not torch.is_tensor(one) and one == other)
