"""Attention of dense queries that see every key, on Hopper, for heads of 72 and 80: those of vision encoders.

As prefill_hopper.py, without what other calls need: all works have the same tiles, which one thread copies whole by
TMA. Keys and queries lie in column blocks of 64 and 16 dims, values in two of 64. TMA stores results, too. The first
tile of a work ends with the keys that do not fill one; TMA writes zeros ahead of them. So no later tile is masked. The
scores of the first tile are computed together with the last products of the work before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import dsl_user_op

from kestrel_runtime.cute_dsl import hopper, numeric, ptx

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
    out_map: Int64


@dsl_user_op
def bulk_store(tensor_map: Int64, coordinates, source: Int32, *, loc=None, ip=None) -> None:
    """Start copying a box of four dimensions from shared memory, in a group of its own."""
    text = (
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [$0, {$1, $2, $3, $4}], [$5]; "
        "cp.async.bulk.commit_group;"
    )
    operands = [Int64(tensor_map), *(Int32(c) for c in coordinates), Int32(source)]
    ptx.assemble(text, "l,r,r,r,r,r,~{memory}", operands, [], True, loc, ip)


@dsl_user_op
def bulk_wait_read(*, loc=None, ip=None) -> None:
    """Wait until this thread's bulk stores have read shared memory."""
    ptx.assemble("cp.async.bulk.wait_group.read 0;", "~{memory}", [], [], True, loc, ip)


@dsl_user_op
def bulk_wait(*, loc=None, ip=None) -> None:
    """Wait until this thread's bulk stores are complete."""
    ptx.assemble("cp.async.bulk.wait_group 0;", "~{memory}", [], [], True, loc, ip)


@dataclass(frozen=True)
class PrefillFull(PrefillHopper):
    """One compiled variant."""

    value_dims: int = 72
    """Of the results."""
    first_tile: int = 96
    """Keys of the first tile of a work, at most; others have key_tile."""

    @property
    def output_dims(self) -> int:
        return self.value_dims

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
        maps.append(self.out_map(tensors.mOut))
        self.kernel(tensors, scalars, *maps, row_blocks, count).launch(
            grid=[cutlass.min(count, scalars.max_blocks), 1, 1],
            block=[self.threads, 1, 1],
            stream=given[-1],
            min_blocks_per_mp=1,
            smem=self.shared_bytes,
            use_pdl=self.pdl,
        )

    @cute.jit
    def out_map(self, mOut):
        """The tensor map of results, for boxes of the rows of a warp."""
        modes = cutlass.const_expr((1, 2, 0))
        shape = [mOut.shape[3], *(mOut.shape[i] for i in modes)]
        strides = [cutlass.select_(mOut.shape[i] > 1, mOut.stride[i], Int64(8)) for i in modes]
        box = cutlass.const_expr((self.output_dims, 16, 1, 1))
        plain = cute.make_layout(box, stride=(1, self.output_dims, 16 * self.output_dims, 16 * self.output_dims))
        tensor = cute.make_tensor(mOut.iterator, cute.make_layout(tuple(shape), stride=(1, *strides)))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, plain, box)[0]

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
        of_results: cute.CopyAtom,
        row_blocks: Int32,
        count: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        query_maps = [hopper.tensor_map_address(x) for x in (of_queries, of_last_queries)]
        key_maps = [hopper.tensor_map_address(x) for x in (of_keys, of_last_keys)]
        value_map = hopper.tensor_map_address(of_values)
        out_map = hopper.tensor_map_address(of_results)
        if tid == 32:
            for tensor_map in (*query_maps, *key_maps, value_map):
                hopper.prefetch_tensor_map(tensor_map)
        pipe = self.lay_out(query_maps, key_maps, value_map, out_map)
        if tid == 0:
            self.init_all(pipe)
        self.run_roles(tensors, scalars, pipe, row_blocks, first, step, count)

    @cute.jit
    def lay_out(self, query_maps, key_maps, value_map, out_map) -> FullPipe:
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
            out_map=out_map,
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
    def produce(self, tensors, scalars, pipe: FullPipe, *works):
        if cute.arch.thread_idx()[0] == 0:
            self.produce_all(tensors, scalars, pipe, *works)

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
            n, key = Int32(0), scalars.max_keys - num_tiles * self.key_tile  # of the first tile some are below 0
            while n < num_tiles:
                at = loaded + n
                stage, parity = at % self.num_stages, (at // self.num_stages & 1) ^ 1
                full = pipe.keys_full + 8 * stage
                hopper.mbarrier_wait(pipe.keys_empty + 8 * stage, parity)
                hopper.mbarrier_arrive_expecting(full, Int32(self.key_bytes))
                to = pipe.keys + stage * self.key_stage
                self.load_rows_of(pipe.key_maps, to, self.key_tile, key, kv_head, sequence, full)
                full = pipe.values_full + 8 * stage
                hopper.mbarrier_wait(pipe.values_empty + 8 * stage, parity)
                hopper.mbarrier_arrive_expecting(full, Int32(self.value_bytes))
                to = pipe.values + stage * self.value_bytes
                for i in cutlass.range_constexpr(2):
                    box = (Int32(i * FIRST_DIMS), key, kv_head, sequence)
                    hopper.load_box(to + i * (self.value_bytes // 2), pipe.value_map, box, full)
                key += self.key_tile
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
    def consume(self, tensors, scalars, pipe: FullPipe, warpgroup, row_blocks, first, step, count):
        """The works of a thread block. As in main_loop, but that a work's first scores start with the work before."""
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid % 128 // 32)
        sums = Sums(
            rOut=cute.make_rmem_tensor(self.output_dims // 2, Float32),
            rMax=cute.make_rmem_tensor(2, Float32),
            rSum=cute.make_rmem_tensor(2, Float32),
        )
        rOut = sums.rOut
        rFirst = cute.make_rmem_tensor(self.first_tile // 2, Float32)
        rScore = cute.make_rmem_tensor(self.key_tile // 2, Float32)
        rP = cute.make_rmem_tensor(self.key_tile // 4, Uint32)
        rTile = cute.make_rmem_tensor(2, Float32)
        num_tiles = (scalars.max_keys + self.key_tile - 1) // self.key_tile
        hidden = self.first_tile + (num_tiles - 1) * self.key_tile - scalars.max_keys
        scale = [scalars.softmax_scale * LOG2_E] * 2
        index, used, works = first, Int32(0), Int32(0)
        if warpgroup == self.consumers - 1:
            self.pass_turn(warpgroup)  # the first warpgroup starts
        sQ = pipe.queries + warpgroup * self.query_bytes
        hopper.mbarrier_wait(pipe.queries_full, Int32(0))
        hopper.mbarrier_wait(pipe.keys_full, Int32(0))
        self.start_all_scores(sQ, pipe.keys, rFirst)
        hopper.wgmma_wait(0)
        self.order(rFirst)
        self.release(pipe.keys_empty, Int32(0), lane)
        while index < count:
            buffer, next_buffer = works % self.query_buffers, (works + 1) % self.query_buffers
            sQ = pipe.queries + buffer * self.buffer_bytes + warpgroup * self.query_bytes
            self.start_sums(rFirst, rP, sums, rTile, scale, hidden, lane)
            if works > 0 and lane == 0:  # the results of the work before have left its buffer
                bulk_wait_read()
                hopper.mbarrier_arrive(pipe.queries_empty + 8 * next_buffer)
            stage, parity = used % self.num_stages, used // self.num_stages & 1
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
                hopper.wgmma_wait(0)
                self.order(rOut)
                self.release(pipe.values_empty, last_stage, lane)
                self.weigh_lazily(rScore, rP, sums, rTile, scale)
                n += 1
            used += num_tiles
            works += 1
            next_stage, next_parity = used % self.num_stages, used // self.num_stages & 1
            more = index + step < count
            if more:
                hopper.mbarrier_wait(pipe.queries_full + 8 * next_buffer, works // self.query_buffers & 1)
                hopper.mbarrier_wait(pipe.keys_full + 8 * next_stage, next_parity)
            self.take_turn(warpgroup)
            next_sQ = pipe.queries + next_buffer * self.buffer_bytes + warpgroup * self.query_bytes
            # Without another work these are scores of anything, which nothing reads.
            self.start_all_scores(next_sQ, pipe.keys + next_stage * self.key_stage, rFirst)
            hopper.mbarrier_wait(pipe.values_full + 8 * stage, parity)
            self.start_all_output(pipe.values + stage * self.value_bytes, rP, rOut)
            self.pass_turn(warpgroup)
            hopper.wgmma_wait(0)
            self.order(rFirst)
            self.order(rOut)
            self.release(pipe.values_empty, stage, lane)
            if more:
                self.release(pipe.keys_empty, next_stage, lane)
            self.finish_queries(warpgroup)
            sequence, head, row_block = self.coordinates(tensors, row_blocks, index)
            row = row_block * self.block_rows + warpgroup * WARPGROUP_ROWS + 16 * warp
            self.store(tensors, scalars, pipe, sums, scale, sequence, head, row, sQ, warp, lane)
            index += step
        if lane == 0:
            bulk_wait()
        if warpgroup == 0:
            self.take_turn(warpgroup)  # which the last warpgroup has passed on

    @cute.jit
    def start_sums(self, rFirst, rP, sums: Sums, rTile, scale, hidden, lane):
        """The weights of a work's first tile, of which ``hidden`` keys do not exist, and sums without its products."""
        for zero in cutlass.range(once_if(hidden > 0), unroll=1):
            self.hide_ahead(rFirst, hidden, lane, zero)
        rTile.fill(0.0)
        sums.rMax.fill(-Float32.inf)
        self.move_bases(rFirst, sums, rTile, scale)
        self.weigh_by_last_base(rFirst, rP, sums, rTile, scale)
        sums.rOut.fill(0.0)
        for r in cutlass.range_constexpr(2):
            sums.rSum[r] = rTile[r]
        for i in cutlass.range_constexpr((self.key_tile - self.first_tile) // 4):
            rP[i] = Uint32(0)

    @cute.jit
    def hide_ahead(self, rScore, count, lane, zero):
        """Set the scores of the first ``count`` keys to -inf. zero: as in hide()."""
        hidden = count + zero - 2 * (lane % 4)
        for n in cutlass.range_constexpr(self.first_tile // 8):
            for i in cutlass.range_constexpr(4):
                rScore[4 * n + i] = cutlass.select_(hidden > 8 * n + i % 2, -Float32.inf, rScore[4 * n + i])

    @cute.jit
    def start_all_scores(self, sQ: Int32, sK: Int32, rScore):
        """Start the products of 80 dims of queries and keys: of the last keys of the tile, for as many scores."""
        steps, count = cutlass.const_expr((FIRST_BYTES // 32, cute.size(rScore)))
        skipped = cutlass.const_expr(self.key_tile - 2 * count)
        blocks = (
            (hopper.descriptor(sQ, FIRST_BYTES, 0), hopper.descriptor(sK + skipped * FIRST_BYTES, FIRST_BYTES, 0)),
            (
                hopper.descriptor(sQ + WARPGROUP_ROWS * FIRST_BYTES, LAST_BYTES, 0),
                hopper.descriptor(sK + self.key_tile * FIRST_BYTES + skipped * LAST_BYTES, LAST_BYTES, 0),
            ),
        )
        hopper.wgmma_fence()
        found = None
        for k in cutlass.range_constexpr(steps + 1):
            a, b = blocks[k // steps]
            found = hopper.wgmma(found, count, a + 2 * (k % steps), b + 2 * (k % steps), self.product_kind)
        hopper.wgmma_commit()
        for i in cutlass.range_constexpr(count):
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
    def store(self, tensors, scalars, pipe, sums: Sums, scale, sequence, head, first_row, sQ: Int32, warp, lane):
        """Store the LSE and the normalised rows of a warp, through the memory of queries."""
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
        hopper.fence_proxy_async()
        cute.arch.sync_warp()
        if lane == 0:
            bulk_store(pipe.out_map, (Int32(0), first_row, head, sequence), shared)
        for r in cutlass.range_constexpr(2):
            row = first_row + g + 8 * r
            if t == 0 and row < scalars.max_queries:
                base = self.log2_unit(sums.rMax[r], scale[r])
                tensors.mLse[sequence, head, row] = (base + ptx.log2_approx(totals[r])) * (1.0 / LOG2_E)
