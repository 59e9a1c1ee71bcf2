"""Scales the query and value heads of packed QKV rows by tanh of a linear plus a table entry, in place.

T tokens of H + Hk heads of D. A thread takes one 16-byte vector. The longest dependency of a block is position -> table
entry, so the position is loaded first; before the PDL wait, position and vector are prefetched into L2. Memory-bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kestrel_runtime.cute_dsl import arguments, numeric, parameters, pdl, ptx

from . import rows
from .parameters import TauTailScalars, TauTailTensors

THREADS = 128


@dataclass(frozen=True)
class TauTail:
    """One compiled variant."""

    dtype: type[cutlass.Numeric]
    table: type[cutlass.Numeric]
    pdl: bool

    def arguments(self) -> tuple[Any, ...]:
        """Arguments to compile with."""
        tokens, scaled_heads = cute.sym_int(), cute.sym_int()
        tensors = TauTailTensors(
            mQkv=arguments.strided(self.dtype, tokens, cute.sym_int(), unit=numeric.vector_elements(self.dtype)),
            mLinear=arguments.strided(self.dtype, tokens, scaled_heads),
            mTable=arguments.strided(self.table, cute.sym_int(), cute.sym_int()),
            mPositions=arguments.any_strides(Int32, cute.sym_int()),
        )
        return (*tensors, *parameters.compile_time(TauTailScalars), arguments.torch_stream())

    @cute.jit
    def __call__(self, *given):
        num_tensors = cutlass.const_expr(len(TauTailTensors._fields))
        tensors, scalars = TauTailTensors(*given[:num_tensors]), TauTailScalars(*given[num_tensors:-1])
        vectors = tensors.mLinear.shape[1] * scalars.head_dim // numeric.vector_elements(self.dtype)
        self.kernel(tensors, scalars).launch(
            grid=[tensors.mQkv.shape[0], cute.ceil_div(vectors, THREADS), 1],
            block=[THREADS, 1, 1],
            stream=given[-1],
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, tensors: TauTailTensors, scalars: TauTailScalars):
        mQkv, mLinear, mTable, mPositions = tensors
        wide, num_heads, head_dim = scalars.wide_positions, scalars.num_heads, scalars.head_dim
        tid, _, _ = cute.arch.thread_idx()
        token, part, _ = cute.arch.block_idx()
        scaled_heads = mLinear.shape[1]  # of q and of v
        width = cutlass.const_expr(numeric.vector_elements(self.dtype))
        vector = part * THREADS + tid
        head = (vector * width) // head_dim  # without the K heads
        if head < scaled_heads:
            k_heads = cutlass.select_(head < num_heads, Int32(0), scaled_heads - num_heads)  # before this head
            start = vector * width + k_heads * head_dim
            element = cutlass.const_expr(numeric.bytes_of(self.dtype))
            address = mQkv.iterator.toint() + (Int64(token) * mQkv.stride[0] + start) * element
            position_address = mPositions.iterator.toint() + 4 * Int64(token) * (1 + wide) * mPositions.stride[0]
            if cutlass.const_expr(self.pdl):
                ptx.prefetch_l2(position_address)
                ptx.prefetch_l2(address)
                pdl.wait()
                pdl.trigger()
            position = Int32(ptx.load_global(position_address, 1)[0])
            high = position >> 31
            if wide != 0:
                high = Int32(ptx.load_global(position_address + 4, 1)[0])
            values = rows.load(address, self.dtype)
            linear = Float32(mLinear[token, head])
            if high == 0 and position >= 0 and position < mTable.shape[0]:
                entry = cutlass.select_(mTable.shape[1] == scaled_heads or head < num_heads, head, head - num_heads)
                scale = cute.math.tanh(linear) + Float32(mTable[position, entry])
                rows.store(address, [value * scale for value in values], self.dtype)
