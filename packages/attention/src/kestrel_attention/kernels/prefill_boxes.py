"""Attention of many queries on Hopper over keys and values that TMA loads (prefill_hopper.py otherwise).

The consumers need no fence: TMA writes what it loads for the matrix products, and the producer fences its own copies.
With two buffers of queries a consumer starts the first scores of its next work before it stores results.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kestrel_runtime.cute_dsl import hopper, ptx

from . import scores
from .prefill_base import OutputRows, Sums, Visible, Work, once_if
from .prefill_hopper import PrefillHopper
from .prefill_hopper_producer import WARPGROUP_ROWS, WORK_BYTES, Pipe
from .scores import LOG2_E


@dataclass(frozen=True)
class PrefillBoxes(PrefillHopper):
    """One compiled variant."""

    @cute.jit
    def consume(self, tensors, scalars, pipe: Pipe, warpgroup):
        ahead = cutlass.const_expr(self.query_buffers > 1)
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid % 128 // 32)
        rScore = cute.make_rmem_tensor(self.key_tile // 2, Float32)
        rP = cute.make_rmem_tensor(self.key_tile // 4, Uint32)
        rOut = cute.make_rmem_tensor(self.head_dim // 2, Float32)
        rMax = cute.make_rmem_tensor(2, Float32)
        rSum = cute.make_rmem_tensor(2, Float32)
        sums = Sums(rOut, rMax, rSum)
        used = Int32(0)  # tiles of keys so far, which give stage and parity
        works = Int32(0)
        num_tiles = self.start_work(pipe, works, used, rScore, warpgroup)
        hopper.wgmma_wait(0)
        self.order(rScore)
        while num_tiles >= 0:
            buffer = works % self.query_buffers
            work = self.read_work(pipe.works + buffer * WORK_BYTES)
            sQ = pipe.queries + buffer * self.buffer_bytes + warpgroup * self.query_bytes
            scale = cutlass.select_(scalars.softcap > 0.0, Float32(1.0), work.softmax_scale * LOG2_E)
            rOut.fill(0.0)
            rMax.fill(-Float32.inf)
            rSum.fill(0.0)
            rP.fill(0)
            warp_position = work.position + warpgroup * WARPGROUP_ROWS + warp * 16
            _, all_last = scores.window(warp_position, scalars, work.held)
            all_first, _ = scores.window(warp_position + 15, scalars, work.held)
            visible = Visible(all_first, all_last, work.prefix, Int32(0), warp_position, work.held)
            self.visit_tiles(pipe, scalars, work, visible, sQ, used, scale, sums, rScore, rP, lane)
            used += num_tiles
            last = cutlass.max(used - 1, 0)
            stage, parity = last % self.num_stages, last // self.num_stages & 1
            if num_tiles > 0:
                hopper.mbarrier_wait(pipe.values_full + 8 * stage, parity)
            self.start_output(pipe.values + stage * self.tile_bytes, rP, rOut)
            works += 1
            following = Int32(0)
            if cutlass.const_expr(ahead):
                following = self.start_work(pipe, works, used, rScore, warpgroup)
                hopper.wgmma_wait(1)
            else:
                hopper.wgmma_wait(0)
            self.order(rOut)
            if num_tiles > 0:
                self.release(pipe.values_empty, stage, lane)
            for _ in cutlass.range(once_if(num_tiles == 0), unroll=1):  # there are no values
                rOut.fill(0.0)
            hopper.named_barrier(1 + warpgroup, 128)
            row = warpgroup * WARPGROUP_ROWS
            at_out = OutputRows(block=work.out_block, first_row=work.out_row + row, head=work.head)
            rows = work.rows - row
            if work.partial < 0:
                self.epilogue(tensors, scalars, work.v_scale, sums, scale, sQ, rows, at_out, warp, lane)
            else:
                self.store_partial(tensors, work, sums, scale, row + 16 * warp, lane)
            cute.arch.sync_warp()
            self.release(pipe.queries_empty, buffer, lane)
            if cutlass.const_expr(not ahead):
                following = self.start_work(pipe, works, used, rScore, warpgroup)
            hopper.wgmma_wait(0)
            self.order(rScore)
            num_tiles = following

    @cute.jit
    def start_work(self, pipe: Pipe, works, used, rScore, warpgroup):
        """Wait for the work with index ``works``, start its first scores, and return its number of tiles.

        Without a tile, these scores are of whatever is in memory, and not used.
        """
        buffer = works % self.query_buffers
        at = pipe.works + buffer * WORK_BYTES
        hopper.mbarrier_wait(pipe.queries_full + 8 * buffer, works // self.query_buffers & 1)
        num_tiles = Int32(ptx.load_shared(at, 1)[0])
        num_tiles = cute.arch.make_warp_uniform(num_tiles)
        signs = ptx.load_shared(at + 4 * Work._fields.index("query_signs"), 1)[0]
        sQ = pipe.queries + buffer * self.buffer_bytes + warpgroup * self.query_bytes
        self.flip_signs(sQ, cutlass.select_(num_tiles > 0, signs, Uint32(0)), warpgroup)
        hopper.fence_proxy_async()
        stage, parity = used % self.num_stages, used // self.num_stages & 1
        if num_tiles > 0:
            hopper.mbarrier_wait(pipe.keys_full + 8 * stage, parity)
        self.start_scores(sQ, pipe.keys + stage * self.tile_bytes, rScore)
        return num_tiles

    @cute.jit
    def visit_tiles(
        self, pipe: Pipe, scalars, work: Work, visible: Visible, sQ, used, scale, sums: Sums, rScore, rP, lane
    ):
        """Add the tiles of a work but for the last P V, whose P is left in rP. rScore has the first scores."""
        rFactor = cute.make_rmem_tensor(2, Float32)
        stage, parity = used % self.num_stages, used // self.num_stages & 1
        if work.num_tiles > 0:
            self.release(pipe.keys_empty, stage, lane)
            tile = self.tile_at(work, Int32(0))
            self.softmax(pipe, scalars, visible, work, rScore, sums, rFactor, scale, tile, used, lane)
            self.pack(rScore, rP)
        n = Int32(1)
        while n < work.num_tiles:
            last_stage, last_parity = stage, parity
            at = used + n
            stage, parity = at % self.num_stages, at // self.num_stages & 1
            hopper.mbarrier_wait(pipe.keys_full + 8 * stage, parity)
            self.start_scores(sQ, pipe.keys + stage * self.tile_bytes, rScore)
            hopper.mbarrier_wait(pipe.values_full + 8 * last_stage, last_parity)
            self.start_output(pipe.values + last_stage * self.tile_bytes, rP, sums.rOut)
            hopper.wgmma_wait(1)
            self.order(rScore)
            self.release(pipe.keys_empty, stage, lane)
            tile = self.tile_at(work, n)
            self.rebase(pipe, scalars, visible, work, rScore, sums, rFactor, scale, tile, at, lane)
            for _ in cutlass.range(ptx.opaque(Int32(1)), unroll=1):  # keeps the exponentials ahead of the wait
                self.weigh(rScore, sums, rFactor, scale)
            hopper.wgmma_wait(0)
            self.order(sums.rOut)
            self.release(pipe.values_empty, last_stage, lane)
            self.rescale(sums.rOut, rFactor)
            self.pack(rScore, rP)
            n += 1
