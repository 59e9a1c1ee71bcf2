"""Lists the works of packed sequences whose lengths differ, ahead of a prefill kernel.

A work is a section of heads of a block of rows, or of one split of its keys. A sequence has those that its own lengths
may give it, so few thread blocks find nothing to do. Heads of a KV head share the works of few queries. Of each kind,
sequences whose works visit the most keys come first: a counting sort by the logarithm of their tiles. The list starts
with a counter of works taken, which is zeroed here. Behind the works are the blocks of rows that may have several
splits, for the combine kernel. One thread block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kestrel_runtime.cute_dsl import arguments, parameters, pdl, ptx

from .constants import FIRST_COUNT, FIRST_SHIFT, FIRST_WORK, MIN_SPLIT_TILES, SPLIT_BLOCK_COUNT, SPLIT_ROWS, WORK_COUNT
from .parameters import PrefillWorksScalars, PrefillWorksTensors
from .prefill_base import clamp, divide
from .splits import prefill_split_limit

THREADS = 1024
BUCKETS = 32  # of the sort, of each kind: two for each power of two of tiles


class Works(NamedTuple):
    """The works of a sequence."""

    blocks: Int32  # of rows
    splits: Int32  # of a block, at most
    count: Int32  # of all sections
    bucket: Int32  # 0 has the most tiles; from BUCKETS on those of several heads


@dataclass(frozen=True)
class PrefillWorks:
    """One compiled variant."""

    pdl: bool

    def arguments(self) -> tuple[Any, ...]:
        """Arguments to compile with."""
        tensors = PrefillWorksTensors(
            *(arguments.any_strides(Int32, cute.sym_int()) for _ in range(len(PrefillWorksTensors._fields)))
        )
        return (*tensors, *parameters.compile_time(PrefillWorksScalars), Int32(1), arguments.torch_stream())

    @cute.jit
    def __call__(self, *given):
        num_tensors = cutlass.const_expr(len(PrefillWorksTensors._fields))
        tensors, scalars = PrefillWorksTensors(*given[:num_tensors]), PrefillWorksScalars(*given[num_tensors:-2])
        self.kernel(tensors, scalars, given[-2]).launch(
            grid=[1, 1, 1], block=[THREADS, 1, 1], stream=given[-1], use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, tensors: PrefillWorksTensors, scalars: PrefillWorksScalars, batch: Int32):
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        # Works of each bucket, then where the next one of it goes; the same for blocks of rows with splits.
        sTaken = Int32(cute.arch.alloc_smem(Int32, 2 * BUCKETS + 1, alignment=16).toint())
        sBlocks = sTaken + 8 * BUCKETS
        if tid <= 2 * BUCKETS:
            ptx.store_shared(sTaken + 4 * tid, [Uint32(0)])
        if cutlass.const_expr(self.pdl):
            pdl.wait()
            pdl.trigger()
        cute.arch.sync_threads()
        sequence = tid
        while sequence < batch:
            works = self.works_of(tensors, scalars, sequence, batch)
            ptx.atomic_add_shared(sTaken + 4 * works.bucket, works.count)
            sequence += THREADS
        cute.arch.sync_threads()
        if warp == 0:
            self.order_buckets(tensors, scalars, sTaken, lane)
        cute.arch.sync_threads()
        first = 32 * warp
        while first < batch:
            works = Works(Int32(0), Int32(0), Int32(0), Int32(0))
            if first + lane < batch:
                works = self.works_of(tensors, scalars, first + lane, batch)
            to, to_block = Int32(0), Int32(0)
            if works.count > 0:
                to = ptx.atomic_add_shared(sTaken + 4 * works.bucket, works.count)
            if works.splits > 1:
                to_block = ptx.atomic_add_shared(sBlocks, works.blocks)
            for source in cutlass.range(32, unroll=1):
                of_source = Works(*(cute.arch.shuffle_sync(field, source) for field in works))
                at, at_block = (cute.arch.shuffle_sync(x, source) for x in (to, to_block))
                self.store_works(tensors, scalars, first + source, of_source, at, at_block, lane)
            first += THREADS
        cute.arch.sync_threads()
        if tid == 0:
            blocks = Int32(ptx.load_shared(sBlocks, 1)[0])
            tensors.mWorks[SPLIT_BLOCK_COUNT] = cutlass.min(blocks, scalars.listed_blocks)

    @cute.jit
    def order_buckets(self, tensors, scalars, sTaken: Int32, lane):
        """Turn the works of each bucket into the index of its first; the kind with the fullest tiles comes first."""
        mWorks = tensors.mWorks
        counts, ends, highest = [], [], []
        for kind in cutlass.range_constexpr(2):
            count = Int32(ptx.load_shared(sTaken + 4 * (kind * BUCKETS + lane), 1)[0])
            end = count
            for i in cutlass.range_constexpr(5):
                before = cute.arch.shuffle_sync_up(end, 1 << i)
                end += cutlass.select_(lane >= (1 << i), before, Int32(0))
            counts.append(count)
            ends.append(end)
            highest.append(Uint32(cute.arch.vote_ballot_sync(count > 0)))
        # The lowest bit that is set; of none, all bits below 0.
        lowest = [x & (~x + 1) for x in highest]
        packed_first = highest[1] != 0 and (highest[0] == 0 or lowest[1] < lowest[0])
        totals = [Int32(cute.arch.shuffle_sync(end, 31)) for end in ends]
        starts = [
            cutlass.select_(packed_first, totals[1], Int32(0)),
            cutlass.select_(packed_first, Int32(0), totals[0]),
        ]
        for kind in cutlass.range_constexpr(2):
            to = sTaken + 4 * (kind * BUCKETS + lane)
            ptx.store_shared(to, [Uint32(starts[kind] + ends[kind] - counts[kind])])
        if lane == 0:
            mWorks[0] = Int32(0)
            mWorks[WORK_COUNT] = clamp(totals[0] + totals[1], 0, scalars.listed_works)
            first = cutlass.select_(packed_first, totals[1], totals[0])
            mWorks[FIRST_COUNT] = clamp(first, 0, mWorks[WORK_COUNT])
            mWorks[FIRST_SHIFT] = cutlass.select_(packed_first, scalars.pack_shift, Int32(0))

    @cute.jit
    def works_of(self, tensors, scalars, sequence, batch):
        """The works of a sequence; without queries one of each section, if there may be rows around it to clear."""
        first_query = tensors.mStartQ[sequence]
        given = tensors.mStartQ[sequence + 1] - first_query
        num_queries = cutlass.min(given, cutlass.min(scalars.max_queries, scalars.total_queries - first_query))
        if first_query < 0:
            num_queries = Int32(0)
        keys = scalars.max_keys
        if scalars.key_starts != 0:
            keys = cutlass.min(keys, tensors.mStartK[sequence + 1] - tensors.mStartK[sequence])
        if scalars.has_lengths != 0:
            keys = cutlass.min(keys, tensors.mLengths[sequence])
        tiles = (cutlass.max(keys, 1) + scalars.key_tile - 1) // scalars.key_tile
        limit = scalars.split_limit
        if limit == 0:
            limit = prefill_split_limit(cutlass.max(num_queries, 1), scalars.heads, divide, clamp)
        block_rows = cutlass.select_(limit > 1, Int32(SPLIT_ROWS), scalars.block_rows)
        splits = cutlass.min((tiles + MIN_SPLIT_TILES - 1) // MIN_SPLIT_TILES, limit)
        blocks = divide(cutlass.max(num_queries, 0) + block_rows - 1, block_rows)
        if num_queries <= 0:
            around = sequence == 0 or sequence == batch - 1 or given > 0
            blocks, splits = cutlass.select_(around, Int32(1), Int32(0)), Int32(1)
        each = divide(tiles + splits - 1, splits)
        bucket = (ptx.float_as_int(Float32(each)) >> 22) - 2 * 127  # the exponent and one bit of the fraction
        bucket = BUCKETS - 1 - cutlass.min(bucket, BUCKETS - 1)
        if scalars.pack_shift > 0 and num_queries <= SPLIT_ROWS >> scalars.pack_shift:
            bucket += BUCKETS
        return Works(blocks, splits, blocks * splits * scalars.sections, bucket)

    @cute.jit
    def store_works(self, tensors, scalars, sequence, works: Works, to, to_block, lane):
        """Store the works of a sequence from index ``to`` on, last blocks first.

        Sequences that overlap have more works than the list has room for, or than an index counts.
        """
        mWorks = tensors.mWorks
        i = lane
        while i < works.count:
            in_section = divide(i, works.splits)
            section = divide(in_section, works.blocks)
            block = works.blocks - 1 - (in_section - section * works.blocks)
            if Uint32(to + i) < Uint32(scalars.listed_works):
                at = FIRST_WORK + 2 * (to + i)
                mWorks[at] = sequence | section << 16
                mWorks[at + 1] = block | (i - in_section * works.splits) << 24
            i += 32
        block = lane
        while works.splits > 1 and block < works.blocks:
            if Uint32(to_block + block) < Uint32(scalars.listed_blocks):
                at = FIRST_WORK + 2 * (scalars.listed_works + to_block + block)
                mWorks[at] = sequence
                mWorks[at + 1] = block
            block += 32
