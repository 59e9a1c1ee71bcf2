// The activations of the gated ops. 16-bit inputs use approximations with errors of about 1e-6, far below the rounding
// of the result; float32 inputs use accurate functions. NaN and inf propagate as in the formulas, but for gelu_times.
#pragma once

#include <kestrel/pack.cuh>
#include <kestrel/ptx/math.cuh>

#include "linear_params.h"

namespace kestrel::moe {

enum class Activation { gelu, gelu_tanh, silu };

// h / (1 + exp(-slope)). The exponent is never positive, so nothing overflows.
__device__ __forceinline__ float times_sigmoid(float h, float slope) {
  const float e = ptx::ex2_approx(-1.4426950408889634f * fabsf(slope));
  return h * (slope < 0.f ? e : 1.f) * ptx::rcp_approx(1.f + e);
}

// The same at full accuracy: a sigmoid near 1 is computed as 1 - rest.
__device__ __forceinline__ float times_sigmoid_accurate(float h, float slope) {
  const float e = expf(-fabsf(slope)), rest = __fdiv_rn(e, 1.f + e);
  if (slope < 0.f) return h * rest;
  return rest == 0.f ? h : fmaf(-h, rest, h);  // h may be infinite
}

// h / 2 * erfc(-h / sqrt 2). The tail is erfc(z) / 2 = exp(-z^2) t Q(t), with z = |h| / sqrt 2, t = 1 / (1 + 0.45 z)
// and a polynomial Q that minimises the relative error over all z >= 0: 8e-7. FLUSH: exponentials below 2^-126 are 0.
template <bool FLUSH = false>
__device__ __forceinline__ float times_normal_cdf(float h) {
  const float t = ptx::rcp_approx(fmaf(0.31819805f, fabsf(h), 1.f));
  float q = 0.03276689f;
  q = fmaf(q, t, -0.11865914f);
  q = fmaf(q, t, 0.10412479f);
  q = fmaf(q, t, 0.01839778f);
  q = fmaf(q, t, 0.09625112f);
  q = fmaf(q, t, 0.11318788f);
  q = fmaf(q, t, 0.12698834f);
  q = fmaf(q, t, 0.12694195f);
  const float exponent = h * h * -0.72134752f;
  const float tail = q * t * (FLUSH ? ptx::ex2_approx_ftz(exponent) : ptx::ex2_approx(exponent));
  return h * (h < 0.f ? tail : 1.f - tail);
}

// gelu(h) * g of FP8 layers, with h times kGeluScale and g divided by it: h Phi(h) = max(h, 0) - |h| erfc(|h| / sqrt 2)
// / 2. The tail is that above with t = 1 / (1 + 0.575 z) and a shorter Q. Relative error: 1.3e-4, below the rounding of
// the codes. h of -inf gives 0.
constexpr float kGeluScale = 0.84932180f;  // squared: log2(e) / 2, so that exp(-z^2) is 2^-(h * kGeluScale)^2
__device__ __forceinline__ float gelu_times(float h, float g) {
  float size;  // finite, or NaN: infinity has no tail
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(size) : "f"(fabsf(h)), "f"(3e38f));
  const float t = ptx::rcp_approx(fmaf(0.47871972f, size, 1.f));
  float q = -0.08328679f;
  q = fmaf(q, t, 0.13148262f);
  q = fmaf(q, t, 0.12716941f);
  q = fmaf(q, t, 0.16234843f);
  q = fmaf(q, t, 0.16222421f);
  return fmaf(-size, q * t * ptx::ex2_approx_ftz(-size * size), fmaxf(h, 0.f)) * g;
}

constexpr float kTwoRootTwoOverPi = 1.5957691216057308f;

template <Activation activation, typename T>
__device__ __forceinline__ float activate(float h) {
  const float slope = kTwoRootTwoOverPi * (h + 0.044715f * h * h * h);
  if constexpr (sizeof(T) == 4) {
    if constexpr (activation == Activation::gelu) return 0.5f * h * erfcf(h * -0.70710678f);
    return times_sigmoid_accurate(h, activation == Activation::silu ? h : slope);
  } else {
    if constexpr (activation == Activation::gelu) return times_normal_cdf(h);
    return times_sigmoid(h, activation == Activation::silu ? h : slope);
  }
}

// h / (1 + exp(-slope)) in the fewest instructions, for epilogues of matrix products. Where the exponential overflows,
// its reciprocal is the result's limit, 0.
__device__ __forceinline__ float gelu_tanh(float h) {
  constexpr float linear = -1.4426950408889634f * kTwoRootTwoOverPi, cubic = linear * 0.044715f;
  return h * ptx::rcp_approx(1.f + ptx::ex2_approx_ftz(h * fmaf(cubic * h, h, linear)));
}

// The same of silu.
__device__ __forceinline__ float silu(float h) {
  return h * ptx::rcp_approx(1.f + ptx::ex2_approx_ftz(-1.4426950408889634f * h));
}

// The activation of a dense layer.
template <typename T>
__device__ __forceinline__ float activate(float h, LinearActivation activation) {
  if (activation == LinearActivation::gelu_tanh) return activate<Activation::gelu_tanh, T>(h);
  return activation == LinearActivation::gelu ? activate<Activation::gelu, T>(h) : h;
}

// h <- activation(h) * (g + gate_offset), for a pack.
template <typename T>
__device__ __forceinline__ void gate(float (&h)[Pack<T>::size], const float (&g)[Pack<T>::size], Activation activation,
                                     float gate_offset) {
  constexpr int size = Pack<T>::size;
  const auto each = [&](auto constant) {
#pragma unroll
    for (int i = 0; i < size; ++i) h[i] = activate<decltype(constant)::value, T>(h[i]) * (g[i] + gate_offset);
  };
  if (activation == Activation::silu) {
    each(std::integral_constant<Activation, Activation::silu>());
  } else if (activation == Activation::gelu) {
    each(std::integral_constant<Activation, Activation::gelu>());
  } else {
    each(std::integral_constant<Activation, Activation::gelu_tanh>());
  }
}

}  // namespace kestrel::moe
