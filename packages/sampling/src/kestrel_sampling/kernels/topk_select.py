"""The k largest of each row for k <= 128: at most 256 candidates are selected by a pivot and sorted in one warp.

Covers what topk.py does not: 8 < k <= 128, rows up to 4096. A row up to 256 is sorted as it is, eight keys a lane. A
longer one is held by ``warps`` warps and bisected: each step counts the keys that reach the pivot, with one warp-wide
sum and one barrier, until k to 256 do. Keys are unique, so such a pivot exists. The bisection starts between a lower
bound from the maxima of groups of keys and the largest key. The candidates go to shared memory in any order, and the
first warp sorts them, so the result does not depend on the order in which warps arrive.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, Int64, Uint32

from kestrel_runtime.cute_dsl import numeric, pdl

from . import networks, sort_keys

WARP = 32
SORTED = WARP * networks.WIDTH


@dataclass(frozen=True)
class TopKSelect:
    """One compiled variant."""

    dtype: type[cutlass.Numeric]
    warps: int  # per row
    chunks: int  # groups of eight scores per lane
    rows: int  # per block: 1 where a row takes several warps
    use_pdl: bool

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
            use_pdl=self.use_pdl,
        )

    @cute.kernel
    def kernel(self, mScores: cute.Tensor, mValues: cute.Tensor, mIndices: cute.Tensor, softmax: Int32):
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block * self.rows + tid // self.lanes
        lane = tid % self.lanes
        length = mScores.shape[1]
        k = mValues.shape[1]
        # All lanes take part in the sort: those past the last row repeat it and write nothing.
        source = cutlass.min(row, mScores.shape[0] - 1)
        size = cutlass.const_expr(numeric.bytes_of(self.dtype))
        address = mScores.iterator.toint() + Int64(source) * mScores.stride[0] * size
        vectors = (address & 15) == 0
        key = sort_keys.key_type(self.dtype)
        if cutlass.const_expr(self.use_pdl):
            pdl.wait()

        rWord = cute.make_rmem_tensor((sort_keys.words_per_lane(self.dtype), self.chunks), Uint32)
        rKey = cute.make_rmem_tensor((sort_keys.VECTOR, self.chunks), key)
        for chunk in cutlass.range_constexpr(self.chunks):
            first = (chunk * self.lanes + lane) * sort_keys.VECTOR
            trigger_pdl = self.use_pdl and chunk == self.chunks - 1
            sort_keys.load_words(address, first, length, vectors, rWord[None, chunk], self.dtype, trigger_pdl)
        for chunk in cutlass.range_constexpr(self.chunks):
            first = (chunk * self.lanes + lane) * sort_keys.VECTOR
            sort_keys.make_keys(rWord[None, chunk], first, length, rKey[None, chunk], self.dtype)
        if cutlass.const_expr(self.warps > 1):
            sCandidate = cute.make_tensor(cute.arch.alloc_smem(key, SORTED, alignment=16), SORTED)
            num_candidates = self.select_candidates(rKey, length, k, lane, sCandidate)
            if lane < WARP:
                rCandidate = cute.make_rmem_tensor(networks.WIDTH, key)
                for i in cutlass.range_constexpr(networks.WIDTH):
                    rCandidate[i] = key(sort_keys.pad_key(self.dtype))
                    if i * WARP + lane < num_candidates:
                        rCandidate[i] = sCandidate[i * WARP + lane]
                self.sort_and_write(rCandidate, mValues, mIndices, address, row, lane, softmax)
        else:
            self.sort_and_write(rKey, mValues, mIndices, address, row, lane, softmax)

    @cute.jit
    def select_candidates(
        self, rKey: cute.Tensor, length: Int32, k: Int32, lane: Int32, sCandidate: cute.Tensor
    ) -> Int32:
        """Store the keys that reach a pivot, k to SORTED of them, in shared memory; returns how many."""
        key = sort_keys.key_type(self.dtype)
        sBound = cute.make_tensor(cute.arch.alloc_smem(key, 2 * self.warps, alignment=16), (self.warps, 2))
        sCount = cute.make_tensor(cute.arch.alloc_smem(Int32, 2 * self.warps, alignment=16), (self.warps, 2))
        sCursor = cute.arch.alloc_smem(Int32, 1)  # the next free place of sCandidate
        if lane == 0:
            cute.make_tensor(sCursor, 1)[0] = Int32(0)
        low, high = self.bounds(rKey, length, k, lane, sBound)
        count = Int32(SORTED + 1)
        of_warp = Int32(0)
        parity = Int32(0)
        # Invariant: at least k keys reach low, fewer than k exceed high.
        while count < k or count > SORTED:
            pivot = (low | high) - ((low ^ high) >> 1)  # the mean, rounded up, without overflow
            of_warp = Int32(0)
            for i in cutlass.range_constexpr(cute.size(rKey)):
                of_warp += Int32(rKey[i] >= pivot)
            of_warp = cute.arch.warp_redux_sync(of_warp, "add")
            if lane % WARP == 0:
                sCount[lane // WARP, parity] = of_warp
            cute.arch.sync_threads()  # one barrier a step suffices: steps alternate between two columns of sCount
            count = Int32(0)
            for warp in cutlass.range_constexpr(self.warps):
                count += sCount[warp, parity]
            parity = 1 - parity
            if count >= k:
                low = pivot
            else:
                high = pivot - 1

        place = Int32(0)
        if lane % WARP == 0:
            place = cute.arch.atomic_add(sCursor, of_warp)
        place = cute.arch.shuffle_sync(place, 0)
        below = (Int32(1) << (lane % WARP)) - 1
        for i in cutlass.range_constexpr(cute.size(rKey)):
            chosen = rKey[i] >= low
            ballot = cute.arch.vote_ballot_sync(chosen)
            if chosen:
                sCandidate[place + cute.arch.popc(ballot & below)] = rKey[i]
            place += cute.arch.popc(ballot)
        cute.arch.sync_threads()
        return count

    @cute.jit
    def bounds(self, rKey: cute.Tensor, length: Int32, k: Int32, lane: Int32, sBound: cute.Tensor):
        """A lower bound, a key that at least k keys of the row reach (or a pad), and the largest key.

        Every group of keys has a key that reaches the smallest of the groups' maxima. A group is two neighbouring
        lanes, or one lane if fewer than k pairs hold a score. If fewer than k lanes do, the bound is a pad.
        """
        key = sort_keys.key_type(self.dtype)
        pad = cutlass.const_expr(sort_keys.pad_key(self.dtype))
        lanes = cutlass.min(cute.ceil_div(length, sort_keys.VECTOR), self.lanes)  # that hold a score
        high = rKey[0]
        for i in cutlass.range_constexpr(1, cute.size(rKey)):
            high = cutlass.max(high, rKey[i])
        pair = cutlass.max(high, cute.arch.shuffle_sync_bfly(high, 1))
        low = cutlass.select_(lanes + 1 >= 2 * k, pair, high)
        low = cutlass.select_(low == key(pad), key(-1 - pad), low)  # a group without a score does not count
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
        size = cutlass.const_expr(numeric.bytes_of(self.dtype))
        rSorted = networks.sort_warp(networks.sort_lane(rKey), lane)
        rValue = cute.make_rmem_tensor(networks.WIDTH, self.dtype)
        rIndex = cute.make_rmem_tensor(networks.WIDTH, Int32)
        for i in cutlass.range_constexpr(networks.WIDTH):
            kept = networks.WIDTH * lane + i < k
            rIndex[i] = cutlass.select_(kept, sort_keys.key_index(rSorted[i], self.dtype), Int32(0))
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
