"""Scores as unique integer keys in the order of topk_fwd: larger number first, then lower index, NaN last.

A score becomes a signed integer: its bits, all but the sign flipped if the sign is set. -0.0 becomes the integer of
+0.0, NaN the smallest integer. Below it stand the bits of (limit - index), so that no bit of a score is lost:

    bf16, fp16   Int32  score in the high 16 bits, 0xffff - index in the low 16
    float32      Int64  score in the high 32 bits, 0xffff - index in the low 32

Entries past the end of a row hold the pad key, below every score. Results are loaded from the row by index.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64, Uint16, Uint32

from kestrel_runtime.cute_dsl import numeric, pdl
from kestrel_runtime.cute_dsl.ptx import packed

INDEX_LIMIT = 0xFFFF
VECTOR = 8  # consecutive elements that one lane loads: 16 bytes of bf16/fp16, twice 16 of float32


def key_type(dtype: type[cutlass.Numeric]) -> type[cutlass.Numeric]:
    """The integer that holds score and index."""
    return Int64 if dtype is Float32 else Int32


def pad_key(dtype: type[cutlass.Numeric]) -> int:
    """The key of an entry without a score."""
    return -(1 << 63) if dtype is Float32 else -(1 << 31)


@cute.jit
def make_key(bits: Uint32, index: Int32, dtype: cutlass.Constexpr):
    """The key of one score; 16-bit scores stand in the high half of ``bits``."""
    word = Int32(bits)
    magnitude = word & 0x7FFFFFFF
    ordered = word ^ ((word >> 31) & (0x7FFFFFFF if cutlass.const_expr(dtype is Float32) else 0x7FFF0000))
    ordered = cutlass.select_(magnitude == 0, Int32(0), ordered)
    infinity = 0x7C000000 if cutlass.const_expr(dtype is Float16) else 0x7F800000
    ordered = cutlass.select_(magnitude > infinity, Int32(-(1 << 31)), ordered)
    if cutlass.const_expr(dtype is Float32):
        return (Int64(ordered) << 32) | Int64(INDEX_LIMIT - index)
    else:
        return ordered | (INDEX_LIMIT - index)


@cute.jit
def key_index(key, dtype: cutlass.Constexpr) -> Int32:
    """The index that a key carries."""
    return INDEX_LIMIT - Int32(key & INDEX_LIMIT)


@cute.jit
def warp_max(key, dtype: cutlass.Constexpr):
    """The largest key of a warp, in every lane."""
    if cutlass.const_expr(dtype is Float32):
        high = cute.arch.warp_redux_sync(Int32(key >> 32), "max")
        low = cutlass.select_(Int32(key >> 32) == high, Int32(key & 0xFFFFFFFF), Int32(-1))
        low = cute.arch.warp_redux_sync(low, "max")
        return (Int64(high) << 32) | Int64(low)
    else:
        return cute.arch.warp_redux_sync(key, "max")


@cute.jit
def load_words(
    address: Int64,
    first: Int32,
    length: Int32,
    vectors: Boolean,
    rWord: cute.Tensor,
    dtype: cutlass.Constexpr,
    trigger_pdl: cutlass.Constexpr = False,
):
    """Load VECTOR scores from index ``first`` of the row at ``address`` into rWord; nothing past ``length``.

    vectors: the row is aligned to 16 bytes.
    trigger_pdl: allow the dependent launch to start as soon as vector loads are issued, before the scores arrive.
    """
    size = cutlass.const_expr(numeric.bytes_of(dtype))
    if vectors and first + VECTOR <= length:
        for part in cutlass.range_constexpr(cute.size(rWord) // 4):
            pointer = cute.make_ptr(
                Uint32, address + Int64(first) * size + part * 16, cute.AddressSpace.gmem, assumed_align=16
            )
            cute.autovec_copy(cute.make_tensor(pointer, 4), cute.local_tile(rWord, (4,), (part,)))
        if cutlass.const_expr(trigger_pdl):
            pdl.trigger()
    else:
        rPart = cute.recast_tensor(rWord, Uint32 if cutlass.const_expr(dtype is Float32) else Uint16)
        for i in cutlass.range_constexpr(VECTOR):
            rPart[i] = rPart.element_type(0)
            if first + i < length:
                pointer = cute.make_ptr(rPart.element_type, address + Int64(first + i) * size, cute.AddressSpace.gmem)
                rPart[i] = cute.make_tensor(pointer, 1)[0]


@cute.jit
def make_keys(rWord: cute.Tensor, first: Int32, length: Int32, rKey: cute.Tensor, dtype: cutlass.Constexpr):
    """The keys of VECTOR loaded scores, with pads past ``length``."""
    if cutlass.const_expr(dtype is Float32):
        for i in cutlass.range_constexpr(VECTOR):
            rKey[i] = make_key(rWord[i], first + i, dtype)
    else:
        make_packed_keys(rWord, first, rKey, dtype)
    if first + VECTOR > length:
        for i in cutlass.range_constexpr(VECTOR):
            if first + i >= length:
                rKey[i] = key_type(dtype)(pad_key(dtype))


def words_per_lane(dtype: type[cutlass.Numeric]) -> int:
    """Registers that hold VECTOR scores."""
    return VECTOR * dtype.width // 32


@cute.jit
def make_packed_keys(rWord: cute.Tensor, first: Int32, rKey: cute.Tensor, dtype: cutlass.Constexpr):
    """The keys of eight 16-bit scores in four words, two at a time: half the instructions of make_key."""
    half = cutlass.const_expr(numeric.ptx_name(dtype))
    one = cutlass.const_expr(0x3C003C00 if dtype is Float16 else 0x3F803F80)
    worst = Int32(0)
    indices = (INDEX_LIMIT - first) * 0x10001  # of the two scores of a word
    for pair in cutlass.range_constexpr(VECTOR // 2):
        # x * 1 + 0 turns -0 into +0 and every NaN into 0x7fff.
        plain = Int32(packed(f"fma.rn.{half}x2", rWord[pair], Uint32(one), Uint32(0)))
        sign = Int32(cute.arch.prmt(plain, 0, 0xBB99))  # each half filled with its sign
        ordered = plain ^ (sign & 0x7FFF7FFF)
        index_pair = indices - (2 * pair + ((2 * pair + 1) << 16))
        rKey[2 * pair] = Int32(cute.arch.prmt(ordered, index_pair, 0x1054))
        rKey[2 * pair + 1] = Int32(cute.arch.prmt(ordered, index_pair, 0x3276))
        worst = Int32(packed(f"max.NaN.{half}x2", Uint32(worst), Uint32(plain)))
    if ((worst & 0x7FFF7FFF) + 0x00010001) & Int32(-0x7FFF8000) != 0:  # a half is 0x7fff: NaN, which ranks last
        for i in cutlass.range_constexpr(VECTOR):
            bits = rWord[i // 2] << 16 if cutlass.const_expr(i % 2 == 0) else rWord[i // 2] & 0xFFFF0000
            rKey[i] = make_key(bits, first + i, dtype)
