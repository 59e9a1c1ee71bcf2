"""Attention of dense queries that see every key, on Hopper, for heads of 72: those of vision encoders.

As prefill_hopper.py, without what other calls need: all works have the same tiles, which one thread copies whole by
TMA. Keys and queries lie in column blocks of 64 and 16 dims, values in two of 64. Results have 72 dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kestrel_runtime.cute_dsl import hopper, numeric, pdl, ptx

from .constants import WARPGROUP_ROWS
from .parameters import PrefillScalars, PrefillTensors
from .prefill_base import divide, once_if
from .prefill_hopper import PrefillHopper
from .prefill_types import Sums
from .scores import LOG2_E

FIRST_DIMS, LAST_DIMS = 64, 16  # of the column blocks of queries and keys
FIRST_BYTES, LAST_BYTES = 2 * FIRST_DIMS, 2 * LAST_DIMS
ALIGNMENT = 1024  # of a stage, for the swizzle


class FullPipe(NamedTuple):
    """Addresses in shared memory: buffers, stages, and their mbarriers; and those of tensor maps."""

    queries: Int32
    keys: Int32
    values: Int32
    queries_full: Int32
    queries_empty: Int32
    keys_full: Int32
    keys_empty: Int32
    values_full: Int32
    values_empty: Int32
    query_maps: list
    key_maps: list
    value_map: Int64


@dataclass(frozen=True)
class PrefillFull(PrefillHopper):
    """One compiled variant."""

    @property
    def output_dims(self) -> int:
        return 72

    @property
    def query_bytes(self) -> int:
        return WARPGROUP_ROWS * (FIRST_BYTES + LAST_BYTES)

    @property
    def key_bytes(self) -> int:
        """Of the keys of a tile."""
        return self.key_tile * (FIRST_BYTES + LAST_BYTES)

    @property
    def key_stage(self) -> int:
        return -(-self.key_bytes // ALIGNMENT) * ALIGNMENT

    @property
    def value_bytes(self) -> int:
        """Of the values of a tile, and of their stage."""
        return self.key_tile * 2 * FIRST_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.query_buffers * self.buffer_bytes + self.num_stages * (self.key_stage + self.value_bytes)

    # -- host -----------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, *given):
        num_tensors = cutlass.const_expr(len(PrefillTensors._fields))
        tensors, scalars = PrefillTensors(*given[:num_tensors]), PrefillScalars(*given[num_tensors:-2])
        row_blocks = cute.ceil_div(scalars.max_queries, self.block_rows)
        count = row_blocks * tensors.mQ.shape[2] * given[-2]
        maps = []
        for mX, rows in ((tensors.mQ, WARPGROUP_ROWS), (tensors.mK, self.key_tile)):
            maps += [self.tensor_map(mX, dims, rows) for dims in (FIRST_DIMS, LAST_DIMS)]
        maps.append(self.tensor_map(tensors.mV, FIRST_DIMS, self.key_tile))
        self.kernel(tensors, scalars, *maps, row_blocks, count).launch(
            grid=[cutlass.min(count, scalars.max_blocks), 1, 1],
            block=[self.threads, 1, 1],
            stream=given[-1],
            min_blocks_per_mp=1,
            smem=self.shared_bytes,
            use_pdl=self.pdl,
        )

    # -- device ---------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        tensors: PrefillTensors,
        scalars: PrefillScalars,
        of_queries: cute.CopyAtom,
        of_last_queries: cute.CopyAtom,
        of_keys: cute.CopyAtom,
        of_last_keys: cute.CopyAtom,
        of_values: cute.CopyAtom,
        row_blocks: Int32,
        count: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        query_maps = [hopper.tensor_map_address(x) for x in (of_queries, of_last_queries)]
        key_maps = [hopper.tensor_map_address(x) for x in (of_keys, of_last_keys)]
        value_map = hopper.tensor_map_address(of_values)
        if tid == 32:
            for tensor_map in (*query_maps, *key_maps, value_map):
                hopper.prefetch_tensor_map(tensor_map)
        pipe = self.lay_out(query_maps, key_maps, value_map)
        if tid == 0:
            self.init_all(pipe)
        cute.arch.sync_threads()
        warpgroup = cute.arch.make_warp_uniform(tid // 128)
        if warpgroup == 0:
            hopper.registers_down(self.producer_registers)
            if tid == 0:
                self.produce_all(tensors, scalars, pipe, row_blocks, first, step, count)
        else:
            hopper.registers_up(self.consumer_registers)
            if cutlass.const_expr(self.pdl):
                pdl.wait()
                pdl.trigger()
            self.consume_all(tensors, scalars, pipe, warpgroup - 1, row_blocks, first, step, count)

    @cute.jit
    def lay_out(self, query_maps, key_maps, value_map) -> FullPipe:
        buffers, stages = cutlass.const_expr((self.query_buffers, self.num_stages))
        shared = Int32(cute.arch.get_dyn_smem(Float32, alignment=ALIGNMENT).toint())
        words = cutlass.const_expr(4 * buffers + 8 * stages)
        barriers = Int32(cute.arch.alloc_smem(Uint32, words, alignment=16).toint())
        shared, barriers = (cute.arch.make_warp_uniform(ptx.opaque(x)) for x in (shared, barriers))
        keys = shared + buffers * self.buffer_bytes
        of_keys = barriers + 16 * buffers
        return FullPipe(
            queries=shared,
            keys=keys,
            values=keys + stages * self.key_stage,
            queries_full=barriers,
            queries_empty=barriers + 8 * buffers,
            keys_full=of_keys,
            keys_empty=of_keys + 8 * stages,
            values_full=of_keys + 16 * stages,
            values_empty=of_keys + 24 * stages,
            query_maps=query_maps,
            key_maps=key_maps,
            value_map=value_map,
        )

    @cute.jit
    def init_all(self, pipe: FullPipe):
        for i in cutlass.range_constexpr(self.query_buffers):
            hopper.mbarrier_init(pipe.queries_full + 8 * i, 1)
            hopper.mbarrier_init(pipe.queries_empty + 8 * i, 4 * self.consumers)
        for i in cutlass.range_constexpr(self.num_stages):
            for full, empty in ((pipe.keys_full, pipe.keys_empty), (pipe.values_full, pipe.values_empty)):
                hopper.mbarrier_init(full + 8 * i, 1)
                hopper.mbarrier_init(empty + 8 * i, 4 * self.consumers)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def coordinates(self, tensors, row_blocks, index):
        """Sequence, head and row block of a work."""
        heads = tensors.mQ.shape[2]
        of_head = divide(index, row_blocks)
        sequence = divide(of_head, heads)
        return sequence, of_head - sequence * heads, index - of_head * row_blocks

    # -- producer -------------------------------------------------------------------------------------------------

    @cute.jit
    def produce_all(self, tensors, scalars, pipe: FullPipe, row_blocks, first, step, count):
        """Load what all works of a thread block need: by one thread."""
        num_tiles = (scalars.max_keys + self.key_tile - 1) // self.key_tile
        index, loaded, works = first, Int32(0), Int32(0)
        sequence, head, row_block = self.coordinates(tensors, row_blocks, index)
        if cutlass.const_expr(self.pdl):
            self.wait_and_trigger(Int64(sequence | head | row_block) | Int64(1))
        while index < count:
            kv_head = head
            if scalars.group_size > 1:
                kv_head = divide(head, scalars.group_size)
            buffer, parity = works % self.query_buffers, (works // self.query_buffers & 1) ^ 1
            full = pipe.queries_full + 8 * buffer
            hopper.mbarrier_wait(pipe.queries_empty + 8 * buffer, parity)
            hopper.mbarrier_arrive_expecting(full, Int32(self.buffer_bytes))
            for i in cutlass.range_constexpr(self.consumers):
                to = pipe.queries + buffer * self.buffer_bytes + i * self.query_bytes
                row = row_block * self.block_rows + i * WARPGROUP_ROWS
                self.load_rows_of(pipe.query_maps, to, WARPGROUP_ROWS, row, head, sequence, full)
            n = Int32(0)
            while n < num_tiles:
                at = loaded + n
                stage, parity = at % self.num_stages, (at // self.num_stages & 1) ^ 1
                full = pipe.keys_full + 8 * stage
                hopper.mbarrier_wait(pipe.keys_empty + 8 * stage, parity)
                hopper.mbarrier_arrive_expecting(full, Int32(self.key_bytes))
                to = pipe.keys + stage * self.key_stage
                self.load_rows_of(pipe.key_maps, to, self.key_tile, n * self.key_tile, kv_head, sequence, full)
                full = pipe.values_full + 8 * stage
                hopper.mbarrier_wait(pipe.values_empty + 8 * stage, parity)
                hopper.mbarrier_arrive_expecting(full, Int32(self.value_bytes))
                to = pipe.values + stage * self.value_bytes
                for i in cutlass.range_constexpr(2):
                    box = (Int32(i * FIRST_DIMS), n * self.key_tile, kv_head, sequence)
                    hopper.load_box(to + i * (self.value_bytes // 2), pipe.value_map, box, full)
                n += 1
            loaded += num_tiles
            works += 1
            index += step
            sequence, head, row_block = self.coordinates(tensors, row_blocks, index)

    @cute.jit
    def load_rows_of(self, maps, to: Int32, rows: cutlass.Constexpr, row, head, sequence, full: Int32):
        """Start loading rows of queries or keys: both of their column blocks."""
        hopper.load_box(to, maps[0], (Int32(0), row, head, sequence), full)
        hopper.load_box(to + rows * FIRST_BYTES, maps[1], (Int32(FIRST_DIMS), row, head, sequence), full)

    # -- consumers ------------------------------------------------------------------------------------------------

    @cute.jit
    def consume_all(self, tensors, scalars, pipe: FullPipe, warpgroup, row_blocks, first, step, count):
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid % 128 // 32)
        sums = Sums(
            rOut=cute.make_rmem_tensor(self.output_dims // 2, Float32),
            rMax=cute.make_rmem_tensor(2, Float32),
            rSum=cute.make_rmem_tensor(2, Float32),
        )
        num_tiles = (scalars.max_keys + self.key_tile - 1) // self.key_tile
        scale = [scalars.softmax_scale * LOG2_E] * 2
        index, used, works = first, Int32(0), Int32(0)
        if warpgroup == self.consumers - 1:
            self.pass_turn(warpgroup)  # the first warpgroup starts
        while index < count:
            buffer = works % self.query_buffers
            sQ = pipe.queries + buffer * self.buffer_bytes + warpgroup * self.query_bytes
            sums.rOut.fill(0.0)
            sums.rMax.fill(-Float32.inf)
            sums.rSum.fill(0.0)
            hopper.mbarrier_wait(pipe.queries_full + 8 * buffer, works // self.query_buffers & 1)
            self.all_tiles(pipe, scalars, num_tiles, sQ, used, scale, sums, warpgroup, lane)
            used += num_tiles
            self.finish_queries(warpgroup)
            sequence, head, row_block = self.coordinates(tensors, row_blocks, index)
            row = row_block * self.block_rows + warpgroup * WARPGROUP_ROWS + 16 * warp
            empty = pipe.queries_empty + 8 * buffer
            self.store(tensors, scalars, sums, scale, sequence, head, row, sQ, empty, warp, lane)
            works += 1
            index += step
        if warpgroup == 0:
            self.take_turn(warpgroup)  # which the last warpgroup has passed on

    @cute.jit
    def all_tiles(self, pipe: FullPipe, scalars, num_tiles, sQ, used, scale, sums: Sums, warpgroup, lane):
        """Add all tiles to sums, as main_loop does."""
        rOut = sums.rOut
        rScore = cute.make_rmem_tensor(self.key_tile // 2, Float32)
        rP = cute.make_rmem_tensor(self.key_tile // 4, Uint32)
        rTile = cute.make_rmem_tensor(2, Float32)
        in_last = scalars.max_keys - (num_tiles - 1) * self.key_tile
        stage, parity = used % self.num_stages, used // self.num_stages & 1
        hopper.mbarrier_wait(pipe.keys_full + 8 * stage, parity)
        self.start_all_scores(sQ, pipe.keys + stage * self.key_stage, rScore)
        hopper.wgmma_wait(0)
        self.order(rScore)
        self.release(pipe.keys_empty, stage, lane)
        for zero in cutlass.range(once_if(num_tiles == 1), unroll=1):
            self.hide_behind(rScore, in_last, lane, zero)
        rTile.fill(2.0 * self.most_of_tile)
        self.move_bases(rScore, sums, rTile, scale)
        self.weigh_by_last_base(rScore, rP, sums, rTile, scale)
        for r in cutlass.range_constexpr(2):
            sums.rSum[r] += rTile[r]
        n = Int32(1)
        while n < num_tiles:
            last_stage, last_parity = stage, parity
            at = used + n
            stage, parity = at % self.num_stages, at // self.num_stages & 1
            hopper.mbarrier_wait(pipe.keys_full + 8 * stage, parity)
            self.take_turn(warpgroup)
            self.start_all_scores(sQ, pipe.keys + stage * self.key_stage, rScore)
            hopper.mbarrier_wait(pipe.values_full + 8 * last_stage, last_parity)
            self.start_all_output(pipe.values + last_stage * self.value_bytes, rP, rOut)
            self.pass_turn(warpgroup)
            hopper.wgmma_wait(1)
            self.order(rScore)
            self.release(pipe.keys_empty, stage, lane)
            for zero in cutlass.range(once_if(n == num_tiles - 1), unroll=1):
                self.hide_behind(rScore, in_last, lane, zero)
            hopper.wgmma_wait(0)
            self.order(rOut)
            self.release(pipe.values_empty, last_stage, lane)
            tries = Int32(0)
            while tries < 2:
                moves = self.weigh_by_last_base(rScore, rP, sums, rTile, scale)
                tries = cutlass.select_(moves, tries + 1, Int32(2))
                for _ in cutlass.range(once_if(tries == 1), unroll=1):
                    self.move_bases(rScore, sums, rTile, scale)
            for r in cutlass.range_constexpr(2):
                sums.rSum[r] += rTile[r]
            n += 1
        hopper.mbarrier_wait(pipe.values_full + 8 * stage, parity)
        self.start_all_output(pipe.values + stage * self.value_bytes, rP, rOut)
        hopper.wgmma_wait(0)
        self.order(rOut)
        self.release(pipe.values_empty, stage, lane)

    @cute.jit
    def hide_behind(self, rScore, count, lane, zero):
        """Set the scores of keys from ``count`` on to -inf. zero: as in hide()."""
        left = count + zero - 2 * (lane % 4)
        for n in cutlass.range_constexpr(self.key_tile // 8):
            for i in cutlass.range_constexpr(4):
                rScore[4 * n + i] = cutlass.select_(left > 8 * n + i % 2, rScore[4 * n + i], -Float32.inf)

    @cute.jit
    def start_all_scores(self, sQ: Int32, sK: Int32, rScore):
        """Start the products of 80 dims of queries and keys."""
        steps = cutlass.const_expr(FIRST_BYTES // 32)
        blocks = (
            (hopper.descriptor(sQ, FIRST_BYTES, 0), hopper.descriptor(sK, FIRST_BYTES, 0)),
            (
                hopper.descriptor(sQ + WARPGROUP_ROWS * FIRST_BYTES, LAST_BYTES, 0),
                hopper.descriptor(sK + self.key_tile * FIRST_BYTES, LAST_BYTES, 0),
            ),
        )
        hopper.wgmma_fence()
        found = None
        for k in cutlass.range_constexpr(steps + 1):
            a, b = blocks[k // steps]
            found = hopper.wgmma(found, self.key_tile // 2, a + 2 * (k % steps), b + 2 * (k % steps), self.product_kind)
        hopper.wgmma_commit()
        for i in cutlass.range_constexpr(self.key_tile // 2):
            rScore[i] = found[i]

    @cute.jit
    def start_all_output(self, sV: Int32, rP, rOut):
        count = cutlass.const_expr(self.output_dims // 2)
        of_values = hopper.descriptor(sV, FIRST_BYTES, self.value_bytes // 2)
        hopper.wgmma_fence()
        found = [rOut[i] for i in range(count)]
        for k in cutlass.range_constexpr(self.key_tile // 16):
            a = [rP[4 * k + i] for i in range(4)]
            found = hopper.wgmma_transposed(found, count, a, of_values + k * FIRST_BYTES, self.product_kind)
        hopper.wgmma_commit()
        for i in cutlass.range_constexpr(count):
            rOut[i] = found[i]

    @cute.jit
    def store(
        self, tensors, scalars, sums: Sums, scale, sequence, head, first_row, sQ: Int32, empty: Int32, warp, lane
    ):
        """Store the LSE and the normalised rows of a warp, through the memory of queries."""
        mOut = tensors.mOut
        kind = cutlass.const_expr(numeric.ptx_name(self.dtype))
        units = cutlass.const_expr(self.output_dims // 8)
        shared = sQ + warp * (16 * 2 * self.output_dims)
        lane = ptx.opaque(lane)  # addresses are computed here, and take no registers in the main loop
        g, t = lane // 4, lane % 4
        totals = [sums.rSum[r] for r in range(2)]
        for distance in cutlass.range_constexpr(1, 3):
            totals = [x + cute.arch.shuffle_sync_bfly(x, distance) for x in totals]
        for r in cutlass.range_constexpr(2):
            factor = cutlass.select_(totals[r] == 0.0, Float32(0.0), ptx.rcp_approx(totals[r]))
            row = g + 8 * r
            to = shared + row * (2 * self.output_dims) + 4 * t
            for n in cutlass.range_constexpr(units):
                at = cutlass.const_expr(4 * n + 2 * r)
                word = ptx.pack_f32x2(sums.rOut[at] * factor, sums.rOut[at + 1] * factor, kind)
                ptx.store_shared(to + 16 * n, [word])
        cute.arch.sync_warp()
        count = cutlass.const_expr(-(-16 * units // 32))
        vectors, places = [], []
        for i in cutlass.range_constexpr(count):
            index = lane + 32 * i
            row, unit = index // units, index % units
            at = shared + row * (2 * self.output_dims) + 16 * unit
            vectors.append(ptx.load_shared(at, 4))
            places.append((row, unit))
        hopper.fence_proxy_async()  # these accesses are ahead of the next copies by TMA
        cute.arch.sync_warp()
        self.release(empty, 0, lane)
        to_head = Int64(sequence) * mOut.stride[0] + Int64(head) * mOut.stride[2]
        rows = scalars.max_queries
        for i in cutlass.range_constexpr(count):
            row, unit = places[i]
            if row < 16 and first_row + row < rows and 8 * unit < mOut.shape[3]:
                there = to_head + Int64(first_row + row) * mOut.stride[1] + 8 * unit
                ptx.store_global(mOut.iterator.toint() + 2 * there, vectors[i])
        for r in cutlass.range_constexpr(2):
            row = first_row + g + 8 * r
            if t == 0 and row < rows:
                base = self.log2_unit(sums.rMax[r], scale[r])
                tensors.mLse[sequence, head, row] = (base + ptx.log2_approx(totals[r])) * (1.0 / LOG2_E)
