// Many true quotients by one divisor: correctly rounded, as __fdiv_rn would give them, by five multiply-adds each.
#pragma once

namespace kestrel {

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

// A divisor and where divide() may stand for a true division by it. With a divisor between 2^-64 and 2^120 every x with
// |x / divisor| <= 2^64 qualifies: remainders are exact from |x| = 2^-101 on, and below that the quotient is less than
// 2^-37, has x's sign and is 0 in any FP8 or integer code. What is left (NaN, inf, extreme scales) takes exactly().
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

  __device__ __forceinline__ float exactly(float x) const { return __fdiv_rn(x, value); }
};

}  // namespace kestrel
