"""The k largest of each row for k <= 8: sorted lists of eight in registers, merged by shuffles.

Built for router scores, rows of 64 and 256, one to thousands of rows. A row of N 2-byte scores needs 2N bytes read and
6k written: nothing, next to the time of a launch. So the row is loaded at once, 16 bytes a lane, and what counts is the
length of the dependent chain after the load.

Work: ``lanes`` lanes hold one row, ``chunks`` groups of eight scores each. A lane sorts each group with a 19-comparator
network and keeps the best eight; then log2(lanes) times it takes its partner's list by shuffle, keeps the larger of
first and last, second and last but one, ..., which is a bitonic sequence of the best eight, and sorts that with 12
comparators. Both partners compute the same list, so at the end lane i of a row writes result i. Rows that need
several warps meet once in shared memory.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings import driver as cuda
from cutlass import Float32, Int32, Int64

from . import ordered

LIST = 8
# Batcher's odd-even merge sort of eight.
SORT = (
    ((0, 1), (2, 3), (4, 5), (6, 7)),
    ((0, 2), (1, 3), (4, 6), (5, 7)),
    ((1, 2), (5, 6)),
    ((0, 4), (1, 5), (2, 6), (3, 7)),
    ((2, 4), (3, 5)),
    ((1, 2), (3, 4), (5, 6)),
)
# The last three layers of a bitonic sort of eight.
MERGE = (
    ((0, 4), (1, 5), (2, 6), (3, 7)),
    ((0, 2), (1, 3), (4, 6), (5, 7)),
    ((0, 1), (2, 3), (4, 5), (6, 7)),
)


@dataclass(frozen=True)
class TopK:
    """One compiled variant."""

    dtype: type[cutlass.Numeric]
    lanes: int  # of one warp, per row
    chunks: int  # groups of eight scores per lane
    warps: int  # per row
    threads: int  # per block
    dependent_launch: bool

    @property
    def limit(self) -> int:
        """The longest row."""
        return self.lanes * self.warps * self.chunks * ordered.VECTOR

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
        if cutlass.const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_launch_dependents()
        row = block * self.rows + tid // (self.lanes * self.warps)
        lane = tid % (self.lanes * self.warps)
        length = mScores.shape[1]
        k = mValues.shape[1]
        # Every lane takes part in the shuffles: past the last row they repeat it and write nothing.
        source = cutlass.min(row, mScores.shape[0] - 1)
        size = cutlass.const_expr(self.dtype.width // 8)
        address = mScores.iterator.toint() + Int64(source) * mScores.stride[0] * size
        vectors = (address & 15) == 0
        if cutlass.const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()

        key = ordered.key_type(self.dtype)
        rLoad = cute.make_rmem_tensor((LIST, self.chunks), key)
        for chunk in cutlass.range_constexpr(self.chunks):
            first = (chunk * self.lanes * self.warps + lane) * ordered.VECTOR
            ordered.load_keys(address, first, length, vectors, rLoad[None, chunk], self.dtype)
        rList = self.sort(rLoad[None, 0])
        for chunk in cutlass.range_constexpr(1, self.chunks):
            rList = self.merge(rList, self.sort(rLoad[None, chunk]))
        rList = self.merge_lanes(rList, self.lanes)
        if cutlass.const_expr(self.warps > 1):
            sList = cute.make_tensor(cute.arch.alloc_smem(key, LIST * self.warps, alignment=16), (LIST, self.warps))
            if lane % 32 == 0:
                for i in cutlass.range_constexpr(LIST):
                    sList[i, lane // 32] = rList[i]
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(LIST):
                rList[i] = sList[i, lane % self.warps]
            rList = self.merge_lanes(rList, self.warps)
        self.write(rList, mValues, mIndices, address, row, lane, mScores.shape[0], k, softmax)

    @cute.jit
    def write(
        self,
        rList,
        mValues: cute.Tensor,
        mIndices: cute.Tensor,
        address: Int64,
        row: Int32,
        lane: Int32,
        rows: Int32,
        k: Int32,
        softmax: Int32,
    ):
        """Lane i of a row writes result i."""
        mine = rList[0]
        for i in cutlass.range_constexpr(1, LIST):
            mine = cutlass.select_(lane == i, rList[i], mine)
        kept = lane < k
        index = ordered.key_index(mine, self.dtype)
        index = cutlass.select_(kept, index, Int32(0))
        size = cutlass.const_expr(self.dtype.width // 8)
        gScore = cute.make_ptr(self.dtype, address + Int64(index) * size, cute.AddressSpace.gmem)
        value = cute.make_tensor(gScore, 1)[0]
        if softmax != 0:
            logit = Float32(value)
            top = cute.arch.shuffle_sync(logit, 0, mask_and_clamp=self.segment)
            power = cute.math.exp(logit - top)
            power = cutlass.select_(kept, power, Float32(0.0))
            total = power
            for step in cutlass.range_constexpr(3):
                total += cute.arch.shuffle_sync_bfly(total, 1 << step)
            value = self.dtype(power / total)
        if kept and row < rows:
            mValues[row, lane] = value
            mIndices[row, lane] = index

    @property
    def segment(self) -> int:
        """The mask and clamp of a shuffle among the first eight lanes of a row."""
        return ((32 - LIST) << 8) | 31

    @cute.jit
    def sort(self, rKey):
        r = [rKey[i] for i in range(LIST)]
        return network(r, SORT)

    @cute.jit
    def merge(self, r, other):
        """The best eight of two descending lists."""
        return network([cutlass.max(r[i], other[LIST - 1 - i]) for i in range(LIST)], MERGE)

    @cute.jit
    def merge_lanes(self, r, lanes: cutlass.Constexpr):
        step = 1
        while cutlass.const_expr(step < lanes):
            other = [cute.arch.shuffle_sync_bfly(r[i], step) for i in range(LIST)]
            r = self.merge(r, other)
            step *= 2
        return r


def network(r, layers):
    """Put the larger of each pair first."""
    r = list(r)
    for layer in layers:
        for i, j in layer:
            r[i], r[j] = cutlass.max(r[i], r[j]), cutlass.min(r[i], r[j])
    return r
