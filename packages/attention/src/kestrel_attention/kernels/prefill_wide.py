"""Attention of many queries for heads of more than 256 dims: prefill.py with two warps for each 16 queries.

Each of the two has half of the dims, of queries and of results. It computes its part of the scores, and
they exchange the parts through shared memory; both compute all weights. One buffer each of keys and of values: values
arrive while scores are computed, and the next keys while weights and results are.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kestrel_runtime.cute_dsl import ptx

from .prefill import Prefill
from .prefill_types import Keys, Results, Sums, Work
from .scores import LOG2_E

HALVES = 2


@dataclass(frozen=True)
class PrefillWide(Prefill):
    """One compiled variant. head_dim is that of a warp, half of the dims of a row."""

    @property
    def reads_scales(self) -> bool:
        return self.pdl  # from sm_90 on; elsewhere it spills

    @property
    def block_rows(self) -> int:
        return self.warps // HALVES * self.warp_rows

    @property
    def units(self) -> int:
        return HALVES * self.head_dim // self.unit_dims

    @property
    def row_bytes(self) -> int:
        return HALVES * self.element_bytes * self.head_dim

    @property
    def exchange_bytes(self) -> int:
        """Of a warp's part of the scores."""
        return 4 * self.warp_rows * self.key_tile

    @property
    def query_offset(self) -> int:
        return 0 if self.queries_in_registers else 2 * self.tile_bytes

    @property
    def shared_bytes(self) -> int:
        return max(2 * self.tile_bytes, self.query_offset + self.query_bytes) + self.warps * self.exchange_bytes

    @cute.jit
    def attend(self, tensors, scalars, keys: Keys, work: Work, query: Int64):
        """Attention of one block of rows. query: the address of its first row."""
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        group, half = warp % (self.warps // HALVES), warp // (self.warps // HALVES)
        visible = self.visible_to_warp(scalars, keys, work, group)
        sK = Int32(cute.arch.get_dyn_smem(Float32, alignment=1024).toint())
        sV = sK + self.tile_bytes
        sExchange = sK + (self.shared_bytes - self.warps * self.exchange_bytes)
        of_warp = cutlass.const_expr(self.exchange_bytes)
        sMine = sExchange + warp * of_warp
        sOther = sExchange + (group + (1 - half) * (self.warps // HALVES)) * of_warp
        sExists = Int32(cute.arch.alloc_smem(Uint32, 2 * self.warps + 3, alignment=16).toint())
        sOutput = sExists + 8 * self.warps  # where results go takes no registers in the main loop
        self.keep_output(sOutput, work, tid)
        of_half = half * (2 * self.head_dim)

        rOut = cute.make_rmem_tensor(self.head_dim // 2, Float32)
        rMax = cute.make_rmem_tensor(2, Float32)
        rSum = cute.make_rmem_tensor(2, Float32)
        sums = Sums(rOut, rMax, rSum)
        rScore = cute.make_rmem_tensor(self.key_tile // 2, Float32)
        rQ = cute.make_rmem_tensor(self.head_dim // 4, Uint32)
        rPage = cute.make_rmem_tensor(1, Int32)
        rOut.fill(0.0)
        rMax.fill(-Float32.inf)
        rSum.fill(0.0)

        sQ = sK + self.query_offset
        self.load_queries(tensors.mQ, sQ, query, work.rows, tid)
        ptx.cp_async_commit()
        if cutlass.const_expr(self.queries_in_registers):
            ptx.cp_async_wait(0)
            cute.arch.sync_threads()
            self.read_all_queries(sQ + of_half, rQ, work.query_signs, group, lane)
            cute.arch.sync_threads()  # keys go where queries were
        value = Uint32(0)  # where the lane's value of the next tile is
        if work.num_tiles > 0:
            self.look_up(rPage, keys, self.tile_at(work, Int32(0)), warp, lane)
            value = self.load_keys(sK, sExists, rPage, keys, self.tile_at(work, Int32(0)), warp, lane)
        ptx.cp_async_commit()
        if work.num_tiles > 1:
            self.look_up(rPage, keys, self.tile_at(work, Int32(1)), warp, lane)

        scale = cutlass.select_(scalars.softcap > 0.0, Float32(1.0), work.softmax_scale * LOG2_E)
        n = Int32(0)
        while n < work.num_tiles:
            exists = sExists + n % 2 * (4 * self.warps)
            ptx.cp_async_wait(0)
            cute.arch.sync_threads()  # keys are there, and the values before have been used
            of_values = ptx.load_shared(exists + 4 * warp, 1)[0]
            self.load_rows(keys, sV, keys.value_base, value, of_values, warp, lane)
            ptx.cp_async_commit()
            self.mma_keys(sQ + of_half, sK + of_half, rQ, rScore, work.query_signs, group, lane)
            for i in cutlass.range_constexpr(self.key_tile // 8):
                words = [ptx.float_as_int(rScore[4 * i + k]) for k in range(4)]
                ptx.store_shared(sMine + 16 * (32 * i + lane), words)
            cute.arch.sync_threads()
            if n + 1 < work.num_tiles:
                tile = self.tile_at(work, n + 1)
                value = self.load_keys(sK, sExists + (n + 1) % 2 * (4 * self.warps), rPage, keys, tile, warp, lane)
            ptx.cp_async_commit()
            if n + 2 < work.num_tiles:
                self.look_up(rPage, keys, self.tile_at(work, n + 2), warp, lane)
            for i in cutlass.range_constexpr(self.key_tile // 8):
                words = ptx.load_shared(sOther + 16 * (32 * i + lane), 4)
                for k in cutlass.range_constexpr(4):
                    rScore[4 * i + k] += ptx.int_as_float(Int32(words[k]))
            self.cap(rScore, scalars.softcap, [work.softmax_scale] * 2)
            self.mask(rScore, exists, visible, scalars, self.tile_at(work, n) * self.key_tile, lane)
            self.softmax(rScore, sums, scale)
            ptx.cp_async_wait(1)
            cute.arch.sync_threads()
            self.mma_values(sV + of_half, rScore, rOut, lane)
            n += 1
        ptx.cp_async_wait(0)
        cute.arch.sync_threads()
        results = Results(sums, [scale] * 2, Float32(1.0), self.output_rows(sOutput), work.rows)
        self.store_half(tensors, scalars, results, sK, group, half, lane)

    @cute.jit
    def load_keys(self, sK: Int32, sExists: Int32, rPage, keys: Keys, tile, warp, lane):
        """Start loading a tile's keys; where the lane's value is."""
        found = self.locate(keys, rPage, tile, warp, lane)
        if lane == 0:
            ptx.store_shared(sExists + 4 * warp, [found.exists])
        self.load_rows(keys, sK, keys.key_base, found.key, found.exists, warp, lane)
        return found.value

    @cute.jit
    def load_rows(self, keys: Keys, to: Int32, base: Int64, offset: Uint32, exists: Uint32, warp, lane):
        """Start loading the warp's rows of keys or values; zeros for those that do not exist."""
        lane = ptx.opaque(lane)  # addresses are computed for each tile, and take no registers in between
        to = to + warp * (self.loaded_rows * self.row_bytes)
        for i in cutlass.range_constexpr(self.loaded_rows):
            source = base + Int64(cute.arch.shuffle_sync(offset, i)) * 16
            row = warp * self.loaded_rows + i
            for part in cutlass.range_constexpr(self.units // 32):
                unit = lane + 32 * part
                wanted = (exists & (1 << i)) != 0 and 8 * unit < keys.head_dim
                there = to + i * self.row_bytes + (unit ^ self.swizzle(row)) * 16
                ptx.cp_async(there, source + 16 * unit, 16, cutlass.select_(wanted, Int32(16), Int32(0)))

    @cute.jit
    def store_half(self, tensors, scalars, results: Results, shared: Int32, group, half, lane):
        """Store a warp's half of its rows through shared memory, and the first half's LSE."""
        mOut, at = tensors.mOut, results.at
        shared = shared + (HALVES * group + half) * (self.warp_rows * 2 * self.head_dim)
        sink = self.sink_of(tensors, scalars, at.head)
        v_scale = Float32(1.0)
        if cutlass.const_expr(self.reads_scales):  # here it takes no register in the main loop
            kv_head = at.head // scalars.group_size
            if scalars.v_scale_heads > 0:
                v_scale = tensors.mVScale[cutlass.select_(scalars.v_scale_heads > 1, kv_head, Int32(0))]
        results = results._replace(v_scale=v_scale)
        for r in cutlass.range_constexpr(2):
            row = group * self.warp_rows + lane // 4 + 8 * r
            to_lse = lane % 4 == 0 and row < results.rows and half == 0
            factor = self.finish_row(tensors, scalars, results, r, sink, row, to_lse)
            self.store_row(results.sums.rOut, r, factor, shared, lane)
        cute.arch.sync_warp()
        head = self.output_head(mOut, at)
        for i in cutlass.range_constexpr(self.vectors_of_lane):
            warp_row, unit = self.place_of_vector(i, lane)
            row, dim = group * self.warp_rows + warp_row, half * self.head_dim + 8 * unit
            if row < results.rows and dim < mOut.shape[3]:
                words = self.load_vector(shared, warp_row, unit)
                to = head + Int64(at.first_row + row) * mOut.stride[1] + dim
                ptx.store_global(mOut.iterator.toint() + 2 * to, words)
