"""Merging the attention of one set of queries over two sets of keys."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kestrel_runtime import Binary, UnsupportedError, check, empty, kernel_op

from . import reference
from .kernels.variants import NAMED
from .plans import Plans, form

_binary = Binary("kestrel_attention")
_launches: Plans[Callable[..., None]] = Plans()
_UNALIGNED = "the kernel takes rows that are aligned to 16 bytes"
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def check_merge_attention_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> None:
    op = "merge_attention_states"
    check.tensor(op, "out_a", out_a, dtype=check.FLOATS, ndim=3, last_contiguous=True)
    check.tensor(op, "out_b", out_b, dtype=check.FLOATS, ndim=3, last_contiguous=True)
    check.same(op, "dtype", out_a=out_a, out_b=out_b)
    check.shape(op, "out_b", out_b, out_a.shape)
    tokens, heads, _ = out_a.shape
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check.tensor(op, name, lse, dtype=torch.float32, ndim=2)
        check.shape(op, name, lse, (heads, tokens))
    check.same(op, "device", out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)


@kernel_op(reference=reference.merge_attention_states, check=check_merge_attention_states, kernel="cute")
def merge_attention_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of keys into attention over their union.

    T queries, H heads of D dims.

    out_a, out_b: [T, H, D], bf16, fp16 or float32: the normalised outputs.
    lse_a, lse_b: float32 [H, T]: the natural log of each sum of exponentials, as attention returns it with return_lse.

    Returns (out [T, H, D] in the dtype of out_a, lse float32 [H, T]). A part with LSE -inf saw no key and its output is
    not read; both -inf gives 0 and -inf. Computed in float32, one rounding. Raises TypeError for a wrong dtype or a
    missing tensor, ValueError for a wrong shape, stride or device.
    Semantics: ``merge_attn_states`` of vLLM; Ye et al., "Cascade inference" (FlashInfer).

    >>> import torch, kestrel_attention
    >>> one, three = torch.ones(1, 1, 2), 3 * torch.ones(1, 1, 2)
    >>> equal = torch.zeros(1, 1)  # both parts weigh exp(0) = 1
    >>> kestrel_attention.merge_attention_states(one, equal, three, equal)
    (tensor([[[2., 2.]]]), tensor([[0.6931]]))
    """
    key = form(out_a, lse_a, out_b, lse_b)
    launch = _launches.get(key)
    if launch is None:
        check_merge_attention_states(out_a, lse_a, out_b, lse_b)
        vector = 16 // out_a.element_size()
        if out_a.shape[2] % vector or any(x.stride(i) % vector for x in (out_a, out_b) for i in range(2)):
            raise UnsupportedError(_UNALIGNED)
        launch = _launches.keep(key, _binary.kernel(NAMED[f"merge_{_NAMES[out_a.dtype]}"], out_a.device))
    if out_a.data_ptr() % 16 or out_b.data_ptr() % 16:
        raise UnsupportedError(_UNALIGNED)
    out = empty(out_a, out_a.dtype, *out_a.shape)
    lse = empty(lse_a, torch.float32, *lse_a.shape)
    if out.numel():
        launch(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse
