"""The PyTorch reference of topk_fwd: the specification. Those of the other ops are in reference_sampling.py."""

from __future__ import annotations

import torch

_BITS = {2: torch.int16, 4: torch.int32}


def topk_fwd(scores: torch.Tensor, k: int, softmax: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The first k of each row in a stable descending order, with NaN last."""
    nan = scores.isnan()
    order = scores.masked_fill(nan, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    order = order.gather(-1, nan.gather(-1, order).to(torch.int8).sort(dim=-1, stable=True).indices)
    indices = order[..., :k]
    # As integers: torch's gather of 16-bit floats on a CPU changes the payload of NaN.
    values = scores.view(_BITS[scores.itemsize]).gather(-1, indices).view(scores.dtype)
    if softmax:
        values = torch.softmax(values.float(), dim=-1).to(scores.dtype)
    return values, indices.to(torch.int32)
