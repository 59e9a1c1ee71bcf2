"""The producer of prefill_hopper_wide.py, for thread blocks of 64 queries: two of them share a work.

There is one pipeline stage of keys and one of values, in two parts each: halves of the dims of keys, halves of the keys
that have values. Keys of a tile are loaded before the values of the tile before.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from kestrel_runtime.cute_dsl import hopper, ptx

from . import scores
from .constants import WARPGROUP_ROWS
from .prefill_hopper_early import PrefillHopperEarly
from .prefill_hopper_producer import QUERY_BOX_ROWS, WARPGROUP_BOXES
from .prefill_types import Keys, Pipe, Work

THREAD_BLOCKS = 2  # of a work, at indices in a row
PARTS = 2  # of a stage, which have barriers of their own: those that other kernels have for stages
TURNS = 2  # barriers of full keys are for every second tile, as a warpgroup waits for these alone


@dataclass(frozen=True)
class WideProducer(PrefillHopperEarly):
    """The producer. Keys are loaded by TMA alone."""

    @property
    def block_rows(self) -> int:
        return WARPGROUP_ROWS * THREAD_BLOCKS

    @property
    def shares(self) -> int:
        return THREAD_BLOCKS

    @property
    def buffer_bytes(self) -> int:
        return self.query_bytes

    @property
    def tile_bytes(self) -> int:
        """Of the part of a stage that has a barrier."""
        return self.key_tile * self.stored_row_bytes // self.num_stages

    @property
    def packs(self) -> bool:
        return False

    # -- works and queries ------------------------------------------------------------------------------------------

    @cute.jit
    def enumerated(self, scalars, row_blocks, heads, batch, index):
        return PrefillHopperEarly.enumerated(self, scalars, row_blocks, heads, batch, index // self.shares)

    @cute.jit
    def listed_at(self, tensors, scalars, index):
        return PrefillHopperEarly.listed_at(self, tensors, scalars, index // self.shares)

    @cute.jit
    def listed_count(self, tensors, scalars):
        return PrefillHopperEarly.listed_count(self, tensors, scalars) * self.shares

    @cute.jit
    def of_thread_block(self, scalars, work: Work, index) -> Work:
        """Its 64 rows of a work, and the tiles that they see."""
        row = index % self.shares * WARPGROUP_ROWS
        work = work._replace(
            rows=cutlass.min(work.rows - row, WARPGROUP_ROWS),
            position=work.position + row,
            out_row=work.out_row + row,
            partial=cutlass.select_(work.partial < 0, work.partial, work.partial + row),
        )
        _, last = scores.window(work.position + work.rows - 1, scalars, work.held)
        end = (last + self.key_tile - 1) // self.key_tile - work.gap
        end = cutlass.max(end, work.prefix_tiles) - work.first_tile
        end = cutlass.select_(work.rows > 0, end, Int32(0))
        return work._replace(num_tiles=cutlass.max(cutlass.min(work.num_tiles, end), 0))

    @cute.jit
    def load_query_boxes(self, pipe: Pipe, to: Int32, full: Int32, work: Work, warp, lane):
        if warp == 0 and lane == 0:
            hopper.mbarrier_arrive_expecting(full, Int32(self.buffer_bytes))
        cute.arch.sync_warp()
        if lane < self.row_blocks:
            dim = lane * (self.block_bytes // self.element_bytes)
            box = (dim, work.out_row + 16 * warp, work.head, work.out_block)
            place = to + (lane * WARPGROUP_BOXES + warp) * (QUERY_BOX_ROWS * self.block_bytes)
            hopper.load_box(place, pipe.query_map, box, full)

    # -- keys and values --------------------------------------------------------------------------------------------

    @cute.jit
    def produce_rows(self, pipe: Pipe, keys: Keys, work: Work, kv_head, rPage, loaded, warp, lane):
        """Load the tiles of a work item. rPage holds the page of each lane's key of the first tile."""
        found = self.locate(keys, rPage, self.tile_at(work, Int32(0)), warp, lane)
        box = self.box_of(found, kv_head, lane)
        if work.num_tiles > 0:
            self.load_keys(pipe, loaded, found, box, warp, lane)
        if work.num_tiles > 1:
            self.look_up(rPage, keys, self.tile_at(work, Int32(1)), warp, lane)
        n = Int32(0)
        while n < work.num_tiles:
            following = self.locate(keys, rPage, self.tile_at(work, n + 1), warp, lane)
            next_box = self.box_of(following, kv_head, lane)
            if n + 1 < work.num_tiles:
                self.load_keys(pipe, loaded + n + 1, following, next_box, warp, lane)
            if n + 2 < work.num_tiles:
                self.look_up(rPage, keys, self.tile_at(work, n + 2), warp, lane)
            self.load_values(pipe, loaded + n, keys, found, box, warp, lane)
            found, box = following, next_box
            n += 1

    @cute.jit
    def load_keys(self, pipe: Pipe, at, found, box, warp, lane):
        """Start loading the warp's keys of a tile, part by part."""
        for part in cutlass.range_constexpr(PARTS):
            hopper.mbarrier_wait(pipe.keys_empty + 8 * part, (at & 1) ^ 1)
            if cutlass.const_expr(part == 0) and lane == 0:
                self.store_exists(pipe, at, found.exists, warp)
            each = cutlass.const_expr(self.row_boxes // PARTS)
            full = self.full_keys(pipe, at, part)
            self.load_columns(pipe.key_map, pipe.keys, box, full, part * each, each, warp, lane)

    def full_keys(self, pipe: Pipe, at, part: int):
        """The barrier of a part of the keys of a tile; its phases are those of every second tile."""
        return pipe.keys_full + 8 * (at % TURNS * PARTS + part)

    @cute.jit
    def load_values(self, pipe: Pipe, at, keys: Keys, found, box, warp, lane):
        """Start loading the warp's values of a tile, once the part that they belong to is free."""
        for part in cutlass.range_constexpr(PARTS):
            full = pipe.values_full + 8 * part
            hopper.mbarrier_wait(pipe.values_empty + 8 * part, (at & 1) ^ 1)
            if warp // (self.warps // PARTS) != part:
                if lane == 0:
                    hopper.mbarrier_arrive(full)
            elif self.has_zeros(keys, found.present):
                self.load_columns(pipe.value_map, pipe.values, box, full, 0, self.row_boxes, warp, lane)
            else:  # zeros for keys that do not exist
                self.load_rows(keys, pipe.values, keys.value_base, found.value, found.present, warp, lane)
                ptx.cp_async_commit()
                ptx.cp_async_wait(0)
                hopper.fence_proxy_async()
                cute.arch.sync_warp()
                if lane == 0:
                    hopper.mbarrier_arrive(full)

    @cute.jit
    def load_columns(
        self, tensor_map, stage: Int32, box, full: Int32, first: cutlass.Constexpr, count: cutlass.Constexpr, warp, lane
    ):
        """Start loading some column blocks of the warp's rows."""
        if lane == 0:
            hopper.mbarrier_arrive_expecting(full, Int32(self.loaded_rows * count * self.box_bytes))
        cute.arch.sync_warp()
        to = stage + (lane % self.row_boxes * self.key_tile + warp * self.loaded_rows) * self.box_bytes
        if lane >= first and lane < first + count:
            hopper.load_box(to, tensor_map, box, full)

    @cute.jit
    def load_rows(self, keys: Keys, to: Int32, base, offset, exists, warp, lane):
        """Start loading the warp's rows of a tile; zeros for those that do not exist."""
        lane = ptx.opaque(lane)
        for i in cutlass.range(self.loaded_rows, unroll=1):
            source = base + Int64(cute.arch.shuffle_sync(offset, i)) * 16
            row = warp * self.loaded_rows + i
            for part in cutlass.range_constexpr(self.units // 32):
                unit = lane + 32 * part
                wanted = (exists >> i) & 1 != 0 and 8 * unit < keys.head_dim
                there = to + self.place_of(self.key_tile, row, unit)
                ptx.cp_async(there, source + 16 * unit, 16, cutlass.select_(wanted, Int32(16), Int32(0)))
