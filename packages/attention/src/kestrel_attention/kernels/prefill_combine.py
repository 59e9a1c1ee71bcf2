"""The combine kernel of prefill's split-KV: out = sum of exp(lse_s - lse) out_s, over the splits s of a row in order.

Launched after prefill_hopper.py where a block of rows may have several splits. One warp per row and head. Rows of a
block with one split are final already. Sinks are added here, as one more term of the denominator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kestrel_runtime.cute_dsl import arguments, numeric, parameters, pdl, ptx

from .constants import FIRST_WORK, SPLIT_BLOCK_COUNT, SPLIT_ROWS
from .parameters import PrefillCombineScalars, PrefillCombineTensors
from .prefill_base import divide, queries_of
from .scores import LOG2_E

WARPS = 4
MAX_BLOCKS = 1056  # of one launch over packed sequences: eight per multiprocessor
DIMS = 128  # per iteration of a warp: four per lane
TOGETHER = 4  # splits whose results are loaded at once


@dataclass(frozen=True)
class PrefillCombine:
    """One compiled variant."""

    dtype: type[cutlass.Numeric]
    pdl: bool

    def arguments(self) -> tuple[Any, ...]:
        """Arguments to compile with."""
        blocks, queries, heads, head_dim = (cute.sym_int() for _ in range(4))
        tensors = PrefillCombineTensors(
            mOut=arguments.strided(self.dtype, blocks, queries, heads, head_dim, unit=8),
            mLse=arguments.contiguous(Float32, blocks, heads, queries, align=None),
            mPartialOut=arguments.any_strides(Float32, cute.sym_int64()),
            mPartialLse=arguments.any_strides(Float32, cute.sym_int()),
            mNumSplits=arguments.any_strides(Int32, cute.sym_int()),
            mSinks=arguments.any_strides(Float32, cute.sym_int()),
            mStartQ=arguments.any_strides(Int32, cute.sym_int()),
            mWorks=arguments.contiguous(Int32, cute.sym_int(), align=None),
        )
        return (*tensors, *parameters.compile_time(PrefillCombineScalars), Int32(1), arguments.torch_stream())

    @cute.jit
    def __call__(self, *given):
        num_tensors = cutlass.const_expr(len(PrefillCombineTensors._fields))
        tensors, scalars = PrefillCombineTensors(*given[:num_tensors]), PrefillCombineScalars(*given[num_tensors:-2])
        batch = given[-2]
        rows = cutlass.min(scalars.max_queries, scalars.split_blocks * SPLIT_ROWS)
        items = tensors.mOut.shape[2] * cute.ceil_div(rows, WARPS)
        # Most packed sequences may have no splits, so a thread block looks at all of them, or at a list.
        sequences = Int32(cutlass.select_(scalars.packed_queries != 0, Int32(1), batch))
        blocks = Int32(cutlass.select_(sequences > 1, items, cutlass.min(items, MAX_BLOCKS)))
        blocks = Int32(cutlass.select_(scalars.listed_works > 0, Int32(MAX_BLOCKS), blocks))
        self.kernel(tensors, scalars, rows, items, batch).launch(
            grid=[blocks, sequences, 1],
            block=[32 * WARPS, 1, 1],
            stream=given[-1],
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(
        self, tensors: PrefillCombineTensors, scalars: PrefillCombineScalars, rows: Int32, items: Int32, batch: Int32
    ):
        tid, _, _ = cute.arch.thread_idx()
        first, sequence, _ = cute.arch.block_idx()
        step, sequences, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // 32)
        if cutlass.const_expr(self.pdl):
            pdl.wait()
            pdl.trigger()
        if scalars.listed_works > 0:
            self.combine_listed(tensors, scalars, first, step, warp)
            sequence = batch
        while sequence < batch:
            first_query, num_queries = queries_of(tensors.mStartQ, tensors.mOut, scalars, sequence)
            if num_queries <= rows:
                item = first
                while item < items:
                    chunk = divide(item, tensors.mOut.shape[2])
                    row = chunk * WARPS + warp
                    if row < num_queries:
                        head = item - chunk * tensors.mOut.shape[2]
                        self.combine(tensors, scalars, sequence, head, first_query, row, num_queries)
                    item += step
            sequence += sequences

    @cute.jit
    def combine_listed(self, tensors, scalars, first, step, warp):
        """Combine the splits of the blocks of rows that a list of works names."""
        heads = tensors.mOut.shape[2]
        of_block = heads * (SPLIT_ROWS // WARPS)
        items = tensors.mWorks[SPLIT_BLOCK_COUNT] * of_block
        item = first
        while item < items:
            block = divide(item, of_block)
            chunk = divide(item - block * of_block, heads)
            at = FIRST_WORK + 2 * (scalars.listed_works + block)
            sequence = tensors.mWorks[at]
            first_query, num_queries = queries_of(tensors.mStartQ, tensors.mOut, scalars, sequence)
            row = tensors.mWorks[at + 1] * SPLIT_ROWS + chunk * WARPS + warp
            if row < num_queries:
                head = item - block * of_block - chunk * heads
                self.combine(tensors, scalars, sequence, head, first_query, row, num_queries)
            item += step

    @cute.jit
    def combine(self, tensors, scalars, sequence, head, first_query, row, num_queries):
        """Combine the splits of a row of a sequence and head. The stride of its splits is ``num_queries`` rows."""
        mOut, mPartialLse = tensors.mOut, tensors.mPartialLse
        lane = cute.arch.thread_idx()[0] % 32
        heads, head_dim = mOut.shape[2], mOut.shape[3]
        num_splits = tensors.mNumSplits[(sequence * heads + head) * scalars.split_blocks + row // SPLIT_ROWS]
        num_splits = cutlass.min(num_splits, scalars.num_splits)  # unwritten where invalid starts fill a list
        if num_splits > 1:
            first_row = first_query * scalars.partials_of_row + sequence * scalars.partials_of_sequence + row
            first = Int64(first_row) * heads + head
            stride = Int64(num_queries) * heads  # from one split to the next
            sink = -Float32.inf
            if scalars.has_sinks != 0:
                sink = tensors.mSinks[head]
            # A lane has the weight of a split.
            lse = mPartialLse[first + cutlass.min(lane, num_splits - 1) * stride]
            lse = cutlass.select_(lane < num_splits, lse, -Float32.inf)
            largest = ptx.fmax(sink, lse)
            for i in cutlass.range_constexpr(5):
                largest = ptx.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1 << i))
            base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
            weight = ptx.exp2_approx((lse - base) * LOG2_E)
            total = weight
            for i in cutlass.range_constexpr(5):
                total += cute.arch.shuffle_sync_bfly(total, 1 << i)
            total += ptx.exp2_approx((sink - base) * LOG2_E)
            factor = cutlass.select_(total == 0.0, Float32(0.0), 1.0 / total)
            block, at_row = sequence, row
            if scalars.packed_queries != 0:
                block, at_row = Int32(0), first_query + row
            first_dim = Int32(0)
            while first_dim < head_dim:
                dim = first_dim + 4 * lane
                from_dim = cutlass.min(dim, head_dim - 4)
                rOut = cute.make_rmem_tensor(4, Float32)
                rOut.fill(0.0)
                for split in cutlass.range(0, num_splits, TOGETHER, unroll=1):
                    partials = []
                    for i in cutlass.range_constexpr(TOGETHER):
                        at = first + cutlass.min(split + i, num_splits - 1) * stride
                        address = tensors.mPartialOut.iterator.toint() + 4 * (at * head_dim + from_dim)
                        partials.append(ptx.load_global(address, 4))
                    for i in cutlass.range_constexpr(TOGETHER):
                        share = cute.arch.shuffle_sync(weight, split + i)  # 0 past the last split
                        for k in cutlass.range_constexpr(4):
                            rOut[k] = ptx.fma(share, ptx.int_as_float(Int32(partials[i][k])), rOut[k])
                kind = cutlass.const_expr(numeric.ptx_name(self.dtype))
                four = [rOut[k] * factor for k in range(4)]
                to = Int64(block) * mOut.stride[0] + Int64(at_row) * mOut.stride[1]
                to = to + Int64(head) * mOut.stride[2] + dim
                packed = [ptx.pack_f32x2(four[2 * k], four[2 * k + 1], kind) for k in range(2)]
                if dim < head_dim:
                    ptx.store_global(mOut.iterator.toint() + 2 * to, packed)
                first_dim += DIMS
            if lane == 0:
                tensors.mLse[block, head, at_row] = base + ptx.log2_approx(total) * (1.0 / LOG2_E)
