"""Joins the chunks of long sequences: out = sum of exp(lse_c - lse) out_c, over the chunks c of a row in order.

Launched behind decode.py where a sequence may have several chunks. A block takes 128 dims of a row; a warp takes eight
neighbouring chunks, and several meet in shared memory in a fixed order. A row of D dims in C chunks is 4 C D bytes,
written just before and still in L2: what counts is one round of loads behind the launch. So addresses are worked out
before the wait for decode.py's last block, and chunks asked for before it is known how many there are. 256 rows of 128
dims in 6 chunks are 0.8 MB, 0.2 us and a launch of 0.6.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, Int64

from kestrel_runtime.cute_dsl import pdl, ptx

from .decode import LOG2_E
from .tile import ROWS

DIMS = 128  # of a block: four of each lane
ROUND = 8  # chunks of a warp, asked for at once


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
        if cutlass.const_expr(self.dependent_launch and self.warps == 1):
            # Before the wait: decode.py's launch, which has let this one start, waited for those before it. Nor can a
            # launch after this one write mPartOut, mPartLse or mChunks too early: it writes after its own wait, which
            # is for this launch to be complete, and this one, whose every thread waits, completes after decode.py's.
            pdl.trigger()
        first_dim = query // queries * DIMS
        query = query % queries
        dim = first_dim + lane * 4
        kv_heads = heads // group
        packed = query * group + head % group
        column = packed // ROWS * kv_heads + head // group
        block = sequence * (cute.ceil_div(queries * group, ROWS) * kv_heads) + column

        # Of chunks that do not exist others are read, and not used.
        first = block * slots * ROWS + packed % ROWS  # row of chunk 0; those of the next are ROWS further
        part_at = mPartOut.iterator.toint() + 4 * (Int64(first) * size + cutlass.select_(dim < size, dim, Int32(0)))
        lse_at = mPartLse.iterator.toint() + 4 * Int64(first)
        chunks_at = mChunks.iterator.toint() + 4 * Int64(block)
        mine = [cutlass.min(warp * ROUND + i, slots - 1) for i in range(ROUND)]
        places = [(lse_at + chunk * (4 * ROWS), part_at + Int64(chunk) * (4 * ROWS * size)) for chunk in mine]
        if cutlass.const_expr(self.dependent_launch):
            known = chunks_at
            for at in (at for place in places for at in place):
                known = known | at
            pdl.wait_after(known)
            if cutlass.const_expr(self.warps > 1):
                pdl.trigger()
        chunks = Int32(ptx.load_global(chunks_at, 1)[0])
        lses = [ptx.load_global(at, 1)[0] for at, _ in places]
        parts = [ptx.load_global(at, 4) for _, at in places]
        cute.arch.sync_warp()  # loads stay before the branch
        if chunks > 1:
            rOut = cute.make_rmem_tensor(4, Float32)
            rSum = cute.make_rmem_tensor(2, Float32)
            self.join(rOut, rSum, lses, parts, warp * ROUND, chunks)
            if cutlass.const_expr(self.warps > 1):
                for chunk in cutlass.range(warp + self.warps * ROUND, chunks, self.warps, unroll=1):
                    lse = ptx.int_as_float(Int32(ptx.load_global(lse_at + chunk * (4 * ROWS), 1)[0]))
                    part = ptx.load_global(part_at + Int64(chunk) * (4 * ROWS * size), 4)
                    self.add(rOut, rSum, [ptx.int_as_float(Int32(x)) for x in part], (lse, Float32(1.0)))
            if cutlass.const_expr(self.warps > 1):
                self.meet(rOut, rSum, warp, lane, slots)
            if warp == 0:
                base, total = rSum[0], rSum[1]
                factor = cutlass.select_(total == 0.0, Float32(0.0), 1.0 / total)
                if dim < size:
                    kind = cutlass.const_expr("bf16" if self.dtype is cutlass.BFloat16 else "f16")
                    row = (Int64(sequence) * queries + query) * heads + head
                    four = [ptx.fma(rOut[k], factor, Float32(0.0)) for k in range(4)]
                    words = [ptx.pack_f32x2(four[2 * k], four[2 * k + 1], kind) for k in range(2)]
                    ptx.store_global(mOut.iterator.toint() + 2 * (row * size + dim), words)
                if tid == 0 and first_dim == 0:
                    mLse[sequence, head, query] = base + ptx.log2_approx(total) * (1.0 / LOG2_E)

    @cute.jit
    def join(self, rOut, rSum, lses, parts, first: Int32, chunks: Int32):
        """Eight chunks' sums, of those that exist, with weights to the base rSum[0]; rSum[1] is the sum of these."""
        found = []
        largest = -Float32.inf
        for i in cutlass.range_constexpr(ROUND):
            lse = ptx.int_as_float(Int32(lses[i]))
            found.append(cutlass.select_(first + i < chunks, lse, -Float32.inf))
            largest = ptx.fmax(largest, found[i])
        base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
        rOut.fill(0.0)
        total = Float32(0.0)
        for i in cutlass.range_constexpr(ROUND):
            share = ptx.exp2_approx((found[i] - base) * LOG2_E)
            total += share
            for k in cutlass.range_constexpr(4):
                part = cutlass.select_(first + i < chunks, ptx.int_as_float(Int32(parts[i][k])), Float32(0.0))
                rOut[k] = ptx.fma(share, part, rOut[k])
        rSum[0] = base
        rSum[1] = total

    @cute.jit
    def add(self, rOut, rSum, rMore, rMoreSum):
        """Joined chunks to joined chunks. A base of none is 0, and its weights are."""
        own, more = [cutlass.select_(x[1] == 0.0, -Float32.inf, x[0]) for x in (rSum, rMoreSum)]
        largest = ptx.fmax(own, more)
        base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
        shares = [ptx.exp2_approx((x - base) * LOG2_E) for x in (own, more)]
        for k in cutlass.range_constexpr(4):
            rOut[k] = ptx.fma(shares[1], rMore[k], shares[0] * rOut[k])
        rSum[0] = base
        rSum[1] = ptx.fma(shares[1], rMoreSum[1], shares[0] * rSum[1])

    @cute.jit
    def meet(self, rOut, rSum, warp, lane, slots):
        """What all warps have into the first."""
        each = cutlass.const_expr(DIMS + 4)
        sOut = cute.make_tensor(cute.arch.alloc_smem(Float32, self.warps * each, alignment=16), self.warps * each)
        for k in cutlass.range_constexpr(4):
            sOut[warp * each + k * 32 + lane] = rOut[k]
        if lane < 2:
            sOut[warp * each + DIMS + lane] = cutlass.select_(lane == 0, rSum[0], rSum[1])
        cute.arch.sync_threads()
        if warp == 0:
            rMore = cute.make_rmem_tensor(4, Float32)
            rMoreSum = cute.make_rmem_tensor(2, Float32)
            for w in cutlass.range(1, cutlass.min((slots + ROUND - 1) // ROUND, self.warps), unroll=1):
                for k in cutlass.range_constexpr(4):
                    rMore[k] = sOut[w * each + k * 32 + lane]
                for k in cutlass.range_constexpr(2):
                    rMoreSum[k] = sOut[w * each + DIMS + k]
                self.add(rOut, rSum, rMore, rMoreSum)
