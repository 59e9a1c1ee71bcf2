"""The k largest of each row for k <= 128: narrow a row down to at most 256 keys, sort those in one warp.

Built for what topk.py does not cover: 8 < k <= 128, rows up to 4096. Keys are unique (ordered.py), so for every count
there is a threshold that exactly so many keys reach.

A float32 row of N needs 4 N bytes read and 8 k written: 740x1000 with k = 50 is 3.3 MB, 0.8 us at 4.3 TB/s, and
740x4096 with k = 128 is 12.9 MB, 3.0 us. Each bisection step compares every key once.

Work: a row up to 256 is sorted as it is, eight keys a lane. A longer one is held by ``warps`` warps, 8 * ``chunks``
keys a lane, and bisected: starting between a lower bound from the maxima of groups of keys and the row's maximum, each
step counts the keys that reach the middle, by one warp-wide sum and one barrier, until the count lies between k and
256. It takes at most as many steps as a key has bits. The keys that reach the threshold go to shared memory in any
order, and the first warp sorts them, so the result does not depend on the order in which warps arrive.

Steps on normal random rows, simulated, median and largest of 200 rows each of bf16 and float32:

    N            257   512   740  1000  1024  1025  1100  2048  3000  4096
    k = 9        1 2   1 1   1 7   1 7   1 7   7 8   1 7   1 8   1 3   1 2
    k = 50       1 1   1 6   1 7   1 7   1 2   7 8   1 2   1 8   1 3   1 3
    k = 128      1 7   1 7   8 9  8 10   3 9   7 9   3 9   1 4  1 10   2 4

Where groups are too few for k, or the bound falls below zero, bisection starts among the exponents and takes about
seven steps to leave them.

Its time as a fraction of that limit was not measured when this was written: results/ has it from the next timing on
(benchmarks/topk_fwd.py holds 740x1000 k50, 740x4096 k128 and 740x256 k8 in float32).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, Int64, Uint32

from . import networks, ordered

WARP = 32
SORTED = WARP * networks.WIDTH


@dataclass(frozen=True)
class TopKSelect:
    """One compiled variant."""

    dtype: type[cutlass.Numeric]
    warps: int  # per row
    chunks: int  # groups of eight scores per lane
    rows: int  # per block: 1 where a row takes several warps
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
        row = block * self.rows + tid // self.lanes
        lane = tid % self.lanes
        length = mScores.shape[1]
        k = mValues.shape[1]
        # Every lane takes part in the sort: past the last row they repeat it and write nothing.
        source = cutlass.min(row, mScores.shape[0] - 1)
        size = cutlass.const_expr(self.dtype.width // 8)
        address = mScores.iterator.toint() + Int64(source) * mScores.stride[0] * size
        vectors = (address & 15) == 0
        key = ordered.key_type(self.dtype)
        if cutlass.const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()

        rWord = cute.make_rmem_tensor((ordered.words_per_lane(self.dtype), self.chunks), Uint32)
        rKey = cute.make_rmem_tensor((ordered.VECTOR, self.chunks), key)
        for chunk in cutlass.range_constexpr(self.chunks):
            first = (chunk * self.lanes + lane) * ordered.VECTOR
            let_next_in = self.dependent_launch and chunk == self.chunks - 1
            ordered.load_words(address, first, length, vectors, rWord[None, chunk], self.dtype, let_next_in)
        for chunk in cutlass.range_constexpr(self.chunks):
            first = (chunk * self.lanes + lane) * ordered.VECTOR
            ordered.make_keys(rWord[None, chunk], first, length, rKey[None, chunk], self.dtype)
        if cutlass.const_expr(self.warps > 1):
            sKept = cute.make_tensor(cute.arch.alloc_smem(key, SORTED, alignment=16), SORTED)
            kept = self.narrow(rKey, length, k, lane, sKept)
            if lane < WARP:
                rKept = cute.make_rmem_tensor(networks.WIDTH, key)
                for i in cutlass.range_constexpr(networks.WIDTH):
                    rKept[i] = key(ordered.pad_key(self.dtype))
                    if i * WARP + lane < kept:
                        rKept[i] = sKept[i * WARP + lane]
                self.sort_and_write(rKept, mValues, mIndices, address, row, lane, softmax)
        else:
            self.sort_and_write(rKey, mValues, mIndices, address, row, lane, softmax)

    @cute.jit
    def narrow(self, rKey: cute.Tensor, length: Int32, k: Int32, lane: Int32, sKept: cute.Tensor) -> Int32:
        """Put k to SORTED of the row's keys, those from a threshold up, into shared memory; returns how many."""
        key = ordered.key_type(self.dtype)
        sBound = cute.make_tensor(cute.arch.alloc_smem(key, 2 * self.warps, alignment=16), (self.warps, 2))
        sCount = cute.make_tensor(cute.arch.alloc_smem(Int32, 2 * self.warps, alignment=16), (self.warps, 2))
        sTaken = cute.arch.alloc_smem(Int32, 1)  # places in sKept that are given out
        if lane == 0:
            cute.make_tensor(sTaken, 1)[0] = Int32(0)
        low, high = self.bounds(rKey, length, k, lane, sBound)
        count = Int32(SORTED + 1)
        mine = Int32(0)
        parity = Int32(0)
        # Always: at least k keys reach low, fewer than k exceed high.
        while count < k or count > SORTED:
            middle = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
            mine = Int32(0)
            for i in cutlass.range_constexpr(cute.size(rKey)):
                mine += Int32(rKey[i] >= middle)
            mine = cute.arch.warp_redux_sync(mine, "add")
            if lane % WARP == 0:
                sCount[lane // WARP, parity] = mine
            cute.arch.sync_threads()  # one a step is enough, for steps alternate between two rows of sCount
            count = Int32(0)
            for warp in cutlass.range_constexpr(self.warps):
                count += sCount[warp, parity]
            parity = 1 - parity
            if count >= k:
                low = middle
            else:
                high = middle - 1

        place = Int32(0)
        if lane % WARP == 0:
            place = cute.arch.atomic_add(sTaken, mine)
        place = cute.arch.shuffle_sync(place, 0)
        below = (Int32(1) << (lane % WARP)) - 1
        for i in cutlass.range_constexpr(cute.size(rKey)):
            chosen = rKey[i] >= low
            ballot = cute.arch.vote_ballot_sync(chosen)
            if chosen:
                sKept[place + cute.arch.popc(ballot & below)] = rKey[i]
            place += cute.arch.popc(ballot)
        cute.arch.sync_threads()
        return count

    @cute.jit
    def bounds(self, rKey: cute.Tensor, length: Int32, k: Int32, lane: Int32, sBound: cute.Tensor):
        """A key that at least k keys of the row reach (or a pad), and the row's largest.

        Every group of keys has one that reaches the smallest of the groups' maxima. A group is what two neighbouring
        lanes hold, or one lane where pairs with an element are fewer than k; where lanes are too, only a pad is sure.
        """
        key = ordered.key_type(self.dtype)
        pad = cutlass.const_expr(ordered.pad_key(self.dtype))
        lanes = cutlass.min(cute.ceil_div(length, ordered.VECTOR), self.lanes)  # that hold an element
        high = rKey[0]
        for i in cutlass.range_constexpr(1, cute.size(rKey)):
            high = cutlass.max(high, rKey[i])
        pair = cutlass.max(high, cute.arch.shuffle_sync_bfly(high, 1))
        low = cutlass.select_(lanes + 1 >= 2 * k, pair, high)
        low = cutlass.select_(low == key(pad), key(-1 - pad), low)  # a group without an element is none
        for step in cutlass.range_constexpr(5):
            low = cutlass.min(low, cute.arch.shuffle_sync_bfly(low, 1 << step))
            high = cutlass.max(high, cute.arch.shuffle_sync_bfly(high, 1 << step))
        if lane % WARP == 0:
            sBound[lane // WARP, 0] = low
            sBound[lane // WARP, 1] = high
        cute.arch.sync_threads()
        for warp in cutlass.range_constexpr(self.warps):
            low = cutlass.min(low, sBound[warp, 0])
            high = cutlass.max(high, sBound[warp, 1])
        return cutlass.select_(lanes < k, key(pad), low), high

    @cute.jit
    def sort_and_write(
        self,
        rKey: cute.Tensor,
        mValues: cute.Tensor,
        mIndices: cute.Tensor,
        address: Int64,
        row: Int32,
        lane: Int32,
        softmax: Int32,
    ):
        """Sort the 256 keys of a warp and write the first k: lane i has number 8 i to 8 i + 7."""
        rows, k = mValues.shape[0], mValues.shape[1]
        size = cutlass.const_expr(self.dtype.width // 8)
        rSorted = networks.sort_warp(networks.sort_lane(rKey), lane)
        rValue = cute.make_rmem_tensor(networks.WIDTH, self.dtype)
        rIndex = cute.make_rmem_tensor(networks.WIDTH, Int32)
        for i in cutlass.range_constexpr(networks.WIDTH):
            kept = networks.WIDTH * lane + i < k
            rIndex[i] = cutlass.select_(kept, ordered.key_index(rSorted[i], self.dtype), Int32(0))
            gScore = cute.make_ptr(self.dtype, address + Int64(rIndex[i]) * size, cute.AddressSpace.gmem)
            rValue[i] = cute.make_tensor(gScore, 1)[0]
        if softmax != 0:
            rPower = cute.make_rmem_tensor(networks.WIDTH, Float32)
            top = cute.arch.shuffle_sync(Float32(rValue[0]), 0)
            total = Float32(0.0)
            for i in cutlass.range_constexpr(networks.WIDTH):
                kept = networks.WIDTH * lane + i < k
                rPower[i] = cutlass.select_(kept, cute.math.exp(Float32(rValue[i]) - top), Float32(0.0))
                total += rPower[i]
            total = cute.arch.warp_reduction_sum(total)
            for i in cutlass.range_constexpr(networks.WIDTH):
                rValue[i] = self.dtype(rPower[i] / total)
        for i in cutlass.range_constexpr(networks.WIDTH):
            place = networks.WIDTH * lane + i
            if place < k and row < rows:
                mValues[row, place] = rValue[i]
                mIndices[row, place] = rIndex[i]
