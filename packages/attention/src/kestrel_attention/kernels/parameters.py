"""The arguments of the kernels, each list written once. Imports without the DSL.

Scalars: the host makes tuples of numbers, compilation derives the types, and kernels unpack into the same tuples.
Tensors: fields in the order of the entry point; compilation and kernels go by their names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kestrel_runtime.cute_dsl.parameters import f32, i32, u32

Tensor = Any  # torch.Tensor on the host, cute.Tensor in a kernel


class DecodeTensors(NamedTuple):
    """Of decode.py. An optional tensor that a call does not have is replaced by any other, and not read."""

    mQ: Tensor
    mK: Tensor
    mV: Tensor
    mLengths: Tensor
    mTable: Tensor
    mKScale: Tensor
    mVScale: Tensor
    mPrefix: Tensor
    mSinks: Tensor
    mOut: Tensor
    mLse: Tensor
    mPartialOut: Tensor
    mPartialLse: Tensor
    mNumSplits: Tensor


class DecodeScalars(NamedTuple):
    """Of decode.py. The fields of SplitRule are part of it."""

    has_block_table: i32
    capacity: i32  # keys that the pages of a sequence hold
    appended: i32  # keys that the call appends; cache_seqlens does not count them
    page_multiplier: u32  # key // page size is key * page_multiplier >> page_shift
    page_shift: i32
    group_size: i32  # query heads of a KV head
    inverse_group_size: f32
    k_scale_heads: i32  # 0: no scale, 1: one for all heads, 2: one for each
    v_scale_heads: i32
    has_prefix_lens: i32
    has_sinks: i32
    prefix_len: i32
    window_left: i32
    window_right: i32
    softmax_scale: f32  # with a soft cap, times 2 / softcap
    softcap: f32
    unsplit_keys: i32
    medium_split_keys: i32
    medium_keys: i32
    long_split_keys: i32
    max_splits: i32
    num_splits: i32  # that the launch has thread blocks or warp groups for
    expected_split_keys: i32  # of a sequence that fills its pages
    expected_start: i32  # the first key that it visits


class HalfExtra(NamedTuple):
    """Further arguments of decode.py for e5m2 caches, where one kernel serves bf16 and fp16 queries."""

    is_bf16: i32  # 1: queries and results are bf16, 0: fp16


class Int8Extra(NamedTuple):
    """Further arguments of decode.py for INT8 caches."""

    mKeyScale: Tensor
    mValueScale: Tensor
    is_bf16: i32


class Int4Extra(NamedTuple):
    """Further arguments of decode.py for INT4 caches."""

    mKeyScale: Tensor
    mKeyZero: Tensor
    mValueScale: Tensor
    mValueZero: Tensor
    mTail: Tensor
    mSequences: Tensor
    is_bf16: i32


class CombineTensors(NamedTuple):
    """Of combine.py. Without sinks, mSinks is a float32 vector that is not read."""

    mOut: Tensor
    mLse: Tensor
    mPartialOut: Tensor
    mPartialLse: Tensor
    mNumSplits: Tensor
    mSinks: Tensor


class CombineScalars(NamedTuple):
    """Of combine.py."""

    group_size: i32
    num_splits: i32
    has_sinks: i32


class AppendTensors(NamedTuple):
    """Of append.py, and of append_integers.py for INT8."""

    mNewK: Tensor
    mNewV: Tensor
    mK: Tensor
    mV: Tensor
    mLengths: Tensor
    mTable: Tensor
    mKScale: Tensor
    mVScale: Tensor


class AppendInt4Tensors(NamedTuple):
    """Of append_integers.py for INT4; scales and zeros of keys are per channel of a page, those of values per token."""

    mNewK: Tensor
    mNewV: Tensor
    mK: Tensor
    mV: Tensor
    mLengths: Tensor
    mTable: Tensor
    mKScale: Tensor
    mKZero: Tensor
    mVScale: Tensor
    mVZero: Tensor
    mTail: Tensor
    mSequences: Tensor


class DequantiseTensors(NamedTuple):
    """Of dequantise.py. Any other tensor is in place of what a cache lacks: INT8 zeros, tail and sequences; FP8 all."""

    mK: Tensor
    mV: Tensor
    mLengths: Tensor
    mTable: Tensor
    mKeyScale: Tensor
    mKeyZero: Tensor
    mValueScale: Tensor
    mValueZero: Tensor
    mTail: Tensor
    mSequences: Tensor
    mOutK: Tensor  # [sequence and page, slot, head, dim]
    mOutV: Tensor
    mOutTable: Tensor  # [sequence and page]
    mOutLengths: Tensor


class DequantiseScalars(NamedTuple):
    """Of dequantise.py."""

    has_block_table: i32
    appended: i32  # keys that the call has appended; mLengths does not count them
    pages: i32  # of a sequence
    blocks: i32  # thread blocks that share the keys of a sequence
    step_keys: i32  # that one of them converts at a time
    is_bf16: i32  # 1: results are bf16, 0: fp16
    codes_are_e5m2: i32  # of an FP8 cache; else e4m3


class AppendScalars(NamedTuple):
    """Of append.py."""

    has_block_table: i32
    k_scale_heads: i32  # 0: no scale, 1: one for all heads, 2: one for each
    v_scale_heads: i32
    is_bf16: i32  # 1: new rows are bf16, 0: fp16


class AppendIntegerScalars(NamedTuple):
    """Of append_integers.py."""

    has_block_table: i32
    is_bf16: i32


class TauTailTensors(NamedTuple):
    """Of tau_tail.py."""

    mQkv: Tensor
    mLinear: Tensor
    mTable: Tensor
    mPositions: Tensor


class TauTailScalars(NamedTuple):
    """Of tau_tail.py."""

    wide_positions: i32  # 1: positions are int64, two elements each, the low half first
    num_heads: i32
    head_dim: i32


class PrefillTensors(NamedTuple):
    """Of prefill.py. An optional tensor that a call does not have is replaced by any other, and not read."""

    mQ: Tensor
    mK: Tensor
    mV: Tensor
    mStartQ: Tensor
    mStartK: Tensor
    mLengths: Tensor
    mTable: Tensor
    mPrefix: Tensor
    mSinks: Tensor
    mQScale: Tensor
    mKScale: Tensor
    mVScale: Tensor
    mOut: Tensor
    mLse: Tensor
    mPartialOut: Tensor  # of splits: [partial row, head, dim]; those of a sequence are [split, row]
    mPartialLse: Tensor  # [partial row, head]
    mNumSplits: Tensor  # [sequence, head, block of rows]
    mWorks: Tensor  # a list of works; with has_counter alone, a zero to count works in


class PrefillScalars(NamedTuple):
    """Of prefill.py."""

    has_device_numbers: i32  # the kernel reads lengths, starts, prefixes or scales ahead of keys
    packed_queries: i32  # mStartQ says which rows of block 0 of mQ are a sequence's
    key_starts: i32  # 1: mStartK says the same for mK and mV; 2: it gives lengths alone; 0: it is not there
    has_lengths: i32  # mLengths has the number of keys of each sequence
    has_block_table: i32  # 2: it says which keys exist; they lie behind one another in the block of their sequence
    max_queries: i32  # of a sequence
    max_keys: i32  # of a sequence; without lengths of any kind, their number
    appended: i32  # keys that the call appends; mLengths does not count them
    page_multiplier: u32  # key // page size is key * page_multiplier >> page_shift
    page_shift: i32
    group_size: i32  # query heads of a KV head
    section_heads: i32  # query heads that run together, so that their keys and values stay in L2
    has_prefix_lens: i32
    prefix_len: i32
    window_left: i32
    window_right: i32
    softmax_scale: f32  # positive; with a soft cap, times 2 / softcap
    query_signs: u32  # flips the signs of two queries where the scale is negative
    softcap: f32
    has_sinks: i32
    q_scale_heads: i32  # 0: no scale, 1: one for all heads, 2: one for each
    k_scale_heads: i32
    v_scale_heads: i32
    codes_are_e5m2: i32  # of keys and values of 8 bits; else they are e4m3
    max_blocks: i32  # thread blocks of a persistent kernel
    has_counter: i32  # a persistent kernel's blocks take the next work when they can
    num_splits: i32  # of a block of rows, at most, that the launch has work for; the portable kernel has one
    split_limit: i32  # splits of a block of rows that sees many keys; 0: by the queries of its sequence
    split_blocks: i32  # blocks of rows, at most, of a sequence whose keys are split
    partials_of_row: i32  # the first partial row of a sequence is this times its first row
    partials_of_sequence: i32  # plus this times its index
    section_multiplier: u32  # work // works of a section is work * section_multiplier >> section_shift, on Hopper
    section_shift: i32
    head_multiplier: u32  # the same for section_heads
    head_shift: i32
    listed_works: i32  # that mWorks has room for; 0: it lists none, and works are enumerated
    pack_shift: (
        i32  # binary logarithm of the heads of a KV head that share the works of few queries, if works are listed
    )


class PrefillCombineTensors(NamedTuple):
    """Of prefill_combine.py."""

    mOut: Tensor
    mLse: Tensor
    mPartialOut: Tensor
    mPartialLse: Tensor
    mNumSplits: Tensor
    mSinks: Tensor
    mStartQ: Tensor
    mWorks: Tensor


class PrefillCombineScalars(NamedTuple):
    """Of prefill_combine.py. As in PrefillScalars."""

    has_sinks: i32
    packed_queries: i32
    max_queries: i32
    num_splits: i32
    split_blocks: i32
    partials_of_row: i32
    partials_of_sequence: i32
    listed_works: i32


class PrefillWorksTensors(NamedTuple):
    """Of prefill_works.py. As in PrefillTensors."""

    mStartQ: Tensor
    mStartK: Tensor
    mLengths: Tensor
    mWorks: Tensor


class PrefillWorksScalars(NamedTuple):
    """Of prefill_works.py. Most as in PrefillScalars."""

    total_queries: i32  # rows of packed queries
    max_queries: i32
    max_keys: i32
    key_starts: i32
    has_lengths: i32
    heads: i32
    sections: i32  # of heads
    split_limit: i32
    block_rows: i32  # of a work without splits
    key_tile: i32
    listed_works: i32
    pack_shift: i32
    listed_blocks: i32  # with splits, that mWorks has room for
