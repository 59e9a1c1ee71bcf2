"""The k largest of each row for k <= 8: sorted lists of eight in registers, merged by shuffles.

Built for router scores: rows of 64 and 256, one to thousands of rows. The time is the dependent chain after the load.
Each lane loads eight scores (16 bytes of bf16) and sorts them with a network of 19 comparators. If a warp holds a row,
the largest of the lanes' first entries is found eight times by a warp-wide maximum and removed. If eight lanes do,
three steps exchange lists with a partner and keep the best eight of both. The lists of several warps are combined in
shared memory. Lane i writes result i.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, Int64, Uint32

from kestrel_runtime.cute_dsl import numeric, pdl

from . import networks, sort_keys

LIST = networks.WIDTH


@dataclass(frozen=True)
class TopK:
    """One compiled variant."""

    dtype: type[cutlass.Numeric]
    lanes: int  # of a warp that hold a row: 8 or 32
    warps: int  # per row; more than 1 only with 32 lanes
    threads: int  # per block
    use_pdl: bool

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
            use_pdl=self.use_pdl,
        )

    @cute.kernel
    def kernel(self, mScores: cute.Tensor, mValues: cute.Tensor, mIndices: cute.Tensor, softmax: Int32):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block * self.rows + tid // (self.lanes * self.warps)
        lane = tid % (self.lanes * self.warps)
        length = mScores.shape[1]
        # All lanes take part in the shuffles: those past the last row repeat it and write nothing.
        source = cutlass.min(row, mScores.shape[0] - 1)
        size = cutlass.const_expr(numeric.bytes_of(self.dtype))
        address = mScores.iterator.toint() + Int64(source) * mScores.stride[0] * size
        vectors = (address & 15) == 0
        if cutlass.const_expr(self.use_pdl):
            pdl.wait()

        key = sort_keys.key_type(self.dtype)
        rWord = cute.make_rmem_tensor(sort_keys.words_per_lane(self.dtype), Uint32)
        rKey = cute.make_rmem_tensor(LIST, key)
        sort_keys.load_words(address, lane * LIST, length, vectors, rWord, self.dtype, self.use_pdl)
        sort_keys.make_keys(rWord, lane * LIST, length, rKey, self.dtype)
        rList = networks.sort_lane(rKey)
        if cutlass.const_expr(self.warps > 1):
            keys_per_lane = cutlass.const_expr(LIST * self.warps // 32)
            sBest = cute.make_tensor(cute.arch.alloc_smem(key, LIST * self.warps, alignment=16), LIST * self.warps)
            best = self.select(self.best_of_warp(rList), lane)
            if lane % 32 < LIST:
                sBest[lane // 32 * LIST + lane % 32] = best
            cute.arch.sync_threads()
            rList = [sBest[lane % 32 * keys_per_lane + i] for i in range(keys_per_lane)]
        if cutlass.const_expr(self.lanes == 32):
            rList = self.best_of_warp(rList)
        else:
            rList = self.merge_lanes(rList)
        selected = self.select(rList, lane)
        self.write(selected, mValues, mIndices, address, row, lane, softmax)

    @cute.jit
    def best_of_warp(self, rList):
        """The best eight of descending lists in 32 lanes, in every lane."""
        key = sort_keys.key_type(self.dtype)
        r = [*rList, key(sort_keys.pad_key(self.dtype))]
        best = []
        for place in cutlass.range_constexpr(LIST):
            best.append(sort_keys.warp_max(r[0], self.dtype))
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
    def select(self, r, lane: Int32):
        """Entry ``lane`` of a list of eight."""
        bit = 1
        while cutlass.const_expr(len(r) > 1):
            r = [cutlass.select_((lane & bit) != 0, r[i + 1], r[i]) for i in range(0, len(r), 2)]
            bit *= 2
        return r[0]

    @cute.jit
    def write(
        self,
        selected,
        mValues: cute.Tensor,
        mIndices: cute.Tensor,
        address: Int64,
        row: Int32,
        lane: Int32,
        softmax: Int32,
    ):
        """Lane i of a row writes result i."""
        rows, k = mValues.shape[0], mValues.shape[1]
        size = cutlass.const_expr(numeric.bytes_of(self.dtype))
        kept = lane < k
        index = cutlass.select_(kept, sort_keys.key_index(selected, self.dtype), Int32(0))
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
