"""Bad arguments of the sampling ops that their public functions see first: the message names op and argument."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kestrel_sampling import sample_from_logits, sampling_from_probs, top_k_top_p_sampling_from_probs

ROWS = torch.rand(3, 8)
ORDERS = [np.ones(3), np.array(["joint"]), torch.ones(3), b"joint", None, 0, ["joint"]]


@pytest.mark.parametrize("order", ORDERS, ids=lambda value: type(value).__name__)
def test_an_order_of_filters_of_another_type_is_named(order: Any) -> None:
    message = "argument 'filter_apply_order': expected one of 'top_k_first', 'joint', got "
    with pytest.raises(ValueError, match=f"^top_k_top_p_sampling_from_probs: {message}"):
        top_k_top_p_sampling_from_probs(ROWS, 3, 0.5, seed=1, filter_apply_order=order)
    with pytest.raises(ValueError, match=f"^sample_from_logits: {message}"):
        sample_from_logits(ROWS, top_k=3, seed=1, filter_apply_order=order)


@pytest.mark.parametrize("value", [torch.arange(1000), 10**5000, -(10**5000), "x" * 5000, np.ones(3)], ids=type)
@pytest.mark.parametrize(("name", "more"), [("offset", {}), ("offset", {"seed": 1}), ("seed", {}), ("generator", {})])
def test_odd_keys_are_named_in_few_words(name: str, more: dict[str, int], value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^sampling_from_probs: argument '{name}': .{{1,200}}$"):
        sampling_from_probs(ROWS, **{name: value}, **more)
