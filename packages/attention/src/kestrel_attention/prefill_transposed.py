"""Launching prefill of e4m3 queries whose keys are put in order, and values transposed, by a kernel of their own first.

The producers of prefill_fp8.py transpose each tile of values for every block of queries; in calls of many queries once
is cheaper. Scratch memory holds the keys and values of the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kestrel_runtime import Binary

from . import prefill
from .kernels.constants import BOX_ROWS
from .kernels.variants import NAMED
from .launching import unused
from .plan import MULTIPROCESSORS
from .prefill_plan import PrefillProblem, plan_prefill

_binary = Binary("kestrel_attention")
TRANSPOSED_ROWS = 16384  # queries x query heads of a KV head, of a sequence on average, from which on it is faster
COPIED_ROWS = 4096  # the same, where producers would copy keys because TMA cannot load their pages
SCRATCH_BYTES = 2**30  # of keys and values, at most
HEAD_DIM, TILE = 128, 128  # of prefill_transpose.py
BLOCKS = 8 * MULTIPROCESSORS  # of its launch


def covers(problem: PrefillProblem, device: torch.device) -> bool:
    """Whether values are transposed first."""
    if not problem.fp8_queries or problem.cache != "e4m3" or problem.head_dim != HEAD_DIM:
        return False
    if not problem.has_block_table or not problem.max_keys or not prefill.uses_wgmma(device):
        return False
    if problem.window_left >= 0 and not problem.has_prefix_lens and not problem.prefix_len:
        return False  # a window without a prefix hides keys, which the other kernels then do not read
    rows = problem.total_queries // problem.batch * (problem.heads // problem.kv_heads)
    size = 2 * problem.batch * tokens_of(problem) * problem.kv_heads * HEAD_DIM
    least = TRANSPOSED_ROWS if problem.page_size % BOX_ROWS == 0 else COPIED_ROWS
    return rows >= least and size <= SCRATCH_BYTES


def tokens_of(problem: PrefillProblem) -> int:
    """Keys of a sequence that scratch memory has room for: whole tiles of the most, however wide the block table."""
    return -(-problem.max_keys // TILE) * TILE


def attend_of(problem: PrefillProblem, q: torch.Tensor, pages: int) -> prefill.Attend:
    """The kernels of a problem, as prefill.kernel_for has them. q: queries of the call's form; pages: of the table."""
    device = q.device
    problem = replace(problem, has_boxes=True, in_order=True, transposed=True)
    attend = prefill.kernel_for(problem, q)
    arch = _binary.arch(device).removeprefix("sm")
    scalars = plan_prefill(replace(problem, arch=arch, hopper=True)).scalars._replace(has_block_table=1)
    transpose = _binary.kernel(NAMED["prefill_transpose_d128"], device)
    tokens, heads, batch = tokens_of(problem), problem.kv_heads, problem.batch
    blocks = max(1, min(tokens // TILE * heads, BLOCKS // batch))
    no_int, no_float, no_lse = (
        unused(torch.int32, device),
        unused(torch.float32, device),
        unused(torch.float32, device, 3),
    )
    no_out = torch.empty(1, 1, 1, HEAD_DIM, dtype=torch.bfloat16, device=device)

    def launch(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        given: Sequence[torch.Tensor | None],
        out: torch.Tensor,
        lse: Any,
        append: Any = None,
        memory: Any = None,
    ) -> None:
        given = prefill.Tensors._make(given)
        in_order = torch.empty(2, batch, heads, tokens, HEAD_DIM, dtype=torch.uint8, device=device)
        keys, values = in_order.transpose(2, 3)
        table = torch.empty(batch, pages, dtype=torch.int32, device=device)
        of_ints = [no_int if x is None else x for x in given[:3]]
        tensors = (*of_ints, given.block_table, no_int, no_float, no_float, no_float, no_float)
        rest = (no_out, no_lse, no_float, no_float, no_int, no_int)
        before = (keys[:1, :1, :1], k.view(torch.uint8), v.view(torch.uint8), *tensors, *rest, *scalars)
        first = partial(transpose, *before, keys, values, table, blocks, batch)
        attend(q, keys, values, given._replace(block_table=table), out, lse, first)

    return launch
