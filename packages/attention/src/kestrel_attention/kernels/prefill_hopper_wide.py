"""prefill_hopper.py for heads of more than 256 dims, whose results do not fit the registers of one warpgroup.

Both consumer warpgroups process the same 64 queries. Each multiplies its half of the dims of queries and keys, adds the
other's part of the scores, through shared memory, and multiplies the weights with its half of the values. Two warps of
the producer load keys and two load values, so that the next keys do not wait for values.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kestrel_runtime.cute_dsl import hopper, numeric, ptx

from .prefill_base import Keys, Work, once_if
from .prefill_hopper import PrefillHopper
from .prefill_hopper_producer import WARPGROUP_ROWS, Pipe

ALL_CONSUMERS = 1  # named barriers
PARTS_READ = 2


@dataclass(frozen=True)
class PrefillHopperWide(PrefillHopper):
    """One compiled variant, of two consumer warpgroups. ``warps`` load keys, and as many load values."""

    @property
    def block_rows(self) -> int:
        return WARPGROUP_ROWS

    @property
    def buffer_bytes(self) -> int:
        return self.query_bytes

    @property
    def output_dims(self) -> int:
        return self.head_dim // self.consumers

    @property
    def part_bytes(self) -> int:
        """Of a warpgroup's part of the scores."""
        return 4 * WARPGROUP_ROWS * self.key_tile

    @property
    def shared_bytes(self) -> int:
        return super().shared_bytes + self.consumers * self.part_bytes

    def first_dim(self):
        return (cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) - 1) * self.output_dims

    def first_row(self, warpgroup):
        return Int32(0)

    # -- consumers ------------------------------------------------------------------------------------------------

    @cute.jit
    def place_of_output(self, sQ: Int32, warpgroup) -> Int32:
        hopper.named_barrier(Int32(ALL_CONSUMERS), 256)
        return sQ + warpgroup * (WARPGROUP_ROWS * 2 * self.output_dims)

    @cute.jit
    def flip_signs(self, sQ: Int32, signs: Uint32, warpgroup):
        """Negate the queries where the scale is negative."""
        thread = cute.arch.thread_idx()[0] % 128 + 128 * warpgroup
        for _ in cutlass.range(once_if(signs != 0), unroll=1):
            for i in cutlass.range_constexpr(self.query_bytes // (16 * 256)):
                to = sQ + 16 * (thread + 256 * i)
                ptx.store_shared(to, [word ^ signs for word in ptx.load_shared(to, 4)])
            hopper.fence_proxy_async()
            hopper.named_barrier(Int32(ALL_CONSUMERS), 256)

    @cute.jit
    def start_scores(self, sQ: Int32, sK: Int32, rScore):
        """The part of the warpgroup's dims."""
        kind = cutlass.const_expr(numeric.ptx_name(self.product_type))
        count = cutlass.const_expr(self.key_tile // 2)
        dim = self.first_dim()
        of_queries = hopper.descriptor(sQ + dim * (2 * WARPGROUP_ROWS), self.block_bytes, 0)
        of_keys = hopper.descriptor(sK + dim * (2 * self.key_tile), self.block_bytes, 0)
        steps = cutlass.const_expr(self.block_bytes // 32)
        hopper.wgmma_fence()
        found = None
        for k in cutlass.range_constexpr(self.output_dims // 16):
            a = of_queries + (k // steps * (WARPGROUP_ROWS * self.block_bytes) + k % steps * 32) // 16
            b = of_keys + (k // steps * (self.key_tile * self.block_bytes) + k % steps * 32) // 16
            found = hopper.wgmma(found, count, a, b, kind)
        hopper.wgmma_commit()
        for i in cutlass.range_constexpr(count):
            rScore[i] = found[i]

    @cute.jit
    def complete_scores(self, pipe: Pipe, rScore, warpgroup):
        """Exchange the parts: thread i of both warpgroups holds the same scores."""
        at = pipe.codes + 16 * (cute.arch.thread_idx()[0] % 128)
        mine, other = at + warpgroup * self.part_bytes, at + (1 - warpgroup) * self.part_bytes
        hopper.named_barrier(Int32(PARTS_READ), 256)
        for i in cutlass.range_constexpr(self.key_tile // 8):
            ptx.store_shared(mine + 2048 * i, [Uint32(ptx.float_as_int(rScore[4 * i + e])) for e in range(4)])
        hopper.named_barrier(Int32(ALL_CONSUMERS), 256)
        for i in cutlass.range_constexpr(self.key_tile // 8):
            words = ptx.load_shared(other + 2048 * i, 4)
            for e in cutlass.range_constexpr(4):
                rScore[4 * i + e] += ptx.int_as_float(Int32(words[e]))

    # -- producer -------------------------------------------------------------------------------------------------

    @cute.jit
    def produce_rows(self, pipe: Pipe, keys: Keys, work: Work, kv_head, rPage, loaded, warp, lane):
        """Load the tiles of a work item: keys, or values."""
        if warp < self.warps:
            self.produce_half(False, pipe, keys, work, kv_head, rPage, loaded, warp, lane)
        else:
            self.produce_half(True, pipe, keys, work, kv_head, rPage, loaded, warp - self.warps, lane)

    @cute.jit
    def produce_half(
        self, values: cutlass.Constexpr, pipe: Pipe, keys: Keys, work: Work, kv_head, rPage, loaded, warp, lane
    ):
        base = keys.value_base if cutlass.const_expr(values) else keys.key_base
        n = Int32(0)
        while n < work.num_tiles:
            at = loaded + n
            stage, parity = at % self.num_stages, (at // self.num_stages & 1) ^ 1
            found = self.locate(keys, rPage, self.tile_at(work, n), warp, lane)
            to = (pipe.values if cutlass.const_expr(values) else pipe.keys) + stage * self.tile_bytes
            full = (pipe.values_full if cutlass.const_expr(values) else pipe.keys_full) + 8 * stage
            empty = (pipe.values_empty if cutlass.const_expr(values) else pipe.keys_empty) + 8 * stage
            offset = found.value if cutlass.const_expr(values) else found.key
            hopper.mbarrier_wait(empty, parity)
            if cutlass.const_expr(not values):
                if lane == 0:
                    self.store_exists(pipe, at, found.exists, warp)
            if cutlass.const_expr(self.boxes):
                if cutlass.const_expr(values):
                    if self.has_zeros(keys, found.exists):
                        self.load_boxes(pipe.value_map, to, self.box_of(found, kv_head, lane), full, warp, lane)
                    else:
                        self.load_fenced_rows(keys, to, base, offset, found.exists, full, warp, lane)
                else:
                    self.load_boxes(pipe.key_map, to, self.box_of(found, kv_head, lane), full, warp, lane)
            else:
                if cutlass.const_expr(not values):
                    if lane == 0:
                        hopper.mbarrier_arrive(full)
                self.load_rows(keys, to, base, offset, found.exists, warp, lane)
                hopper.mbarrier_arrive_after_copies(full)
            if n + 1 < work.num_tiles:
                self.look_up(rPage, keys, self.tile_at(work, n + 1), warp, lane)
            n += 1

    @cute.jit
    def load_fenced_rows(self, keys: Keys, to: Int32, base, offset, exists, full: Int32, warp, lane):
        """Load the warp's rows by cp.async, zeros for those that do not exist, and arrive."""
        self.load_rows(keys, to, base, offset, exists, warp, lane)
        ptx.cp_async_commit()
        ptx.cp_async_wait(0)
        hopper.fence_proxy_async()
        cute.arch.sync_warp()
        if lane == 0:
            hopper.mbarrier_arrive(full)

    @cute.jit
    def load_rows(self, keys: Keys, to: Int32, base, offset, exists, warp, lane):
        """Start loading the warp's rows of a tile, half a row at once; zeros for those that do not exist."""
        lane = ptx.opaque(lane)
        to = to + (lane // 8 * self.key_tile + warp * self.loaded_rows) * self.block_bytes
        for i in cutlass.range_constexpr(self.loaded_rows):
            source = base + 16 * lane + Int64(cute.arch.shuffle_sync(offset, i)) * 16
            there = to + i * self.block_bytes + (lane % 8 ^ i % 8) * 16
            for half in cutlass.range_constexpr(self.units // 32):
                wanted = (exists >> Uint32(i)) & 1 != 0 and self.unit_dims * (lane + 32 * half) < keys.head_dim
                valid = cutlass.select_(wanted, Int32(16), Int32(0))
                ptx.cp_async(there + half * (4 * self.key_tile * self.block_bytes), source + 512 * half, 16, valid)
