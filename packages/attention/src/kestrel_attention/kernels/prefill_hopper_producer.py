"""The producer warpgroup of prefill_hopper.py: schedules work items, and loads queries, keys and values.

Each warp loads its part of a tile: by TMA, in boxes of 16 keys that follow one another in memory, or by cp.async, for
which lanes look up the rows that they copy. Values whose keys do not exist become zeros: by TMA where these fill boxes
or lie past the tensor, else by cp.async.
Copies arrive at mbarriers. FP8 codes are copied to a staging buffer; the thread that copied them converts them,
exactly, into f16 in a pipeline stage. Long calls of unequal work count the works that are taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kestrel_runtime.cute_dsl import hopper, numeric, pdl, ptx

from .constants import BOX_ROWS, SPLIT_ROWS, WARPGROUP_ROWS
from .formats import E4m3, E5m2
from .prefill_base import divide, queries_of
from .prefill_hopper_places import HopperPlaces
from .prefill_types import WORK_BYTES, WORK_TYPES, Keys, Located, Pipe, Place, Work

PRODUCERS = 128  # threads
QUERY_BOX_ROWS = 16  # of queries that TMA loads at once: those of a warp
WARPGROUP_BOXES = WARPGROUP_ROWS // QUERY_BOX_ROWS
PRODUCER_BARRIER = 7  # a named barrier
PAST_ALL_SLOTS = 2**30


@dataclass(frozen=True)
class HopperProducer(HopperPlaces):
    """The producer, of four warps, and what it shares with the consumers. ``warps`` of them load keys and values."""

    consumers: int = 2  # warpgroups
    ctas_per_sm: int = 1
    query_buffers: int = 2
    producer_registers: int = 56
    consumer_registers: int = 224
    boxes: bool = False
    """TMA loads boxes of keys, which follow one another in memory."""
    box_rows: int = BOX_ROWS
    """Of a box."""
    early_queries: bool = False
    """The only buffer of queries is free behind their last scores: results go from registers to memory."""
    turns: bool = False
    """Consumer warpgroups start their products in turn, so that one multiplies while another computes weights."""

    @property
    def key_readers(self) -> int:
        """Consumer warpgroups that read each tile of keys."""
        return self.consumers

    @property
    def block_rows(self) -> int:
        return WARPGROUP_ROWS * self.consumers

    @property
    def block_bytes(self) -> int:
        """Bytes of a row of a column block."""
        return max(width for width in (32, 64, 128) if width <= self.row_bytes)

    @property
    def stored_row_bytes(self) -> int:
        """Of a row in shared memory: the last column block may be wider than what is left of the row."""
        return self.row_blocks * self.block_bytes

    @property
    def tile_bytes(self) -> int:
        return self.key_tile * self.stored_row_bytes

    @property
    def row_blocks(self) -> int:
        """Column blocks of a row."""
        return -(-self.row_bytes // self.block_bytes)

    @property
    def all_rows(self) -> int:
        """A bit for each key that a warp loads."""
        return (1 << self.loaded_rows) - 1

    @property
    def query_bytes(self) -> int:
        """Bytes of the queries of a warpgroup."""
        return WARPGROUP_ROWS * self.stored_row_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the queries of a thread block."""
        return self.consumers * self.query_bytes

    @property
    def product_type(self) -> type[cutlass.Numeric]:
        """Of the operands of matrix products. f16 holds all codes; it takes one instruction to decode two."""
        return cutlass.Float16 if self.codes else self.dtype

    @property
    def product_kind(self) -> str:
        """The same as PTX names it."""
        return numeric.ptx_name(self.product_type)

    @property
    def box_bytes(self) -> int:
        """Bytes of a row of a column block of loaded keys or values: a box of TMA has BOX_ROWS such rows."""
        return self.block_bytes * self.stored_bytes // self.element_bytes if self.row_blocks == 1 else 128

    @property
    def row_boxes(self) -> int:
        """Column blocks of a row of loaded keys or values."""
        return self.stored_row_bytes * self.stored_bytes // self.element_bytes // self.box_bytes

    @property
    def query_boxes(self) -> bool:
        """TMA loads queries. Those that become f16 for codes, and those of one buffer, come by cp.async."""
        return not self.codes and (self.query_buffers > 1 or self.early_queries)

    @property
    def code_barriers(self) -> int:
        """Barriers of boxes of codes."""
        return 2 * self.warps if self.codes and self.boxes else 0

    @property
    def copied_keys(self) -> bool:
        """Keys come to their stage by cp.async, at which every producer thread arrives; else one of each warp does."""
        return not self.codes and not self.boxes

    @property
    def waits_late(self) -> bool:
        """The producer waits for the kernel before this one when all that the host's numbers give is computed."""
        return self.producer_registers > 32 and self.clears_behind  # or it spills

    @property
    def clears_behind(self) -> bool:
        """Rows around packed sequences are cleared behind the loads of a work, and add nothing to their latency."""
        return self.head_dim <= 128 or not self.copied_keys  # or it spills

    @property
    def copied_values(self) -> bool:
        return not self.codes and not self.boxes

    @property
    def keeps_addresses(self) -> bool:
        """The compiler would compute addresses of shared memory anew for each tile, which some kernels prefer."""
        return self.consumers > 1 and self.head_dim <= 128 and not (self.copied_keys and self.element_bytes > 1)

    @property
    def shared_bytes(self) -> int:
        codes = self.tile_bytes if self.codes else 0  # half as many bytes of keys, and of values
        return self.query_buffers * self.buffer_bytes + 2 * self.num_stages * self.tile_bytes + codes

    @property
    def shared_carveout(self) -> int | None:
        """Percent of the SM's memory for shared memory; None leaves it to the driver."""
        return 100 if self.ctas_per_sm > 1 else None

    @property
    def threads(self) -> int:
        return PRODUCERS + 128 * self.consumers

    @cute.jit
    def write_work(self, address: Int32, work: Work):
        for i in cutlass.range_constexpr(len(Work._fields)):
            kind = WORK_TYPES[Work._fields[i]]
            word = ptx.float_as_int(work[i]) if cutlass.const_expr(kind is Float32) else work[i]
            ptx.store_shared(address + 4 * i, [Uint32(word)])

    # -- queries --------------------------------------------------------------------------------------------------

    @cute.jit
    def produce(self, tensors, scalars, pipe: Pipe, row_blocks, batch, first, step, count):
        """Schedule all works of a thread block, and load what they need.

        What the first work needs of the host's numbers is computed ahead of the wait for the kernel before this one.
        """
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        at = self.enumerated(scalars, row_blocks, tensors.mQ.shape[2], batch, first)
        if cutlass.const_expr(self.pdl) and (cutlass.const_expr(not self.waits_late) or scalars.listed_works > 0):
            self.wait_and_trigger(Int64(1))
        if scalars.listed_works > 0:
            count = self.listed_count(tensors, scalars)
            at = self.listed_at(tensors, scalars, first)
        rPage = cute.make_rmem_tensor(1, Int32)
        loaded = Int32(0)
        works = Int32(0)
        index = first
        visited = Int32(0)
        loader = warp
        if cutlass.const_expr(32 * self.warps < PRODUCERS):
            loader = warp % self.warps
        while index < count:
            takes_place = cutlass.const_expr(not self.boxes)  # it takes no registers in between
            if takes_place and (cutlass.const_expr(not self.waits_late) or index != first):
                at = self.place(tensors, scalars, row_blocks, batch, index)
            kv_head = at.head
            if scalars.group_size > 1:
                kv_head = divide(at.head, scalars.group_size)
            keys = self.places_of_keys(tensors, scalars, at.sequence, kv_head)
            if cutlass.const_expr(self.pdl and self.waits_late) and index == first:
                self.prefetch_lengths(tensors, scalars, at.sequence, keys, loader, lane)
                if scalars.has_device_numbers + scalars.has_counter != 0:
                    self.wait_and_trigger(keys.key_base | keys.value_base | keys.table)
            if cutlass.const_expr(self.waits_late) and scalars.has_block_table != 0:
                self.look_up(rPage, keys, Int32(0), loader, lane)  # as if the work started with the first tile
            following = index + step
            if scalars.has_counter != 0 and tid == 0:
                following = ptx.atomic_add(tensors.mWorks.iterator.toint(), Int32(1)) + step
            if cutlass.const_expr(not self.clears_behind) and scalars.packed_queries != 0:
                self.clear_around_work(tensors, scalars, at, batch, tid)
            keys, length = self.with_lengths(tensors, scalars, at.sequence, keys)
            first_query, num_queries = queries_of(tensors.mStartQ, tensors.mQ, scalars, at.sequence)
            limit = self.split_limit(scalars, num_queries, tensors.mQ.shape[2])
            block_rows = Int32(self.block_rows)
            if cutlass.const_expr(self.block_rows > SPLIT_ROWS):  # bits of splits depend on the rows of a block
                block_rows = cutlass.select_(limit > 1, Int32(SPLIT_ROWS), block_rows)
            first_row = at.row_block * block_rows
            if at.split < limit and first_row < num_queries:
                work, query = self.work_of(
                    tensors, scalars, at.sequence, at.head, kv_head, first_row, block_rows, keys, length
                )
                work = work._replace(pack_shift=at.pack_shift)
                if cutlass.const_expr(self.pdl and self.waits_late) and index == first:
                    ready = work.num_tiles | work.position | work.gap | work.rows
                    self.wait_and_trigger(query | Int64(ready))
                work = self.split(tensors, scalars, at, limit, first_query, num_queries, first_row, work)
                if work.rows > 0:
                    work = self.of_thread_block(scalars, work, index)
                    first_tile = self.tile_at(work, Int32(0))
                    if not self.waits_late or scalars.has_block_table == 0 or first_tile != 0:
                        self.look_up(rPage, keys, first_tile, loader, lane)
                    else:
                        key = loader * self.loaded_rows + lane % self.loaded_rows
                        rPage[0] = cutlass.select_(key < keys.held, rPage[0], Int32(-1))
                    buffer, parity = works % self.query_buffers, (works // self.query_buffers & 1) ^ 1
                    hopper.mbarrier_wait(pipe.queries_empty + 8 * buffer, parity)
                    to, full = pipe.queries + buffer * self.buffer_bytes, pipe.queries_full + 8 * buffer
                    if tid == 0:
                        self.write_work(pipe.works + buffer * WORK_BYTES, work)
                        hopper.mbarrier_arrive(pipe.works_full + 8 * buffer)
                    if cutlass.const_expr(self.query_boxes):
                        self.load_query_boxes(pipe, to, full, work, warp, lane)
                    else:
                        self.load_block(tensors.mQ, to, query, work, tid)
                        hopper.mbarrier_arrive_after_copies(full)
                    works += 1
                    if cutlass.const_expr(self.codes):
                        self.produce_codes(pipe, scalars, keys, work, kv_head, rPage, loaded, warp, lane)
                    elif cutlass.const_expr(32 * self.warps < PRODUCERS):
                        if warp < self.warps:
                            self.produce_rows(pipe, keys, work, kv_head, rPage, loaded, warp, lane)
                    else:
                        self.produce_rows(pipe, keys, work, kv_head, rPage, loaded, warp, lane)
                    loaded += work.num_tiles
            if cutlass.const_expr(self.pdl and self.waits_late) and index == first:  # whatever its first work was
                self.wait_and_trigger(Int64(1))
            if cutlass.const_expr(self.clears_behind) and scalars.packed_queries != 0:
                again = self.place(tensors, scalars, row_blocks, batch, ptx.opaque(index))  # to hold no registers
                self.clear_around_work(tensors, scalars, again, batch, tid)
            if scalars.has_counter != 0:  # tid 0 tells the others; two places in turn, so that all have read the last
                place = pipe.following + 4 * (visited & 1)
                if tid == 0:
                    ptx.store_shared(place, [Uint32(following)])
                hopper.named_barrier(Int32(PRODUCER_BARRIER), PRODUCERS)
                following = Int32(ptx.load_shared(place, 1)[0])
                visited += 1
            index = cute.arch.make_warp_uniform(following)
            if cutlass.const_expr(self.boxes):
                at = self.place(tensors, scalars, row_blocks, batch, index)
        buffer, parity = works % self.query_buffers, (works // self.query_buffers & 1) ^ 1
        hopper.mbarrier_wait(pipe.queries_empty + 8 * buffer, parity)
        if tid == 0:
            ptx.store_shared(pipe.works + buffer * WORK_BYTES, [Uint32(0xFFFFFFFF)])
            hopper.mbarrier_arrive(pipe.works_full + 8 * buffer)
        ptx.cp_async_wait(0)

    @cute.jit
    def wait_and_trigger(self, ready: Int64):
        """The PDL wait, once ``ready`` is computed."""
        pdl.wait_after(ready)
        pdl.trigger()

    @cute.jit
    def prefetch_lengths(self, tensors, scalars, sequence, keys: Keys, loader, lane):
        """Prefetch what the first loads read into L2."""
        if lane == 0:
            if scalars.packed_queries != 0:
                ptx.prefetch_l2(tensors.mStartQ.iterator.toint() + 4 * Int64(sequence) * tensors.mStartQ.stride[0])
            if scalars.has_lengths != 0:
                ptx.prefetch_l2(tensors.mLengths.iterator.toint() + 4 * Int64(sequence) * tensors.mLengths.stride[0])
            entry, _ = self.entry_and_slot(keys, loader * self.loaded_rows)
            if scalars.has_block_table != 0 and Int32(entry) < keys.table_width:
                ptx.prefetch_l2(keys.table + 4 * Int64(entry) * keys.table_stride)

    @cute.jit
    def clear_around_work(self, tensors, scalars, at: Place, batch, tid):
        """Clear the packed rows around a sequence whose first work this is."""
        if at.row_block == 0 and at.split == 0:
            for i in cutlass.range(1 << at.pack_shift, unroll=1):
                self.clear_around(tensors, scalars, at.sequence, batch, at.head + i, tid)

    @cute.jit
    def load_query_boxes(self, pipe: Pipe, to: Int32, full: Int32, work: Work, warp, lane):
        """Start loading queries by TMA: a box per column block and consumer warp, by the producer warp of its number.

        Rows past the last are those of another sequence, or zeros. Their results are not stored.
        """
        if warp == 0 and lane == 0:
            hopper.mbarrier_arrive_expecting(full, Int32(self.buffer_bytes))
        cute.arch.sync_warp()
        if lane < self.consumers * self.row_blocks:
            query, head = self.rows_of_warp(work.pack_shift, lane // self.row_blocks, warp)
            dim = lane % self.row_blocks * (self.block_bytes // self.element_bytes)
            box = (dim, work.out_row + query, work.head + head, work.out_block)
            place = to + (lane * WARPGROUP_BOXES + warp) * (QUERY_BOX_ROWS * self.block_bytes)
            hopper.load_box(place, pipe.query_map, box, full)

    @cute.jit
    def load_block(self, mQ, sQ: Int32, query: Int64, work: Work, tid):
        """Start loading queries; zeros past the last row and the last dim."""
        if cutlass.const_expr(self.packs):
            if work.pack_shift == 0:
                self.load_rows_of_block(mQ, sQ, query, work, False, tid)
            else:
                self.load_rows_of_block(mQ, sQ, query, work, True, tid)
        else:
            self.load_rows_of_block(mQ, sQ, query, work, False, tid)

    @cute.jit
    def load_rows_of_block(self, mQ, sQ: Int32, query: Int64, work: Work, packed: cutlass.Constexpr, tid):
        count = cutlass.const_expr(self.block_rows * self.units)
        tid = ptx.opaque(tid)  # addresses are computed for each block, and take no registers in between
        for i in cutlass.range_constexpr(count // PRODUCERS):
            at = tid + i * PRODUCERS
            row, unit = at // self.units, at % self.units
            from_row, head = row, Int32(0)
            if cutlass.const_expr(packed):
                first, head = self.rows_of_warp(work.pack_shift, row // WARPGROUP_ROWS, row % WARPGROUP_ROWS // 16)
                from_row = first + row % 16
            exists = from_row < work.rows and self.unit_dims * unit < mQ.shape[3]
            offset = Int64(cutlass.min(from_row, work.rows - 1)) * mQ.stride[1]
            if cutlass.const_expr(packed):
                offset += Int64(head) * mQ.stride[2]
            source = query + self.element_bytes * offset + 16 * unit
            to = sQ + row // WARPGROUP_ROWS * self.query_bytes
            to = to + self.place_of(WARPGROUP_ROWS, row % WARPGROUP_ROWS, unit)
            ptx.cp_async(to, source, 16, cutlass.select_(exists, Int32(16), Int32(0)))

    # -- keys and values ------------------------------------------------------------------------------------------

    @cute.jit
    def produce_rows(self, pipe: Pipe, keys: Keys, work: Work, kv_head, rPage, loaded, warp, lane):
        """Load the tiles of a work item. rPage holds the page of each lane's key of the first tile."""
        n = Int32(0)
        while n < work.num_tiles:
            at = loaded + n
            stage, parity = at % self.num_stages, (at // self.num_stages & 1) ^ 1
            found = self.locate(keys, rPage, self.tile_at(work, n), warp, lane)
            to_keys, to_values = pipe.keys + stage * self.tile_bytes, pipe.values + stage * self.tile_bytes
            keys_full, values_full = pipe.keys_full + 8 * stage, pipe.values_full + 8 * stage
            hopper.mbarrier_wait(pipe.keys_empty + 8 * stage, parity)
            if cutlass.const_expr(self.boxes):
                if lane == 0:
                    self.store_exists(pipe, at, found.exists, warp)
                box = self.box_of(found, kv_head, lane)
                self.load_boxes(pipe.key_map, to_keys, box, keys_full, warp, lane)
            else:
                self.publish_exists(pipe, at, stage, found.exists, warp, lane)
                self.load_rows(keys, to_keys, keys.key_base, found.key, found.exists, warp, lane)
                hopper.mbarrier_arrive_after_copies(keys_full)
            hopper.mbarrier_wait(pipe.values_empty + 8 * stage, parity)
            if cutlass.const_expr(self.boxes):
                if self.has_zeros(keys, found.present):
                    self.load_boxes(pipe.value_map, to_values, box, values_full, warp, lane)
                else:  # zeros for keys that do not exist
                    self.load_rows(keys, to_values, keys.value_base, found.value, found.present, warp, lane)
                    ptx.cp_async_commit()
                    ptx.cp_async_wait(0)
                    hopper.fence_proxy_async()
                    cute.arch.sync_warp()
                    if lane == 0:
                        hopper.mbarrier_arrive(values_full)
            else:
                self.load_rows(keys, to_values, keys.value_base, found.value, found.exists, warp, lane)
                hopper.mbarrier_arrive_after_copies(values_full)
            if n + 1 < work.num_tiles:
                self.look_up(rPage, keys, self.tile_at(work, n + 1), warp, lane)
            n += 1

    @cute.jit
    def produce_codes(self, pipe: Pipe, scalars, keys: Keys, work: Work, kv_head, rPage, loaded, warp, lane):
        """The same for FP8 codes: a warp loads codes one tile ahead, and converts them into the stage."""
        of_values = cutlass.const_expr(self.tile_bytes // 2)
        found = self.locate(keys, rPage, self.tile_at(work, Int32(0)), warp, lane)
        exists = found.exists
        if cutlass.const_expr(not self.boxes):
            ptx.cp_async_wait(0)  # the last copies of the work before write the same memory
        if work.num_tiles > 0:
            for i in cutlass.range_constexpr(2):
                self.load_codes(pipe, keys, i, found, exists, kv_head, warp, lane)
            if work.num_tiles > 1:
                self.look_up(rPage, keys, self.tile_at(work, Int32(1)), warp, lane)
        n = Int32(0)
        while n < work.num_tiles:
            at = loaded + n
            stage, parity = at % self.num_stages, (at // self.num_stages & 1) ^ 1
            found = self.locate(keys, rPage, self.tile_at(work, n + 1), warp, lane)
            more = n + 1 < work.num_tiles
            following = Uint32(cutlass.select_(more, found.exists, Uint32(0)))
            if lane == 0:
                self.store_exists(pipe, at, exists, warp)
            for i in cutlass.range_constexpr(2):
                self.wait_for_codes(pipe, i, at, exists, warp, lane)
                hopper.mbarrier_wait((pipe.values_empty if i else pipe.keys_empty) + 8 * stage, parity)
                to = (pipe.values if i else pipe.keys) + stage * self.tile_bytes
                self.decode_codes(scalars, pipe.codes + i * of_values, to, warp, lane)
                cute.arch.sync_warp()
                if lane == 0:
                    hopper.mbarrier_arrive((pipe.values_full if i else pipe.keys_full) + 8 * stage)
                if cutlass.const_expr(self.boxes):
                    if more:
                        self.load_codes(pipe, keys, i, found, following, kv_head, warp, lane)
                else:  # also without another tile, so that groups stay in step
                    self.load_codes(pipe, keys, i, found, following, kv_head, warp, lane)
            if n + 2 < work.num_tiles:
                self.look_up(rPage, keys, self.tile_at(work, n + 2), warp, lane)
            exists = following
            n += 1

    @cute.jit
    def load_codes(self, pipe: Pipe, keys: Keys, i: cutlass.Constexpr, found: Located, exists, kv_head, warp, lane):
        """Start loading the codes of the warp's keys (i 0) or values (i 1) of a tile."""
        to = pipe.codes + i * (self.tile_bytes // 2)
        if cutlass.const_expr(self.boxes):
            full = pipe.codes_full + 8 * (i * self.warps + warp)
            box = self.box_of(found, kv_head, lane)
            self.load_boxes((pipe.key_map, pipe.value_map)[i], to, box, full, warp, lane)
        else:
            base, offset = (keys.key_base, found.key) if cutlass.const_expr(i == 0) else (keys.value_base, found.value)
            self.copy_codes(keys, to, base, offset, exists, warp, lane)

    @cute.jit
    def wait_for_codes(self, pipe: Pipe, i: cutlass.Constexpr, at, exists, warp, lane):
        """Wait for them; values that do not exist become zeros."""
        if cutlass.const_expr(self.boxes):
            hopper.mbarrier_wait(pipe.codes_full + 8 * (i * self.warps + warp), at & 1)
            if cutlass.const_expr(i == 1):
                self.clear_missing(pipe, exists, warp, lane)
        else:
            ptx.cp_async_wait(1)

    @cute.jit
    def clear_missing(self, pipe: Pipe, exists, warp, lane):
        """Zeros for the codes of values that do not exist."""
        if exists != self.all_rows:
            codes = pipe.codes + self.tile_bytes // 2 + self.place_of_codes(warp, lane)
            for k in cutlass.range_constexpr(self.code_vectors):
                if (exists >> Uint32(lane // self.stored_units + k * self.rows_of_vectors)) & 1 == 0:
                    ptx.store_shared(self.next_codes(codes, k), [Uint32(0)] * 4)

    @cute.jit
    def box_of(self, found: Located, kv_head, lane):
        """The coordinates of the lane's box of the warp's keys, whatever tensor it is loaded from.

        Lane l loads column block l % row_boxes of box_rows rows: zeros where the first of them is not in memory.
        """
        first = lane // self.row_boxes * self.box_rows
        slot = Int32(cute.arch.shuffle_sync(Int32(found.slot), first))
        block = Int32(cute.arch.shuffle_sync(Int32(found.block), first))
        slot = cutlass.select_((found.present >> Uint32(first)) & 1 != 0, slot, Int32(PAST_ALL_SLOTS))
        return lane % self.row_boxes * (self.box_bytes // self.stored_bytes), slot, kv_head, block

    @cute.jit
    def has_zeros(self, keys: Keys, exists: Uint32):
        """Whether TMA puts zeros in place of keys that do not exist: they fill boxes, or lie past the tensor."""
        firsts = cutlass.const_expr(sum(1 << i for i in range(0, self.loaded_rows, self.box_rows)))
        fill_boxes = (exists ^ (exists >> (self.box_rows - 1))) & firsts == 0
        past = keys.has_block_table == 0 and keys.first_slot + keys.held >= keys.page_size
        return fill_boxes or past

    @cute.jit
    def load_boxes(self, tensor_map: Int64, to: Int32, box, full: Int32, warp, lane):
        """Start loading the warp's rows of a tile by TMA, and arrive; ``full`` waits for their bytes too."""
        first = warp * self.loaded_rows + lane // self.row_boxes * self.box_rows
        to = to + (lane % self.row_boxes * self.key_tile + first) * self.box_bytes
        if lane == 0:
            hopper.mbarrier_arrive_expecting(full, Int32(self.loaded_rows * self.row_boxes * self.box_bytes))
        cute.arch.sync_warp()
        if lane < self.loaded_rows // self.box_rows * self.row_boxes:
            hopper.load_box(to, tensor_map, box, full)

    @cute.jit
    def store_exists(self, pipe: Pipe, at, exists: Uint32, warp):
        ring = at % (2 * self.num_stages)
        ptx.store_shared(pipe.exists + 4 * (ring * self.warps + warp), [exists])

    @cute.jit
    def publish_exists(self, pipe: Pipe, at, stage, exists: Uint32, warp, lane):
        """Store which of the warp's keys exist, and arrive at the stage's barrier."""
        if lane == 0:
            self.store_exists(pipe, at, exists, warp)
            hopper.mbarrier_arrive(pipe.keys_full + 8 * stage)

    @property
    def rows_of_vectors(self) -> int:
        """Rows whose codes a warp loads at once, 16 bytes per lane."""
        return 32 // self.stored_units

    @property
    def code_vectors(self) -> int:
        """How often, for its rows of a tile."""
        return self.loaded_rows // self.rows_of_vectors

    def place_of_codes(self, warp, lane):
        """Offset of a lane's first 16 bytes of codes in a tile of codes."""
        row = warp * self.loaded_rows + lane // self.stored_units
        return self.place_in(self.box_bytes, self.key_tile, row, lane % self.stored_units)

    def next_codes(self, codes: Int32, k: int):
        """The place of its vector k, where ``codes`` is that of its first."""
        more = k * self.rows_of_vectors  # has no bit of row: the swizzle of both is that of each
        return (codes ^ (16 * hopper.swizzle(self.box_bytes, more))) + more * self.box_bytes

    @cute.jit
    def copy_codes(self, keys: Keys, to: Int32, base, offset, exists, warp, lane):
        """Start copying the codes of the warp's rows to where the same thread reads them in decode_codes."""
        lane = ptx.opaque(lane)
        row, unit = lane // self.stored_units, lane % self.stored_units
        wanted = cutlass.select_(16 * unit < keys.head_dim, exists >> Uint32(row), Uint32(0))
        to = to + self.place_of_codes(warp, lane)
        for k in cutlass.range_constexpr(self.code_vectors):
            more = cutlass.const_expr(k * self.rows_of_vectors)
            source = base + 16 * unit + Int64(cute.arch.shuffle_sync(offset, row + more)) * 16
            valid = cutlass.select_((wanted & (1 << more)) != 0, Int32(16), Int32(0))
            ptx.cp_async(self.next_codes(to, k), source, 16, valid)
        ptx.cp_async_commit()

    @cute.jit
    def decode_codes(self, scalars, codes: Int32, to: Int32, warp, lane):
        """Convert the loaded codes to f16, exactly, into a stage."""
        if scalars.codes_are_e5m2 != 0:
            self.decode_all(codes, to, E5m2(), warp, lane)
        else:
            self.decode_all(codes, to, E4m3(False), warp, lane)
        hopper.fence_proxy_async()

    @cute.jit
    def decode_all(self, codes: Int32, to: Int32, of: cutlass.Constexpr, warp, lane):
        """A lane converts 16 codes in two halves, so ordered that lanes that access memory together hit 32 banks."""
        batch = cutlass.const_expr(4 if self.producer_registers > 40 else 1)  # loaded ahead of their use
        lane = ptx.opaque(lane)
        row, unit = lane // self.stored_units, lane % self.stored_units
        second = (lane >> 3 ^ (lane >> 2 if cutlass.const_expr(self.stored_units > 4) else 0)) & 1
        codes = codes + self.place_of_codes(warp, lane) + 8 * second
        to = to + self.place_of(self.key_tile, warp * self.loaded_rows + row, 2 * unit + second)
        for first in cutlass.range_constexpr(0, self.code_vectors, batch):
            words = []
            for k in cutlass.range_constexpr(first, first + batch):
                source = self.next_codes(codes, k)
                words.append([ptx.load_shared(there, 2) for there in (source, source ^ 8)])
            for k in cutlass.range_constexpr(batch):
                more = cutlass.const_expr((first + k) * self.rows_of_vectors)
                there = (to ^ (16 * hopper.swizzle(self.block_bytes, more))) + more * self.block_bytes
                for half in cutlass.range_constexpr(2):
                    pairs = [pair for word in words[k][half] for pair in of.to_f16(word)]
                    ptx.store_shared(there ^ (16 * half), pairs)

    @cute.jit
    def place_of(self, tile_rows: cutlass.Constexpr, row, unit):
        """Offset of 16 bytes of a row in a tile."""
        return self.place_in(self.block_bytes, tile_rows, row, unit)

    def place_in(self, block_bytes: int, tile_rows: int, row, unit):
        """The same in column blocks of any width."""
        block, of_block = unit // (block_bytes // 16), unit % (block_bytes // 16)
        swizzled = of_block ^ hopper.swizzle(block_bytes, row)
        return (block * tile_rows + row) * block_bytes + swizzled * 16

    @cute.jit
    def load_rows(self, keys: Keys, to: Int32, base, offset, exists, warp, lane):
        """Start loading the warp's rows of a tile; zeros for those that do not exist."""
        units = cutlass.const_expr(self.units)
        lanes = cutlass.const_expr(1 << (units - 1).bit_length())  # of a row; those past its end load nothing
        lane = ptx.opaque(lane)  # addresses are computed for each tile, and take no registers in between
        row, unit = lane // lanes, lane % lanes
        wanted = cutlass.select_(self.unit_dims * unit < keys.head_dim, exists >> Uint32(row), Uint32(0))
        to = to + self.place_of(self.key_tile, warp * self.loaded_rows + row, unit)
        for i in cutlass.range_constexpr(self.loaded_rows * lanes // 32):
            more = cutlass.const_expr(i * (32 // lanes))  # has no bit of row: the swizzle of both is that of each
            swizzle = cutlass.const_expr(16 * hopper.swizzle(self.block_bytes, more))
            source = base + 16 * unit + Int64(cute.arch.shuffle_sync(offset, row + more)) * 16
            valid = cutlass.select_((wanted & (1 << more)) != 0, Int32(16), Int32(0))
            there = (to ^ swizzle) + more * self.block_bytes
            if cutlass.const_expr(lanes == units):
                ptx.cp_async(there, source, 16, valid)
            else:
                if unit < units:
                    ptx.cp_async(there, source, 16, valid)
