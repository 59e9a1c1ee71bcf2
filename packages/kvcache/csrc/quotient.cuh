// Many quotients by one divisor without a division for each.
#pragma once

#include <kestrel/divide.cuh>

namespace kestrel::kvcache {

// What a quotient is for. Codes of at most 8 significant bits (FP8, INT8) need it on the right side of their ties; a
// sum (INT4 adds a zero) needs it as a division rounds it.
enum class Use { codes, sums };

// x / divisor in float32, for x that came from a T.
//
// With r = 1 / divisor rounded, q = x * r is off by a unit in the last place or two; the error q * divisor - x is exact
// in one multiply-add, and q - error * r is the correctly rounded quotient where x has the few bits of bf16 or fp16; a
// float32 x takes a second step. Where the quotient passes 2^20 the result is only known to pass it too, with the right
// sign, and below 2^-40 to stay near: enough for codes, which saturate or are 0 there.
//
// Codes of bf16 and fp16 are cheaper, by a reciprocal in two parts (kestrel/divide.cuh).
//
// NaN, inf and the sign of a zero come out as from a division.
//
// All that needs a divisor between 2^-60 and 2^60. Any other, zero, negative and infinite ones too, is brought there by
// a factor that x is multiplied with as well, which loses only what is far outside 2^-40..2^20.
template <typename T, Use use = Use::codes>
class Quotient {
 public:
  __device__ __forceinline__ explicit Quotient(float divisor) : divisor_(divisor) {
    if (!(divisor >= 0x1p-60f && divisor <= 0x1p60f)) {
      const float size = fabsf(divisor), inf = __int_as_float(0x7f800000);
      factor_ = size == 0.f ? inf : size < 0x1p-60f ? 0x1p100f : size == inf ? 0.f : size > 0x1p60f ? 0x1p-100f : 1.f;
      divisor_ = size == 0.f || size == inf ? 1.f : size * factor_;
      factor_ = copysignf(factor_, divisor);
    }
    if constexpr (kTwoParts) {
      const Reciprocal reciprocal(divisor_);
      high_ = reciprocal.high;
      low_ = reciprocal.low;
    } else {
      float rough;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(rough) : "f"(divisor_));
      high_ = fmaf(fmaf(-divisor_, rough, 1.f), rough, rough);  // what a division does for 1 / divisor
    }
  }

  template <int N>
  __device__ __forceinline__ void of(float (&x)[N]) const {
    if (factor_ != 1.f) {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] *= factor_;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (kTwoParts) {
        x[i] = Reciprocal{high_, low_}.times(x[i]);
      } else {
        float q = x[i] * high_;
#pragma unroll
        for (int step = 0; step < (sizeof(T) == 2 ? 1 : 2); ++step) {
          q = fminf(fmaxf(q, -0x1p20f), 0x1p20f);  // an infinite one would leave no error
          q = fmaf(fmaf(q, divisor_, -x[i]), -high_, q);
        }
        x[i] = q;
      }
    }
  }

 private:
  static constexpr bool kTwoParts = sizeof(T) == 2 && use == Use::codes;

  float divisor_, high_, low_ = 0.f, factor_ = 1.f;
};

}  // namespace kestrel::kvcache
