"""What the launches give the entry points of the binary, and what they make of its results."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

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
    """In place of the binary: notes the calls. has_drawn: whether one launch covers a draw with its logprobs."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.has_drawn = True

    def __getattr__(self, name: str) -> Any:
        def entry(*given: Any) -> bool:
            self.calls.append((name, given))
            return self.has_drawn

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


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize(("op", "before"), [("sample_with_logprobs", ()), ("process_and_sample", (*PENALTIES, MASK))])
def test_what_one_launch_does_not_cover_takes_a_draw_and_then_logprobs(
    entries: Entries, op: str, before: tuple[Any, ...], processed: bool
) -> None:
    entries.has_drawn = False
    results = launch(op)(ROWS, *before, *ALL, 3, processed, *KEY)
    (first, given), (second, of_draw), (third, of_logprobs) = entries.calls
    assert (first, second, third) == (op, "sample", "token_logprobs")
    assert_given(given, (*DRAWN, *LOGPROBS, ROWS, *before, *ALL, not processed, *KEY))
    assert_given(of_draw, (op, *results[:2], ROWS, True, *ALL, *KEY, 0, 0))
    # of the logits as they are, but for a temperature that is NaN
    assert_given(of_logprobs, (*results[2:], ROWS, results[0], *(ALL if processed else ((FLOAT32, B), *OFF[1:]))))
    assert processed or of_logprobs[6].tolist() == [1.0] * B
