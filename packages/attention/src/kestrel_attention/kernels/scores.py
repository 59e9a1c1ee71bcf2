"""What the attention kernels share: which keys a query sees, and the soft cap of its scores."""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kestrel_runtime.cute_dsl import ptx

LOG2_E = math.log2(math.e)
RESCALE_SLACK = 8.0  # a weight may exceed 1 by so many powers of two before the sums are rescaled
TANH = [factor * (0.5 * math.log(2)) ** (2 * i + 1) for i, factor in enumerate((1, -1 / 3, 2 / 15, -17 / 315))]


@cute.jit
def window(position: Int32, scalars, held: Int32):
    """The first and the last + 1 of the keys in the window of a query at this position; ``held`` keys exist."""
    first, last = Int32(0), held
    if scalars.window_left >= 0:
        first = cutlass.min(cutlass.max(position - scalars.window_left, 0), held)
    if scalars.window_right >= 0:
        inside = position < held
        last = cutlass.max(cutlass.min(position + scalars.window_right + 1, held), 0)
        last = cutlass.select_(inside, last, held)
    return first, last


@cute.jit
def add_sink(lse: Float32, sink: Float32):
    """What is left of a row's results once the sink, one more logit without a value, counts; and the new LSE."""
    largest = ptx.fmax(lse, sink)
    base = cutlass.select_(largest == -Float32.inf, Float32(0.0), largest)
    weight = ptx.exp2_approx((lse - base) * LOG2_E)
    total = weight + ptx.exp2_approx((sink - base) * LOG2_E)
    share = cutlass.select_(total == 0.0, Float32(0.0), weight / total)
    return share, base + ptx.log2_approx(total) * (1.0 / LOG2_E)


@cute.jit
def finite(scale: Float32) -> Float32:
    """A product of scales, at most 2^127 in magnitude: infinity times a score of 0 would be NaN."""
    return ptx.fmax_nan(ptx.fmin_nan(scale, Float32(2.0**127)), Float32(-(2.0**127)))


@cute.jit
def soft_cap(x: Float32, softcap: Float32) -> Float32:
    """softcap * tanh(y), of x = 2 y log2(e); by a series where tanh is the difference of numbers near 1.

    The division is a call, which keeps the compiler from executing all of this where there is no soft cap.
    """
    result = softcap * (1.0 - 2.0 / (1.0 + ptx.exp2_approx(x)))
    square = x * x
    if square < 0.08:  # |y| < 0.1
        result = softcap * series(x, square)
    return result


@cute.jit
def soft_cap_inline(x: Float32, softcap: Float32) -> Float32:
    """The same without a call and a branch, for many scores at once."""
    square = x * x
    far = 1.0 - 2.0 * ptx.rcp_approx(1.0 + ptx.exp2_approx(x))
    return softcap * cutlass.select_(square < 0.08, series(x, square), far)


@cute.jit
def series(x: Float32, square: Float32) -> Float32:
    """tanh(y) of x = 2 y log2(e), where |y| < 0.1."""
    return x * (TANH[0] + square * (TANH[1] + square * (TANH[2] + square * TANH[3])))
