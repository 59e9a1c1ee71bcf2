// FP8 codes and scales, bit for bit those of kestrel_runtime.reference.
#pragma once

#include <cuda_fp8.h>
#include <kestrel/divide.cuh>
#include <kestrel/pack.cuh>

#include <cfloat>

namespace kestrel {

constexpr float kLargestE4M3 = 448.f;

// Dynamic e4m3 scale of values with largest finite magnitude amax: max(min(amax, scale_ub), 1e-12) / 448, correctly
// rounded. scale_ub may be null; if *scale_ub is NaN, so is the scale.
__device__ __forceinline__ float fp8_scale(float amax, const float* scale_ub = nullptr) {
  if (scale_ub) {
    const float bound = *scale_ub;
    amax = amax < bound ? amax : bound;  // a NaN bound is kept
  }
  return divide(amax < 1e-12f ? 1e-12f : amax, kLargestE4M3, 1.f / kLargestE4M3);
}

// |x|, or 0 for NaN and inf, which do not count in the largest magnitude of a row.
__device__ __forceinline__ float finite_magnitude(float x) {
  const float magnitude = fabsf(x);
  return magnitude <= FLT_MAX ? magnitude : 0.f;
}

// sm_89 converts FP8 by an instruction and may not run machine code of sm_80 here. In a source that DISTINCT_89 of the
// family's CMakeLists.txt does not name, a conversion stops the assembler with this message.
__device__ __forceinline__ void require_own_code_for_sm_89() {
#ifdef KESTREL_SHARED_89
  asm volatile("FP8_in_a_source_that_DISTINCT_89_does_not_name;");
#endif
}

// Two codes, the first in the low byte. Rounds to nearest even, saturates at the largest finite value, keeps NaN.
template <__nv_fp8_interpretation_t kind = __NV_E4M3>
__device__ __forceinline__ unsigned to_fp8x2(float first, float second) {
  require_own_code_for_sm_89();
  return __nv_cvt_float2_to_fp8x2(make_float2(first, second), __NV_SATFINITE, kind);
}

template <__nv_fp8_interpretation_t kind = __NV_E4M3>
__device__ __forceinline__ uint8_t to_fp8(float x) {
  require_own_code_for_sm_89();
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, kind);
}

// Four codes, the first in the lowest byte. Callers encode correctly rounded quotients x / scale: a product with the
// rounded reciprocal differs in the last bit, and sometimes in a code.
template <__nv_fp8_interpretation_t kind = __NV_E4M3>
__device__ __forceinline__ uint32_t to_fp8x4(float a, float b, float c, float d) {
  return to_fp8x2<kind>(a, b) | to_fp8x2<kind>(c, d) << 16;
}

// x / scale, correctly rounded wherever the code depends on it. `inverse` is 1 / scale rounded to nearest; both are
// normal numbers. Larger products saturate, and an infinite one has no remainder to correct by.
__device__ __forceinline__ float fp8_quotient(float x, float scale, float inverse) {
  const float product = x * inverse;
  return fabsf(product) < 1024.f ? divide(x, scale, inverse) : product;
}

// The numbers of two codes, the first in the low byte.
template <__nv_fp8_interpretation_t kind = __NV_E4M3>
__device__ __forceinline__ float2 from_fp8x2(uint16_t codes) {
  require_own_code_for_sm_89();
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(codes, kind)));
}

__device__ __forceinline__ float from_fp8(uint8_t code, __nv_fp8_interpretation_t kind = __NV_E4M3) {
  require_own_code_for_sm_89();
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, kind)));
}

}  // namespace kestrel
