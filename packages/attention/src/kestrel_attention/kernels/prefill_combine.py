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

from .parameters import PrefillCombineScalars, PrefillCombineTensors
from .scores import LOG2_E

WARPS = 4
DIMS = 128  # per iteration of a warp: four per lane


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
        )
        return (*tensors, *parameters.compile_time(PrefillCombineScalars), arguments.torch_stream())

    @cute.jit
    def __call__(self, *given):
        num_tensors = cutlass.const_expr(len(PrefillCombineTensors._fields))
        tensors, scalars = PrefillCombineTensors(*given[:num_tensors]), PrefillCombineScalars(*given[num_tensors:-1])
        blocks, queries, heads, _ = tensors.mOut.shape
        self.kernel(tensors, scalars).launch(
            grid=[heads, cute.ceil_div(queries, WARPS), blocks],
            block=[32 * WARPS, 1, 1],
            stream=given[-1],
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, tensors: PrefillCombineTensors, scalars: PrefillCombineScalars):
        mOut, mPartialLse = tensors.mOut, tensors.mPartialLse
        tid, _, _ = cute.arch.thread_idx()
        head, row, block = cute.arch.block_idx()
        blocks, queries, heads, head_dim = mOut.shape
        lane = tid % 32
        row = row * WARPS + cute.arch.make_warp_uniform(tid // 32)
        if cutlass.const_expr(self.pdl):
            pdl.wait()
            pdl.trigger()
        if row < queries:
            row_blocks = cute.ceil_div(queries, scalars.block_rows)
            num_splits = tensors.mNumSplits[(block * heads + head) * row_blocks + row // scalars.block_rows]
            if num_splits > 1:
                first = (Int64(block) * queries + row) * heads + head
                stride = Int64(blocks) * queries * heads  # from one split to the next
                sink = -Float32.inf
                if scalars.has_sinks != 0:
                    sink = tensors.mSinks[head]
                largest = sink
                for split in cutlass.range(num_splits, unroll=1):
                    largest = ptx.fmax(largest, mPartialLse[first + split * stride])
                base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
                total = ptx.exp2_approx((sink - base) * LOG2_E)
                for split in cutlass.range(num_splits, unroll=1):
                    total += ptx.exp2_approx((mPartialLse[first + split * stride] - base) * LOG2_E)
                factor = cutlass.select_(total == 0.0, Float32(0.0), 1.0 / total)
                dim = 4 * lane
                while dim < head_dim:
                    rOut = cute.make_rmem_tensor(4, Float32)
                    rOut.fill(0.0)
                    for split in cutlass.range(num_splits, unroll=1):
                        at = first + split * stride
                        weight = ptx.exp2_approx((mPartialLse[at] - base) * LOG2_E)
                        words = ptx.load_global(tensors.mPartialOut.iterator.toint() + 4 * (at * head_dim + dim), 4)
                        for k in cutlass.range_constexpr(4):
                            rOut[k] = ptx.fma(weight, ptx.int_as_float(words[k]), rOut[k])
                    kind = cutlass.const_expr(numeric.ptx_name(self.dtype))
                    four = [rOut[k] * factor for k in range(4)]
                    to = (
                        Int64(block) * mOut.stride[0] + Int64(row) * mOut.stride[1] + Int64(head) * mOut.stride[2] + dim
                    )
                    packed = [ptx.pack_f32x2(four[2 * k], four[2 * k + 1], kind) for k in range(2)]
                    ptx.store_global(mOut.iterator.toint() + 2 * to, packed)
                    dim += DIMS
                if lane == 0:
                    tensors.mLse[block, head, row] = base + ptx.log2_approx(total) * (1.0 / LOG2_E)
