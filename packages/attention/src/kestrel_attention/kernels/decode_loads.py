"""The loads of decode.py before those of the cache: queries, and the pages and offsets of the keys of a tile.

Lanes look up keys in the block table, 16 or 32 at a time. Queries become the B operands of the products with keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from kestrel_runtime.cute_dsl import ptx

from .constants import FOLDED_ROWS, TILE_KEYS
from .decode_epilogue import Rows
from .parameters import DecodeScalars, DecodeTensors
from .tile import EXISTS, KEY_OFFSET, LOOKUP_WORDS, VALUE_OFFSET, WarpTiles


class Pages(NamedTuple):
    """The pages of a sequence."""

    table: Int64  # address of its row of the block table
    table_stride: Int64
    sequence: Int32  # its page where there is no table
    has_block_table: Int32
    num_blocks: Int32
    page_size: Int32
    multiplier: Uint32  # key // page_size is key * multiplier >> shift
    shift: Int32
    key_strides: Any  # of blocks and slots, in 16 bytes
    value_strides: Any
    scales: Any  # what the format's scale_addresses returns


class Split(NamedTuple):
    """A split of the keys of a sequence."""

    start: Int32
    end: Int32
    num_tiles: Int32


class DecodeLoads:
    """The part of Decode, which declares these fields, that loads queries and finds keys."""

    dtype: type[cutlass.Numeric]
    tiles: WarpTiles

    # -- queries --------------------------------------------------------------------------------------------------

    def row_of(self, column):
        """The row that a column of the products with queries holds."""
        return column % FOLDED_ROWS if self.tiles.folded else column

    @cute.jit
    def query_address(self, mQ, rows: Rows, lane) -> Int64:
        """The row of Q that lane (g, t) loads: row g."""
        row = rows.first + cutlass.min(self.row_of(lane // 4), cutlass.max(rows.count - 1, 0))
        query = self.query_of(row, rows)
        head = rows.kv_head * rows.group_size + row - query * rows.group_size
        offset = Int64(rows.sequence) * mQ.stride[0] + Int64(query) * mQ.stride[1] + Int64(head) * mQ.stride[2]
        return mQ.iterator.toint() + 2 * offset

    @cute.jit
    def load_queries(self, mQ, rQ, address, num_rows, lane):
        """The B operands of Q' without conversion; zeros past the last row and dim."""
        dims = cutlass.const_expr(self.tiles.key_dims)
        for i in cutlass.range_constexpr(self.tiles.query_words // 4):
            c, part = i // (dims // 8), i % (dims // 8)
            dim = c * 4 * dims + lane % 4 * dims + part * 8
            for k in cutlass.range_constexpr(4):
                rQ[4 * i + k] = Uint32(0)
            if self.row_of(lane // 4) < num_rows and dim < mQ.shape[3]:
                loaded = ptx.load_global(address + 2 * dim, 4)
                for k in cutlass.range_constexpr(4):
                    rQ[4 * i + k] = loaded[k]

    @cute.jit
    def copy_queries(self, mQ, address, num_rows, warp, lane):
        """Start copying the B operands of Q' to shared memory; the warps take 16 bytes of each lane in turn."""
        dims, fours = cutlass.const_expr((self.tiles.key_dims, self.tiles.query_words // 4))
        words = cute.arch.alloc_smem(Uint32, self.tiles.query_words * 32, alignment=16)
        for n in cutlass.range_constexpr(-(-fours // self.warps)):
            i = n * self.warps + warp
            if i < fours:
                dim = i // (dims // 8) * (4 * dims) + lane % 4 * dims + i % (dims // 8) * 8
                exists = self.row_of(lane // 4) < num_rows and dim < mQ.shape[3]
                valid = cutlass.select_(exists, Int32(16), Int32(0))
                offset = cutlass.select_(exists, dim, Int32(0))
                ptx.cp_async(Int32(words.toint()) + i * 512 + lane * 16, address + 2 * offset, 16, valid)
        return cute.make_tensor(words + lane * 4, cute.make_layout((4, fours), stride=(1, 128)))

    @cute.jit
    def convert_queries(self, rQ, rTerms, extra):
        """Convert queries to f16 where keys become f16: times a power of two per row, whose inverse is returned.

        rTerms: written instead where queries become 8-bit terms; a row that is not finite returns NaN.
        """
        row_scale = Float32(1.0)
        if cutlass.const_expr(
            self.tiles.format.kind == "f16" and (extra is not None or self.dtype is cutlass.BFloat16)
        ):
            largest = Int32(0)
            for i in cutlass.range_constexpr(self.tiles.query_words):
                low, high = Int32(rQ[i] & 0x7FFF), Int32((rQ[i] >> 16) & 0x7FFF)
                largest = cutlass.max(largest, cutlass.max(low, high))
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, 1))
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, 2))
            exponent = cutlass.min(largest >> 7, 254)
            if cutlass.const_expr(extra is not None):
                exponent = cutlass.select_(extra.is_bf16 != 0, exponent, (largest >> 10) + 112)
            goal = cutlass.const_expr(self.tiles.format.query_exponent)
            back = cutlass.const_expr(self.tiles.format.exponent - goal)
            if cutlass.const_expr(goal < 1):  # keeps the factor a normal number
                exponent = cutlass.min(exponent, 253 + goal)
            exponent = cutlass.max(exponent, goal + 1)
            factor = ptx.int_as_float((254 + goal - exponent) << 23)
            row_scale = ptx.int_as_float(cutlass.min(exponent + back, 254) << 23)
            if cutlass.const_expr(self.tiles.format.integer_queries):
                limit = cutlass.select_(extra.is_bf16 != 0, Int32(0x7F80), Int32(0x7C00))
                row_scale = cutlass.select_(largest >= limit, ptx.int_as_float(Int32(0x7FC00000)), row_scale)
                if extra.is_bf16 != 0:
                    self.integer_query_words(rQ, rTerms, factor, "bf16")
                else:
                    self.integer_query_words(rQ, rTerms, factor, "f16")
            elif cutlass.const_expr(extra is None):
                self.scale_query_words(rQ, factor, "bf16")
            else:
                if extra.is_bf16 != 0:
                    self.scale_query_words(rQ, factor, "bf16")
                else:
                    self.scale_query_words(rQ, factor, "f16")
        return row_scale

    @cute.jit
    def integer_query_words(self, rQ, rTerms, factor, kind: cutlass.Constexpr):
        """Queries times a number, as 8-bit terms of four dims each."""
        for i in cutlass.range_constexpr(self.tiles.query_words // 2):
            values = [x * factor for k in range(2) for x in ptx.unpack_f32x2(rQ[2 * i + k], kind)]
            words = self.tiles.format.integer_terms(values)
            for term in cutlass.range_constexpr(len(words)):
                rTerms[(i // 4 * len(words) + term) * 4 + i % 4] = words[term]

    @cute.jit
    def scale_query_words(self, rQ, factor, kind: cutlass.Constexpr):
        """Queries times a number, as f16, in the order of the key operands."""
        for i in cutlass.range_constexpr(self.tiles.query_words // 4):
            pairs = []
            for k in cutlass.range_constexpr(4):
                low, high = ptx.unpack_f32x2(rQ[4 * i + k], kind)
                pairs.append(ptx.pack_f32x2(low * factor, high * factor, "f16"))
            pairs = self.tiles.format.permute_queries(pairs)
            for k in cutlass.range_constexpr(4):
                rQ[4 * i + k] = pairs[k]

    # -- pages ----------------------------------------------------------------------------------------------------

    @cute.jit
    def pages_of(self, tensors: DecodeTensors, scalars: DecodeScalars, extra, sequence, kv_head, lane):
        mK, mV = tensors.mK, tensors.mV
        units = cutlass.const_expr(128 // mK.element_type.width)  # elements in 16 bytes, the unit of offsets
        strides = [Uint32(mX.stride[i] // units) for mX in (mK, mV) for i in range(2)]
        return Pages(
            table=tensors.mTable.iterator.toint() + 4 * Int64(sequence) * tensors.mTable.stride[0],
            table_stride=tensors.mTable.stride[1],
            sequence=sequence,
            has_block_table=scalars.has_block_table,
            num_blocks=mK.shape[0],
            page_size=mK.shape[1],
            multiplier=scalars.page_multiplier,
            shift=scalars.page_shift,
            key_strides=strides[:2],
            value_strides=strides[2:],
            scales=self.tiles.format.scale_addresses(extra, self.tiles, kv_head, lane),
        )

    @cute.jit
    def looked_up_key(self, split_start, tile_idx, lookup: cutlass.Constexpr, lane):
        """The key that a lane looks up: lanes 0-15 those of one tile, 16-31 those of the warp's next."""
        tile = tile_idx + 2 * lookup * self.tiles.tile_stride
        if cutlass.const_expr(self.tiles.tiles_per_step > 1):
            tile = tile + lane // TILE_KEYS * self.tiles.tile_stride
        return split_start + tile * TILE_KEYS + lane % TILE_KEYS

    @cute.jit
    def table_entries(self, pages: Pages, split_start, tile_idx, lane):
        """The keys that a lane looks up for a step, and the addresses of their entries of the block table."""
        found = []
        for i in cutlass.range_constexpr(self.tiles.lookups):
            key = self.looked_up_key(split_start, tile_idx, i, lane)
            entry, _ = self.entry_and_slot(key, pages)
            found.append((key, pages.table + 4 * Int64(entry) * pages.table_stride))
        return found

    @cute.jit
    def load_pages(self, rPages, pages: Pages, entries, end):
        """Start loading the pages of a step's keys below ``end``; -1 for the others."""
        for i in cutlass.range_constexpr(self.tiles.lookups):
            key, address = entries[i]
            found = ptx.load_global_if(key < end and pages.has_block_table != 0, address, -1)
            rPages[i] = cutlass.select_(key < end and pages.has_block_table == 0, pages.sequence, Int32(found))

    @cute.jit
    def entry_and_slot(self, key: Int32, pages: Pages):
        """The table entry of a key and its slot in the page; exact for keys below 2^31."""
        entry = Uint32((Uint64(Uint32(key)) * Uint64(pages.multiplier)) >> Uint64(pages.shift))
        return entry, Uint32(key) - entry * Uint32(pages.page_size)

    @cute.jit
    def locate_keys(self, rPages, rOffset, pages: Pages, split: Split, tile_idx, lane):
        """From pages to offsets in units of 16 bytes, and a bit for each key that exists."""
        if cutlass.const_expr(self.tiles.format.page_per_step):
            keys_left = split.end - split.start - tile_idx * TILE_KEYS
            self.tiles.locate_page(rPages[0], rOffset, pages.num_blocks, pages.scales, keys_left)
            return
        for i in cutlass.range_constexpr(self.tiles.lookups):
            key = self.looked_up_key(split.start, tile_idx, i, lane)
            exists = rPages[i] >= 0 and rPages[i] < pages.num_blocks and key < split.end
            _, slot = self.entry_and_slot(key, pages)
            block = cutlass.select_(exists, Uint32(rPages[i]), Uint32(0))
            slot = cutlass.select_(exists, slot, Uint32(0))
            words = cutlass.const_expr(LOOKUP_WORDS * i)
            rOffset[words + KEY_OFFSET] = block * pages.key_strides[0] + slot * pages.key_strides[1]
            rOffset[words + VALUE_OFFSET] = block * pages.value_strides[0] + slot * pages.value_strides[1]
            rOffset[words + EXISTS] = Uint32(cute.arch.vote_ballot_sync(exists))
            at = cutlass.const_expr(LOOKUP_WORDS * self.tiles.lookups + i * self.tiles.format.scale_words)
            self.tiles.format.place_scales(rOffset, at, pages.scales, exists, rPages[i], slot)
