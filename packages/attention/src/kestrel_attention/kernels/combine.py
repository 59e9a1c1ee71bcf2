"""Joins the chunks of long sequences: out = sum of exp(lse_c - lse) out_c, over the chunks c of a row in order.

Launched behind decode.py where a sequence may have several chunks. A block takes 128 dims of a row: its warps take
chunks in turn, and meet in shared memory in a fixed order. Rows of one chunk are done already. A row of D dims in C
chunks is 4 C D bytes, written just before and still in L2: what counts is one round of loads behind the launch, so that
chunks are asked for before it is known how many there are. 256 rows of 128 dims in 6 chunks are 0.8 MB, 0.2 us and a
launch of 0.6; with the wait for decode.py's last block it costs 1.5 to 3 us.
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

DIMS = 128  # of a block: four of each lane
ROUNDS = 8  # of chunks that are asked for at once


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
        batch, queries, heads, size = mOut.shape
        self.kernel(mOut, mLse, mPartOut, mPartLse, mChunks, group, slots).launch(
            grid=[heads, queries * cute.ceil_div(size, DIMS), batch],
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
        first_dim = query // queries * DIMS
        query = query % queries
        dim = first_dim + lane * 4
        kv_heads = heads // group
        packed = query * group + head % group
        column = packed // ROWS * kv_heads + head // group
        block = sequence * (cute.ceil_div(queries * group, ROWS) * kv_heads) + column
        if cutlass.const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        first = block * slots * ROWS + packed % ROWS  # row of chunk 0; those of the next are ROWS further
        rPart = [cute.make_rmem_tensor(4, Uint32) for _ in range(ROUNDS)]
        rOwn = cute.make_rmem_tensor(ROUNDS, Float32)  # LSE of the warp's chunks
        rOwn.fill(-Float32.inf)
        lane_lse = [-Float32.inf, -Float32.inf]  # of chunks lane and lane + 32
        for i in cutlass.range_constexpr(2):
            if lane + 32 * i < slots:
                lane_lse[i] = self.lse(mPartLse, first + (lane + 32 * i) * ROWS)
        for i in cutlass.range_constexpr(ROUNDS):
            chunk = warp + i * self.warps
            rPart[i].fill(0)
            if chunk < slots:
                rOwn[i] = self.lse(mPartLse, first + chunk * ROWS)
                self.load_part(mPartOut, rPart[i], first + chunk * ROWS, size, dim)
        chunks = mChunks[block]
        if chunks > 1:
            rOut = cute.make_rmem_tensor(4, Float32)
            rOut.fill(0.0)
            largest = -Float32.inf
            for i in cutlass.range_constexpr(2):
                seen = cutlass.select_(lane + 32 * i < chunks, lane_lse[i], -Float32.inf)
                largest = ptx.maximum(largest, seen)
            for chunk in cutlass.range(lane + 64, chunks, 32, unroll=1):
                largest = ptx.maximum(largest, mPartLse[first + chunk * ROWS])
            for step in cutlass.range_constexpr(5):
                largest = ptx.maximum(largest, cute.arch.shuffle_sync_bfly(largest, 1 << step))
            base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
            total = Float32(0.0)
            for i in cutlass.range_constexpr(ROUNDS):
                if warp + i * self.warps < chunks:
                    share = ptx.exp2((rOwn[i] - base) * LOG2_E)
                    total += share
                    self.add_part(rOut, rPart[i], share)
            for chunk in cutlass.range(warp + ROUNDS * self.warps, chunks, self.warps, unroll=1):
                row = first + chunk * ROWS
                share = ptx.exp2((mPartLse[row] - base) * LOG2_E)
                total += share
                self.load_part(mPartOut, rPart[0], row, size, dim)
                self.add_part(rOut, rPart[0], share)
            sTotal = cute.make_tensor(cute.arch.alloc_smem(Float32, self.warps, alignment=16), self.warps)
            sOut = cute.make_tensor(cute.arch.alloc_smem(Float32, self.warps * DIMS, alignment=16), self.warps * DIMS)
            if lane == 0:
                sTotal[warp] = total
            for k in cutlass.range_constexpr(4):
                sOut[warp * DIMS + lane * 4 + k] = rOut[k]
            cute.arch.sync_threads()
            total = Float32(0.0)
            for w in cutlass.range_constexpr(self.warps):
                total += sTotal[w]
            factor = cutlass.select_(total == 0.0, Float32(0.0), 1.0 / total)
            if tid < DIMS and first_dim + tid < size:
                joined = Float32(0.0)
                for w in cutlass.range_constexpr(self.warps):
                    joined += sOut[w * DIMS + tid]
                mOut[sequence, query, head, first_dim + tid] = self.dtype(joined * factor)
            if tid == 0 and first_dim == 0:
                mLse[sequence, head, query] = base + ptx.log2(total) * (1.0 / LOG2_E)

    @cute.jit
    def lse(self, mPartLse, row) -> Float32:
        return ptx.float_of(Int32(ptx.load_words(mPartLse.iterator.toint() + 4 * Int64(row), 1)[0]))

    @cute.jit
    def load_part(self, mPartOut, rPart, row, size, dim):
        """A lane's dims of one chunk's output."""
        if dim < size:
            loaded = ptx.load_words(mPartOut.iterator.toint() + 4 * (Int64(row) * size + dim), 4)
            for k in cutlass.range_constexpr(4):
                rPart[k] = loaded[k]

    @cute.jit
    def add_part(self, rOut, rPart, share):
        for k in cutlass.range_constexpr(4):
            rOut[k] += share * ptx.float_of(Int32(rPart[k]))
