"""Rotary position embedding with three positions per token (M-RoPE), in place."""

from __future__ import annotations

import torch

from kestrel_runtime import Binary, check, kernel_op
from kestrel_runtime.rotary import check_rows, check_table

from . import reference

_kernels = Binary("kestrel_rope")


def check_multimodal_rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    mrope_section: list[int],
    is_neox: bool = True,
    *,
    interleaved: bool = False,
) -> None:
    op = "multimodal_rotary_embedding"
    check.tensor(op, "positions", positions, dtype=check.INTEGERS, ndim=2)
    check.shape(op, "positions", positions, (3, None))
    check_rows(op, positions.shape[1:], query, key, head_size)
    check_table(op, cos_sin_cache, query, head_size, 0)
    check.flag(op, "is_neox", is_neox)
    check.flag(op, "interleaved", interleaved)
    _check_sections(op, mrope_section, cos_sin_cache.shape[1] // 2, interleaved)
    check.same(op, "device", positions=positions, query=query, key=key, cos_sin_cache=cos_sin_cache)


def _check_sections(op: str, sections: list[int], half: int, interleaved: bool) -> None:
    name = "mrope_section"
    if not isinstance(sections, (list, tuple)):
        check.fail(op, name, "a list of 3 integers", type(sections).__name__, TypeError)
    if len(sections) != 3:
        check.fail(op, name, "3 section sizes (time, height, width)", list(sections))
    for size in sections:
        check.number(op, name, size, integer=True, minimum=0)
    if sum(sections) != half:
        check.fail(op, name, f"sizes that sum to {half}, half the columns of cos_sin_cache", list(sections))
    if interleaved and (3 * sections[1] - 2 >= half or 3 * sections[2] - 1 >= half):
        most = f"a height <= {(half + 1) // 3} and a width <= {half // 3}"
        check.fail(op, name, f"interleaved, {most}, every third of {half} frequencies", list(sections))


@kernel_op(
    reference=reference.multimodal_rotary_embedding,
    check=check_multimodal_rotary_embedding,
    kernel="cuda",
    mutates=("query", "key"),
)
def multimodal_rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    mrope_section: list[int],
    is_neox: bool = True,
    *,
    interleaved: bool = False,
) -> None:
    """Rotate pairs of dimensions by the angle of one of three positions (time, height, width), in place.

    T rows, H and Hk heads of D = ``head_size`` dims, R rotated dims (the first of a head), max_pos positions.

    positions: int32 or int64 [3, T]: time, height and width of each row. A row with a position < 0 or >= max_pos stays
        untouched.
    query: [T, H*D] or [T, H, D], bf16, fp16 or float32. Written in place.
    key: the same with Hk heads, or None. Written in place.
        Only the last dimension must be contiguous, so both may be slices of one packed QKV tensor.
    cos_sin_cache: *constant* [max_pos, R], cosines in the first R/2 columns, sines in the others; float32 or the
        dtype of query. See :func:`build_cos_sin_cache`.
    mrope_section: how many of the R/2 frequencies take the position of time, height and width; their sum is R/2.
    is_neox: True: pairs are (i, i + R/2), the order of NeoX. False: pairs are (2i, 2i + 1), the order of GPT-J.
    interleaved: False (Qwen2-VL): the frequencies of time come first, then height, then width. True (Qwen3-VL): they
        alternate: time, height, width; once height or width has all of its frequencies, time takes its turns.

    Returns None. The rotation is float32 and rounded once. A row does not depend on the rows around it, bit for bit.
    Raises TypeError for a wrong dtype or a missing tensor, ValueError for a wrong shape, stride, range or device, and
    for a query or key that shares memory within itself or with another argument.
    Semantics: ``apply_multimodal_rotary_pos_emb`` of Qwen2-VL; Wang et al., arXiv 2409.12191.

    >>> import torch, kestrel_rope
    >>> table = kestrel_rope.build_cos_sin_cache(6, 8, base=1.0001)  # three frequencies of nearly 1
    >>> query = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0, 0.0]])  # one row, one head of 6: pairs (0, 3), (1, 4), (2, 5)
    >>> positions = torch.tensor([[0], [1], [2]])  # time 0, height 1, width 2
    >>> kestrel_rope.multimodal_rotary_embedding(positions, query, None, 6, table, [1, 1, 1])
    >>> query  # rotated by 0, 1 and 2 radians
    tensor([[ 1.0000,  0.5403, -0.4160,  0.0000,  0.8415,  0.9094]])
    """
    time, height, width = mrope_section
    _kernels.multimodal_rotary_embedding(
        positions, query, key, head_size, cos_sin_cache, time, height, width, is_neox, interleaved
    )
