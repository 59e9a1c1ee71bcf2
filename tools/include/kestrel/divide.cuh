// Many true quotients by one divisor: correctly rounded, as __fdiv_rn would give them, by five multiply-adds each; or,
// for the codes of bf16 and fp16, on the right side of every tie by two.
#pragma once

namespace kestrel {

// Quotients of numbers of at most 11 significant bits (bf16, fp16) that only have to fall on the right side of the ties
// of a code of at most 8 bits (FP8, INT8, INT4): x * high + x * low with 1 / divisor = high + low. For divisors from
// 2^-60 to 2^60. low is positive and far above underflow, so that an infinite x stays infinite; a NaN stays.
//
// Why that is enough. The code depends on which side of a tie, a number t of b <= 8 bits, the quotient lies once it is
// rounded to float32. Before that, ours is larger than the true one by less than 2^-40 of it: high is short of 1 /
// divisor by one to seven times 2^-24, the excess of low is 2^-20 of what is missing, and what low neglects (the square
// of that) and the roundings take three quarters of the excess at most. So the two can part only where x / divisor is
// as near to a midpoint between t and its neighbours in float32: with integers of 11, 24 and 25 bits, X 2^s = D M + Z,
// M = T 2^k +- 1, T odd below 2^b, k = 25 - b, s >= 37, |Z| < 2^9. Modulo 2^k that is D = c 2^k + r with |r| = |Z| and
// c <= 2^(b-1), and then X 2^s = 2^k (c T 2^k + r T +- c). What 2^k and 2^(37-k) both hold divides r T +- c, which is
// smaller, so it is 0: c = |r| T. As T >= 2^(b-1), T = c = |r| = 1: a divisor of all ones and a midpoint just below the
// true quotient; ours, the larger one, is above it as well.
struct Reciprocal {
  float high, low;

  __device__ __forceinline__ Reciprocal(float high_, float low_) : high(high_), low(low_) {}
  __device__ __forceinline__ explicit Reciprocal(float divisor) {
    float rough;  // off by 2^-23 of it at most
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(rough) : "f"(divisor));
    high = fmaf(rough, -0x1p-22f, rough);
    low = fmaf(-divisor, high, 1.f) * (high * (1.f + 0x1p-20f));
  }

  __device__ __forceinline__ float times(float x) const { return fmaf(x, high, __fmul_rn(x, low)); }
};

// x / divisor, rounded to nearest even; `reciprocal` is 1 / divisor, rounded to nearest even. The first product is off
// by up to 1.5 units in the last place, one correction by its remainder makes it faithful, and the remainder of a
// faithful quotient is exact, from which Markstein's theorem gives the correctly rounded one. The remainders are
// negated so that the sign of a zero survives. It holds where nothing overflows or loses bits to underflow; see
// Divisor.
__device__ __forceinline__ float divide(float x, float divisor, float reciprocal) {
  float quotient = x * reciprocal;
#pragma unroll
  for (int i = 0; i < 2; ++i) quotient = fmaf(fmaf(quotient, divisor, -x), -reciprocal, quotient);
  return quotient;
}

// A divisor, and where a fast quotient may stand for a true division by it. What is left (NaN, inf, extreme scales)
// takes
// __fdiv_rn.
//
// By divide(): with a divisor between 2^-64 and 2^120 every x with |x / divisor| <= 2^64 qualifies: remainders are
// exact from |x| = 2^-101 on, and below that the quotient is less than 2^-37, has x's sign and is 0 in any FP8 or
// integer code.
struct Divisor {
  float value, reciprocal;

  __device__ __forceinline__ explicit Divisor(float divisor) {
    // As __frcp_rn does it, without its care for the divisors that covers() turns away.
    float rough;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(rough) : "f"(divisor));
    value = divisor;
    reciprocal = fmaf(rough, fmaf(-divisor, rough, 1.f), rough);
  }

  // Whether quotients of all x up to this magnitude, which may be NaN or inf, come from operator().
  __device__ __forceinline__ bool covers(float largest) const {
    return value >= 0x1p-64f && value <= 0x1p120f && largest * reciprocal <= 0x1p64f;
  }

  __device__ __forceinline__ float operator()(float x) const { return divide(x, value, reciprocal); }
};

// The same for codes of bf16 and fp16.
struct ShortDivisor {
  float value;
  Reciprocal reciprocal;

  __device__ __forceinline__ explicit ShortDivisor(float divisor) : value(divisor), reciprocal(divisor) {}

  __device__ __forceinline__ bool covers(float largest) const {
    return value >= 0x1p-60f && value <= 0x1p60f && largest * reciprocal.high <= 0x1p64f;
  }

  __device__ __forceinline__ float operator()(float x) const { return reciprocal.times(x); }
};

}  // namespace kestrel
