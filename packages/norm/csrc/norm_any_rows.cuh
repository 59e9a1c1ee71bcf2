// Row normalisation for every row that norm_rows.cuh does not take: longer than the registers of a block, or with
// bases, strides or a length that are no multiples of 16 bytes (8 in bf16 and float16 without FP8).
//
// clang-format off
// Must move:  what norm_rows moves; a row is read again for each of its two passes (FP8: three), from L1 or L2.
// Split:      a block per row (four rows where a warp each is enough), of the warps that host.h's team_size gives its length.
//             Sums are added in the order of norm_rows: a row's result does not depend on which of the two kernels ran.
// PDL:        reads nothing before the wait, lets the next kernel in behind it.
// Measured:   on an H200, of the bytes at 4.3 TB/s: rms_norm 2048x16384 44.5 us, 70 %; 2048x4098 (4 bytes at a time) 17.5,
//             45 % (results/h200_designs.json, "odd", "long").
// clang-format on
#pragma once

#include <kestrel/pdl.cuh>

#include "finish.cuh"

namespace kestrel::norm {

constexpr int MOST_WARPS = 32;

template <typename O, Access A>
__global__ void __launch_bounds__(MOST_WARPS * 32, A == Access::whole ? 0 : 1)
    norm_any_rows(const __grid_constant__ Params p) {
  using T = typename O::T;
  constexpr int size = Pack<T>::size;
  constexpr bool layer = O::norm == Norm::layer;
  __shared__ float4 memory[MOST_WARPS];
  __shared__ float largest_of_warps[O::fp8 ? MOST_WARPS : 1];
  const Team<MOST_WARPS> team;
  const int index = team.row * blockDim.y + threadIdx.y;
  if (index >= p.rows) return;  // only where a block has several rows, which meet at no barrier
  const Exchange<layer> exchange(memory, team);
  const Row row(p, index);
  pdl_wait();
  pdl_trigger();

  const int start = team.thread * size, stride = team.threads * size;
  float pivot = 0.f, s1 = 0.f, s2 = 0.f, count = 0.f;
  for (int64_t base = start; base - start < p.n; base += stride) {
    const int first = static_cast<int>(base < p.n ? base : p.n);
    float x[size];
    load_pack<A, T, true>(row.x, first, p.n, p.unit).unpack(x);
    if constexpr (O::add) {
      const Pack<T> residual = load_pack<A, T, true>(row.residual, first, p.n, p.unit);
      add_residual<A, T>(x, residual, p, row.residual, first);
    }
    if constexpr (layer) {
      if (base == start) pivot = pivot_of<A, T>(x, first, p.n);
      add_moments<A, false, T>(x, first, p.n, pivot, s1, s2);
      count += min(size, p.n - first);
    } else {
      s2 += sum_of_squares<T>(x);
    }
  }
  float mean = 0.f, squares;
  if constexpr (layer) {
    count = warp_sum(count);
    float inv_count = count > 0.f ? __fdividef(1.f, count) : 0.f;
    Moments moments;
    if (team.threads == 32) {
      moments = team_moments<1>(pivot, s1, s2, count, p.inv_n, p.inv_n, team.lane, exchange);
    } else if (team.threads <= 8 * 32) {
      moments = team_moments<8>(pivot, s1, s2, count, inv_count, p.inv_n, team.lane, exchange);
    } else {
      moments = team_moments<MOST_WARPS>(pivot, s1, s2, count, inv_count, p.inv_n, team.lane, exchange);
    }
    mean = moments.mean;
    squares = moments.squares;
  } else if (team.threads == 32) {
    squares = team_sum<1>(s2, team.lane, exchange);
  } else if (team.threads <= 8 * 32) {
    squares = team_sum<8>(s2, team.lane, exchange);
  } else {
    squares = team_sum<MOST_WARPS>(s2, team.lane, exchange);
  }
  const float rstd = rsqrtf(fmaf(squares, p.inv_n, p.eps));

  // The second pass writes; FP8 looks for the largest magnitude first, and writes in a third.
  float largest = 0.f, scale = 0.f, inverse = 0.f;
#pragma unroll 1
  for (int pass = O::fp8 ? 0 : 1; pass < 2; ++pass) {
    for (int64_t base = start; base < p.n; base += stride) {
      const int first = static_cast<int>(base);
      float y[size], w[size];
      load_pack<A, T, true>(O::add ? row.residual : row.x, first, p.n, p.unit).unpack(y);
      Pack<T> bias;
      if constexpr (layer) bias = load_bias<A, T>(p, first);
      const auto read_weights = [&](auto pack) {
        pack.template load<A>(p, first);
        pack.unpack(w);
      };
      if (!layer && size > 4 && p.wide) {
        read_weights(WeightPack<T, float>());
      } else {
        read_weights(WeightPack<T, T>());
      }
      normalise<O>(y, mean, rstd, w, bias, p.weight_bias);
      if constexpr (!O::fp8) {
        write<A, O>(y, p, row.out, first);
      } else if (pass == 0) {
#pragma unroll
        for (int i = 0; i < size; ++i) largest = fmaxf(largest, finite_magnitude(y[i]));
      } else {
#pragma unroll
        for (int i = 0; i < size; ++i) y[i] = fp8_quotient(y[i], scale, inverse);
        write_codes<A>(y, p, row.out, first);
      }
    }
    if (O::fp8 && pass == 0) {
      const float bound = scale_bound(p);
      const float amax = team.threads == 32 ? warp_max(largest) : block_max<MOST_WARPS>(largest, largest_of_warps);
      scale = fp8_scale(amax, &bound);
      inverse = __frcp_rn(scale);
      if (team.thread == 0) p.scale[index] = scale;
    }
  }
}

}  // namespace kestrel::norm
