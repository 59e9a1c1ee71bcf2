// INT4 codes after KIVI: unsigned codes of a range of values, with a scale and a zero in fp16.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "quotient.cuh"

namespace kestrel::kvcache {

constexpr int kInt4Page = 64;
constexpr float kInt4Largest = 7.5f * 65504.f;  // what the largest fp16 scale spans to each side

// Of two numbers; NaN if one of them is.
__device__ __forceinline__ float least(float a, float b) {
  float c;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
__device__ __forceinline__ float most(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

__device__ __forceinline__ float clamp_int4(float x) { return least(most(x, -kInt4Largest), kInt4Largest); }

// The smallest and the largest of some values.
struct Range {
  float low, high;

  __device__ __forceinline__ void take(float x) {
    x = clamp_int4(x);
    low = least(low, x);
    high = most(high, x);
  }
  static __device__ __forceinline__ Range join(Range a, Range b) { return {least(a.low, b.low), most(a.high, b.high)}; }
};

__device__ __forceinline__ Range empty_range() { return {kInt4Largest, -kInt4Largest}; }

// How the values of a range are coded: value = (code - zero) * scale.
template <typename T>
struct Int4Code {
  __half scale, zero;
  Quotient<T, Use::sums> quotient;
  float offset;

  __device__ __forceinline__ explicit Int4Code(Range range)
      : scale(scale_of(range)),
        zero(__float2half_rn((0.f - range.low) / __half2float(scale))),
        quotient(__half2float(scale)),
        offset(__half2float(zero)) {}

  __device__ __forceinline__ Int4Code(__half scale_, __half zero_)
      : scale(scale_), zero(zero_), quotient(__half2float(scale_)), offset(__half2float(zero_)) {}

  // x becomes codes 0..15 in place, as whole floats; NaN becomes 0.
  template <int N>
  __device__ __forceinline__ void encode(float (&x)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = clamp_int4(x[i]);
    quotient.of(x);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = fminf(fmaxf(rintf(__fadd_rn(x[i], offset)), 0.f), 15.f);
  }

 private:
  static __device__ __forceinline__ __half scale_of(Range range) {
    const float by_range = (range.high - range.low) / 15.f;
    const float by_zero = most(fabsf(range.low), fabsf(range.high)) * 0x1p-15f;  // keeps the zero within fp16
    const __half scale = __float2half_rn(most(by_range, by_zero));
    return __half2float(scale) == 0.f ? __float2half_rn(1.f) : scale;
  }
};

}  // namespace kestrel::kvcache
