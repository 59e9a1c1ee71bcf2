// What the kernels share around their sums: adding the residual, and from the row's statistics to what is written.
#pragma once

#include <kestrel/fp8.cuh>

#include "statistics.cuh"

namespace kestrel::norm {

// Rounds x + residual, stores it as the new residual and leaves the rounded sum in x.
template <Access A, typename T>
__device__ __forceinline__ void add_residual(float (&x)[Pack<T>::size], const Pack<T>& residual, const Params& p,
                                             char* row, int first) {
  float r[Pack<T>::size];
  residual.unpack(r);
#pragma unroll
  for (int i = 0; i < Pack<T>::size; ++i) x[i] += r[i];
  Pack<T> sum;
  sum.pack(x);
  store_pack<A>(row, first, p.n, sum);
  sum.unpack(x);
}

template <Access A, typename T>
__device__ __forceinline__ Pack<T> load_bias(const Params& p, int first) {
  return load_pack<A, T, true>(static_cast<const char*>(p.bias), first, p.bias ? p.n : 0);
}

template <typename O>
__device__ __forceinline__ void normalise(float (&x)[Pack<typename O::T>::size], float mean, float rstd,
                                          float (&w)[Pack<typename O::T>::size], const Pack<typename O::T>& bias,
                                          float weight_bias) {
  constexpr int size = Pack<typename O::T>::size;
  float b[size];
  if constexpr (O::norm == Norm::layer) bias.unpack(b);
  if (O::norm == Norm::rms && weight_bias != 0.f) {
#pragma unroll
    for (int i = 0; i < size; ++i) w[i] += weight_bias;
  }
#pragma unroll
  for (int i = 0; i < size; ++i) {
    if constexpr (O::norm == Norm::layer) {
      x[i] = fmaf((x[i] - mean) * rstd, w[i], b[i]);
    } else {
      x[i] = x[i] * rstd * w[i];
    }
  }
}

template <Access A, typename O>
__device__ __forceinline__ void write(const float (&y)[Pack<typename O::T>::size], const Params& p, char* row,
                                      int first) {
  Pack<typename O::T> pack;
  pack.pack(y);
  store_pack<A>(row, first, p.n, pack, !O::add && p.streamed);
}

template <Access A, int size>
__device__ __forceinline__ void write_codes(const float (&q)[size], const Params& p, char* row, int first) {
  uint32_t codes[size / 4];
#pragma unroll
  for (int i = 0; i < size; i += 4) codes[i / 4] = to_fp8x4(q[i], q[i + 1], q[i + 2], q[i + 3]);
  store_codes<A, size>(row, first, p.n, codes);
}

// The scale of a row held in registers, from its largest finite magnitude. What is not finite is rare: only where the
// plain maximum, which drops NaN, is infinite is it sought again, and what the divisions cannot take is limited to what
// saturates anyway. Elements past the end are 0.
template <int WARPS, int V, int size>
__device__ __forceinline__ float scale_of(float (&y)[V][size], float bound, float* memory) {
  float largest = 0.f;
#pragma unroll
  for (int v = 0; v < V; ++v) {
#pragma unroll
    for (int i = 0; i < size; ++i) largest = fmaxf(largest, fabsf(y[v][i]));
  }
  const float plain = block_max<WARPS>(largest, memory);
  float amax = plain;
  if (plain > FLT_MAX) {
    largest = 0.f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int i = 0; i < size; ++i) largest = fmaxf(largest, finite_magnitude(y[v][i]));
    }
    if constexpr (WARPS > 1) __syncthreads();
    amax = block_max<WARPS>(largest, memory);
  }
  const float scale = fp8_scale(amax, &bound);
  if (!(plain <= 0x1p60f * scale)) {
    const float most = fminf(512.f * scale, FLT_MAX);
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int i = 0; i < size; ++i) {
        if (fabsf(y[v][i]) > most) y[v][i] = copysignf(most, y[v][i]);
      }
    }
  }
  return scale;
}

__device__ __forceinline__ float scale_bound(const Params& p) { return p.scale_ub ? *p.scale_ub : FLT_MAX; }

}  // namespace kestrel::norm
