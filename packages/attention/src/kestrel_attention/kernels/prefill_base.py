"""Shared by both prefill kernels: the queries and keys of a thread block, masking, and the epilogue.

A warp holds 16 queries per row tile. Element 4 n + 2 r + e of its lane 4 g + t is that of row g + 8 r and column
8 n + 2 t + e. Columns are keys (scores, weights) or dims (results). Both mma.sync and wgmma have this layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from kestrel_runtime.cute_dsl import arguments, numeric, parameters, ptx

from . import scores
from .constants import FIRST_WORK
from .parameters import PrefillScalars, PrefillTensors
from .prefill_types import Keys, Located, OutputRows, Place, Results, Scales, Visible, Work
from .scores import LOG2_E, RESCALE_SLACK

SIGN_BITS = 0x80008000  # of two queries of 16 bits
ALL_NAN = 0x7FFF7FFF  # makes NaN of queries, so that all their scores are NaN but those of hidden keys


@dataclass(frozen=True)
class PrefillBase:
    """The compile-time parameters of both kernels."""

    dtype: type[cutlass.Numeric]  # BFloat16 or Float16
    head_dim: int  # that is computed, a multiple of 16; a smaller one is padded
    key_tile: int  # keys of a tile
    warps: int  # that load a tile of keys
    row_tiles: int  # of 16 rows, of a warp
    num_stages: int
    pdl: bool
    codes: bool  # keys and values are FP8 codes; they become the dtype for its matrix products

    # -- sizes ----------------------------------------------------------------------------------------------------

    @property
    def warp_rows(self) -> int:
        return 16 * self.row_tiles

    @property
    def output_dims(self) -> int:
        """Dims of the results that a warp computes."""
        return self.head_dim

    @property
    def element_bytes(self) -> int:
        """Of the operands of the matrix products."""
        return 2

    @property
    def unit_dims(self) -> int:
        return 16 // self.element_bytes

    @property
    def units(self) -> int:
        """Vectors of 16 bytes in a row."""
        return self.head_dim // self.unit_dims

    @property
    def row_bytes(self) -> int:
        return self.element_bytes * self.head_dim

    @property
    def query_type(self) -> type[cutlass.Numeric]:
        """Of queries in memory."""
        return self.dtype

    @property
    def rescale_slack(self) -> float:
        """A weight may exceed its largest value so far by so many powers of two before the sums are rescaled."""
        return RESCALE_SLACK

    @property
    def reads_scales(self) -> bool:
        """Whether keys and values may have scales: FP8 codes, also those that dequantise.py has converted."""
        return self.codes

    @property
    def weight_exponent(self) -> float:
        """Weights are 2 to this times exp2(scale (score - base))."""
        return 0.0

    @property
    def loaded_rows(self) -> int:
        """Rows of a key tile that one warp loads."""
        return self.key_tile // self.warps

    @property
    def tile_bytes(self) -> int:
        return self.key_tile * self.row_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of an element of keys and values in memory."""
        return 1 if self.codes else 2

    @property
    def stored_units(self) -> int:
        """Vectors of 16 bytes in a row of keys or values, in memory and in a stage."""
        return self.units // 2 if self.codes else self.units

    @property
    def swizzle_mask(self) -> int:
        """The bits of a vector's index that the swizzle changes, so that rows read together hit all 32 banks."""
        return {0: 7, 4: 3}.get(self.units % 8, 1)

    @property
    def capped_at_once(self) -> int:
        """Scores of a thread, at most, to which the soft cap is applied at once."""
        return 8

    # -- host -----------------------------------------------------------------------------------------------------

    def arguments(self) -> tuple[Any, ...]:
        """Arguments to compile with: PrefillTensors, PrefillScalars, and the stream."""
        head_dim, heads, kv_heads = (cute.sym_int() for _ in range(3))
        blocks, queries, kv_blocks, page = (cute.sym_int() for _ in range(4))
        stored, unit = (cutlass.Uint8, 16) if self.codes else (self.dtype, 8)
        mK, mV = (arguments.strided(stored, kv_blocks, page, kv_heads, head_dim, unit=unit) for _ in range(2))
        starts, lengths, prefix = ([arguments.any_strides(Int32, cute.sym_int()) for _ in range(2)] for _ in range(3))
        tensors = PrefillTensors(
            mQ=arguments.strided(self.query_type, blocks, queries, heads, head_dim, unit=self.unit_dims),
            mK=mK,
            mV=mV,
            mStartQ=starts[0],
            mStartK=starts[1],
            mLengths=lengths[0],
            mTable=arguments.any_strides(Int32, cute.sym_int(), cute.sym_int()),
            mPrefix=prefix[0],
            mSinks=arguments.any_strides(Float32, cute.sym_int()),
            mQScale=arguments.any_strides(Float32, cute.sym_int()),
            mKScale=arguments.any_strides(Float32, cute.sym_int()),
            mVScale=arguments.any_strides(Float32, cute.sym_int()),
            mOut=arguments.strided(self.dtype, blocks, queries, heads, head_dim, unit=8),
            mLse=arguments.contiguous(Float32, blocks, heads, queries, align=None),
            mPartialOut=arguments.any_strides(Float32, cute.sym_int64()),
            mPartialLse=arguments.any_strides(Float32, cute.sym_int()),
            mNumSplits=arguments.any_strides(Int32, cute.sym_int()),
            mWorks=arguments.contiguous(Int32, cute.sym_int(), align=None),
        )
        return (*tensors, *parameters.compile_time(PrefillScalars), Int32(1), arguments.torch_stream())

    # -- the work of a thread block ---------------------------------------------------------------------------------

    @cute.jit
    def keys_of(self, tensors: PrefillTensors, scalars: PrefillScalars, sequence, kv_head):
        """The keys of a sequence, and the position behind the last."""
        keys = self.places_of_keys(tensors, scalars, sequence, kv_head)
        return self.with_lengths(tensors, scalars, sequence, keys)

    @cute.jit
    def places_of_keys(self, tensors: PrefillTensors, scalars: PrefillScalars, sequence, kv_head):
        """What of them the host knows: as if all sequences had the most keys."""
        mQ, mK, mV = tensors.mQ, tensors.mK, tensors.mV
        element = cutlass.const_expr(self.stored_bytes)
        strides = [Uint32(mX.stride[i] // (16 // element)) for mX in (mK, mV) for i in range(2)]
        head_bytes = element * Int64(kv_head)
        return Keys(
            table=tensors.mTable.iterator.toint() + 4 * Int64(sequence) * tensors.mTable.stride[0],
            table_stride=tensors.mTable.stride[1],
            table_width=tensors.mTable.shape[1],
            has_block_table=scalars.has_block_table,
            block=sequence,
            first_slot=Int32(0),
            num_blocks=mK.shape[0],
            page_size=mK.shape[1],
            multiplier=scalars.page_multiplier,
            shift=scalars.page_shift,
            held=scalars.max_keys,
            strides=strides,
            key_base=mK.iterator.toint() + head_bytes * mK.stride[2],
            value_base=mV.iterator.toint() + head_bytes * mV.stride[2],
            head_dim=mQ.shape[3],
        )

    @cute.jit
    def with_lengths(self, tensors: PrefillTensors, scalars: PrefillScalars, sequence, keys: Keys):
        """The keys by what is known on the device, and the position behind the last."""
        length = scalars.max_keys
        block, first_slot, held = sequence, Int32(0), scalars.max_keys
        if scalars.key_starts != 0:
            start = tensors.mStartK[sequence]
            length = tensors.mStartK[sequence + 1] - start
            if scalars.key_starts == 1:
                block, first_slot = Int32(0), start
                held = cutlass.min(held, keys.page_size - start)
        if scalars.has_lengths != 0:
            given = tensors.mLengths[sequence]
            if scalars.key_starts == 1:
                given = cutlass.min(given, length)
            appended = scalars.appended
            length = cutlass.select_(given < 0, given, cutlass.min(given, 0x7FFFFFFF - appended) + appended)
        held = cutlass.max(cutlass.min(held, length), 0)
        if first_slot < 0:
            held = Int32(0)
        return keys._replace(block=block, first_slot=first_slot, held=held), length

    @cute.jit
    def listed(self, works: Int64, scalars: PrefillScalars, work, head, pack_shift):
        """The coordinates of a listed work and a head of its section. works: address of the list."""
        at = 4 * FIRST_WORK + 8 * Int64(cutlass.min(work, scalars.listed_works - 1))
        words = ptx.load_global(works + at, 2)
        head += Int32(words[0] >> 16) * scalars.section_heads
        return Place(Int32(words[0] & 0xFFFF), head, Int32(words[1] & 0xFFFFFF), Int32(words[1] >> 24), pack_shift)

    @cute.jit
    def work_of(self, tensors, scalars, sequence, head, kv_head, first_row, block_rows, keys: Keys, length):
        """The work of a block of rows of a sequence, and the address of its first row."""
        mQ = tensors.mQ
        query_block, first_query, num_queries = sequence, Int32(0), scalars.max_queries
        if scalars.packed_queries != 0:
            query_block = Int32(0)
            first_query = tensors.mStartQ[sequence]
            num_queries = tensors.mStartQ[sequence + 1] - first_query
        num_rows = cutlass.min(num_queries, cutlass.min(scalars.max_queries, mQ.shape[1] - first_query))
        if first_query < 0:
            num_rows = Int32(0)
        held = keys.held
        prefix = scalars.prefix_len
        if scalars.has_prefix_lens != 0:
            prefix = tensors.mPrefix[sequence]
        prefix = cutlass.max(cutlass.min(prefix, held), 0)
        query = Int64(query_block) * mQ.stride[0] + Int64(first_query + first_row) * mQ.stride[1]
        query = mQ.iterator.toint() + self.element_bytes * (query + Int64(head) * mQ.stride[2])
        rows = cutlass.min(num_rows - first_row, block_rows)
        position = length - num_queries + first_row
        start, _ = scores.window(position, scalars, held)
        _, end = scores.window(position + rows - 1, scalars, held)
        prefix_tiles = (prefix + self.key_tile - 1) // self.key_tile
        start_tile = cutlass.max(start // self.key_tile, prefix_tiles)
        num_tiles = prefix_tiles + cutlass.max((end + self.key_tile - 1) // self.key_tile - start_tile, 0)
        of_head = self.scales(tensors, scalars, head, kv_head)
        work = Work(
            num_tiles=num_tiles,
            first_tile=Int32(0),
            partial=Int32(-1),
            prefix_tiles=prefix_tiles,
            gap=start_tile - prefix_tiles,
            rows=rows,
            position=position,
            held=held,
            prefix=prefix,
            out_block=query_block,
            out_row=first_query + first_row,
            head=head,
            softmax_scale=of_head.softmax_scale,
            query_signs=of_head.query_signs,
            v_scale=of_head.v_scale,
            pack_shift=Int32(0),
        )
        return work, query

    @cute.jit
    def tile_at(self, work: Work, n):
        n = n + work.first_tile
        return n + cutlass.select_(n < work.prefix_tiles, Int32(0), work.gap)

    @cute.jit
    def scales(self, tensors: PrefillTensors, scalars: PrefillScalars, head, kv_head):
        """The scales of a head."""
        signs, softmax_scale, v_scale = scalars.query_signs, scalars.softmax_scale, Float32(1.0)
        if cutlass.const_expr(self.reads_scales):
            product = Float32(1.0)
            if scalars.q_scale_heads > 0:
                product *= tensors.mQScale[cutlass.select_(scalars.q_scale_heads > 1, head, Int32(0))]
            if scalars.k_scale_heads > 0:
                product *= tensors.mKScale[cutlass.select_(scalars.k_scale_heads > 1, kv_head, Int32(0))]
            if scalars.v_scale_heads > 0:
                v_scale = tensors.mVScale[cutlass.select_(scalars.v_scale_heads > 1, kv_head, Int32(0))]
            signs = signs ^ cutlass.select_(product < 0.0, Uint32(SIGN_BITS), Uint32(0))
            signs = cutlass.select_(product == product, signs, Uint32(ALL_NAN))
            softmax_scale *= cutlass.select_(product < 0.0, -product, product)
            softmax_scale = ptx.fmin(ptx.fmax(softmax_scale, Float32(2.0**-126)), Float32(2.0**125))
        return Scales(signs, softmax_scale, v_scale)

    def signed(self, words, signs: Uint32) -> list:
        """Pairs of queries of 16 bits, as query_signs says."""
        flipped, set_to_1 = signs & Uint32(SIGN_BITS), signs & Uint32(ALL_NAN)
        return [(word ^ flipped) | set_to_1 for word in words]

    @cute.jit
    def clear_rows(self, tensors: PrefillTensors, first, end, head, tid):
        """Store zeros, and an LSE of -inf, for packed rows first to end - 1 of a head."""
        mOut = tensors.mOut
        row = first
        while row < end:
            address = mOut.iterator.toint() + 2 * (Int64(row) * mOut.stride[1] + Int64(head) * mOut.stride[2])
            if 8 * tid < mOut.shape[3]:
                ptx.store_global(address + 16 * tid, [Uint32(0)] * 4)
            if tid == 0:
                tensors.mLse[0, head, row] = -Float32.inf
            row += 1

    @cute.jit
    def clear_around(self, tensors, scalars, sequence, batch, head, thread):
        """Clear the packed rows between sequences: before the first one, and behind this one."""
        total = tensors.mQ.shape[1]
        first_query = tensors.mStartQ[sequence]
        num_queries = tensors.mStartQ[sequence + 1] - first_query
        num_rows = cutlass.min(num_queries, cutlass.min(scalars.max_queries, total - first_query))
        if first_query < 0:
            num_rows = Int32(0)
        if sequence == 0:
            self.clear_rows(tensors, Int32(0), cutlass.min(first_query, total), head, thread)
        behind = total
        if sequence + 1 < batch:
            behind = cutlass.min(first_query + num_queries, total)
        from_row = cutlass.max(first_query, 0) + cutlass.max(num_rows, 0)
        self.clear_rows(tensors, from_row, behind, head, thread)

    # -- keys -----------------------------------------------------------------------------------------------------

    @cute.jit
    def entry_and_slot(self, keys: Keys, key: Int32):
        """The table entry of a key and its slot in the page; exact for keys below 2^31."""
        entry = quotient(key, keys.multiplier, keys.shift)
        return entry, Uint32(key) - entry * Uint32(keys.page_size)

    @cute.jit
    def look_up(self, rPage, keys: Keys, tile, warp, lane):
        """Start loading the block number of this lane's key of a tile; -1 where there is none."""
        key = tile * self.key_tile + warp * self.loaded_rows + lane % self.loaded_rows
        if keys.has_block_table != 0:
            entry, _ = self.entry_and_slot(keys, key)
            exists = key < keys.held and Int32(entry) < keys.table_width
            rPage[0] = Int32(ptx.load_global_if(exists, keys.table + 4 * Int64(entry) * keys.table_stride, -1))
        else:
            rPage[0] = cutlass.select_(key < keys.held, keys.block, Int32(-1))

    @cute.jit
    def locate(self, keys: Keys, rPage, tile, warp, lane):
        """Where a lane's key of a tile lies, and which of the warp's keys exist."""
        key = tile * self.key_tile + warp * self.loaded_rows + lane % self.loaded_rows
        slot = Uint32(key + keys.first_slot)
        if keys.has_block_table == 1:
            _, slot = self.entry_and_slot(keys, key)
        exists = rPage[0] >= 0 and rPage[0] < keys.num_blocks
        in_order = keys.has_block_table == 2
        block = cutlass.select_(in_order, Uint32(keys.block), cutlass.select_(exists, Uint32(rPage[0]), Uint32(0)))
        slot = cutlass.select_(exists or in_order, slot, Uint32(0))
        all_rows = Uint32((1 << self.loaded_rows) - 1)
        bits = Uint32(cute.arch.vote_ballot_sync(exists)) & all_rows
        below = bits_below(keys.held - tile * self.key_tile - warp * self.loaded_rows) & all_rows
        present = cutlass.select_(in_order, below, bits)
        key_offset = block * keys.strides[0] + slot * keys.strides[1]
        value_offset = block * keys.strides[2] + slot * keys.strides[3]
        return Located(key_offset, value_offset, bits, present, block, slot)

    @cute.jit
    def from_f16(self, pair: Uint32) -> Uint32:
        """Two f16 as the dtype, where it holds them."""
        if cutlass.const_expr(self.dtype is cutlass.Float16):
            return pair
        else:
            low, high = ptx.unpack_f32x2(pair, "f16")
            return ptx.pack_f32x2(low, high, "bf16")

    # -- scores ---------------------------------------------------------------------------------------------------

    @cute.jit
    def cap(self, rScore, softcap: Float32, softmax_scale):
        """Apply the soft cap. softmax_scale: of rows g and g + 8.

        More than 32 scores of a thread rotate, eight per iteration, so that few registers are live at once.
        """
        count = cutlass.const_expr(self.row_tiles * self.key_tile // 2)
        each = cutlass.const_expr(count if count <= self.capped_at_once else 8)
        base2_cap, scale = softcap * LOG2_E, [softmax_scale[r] * LOG2_E for r in range(2)]
        iterations = ptx.opaque(cutlass.select_(softcap > 0.0, Int32(count // each), Int32(0)))
        for _ in cutlass.range(iterations, unroll=1):
            capped = [scores.soft_cap_inline(rScore[i] * scale[i // 2 % 2], base2_cap) for i in range(each)]
            for i in cutlass.range_constexpr(count - each):
                rScore[i] = rScore[i + each]
            for i in cutlass.range_constexpr(each):
                rScore[count - each + i] = capped[i]

    @cute.jit
    def mask(self, rScore, sExists: Int32, visible: Visible, scalars, first_key, lane):
        """Set the scores of keys that do not exist, or that a row does not see, to -inf."""
        exists = self.existing(sExists)
        all_exist = Uint32(0xFFFFFFFF)
        for h in cutlass.range_constexpr(self.key_tile // 32):
            all_exist = all_exist & exists[h]
        unseen = first_key < visible.first or first_key + self.key_tile > visible.last
        unseen = unseen and first_key + self.key_tile > visible.prefix
        for zero in cutlass.range(once_if(unseen or all_exist != 0xFFFFFFFF), unroll=1):
            self.hide(rScore, exists, visible, scalars, first_key, lane, zero)

    @cute.jit
    def existing(self, sExists: Int32):
        """A bit for each key of a tile, in words of 32 keys."""
        words = [ptx.load_shared(sExists + 4 * i, 1)[0] for i in range(self.warps)]
        per_word = cutlass.const_expr(32 // self.loaded_rows)
        exists = []
        for h in cutlass.range_constexpr(self.key_tile // 32):
            word = words[h * per_word]
            for i in cutlass.range_constexpr(per_word - 1):
                word = word | (words[h * per_word + i + 1] << ((i + 1) * self.loaded_rows))
            exists.append(word)
        return exists

    @cute.jit
    def hide(self, rScore, exists, visible: Visible, scalars, first_key, lane, zero):
        """Set hidden scores to -inf. zero: a 0 that is known late, so that nothing is computed ahead in registers."""
        g, t = lane // 4, lane % 4
        before = first_key + 2 * t + zero
        for r in cutlass.range_constexpr(2 * self.row_tiles):
            first, last = scores.window(visible.position + zero + (g + 8 * r), scalars, visible.held)
            for h in cutlass.range_constexpr(self.key_tile // 32):
                base = before + 32 * h
                seen = bits_below(last - base) & ~bits_below(first - base) | bits_below(visible.prefix - base)
                self.keep_seen(rScore, r, h, seen & (exists[h] >> Uint32(2 * t + zero)))

    @cute.jit
    def keep_seen(self, rScore, r: cutlass.Constexpr, h: cutlass.Constexpr, seen: Uint32):
        """-inf for scores of row g + 8 r whose bits are 0 in ``seen``, bit 8 n + e for key 32 h + 8 n + 2 t + e."""
        for n in cutlass.range_constexpr(4):
            for e in cutlass.range_constexpr(2):
                at = cutlass.const_expr(4 * (r // 2 * self.key_tile // 8 + 4 * h + n) + r % 2 * 2 + e)
                bit = cutlass.const_expr(1 << (8 * n + e))
                rScore[at] = cutlass.select_((seen & bit) != 0, rScore[at], -Float32.inf)

    # -- epilogue -------------------------------------------------------------------------------------------------

    def swizzle(self, row):
        """The XOR of a row's units in shared memory."""
        return {7: row & 7, 3: row >> 1 & 3, 1: row >> 2 & 1}[self.swizzle_mask]

    @cute.jit
    def sink_of(self, tensors, scalars, head):
        """The sink of a head, a power of two; -inf where there is none."""
        sink = -Float32.inf
        if scalars.has_sinks != 0:
            sink = tensors.mSinks[head] * LOG2_E
        return sink

    @cute.jit
    def log2_unit(self, largest, scale):
        """The binary logarithm of the unit of a row's sums."""
        return cutlass.select_(largest == -Float32.inf, Float32(0.0), largest * scale - self.weight_exponent)

    @cute.jit
    def finish_row(self, tensors, scalars, results: Results, r: cutlass.Constexpr, sink, row, to_lse):
        """Store the LSE of a lane's row r where ``to_lse``; the factor that makes results of its sums."""
        out_row = results.at.first_row + row
        base, total, share = self.totals_of(scalars, results, r, sink)
        factor = cutlass.select_(total == 0.0, Float32(0.0), results.v_scale * (share / total))
        self.store_lse(tensors, results.at, out_row, base, total, to_lse)
        return factor

    @cute.jit
    def totals_of(self, scalars, results: Results, r: cutlass.Constexpr, sink):
        """Of a row: the binary logarithm of the unit of its weights, their sum with the sink, and the unit's change."""
        largest, total, scale = results.sums.rMax[r], results.sums.rSum[r], results.scale[r % 2]
        total += cute.arch.shuffle_sync_bfly(total, 1)
        total += cute.arch.shuffle_sync_bfly(total, 2)
        base = self.log2_unit(largest, scale)
        share = Float32(1.0)
        if scalars.has_sinks != 0:
            highest = cutlass.select_(largest == -Float32.inf, sink, ptx.fmax(base, sink))
            highest = cutlass.select_(highest == -Float32.inf, Float32(0.0), highest)
            share = cutlass.select_(largest == -Float32.inf, Float32(0.0), ptx.exp2_approx(base - highest))
            total = total * share + ptx.exp2_approx(sink - highest)
            base = highest
        return base, total, share

    @cute.jit
    def store_lse(self, tensors, at: OutputRows, row, base, total, to_lse):
        if to_lse:
            tensors.mLse[at.block, at.head, row] = (base + ptx.log2_approx(total)) * (1.0 / LOG2_E)

    @cute.jit
    def normalise(self, tensors, scalars, results: Results, shared: Int32, warp, lane):
        """Store the LSE and, in shared memory, the normalised rows of a warp."""
        sink = self.sink_of(tensors, scalars, results.at.head)
        for r in cutlass.range_constexpr(2 * self.row_tiles):
            row = warp * self.warp_rows + lane // 4 + 8 * r
            to_lse = lane % 4 == 0 and row < results.rows
            factor = self.finish_row(tensors, scalars, results, r, sink, row, to_lse)
            self.store_row(results.sums.rOut, r, factor, shared, lane)

    @cute.jit
    def store_row(self, rOut, r: cutlass.Constexpr, factor, shared: Int32, lane):
        """Store a lane's part of its row g + 8 r in shared memory, times a factor."""
        kind = cutlass.const_expr(numeric.ptx_name(self.dtype))
        units = cutlass.const_expr(self.output_dims // 8)
        row = lane // 4 + 8 * r
        for n in cutlass.range_constexpr(units):
            at = cutlass.const_expr(4 * (r // 2 * units + n) + r % 2 * 2)
            word = ptx.pack_f32x2(rOut[at] * factor, rOut[at + 1] * factor, kind)
            to = shared + row * (2 * self.output_dims) + (n ^ self.swizzle(row)) * 16 + 4 * (lane % 4)
            ptx.store_shared(to, [word])

    @property
    def vectors_of_lane(self) -> int:
        """Vectors of 16 bytes of a warp's results that one lane stores."""
        return self.warp_rows * self.output_dims // 8 // 32

    def place_of_vector(self, i: int, lane):
        """The row and the unit of a lane's vector i of a warp's results."""
        index, units = lane + 32 * i, self.output_dims // 8
        return index // units, index % units

    def load_vector(self, shared: Int32, row, unit):
        """A vector that store_row has stored."""
        return ptx.load_shared(shared + row * (2 * self.output_dims) + (unit ^ self.swizzle(row)) * 16, 4)

    def output_head(self, mOut, at: OutputRows) -> Int64:
        """Elements of the output ahead of a head of its block."""
        return Int64(at.block) * mOut.stride[0] + Int64(at.head) * mOut.stride[2]

    @cute.jit
    def epilogue(self, tensors, scalars, results: Results, shared: Int32, warp, lane):
        """Store the LSE and, through shared memory, the normalised rows of a warp."""
        mOut, at = tensors.mOut, results.at
        shared = shared + warp * (self.warp_rows * 2 * self.output_dims)
        self.normalise(tensors, scalars, results, shared, warp, lane)
        cute.arch.sync_warp()
        head = self.output_head(mOut, at)
        for i in cutlass.range_constexpr(self.vectors_of_lane):
            warp_row, unit = self.place_of_vector(i, lane)
            row = warp * self.warp_rows + warp_row
            if row < results.rows and 8 * unit < mOut.shape[3]:
                words = self.load_vector(shared, warp_row, unit)
                to = head + Int64(at.first_row + row) * mOut.stride[1] + 8 * unit
                ptx.store_global(mOut.iterator.toint() + 2 * to, words)


def once_if(condition) -> Int32:
    """The trip count, 0 or 1, of a loop that replaces a branch: the compiler would predicate a branch."""
    return ptx.opaque(cutlass.select_(condition, Int32(1), Int32(0)))


def bits_below(count: Int32) -> Uint32:
    """The lowest ``count`` bits: none of a negative count, all from 32 on."""
    some = (Uint32(1) << Uint32(count & 31)) - 1
    return cutlass.select_(count < 0, Uint32(0), cutlass.select_(count > 31, Uint32(0xFFFFFFFF), some))


def quotient(a: Int32, multiplier: Uint32, shift: Int32) -> Uint32:
    """a // b of 0 <= a < 2^31, for the multiplier and shift of b."""
    return Uint32((Uint64(Uint32(a)) * Uint64(multiplier)) >> Uint64(shift))


def divide(a: Int32, b: Int32) -> Int32:
    """a // b of non-negative integers."""
    return ptx.div_u32(Uint32(a), Uint32(b)).to(Int32)


def clamp(x: Int32, low: int, high: int) -> Int32:
    """x, or the nearer bound."""
    return cutlass.min(cutlass.max(x, low), high)


@cute.jit
def queries_of(mStartQ, mQ, scalars, sequence):
    """The first query of a sequence in its block of mQ, and the number of its queries."""
    first_query, num_queries = Int32(0), scalars.max_queries
    if scalars.packed_queries != 0:
        first_query = mStartQ[sequence]
        num_queries = cutlass.min(mStartQ[sequence + 1] - first_query, scalars.max_queries)
        num_queries = cutlass.min(num_queries, mQ.shape[1] - first_query)
        if first_query < 0:
            num_queries = Int32(0)
    return first_query, num_queries
