"""Dequantises INT8, INT4 and FP8 caches for prefill, which reads keys and values of the queries' dtype.

Keys and values of each sequence, rounded once to bf16 or fp16, go to a block of its own, one behind the other, under a
table that says which pages exist: -1 where one does not, with zeros in its place, else the sequence. FP8 codes are
converted without their scales, exactly; keys of the queries' dtype are copied. Launched between the append kernel and
prefill. A thread converts 16 bytes of codes at a time; the keys of a sequence are shared by several thread blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Uint32

from kestrel_runtime.cute_dsl import arguments, parameters, pdl, ptx

from .append import address, lengths_and_table
from .constants import INT4_PAGE
from .formats import E4m3, E5m2
from .parameters import DequantiseScalars, DequantiseTensors
from .prefill_base import divide

THREADS = 256


@dataclass(frozen=True)
class Dequantise:
    """One compiled variant, for bf16 and fp16 results, which it sees as bf16."""

    pdl: bool
    cache: str
    """"int8", "int4", "fp8", or "same": keys and values of the queries' dtype are copied."""
    by_bits: bool
    """e4m3 without the instruction that converts it."""

    @property
    def int4(self) -> bool:
        return self.cache == "int4"

    @property
    def dims(self) -> int:
        """Of 16 bytes of codes."""
        return {"int4": 32, "same": 8}.get(self.cache, 16)

    @property
    def unit(self) -> int:
        """Elements of 16 bytes of codes."""
        return 8 if self.cache == "same" else 16

    def arguments(self) -> tuple[Any, ...]:
        """Arguments to compile with."""
        batch, blocks, page, kv_heads, head_dim, width = (cute.sym_int() for _ in range(6))
        codes = {"int8": cutlass.Int8, "same": cutlass.BFloat16}.get(self.cache, cutlass.Uint8)
        mK, mV = (arguments.strided(codes, blocks, page, kv_heads, width, unit=self.unit) for _ in range(2))
        mLengths, mTable = lengths_and_table(batch)
        of_tokens = Float16 if self.int4 else Float32
        sizes = (blocks, page, kv_heads)
        if self.cache in ("fp8", "same"):  # whose scales are not read here
            sizes = tuple(cute.sym_int() for _ in range(3))
        tokens = [arguments.any_strides(of_tokens, *sizes) for _ in range(2)]
        bf16 = cutlass.BFloat16
        channels = [arguments.any_strides(Float16, *(cute.sym_int() for _ in range(3))) for _ in range(2)]
        tail = arguments.any_strides(bf16, *(cute.sym_int() for _ in range(4)))
        if self.int4:
            channels = [arguments.strided(Float16, cute.sym_int(), kv_heads, head_dim, unit=8) for _ in range(2)]
            tail = arguments.strided(bf16, cute.sym_int(), page, kv_heads, head_dim, unit=8)
        tensors = DequantiseTensors(
            mK=mK,
            mV=mV,
            mLengths=mLengths,
            mTable=mTable,
            mKeyScale=channels[0] if self.int4 else tokens[0],
            mKeyZero=channels[1],
            mValueScale=tokens[1],
            mValueZero=arguments.any_strides(of_tokens, *(cute.sym_int() for _ in range(3))),
            mTail=tail,
            mSequences=arguments.any_strides(Int32, cute.sym_int()),
            mOutK=arguments.strided(bf16, cute.sym_int(), page, kv_heads, head_dim, unit=8),
            mOutV=arguments.strided(bf16, cute.sym_int(), page, kv_heads, head_dim, unit=8),
            mOutTable=arguments.contiguous(Int32, cute.sym_int(), align=None),
            mOutLengths=arguments.contiguous(Int32, cute.sym_int(), align=None),
        )
        return (*tensors, *parameters.compile_time(DequantiseScalars), Int32(1), arguments.torch_stream())

    @cute.jit
    def __call__(self, *given):
        num_tensors = cutlass.const_expr(len(DequantiseTensors._fields))
        tensors, scalars = DequantiseTensors(*given[:num_tensors]), DequantiseScalars(*given[num_tensors:-2])
        self.kernel(tensors, scalars).launch(
            grid=[scalars.blocks, given[-2], 1], block=[THREADS, 1, 1], stream=given[-1], use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, tensors: DequantiseTensors, scalars: DequantiseScalars):
        tid, _, _ = cute.arch.thread_idx()
        block, sequence, _ = cute.arch.block_idx()
        mK, page_size = tensors.mK, tensors.mK.shape[1]
        units = mK.shape[3] // self.unit
        of_head = scalars.step_keys * units
        if cutlass.const_expr(self.pdl):
            pdl.wait()
            pdl.trigger()
        length = tensors.mLengths[sequence]
        tail_row = Int32(0)
        if cutlass.const_expr(self.int4):
            tail_row = tensors.mSequences[sequence]
            known = tail_row >= 0 and tail_row < tensors.mTail.shape[0]
            length = cutlass.select_(known, length, Int32(-1))
        length = cutlass.select_(
            length < 0, length, cutlass.min(length, 0x7FFFFFFF - scalars.appended) + scalars.appended
        )
        if block == 0 and tid == 0:
            tensors.mOutLengths[sequence] = length
        held = cutlass.min(length, scalars.pages * page_size)
        first = scalars.step_keys * block
        while first < held:
            i = tid
            while i < of_head * mK.shape[2]:  # head by head, as they lie in the results
                head = divide(i, of_head)
                in_head = i - head * of_head
                of_chunk = divide(in_head, units)
                key, unit = first + of_chunk, in_head - of_chunk * units
                if key < held:
                    self.convert(tensors, scalars, sequence, key, head, unit, length, tail_row)
                i += THREADS
            first += scalars.step_keys * scalars.blocks

    @cute.jit
    def convert(self, tensors, scalars, sequence, key, head, unit, length, tail_row):
        """16 bytes of codes of a key, and of its value."""
        page_size = tensors.mK.shape[1]
        entry = divide(key, page_size)
        slot, to_page = key - entry * page_size, sequence * scalars.pages + entry
        page = sequence
        if scalars.has_block_table != 0:
            page = tensors.mTable[sequence, entry]
            page = cutlass.select_(page < tensors.mK.shape[0], page, Int32(-1))
            if slot == 0 and head == 0 and unit == 0:
                tensors.mOutTable[to_page] = cutlass.select_(page < 0, Int32(-1), sequence)
        if page < 0:
            for i in cutlass.range_constexpr(self.dims // 8):
                for mOut in (tensors.mOutK, tensors.mOutV):
                    to = address(mOut, (to_page, slot, head, unit * self.dims + 8 * i), 2)
                    ptx.store_global(to, [Uint32(0)] * 4)
        else:
            dim = unit * self.dims
            source, target = (page, slot, head, unit * self.unit), (to_page, slot, head, dim)
            if cutlass.const_expr(self.int4):
                if key >= length // INT4_PAGE * INT4_PAGE:
                    for i in cutlass.range_constexpr(self.dims // 8):
                        words = ptx.load_global(address(tensors.mTail, (tail_row, slot, head, dim + 8 * i), 2), 4)
                        ptx.store_global(address(tensors.mOutK, (*target[:3], dim + 8 * i), 2), words)
                else:
                    self.convert_channels(tensors, scalars, source, target)
                scale = Float32(tensors.mValueScale[page, slot, head])
                zero = Float32(tensors.mValueZero[page, slot, head])
                self.convert_row(tensors.mV, tensors.mOutV, scalars, source, target, scale, zero)
            elif cutlass.const_expr(self.cache == "same"):
                given = [ptx.load_global(address(mX, source, 2), 4) for mX in (tensors.mK, tensors.mV)]
                for i in cutlass.range_constexpr(2):
                    ptx.store_global(address((tensors.mOutK, tensors.mOutV)[i], target, 2), given[i])
            elif cutlass.const_expr(self.cache == "fp8"):
                self.convert_fp8(tensors.mK, tensors.mOutK, scalars, source, target)
                self.convert_fp8(tensors.mV, tensors.mOutV, scalars, source, target)
            else:
                zero = Float32(0.0)
                k_scale, v_scale = (x[page, slot, head] for x in (tensors.mKeyScale, tensors.mValueScale))
                self.convert_row(tensors.mK, tensors.mOutK, scalars, source, target, k_scale, zero)
                self.convert_row(tensors.mV, tensors.mOutV, scalars, source, target, v_scale, zero)

    @cute.jit
    def convert_row(self, mCodes, mOut, scalars, source, target, scale, zero):
        """16 bytes of codes of one scale."""
        words = ptx.load_global(address(mCodes, source, 1), 4)
        values = [(code - zero) * scale for word in words for code in self.codes_of(word)]
        self.store(mOut, scalars, target, values)

    @cute.jit
    def convert_fp8(self, mCodes, mOut, scalars, source, target):
        """16 FP8 codes."""
        words = ptx.load_global(address(mCodes, source, 1), 4)
        for half in cutlass.range_constexpr(2):
            pairs = []
            for word in words[2 * half : 2 * half + 2]:
                e4m3, e5m2 = E4m3(self.by_bits).to_f16(word), E5m2().to_f16(word)
                for i in cutlass.range_constexpr(2):
                    pair = cutlass.select_(scalars.codes_are_e5m2 != 0, e5m2[i], e4m3[i])
                    low, high = ptx.unpack_f32x2(pair, "f16")
                    pairs.append(cutlass.select_(scalars.is_bf16 != 0, ptx.pack_f32x2(low, high, "bf16"), pair))
            ptx.store_global(address(mOut, (*target[:3], target[3] + 8 * half), 2), pairs)

    @cute.jit
    def convert_channels(self, tensors, scalars, source, target):
        """16 bytes of codes of a key whose channels have a scale and a zero each."""
        words = ptx.load_global(address(tensors.mK, source, 1), 4)
        page, _, head, dim = source[0], source[1], source[2], target[3]
        for i in cutlass.range_constexpr(4):  # of eight dims
            at = (page, head, dim + 8 * i)
            scales, zeros = (
                [x for pair in ptx.load_global(address(mX, at, 2), 4) for x in ptx.unpack_f32x2(pair, "f16")]
                for mX in (tensors.mKeyScale, tensors.mKeyZero)
            )
            codes = self.codes_of(words[i])
            values = [(codes[k] - zeros[k]) * scales[k] for k in range(8)]
            self.store(tensors.mOutK, scalars, (*target[:3], dim + 8 * i), values)

    def codes_of(self, word):
        """The codes of a word as float32."""
        if self.int4:
            return [Float32(Int32(word >> 4 * i & 15)) for i in range(8)]
        return [Float32(Int32(word << 24 - 8 * i) >> 24) for i in range(4)]

    @cute.jit
    def store(self, mOut, scalars, target, values):
        """Store values, a multiple of eight, rounded once."""
        for first in cutlass.range_constexpr(0, len(values), 8):
            words = []
            for i in cutlass.range_constexpr(first, first + 8, 2):
                pairs = [ptx.pack_f32x2(values[i], values[i + 1], kind) for kind in ("bf16", "f16")]
                words.append(cutlass.select_(scalars.is_bf16 != 0, *pairs))
            ptx.store_global(address(mOut, (*target[:3], target[3] + first), 2), words)
