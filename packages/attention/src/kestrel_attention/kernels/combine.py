"""Joins the chunks of long sequences: out = sum of exp(lse_c - lse) out_c, over the chunks c of a row in order.

Launched behind decode.py where a sequence may have several chunks. A block takes one row: its warps take chunks in
turn, and meet in shared memory in a fixed order. Rows of one chunk are done already. A row of D dims in C chunks is
4 C D bytes, written just before and still in L2: what counts is one round of loads behind the launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, Int64, Uint32

from . import ptx
from .decode import LOG2_E
from .tile import ROWS

LARGEST_SIZE = 512


@dataclass(frozen=True)
class Combine:
    """One compiled variant."""

    dtype: type[cutlass.Numeric]
    warps: int
    dependent_launch: bool

    @cute.jit
    def __call__(
        self,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        mPartOut: cute.Tensor,
        mPartLse: cute.Tensor,
        mChunks: cute.Tensor,
        group: Int32,
        slots: Int32,
        stream: cuda.CUstream,
    ):
        batch, queries, heads, _ = mOut.shape
        self.kernel(mOut, mLse, mPartOut, mPartLse, mChunks, group, slots).launch(
            grid=[heads, queries, batch],
            block=[32 * self.warps, 1, 1],
            stream=stream,
            use_pdl=self.dependent_launch,
        )

    @cute.kernel
    def kernel(
        self,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        mPartOut: cute.Tensor,
        mPartLse: cute.Tensor,
        mChunks: cute.Tensor,
        group: Int32,
        slots: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        head, query, sequence = cute.arch.block_idx()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        _, queries, heads, size = mOut.shape
        kv_heads = heads // group
        packed = query * group + head % group
        column = packed // ROWS * kv_heads + head // group
        block = sequence * (cute.ceil_div(queries * group, ROWS) * kv_heads) + column
        if cutlass.const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        # What the first round needs is asked for before it is known how many chunks there are.
        first = block * slots * ROWS + packed % ROWS  # row of chunk 0; those of the next are ROWS further
        sizes = cutlass.const_expr(LARGEST_SIZE // 128)
        rPart = cute.make_rmem_tensor(4 * sizes, Uint32)
        own_lse = -Float32.inf  # of the chunk with the warp's number
        lane_lse = -Float32.inf
        if warp < slots:
            self.load_part(mPartOut, rPart, first + warp * ROWS, size, lane)
            own_lse = ptx.float_of(Int32(ptx.load_words(self.lse_at(mPartLse, first + warp * ROWS), 1)[0]))
        if lane < slots:
            lane_lse = ptx.float_of(Int32(ptx.load_words(self.lse_at(mPartLse, first + lane * ROWS), 1)[0]))
        chunks = mChunks[block]
        if chunks > 1:
            rOut = cute.make_rmem_tensor(4 * sizes, Float32)
            rOut.fill(0.0)
            largest = cutlass.select_(lane < chunks, lane_lse, -Float32.inf)
            for chunk in cutlass.range(lane + 32, chunks, 32, unroll=1):
                largest = ptx.maximum(largest, mPartLse[first + chunk * ROWS])
            for step in cutlass.range_constexpr(5):
                largest = ptx.maximum(largest, cute.arch.shuffle_sync_bfly(largest, 1 << step))
            base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
            total = Float32(0.0)
            if warp < chunks:
                total = ptx.exp2((own_lse - base) * LOG2_E)
                self.add_part(rOut, rPart, total, size, lane)
            for chunk in cutlass.range(warp + self.warps, chunks, self.warps, unroll=4):
                row = first + chunk * ROWS
                share = ptx.exp2((mPartLse[row] - base) * LOG2_E)
                total += share
                self.load_part(mPartOut, rPart, row, size, lane)
                self.add_part(rOut, rPart, share, size, lane)
            sTotal = cute.make_tensor(cute.arch.alloc_smem(Float32, self.warps, alignment=16), self.warps)
            shared = cute.arch.alloc_smem(Float32, self.warps * LARGEST_SIZE, alignment=16)
            sOut = cute.make_tensor(shared, self.warps * LARGEST_SIZE)
            if lane == 0:
                sTotal[warp] = total
            for i in cutlass.range_constexpr(sizes):
                if i * 128 + lane * 4 < size:
                    for k in cutlass.range_constexpr(4):
                        sOut[warp * LARGEST_SIZE + i * 128 + lane * 4 + k] = rOut[4 * i + k]
            cute.arch.sync_threads()
            total = Float32(0.0)
            for w in cutlass.range_constexpr(self.warps):
                total += sTotal[w]
            factor = cutlass.select_(total == 0.0, Float32(0.0), 1.0 / total)
            for dim in cutlass.range(tid, size, 32 * self.warps, unroll=1):
                joined = Float32(0.0)
                for w in cutlass.range_constexpr(self.warps):
                    joined += sOut[w * LARGEST_SIZE + dim]
                mOut[sequence, query, head, dim] = self.dtype(joined * factor)
            if tid == 0:
                mLse[sequence, head, query] = base + ptx.log2(total) * (1.0 / LOG2_E)

    @cute.jit
    def lse_at(self, mPartLse, row) -> Int64:
        return mPartLse.iterator.toint() + 4 * Int64(row)

    @cute.jit
    def load_part(self, mPartOut, rPart, row, size, lane):
        """A lane's dims of one chunk's output."""
        for i in cutlass.range_constexpr(LARGEST_SIZE // 128):
            dim = i * 128 + lane * 4
            if dim < size:
                loaded = ptx.load_words(mPartOut.iterator.toint() + 4 * (Int64(row) * size + dim), 4)
                for k in cutlass.range_constexpr(4):
                    rPart[4 * i + k] = loaded[k]

    @cute.jit
    def add_part(self, rOut, rPart, share, size, lane):
        for i in cutlass.range_constexpr(LARGEST_SIZE // 128):
            if i * 128 + lane * 4 < size:
                for k in cutlass.range_constexpr(4):
                    rOut[4 * i + k] += share * ptx.float_of(Int32(rPart[4 * i + k]))
