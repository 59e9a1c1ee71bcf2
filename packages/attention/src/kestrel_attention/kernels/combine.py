"""The combine kernel of split-KV: out = sum of exp(lse_s - lse) out_s, over the splits s of a row in order.

Launched after decode.py where a sequence may have several splits. A block processes 128 dims of a row. A warp loads
eight adjacent splits at once; several warps combine theirs in shared memory, in a fixed order. Partial results are
still in L2, so the kernel is latency-bound: addresses are computed before the wait for decode.py, and splits are loaded
before their number is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kestrel_runtime.cute_dsl import arguments, numeric, parameters, pdl, ptx

from .constants import BLOCK_ROWS, COMBINE_SPLITS
from .parameters import CombineScalars, CombineTensors
from .scores import LOG2_E, add_sink

DIMS = 128  # of a block: four of each lane


@dataclass(frozen=True)
class Combine:
    """One compiled variant."""

    dtype: type[cutlass.Numeric]
    warps: int
    pdl: bool

    def arguments(self) -> tuple[Any, ...]:
        """Arguments to compile with."""
        batch, queries, heads, head_dim = (cute.sym_int() for _ in range(4))
        tensors = CombineTensors(
            mOut=arguments.contiguous(self.dtype, batch, queries, heads, head_dim),
            mLse=arguments.contiguous(Float32, batch, heads, queries),
            mPartialOut=arguments.contiguous(Float32, cute.sym_int64()),
            mPartialLse=arguments.any_strides(Float32, cute.sym_int()),
            mNumSplits=arguments.any_strides(Int32, cute.sym_int()),
            mSinks=arguments.any_strides(Float32, cute.sym_int()),
        )
        return (*tensors, *parameters.compile_time(CombineScalars), arguments.torch_stream())

    @cute.jit
    def __call__(self, *given):
        num_tensors = cutlass.const_expr(len(CombineTensors._fields))
        tensors, scalars = CombineTensors(*given[:num_tensors]), CombineScalars(*given[num_tensors:-1])
        batch, queries, heads, head_dim = tensors.mOut.shape
        self.kernel(tensors, scalars).launch(
            grid=[heads, queries * cute.ceil_div(head_dim, DIMS), batch],
            block=[32 * self.warps, 1, 1],
            stream=given[-1],
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, tensors: CombineTensors, scalars: CombineScalars):
        mOut, group_size, max_splits = tensors.mOut, scalars.group_size, scalars.num_splits
        tid, _, _ = cute.arch.thread_idx()
        head, query, sequence = cute.arch.block_idx()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        _, queries, heads, head_dim = mOut.shape
        if cutlass.const_expr(self.pdl and self.warps == 1):
            # Safe before the wait: decode.py triggers after its own wait, so earlier launches are complete. A later
            # launch writes the partial results after its wait for this one, whose every thread waits for decode.py.
            pdl.trigger()
        first_dim = query // queries * DIMS
        query = query % queries
        dim = first_dim + lane * 4
        kv_heads = heads // group_size
        row = query * group_size + head % group_size
        column = row // BLOCK_ROWS * kv_heads + head // group_size
        row_block = sequence * (cute.ceil_div(queries * group_size, BLOCK_ROWS) * kv_heads) + column

        # Splits past the last are loaded too, and not used.
        first = row_block * max_splits * BLOCK_ROWS + row % BLOCK_ROWS  # partial row of split 0
        out_dim = cutlass.select_(dim < head_dim, dim, Int32(0))
        out_address = tensors.mPartialOut.iterator.toint() + 4 * (Int64(first) * head_dim + out_dim)
        lse_address = tensors.mPartialLse.iterator.toint() + 4 * Int64(first)
        splits_address = tensors.mNumSplits.iterator.toint() + 4 * Int64(row_block)
        own = [cutlass.min(warp * COMBINE_SPLITS + i, max_splits - 1) for i in range(COMBINE_SPLITS)]
        lse_stride, out_stride = 4 * BLOCK_ROWS, 4 * BLOCK_ROWS * head_dim
        addresses = [(lse_address + split * lse_stride, out_address + Int64(split) * out_stride) for split in own]
        if cutlass.const_expr(self.pdl):
            ready = splits_address
            for address in (address for both in addresses for address in both):
                ready = ready | address
            pdl.wait_after(ready)
            if cutlass.const_expr(self.warps > 1):
                pdl.trigger()
        num_splits = Int32(ptx.load_global(splits_address, 1)[0])
        lses = [ptx.load_global(address, 1)[0] for address, _ in addresses]
        partials = [ptx.load_global(address, 4) for _, address in addresses]
        cute.arch.sync_warp()  # keeps the loads before the branch
        if num_splits > 1:
            rOut = cute.make_rmem_tensor(4, Float32)
            rSum = cute.make_rmem_tensor(2, Float32)
            self.combine_range(rOut, rSum, lses, partials, warp * COMBINE_SPLITS, num_splits)
            if cutlass.const_expr(self.warps > 1):
                for split in cutlass.range(warp + self.warps * COMBINE_SPLITS, num_splits, self.warps, unroll=1):
                    lse = ptx.int_as_float(Int32(ptx.load_global(lse_address + split * lse_stride, 1)[0]))
                    partial = ptx.load_global(out_address + Int64(split) * out_stride, 4)
                    self.add(rOut, rSum, [ptx.int_as_float(Int32(x)) for x in partial], (lse, Float32(1.0)))
            if cutlass.const_expr(self.warps > 1):
                self.reduce_warps(rOut, rSum, warp, lane, max_splits)
            if warp == 0:
                base, total = rSum[0], rSum[1]
                factor = cutlass.select_(total == 0.0, Float32(0.0), 1.0 / total)
                lse = base + ptx.log2_approx(total) * (1.0 / LOG2_E)
                if scalars.has_sinks != 0:
                    share, lse = add_sink(lse, tensors.mSinks[head])
                    factor = factor * share
                if dim < head_dim:
                    kind = cutlass.const_expr(numeric.ptx_name(self.dtype))
                    out_row = (Int64(sequence) * queries + query) * heads + head
                    four = [ptx.fma(rOut[k], factor, Float32(0.0)) for k in range(4)]
                    words = [ptx.pack_f32x2(four[2 * k], four[2 * k + 1], kind) for k in range(2)]
                    ptx.store_global(mOut.iterator.toint() + 2 * (out_row * head_dim + dim), words)
                if tid == 0 and first_dim == 0:
                    tensors.mLse[sequence, head, query] = lse

    @cute.jit
    def combine_range(self, rOut, rSum, lses, partials, first_split: Int32, num_splits: Int32):
        """Sums over COMBINE_SPLITS splits with weights relative to the base rSum[0]; rSum[1] is the sum of weights."""
        scores = []
        largest = -Float32.inf
        for i in cutlass.range_constexpr(COMBINE_SPLITS):
            lse = ptx.int_as_float(Int32(lses[i]))
            scores.append(cutlass.select_(first_split + i < num_splits, lse, -Float32.inf))
            largest = ptx.fmax(largest, scores[i])
        base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
        rOut.fill(0.0)
        total = Float32(0.0)
        for i in cutlass.range_constexpr(COMBINE_SPLITS):
            weight = ptx.exp2_approx((scores[i] - base) * LOG2_E)
            total += weight
            for k in cutlass.range_constexpr(4):
                exists = first_split + i < num_splits
                partial = cutlass.select_(exists, ptx.int_as_float(Int32(partials[i][k])), Float32(0.0))
                rOut[k] = ptx.fma(weight, partial, rOut[k])
        rSum[0] = base
        rSum[1] = total

    @cute.jit
    def add(self, rOut, rSum, rMore, rMoreSum):
        """Add one range of combined splits to another. For an empty range, base and sum of weights are 0."""
        own, more = [cutlass.select_(x[1] == 0.0, -Float32.inf, x[0]) for x in (rSum, rMoreSum)]
        largest = ptx.fmax(own, more)
        base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
        weights = [ptx.exp2_approx((x - base) * LOG2_E) for x in (own, more)]
        for k in cutlass.range_constexpr(4):
            rOut[k] = ptx.fma(weights[1], rMore[k], weights[0] * rOut[k])
        rSum[0] = base
        rSum[1] = ptx.fma(weights[1], rMoreSum[1], weights[0] * rSum[1])

    @cute.jit
    def reduce_warps(self, rOut, rSum, warp, lane, max_splits):
        """Add the sums of all warps in the first, in order."""
        words = cutlass.const_expr(DIMS + 4)
        sSums = cute.make_tensor(cute.arch.alloc_smem(Float32, self.warps * words, alignment=16), self.warps * words)
        for k in cutlass.range_constexpr(4):
            sSums[warp * words + k * 32 + lane] = rOut[k]
        if lane < 2:
            sSums[warp * words + DIMS + lane] = cutlass.select_(lane == 0, rSum[0], rSum[1])
        cute.arch.sync_threads()
        if warp == 0:
            rMore = cute.make_rmem_tensor(4, Float32)
            rMoreSum = cute.make_rmem_tensor(2, Float32)
            busy = cutlass.min((max_splits + COMBINE_SPLITS - 1) // COMBINE_SPLITS, self.warps)
            for w in cutlass.range(1, busy, unroll=1):
                for k in cutlass.range_constexpr(4):
                    rMore[k] = sSums[w * words + k * 32 + lane]
                for k in cutlass.range_constexpr(2):
                    rMoreSum[k] = sSums[w * words + DIMS + k]
                self.add(rOut, rSum, rMore, rMoreSum)
