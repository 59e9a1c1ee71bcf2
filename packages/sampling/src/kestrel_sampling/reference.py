"""The PyTorch reference of topk_fwd: the specification. Those of the other ops are in reference_sampling.py."""

from __future__ import annotations

import torch

# ---- topk_fwd --------------------------------------------------------------------------------------------------------


def topk_fwd(scores: torch.Tensor, k: int, softmax: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The first k of each row in a stable descending order, NaN behind everything."""
    nan = scores.isnan()
    order = scores.masked_fill(nan, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(-1, nan.gather(-1, order).to(torch.int8).sort(dim=-1, stable=True).indices)
    indices = order[..., :k]
    values = scores.gather(-1, indices)
    if softmax:
        values = torch.softmax(values.float(), dim=-1).to(scores.dtype)
    return values, indices.to(torch.int32)
