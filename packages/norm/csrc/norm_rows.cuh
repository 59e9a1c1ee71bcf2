// Row normalisation: the kernel behind all ops of this family, for rows that fit into registers.
//
// clang-format off
// Computes:   y = (x - mean) * rstd * weight + bias for every row of N elements (LayerNorm), or
//             y = x * rstd * (weight + weight_bias) (RMSNorm); with a residual, x + residual is rounded, stored as the
//             new residual, and normalised; with FP8, y leaves unrounded as codes and a scale per row.
// Built for:  rows of 1 to 8 k elements in bf16, from one row (latency) to 65536 (bandwidth).
// Must move:  x in and y out once each (a residual, in and out once more); 4 to 9 operations per element.
// Split:      a team of threads per row, chosen by N and the dtype alone (host.h): one warp up to 128 packs of 16 bytes
//             (LayerNorm 160; four rows a block), else a block of up to 8 warps. A thread holds V packs of the row in
//             registers, pack c belongs to thread c % team: sums are added in one order, whatever the batch and the strides.
//             A block of a large rms_norm has two rows, all of which it reads before it works on the first. A pack is
//             one access, or two where bases, strides or N are multiples of 8 bytes alone (rows.cuh, Access).
// PDL:        weight and bias are read before the wait, rows after it, and the next kernel is let in after it (pdl.cuh says
//             why). Where host.h's set_overlap says so, a row is prefetched into L2 before the wait: that returns no data, so
//             it cannot see a stale value, and it hides the latency of what the kernel before did not write.
// Measured:   on an H200, of the limit (a launch and the bytes at 4.3 TB/s): rms_norm 16x4096 1.00, layer_norm 729x1152
//             0.99, fused_add_rms_norm 740x2048 1.01; rms_norm 16384x4096 and 65536x8192 0.94, which miss their targets by
//             about 1 %. Every shape of record: results/h200.json; what was tried: README.md.
// clang-format on
#pragma once

#include <kestrel/pdl.cuh>

#include "finish.cuh"

namespace kestrel::norm {

// Rows that fit into the registers of a team: N <= V * WARPS * 32 packs. ROWS: of a team, all read before the first is
// worked on; a team that has one too few works on its last one twice.
template <typename O, int V, int WARPS, Access A = Access::whole, int ROWS = 1>
__global__ void __launch_bounds__(WARPS == 1 ? 128 : WARPS * 32) norm_rows(const __grid_constant__ Params p) {
  using T = typename O::T;
  constexpr int size = Pack<T>::size;
  constexpr bool layer = O::norm == Norm::layer;
  static_assert(ROWS == 1 || (!layer && !O::fp8));
  __shared__ float4 memory[ROWS][WARPS];
  __shared__ float largest_of_warps[O::fp8 ? WARPS : 1];

  const Team<WARPS> team;
  if (WARPS == 1 && team.row >= p.rows) return;
  Row row[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) row[r] = Row(p, ROWS == 1 ? team.row : min(team.row * ROWS + r, p.rows - 1));
  int first[V];  // elements this thread holds: `size` from each on
#pragma unroll
  for (int v = 0; v < V; ++v) first[v] = (v * team.threads + team.thread) * size;

  if (p.prefetch && team.thread % 8 == 0) {  // a line of 128 bytes is 8 packs
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (first[v] < p.n) {
          prefetch_l2(row[r].x + static_cast<int64_t>(first[v]) * sizeof(T));
          if constexpr (O::add) prefetch_l2(row[r].residual + static_cast<int64_t>(first[v]) * sizeof(T));
        }
      }
    }
  }
  WeightPack<T, typename O::W> weight[V];
  Pack<T> bias[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    weight[v].template load<A>(p, first[v]);
    if constexpr (layer) bias[v] = load_bias<A, T>(p, first[v]);
  }
  Exchange<layer> exchange[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) exchange[r] = Exchange<layer>(memory[r], team);
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
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    pin(row[r].x);
    if constexpr (O::add) pin(row[r].residual);
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
      if constexpr (O::add) residual[r][v] = load_pack<A, T>(row[r].residual, first[v], p.n);
    }
  }
  if constexpr (ROWS > 1) pdl_trigger();  // has been done; it keeps the assembler from sinking loads below a sum
  const float bound = O::fp8 ? scale_bound(p) : 0.f;

#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    float x[V][size];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      loaded[r][v].unpack(x[v]);
      if constexpr (O::add) add_residual<A, T>(x[v], residual[r][v], p, row[r].residual, first[v]);
    }
    float mean = 0.f, squares = 0.f;
    if constexpr (layer) {
      const float pivot = pivot_of<A, T>(x[0], first[0], p.n);
      float s1 = 0.f, s2 = 0.f;
#pragma unroll
      for (int v = 0; v < V; ++v) add_moments<A, WARPS == 1, T>(x[v], first[v], p.n, pivot, s1, s2);
      const Moments moments = team_moments<WARPS>(pivot, s1, s2, count, inv_count, inv_n, team.lane, exchange[r]);
      mean = moments.mean;
      squares = moments.squares;
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) squares += sum_of_squares<T>(x[v]);
      squares = team_sum<WARPS>(squares, team.lane, exchange[r]);
    }
    const float rstd = rsqrtf(fmaf(squares, inv_n, eps));
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if constexpr (layer && WARPS == 1 && !O::add) {  // hold the packs, not their floats, over the sums
        uint4& bits = loaded[r][v].bits;
        pin(bits.x), pin(bits.y), pin(bits.z), pin(bits.w);
        loaded[r][v].unpack(x[v]);
      }
      float w[size];
      weight[v].unpack(w);
      normalise<O>(x[v], mean, rstd, w, bias[v], p.weight_bias);
      if constexpr (!O::fp8) write<A, O>(x[v], p, row[r].out, first[v]);
    }
    if constexpr (O::fp8) {
      const float scale = scale_of<WARPS>(x, bound, largest_of_warps), inverse = __frcp_rn(scale);
      if (team.thread == 0) p.scale[team.row] = scale;
#pragma unroll
      for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int i = 0; i < size; ++i) x[v][i] = divide(x[v][i], scale, inverse);
        write_codes<A>(x[v], p, row[r].out, first[v]);
      }
    }
  }
}

}  // namespace kestrel::norm
