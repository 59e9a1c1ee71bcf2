"""Attention of many queries on Hopper: warp-specialised, with warpgroup matrix products (wgmma).

A thread block processes 64 queries of one head per consumer warpgroup, and visits the tiles of keys that any of them
sees. The producer warpgroup loads keys and values into separate pipeline stages. A consumer starts Q K' of one tile
together with P V of the previous tile, P in registers; consumers do that in turn, so that one multiplies while another
computes weights (FlashAttention-3, arXiv 2407.08608). Long calls have persistent thread blocks. Row blocks with the
most keys start first. A row's result does not depend on its tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kestrel_runtime.cute_dsl import hopper, numeric, pdl, ptx

from . import scores
from .constants import BOX_ROWS, WARPGROUP_ROWS
from .parameters import PrefillScalars, PrefillTensors
from .prefill_base import bits_below, once_if
from .prefill_hopper_producer import PRODUCERS, QUERY_BOX_ROWS, HopperProducer
from .prefill_types import WORK_BYTES, WORK_TYPES, OutputRows, Pipe, Sums, Visible, Work
from .scores import LOG2_E

MIN_ROW_SCALE, MAX_ROW_SCALE = 2.0**-126, 2.0**126  # with 0 or infinity, hidden scores would be NaN
HALF_EXPONENT = 14  # of the largest element of a row of queries in f16
TURN_BARRIER = 8  # the first of the named barriers for turns, one for each consumer warpgroup


@dataclass(frozen=True)
class PrefillHopper(HopperProducer):
    """One compiled variant."""

    @property
    def weight_exponent(self) -> float:
        return 7.0 if self.codes else 0.0  # with rescale_slack f16 holds 2^15, and small weights with more bits

    @property
    def reads_scales(self) -> bool:
        return self.codes or (self.boxes and self.consumers < 3)

    @property
    def late_values(self) -> bool:
        """Products with values are waited for behind the largest score, not ahead of it: faster with copied keys."""
        return self.head_dim == 128 and self.copied_keys

    # -- host -----------------------------------------------------------------------------------------------------

    @cute.jit
    def __call__(self, *given):
        num_tensors = cutlass.const_expr(len(PrefillTensors._fields))
        tensors, scalars = PrefillTensors(*given[:num_tensors]), PrefillScalars(*given[num_tensors:-2])
        batch = given[-2]
        heads = tensors.mQ.shape[2]
        row_blocks = cutlass.max(cute.ceil_div(scalars.max_queries, self.block_rows), scalars.split_blocks)
        count = (row_blocks + scalars.split_blocks * (scalars.num_splits - 1)) * heads * batch
        if scalars.listed_works > 0:  # the kernel reads how many there are
            count = scalars.listed_works * scalars.section_heads
        maps = [None] * 3
        if cutlass.const_expr(self.query_boxes):
            maps[0] = self.tensor_map(tensors.mQ, self.block_bytes // self.element_bytes, QUERY_BOX_ROWS)
        if cutlass.const_expr(self.boxes):
            maps[1:] = [
                self.tensor_map(x, self.box_bytes // self.stored_bytes, BOX_ROWS) for x in (tensors.mK, tensors.mV)
            ]
        self.kernel(tensors, scalars, *maps, row_blocks, batch, count).launch(
            grid=[cutlass.min(count, scalars.max_blocks), 1, 1],
            block=[self.threads, 1, 1],
            stream=given[-1],
            min_blocks_per_mp=self.ctas_per_sm,
            smem=self.shared_bytes,
            preferred_smem_carveout=self.shared_carveout,
            use_pdl=self.pdl,
        )

    @cute.jit
    def tensor_map(self, mX, box_dims: cutlass.Constexpr, box_rows: cutlass.Constexpr):
        """The tensor map of queries, keys or values, for boxes of some rows of a column block."""
        modes = cutlass.const_expr((1, 2, 0))
        element = cutlass.const_expr(mX.element_type.width // 8)
        shape = [mX.shape[3], *(mX.shape[i] for i in modes)]
        unit = cutlass.const_expr(16 // element)
        strides = [cutlass.select_(mX.shape[i] > 1, mX.stride[i], Int64(unit)) for i in modes]
        layout = cute.make_layout(tuple(shape), stride=(1, *strides))
        box = (box_dims, box_rows, 1, 1)
        return hopper.tensor_map(cute.make_tensor(mX.iterator, layout), box, box_dims * element)

    # -- device ---------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        tensors: PrefillTensors,
        scalars: PrefillScalars,
        of_queries: cute.CopyAtom | None,
        of_keys: cute.CopyAtom | None,
        of_values: cute.CopyAtom | None,
        row_blocks: Int32,
        batch: Int32,
        count: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        pipe = self.lay_out_shared_memory()
        if cutlass.const_expr(self.query_boxes):
            pipe = pipe._replace(query_map=hopper.tensor_map_address(of_queries))
        if cutlass.const_expr(self.boxes):
            key_map, value_map = hopper.tensor_map_address(of_keys), hopper.tensor_map_address(of_values)
            pipe = pipe._replace(key_map=key_map, value_map=value_map)
        if tid == 0:
            self.init_barriers(pipe)
        for tensor_map in self.tensor_maps(pipe):
            if tid == 32:
                hopper.prefetch_tensor_map(tensor_map)
        cute.arch.sync_threads()
        warpgroup = cute.arch.make_warp_uniform(tid // 128)
        if warpgroup == 0:
            hopper.registers_down(self.producer_registers)
            self.produce(tensors, scalars, pipe, row_blocks, batch, first, step, count)
        else:
            hopper.registers_up(self.consumer_registers)
            if cutlass.const_expr(self.pdl):
                pdl.wait()
                pdl.trigger()
            self.consume(tensors, scalars, pipe, warpgroup - 1)

    def tensor_maps(self, pipe: Pipe) -> list:
        """Those that the kernel uses."""
        of_keys = [pipe.key_map, pipe.value_map] if self.boxes else []
        return ([pipe.query_map] if self.query_boxes else []) + of_keys

    @cute.jit
    def lay_out_shared_memory(self) -> Pipe:
        shared = Int32(cute.arch.get_dyn_smem(Float32, alignment=1024).toint())
        buffers, stages = cutlass.const_expr((self.query_buffers, self.num_stages))
        words = cutlass.const_expr(2 + 6 * buffers + 8 * stages + 2 * stages * self.warps + buffers * WORK_BYTES // 4)
        words = cutlass.const_expr(words + 2 * self.code_barriers)
        works = Int32(cute.arch.alloc_smem(Uint32, words, alignment=16).toint())
        exists = works + buffers * WORK_BYTES
        barriers = exists + 8 * stages * self.warps
        of_keys = barriers + 24 * buffers
        keys = shared + buffers * self.buffer_bytes
        return Pipe(
            queries=shared,
            keys=keys,
            values=keys + stages * self.tile_bytes,
            queries_full=barriers,
            queries_empty=barriers + 8 * buffers,
            works_full=barriers + 16 * buffers,
            keys_full=of_keys,
            keys_empty=of_keys + 8 * stages,
            values_full=of_keys + 16 * stages,
            values_empty=of_keys + 24 * stages,
            codes=keys + 2 * stages * self.tile_bytes,
            exists=exists,
            works=works,
            following=of_keys + 32 * stages,
            codes_full=of_keys + 32 * stages + 8,
            query_map=Int64(0),
            key_map=Int64(0),
            value_map=Int64(0),
        )

    @cute.jit
    def init_barriers(self, pipe: Pipe):
        for i in cutlass.range_constexpr(self.query_buffers):
            hopper.mbarrier_init(pipe.queries_full + 8 * i, 1 if self.query_boxes else PRODUCERS)
            hopper.mbarrier_init(pipe.works_full + 8 * i, 1)
            hopper.mbarrier_init(pipe.queries_empty + 8 * i, 4 * self.consumers)
        for i in cutlass.range_constexpr(self.num_stages):
            hopper.mbarrier_init(pipe.keys_full + 8 * i, self.warps * (33 if self.copied_keys else 1))
            hopper.mbarrier_init(pipe.values_full + 8 * i, self.warps * (32 if self.copied_values else 1))
            hopper.mbarrier_init(pipe.keys_empty + 8 * i, 4 * self.consumers)
            hopper.mbarrier_init(pipe.values_empty + 8 * i, 4 * self.consumers)
        for i in cutlass.range_constexpr(self.code_barriers):
            hopper.mbarrier_init(pipe.codes_full + 8 * i, 1)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def read_work(self, address: Int32):
        fields = []
        for i in cutlass.range_constexpr(len(Work._fields)):
            kind = WORK_TYPES[Work._fields[i]]
            word = Int32(ptx.load_shared(address + 4 * i, 1)[0])
            if cutlass.const_expr(kind is Float32):
                fields.append(ptx.int_as_float(word))
            else:
                fields.append(kind(cute.arch.make_warp_uniform(word)))
        return Work(*fields)

    # -- consumers ------------------------------------------------------------------------------------------------

    @cute.jit
    def consume(self, tensors, scalars, pipe: Pipe, warpgroup):
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid % 128 // 32)
        rOut = cute.make_rmem_tensor(self.head_dim // 2, Float32)
        rMax = cute.make_rmem_tensor(2, Float32)
        rSum = cute.make_rmem_tensor(2, Float32)
        sums = Sums(rOut, rMax, rSum)
        used = Int32(0)  # tiles of keys so far, which give stage and parity
        works = Int32(0)
        if warpgroup == self.consumers - 1:
            self.pass_turn(warpgroup)  # the first warpgroup starts
        hopper.mbarrier_wait(pipe.works_full, Int32(0))
        work = self.read_work(pipe.works)
        num_tiles = work.num_tiles
        while num_tiles >= 0:
            buffer = works % self.query_buffers
            work = self.read_work(pipe.works + buffer * WORK_BYTES)
            query, _ = self.rows_of_warp(work.pack_shift, warpgroup, warp)
            sQ = pipe.queries + buffer * self.buffer_bytes + warpgroup * self.query_bytes
            rOut.fill(0.0)
            rMax.fill(-Float32.inf)
            rSum.fill(0.0)
            warp_position = work.position + query
            _, all_last = scores.window(warp_position, scalars, work.held)
            all_first, _ = scores.window(warp_position + 15, scalars, work.held)
            visible = Visible(all_first, all_last, work.prefix, Int32(0), warp_position, work.held)
            hopper.mbarrier_wait(pipe.queries_full + 8 * buffer, works // self.query_buffers & 1)
            softmax_scale = self.prepare_queries(work, sQ, warpgroup, warp, lane)
            scaled = work._replace(softmax_scale=softmax_scale)
            scale = [cutlass.select_(scalars.softcap > 0.0, Float32(1.0), x * LOG2_E) for x in softmax_scale]
            if num_tiles > 0:
                self.main_loop(pipe, scalars, scaled, visible, sQ, used, scale, sums, lane)
                used += num_tiles
            hopper.named_barrier(1 + warpgroup, 128)
            row = warpgroup * WARPGROUP_ROWS
            if cutlass.const_expr(self.packs):  # as if the warp's rows followed those of the warps before it
                query, head = self.rows_of_warp(work.pack_shift, warpgroup, warp)
                row = query - 16 * warp
                work = work._replace(head=work.head + head)
            at_out = OutputRows(block=work.out_block, first_row=work.out_row + row, head=work.head)
            rows = work.rows - row
            if work.partial < 0:
                at_lane = lane
                if cutlass.const_expr(self.codes):
                    at_lane = ptx.opaque(lane)  # addresses are computed here, and take no registers in the main loop
                self.epilogue(tensors, scalars, work.v_scale, sums, scale, sQ, rows, at_out, warp, at_lane)
            else:
                self.store_partial(tensors, work, sums, scale, row + 16 * warp, lane)
            if cutlass.const_expr(self.query_boxes):
                hopper.fence_proxy_async()  # the epilogue's writes are ahead of the next copies by TMA
            cute.arch.sync_warp()
            self.release(pipe.queries_empty, buffer, lane)
            works += 1
            buffer = works % self.query_buffers
            hopper.mbarrier_wait(pipe.works_full + 8 * buffer, works // self.query_buffers & 1)
            num_tiles = Int32(ptx.load_shared(pipe.works + buffer * WORK_BYTES, 1)[0])
            num_tiles = cute.arch.make_warp_uniform(num_tiles)
        if warpgroup == 0:
            self.take_turn(warpgroup)  # which the last warpgroup has passed on

    @cute.jit
    def normalise(
        self, tensors, scalars, v_scale, sums: Sums, scale, shared: Int32, rows, at_out: OutputRows, warp, lane
    ):
        """Both rows of a lane at once, as they are a chain each; the LSE last, as nothing waits for it."""
        sink = self.sink_of(tensors, scalars, at_out.head)
        found = []
        for r in cutlass.range_constexpr(2):
            found.append(self.totals_of(scalars, sums.rMax[r], sums.rSum[r], scale[r], sink))
        for r in cutlass.range_constexpr(2):
            _, total, share = found[r]
            factor = cutlass.select_(total == 0.0, Float32(0.0), v_scale * (share * ptx.rcp_approx(total)))
            self.store_row(sums.rOut, r, factor, shared, lane)
        for r in cutlass.range_constexpr(2):
            base, total, _ = found[r]
            row = warp * self.warp_rows + lane // 4 + 8 * r
            to_lse = lane % 4 == 0 and row < rows
            self.store_lse(tensors, base, total, to_lse, at_out.block, at_out.head, at_out.first_row + row)

    @cute.jit
    def store_partial(self, tensors, work: Work, sums: Sums, scale, first_row, lane):
        """Store the normalised rows of a split in float32, and their LSE."""
        rOut, rMax, rSum = sums
        mQ = tensors.mQ
        g, t = lane // 4, lane % 4
        for r in cutlass.range_constexpr(2):
            total = rSum[r]
            total += cute.arch.shuffle_sync_bfly(total, 1)
            total += cute.arch.shuffle_sync_bfly(total, 2)
            base = self.log2_unit(rMax[r], scale[r])
            factor = cutlass.select_(total == 0.0, Float32(0.0), work.v_scale / total)
            row = first_row + g + 8 * r
            at = (Int64(work.partial) + row) * mQ.shape[2] + work.head
            to = tensors.mPartialOut.iterator.toint() + 4 * at * mQ.shape[3]
            if row < work.rows:
                if t == 0:
                    tensors.mPartialLse[at] = (base + ptx.log2_approx(total)) * (1.0 / LOG2_E)
                self.store_partial_row(to, rOut, r, factor, mQ.shape[3], t)

    @cute.jit
    def store_partial_row(self, to: Int64, rOut, r: cutlass.Constexpr, factor, head_dim, t):
        for n in cutlass.range_constexpr(self.head_dim // 8):
            if 8 * n < head_dim:
                pair = [ptx.float_as_int(rOut[4 * n + 2 * r + e] * factor) for e in range(2)]
                ptx.store_global(to + 8 * t + 32 * n, pair)

    @cute.jit
    def prepare_queries(self, work: Work, sQ: Int32, warpgroup, warp, lane):
        """Make the loaded queries of a warpgroup operands; the softmax scales of a thread's rows g and g + 8."""
        softmax_scale = [work.softmax_scale] * 2
        if cutlass.const_expr(self.query_type is not self.product_type):
            softmax_scale = self.queries_to_f16(work, sQ, warpgroup, warp, lane)
        else:
            self.flip_signs(sQ, work.query_signs, warpgroup)
            if cutlass.const_expr(not self.query_boxes):
                hopper.fence_proxy_async()
        return softmax_scale

    @cute.jit
    def queries_to_f16(self, work: Work, sQ: Int32, warpgroup, warp, lane):
        """Convert bf16 queries to f16, each row times a power of two; the softmax scales without it.

        Exact but for elements below 2^-31 of the largest of their row. Two lanes convert a row, half of it each.
        """
        units = cutlass.const_expr(self.units // 2)
        row, first = 16 * warp + lane % 16, lane // 16 * units
        largest = Uint32(0)  # of the elements' magnitudes, as integers
        for i in cutlass.range_constexpr(units):
            for word in ptx.load_shared(sQ + self.place_of(WARPGROUP_ROWS, row, first + i), 4):
                largest = ptx.packed("max.u16x2", largest, word & 0x7FFF7FFF)
        largest = ptx.packed("max.u16x2", largest, cute.arch.shuffle_sync_bfly(largest, 16))
        exponent = Int32(ptx.packed("max.u16x2", largest, largest >> 16) & 0xFFFF) >> 7  # biased by 127
        power = cutlass.min(254 + HALF_EXPONENT - exponent, 253)  # biased too, as is that of the inverse: 254 - power
        factor = ptx.int_as_float((power << 23) ^ Int32(work.query_signs & 0x80000000))
        for i in cutlass.range_constexpr(units):
            to = sQ + self.place_of(WARPGROUP_ROWS, row, first + i)
            words = []
            for word in ptx.load_shared(to, 4):
                low, high = ptx.unpack_f32x2(word, "bf16")
                words.append(ptx.pack_f32x2(low * factor, high * factor, "f16"))
            ptx.store_shared(to, words)
        hopper.fence_proxy_async()
        hopper.named_barrier(1 + warpgroup, 128)
        scales = []
        for r in cutlass.range_constexpr(2):
            inverse = ptx.int_as_float((254 - cute.arch.shuffle_sync(power, lane // 4 + 8 * r)) << 23)
            scale = ptx.fmin(ptx.fmax(work.softmax_scale * inverse, Float32(MIN_ROW_SCALE)), Float32(MAX_ROW_SCALE))
            scales.append(scale)
        return scales

    @cute.jit
    def flip_signs(self, sQ: Int32, signs: Uint32, warpgroup):
        """Negate the queries of a warpgroup where the scale is negative."""
        thread = cute.arch.thread_idx()[0] % 128
        for _ in cutlass.range(once_if(signs != 0), unroll=1):
            for i in cutlass.range_constexpr(self.query_bytes // (16 * 128)):
                to = sQ + 16 * (thread + 128 * i)
                ptx.store_shared(to, [word ^ signs for word in ptx.load_shared(to, 4)])
            hopper.fence_proxy_async()
            hopper.named_barrier(1 + warpgroup, 128)

    @cute.jit
    def main_loop(self, pipe: Pipe, scalars, work: Work, visible: Visible, sQ, used, scale, sums: Sums, lane):
        """Add the tiles of a work item to sums: S of tile n is computed together with P V of tile n - 1.

        What a thread computes for one tile is a chain, about as long as the products. So nothing is in it that can be
        known earlier (``rare``) or fits into the gaps of the exponentials (pack).
        """
        rOut = sums.rOut
        rScore = cute.make_rmem_tensor(self.key_tile // 2, Float32)
        rP = cute.make_rmem_tensor(self.key_tile // 4, Uint32)
        rFactor = cute.make_rmem_tensor(2, Float32)
        warpgroup = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128) - 1
        stage, parity = used % self.num_stages, used // self.num_stages & 1
        hopper.mbarrier_wait(pipe.keys_full + 8 * stage, parity)
        self.fence_copies()
        self.start_scores(sQ, pipe.keys + stage * self.tile_bytes, rScore)
        tile = self.tile_at(work, Int32(0))
        hidden, rare = self.changes_of(pipe, scalars, visible, tile, used, lane)
        hopper.wgmma_wait(0)
        self.order(rScore)
        self.release(pipe.keys_empty, stage, lane)
        for zero in cutlass.range(hidden, unroll=1):
            self.hide_last(rScore, visible, scalars, tile * self.key_tile, lane, zero)
        for _ in cutlass.range(rare, unroll=1):
            self.change_scores(pipe, scalars, visible, work, rScore, tile, used, lane)
        self.update_base(rScore, sums, rFactor, scale)
        self.weigh(rScore, sums, rFactor, scale)
        self.pack(rScore, rP)
        n = Int32(1)
        while n < work.num_tiles:
            last_stage, last_parity = stage, parity
            at = used + n
            stage, parity = at % self.num_stages, at // self.num_stages & 1
            hopper.mbarrier_wait(pipe.keys_full + 8 * stage, parity)
            self.fence_copies()
            self.take_turn(warpgroup)
            self.start_scores(sQ, pipe.keys + stage * self.tile_bytes, rScore)
            tile = self.tile_at(work, n)
            hidden, rare = self.changes_of(pipe, scalars, visible, tile, at, lane)
            hopper.mbarrier_wait(pipe.values_full + 8 * last_stage, last_parity)
            self.fence_copies()
            self.start_output(pipe.values + last_stage * self.tile_bytes, rP, rOut)
            self.pass_turn(warpgroup)
            hopper.wgmma_wait(1)
            self.order(rScore)
            self.release(pipe.keys_empty, stage, lane)
            for zero in cutlass.range(hidden, unroll=1):
                self.hide_last(rScore, visible, scalars, tile * self.key_tile, lane, zero)
            for _ in cutlass.range(rare, unroll=1):
                self.change_scores(pipe, scalars, visible, work, rScore, tile, at, lane)
            if cutlass.const_expr(self.late_values):
                for _ in cutlass.range(ptx.opaque(Int32(1)), unroll=1):  # keeps it ahead of the wait
                    self.update_base(rScore, sums, rFactor, scale)
            else:
                self.update_base(rScore, sums, rFactor, scale)
            hopper.wgmma_wait(0)
            self.order(rOut)
            self.release(pipe.values_empty, last_stage, lane)
            if cutlass.const_expr(self.head_dim > 128):
                self.rescale(rOut, rFactor)
            self.weigh(rScore, sums, rFactor, scale)
            self.pack(rScore, rP)
            if cutlass.const_expr(self.head_dim <= 128):
                self.rescale(rOut, rFactor)
            n += 1
        hopper.mbarrier_wait(pipe.values_full + 8 * stage, parity)
        self.fence_copies()
        self.start_output(pipe.values + stage * self.tile_bytes, rP, rOut)
        hopper.wgmma_wait(0)
        self.order(rOut)
        self.release(pipe.values_empty, stage, lane)

    @cute.jit
    def take_turn(self, warpgroup):
        """Wait until the warpgroup before this one has started its products."""
        if cutlass.const_expr(self.turns):
            hopper.named_barrier(TURN_BARRIER + warpgroup, 256)

    @cute.jit
    def pass_turn(self, warpgroup):
        """Let the next warpgroup start its products."""
        if cutlass.const_expr(self.turns):
            following = cutlass.select_(warpgroup + 1 < self.consumers, warpgroup + 1, Int32(0))
            hopper.named_barrier_arrive(TURN_BARRIER + following, 256)

    @cute.jit
    def changes_of(self, pipe: Pipe, scalars, visible: Visible, tile, at, lane):
        """What the scores of a tile need, as trip counts of two loops: hide_last, change_scores, or neither.

        It needs the full keys, not their scores. The votes keep the compiler from computing it behind the scores.
        """
        each = cutlass.const_expr(self.loaded_rows)
        first_key = tile * self.key_tile
        loader = lane % self.warps
        exists = ptx.load_shared(pipe.exists + 4 * self.warps * (at % (2 * self.num_stages)) + 4 * loader, 1)[0]
        held = bits_below(visible.held - first_key - each * loader)
        unseen = first_key < visible.first or first_key + self.key_tile > visible.last
        unseen = unseen and first_key + self.key_tile > visible.prefix
        changed = cute.arch.vote_any_sync(exists != self.all_rows or unseen or scalars.softcap > 0.0)
        gaps = exists != (held & self.all_rows) or visible.prefix > 0
        rare = cute.arch.vote_any_sync(gaps or scalars.softcap > 0.0 or scalars.window_left >= 0)
        return once_if(changed and not rare), once_if(changed and rare)

    @cute.jit
    def hide_last(self, rScore, visible: Visible, scalars, first_key, lane, zero):
        """Set the scores of keys behind the last that a row sees to -inf. zero: as in hide()."""
        g, t = lane // 4, lane % 4
        for r in cutlass.range_constexpr(2):
            _, last = scores.window(visible.position + zero + (g + 8 * r), scalars, visible.held)
            last = last - first_key - 2 * t
            for n in cutlass.range_constexpr(self.key_tile // 8):
                for e in cutlass.range_constexpr(2):
                    i = cutlass.const_expr(4 * n + 2 * r + e)
                    rScore[i] = cutlass.select_(last > 8 * n + e, rScore[i], -Float32.inf)

    @cute.jit
    def change_scores(self, pipe: Pipe, scalars, visible: Visible, work: Work, rScore, tile, at, lane):
        """Cap the scores of a tile, and hide those of keys that a row does not see."""
        self.cap(rScore, scalars.softcap, work.softmax_scale)
        exists = pipe.exists + 4 * self.warps * (at % (2 * self.num_stages))
        self.mask(rScore, exists, visible, scalars, tile * self.key_tile, lane)

    @cute.jit
    def fence_copies(self):
        """Make the producer's cp.async copies visible to wgmma. Others are by TMA, or fenced by the producer."""
        if cutlass.const_expr(not self.codes and not self.boxes):
            hopper.fence_proxy_async()

    @cute.jit
    def release(self, barriers: Int32, stage, lane):
        if lane == 0:
            hopper.mbarrier_arrive(barriers + 8 * stage)

    @cute.jit
    def order(self, registers):
        """Keep the compiler from moving uses of these registers above this point."""
        count = cutlass.const_expr(cute.size(registers))
        found = hopper.ordered([registers[i] for i in range(count)])
        for i in cutlass.range_constexpr(count):
            registers[i] = found[i]

    @cute.jit
    def start_scores(self, sQ: Int32, sK: Int32, rScore):
        kind = cutlass.const_expr(numeric.ptx_name(self.product_type))
        count = cutlass.const_expr(self.key_tile // 2)
        of_queries = hopper.descriptor(sQ, self.block_bytes, 0)
        of_keys = hopper.descriptor(sK, self.block_bytes, 0)
        steps = cutlass.const_expr(self.block_bytes // 32)  # of a column block
        hopper.wgmma_fence()
        found = None
        for k in cutlass.range_constexpr(self.head_dim // 16):
            a = of_queries + (k // steps * (WARPGROUP_ROWS * self.block_bytes) + k % steps * 32) // 16
            b = of_keys + (k // steps * (self.key_tile * self.block_bytes) + k % steps * 32) // 16
            found = hopper.wgmma(found, count, a, b, kind)
        hopper.wgmma_commit()
        for i in cutlass.range_constexpr(count):
            rScore[i] = found[i]

    @cute.jit
    def start_output(self, sV: Int32, rP, rOut):
        kind = cutlass.const_expr(numeric.ptx_name(self.product_type))
        count = cutlass.const_expr(self.head_dim // 2)
        of_values = hopper.descriptor(sV, self.block_bytes, self.key_tile * self.block_bytes)
        hopper.wgmma_fence()
        found = [rOut[i] for i in range(count)]
        for k in cutlass.range_constexpr(self.key_tile // 16):
            a = [rP[4 * k + i] for i in range(4)]
            found = hopper.wgmma_transposed(found, count, a, of_values + k * self.block_bytes, kind)
        hopper.wgmma_commit()
        for i in cutlass.range_constexpr(count):
            rOut[i] = found[i]

    @cute.jit
    def pack(self, rScore, rP):
        kind = cutlass.const_expr(numeric.ptx_name(self.product_type))
        for i in cutlass.range_constexpr(self.key_tile // 4):
            rP[i] = ptx.pack_f32x2(rScore[2 * i], rScore[2 * i + 1], kind)

    @cute.jit
    def softmax(
        self, pipe: Pipe, scalars, visible: Visible, work: Work, rScore, sums: Sums, rFactor, scale, tile, at, lane
    ):
        """Turn scores into weights exp2(scale (score - base)); rFactor rescales the previous sums and results.

        tile: of keys; at: how many tiles the warpgroup has visited before it.
        """
        self.rebase(pipe, scalars, visible, work, rScore, sums, rFactor, scale, tile, at, lane)
        self.weigh(rScore, sums, rFactor, scale)

    @cute.jit
    def rebase(
        self, pipe: Pipe, scalars, visible: Visible, work: Work, rScore, sums: Sums, rFactor, scale, tile, at, lane
    ):
        """The first half of softmax: mask scores, and update the base."""
        self.change_scores(pipe, scalars, visible, work, rScore, tile, at, lane)
        self.update_base(rScore, sums, rFactor, scale)

    @cute.jit
    def update_base(self, rScore, sums: Sums, rFactor, scale):
        """Raise the base of the weights to the largest score; rFactor, of the sums so far."""
        rMax = sums.rMax
        for r in cutlass.range_constexpr(2):
            some = [rMax[r], rMax[r]]
            for n in cutlass.range_constexpr(self.key_tile // 8):
                i = cutlass.const_expr(4 * n + 2 * r)
                some[n % 2] = ptx.fmax(some[n % 2], ptx.fmax(rScore[i], rScore[i + 1]))
            highest = ptx.fmax(some[0], some[1])
            highest = ptx.fmax(highest, cute.arch.shuffle_sync_bfly(highest, 1))
            highest = ptx.fmax(highest, cute.arch.shuffle_sync_bfly(highest, 2))
            exceed = (highest - rMax[r]) * scale[r] > self.rescale_slack
            factor = ptx.exp2_approx((rMax[r] - highest) * scale[r])
            rFactor[r] = cutlass.select_(exceed, factor, Float32(1.0))
            rMax[r] = cutlass.select_(exceed, highest, rMax[r])

    @cute.jit
    def weigh(self, rScore, sums: Sums, rFactor, scale):
        """The second half: scores become weights, and are added to the sums."""
        rMax, rSum = sums.rMax, sums.rSum
        for r in cutlass.range_constexpr(2):
            base = -self.log2_unit(rMax[r], scale[r])
            totals = [rSum[r] * rFactor[r], Float32(0.0)]
            for n in cutlass.range_constexpr(self.key_tile // 8):
                for e in cutlass.range_constexpr(2):
                    i = cutlass.const_expr(4 * n + 2 * r + e)
                    weight = ptx.exp2_approx(ptx.fma(rScore[i], scale[r], base))
                    totals[e] += weight
                    rScore[i] = weight
            rSum[r] = totals[0] + totals[1]

    @cute.jit
    def rescale(self, rOut, rFactor):
        needed = cute.arch.vote_any_sync(rFactor[0] != 1.0 or rFactor[1] != 1.0)
        for _ in cutlass.range(once_if(needed), unroll=1):
            for i in cutlass.range_constexpr(self.head_dim // 2):
                rOut[i] *= rFactor[i // 2 % 2]
