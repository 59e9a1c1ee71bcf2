"""Sorting networks of eight keys, in descending order, in one lane and across the lanes of a warp."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

WIDTH = 8
# Batcher's odd-even merge sort of eight: 19 comparators.
SORT = (
    ((0, 1), (2, 3), (4, 5), (6, 7)),
    ((0, 2), (1, 3), (4, 6), (5, 7)),
    ((1, 2), (5, 6)),
    ((0, 4), (1, 5), (2, 6), (3, 7)),
    ((2, 4), (3, 5)),
    ((1, 2), (3, 4), (5, 6)),
)
# The last three layers of a bitonic sort of eight: 12 comparators.
MERGE = (
    ((0, 4), (1, 5), (2, 6), (3, 7)),
    ((0, 2), (1, 3), (4, 6), (5, 7)),
    ((0, 1), (2, 3), (4, 5), (6, 7)),
)


@cute.jit
def exchange(keys, layers: cutlass.Constexpr):
    """Put the larger of each pair first."""
    r = list(keys)
    for layer in cutlass.range_constexpr(len(layers)):
        for pair in cutlass.range_constexpr(len(layers[layer])):
            i, j = layers[layer][pair]
            larger, smaller = cutlass.max(r[i], r[j]), cutlass.min(r[i], r[j])
            r[i], r[j] = larger, smaller
    return r


@cute.jit
def sort_lane(rKey):
    """The eight keys of a lane, descending."""
    return exchange([rKey[i] for i in range(WIDTH)], SORT)


@cute.jit
def merge_lists(r, other):
    """The best eight of two descending lists of eight."""
    return exchange([cutlass.max(r[i], other[WIDTH - 1 - i]) for i in range(WIDTH)], MERGE)


@cute.jit
def sort_warp(r, lane: Int32):
    """Sort the 256 keys of a warp in descending order: lane i ends with keys 8 i to 8 i + 7.

    Every lane starts with eight sorted keys. Sorted runs of lanes are merged in pairs: the first step compares a run
    with the reverse of its neighbour, which leaves two bitonic runs; each further step halves the distance.
    """
    reach = 1
    while cutlass.const_expr(reach < 32):
        r = keep(r, 2 * reach - 1, True, (lane & reach) == 0)
        distance = reach // 2
        while cutlass.const_expr(distance > 0):
            r = keep(r, distance, False, (lane & distance) == 0)
            distance //= 2
        r = exchange(r, MERGE)
        reach *= 2
    return r


@cute.jit
def keep(r, partner: cutlass.Constexpr, reverse: cutlass.Constexpr, larger):
    """Compare with the lane whose number differs by ``partner``; keep the larger keys or the smaller ones."""
    other = [cute.arch.shuffle_sync_bfly(key, partner) for key in r]
    if cutlass.const_expr(reverse):
        other = other[::-1]
    return [cutlass.select_(larger, cutlass.max(a, b), cutlass.min(a, b)) for a, b in zip(r, other, strict=True)]
