"""What travels through the device functions of both prefill kernels. All fields are registers."""

from __future__ import annotations

from typing import Any, NamedTuple, get_type_hints

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32


class Keys(NamedTuple):
    """Where the keys and values of a sequence are in memory."""

    table: Int64  # address of its row of the block table
    table_stride: Int64
    table_width: Int32
    has_block_table: Int32  # as in PrefillScalars
    block: Int32  # that holds all keys where there is no table, or one of keys in order
    first_slot: Int32  # of its first key there
    num_blocks: Int32
    page_size: Int32
    multiplier: Uint32  # key // page_size is key * multiplier >> shift
    shift: Int32
    held: Int32  # keys that exist
    strides: Any  # of blocks and slots of K, then of V, in units of 16 bytes
    key_base: Int64  # address of the KV head
    value_base: Int64
    head_dim: Int32


class Visible(NamedTuple):
    """Which keys the rows of a warp see."""

    first: Int32  # all rows see the keys from first to last - 1, where these exist
    last: Int32
    prefix: Int32  # and those below it
    end: Int32  # no row sees a key from here on
    position: Int32  # of the warp's row 0
    held: Int32


class Scales(NamedTuple):
    """The scales of a head."""

    query_signs: Uint32  # flips the signs of two queries, or makes NaN of them where a scale is NaN
    softmax_scale: Float32  # positive, with the scales of FP8 queries and keys; with a soft cap, times 2 / softcap
    v_scale: Float32


class Work(NamedTuple):
    """A block of queries and the tiles of keys that any of them sees. All fields are 32 bits."""

    num_tiles: Int32  # of keys; negative: there is no more work
    first_tile: Int32  # of a split
    partial: Int32  # partial row of the block's first row in this split; negative: it has final results
    prefix_tiles: Int32
    gap: Int32  # tile n >= prefix_tiles has the keys from key_tile (n + gap) on
    rows: Int32
    position: Int32  # of the first row
    held: Int32  # keys that exist
    prefix: Int32  # keys below it are seen by all rows
    out_block: Int32
    out_row: Int32
    head: Int32
    softmax_scale: Float32  # as in Scales; for consumers a list, of rows g and g + 8
    query_signs: Uint32
    v_scale: Float32
    pack_shift: Int32  # as in Place


class Place(NamedTuple):
    """The coordinates of a work index."""

    sequence: Int32
    head: Int32
    row_block: Int32
    split: Int32
    pack_shift: Int32  # binary logarithm of the heads, from ``head`` on, whose queries the work has


class Located(NamedTuple):
    """Offsets of a lane's key and value of a tile, in units of 16 bytes; a bit for each key of the warp that exists."""

    key: Uint32
    value: Uint32
    exists: Uint32
    present: Uint32  # the same for those in memory: in order also zeros in place of keys that do not exist
    block: Uint32  # of the lane's key, and its slot there
    slot: Uint32


class OutputRows(NamedTuple):
    """Where in the output the rows of a block or warpgroup start."""

    block: Int32
    first_row: Int32
    head: Int32


class Sums(NamedTuple):
    """A thread's sums over keys, in registers, laid out as above."""

    rOut: cute.Tensor
    rMax: cute.Tensor  # of each row, the score that its weights are relative to
    rSum: cute.Tensor  # of each row's weights


class Results(NamedTuple):
    """The sums of a warp or warpgroup, what the epilogue makes results of them with, and where these go."""

    sums: Sums
    scale: Any  # scores times it are binary logarithms; a list, of rows g and g + 8
    v_scale: Float32
    at: OutputRows
    rows: Int32  # that exist from there on


class Pipe(NamedTuple):
    """Addresses in shared memory. Barriers are mbarriers, one per buffer or stage.

    An empty barrier waits for every consumer warp, a full one for the copies of all producer threads.
    """

    queries: Int32
    keys: Int32
    values: Int32
    queries_full: Int32
    queries_empty: Int32
    works_full: Int32  # a Work is there, ahead of its queries: an arrival of one thread
    keys_full: Int32  # also waits for the words of ``exists``, an arrival of each producer warp
    keys_empty: Int32
    values_full: Int32
    values_empty: Int32
    codes: Int32  # FP8 keys, then values, of the next tile
    exists: Int32  # words with a bit for each key of a tile, of twice as many tiles as stages
    works: Int32  # a Work per buffer of queries
    following: Int32  # two words for the index of the next work
    codes_full: Int32  # a barrier of each producer warp for its boxes of key codes, then of value codes
    query_map: Int64  # addresses of tensor maps
    key_map: Int64
    value_map: Int64


WORK_TYPES = get_type_hints(Work)
WORK_BYTES = 64  # at least those of its fields
