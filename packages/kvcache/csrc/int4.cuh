// INT4 codes after KIVI (arXiv 2402.02750): unsigned codes of a range of values, with a scale and a zero in fp16.
#pragma once

#include <cuda_fp16.h>
#include <kestrel/ptx/math.cuh>

#include <cstdint>

#include "scale_quotient.cuh"

namespace kestrel::kvcache {

constexpr int kInt4Page = 64;
constexpr float kInt4Limit = 7.5f * 65504.f;  // half of the range that the largest fp16 scale spans

__device__ __forceinline__ float clamp_int4(float x) { return ptx::min_nan(ptx::max_nan(x, -kInt4Limit), kInt4Limit); }

// The smallest and the largest of some values; NaN if one of them is.
struct MinMax {
  float low, high;

  static __device__ __forceinline__ MinMax empty() { return {kInt4Limit, -kInt4Limit}; }

  __device__ __forceinline__ void include(float x) {
    x = clamp_int4(x);
    low = ptx::min_nan(low, x);
    high = ptx::max_nan(high, x);
  }
  static __device__ __forceinline__ MinMax merge(MinMax a, MinMax b) {
    return {ptx::min_nan(a.low, b.low), ptx::max_nan(a.high, b.high)};
  }
};

// How the values of a range are coded: value = (code - zero) * scale.
template <typename T>
struct Int4Code {
  __half scale, zero;
  ScaleQuotient<T, Rounding::exact> quotient;
  float offset;

  __device__ __forceinline__ explicit Int4Code(MinMax range)
      : scale(scale_of(range)),
        zero(__float2half_rn((0.f - range.low) / __half2float(scale))),
        quotient(__half2float(scale)),
        offset(__half2float(zero)) {}

  __device__ __forceinline__ Int4Code(__half scale_, __half zero_)
      : scale(scale_), zero(zero_), quotient(__half2float(scale_)), offset(__half2float(zero_)) {}

  // Replaces x by codes 0..15, as integral floats; NaN becomes 0.
  template <int N>
  __device__ __forceinline__ void encode(float (&x)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = clamp_int4(x[i]);
    quotient.apply(x);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = fminf(fmaxf(rintf(__fadd_rn(x[i], offset)), 0.f), 15.f);
  }

 private:
  static __device__ __forceinline__ __half scale_of(MinMax range) {
    const float by_range = (range.high - range.low) / 15.f;
    const float by_zero =
        ptx::max_nan(fabsf(range.low), fabsf(range.high)) * 0x1p-15f;  // keeps the zero in the range of fp16
    const __half scale = __float2half_rn(ptx::max_nan(by_range, by_zero));
    return __half2float(scale) == 0.f ? __float2half_rn(1.f) : scale;
  }
};

}  // namespace kestrel::kvcache
