"""The k largest of each row for k <= 128: bisect to a few more than k keys, collect them, order them by counting.

Built for what topk.py does not cover: 8 < k <= 128, rows up to 4096. Keys are unique (ordered.py), so for every count
there is a threshold that exactly so many keys reach.

Work: ``warps`` warps hold one row in registers, 8 * ``chunks`` keys a lane. The bisection starts between a lower bound
(the row is cut into at least 128 groups, whose maxima are all at least the smallest of them) and the row's maximum.
Each step counts the keys that reach the middle, by one warp-wide sum and, between warps, one barrier. It ends when the
count lies between k and k + SLACK: about five steps on random rows, at most as many as a key has bits on rows of equal
scores. The keys kept go to shared memory in any order; each then finds its rank as the number of kept keys above it,
and those with a rank below k are the result. It does not depend on the order in which warps arrive.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, Int64

from . import ordered

LARGEST = 128  # k
SLACK = 64
WARP = 32


@dataclass(frozen=True)
class TopKSelect:
    """One compiled variant."""

    dtype: type[cutlass.Numeric]
    warps: int  # per row
    chunks: int  # groups of eight scores per lane
    rows: int  # per block
    dependent_launch: bool

    @property
    def lanes(self) -> int:
        return WARP * self.warps

    @cute.jit
    def __call__(
        self, mScores: cute.Tensor, mValues: cute.Tensor, mIndices: cute.Tensor, softmax: Int32, stream: cuda.CUstream
    ):
        self.kernel(mScores, mValues, mIndices, softmax).launch(
            grid=[cute.ceil_div(mScores.shape[0], self.rows), 1, 1],
            block=[self.lanes * self.rows, 1, 1],
            stream=stream,
            use_pdl=self.dependent_launch,
        )

    @cute.kernel
    def kernel(self, mScores: cute.Tensor, mValues: cute.Tensor, mIndices: cute.Tensor, softmax: Int32):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_launch_dependents()
        slot = tid // self.lanes
        lane = tid % self.lanes
        row = block * self.rows + slot
        length = mScores.shape[1]
        k = mValues.shape[1]
        # Every lane takes part in the sums: past the last row they repeat it and write nothing.
        source = cutlass.min(row, mScores.shape[0] - 1)
        size = cutlass.const_expr(self.dtype.width // 8)
        address = mScores.iterator.toint() + Int64(source) * mScores.stride[0] * size
        vectors = (address & 15) == 0
        key = ordered.key_type(self.dtype)
        sKept = cute.make_tensor(
            cute.arch.alloc_smem(key, (LARGEST + SLACK) * self.rows, alignment=16), (LARGEST + SLACK, self.rows)
        )
        sValue = cute.make_tensor(
            cute.arch.alloc_smem(Float32, LARGEST * self.rows, alignment=16), (LARGEST, self.rows)
        )
        sCount = cute.make_tensor(cute.arch.alloc_smem(Int32, 2 * self.warps, alignment=16), (self.warps, 2))
        sBound = cute.make_tensor(cute.arch.alloc_smem(key, 2 * self.warps, alignment=16), (self.warps, 2))
        sTaken = cute.arch.alloc_smem(Int32, 1)  # places in sKept that are given out
        if tid == 0:
            cute.make_tensor(sTaken, 1)[0] = Int32(0)
        if cutlass.const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()

        rKey = cute.make_rmem_tensor((ordered.VECTOR, self.chunks), key)
        for chunk in cutlass.range_constexpr(self.chunks):
            first = (chunk * self.lanes + lane) * ordered.VECTOR
            ordered.load_keys(address, first, length, vectors, rKey[None, chunk], self.dtype)
        threshold, kept = self.bisect(rKey, k, lane, sBound, sCount)
        self.collect(rKey, threshold, lane, sKept[None, slot], sTaken)
        self.sync()
        self.write(sKept[None, slot], kept, mIndices, mValues, sValue[None, slot], address, row, lane, softmax)

    @cute.jit
    def bisect(self, rKey: cute.Tensor, k: Int32, lane: Int32, sBound: cute.Tensor, sCount: cute.Tensor):
        """A threshold that k to k + SLACK keys of the row reach, and how many do."""
        group = cutlass.const_expr(max(1, min(cute.size(rKey), cute.size(rKey) * self.lanes // LARGEST)))
        best = [rKey[i] for i in range(0, cute.size(rKey), group)]
        for i in cutlass.range_constexpr(len(best)):
            for j in cutlass.range_constexpr(1, group):
                best[i] = cutlass.max(best[i], rKey[i * group + j])
        high, low = best[0], best[0]
        for i in cutlass.range_constexpr(1, len(best)):
            high = cutlass.max(high, best[i])
            low = cutlass.min(low, best[i])
        high, low = self.extremes(high, low, lane, sBound)
        count = Int32(LARGEST + SLACK + 1)
        parity = Int32(0)
        # Always: at least k keys reach low, fewer than k exceed high.
        while count < k or count > k + SLACK:
            middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
            count = self.count(rKey, middle, lane, sCount, parity)
            parity = 1 - parity
            if count >= k:
                low = middle
            else:
                high = middle - 1
        return low, count

    @cute.jit
    def extremes(self, high, low, lane: Int32, sBound: cute.Tensor):
        """The largest ``high`` and the smallest ``low`` of the row's lanes."""
        for step in cutlass.range_constexpr(5):
            high = cutlass.max(high, cute.arch.shuffle_sync_bfly(high, 1 << step))
            low = cutlass.min(low, cute.arch.shuffle_sync_bfly(low, 1 << step))
        if cutlass.const_expr(self.warps > 1):
            if lane % WARP == 0:
                sBound[lane // WARP, 0] = high
                sBound[lane // WARP, 1] = low
            cute.arch.sync_threads()
            for warp in cutlass.range_constexpr(self.warps):
                high = cutlass.max(high, sBound[warp, 0])
                low = cutlass.min(low, sBound[warp, 1])
        return high, low

    @cute.jit
    def count(self, rKey: cute.Tensor, threshold, lane: Int32, sCount: cute.Tensor, parity: Int32) -> Int32:
        """How many keys of the row reach the threshold; calls alternate ``parity``, so one barrier each is enough."""
        count = Int32(0)
        for i in cutlass.range_constexpr(cute.size(rKey)):
            count += Int32(rKey[i] >= threshold)
        count = cute.arch.warp_redux_sync(count, "add")
        if cutlass.const_expr(self.warps > 1):
            if lane % WARP == 0:
                sCount[lane // WARP, parity] = count
            cute.arch.sync_threads()
            count = Int32(0)
            for warp in cutlass.range_constexpr(self.warps):
                count += sCount[warp, parity]
        return count

    @cute.jit
    def collect(self, rKey: cute.Tensor, threshold, lane: Int32, sKept: cute.Tensor, sTaken: cute.Pointer):
        """Put the keys that reach the threshold into shared memory, in any order."""
        base = Int32(0)
        if cutlass.const_expr(self.warps > 1):
            count = Int32(0)
            for i in cutlass.range_constexpr(cute.size(rKey)):
                count += Int32(rKey[i] >= threshold)
            count = cute.arch.warp_redux_sync(count, "add")
            if lane % WARP == 0:
                base = cute.arch.atomic_add(sTaken, count)
            base = cute.arch.shuffle_sync(base, 0)
        below = (Int32(1) << (lane % WARP)) - 1
        for i in cutlass.range_constexpr(cute.size(rKey)):
            chosen = rKey[i] >= threshold
            ballot = cute.arch.vote_ballot_sync(chosen)
            if chosen:
                sKept[base + cute.arch.popc(ballot & below)] = rKey[i]
            base += cute.arch.popc(ballot)

    @cute.jit
    def write(
        self,
        sKept: cute.Tensor,
        kept: Int32,
        mIndices: cute.Tensor,
        mValues: cute.Tensor,
        sValue: cute.Tensor,
        address: Int64,
        row: Int32,
        lane: Int32,
        softmax: Int32,
    ):
        """Each kept key goes to the place that its rank names."""
        rows, k = mValues.shape[0], mValues.shape[1]
        size = cutlass.const_expr(self.dtype.width // 8)
        for mine in cutlass.range(lane, kept, self.lanes, unroll=1):
            key = sKept[mine]
            rank = Int32(0)
            for other in cutlass.range(kept, unroll=8):
                rank += Int32(sKept[other] > key)
            if rank < k:
                index = ordered.key_index(key, self.dtype)
                gScore = cute.make_ptr(self.dtype, address + Int64(index) * size, cute.AddressSpace.gmem)
                value = cute.make_tensor(gScore, 1)[0]
                sValue[rank] = Float32(value)
                if row < rows:
                    mIndices[row, rank] = index
                    if softmax == 0:
                        mValues[row, rank] = value
        if softmax != 0:
            self.sync()
            top = sValue[0]
            total = Float32(0.0)
            for place in cutlass.range(lane % WARP, k, WARP, unroll=1):
                total += cute.math.exp(sValue[place] - top)
            total = cute.arch.warp_reduction_sum(total)
            if row < rows:
                for place in cutlass.range(lane, k, self.lanes, unroll=1):
                    mValues[row, place] = self.dtype(cute.math.exp(sValue[place] - top) / total)

    @cute.jit
    def sync(self):
        """Among the lanes of one row."""
        if cutlass.const_expr(self.warps > 1):
            cute.arch.sync_threads()
        else:
            cute.arch.sync_warp()
