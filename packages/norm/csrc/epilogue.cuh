// What the kernels do around the reduction: add the residual; normalise, quantise and store a pack.
#pragma once

#include <kestrel/reduce.cuh>

#include "access.cuh"

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

// x <- (x - mean) * rstd * w + bias (LayerNorm), or x * rstd * (w + weight_bias) (RMSNorm).
template <typename S>
__device__ __forceinline__ void normalise(float (&x)[Pack<typename S::T>::size], float mean, float rstd,
                                          float (&w)[Pack<typename S::T>::size], const Pack<typename S::T>& bias,
                                          float weight_bias) {
  constexpr int size = Pack<typename S::T>::size;
  float b[size];
  if constexpr (S::layer) bias.unpack(b);
  if (!S::layer && weight_bias != 0.f) {
#pragma unroll
    for (int i = 0; i < size; ++i) w[i] += weight_bias;
  }
#pragma unroll
  for (int i = 0; i < size; ++i) {
    if constexpr (S::layer) {
      x[i] = fmaf((x[i] - mean) * rstd, w[i], b[i]);
    } else {
      x[i] = x[i] * rstd * w[i];
    }
  }
}

template <typename S, Access A>
__device__ __forceinline__ void store_rounded(const float (&y)[Pack<typename S::T>::size], const Params& p, char* row,
                                              int first) {
  Pack<typename S::T> pack;
  pack.pack(y);
  store_pack<A>(row, first, p.n, pack, !S::add && p.evict_first);
}

// q: quotients of a pack by the row's scale.
template <typename Output, Access A, int size>
__device__ __forceinline__ void store_quantised(const float (&q)[size], const Params& p, char* row, int first) {
  uint32_t codes[size / 4];
#pragma unroll
  for (int i = 0; i < size; i += 4) codes[i / 4] = Output::codes4(q[i], q[i + 1], q[i + 2], q[i + 3]);
  store_codes<A, size>(row, first, p.n, codes);
}

// The scale of a row held in registers, from its largest finite magnitude. Elements past the end are 0.
// Infinite and NaN elements are rare. The plain maximum drops NaN; only where it is infinite is the finite maximum
// computed. divide() takes quotients up to 2^60; larger values are clamped to one whose code is the largest too.
template <typename Output, int WARPS, int V, int size>
__device__ __forceinline__ float row_scale(float (&y)[V][size], float bound, float* smem) {
  float largest = 0.f;
#pragma unroll
  for (int v = 0; v < V; ++v) {
#pragma unroll
    for (int i = 0; i < size; ++i) largest = fmaxf(largest, fabsf(y[v][i]));
  }
  const float plain = block_max<WARPS>(largest, smem);
  float amax = plain;
  if (plain > FLT_MAX) {
    largest = 0.f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int i = 0; i < size; ++i) largest = fmaxf(largest, finite_magnitude(y[v][i]));
    }
    if constexpr (WARPS > 1) __syncthreads();
    amax = block_max<WARPS>(largest, smem);
  }
  const float scale = Output::scale(amax, bound);
  if (!(plain <= 0x1p60f * scale)) {
    const float most = fminf(Output::saturated * scale, FLT_MAX);
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
