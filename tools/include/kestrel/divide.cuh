// Many float32 quotients with one divisor, without a division for each.
//
//   divide()         correctly rounded like __fdiv_rn, in five multiply-adds
//   SplitReciprocal  for codes of bf16 and fp16 numbers: on the right side of every tie, in two multiply-adds
//
// Divisor and ShortDivisor add the check of the range in which each is valid. Outside it (NaN, inf, extreme scales)
// callers use __fdiv_rn, or scale the divisor into the range first.
#pragma once

#include <kestrel/ptx/math.cuh>

namespace kestrel {

// x / divisor for x of at most 11 significant bits (bf16, fp16), as x * high + x * low with 1 / divisor = high + low.
// The result is not correctly rounded, but it rounds to the same code of at most 8 bits (FP8, INT8, INT4). Divisors are
// from 2^-60 to 2^60. low is positive and far above underflow, so an infinite x stays infinite; NaN stays NaN.
//
// Proof. The code depends on which side of a tie, a number t of b <= 8 bits, the quotient lies once it is rounded to
// float32. Before that rounding, this one exceeds the true one by less than 2^-40 of it: high falls short of 1 /
// divisor by one to seven times 2^-24, low exceeds the missing part by 2^-20 of it, and the terms that low neglects
// (the square of that) and the roundings take at most three quarters of the excess. So the two can only differ where
// x / divisor is that near to a midpoint between t and its neighbours in float32: with integers of 11, 24 and 25 bits,
// X 2^s = D M + Z, M = T 2^k +- 1, T odd below 2^b, k = 25 - b, s >= 37, |Z| < 2^9. Modulo 2^k that is D = c 2^k + r
// with |r| = |Z| and c <= 2^(b-1), and then X 2^s = 2^k (c T 2^k + r T +- c). The common power of two of 2^k and
// 2^(37-k) divides r T +- c, which is smaller, so it is 0: c = |r| T. As T >= 2^(b-1), T = c = |r| = 1: a divisor of
// all ones and a midpoint just below the true quotient; this one is larger, so it is above the midpoint as well.
struct SplitReciprocal {
  float high, low;

  __device__ __forceinline__ SplitReciprocal(float high_, float low_) : high(high_), low(low_) {}
  __device__ __forceinline__ explicit SplitReciprocal(float divisor) {
    const float approx = ptx::rcp_approx(divisor);  // within 2^-23 of it
    high = fmaf(approx, -0x1p-22f, approx);
    low = fmaf(-divisor, high, 1.f) * (high * (1.f + 0x1p-20f));
  }

  __device__ __forceinline__ float times(float x) const { return fmaf(x, high, __fmul_rn(x, low)); }
};

// 1 / divisor, rounded to nearest even, for normal divisors with a normal reciprocal: the Newton step of __frcp_rn.
__device__ __forceinline__ float reciprocal_rn(float divisor) {
  const float approx = ptx::rcp_approx(divisor);
  return fmaf(approx, fmaf(-divisor, approx, 1.f), approx);
}

// x / divisor, rounded to nearest even; `reciprocal` is 1 / divisor, rounded to nearest even. The first product is off
// by up to 1.5 units in the last place, one correction by its remainder makes it faithful, and the remainder of a
// faithful quotient is exact, from which Markstein's theorem gives the correctly rounded one. The remainders are
// negated so that the sign of a zero survives. Valid where nothing overflows or loses bits to underflow; see Divisor.
__device__ __forceinline__ float divide(float x, float divisor, float reciprocal) {
  float quotient = x * reciprocal;
#pragma unroll
  for (int i = 0; i < 2; ++i) quotient = fmaf(fmaf(quotient, divisor, -x), -reciprocal, quotient);
  return quotient;
}

// By divide(). With a divisor between 2^-64 and 2^120 every x with |x / divisor| <= 2^64 qualifies: remainders are
// exact from |x| = 2^-101 on, and below that the quotient is less than 2^-37, has x's sign and is 0 in any FP8 or
// integer code.
struct Divisor {
  float value, reciprocal;

  __device__ __forceinline__ explicit Divisor(float divisor) : value(divisor), reciprocal(reciprocal_rn(divisor)) {}

  // Whether operator() is valid for all x up to this magnitude, which may be NaN or inf.
  __device__ __forceinline__ bool covers(float largest) const {
    return value >= 0x1p-64f && value <= 0x1p120f && largest * reciprocal <= 0x1p64f;
  }

  __device__ __forceinline__ float operator()(float x) const { return divide(x, value, reciprocal); }
};

// By SplitReciprocal.
struct ShortDivisor {
  float value;
  SplitReciprocal reciprocal;

  __device__ __forceinline__ explicit ShortDivisor(float divisor) : value(divisor), reciprocal(divisor) {}

  __device__ __forceinline__ bool covers(float largest) const {
    return value >= 0x1p-60f && value <= 0x1p60f && largest * reciprocal.high <= 0x1p64f;
  }

  __device__ __forceinline__ float operator()(float x) const { return reciprocal.times(x); }
};

}  // namespace kestrel
