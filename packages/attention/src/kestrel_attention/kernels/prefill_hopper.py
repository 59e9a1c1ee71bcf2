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

from kestrel_runtime.cute_dsl import hopper, pdl, ptx

from . import scores
from .constants import WARPGROUP_ROWS
from .parameters import PrefillScalars, PrefillTensors
from .prefill_base import once_if
from .prefill_hopper_loop import HopperLoop
from .prefill_hopper_producer import PRODUCERS, QUERY_BOX_ROWS
from .prefill_types import WORK_BYTES, WORK_TYPES, OutputRows, Pipe, Results, Sums, Visible, Work
from .scores import LOG2_E

MIN_ROW_SCALE, MAX_ROW_SCALE = 2.0**-126, 2.0**125  # with 0 or infinity, or a reciprocal of 0, scores would be NaN
HALF_EXPONENT = 14  # of the largest element of a row of queries in f16


@dataclass(frozen=True)
class PrefillHopper(HopperLoop):
    """One compiled variant."""

    @property
    def weight_exponent(self) -> float:
        return 7.0 if self.codes else 0.0  # with rescale_slack f16 holds 2^15, and small weights with more bits

    @property
    def reads_scales(self) -> bool:
        return self.codes or (self.boxes and self.consumers < 3)

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
        count *= self.shares
        maps = [None] * 3
        if cutlass.const_expr(self.query_boxes):
            maps[0] = self.tensor_map(tensors.mQ, self.block_bytes // self.element_bytes, QUERY_BOX_ROWS)
        if cutlass.const_expr(self.boxes):
            maps[1:] = [
                self.tensor_map(x, self.box_bytes // self.stored_bytes, self.box_rows) for x in (tensors.mK, tensors.mV)
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
        self.run_roles(tensors, scalars, pipe, row_blocks, batch, first, step, count)

    @cute.jit
    def run_roles(self, tensors, scalars, pipe, *works):
        """Become the producer warpgroup, or a consumer, once barriers are there. works: which the thread block has."""
        cute.arch.sync_threads()
        warpgroup = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 128)
        if warpgroup == 0:
            hopper.registers_down(self.producer_registers)
            self.produce(tensors, scalars, pipe, *works)
        else:
            hopper.registers_up(self.consumer_registers)
            if cutlass.const_expr(self.pdl):
                pdl.wait()
                pdl.trigger()
            self.consume(tensors, scalars, pipe, warpgroup - 1, *works)

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
        if cutlass.const_expr(self.keeps_addresses):
            shared, works = (cute.arch.make_warp_uniform(ptx.opaque(x)) for x in (shared, works))
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
            hopper.mbarrier_init(pipe.keys_empty + 8 * i, 4 * self.key_readers)
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
    def consume(self, tensors, scalars, pipe: Pipe, warpgroup, *_):
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid % 128 // 32)
        rOut = cute.make_rmem_tensor(self.output_dims // 2, Float32)
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
            if cutlass.const_expr(self.early_queries):
                if num_tiles <= 0:
                    self.leave_queries(pipe, lane)
            else:
                self.finish_queries(warpgroup)
            row = warpgroup * WARPGROUP_ROWS
            if cutlass.const_expr(self.packs):  # as if the warp's rows followed those of the warps before it
                query, head = self.rows_of_warp(work.pack_shift, warpgroup, warp)
                row = query - 16 * warp
                work = work._replace(head=work.head + head)
            at = OutputRows(block=work.out_block, first_row=work.out_row + row, head=work.head)
            results = Results(sums, scale, work.v_scale, at, work.rows - row)
            if work.partial < 0:
                at_lane = lane
                if cutlass.const_expr(self.codes):
                    at_lane = ptx.opaque(lane)  # addresses are computed here, and take no registers in the main loop
                self.finish(tensors, scalars, results, sQ, pipe.queries_empty + 8 * buffer, warp, at_lane)
            else:
                self.store_partial(tensors, work, sums, scale, row + 16 * warp, lane)
                if cutlass.const_expr(not self.early_queries):
                    cute.arch.sync_warp()
                    self.release(pipe.queries_empty, buffer, lane)
            works += 1
            buffer = works % self.query_buffers
            hopper.mbarrier_wait(pipe.works_full + 8 * buffer, works // self.query_buffers & 1)
            num_tiles = Int32(ptx.load_shared(pipe.works + buffer * WORK_BYTES, 1)[0])
            num_tiles = cute.arch.make_warp_uniform(num_tiles)
        if warpgroup == 0:
            self.take_turn(warpgroup)  # which the last warpgroup has passed on

    def first_dim(self):
        """Of the warp's results."""
        return Int32(0)

    @cute.jit
    def finish_queries(self, warpgroup):
        """Wait until all warps that share queries have read them: results are stored through their buffer."""
        hopper.named_barrier(1 + warpgroup, 128)

    @cute.jit
    def totals_of_rows(self, tensors, scalars, results: Results):
        """totals_of both rows of a lane, at once, as they are a chain each."""
        sink = self.sink_of(tensors, scalars, results.at.head)
        found = []
        for r in cutlass.range_constexpr(2):
            found.append(self.totals_of(scalars, results, r, sink))
        return found

    def factor_of(self, results: Results, total, share):
        """Of a row, which makes results of its sums."""
        return cutlass.select_(total == 0.0, Float32(0.0), results.v_scale * (share * ptx.rcp_approx(total)))

    @cute.jit
    def normalise(self, tensors, scalars, results: Results, shared: Int32, warp, lane):
        """The LSE last, as nothing waits for it."""
        found = self.totals_of_rows(tensors, scalars, results)
        for r in cutlass.range_constexpr(2):
            _, total, share = found[r]
            self.store_row(results.sums.rOut, r, self.factor_of(results, total, share), shared, lane)
        for r in cutlass.range_constexpr(2):
            base, total, _ = found[r]
            row = warp * self.warp_rows + lane // 4 + 8 * r
            to_lse = lane % 4 == 0 and row < results.rows
            self.store_lse(tensors, results.at, results.at.first_row + row, base, total, to_lse)

    @cute.jit
    def finish(self, tensors, scalars, results: Results, sQ: Int32, empty: Int32, warp, lane):
        """As epilogue, through the memory of queries: released (``empty``) when the rows have come back from it."""
        mOut, at = tensors.mOut, results.at
        shared = sQ + warp * (self.warp_rows * 2 * self.output_dims)
        self.normalise(tensors, scalars, results, shared, warp, lane)
        cute.arch.sync_warp()
        vectors = [self.load_vector(shared, *self.place_of_vector(i, lane)) for i in range(self.vectors_of_lane)]
        if cutlass.const_expr(self.query_boxes):
            hopper.fence_proxy_async()  # these accesses are ahead of the next copies by TMA
        cute.arch.sync_warp()
        self.release(empty, 0, lane)
        head = self.output_head(mOut, at)
        for i in cutlass.range_constexpr(self.vectors_of_lane):
            warp_row, unit = self.place_of_vector(i, lane)
            row = warp * self.warp_rows + warp_row
            if row < results.rows and 8 * unit < mOut.shape[3]:
                to = head + Int64(at.first_row + row) * mOut.stride[1] + 8 * unit
                ptx.store_global(mOut.iterator.toint() + 2 * to, vectors[i])

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
        first = self.first_dim()
        for n in cutlass.range_constexpr(self.output_dims // 8):
            if first + 8 * n < head_dim:
                pair = [ptx.float_as_int(rOut[4 * n + 2 * r + e] * factor) for e in range(2)]
                ptx.store_global(to + 4 * first + 8 * t + 32 * n, pair)

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
        signs = work.query_signs  # its lowest bit: the factor is NaN
        factor = ptx.int_as_float(((power << 23) ^ Int32(signs & 0x80000000)) | -Int32(signs & 1))
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
        """Negate the queries of a warpgroup where the scale is negative; NaN where it is."""
        thread = cute.arch.thread_idx()[0] % 128
        for _ in cutlass.range(once_if(signs != 0), unroll=1):
            for i in cutlass.range_constexpr(self.query_bytes // (16 * 128)):
                to = sQ + 16 * (thread + 128 * i)
                ptx.store_shared(to, self.signed(ptx.load_shared(to, 4), signs))
            hopper.fence_proxy_async()
            hopper.named_barrier(1 + warpgroup, 128)
