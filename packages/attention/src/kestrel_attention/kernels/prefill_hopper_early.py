"""prefill_hopper.py with one buffer of queries, which is free behind their last scores.

The queries of the next work are loaded during the last products and the epilogue, which stores results from registers:
the four lanes of a row exchange words, so that each has 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kestrel_runtime.cute_dsl import numeric, ptx

from .prefill_hopper import PrefillHopper
from .prefill_types import Results


@dataclass(frozen=True)
class PrefillHopperEarly(PrefillHopper):
    """One compiled variant."""

    early_queries: bool = True

    @property
    def skips_first(self) -> bool:
        return self.skips

    @cute.jit
    def finish(self, tensors, scalars, results: Results, sQ: Int32, empty: Int32, warp, lane):
        """Store the LSE and the normalised rows of a warp."""
        mOut, rOut, at = tensors.mOut, results.sums.rOut, results.at
        kind = cutlass.const_expr(numeric.ptx_name(self.dtype))
        lane = ptx.opaque(lane)  # addresses are computed here, and take no registers in the main loop
        found = self.totals_of_rows(tensors, scalars, results)
        head = self.output_head(mOut, at)
        dim = self.first_dim() + 8 * (lane % 4)
        for r in cutlass.range_constexpr(2):
            base, total, share = found[r]
            factor = self.factor_of(results, total, share)
            row = warp * self.warp_rows + lane // 4 + 8 * r
            to = mOut.iterator.toint() + 2 * (head + Int64(at.first_row + row) * mOut.stride[1] + dim)
            for q in cutlass.range_constexpr(self.output_dims // 32):
                words = []
                for j in cutlass.range_constexpr(4):
                    i = cutlass.const_expr(4 * (4 * q + j) + 2 * r)
                    words.append(ptx.pack_f32x2(rOut[i] * factor, rOut[i + 1] * factor, kind))
                words = self.exchange_words(words, lane)
                if row < results.rows and dim + 32 * q < mOut.shape[3]:
                    ptx.store_global(to + 64 * q, words)
            to_lse = lane % 4 == 0 and row < results.rows
            self.store_lse(tensors, at, at.first_row + row, base, total, to_lse)

    def exchange_words(self, words, lane):
        """Word t of each of four lanes, in lane t of them: two steps, of neighbours and of pairs of lanes."""
        for step in range(2):
            second = (lane >> step) & 1 != 0
            exchanged = list(words)
            for first in (i for i in range(4) if not i >> step & 1):
                low, high = words[first], words[first + (1 << step)]
                kept, sent = cutlass.select_(second, high, low), cutlass.select_(second, low, high)
                got = cute.arch.shuffle_sync_bfly(sent, 1 << step)
                exchanged[first] = cutlass.select_(second, got, kept)
                exchanged[first + (1 << step)] = cutlass.select_(second, kept, got)
            words = exchanged
        return words
