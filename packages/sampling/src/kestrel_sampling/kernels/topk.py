"""The k largest of each row for k <= 8: sorted lists of eight in registers, merged by shuffles.

Built for router scores, rows of 64 and 256, one to thousands of rows. A row of N 2-byte scores needs 2N bytes read and
6k written: nothing, next to the time of a launch. So the row is loaded at once, 16 bytes a lane, and what counts is the
length of the dependent chain after the load.

Work: each lane holds eight scores and sorts them with a 19-comparator network. Where a warp holds a row, eight times
the largest of the lanes' first entries is found by one warp-wide maximum and taken off its list. Where eight lanes do,
three times each takes its partner's list by shuffle, keeps the larger of first and last, second and last but one, and
so on, which is a bitonic sequence of the best eight, and sorts that with 12 comparators. Rows of several warps meet
once in shared memory. Lane i writes result i.

Shapes of record on an H200 (bf16, k = 8, results/h200.json), us per call. The limit is a plain launch (1.05 us) and the
bytes at 4.3 TB/s. Targets were set before; a prediction of what this design reaches was not written down.

             1x64  16x64  740x64  4096x64  740x256
    limit    1.05   1.05    1.07     1.17     1.14
    target   1.28   1.34    1.71     1.76     1.61
    measured 1.13   1.24    1.44     1.63     1.58

Beside the launch, integer instructions decide: keys are made two at a time (ordered.py), and warp-wide maxima took
740x256 from 2.5 to 1.6 us against merging by shuffles.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, Int64, Uint32

from . import networks, ordered

LIST = networks.WIDTH


@dataclass(frozen=True)
class TopK:
    """One compiled variant."""

    dtype: type[cutlass.Numeric]
    lanes: int  # of one warp per row: 8 or 32
    warps: int  # per row, 1 or more if lanes is 32
    threads: int  # per block
    dependent_launch: bool

    @property
    def rows(self) -> int:
        """Rows per block."""
        return self.threads // (self.lanes * self.warps)

    @cute.jit
    def __call__(
        self, mScores: cute.Tensor, mValues: cute.Tensor, mIndices: cute.Tensor, softmax: Int32, stream: cuda.CUstream
    ):
        self.kernel(mScores, mValues, mIndices, softmax).launch(
            grid=[cute.ceil_div(mScores.shape[0], self.rows), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.dependent_launch,
        )

    @cute.kernel
    def kernel(self, mScores: cute.Tensor, mValues: cute.Tensor, mIndices: cute.Tensor, softmax: Int32):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block * self.rows + tid // (self.lanes * self.warps)
        lane = tid % (self.lanes * self.warps)
        length = mScores.shape[1]
        # Every lane takes part in the shuffles: past the last row they repeat it and write nothing.
        source = cutlass.min(row, mScores.shape[0] - 1)
        size = cutlass.const_expr(self.dtype.width // 8)
        address = mScores.iterator.toint() + Int64(source) * mScores.stride[0] * size
        vectors = (address & 15) == 0
        if cutlass.const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()

        key = ordered.key_type(self.dtype)
        rWord = cute.make_rmem_tensor(ordered.words_per_lane(self.dtype), Uint32)
        rKey = cute.make_rmem_tensor(LIST, key)
        ordered.load_words(address, lane * LIST, length, vectors, rWord, self.dtype, self.dependent_launch)
        ordered.make_keys(rWord, lane * LIST, length, rKey, self.dtype)
        rList = networks.sort_lane(rKey)
        if cutlass.const_expr(self.warps > 1):
            share = cutlass.const_expr(LIST * self.warps // 32)
            sBest = cute.make_tensor(cute.arch.alloc_smem(key, LIST * self.warps, alignment=16), LIST * self.warps)
            best = self.pick(self.best_of_warp(rList), lane)
            if lane % 32 < LIST:
                sBest[lane // 32 * LIST + lane % 32] = best
            cute.arch.sync_threads()
            rList = [sBest[lane % 32 * share + i] for i in range(share)]
        if cutlass.const_expr(self.lanes == 32):
            rList = self.best_of_warp(rList)
        else:
            rList = self.merge_lanes(rList)
        mine = self.pick(rList, lane)
        self.write(mine, mValues, mIndices, address, row, lane, softmax)

    @cute.jit
    def best_of_warp(self, rList):
        """The best eight of descending lists in 32 lanes, in every lane."""
        key = ordered.key_type(self.dtype)
        r = [*rList, key(ordered.pad_key(self.dtype))]
        best = []
        for place in cutlass.range_constexpr(LIST):
            best.append(ordered.warp_max(r[0], self.dtype))
            won = r[0] == best[place]
            for i in cutlass.range_constexpr(min(len(rList), LIST - place - 1)):
                r[i] = cutlass.select_(won, r[i + 1], r[i])
        return best

    @cute.jit
    def merge_lanes(self, r):
        """The best eight of descending lists in ``lanes`` lanes, in every lane."""
        step = 1
        while cutlass.const_expr(step < self.lanes):
            other = [cute.arch.shuffle_sync_bfly(r[i], step) for i in range(LIST)]
            r = networks.merge_lists(r, other)
            step *= 2
        return r

    @cute.jit
    def pick(self, r, lane: Int32):
        """Entry ``lane`` of a list of eight."""
        bit = 1
        while cutlass.const_expr(len(r) > 1):
            r = [cutlass.select_((lane & bit) != 0, r[i + 1], r[i]) for i in range(0, len(r), 2)]
            bit *= 2
        return r[0]

    @cute.jit
    def write(
        self,
        mine,
        mValues: cute.Tensor,
        mIndices: cute.Tensor,
        address: Int64,
        row: Int32,
        lane: Int32,
        softmax: Int32,
    ):
        """Lane i of a row writes result i."""
        rows, k = mValues.shape[0], mValues.shape[1]
        size = cutlass.const_expr(self.dtype.width // 8)
        kept = lane < k
        index = cutlass.select_(kept, ordered.key_index(mine, self.dtype), Int32(0))
        gScore = cute.make_ptr(self.dtype, address + Int64(index) * size, cute.AddressSpace.gmem)
        value = cute.make_tensor(gScore, 1)[0]
        if softmax != 0:
            top = cute.arch.shuffle_sync(Float32(value), 0, mask_and_clamp=((32 - LIST) << 8) | 31)
            power = cutlass.select_(kept, cute.math.exp(Float32(value) - top), Float32(0.0))
            total = power
            for step in cutlass.range_constexpr(3):
                total += cute.arch.shuffle_sync_bfly(total, 1 << step)
            value = self.dtype(power / total)
        if kept and row < rows:
            mValues[row, lane] = value
            mIndices[row, lane] = index
