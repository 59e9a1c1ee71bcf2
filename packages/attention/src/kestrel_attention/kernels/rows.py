"""16-byte vectors of rows as float32, for the kernels that scale and mix rows."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from kestrel_runtime.cute_dsl import numeric, ptx


@cute.jit
def load(address: Int64, dtype: cutlass.Constexpr):
    """The elements of one vector as float32."""
    words = ptx.load_global(address, 4)
    values = []
    for i in cutlass.range_constexpr(4):
        if cutlass.const_expr(dtype is Float32):
            values.append(ptx.int_as_float(Int32(words[i])))
        else:
            low, high = ptx.unpack_f32x2(words[i], numeric.ptx_name(dtype))
            values.append(low)
            values.append(high)
    return values


@cute.jit
def store(address: Int64, values, dtype: cutlass.Constexpr):
    """Float32 values, rounded once, as one vector."""
    words = []
    for i in cutlass.range_constexpr(4):
        if cutlass.const_expr(dtype is Float32):
            words.append(ptx.float_as_int(values[i]))
        else:
            words.append(ptx.pack_f32x2(values[2 * i], values[2 * i + 1], numeric.ptx_name(dtype)))
    ptx.store_global(address, words)
