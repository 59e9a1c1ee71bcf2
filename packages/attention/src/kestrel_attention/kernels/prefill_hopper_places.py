"""From the index of a work of prefill_hopper.py to its sequence, heads, rows and split of the keys.

Works are enumerated, as many for each sequence as the longest has, or listed by prefill_works.py. In a listed work of
few queries the warps of a consumer warpgroup have the queries of two or four heads of a KV head.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .constants import FIRST_COUNT, FIRST_SHIFT, MIN_SPLIT_TILES, WARPGROUP_ROWS, WORK_COUNT
from .parameters import PrefillScalars
from .prefill_base import PrefillBase, clamp, divide, quotient
from .prefill_types import Place, Work
from .splits import prefill_split_limit


class HopperPlaces(PrefillBase):
    """The order of works."""

    consumers: int

    @property
    def shares(self) -> int:
        """Thread blocks of a work: so many indices in a row are of one."""
        return 1

    @property
    def packs(self) -> bool:
        """Heads of a KV head may share a work. With three consumers that takes too many registers."""
        return self.consumers == 2

    @cute.jit
    def rows_of_warp(self, pack_shift: Int32, warpgroup, warp):
        """The first query of a consumer warp, and its head, relative to those of a work. A warp has one head."""
        first, head = warpgroup * WARPGROUP_ROWS + 16 * warp, Int32(0)
        if cutlass.const_expr(self.packs):
            queries = Int32(WARPGROUP_ROWS) >> pack_shift  # of each head in a warpgroup
            first, head = warpgroup * queries + (16 * warp & (queries - 1)), 16 * warp >> (6 - pack_shift)
        return first, head

    @cute.jit
    def place(self, tensors, scalars: PrefillScalars, row_blocks, batch, index):
        """The coordinates of a work index."""
        at = Place(Int32(0), Int32(0), Int32(0), Int32(0), Int32(0))
        if scalars.listed_works > 0:
            at = self.listed_at(tensors, scalars, index)
        else:
            at = self.enumerated(scalars, row_blocks, tensors.mQ.shape[2], batch, index)
        return at

    @cute.jit
    def listed_count(self, tensors, scalars):
        """The works of a list, of each head."""
        listed, first = tensors.mWorks[WORK_COUNT], tensors.mWorks[FIRST_COUNT]
        shift = tensors.mWorks[FIRST_SHIFT]
        count = first * (scalars.section_heads >> shift)
        return count + (listed - first) * (scalars.section_heads >> (scalars.pack_shift - shift))

    @cute.jit
    def listed_at(self, tensors, scalars: PrefillScalars, index):
        """The same with a list: head by head of a section, work by work, of one kind after the other."""
        count, shift = tensors.mWorks[FIRST_COUNT], tensors.mWorks[FIRST_SHIFT]
        first, in_kind = Int32(0), index
        if index >= count * (scalars.section_heads >> shift):
            first, in_kind = count, index - count * (scalars.section_heads >> shift)
            shift = scalars.pack_shift - shift
        work = Int32(quotient(in_kind << shift, scalars.head_multiplier, scalars.head_shift))
        head = in_kind - work * (scalars.section_heads >> shift) << shift
        return self.listed(tensors.mWorks.iterator.toint(), scalars, first + work, head, shift)

    @cute.jit
    def enumerated(self, scalars: PrefillScalars, row_blocks, heads, batch, index):
        """The same without a list: section of heads by section, row blocks with the most keys first.

        The first splits of all blocks come first, then the others. Those that a sequence does not have are skipped.
        """
        first_splits = row_blocks * heads * batch
        others = scalars.num_splits > 1 and index >= first_splits
        section = Int32(quotient(index, scalars.section_multiplier, scalars.section_shift))
        in_section = index - section * (scalars.section_heads * row_blocks)
        blocks = row_blocks
        if others:
            blocks = scalars.split_blocks
            of_section = scalars.section_heads * blocks * (scalars.num_splits - 1)
            section = divide(index - first_splits, of_section)
            in_section = index - first_splits - section * of_section
        of_head = Int32(quotient(in_section, scalars.head_multiplier, scalars.head_shift))
        head = in_section - of_head * scalars.section_heads
        sequence, longest_first, split = section, of_head, Int32(0)
        if scalars.section_heads < heads:
            sections = divide(heads, scalars.section_heads)
            sequence = divide(section, sections)
            head += (section - sequence * sections) * scalars.section_heads
        if others:
            longest_first = divide(of_head, scalars.num_splits - 1)
            split = of_head - longest_first * (scalars.num_splits - 1) + 1
        return Place(sequence, head, blocks - 1 - longest_first, split, Int32(0))

    @cute.jit
    def split_limit(self, scalars, num_queries, heads):
        """The most splits of the blocks of rows of a sequence."""
        limit = scalars.split_limit
        if limit == 0:
            limit = prefill_split_limit(cutlass.max(num_queries, 1), heads * self.shares, divide, clamp)
        return limit

    @cute.jit
    def split(self, tensors, scalars, at: Place, limit, first_query, num_queries, first_row, work: Work):
        """The part of a work item in split ``at.split``; 0 rows if the item has fewer splits."""
        each, num_splits = work.num_tiles, Int32(1)
        if limit > 1:
            each = cutlass.max(divide(work.num_tiles + limit - 1, limit), MIN_SPLIT_TILES)
            num_splits = cutlass.max(divide(work.num_tiles + each - 1, each), 1)
        first = at.split * each
        partial = Int32(-1)
        if num_splits > 1:
            partial = first_query * scalars.partials_of_row + at.sequence * scalars.partials_of_sequence
            partial = partial + at.split * num_queries + first_row
        tid, _, _ = cute.arch.thread_idx()
        if at.split == 0 and at.row_block < scalars.split_blocks and tid < 1 << at.pack_shift:
            of_head = at.sequence * tensors.mQ.shape[2] + work.head + tid
            tensors.mNumSplits[of_head * scalars.split_blocks + at.row_block] = num_splits
        return work._replace(
            num_tiles=cutlass.min(work.num_tiles - first, each),
            first_tile=first,
            partial=partial,
            rows=cutlass.select_(at.split < num_splits, work.rows, Int32(0)),
        )

    @cute.jit
    def of_thread_block(self, scalars, work: Work, index) -> Work:
        """The part of a work that this thread block has."""
        return work
