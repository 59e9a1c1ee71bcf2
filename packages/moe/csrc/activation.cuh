// The activations of the gated ops. 16-bit inputs take fast forms that are right to about 1e-6, far inside the one
// rounding of the result; float32 takes the full-accuracy functions. NaN and inf stay what they are by the formulas.
#pragma once

#include <kestrel/pack.cuh>

namespace kestrel::moe {

enum class Activation { gelu, gelu_tanh, silu };

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// h / (1 + exp(-slope)). The exponential is of a negative number, so nothing overflows.
__device__ __forceinline__ float times_sigmoid(float h, float slope) {
  const float e = fast_exp2(-1.4426950408889634f * fabsf(slope));
  return h * (slope < 0.f ? e : 1.f) * fast_reciprocal(1.f + e);
}

// The same at full accuracy: where the sigmoid is near 1, what it lacks of it is subtracted.
__device__ __forceinline__ float exactly_times_sigmoid(float h, float slope) {
  const float e = expf(-fabsf(slope)), rest = __fdiv_rn(e, 1.f + e);
  if (slope < 0.f) return h * rest;
  return rest == 0.f ? h : fmaf(-h, rest, h);  // h may be infinite
}

// h / 2 * erfc(-h / sqrt 2). The tail erfc(z) / 2 = exp(-z^2) t Q(t), t = 1 / (1 + 0.45 z), z = |h| / sqrt 2, with Q
// fitted for the least relative error over all z >= 0, which is 8e-7.
__device__ __forceinline__ float times_normal_cdf(float h) {
  const float t = fast_reciprocal(fmaf(0.31819805f, fabsf(h), 1.f));
  float q = 0.03276689f;
  q = fmaf(q, t, -0.11865914f);
  q = fmaf(q, t, 0.10412479f);
  q = fmaf(q, t, 0.01839778f);
  q = fmaf(q, t, 0.09625112f);
  q = fmaf(q, t, 0.11318788f);
  q = fmaf(q, t, 0.12698834f);
  q = fmaf(q, t, 0.12694195f);
  const float tail = q * t * fast_exp2(h * h * -0.72134752f);
  return h * (h < 0.f ? tail : 1.f - tail);
}

constexpr float kTwoRootTwoOverPi = 1.5957691216057308f;

template <Activation activation, typename T>
__device__ __forceinline__ float activate(float h) {
  const float slope = kTwoRootTwoOverPi * (h + 0.044715f * h * h * h);
  if constexpr (sizeof(T) == 4) {
    if constexpr (activation == Activation::gelu) return 0.5f * h * erfcf(h * -0.70710678f);
    return exactly_times_sigmoid(h, activation == Activation::silu ? h : slope);
  } else {
    if constexpr (activation == Activation::gelu) return times_normal_cdf(h);
    return times_sigmoid(h, activation == Activation::silu ? h : slope);
  }
}

// h <- activation(h) * (g + shift), for a pack.
template <typename T>
__device__ __forceinline__ void gate(float (&h)[Pack<T>::size], const float (&g)[Pack<T>::size], Activation activation,
                                     float shift) {
  constexpr int size = Pack<T>::size;
  const auto each = [&](auto constant) {
#pragma unroll
    for (int i = 0; i < size; ++i) h[i] = activate<decltype(constant)::value, T>(h[i]) * (g[i] + shift);
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
