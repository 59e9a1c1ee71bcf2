"""Tau scaling of queries and values in a packed QKV projection (Moondream 3), in place."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kestrel_runtime import Binary, UnsupportedError, check, kernel_op

from . import reference
from .kernels.parameters import TauTailScalars
from .kernels.variants import NAMED
from .plans import Plans, form

_binary = Binary("kestrel_attention")
_launches: Plans[Callable[..., None]] = Plans()
_UNALIGNED = "the kernel takes heads that are aligned to 16 bytes"
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def check_tau_tail(
    qkv: torch.Tensor,
    tok_qv_linear: torch.Tensor,
    tau_pos_table: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
    head_size: int,
) -> None:
    op = "tau_tail"
    check.tensor(op, "qkv", qkv, dtype=check.FLOATS, ndim=2, last_contiguous=True)
    check.disjoint(op, "qkv", qkv)
    check.number(op, "num_heads", num_heads, integer=True, minimum=1)
    check.number(op, "head_size", head_size, integer=True, minimum=1)
    tokens, width = qkv.shape
    both = width // head_size - num_heads  # K and V heads
    if width % head_size or both < 2 or both % 2:
        check.fail(op, "qkv", f"a width of ({num_heads} + 2 Hk) * {head_size} with Hk >= 1", width)
    kv_heads = both // 2
    check.tensor(op, "tok_qv_linear", tok_qv_linear, dtype=check.FLOATS, ndim=2, last_contiguous=True)
    check.same(op, "dtype", qkv=qkv, tok_qv_linear=tok_qv_linear)
    check.shape(op, "tok_qv_linear", tok_qv_linear, (tokens, num_heads + kv_heads))
    check.tensor(op, "tau_pos_table", tau_pos_table, dtype=check.FLOATS, ndim=2, last_contiguous=True)
    if tau_pos_table.dtype != torch.float32:
        check.same(op, "dtype", qkv=qkv, tau_pos_table=tau_pos_table)
    shared = tau_pos_table.shape[1] == num_heads == kv_heads
    if not shared:
        check.shape(op, "tau_pos_table", tau_pos_table, (None, num_heads + kv_heads))
    check.tensor(op, "positions", positions, dtype=check.INTEGERS, ndim=1, last_contiguous=True)
    check.shape(op, "positions", positions, (tokens,))
    check.same(op, "device", qkv=qkv, tok_qv_linear=tok_qv_linear, tau_pos_table=tau_pos_table, positions=positions)


@kernel_op(reference=reference.tau_tail, check=check_tau_tail, mutates=("qkv",), kernel="cute")
def tau_tail(
    qkv: torch.Tensor,
    tok_qv_linear: torch.Tensor,
    tau_pos_table: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
    head_size: int,
) -> None:
    """Scale every query and value head by a learnt function of its token and of its position, in place.

    T tokens, H = ``num_heads`` query heads, Hk KV heads of D = ``head_size`` dims; Hk = (width / D - H) / 2.

    qkv: [T, (H + 2 Hk) * D], q heads, then k heads, then v heads; bf16, fp16 or float32. Written in place; K keeps its
        bits. The row stride is free.
    tok_qv_linear: [T, H + Hk] of qkv's dtype, q heads, then v heads: the linear of the token, before tanh.
    tau_pos_table: *constant* [max_pos, H + Hk], or [max_pos, H] shared by q and v (then Hk = H); float32 or
        qkv's dtype.
    positions: int32 or int64 [T]. A position < 0 or >= max_pos leaves its row untouched.

    s = tanh(tok_qv_linear) + tau_pos_table[position] in float32; q heads *= s_q and v heads *= s_v, one rounding.
    Returns None. Raises TypeError for a wrong dtype or a missing tensor, ValueError for a wrong shape, stride, range or
    device. Semantics: the text model of Moondream 3.

    >>> import torch, kestrel_attention
    >>> qkv = torch.ones(1, 3 * 2)  # one q, one k, one v head of 2
    >>> tok = torch.zeros(1, 2)  # tanh(0) = 0
    >>> table = torch.tensor([[2.0, 3.0]])  # position 0: q by 2, v by 3
    >>> kestrel_attention.tau_tail(qkv, tok, table, torch.tensor([0]), 1, 2)
    >>> qkv
    tensor([[2., 2., 1., 1., 3., 3.]])
    """
    tensors = form(qkv, tok_qv_linear, tau_pos_table, positions)
    key = (tensors, num_heads, head_size, type(num_heads), type(head_size))
    launch = _launches.get(key)
    if launch is None:
        check_tau_tail(qkv, tok_qv_linear, tau_pos_table, positions, num_heads, head_size)
        vector = 16 // qkv.element_size()
        if head_size % vector or qkv.stride(0) % vector:
            raise UnsupportedError(_UNALIGNED)
        name = f"tau_tail_{_NAMES[qkv.dtype]}_{_NAMES[tau_pos_table.dtype]}"
        launch = _launches.keep(key, _binary.kernel(NAMED[name], qkv.device))
    if qkv.data_ptr() % 16:
        raise UnsupportedError(_UNALIGNED)
    if qkv.shape[0] == 0 or tau_pos_table.shape[0] == 0:
        return
    wide = positions.dtype == torch.int64
    if wide:
        if positions.shape[0] == 1:  # of any stride
            positions = positions.as_strided((1,), (1,))
        positions = positions.view(torch.int32)
    launch(qkv, tok_qv_linear, tau_pos_table, positions, *TauTailScalars(wide, num_heads, head_size))
