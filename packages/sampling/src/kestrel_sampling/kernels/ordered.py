"""Elements as integer keys whose order is the order of topk_fwd: larger number first, then lower index, NaN last.

A score becomes a signed integer, minus its magnitude where the sign bit is set: -0.0 and +0.0 both become 0, and NaN
becomes the smallest integer of all. Below it stand the bits of (limit - index), so that equal scores compare by index,
keys are unique and no bit of a score is lost:

    bf16, fp16   Int32  score in the high 16 bits, 0xffff - index in the low 16
    float32      Int64  score in the high 32 bits, 0xffff - index in the low 32

A slot past the end of a row holds PAD, below every element. Output values are read again from the row by index, so they
are the input's own bits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, Int64, Uint16, Uint32

INDEX_LIMIT = 0xFFFF
VECTOR = 8  # consecutive elements that one lane loads: 16 bytes of bf16/fp16, twice 16 of float32


def key_type(dtype: type[cutlass.Numeric]) -> type[cutlass.Numeric]:
    """The integer that holds score and index."""
    return Int64 if dtype is Float32 else Int32


def pad_key(dtype: type[cutlass.Numeric]) -> int:
    """The key of a slot that holds no element."""
    return -(1 << 63) if dtype is Float32 else -(1 << 31)


@cute.jit
def make_key(bits: Uint32, index: Int32, dtype: cutlass.Constexpr):
    """The key of one score; 16-bit scores stand in the high half of ``bits``."""
    word = Int32(bits)
    sign = word >> 31
    magnitude = word & 0x7FFFFFFF
    ordered = (magnitude ^ sign) - sign
    infinity = 0x7C000000 if cutlass.const_expr(dtype is Float16) else 0x7F800000
    ordered = cutlass.select_(magnitude > infinity, Int32(-(1 << 31)), ordered)
    if cutlass.const_expr(dtype is Float32):
        return (Int64(ordered) << 32) | Int64(INDEX_LIMIT - index)
    else:
        return ordered + (INDEX_LIMIT - index)


@cute.jit
def key_index(key, dtype: cutlass.Constexpr) -> Int32:
    """The index that a key carries."""
    return INDEX_LIMIT - Int32(key & INDEX_LIMIT)


@cute.jit
def load_keys(
    address: Int64, first: Int32, length: Int32, vectors: Boolean, rKey: cute.Tensor, dtype: cutlass.Constexpr
):
    """Fill rKey with the keys of the VECTOR elements from index ``first`` of the row at ``address``.

    ``vectors`` says that every whole group of the row may be loaded 16 bytes at a time. Past ``length`` come pads.
    """
    size = cutlass.const_expr(dtype.width // 8)
    if vectors and first + VECTOR <= length:
        words = cutlass.const_expr(VECTOR * size // 4)
        rWord = cute.make_rmem_tensor((4, words // 4), Uint32)
        for part in cutlass.range_constexpr(words // 4):
            pointer = cute.make_ptr(
                Uint32, address + Int64(first) * size + part * 16, cute.AddressSpace.gmem, assumed_align=16
            )
            cute.autovec_copy(cute.make_tensor(pointer, 4), rWord[None, part])
        for i in cutlass.range_constexpr(VECTOR):
            if cutlass.const_expr(dtype is Float32):
                bits = rWord[i]
            elif cutlass.const_expr(i % 2 == 0):
                bits = rWord[i // 2] << 16
            else:
                bits = rWord[i // 2] & 0xFFFF0000
            rKey[i] = make_key(bits, first + i, dtype)
    else:
        for i in cutlass.range_constexpr(VECTOR):
            rKey[i] = key_type(dtype)(pad_key(dtype))
            if first + i < length:
                if cutlass.const_expr(dtype is Float32):
                    gWord = cute.make_ptr(Uint32, address + Int64(first + i) * 4, cute.AddressSpace.gmem)
                    rKey[i] = make_key(cute.make_tensor(gWord, 1)[0], first + i, dtype)
                else:
                    gHalf = cute.make_ptr(Uint16, address + Int64(first + i) * 2, cute.AddressSpace.gmem)
                    rKey[i] = make_key(Uint32(cute.make_tensor(gHalf, 1)[0]) << 16, first + i, dtype)
