// Quotients of values by the scale of a cache, for any scale: kestrel/divide.cuh with the scale brought into range.
#pragma once

#include <kestrel/divide.cuh>

namespace kestrel::kvcache {

// How exact a quotient is: on the right side of the ties of a code of at most 8 bits (FP8, INT8), or correctly rounded
// (INT4 adds a zero point to it).
enum class Rounding { to_code, exact };

// x / divisor in float32, for x converted from a T. NaN, inf and the sign of a zero are those of a division.
//
// Codes of bf16 and fp16 take a SplitReciprocal. Other quotients take correction steps: with r = 1 / divisor rounded,
// q = x * r is off by one or two units in the last place, q * divisor - x is exact in one multiply-add, and one step
// q - error * r is correctly rounded where x has the few bits of bf16 or fp16; a float32 x takes two. Quotients above
// 2^20 are only known to exceed it with the right sign, and those below 2^-40 to be near: codes saturate or are 0
// there.
//
// Both need a divisor between 2^-60 and 2^60. Any other (zero, negative and infinite ones too) is brought there by a
// factor that also multiplies x, which only changes quotients far outside 2^-40..2^20.
template <typename T, Rounding rounding = Rounding::to_code>
class ScaleQuotient {
 public:
  __device__ __forceinline__ explicit ScaleQuotient(float divisor) : divisor_(divisor) {
    if (!(divisor >= 0x1p-60f && divisor <= 0x1p60f)) {
      const float size = fabsf(divisor), inf = __int_as_float(0x7f800000);
      factor_ = size == 0.f ? inf : size < 0x1p-60f ? 0x1p100f : size == inf ? 0.f : size > 0x1p60f ? 0x1p-100f : 1.f;
      divisor_ = size == 0.f || size == inf ? 1.f : size * factor_;
      factor_ = copysignf(factor_, divisor);
    }
    if constexpr (kSplit) {
      const SplitReciprocal reciprocal(divisor_);
      high_ = reciprocal.high;
      low_ = reciprocal.low;
    } else {
      high_ = reciprocal_rn(divisor_);
    }
  }

  template <int N>
  __device__ __forceinline__ void apply(float (&x)[N]) const {
    if (factor_ != 1.f) {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] *= factor_;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (kSplit) {
        x[i] = SplitReciprocal{high_, low_}.times(x[i]);
      } else {
        float q = x[i] * high_;
#pragma unroll
        for (int step = 0; step < (sizeof(T) == 2 ? 1 : 2); ++step) {
          q = fminf(fmaxf(q, -0x1p20f), 0x1p20f);  // an infinite q has no remainder
          q = fmaf(fmaf(q, divisor_, -x[i]), -high_, q);
        }
        x[i] = q;
      }
    }
  }

 private:
  static constexpr bool kSplit = sizeof(T) == 2 && rounding == Rounding::to_code;

  float divisor_, high_, low_ = 0.f, factor_ = 1.f;
};

}  // namespace kestrel::kvcache
