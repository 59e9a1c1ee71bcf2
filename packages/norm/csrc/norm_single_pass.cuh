// Row normalisation for rows that fit into the registers of a warp or a thread block; dispatch.h says which those are.
//
// Computes y = (x - mean) * rstd * weight + bias (LayerNorm) or y = x * rstd * (weight + weight_bias) (RMSNorm).
// Residual::add: x + residual is rounded, stored as the new residual and normalised. A thread holds V packs of 16
// bytes; pack c belongs to thread c % group size, so a row's sums have one order whatever the batch and the strides.
//
// PDL: weight and bias are loaded before the wait, rows after it. Rows may be prefetched into L2 before the wait: a
// prefetch returns no data, so it cannot return stale data.
#pragma once

#include <kestrel/pdl.cuh>

#include "epilogue.cuh"
#include "statistics.cuh"

namespace kestrel::norm {

// N <= V * MAX_WARPS * 32 packs. W: dtype of the weight. ROWS: rows per thread block, all loaded before the first is
// reduced; a block past the last row repeats the last one.
template <typename S, typename W, int V, int MAX_WARPS, Access A, int ROWS = 1>
__global__ void __launch_bounds__(MAX_WARPS == 1 ? 128 : MAX_WARPS * 32)
    norm_single_pass(const __grid_constant__ Params p) {
  using T = typename S::T;
  using Output = typename S::Output;
  constexpr int size = Pack<T>::size;
  static_assert(ROWS == 1 || (!S::layer && !Output::quantised));
  __shared__ float4 partials_smem[ROWS][MAX_WARPS];
  __shared__ float largest_smem[Output::quantised ? MAX_WARPS : 1];

  const ThreadGroup<MAX_WARPS> group;
  if (MAX_WARPS == 1 && group.row >= p.rows) return;
  RowPointers row[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) row[r] = RowPointers(p, ROWS == 1 ? group.row : min(group.row * ROWS + r, p.rows - 1));
  int first[V];  // elements this thread holds: `size` from each on
#pragma unroll
  for (int v = 0; v < V; ++v) first[v] = (v * group.size + group.rank) * size;

  if (p.prefetch && group.rank % 8 == 0) {  // a line of 128 bytes is 8 packs
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (first[v] < p.n) {
          prefetch_l2(row[r].x + static_cast<int64_t>(first[v]) * sizeof(T));
          if constexpr (S::add) prefetch_l2(row[r].residual + static_cast<int64_t>(first[v]) * sizeof(T));
        }
      }
    }
  }
  WeightPack<T, W> weight[V];
  Pack<T> bias[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    weight[v].template load<A>(p, first[v]);
    if constexpr (S::layer) bias[v] = load_bias<A, T>(p, first[v]);
  }
  WarpPartials<S::layer> partials[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) partials[r] = WarpPartials<S::layer>(partials_smem[r], group);
  float count = 0.f, inv_count = p.inv_n;  // of this warp's elements
  if constexpr (S::layer && MAX_WARPS > 1) {
    int elements = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) elements += min(32 * size, max(0, p.n - (v * group.size + group.warp * 32) * size));
    count = elements;
    inv_count = elements > 0 ? __fdividef(1.f, count) : 0.f;
    pin(count);
    pin(inv_count);
  }
  float eps = p.eps, inv_n = p.inv_n;
  pin(eps);
  pin(inv_n);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    pin(row[r].x);
    if constexpr (S::add) pin(row[r].residual);
    pin(row[r].out);
  }
  pdl_wait();
  pdl_trigger();

  Pack<T> loaded[ROWS][V], residual[ROWS][V];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      loaded[r][v] = load_pack<A, T>(row[r].x, first[v], p.n);
      if constexpr (S::add) residual[r][v] = load_pack<A, T>(row[r].residual, first[v], p.n);
    }
  }
  if constexpr (ROWS > 1) pdl_trigger();  // a no-op by now; it keeps ptxas from moving loads below the first reduction
  const float bound = Output::quantised ? scale_bound(p) : 0.f;

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float x[V][size];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      loaded[r][v].unpack(x[v]);
      if constexpr (S::add) add_residual<A, T>(x[v], residual[r][v], p, row[r].residual, first[v]);
    }
    float mean = 0.f, sum_sq = 0.f;  // of x (RMSNorm) or of x - mean (LayerNorm)
    if constexpr (S::layer) {
      constexpr PastEnd past_end = MAX_WARPS == 1 ? PastEnd::branch : PastEnd::select;
      const float pivot = pivot_of<A, T>(x[0], first[0], p.n);
      float s1 = 0.f, s2 = 0.f;
#pragma unroll
      for (int v = 0; v < V; ++v) add_moments<A, past_end, T>(x[v], first[v], p.n, pivot, s1, s2);
      const Moments moments = row_moments<MAX_WARPS>(pivot, s1, s2, count, inv_count, inv_n, group.lane, partials[r]);
      mean = moments.mean;
      sum_sq = moments.m2;
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) sum_sq += sum_of_squares<T>(x[v]);
      sum_sq = row_sum<MAX_WARPS>(sum_sq, group.lane, partials[r]);
    }
    const float rstd = rsqrtf(fmaf(sum_sq, inv_n, eps));
#pragma unroll
    for (int v = 0; v < V; ++v) {
      // Keeps the packs live across the reduction, not their floats.
      if constexpr (S::layer && MAX_WARPS == 1 && !S::add) {
        uint4& bits = loaded[r][v].bits;
        pin(bits.x), pin(bits.y), pin(bits.z), pin(bits.w);
        loaded[r][v].unpack(x[v]);
      }
      float w[size];
      weight[v].unpack(w);
      normalise<S>(x[v], mean, rstd, w, bias[v], p.weight_bias);
      if constexpr (!Output::quantised) store_rounded<S, A>(x[v], p, row[r].out, first[v]);
    }
    if constexpr (Output::quantised) {
      const float scale = row_scale<Output, MAX_WARPS>(x, bound, largest_smem), inverse = __frcp_rn(scale);
      if (group.rank == 0) p.scale[group.row] = scale;
#pragma unroll
      for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int i = 0; i < size; ++i) x[v][i] = divide(x[v][i], scale, inverse);
        store_quantised<Output, A>(x[v], p, row[r].out, first[v]);
      }
    }
  }
}

}  // namespace kestrel::norm
