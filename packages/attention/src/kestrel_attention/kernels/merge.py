"""Merges attention over two sets of keys into attention over both: each row's outputs, weighted by their sums.

T rows of H heads of D. A thread takes one 16-byte vector of both outputs and computes the weights of its head, whose
LSE are in L2. Memory-bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import Float32, Int64

from kestrel_runtime.cute_dsl import arguments, numeric, pdl, ptx

from . import rows

THREADS = 128


@dataclass(frozen=True)
class Merge:
    """One compiled variant."""

    dtype: type[cutlass.Numeric]
    pdl: bool

    def arguments(self) -> tuple[Any, ...]:
        """Arguments to compile with."""
        tokens, heads, head_dim = (cute.sym_int() for _ in range(3))
        unit = numeric.vector_elements(self.dtype)
        outs = [arguments.strided(self.dtype, tokens, heads, head_dim, unit=unit) for _ in range(2)]
        lses = [arguments.any_strides(Float32, heads, tokens) for _ in range(2)]
        out = arguments.contiguous(self.dtype, tokens, heads, head_dim)
        lse = arguments.contiguous(Float32, heads, tokens)
        return outs[0], lses[0], outs[1], lses[1], out, lse, arguments.torch_stream()

    @cute.jit
    def __call__(
        self,
        mOutA: cute.Tensor,
        mLseA: cute.Tensor,
        mOutB: cute.Tensor,
        mLseB: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        stream: cuda.CUstream,
    ):
        vectors = mOut.shape[1] * mOut.shape[2] // numeric.vector_elements(self.dtype)
        self.kernel(mOutA, mLseA, mOutB, mLseB, mOut, mLse).launch(
            grid=[mOut.shape[0], cute.ceil_div(vectors, THREADS), 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(
        self,
        mOutA: cute.Tensor,
        mLseA: cute.Tensor,
        mOutB: cute.Tensor,
        mLseB: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
    ):
        tid, _, _ = cute.arch.thread_idx()
        token, part, _ = cute.arch.block_idx()
        _, heads, head_dim = mOut.shape
        width = cutlass.const_expr(numeric.vector_elements(self.dtype))
        at = (part * THREADS + tid) * width
        head, dim = at // head_dim, at % head_dim
        if head < heads:
            if cutlass.const_expr(self.pdl):
                pdl.wait()
                pdl.trigger()
            a = rows.load(self.address(mOutA, token, head, dim), self.dtype)
            b = rows.load(self.address(mOutB, token, head, dim), self.dtype)
            lse_a, lse_b = mLseA[head, token], mLseB[head, token]
            largest = ptx.fmax(lse_a, lse_b)
            base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
            weight_a, weight_b = cute.math.exp(lse_a - base), cute.math.exp(lse_b - base)
            total = weight_a + weight_b
            share_a, share_b = weight_a / total, weight_b / total
            merged = []
            for i in cutlass.range_constexpr(width):
                from_a = cutlass.select_(weight_a == 0.0, Float32(0.0), share_a * a[i])
                from_b = cutlass.select_(weight_b == 0.0, Float32(0.0), share_b * b[i])
                merged.append(from_a + from_b)
            rows.store(self.address(mOut, token, head, dim), merged, self.dtype)
            if dim == 0:
                mLse[head, token] = cute.math.log(total) + base

    @cute.jit
    def address(self, mX, token, head, dim) -> Int64:
        offset = Int64(token) * mX.stride[0] + Int64(head) * mX.stride[1] + dim
        return mX.iterator.toint() + offset * cutlass.const_expr(numeric.bytes_of(self.dtype))
