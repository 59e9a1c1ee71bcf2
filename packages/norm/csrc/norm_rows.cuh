// Row normalisation: the kernels behind layer_norm, rms_norm and fused_add_rms_norm.
//
// clang-format off
// Computes:   y = (x - mean) * rstd * weight + bias for every row of N elements (LayerNorm), or
//             y = x * rstd * (weight + weight_bias) (RMSNorm); with a residual, x + residual is rounded, stored as the
//             new residual, and normalised.
// Built for:  rows of 1 to 8 k elements in bf16, from one row (latency) to 65536 (bandwidth).
// Must move:  x in and y out once each (a residual, in and out once more); 5 to 9 operations per element.
// Split:      a team of threads per row, chosen by N and the dtype alone: one warp up to 128 packs of 16 bytes (LayerNorm
//             160; four rows a block), else a block of up to 8 warps. A thread holds V packs of the row in registers, pack c
//             belongs to thread c % team: sums are added in one order, whatever the batch, the alignment and the strides.
//             Rows of more than 1024 packs are read twice, by 32 warps.
// PDL:        weight and bias are read before the wait, rows after it, and the next kernel is let in after it (pdl.cuh says
//             why). Where host.h's set_overlap says so, a row is prefetched into L2 before the wait: that returns no data, so
//             it cannot see a stale value, and it hides the latency of what the kernel before did not write. Rows of more
//             than 1024 packs do neither.
// Measured:   on an H200 85 to 96 % of 4.3 TB/s at 9477 rows and more; every shape of record in results/h200.json, the
//             shapes that miss their target in README.md.
// clang-format on
#pragma once

#include <kestrel/pdl.cuh>

#include "statistics.cuh"

namespace kestrel::norm {

// Rounds x + residual, stores it as the new residual and leaves the rounded sum in x.
template <bool VECTORS, typename T>
__device__ __forceinline__ void add_residual(float (&x)[Pack<T>::size], const Pack<T>& residual, char* row, int first,
                                             int n) {
  float r[Pack<T>::size];
  residual.unpack(r);
#pragma unroll
  for (int i = 0; i < Pack<T>::size; ++i) x[i] += r[i];
  Pack<T> sum;
  sum.pack(x);
  store_pack<VECTORS>(row, first, n, sum);
  sum.unpack(x);
}

template <bool VECTORS, typename O>
__device__ __forceinline__ void write_normalised(float (&x)[Pack<typename O::T>::size], float mean, float rstd,
                                                 const WeightPack<typename O::T, typename O::W>& weight,
                                                 const Pack<typename O::T>& bias, const Params& p, char* row,
                                                 int first) {
  using T = typename O::T;
  float w[Pack<T>::size], b[Pack<T>::size];
  weight.unpack(w);
  if constexpr (O::norm == Norm::layer) bias.unpack(b);
  if (O::norm == Norm::rms && p.weight_bias != 0.f) {
#pragma unroll
    for (int i = 0; i < Pack<T>::size; ++i) w[i] += p.weight_bias;
  }
#pragma unroll
  for (int i = 0; i < Pack<T>::size; ++i) {
    if constexpr (O::norm == Norm::layer) {
      x[i] = fmaf((x[i] - mean) * rstd, w[i], b[i]);
    } else {
      x[i] = x[i] * rstd * w[i];
    }
  }
  Pack<T> y;
  y.pack(x);
  store_pack<VECTORS>(row, first, p.n, y, !O::add && p.streamed);
}

// Rows that fit into the registers of a team: N <= V * WARPS * 32 packs.
template <typename O, int V, int WARPS, bool VECTORS>
__global__ void __launch_bounds__(WARPS == 1 ? 128 : WARPS * 32, VECTORS ? 0 : 1)
    norm_rows(const __grid_constant__ Params p) {
  using T = typename O::T;
  constexpr int size = Pack<T>::size;
  constexpr bool layer = O::norm == Norm::layer;
  __shared__ float4 memory[WARPS];

  const Team<WARPS> team;
  if (WARPS == 1 && team.row >= p.rows) return;
  Row row(p, team.row);
  int first[V];  // elements this thread holds: `size` from each on
#pragma unroll
  for (int v = 0; v < V; ++v) first[v] = (v * team.threads + team.thread) * size;

  if (p.prefetch && team.thread % 8 == 0) {  // a line of 128 bytes is 8 packs
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (first[v] < p.n) {
        prefetch_l2(row.x + static_cast<int64_t>(first[v]) * sizeof(T));
        if constexpr (O::add) prefetch_l2(row.residual + static_cast<int64_t>(first[v]) * sizeof(T));
      }
    }
  }
  WeightPack<T, typename O::W> weight[V];
  Pack<T> bias[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    weight[v].template load<VECTORS>(p.weight, first[v], p.n);
    if constexpr (layer) {
      bias[v] = load_pack<VECTORS, T, true>(static_cast<const char*>(p.bias), first[v], p.bias ? p.n : 0);
    }
  }
  const Exchange<WARPS, layer> exchange(memory, team);
  float count = 0.f, inv_count = p.inv_n;  // of this warp's elements
  if constexpr (layer && WARPS > 1) {
    int elements = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) elements += min(32 * size, max(0, p.n - (v * team.threads + team.warp * 32) * size));
    count = elements;
    inv_count = elements > 0 ? __fdividef(1.f, count) : 0.f;
    pin(count);
    pin(inv_count);
  }
  float eps = p.eps, inv_n = p.inv_n;
  pin(eps);
  pin(inv_n);
  pin(row.x);
  if constexpr (O::add) pin(row.residual);
  pin(row.out);
  pdl_wait();
  if (p.early) pdl_trigger();

  Pack<T> loaded[V], residual[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    loaded[v] = load_pack<VECTORS, T>(row.x, first[v], p.n);
    if constexpr (O::add) residual[v] = load_pack<VECTORS, T>(row.residual, first[v], p.n);
  }
  if (!p.early) pdl_trigger();

  float x[V][size];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    loaded[v].unpack(x[v]);
    if constexpr (O::add) add_residual<VECTORS, T>(x[v], residual[v], row.residual, first[v], p.n);
  }
  float mean = 0.f, variance;
  if constexpr (layer) {
    const float pivot = pivot_of<VECTORS, T>(x[0], first[0], p.n);
    float s1 = 0.f, s2 = 0.f;
#pragma unroll
    for (int v = 0; v < V; ++v) add_moments<VECTORS, WARPS == 1, T>(x[v], first[v], p.n, pivot, s1, s2);
    const Moments moments = team_moments<WARPS>(pivot, s1, s2, count, inv_count, inv_n, team, exchange);
    mean = moments.mean;
    variance = moments.variance;
  } else {
    float s = 0.f;
#pragma unroll
    for (int v = 0; v < V; ++v) s += sum_of_squares<T>(x[v]);
    variance = team_sum<WARPS>(s, team, exchange) * inv_n;
  }
  const float rstd = rsqrtf(variance + eps);
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if constexpr (layer && WARPS == 1 &&
                  !O::add) {  // hold the packs, not their floats, over the sums: half the registers
      pin(loaded[v].bits.x), pin(loaded[v].bits.y), pin(loaded[v].bits.z), pin(loaded[v].bits.w);
      loaded[v].unpack(x[v]);
    }
    write_normalised<VECTORS, O>(x[v], mean, rstd, weight[v], bias[v], p, row.out, first[v]);
  }
}

// Rows of any length, one block of LONG_WARPS warps each: read twice, the second time mostly from L2.
constexpr int LONG_WARPS = 32;

template <typename O, bool VECTORS>
__global__ void __launch_bounds__(LONG_WARPS * 32) norm_long_rows(const __grid_constant__ Params p) {
  using T = typename O::T;
  constexpr int size = Pack<T>::size;
  constexpr int stride = LONG_WARPS * 32 * size;
  constexpr bool layer = O::norm == Norm::layer;
  __shared__ float4 memory[LONG_WARPS];
  const Team<LONG_WARPS> team;
  const Exchange<LONG_WARPS, layer> exchange(memory, team);
  const Row row(p, team.row);
  pdl_wait();
  pdl_trigger();

  const int start = team.thread * size;
  float pivot = 0.f, s1 = 0.f, s2 = 0.f, count = 0.f;
  for (int64_t base = start; base - start < p.n; base += stride) {
    const int first = static_cast<int>(base < p.n ? base : p.n);
    float x[size];
    load_pack<VECTORS, T>(row.x, first, p.n).unpack(x);
    if constexpr (O::add) {
      add_residual<VECTORS, T>(x, load_pack<VECTORS, T>(row.residual, first, p.n), row.residual, first, p.n);
    }
    if constexpr (layer) {
      if (base == start) pivot = pivot_of<VECTORS, T>(x, first, p.n);
      add_moments<VECTORS, false, T>(x, first, p.n, pivot, s1, s2);
      count += min(size, p.n - first);
    } else {
      s2 += sum_of_squares<T>(x);
    }
  }
  float mean = 0.f, variance;
  if constexpr (layer) {
    count = warp_sum(count);
    const Moments moments = team_moments<LONG_WARPS>(pivot, s1, s2, count, count > 0.f ? __fdividef(1.f, count) : 0.f,
                                                     p.inv_n, team, exchange);
    mean = moments.mean;
    variance = moments.variance;
  } else {
    variance = team_sum<LONG_WARPS>(s2, team, exchange) * p.inv_n;
  }
  const float rstd = rsqrtf(variance + p.eps);
  for (int64_t base = start; base < p.n; base += stride) {
    const int first = static_cast<int>(base);
    float x[size];
    load_pack<VECTORS, T>(O::add ? row.residual : row.x, first, p.n).unpack(x);
    WeightPack<T, typename O::W> weight;
    Pack<T> bias;
    weight.template load<VECTORS>(p.weight, first, p.n);
    if constexpr (layer) {
      bias = load_pack<VECTORS, T, true>(static_cast<const char*>(p.bias), first, p.bias ? p.n : 0);
    }
    write_normalised<VECTORS, O>(x, mean, rstd, weight, bias, p, row.out, first);
  }
}

}  // namespace kestrel::norm
