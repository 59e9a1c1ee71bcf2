"""What the launches give the entry points of the binary, and what they make of its results."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from kestrel_runtime import UnsupportedError
from kestrel_sampling import _launch

B, V = 4, 40
ROWS, IDS, K = torch.zeros(B, V), torch.arange(B), torch.arange(B)
T, P, M = torch.rand(B), torch.rand(B), torch.rand(B)  # of temperature, top-p and min-p
KEY = (torch.arange(B), 0, None, 7, 1)
OFF = (None, 1.0, None, 0, None, 1.0, None, 0.0, False)
ALL = (T, 0.1, K, 2, P, 0.3, M, 0.4, True)
INT32, FLOAT32, BOOL = torch.int32, torch.float32, torch.bool
DRAWN = ((INT32, B), (BOOL, B))
LOGPROBS = ((FLOAT32, B), (INT32, B), (INT32, B, 3), (FLOAT32, B, 3))


def launch(name: str) -> Any:
    """The launch of a torch op."""
    modules = {"top_k_top_p_sampling_from_probs": "top_k_sampling", "softmax": "probabilities"}
    module = modules.get(name, "probabilities" if "renorm" in name else name.replace("_from_probs", ""))
    module = {"sampling": "sampling_from_probs"}.get(module, module)
    return getattr(importlib.import_module(f"kestrel_sampling.{module}"), f"_{name}").kernel_op.launch


class Entries:
    """In place of the binary: notes the calls, and gives results of their own."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def entry(*given: Any) -> None:
            self.calls.append((name, given))
            if name == "sample":
                given[2].copy_(torch.tensor([True, False, True, True]))
            elif name == "token_logprobs":
                for result, value in zip(given[:4], (-1.0, 5, 6, -2.0), strict=True):
                    result.fill_(value)

        return entry


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Entries:
    made = Entries()
    for module in ("_launch", "chain_speculative_sampling", "process_logits", "token_logprobs"):
        monkeypatch.setattr(importlib.import_module(f"kestrel_sampling.{module}"), "binary", made)
    return made


PENALTIES = (torch.zeros(B, 5, dtype=INT32), IDS, K, T, 1.1, P, 0.2, M, 0.3)  # with the history and its lengths
MASK, BIAS = torch.zeros(B, 2, dtype=INT32), (torch.zeros(B, 1, dtype=INT32), torch.zeros(B, 1))
TOP_K = (T, 0.1, None, 5, P, 0.3, M, 0.4, True)  # of one launch
ENTRIES: dict[str, tuple[str, str, tuple[Any, ...], tuple[Any, ...]]] = {  # op, entry point, given, what that gets
    "no filter": ("sampling_from_probs", "sample", (ROWS, *KEY), (*DRAWN, ROWS, False, *OFF, *KEY, 0, 0)),
    "top-p": (
        "top_p_sampling_from_probs", "sample", (ROWS, P, 0.5, *KEY),
        (*DRAWN, ROWS, False, *OFF[:4], P, 0.5, *OFF[6:], *KEY, 0, 0),
    ),
    "top-k": (
        "top_k_sampling_from_probs", "sample", (ROWS, K, 5, *KEY),
        (*DRAWN, ROWS, False, *OFF[:2], K, 5, *OFF[4:], *KEY, 0, 0),
    ),
    "top-k and top-p": (
        "top_k_top_p_sampling_from_probs", "sample", (ROWS, K, 5, P, 0.5, True, *KEY),
        (*DRAWN, ROWS, False, *OFF[:2], K, 5, P, 0.5, *OFF[6:8], True, *KEY, 0, 0),
    ),
    "min-p": (
        "min_p_sampling_from_probs", "sample", (ROWS, M, 0.5, *KEY),
        (*DRAWN, ROWS, False, *OFF[:6], M, 0.5, False, *KEY, 0, 0),
    ),
    "logits": ("sample_from_logits", "sample", (ROWS, *ALL, *KEY), (*DRAWN, ROWS, True, *ALL, *KEY, 0, 0)),
    "softmax": (
        "softmax", "probabilities", (ROWS, T, 0.5), ((FLOAT32, B, V), ROWS, True, T, 0.5, *OFF[2:6], 0, 0)
    ),
    "top-p renorm": (
        "top_p_renorm_probs", "probabilities", (ROWS.half(), P, 0.5),
        ((FLOAT32, B, V), (torch.float16, B, V), False, *OFF[:4], P, 0.5, 0, 0),
    ),
    "top-k renorm": (
        "top_k_renorm_probs", "probabilities", (ROWS, K, 5),
        ((FLOAT32, B, V), ROWS, False, *OFF[:2], K, 5, *OFF[4:6], 0, 0),
    ),
    "logprobs": ("token_logprobs", "token_logprobs", (ROWS, IDS, 3, *ALL), (*LOGPROBS, ROWS, IDS, *ALL)),
    "a draw with its logprobs": (
        "sample_with_logprobs", "sample_with_logprobs", (ROWS, *TOP_K, 3, True, *KEY),
        (*DRAWN, *LOGPROBS, ROWS, *TOP_K, False, *KEY),
    ),
    "penalties": (
        "process_logits", "process_logits", (ROWS.half(), *PENALTIES, *BIAS, MASK),
        ((FLOAT32, B, V), (torch.float16, B, V), *PENALTIES, *BIAS, MASK),
    ),
    "a step": (
        "process_and_sample", "process_and_sample", (ROWS, *PENALTIES, MASK, *TOP_K, 3, False, *KEY),
        (*DRAWN, *LOGPROBS, ROWS, *PENALTIES, MASK, *TOP_K, True, *KEY),
    ),
    "a chain": (
        "chain_speculative_sampling", "chain_speculative_sampling",
        (ROWS.view(B, 2, 20), MASK, torch.zeros(B, 3, 20), IDS.int(), K.int(), *KEY),
        ((INT32, B, 3), (BOOL, B), (FLOAT32, B, 2, 20), MASK, (FLOAT32, B, 3, 20), (INT32, B), (INT32, B), *KEY),
    ),
}  # fmt: skip


def assert_given(given: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """Tensors are the very ones, or have this dtype and shape."""
    for place, (x, wanted) in enumerate(zip(given, expected, strict=True)):
        if isinstance(wanted, tuple):
            assert (x.dtype, *x.shape) == wanted, place
            assert x.is_contiguous(), place
        else:
            assert x is wanted or (not isinstance(wanted, torch.Tensor) and x == wanted), place


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_point_is_given_every_argument_in_its_place(entries: Entries, name: str) -> None:
    op, entry, arguments, expected = ENTRIES[name]
    results = launch(op)(*arguments)
    ((called, given),) = entries.calls
    assert called == entry
    if entry in ("sample", "probabilities"):
        assert given[0] == op
        given = given[1:]
    assert_given(given, expected)
    results = results if isinstance(results, tuple) else (results,)
    assert all(any(result is x for x in given) for result in results)


@pytest.mark.parametrize("top_k", [0, V, 1025])
@pytest.mark.parametrize("processed", [False, True])
def test_logprobs_of_other_draws_are_a_second_launch(entries: Entries, processed: bool, top_k: int) -> None:
    filters = (*TOP_K[:3], top_k, *TOP_K[4:])
    ids, valid, logprobs, ranks, top_ids, top_logprobs = launch("sample_with_logprobs")(
        ROWS, *filters, 3, processed, *KEY
    )
    (first, of_draw), (second, of_logprobs) = entries.calls
    assert (first, second) == ("sample", "token_logprobs")
    assert_given(of_draw, ("sample_with_logprobs", *DRAWN, ROWS, True, *filters, *KEY, 0, 0))
    assert_given(of_logprobs, (*LOGPROBS, ROWS, ids, *(filters if processed else OFF)))
    assert valid.tolist() == [True, False, True, True]
    # those of the logits as they are know nothing of a temperature that makes the row invalid
    invalid = [False] * B if processed else [False, True, False, False]
    assert logprobs.isnan().tolist() == invalid
    assert ranks.tolist() == [0 if row else 5 for row in invalid]
    assert top_logprobs.isnan().all(1).tolist() == top_logprobs.isnan().any(1).tolist() == invalid
    assert bool((top_ids == 6).all())


def test_a_step_of_several_launches_checks_before_it_writes(entries: Entries, monkeypatch: pytest.MonkeyPatch) -> None:
    step, many = launch("process_and_sample"), (T, 0.1, None, 0, P, 0.3, M, 0.4, True)
    module = importlib.import_module("kestrel_sampling.process_and_sample")
    monkeypatch.setattr(module, "_sample_with_logprobs", lambda *given: given)
    drawn = step(ROWS, *PENALTIES, MASK, *many, 3, True, *KEY)
    assert_given(drawn, (ROWS, *many, 3, True, *KEY))
    ((first, given),) = entries.calls
    assert first == "process_logits"
    assert_given(given, (ROWS, ROWS, *PENALTIES, None, None, MASK))
    entries.calls.clear()
    overlapping = torch.zeros(B, V).as_strided((B, V), (1, 1))
    for logits, filters in ((overlapping, many), (ROWS, (ROWS[:, 0].contiguous()[:3], *many[1:]))):
        with pytest.raises(ValueError, match="process_and_sample: argument"):
            step(logits, *PENALTIES, MASK, *filters, 3, True, *KEY)
    memory = torch.zeros(B, V)
    with pytest.raises(ValueError, match="'logits': .* shares no memory with 'temperature'"):
        step(memory, *PENALTIES, MASK, memory[0, :B], *many[1:], 3, True, *KEY)
    wide = torch.zeros(1, 2000)
    with pytest.raises(UnsupportedError, match="top_n up to 1024"):
        step(wide, *(None,) * 3, *(None, 0.0) * 3, None, *OFF, 1025, True, None, 0, None, 0, 0)
    assert entries.calls == []
    step(wide, *(None,) * 3, *(None, 0.0) * 3, None, *OFF, 1024, True, None, 0, None, 0, 0)


@pytest.mark.parametrize("top_k", [1, 1024])
def test_a_top_k_below_the_vocabulary_is_one_launch(entries: Entries, top_k: int) -> None:
    launch("sample_with_logprobs")(torch.zeros(B, 1025), *OFF[:3], top_k, *OFF[4:], 3, True, *KEY)
    assert [name for name, _ in entries.calls] == ["sample_with_logprobs"]
    assert _launch.MAX_K == 1024
