"""Attention of many FP8 queries over FP8 keys on Hopper: both matrix products in e4m3 (prefill_hopper.py otherwise).

FP8 products need values whose rows are dims: the producer transposes each tile by ldmatrix and stmatrix, a warp its own
keys. A thread's scores of 16 keys become its operand of the second product without a shuffle: values are transposed
into that order of keys, and into an order of dims in which a thread stores four adjacent results.

Weights are rounded to e4m3, 2^8 times those relative to the largest score so far. wgmma keeps some 14 bits of FP8
sums. So the sums of a tile start from zero, and are added up in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kestrel_runtime.cute_dsl import hopper, ptx

from .prefill_base import once_if
from .prefill_hopper import PrefillHopper
from .prefill_types import Keys, Pipe, Results, Sums, Visible, Work

EVEN_BYTES, ODD_BYTES = 0x6420, 0x7531  # selectors of two words


@dataclass(frozen=True)
class PrefillFp8(PrefillHopper):
    """One compiled variant. The dtype is that of results; a warp loads 32 keys of a tile."""

    staging: int = 2
    """Buffers of values that wait to be transposed."""
    output_parts: int = 1
    """In which the products with values are computed, to hold the sums of one at a time."""
    transposed: bool = False
    """Keys are in order, and tiles of values transposed in memory (prefill_transpose.py)."""

    @property
    def element_bytes(self) -> int:
        return 1

    @property
    def query_type(self) -> type[cutlass.Numeric]:
        return cutlass.Uint8

    @property
    def product_type(self) -> type[cutlass.Numeric]:
        return cutlass.Uint8

    @property
    def product_kind(self) -> str:
        return "e4m3"

    @property
    def code_barriers(self) -> int:
        return self.staging * self.warps if self.boxes and not self.transposed else 0

    @property
    def copied_keys(self) -> bool:
        return not self.boxes

    @property
    def copied_values(self) -> bool:
        return not self.transposed  # by every thread

    @property
    def rescale_slack(self) -> float:
        return 0.0

    @property
    def weight_exponent(self) -> float:
        return 8.0  # e4m3 reaches 448; weights below 2^-18 become 0

    @property
    def shared_bytes(self) -> int:
        tiles = 2 * self.num_stages + (0 if self.transposed else self.staging)
        return self.query_buffers * self.buffer_bytes + tiles * self.tile_bytes

    # -- producer -------------------------------------------------------------------------------------------------

    @cute.jit
    def produce_codes(self, pipe: Pipe, scalars, keys: Keys, work: Work, kv_head, rPage, loaded, warp, lane):
        """Load keys into their stage and values into a staging buffer; transpose values ``staging - 1`` tiles later."""
        if cutlass.const_expr(self.transposed):
            self.produce_transposed(pipe, keys, work, kv_head, rPage, loaded, warp, lane)
        else:
            self.produce_and_transpose(pipe, keys, work, kv_head, rPage, loaded, warp, lane)

    @cute.jit
    def produce_transposed(self, pipe: Pipe, keys: Keys, work: Work, kv_head, rPage, loaded, warp, lane):
        """Load keys and transposed values by TMA; a warp loads 32 dims of a tile of values."""
        n = Int32(0)
        while n < work.num_tiles:
            at = loaded + n
            stage, parity = at % self.num_stages, (at // self.num_stages & 1) ^ 1
            tile = self.tile_at(work, n)
            found = self.locate(keys, rPage, tile, warp, lane)
            hopper.mbarrier_wait(pipe.keys_empty + 8 * stage, parity)
            if lane == 0:
                self.store_exists(pipe, at, found.exists, warp)
            box = self.box_of(found, kv_head, lane)
            to_keys = pipe.keys + stage * self.tile_bytes
            self.load_boxes(pipe.key_map, to_keys, box, pipe.keys_full + 8 * stage, warp, lane)
            hopper.mbarrier_wait(pipe.values_empty + 8 * stage, parity)
            row = tile * self.head_dim + warp * self.loaded_rows + lane * self.box_rows
            to_values = pipe.values + stage * self.tile_bytes
            box = (Int32(0), row, kv_head, keys.block)
            self.load_boxes(pipe.value_map, to_values, box, pipe.values_full + 8 * stage, warp, lane)
            if n + 1 < work.num_tiles:
                self.look_up(rPage, keys, self.tile_at(work, n + 1), warp, lane)
            n += 1

    @cute.jit
    def produce_and_transpose(self, pipe: Pipe, keys: Keys, work: Work, kv_head, rPage, loaded, warp, lane):
        behind = cutlass.const_expr(self.staging - 1)
        n = Int32(0)
        while n < work.num_tiles:
            at = loaded + n
            stage, parity = at % self.num_stages, (at // self.num_stages & 1) ^ 1
            found = self.locate(keys, rPage, self.tile_at(work, n), warp, lane)
            hopper.mbarrier_wait(pipe.keys_empty + 8 * stage, parity)
            to_keys = pipe.keys + stage * self.tile_bytes
            if cutlass.const_expr(self.boxes):
                if lane == 0:
                    self.store_exists(pipe, at, found.exists, warp)
                box = self.box_of(found, kv_head, lane)
                self.load_boxes(pipe.key_map, to_keys, box, pipe.keys_full + 8 * stage, warp, lane)
                to_values = pipe.codes + at % self.staging * self.tile_bytes
                self.load_boxes(pipe.value_map, to_values, box, self.staging_full(pipe, at, warp), warp, lane)
            else:
                self.publish_exists(pipe, at, stage, found.exists, warp, lane)
                self.load_rows(keys, to_keys, keys.key_base, found.key, found.exists, warp, lane)
                hopper.mbarrier_arrive_after_copies(pipe.keys_full + 8 * stage)
                to_values = pipe.codes + at % self.staging * self.tile_bytes
                self.load_rows(keys, to_values, keys.value_base, found.value, found.exists, warp, lane)
                ptx.cp_async_commit()
            if n + 1 < work.num_tiles:
                self.look_up(rPage, keys, self.tile_at(work, n + 1), warp, lane)
            if n >= behind:
                if cutlass.const_expr(not self.boxes):
                    ptx.cp_async_wait(behind)
                self.transpose(pipe, at - behind, warp, lane)
            n += 1
        if cutlass.const_expr(not self.boxes):
            ptx.cp_async_wait(0)
        n = cutlass.max(work.num_tiles - behind, 0)
        while n < work.num_tiles:
            self.transpose(pipe, loaded + n, warp, lane)
            n += 1

    def staging_full(self, pipe: Pipe, at, warp):
        """The barrier of a warp's boxes of values of tile ``at``."""
        return pipe.codes_full + 8 * (at % self.staging * self.warps + warp)

    def place_of_values(self, pipe: Pipe, at, warp, lane):
        """Where the values of a lane's key of tile ``at`` wait to be transposed."""
        place = self.place_of(self.key_tile, warp * self.loaded_rows + lane, 0)
        return pipe.codes + at % self.staging * self.tile_bytes + place

    @cute.jit
    def clear_values(self, pipe: Pipe, at, warp, lane):
        """Zeros for values of tile ``at`` whose keys do not exist; a lane stores those of its key."""
        word = pipe.exists + 4 * (at % (2 * self.num_stages) * self.warps + warp)
        exists = ptx.load_shared(word, 1)[0]
        if exists != self.all_rows:
            source = self.place_of_values(pipe, at, warp, lane)
            if (exists >> Uint32(lane)) & 1 == 0:
                for c in cutlass.range_constexpr(self.units):
                    ptx.store_shared(source ^ (16 * c), [Uint32(0)] * 4)
            cute.arch.sync_warp()

    @cute.jit
    def transpose(self, pipe: Pipe, at, warp, lane):
        """Transpose the warp's values of tile ``at`` into their stage: 32 keys of each dim.

        Dim 16 c + 2 i + e becomes row 16 c + 8 e + i. Of 16 keys, pairs come in the order 0, 4, 1, 5, 2, 6, 3, 7.
        """
        stage, parity = at % self.num_stages, (at // self.num_stages & 1) ^ 1
        if cutlass.const_expr(self.boxes):
            hopper.mbarrier_wait(self.staging_full(pipe, at, warp), at // self.staging & 1)
            self.clear_values(pipe, at, warp, lane)
        else:
            cute.arch.sync_warp()  # for the copies of other lanes
        hopper.mbarrier_wait(pipe.values_empty + 8 * stage, parity)
        lane = ptx.opaque(lane)
        source = self.place_of_values(pipe, at, warp, lane)
        self.transpose_rows(source, pipe.values + stage * self.tile_bytes, warp, lane)
        hopper.fence_proxy_async()
        hopper.mbarrier_arrive(pipe.values_full + 8 * stage)

    @cute.jit
    def transpose_rows(self, source: Int32, tile: Int32, warp, lane):
        """Transpose the warp's values. source: those of a lane's key; tile: of transposed values."""
        row = lane % 16
        swizzled = (2 * warp + lane // 16) ^ hopper.swizzle(self.key_tile, row)
        to = tile + row * self.key_tile + 16 * swizzled
        for c in cutlass.range_constexpr(self.units):
            pairs = ptx.ldmatrix_x4_trans(source ^ (16 * c))
            words = []
            for group in cutlass.range_constexpr(2):
                for selector in (EVEN_BYTES, ODD_BYTES):
                    words.append(ptx.prmt(pairs[2 * group], pairs[2 * group + 1], selector))
            ptx.stmatrix_x4(to + c * (16 * self.key_tile), words)

    # -- consumers ------------------------------------------------------------------------------------------------

    @cute.jit
    def flip_signs(self, sQ: Int32, signs: Uint32, warpgroup):
        """Negate the queries of a warpgroup where the scale is negative; NaN where it is."""
        thread = cute.arch.thread_idx()[0] % 128
        for _ in cutlass.range(once_if(signs != 0), unroll=1):
            for i in cutlass.range_constexpr(self.query_bytes // (16 * 128)):
                to = sQ + 16 * (thread + 128 * i)
                words = ptx.load_shared(to, 4)
                nan, flips = Uint32(0x7F7F7F7F), Uint32(0x80808080)
                ptx.store_shared(to, [cutlass.select_(signs & 1 != 0, x | nan, x ^ flips) for x in words])
            hopper.fence_proxy_async()
            hopper.named_barrier(1 + warpgroup, 128)

    @cute.jit
    def main_loop(self, pipe: Pipe, scalars, work: Work, visible: Visible, sQ, used, scale, sums: Sums, lane):
        """Add the tiles of a work item to sums: S of tile n is computed together with P V of tile n - 1.

        The last part of P V is computed beside the exponentials, those before it beside the largest score.
        """
        parts = cutlass.const_expr(self.output_parts)
        rScore = cute.make_rmem_tensor(self.key_tile // 2, Float32)
        rP = cute.make_rmem_tensor(self.key_tile // 8, Uint32)
        rTile = cute.make_rmem_tensor(self.head_dim // 2 // parts, Float32)
        rFactor = cute.make_rmem_tensor(2, Float32)
        rLast = cute.make_rmem_tensor(2, Float32)  # the factor of the tile before
        stage, parity = used % self.num_stages, used // self.num_stages & 1
        hopper.mbarrier_wait(pipe.keys_full + 8 * stage, parity)
        self.fence_keys()
        self.start_scores(sQ, pipe.keys + stage * self.tile_bytes, rScore)
        hopper.wgmma_wait(0)
        self.order(rScore)
        self.release(pipe.keys_empty, stage, lane)
        tile = self.tile_at(work, Int32(0))
        self.softmax(pipe, scalars, visible, work, rScore, sums, rLast, scale, tile, used, lane)
        self.pack(rScore, rP)
        n = Int32(1)
        while n < work.num_tiles:
            last_stage, last_parity = stage, parity
            at = used + n
            stage, parity = at % self.num_stages, at // self.num_stages & 1
            hopper.mbarrier_wait(pipe.keys_full + 8 * stage, parity)
            self.fence_keys()
            self.start_scores(sQ, pipe.keys + stage * self.tile_bytes, rScore)
            hopper.mbarrier_wait(pipe.values_full + 8 * last_stage, last_parity)
            sV = pipe.values + last_stage * self.tile_bytes
            self.start_part(0, sV, rP, rTile)
            hopper.wgmma_wait(1)
            self.order(rScore)
            self.release(pipe.keys_empty, stage, lane)
            tile = self.tile_at(work, n)
            self.rebase(pipe, scalars, visible, work, rScore, sums, rFactor, scale, tile, at, lane)
            for part in cutlass.range_constexpr(parts - 1):
                hopper.wgmma_wait(0)
                self.add_part(part, rTile, rLast, sums.rOut)
                self.start_part(part + 1, sV, rP, rTile)
            for _ in cutlass.range(ptx.opaque(Int32(1)), unroll=1):  # keeps the exponentials ahead of the wait
                self.weigh(rScore, sums, rFactor, scale)
            hopper.wgmma_wait(0)
            self.add_part(parts - 1, rTile, rLast, sums.rOut)
            self.release(pipe.values_empty, last_stage, lane)
            for r in cutlass.range_constexpr(2):
                rLast[r] = rFactor[r]
            self.pack(rScore, rP)
            n += 1
        hopper.mbarrier_wait(pipe.values_full + 8 * stage, parity)
        for part in cutlass.range_constexpr(parts):
            self.start_part(part, pipe.values + stage * self.tile_bytes, rP, rTile)
            hopper.wgmma_wait(0)
            self.add_part(part, rTile, rLast, sums.rOut)
        self.release(pipe.values_empty, stage, lane)

    @cute.jit
    def fence_keys(self):
        """Make the producer's copies of keys visible to wgmma where they are not by TMA."""
        if cutlass.const_expr(not self.boxes):
            hopper.fence_proxy_async()

    @cute.jit
    def start_scores(self, sQ: Int32, sK: Int32, rScore):
        of_queries = hopper.descriptor(sQ, self.block_bytes, 0)
        of_keys = hopper.descriptor(sK, self.block_bytes, 0)
        hopper.wgmma_fence()
        found = self.multiply_keys(None, of_queries, of_keys, range(self.row_bytes // 32))
        hopper.wgmma_commit()
        for i in cutlass.range_constexpr(self.key_tile // 2):
            rScore[i] = found[i]

    @cute.jit
    def start_part(self, part: cutlass.Constexpr, sV: Int32, rP, rTile):
        """Start the products of the weights with a part of the dims."""
        count = cutlass.const_expr(self.head_dim // 2 // self.output_parts)
        of_values = hopper.descriptor(sV + part * (2 * count * self.key_tile), self.key_tile, 0)
        hopper.wgmma_fence()
        found = None
        for k in cutlass.range_constexpr(self.key_tile // 32):
            a = [rP[4 * k + i] for i in range(4)]
            found = hopper.wgmma(found, count, a, of_values + 2 * k, self.product_kind)
        hopper.wgmma_commit()
        for i in cutlass.range_constexpr(count):
            rTile[i] = found[i]

    @cute.jit
    def add_part(self, part: cutlass.Constexpr, rTile, rFactor, rOut):
        """Rescale a part of the results by the factor of their tile, and add the tile's."""
        self.order(rTile)
        count = cutlass.const_expr(self.head_dim // 2 // self.output_parts)
        for i in cutlass.range_constexpr(count):
            to = cutlass.const_expr(part * count + i)
            rOut[to] = ptx.fma(rOut[to], rFactor[i // 2 % 2], rTile[i])

    @cute.jit
    def pack(self, rScore, rP):
        for k in cutlass.range_constexpr(self.key_tile // 16):
            for r in cutlass.range_constexpr(2):
                i = cutlass.const_expr(8 * k + 2 * r)
                rP[2 * k + r] = ptx.pack_e4m3x4(rScore[i], rScore[i + 1], rScore[i + 4], rScore[i + 5])

    # -- epilogue -------------------------------------------------------------------------------------------------

    @cute.jit
    def four_dims(self, rOut, c: cutlass.Constexpr, r: cutlass.Constexpr, factor):
        """Results of dims 16 c + 4 t and the three behind it."""
        return [rOut[8 * c + 2 * r + i] * factor for i in (0, 4, 1, 5)]

    @cute.jit
    def store_partial_row(self, to: Int64, rOut, r: cutlass.Constexpr, factor, head_dim, t):
        for c in cutlass.range_constexpr(self.head_dim // 16):
            if 16 * c < head_dim:
                words = [ptx.float_as_int(x) for x in self.four_dims(rOut, c, r, factor)]
                ptx.store_global(to + 16 * t + 64 * c, words)

    @cute.jit
    def finish(self, tensors, scalars, results: Results, sQ: Int32, empty: Int32, warp, lane):
        """Release the queries; store the LSE and the normalised rows, four dims per lane."""
        hopper.fence_proxy_async()
        cute.arch.sync_warp()
        self.release(empty, 0, lane)
        mOut, at = tensors.mOut, results.at
        g, t = lane // 4, lane % 4
        sink = self.sink_of(tensors, scalars, at.head)
        for r in cutlass.range_constexpr(2):
            row = 16 * warp + g + 8 * r
            to_lse = t == 0 and row < results.rows
            factor = self.finish_row(tensors, scalars, results, r, sink, row, to_lse)
            to = Int64(at.block) * mOut.stride[0] + Int64(at.first_row + row) * mOut.stride[1]
            to = mOut.iterator.toint() + 2 * (to + Int64(at.head) * mOut.stride[2]) + 8 * t
            if row < results.rows:
                for c in cutlass.range_constexpr(self.head_dim // 16):
                    if 16 * c < mOut.shape[3]:
                        four = self.four_dims(results.sums.rOut, c, r, factor)
                        words = [ptx.pack_f32x2(four[2 * i], four[2 * i + 1], "bf16") for i in range(2)]
                        ptx.store_global(to + 32 * c, words)
