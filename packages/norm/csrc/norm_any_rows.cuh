// Row normalisation for every row that norm_rows.cuh does not take: longer than the registers of a block, or with
// bases, strides or a length that are no multiples of 16 bytes (8 in bf16 and float16 without FP8).
//
// clang-format off
// Must move:  what norm_rows moves. An unaligned row of up to 47 KB is copied to shared memory, all of it at once, and read
//             from there for each of its two passes (FP8: three); any other is read again, from L1 or L2.
// Alignment:  a row at any address is read and written as the aligned words of 16 bytes that it lies in (rows.cuh,
//             Access::across): what a pack has of two words is shifted together.
// Split:      a block per row (four rows where a warp each is enough), of the warps that host.h's team_size gives its length.
//             Sums are added in the order of norm_rows: a row's result does not depend on which of the two kernels ran.
// PDL:        reads nothing before the wait, lets the next kernel in behind it.
// Measured:   0.25 to 0.38 of the limit for rows of odd lengths, 0.70 for 512x18944 (results/h200_odd.json).
// clang-format on
#pragma once

#include <kestrel/pdl.cuh>

#include "finish.cuh"

namespace kestrel::norm {

constexpr int MOST_WARPS = 32;

// Starts to copy the aligned words that a row lies in to shared memory; returns where there it begins.
__device__ __forceinline__ const char* stage(char* shared, const char* row, int bytes, int thread, int threads) {
  const int shift = reinterpret_cast<uintptr_t>(row) % 16;
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  for (int at = 16 * thread; at < shift + bytes; at += 16 * threads) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(row - shift + at) : "memory");
  }
  return shared + shift;
}

template <typename O, Access A>
__global__ void __launch_bounds__(MOST_WARPS * 32, A == Access::whole ? 0 : 1)
    norm_any_rows(const __grid_constant__ Params p) {
  using T = typename O::T;
  constexpr int size = Pack<T>::size;
  constexpr bool layer = O::norm == Norm::layer;
  extern __shared__ __align__(16) char staged_rows[];
  __shared__ float4 memory[MOST_WARPS];
  __shared__ float largest_of_warps[O::fp8 ? MOST_WARPS : 1];
  const Team<MOST_WARPS> team;
  const int index = team.row * blockDim.y + threadIdx.y;
  if (index >= p.rows) return;  // only where a block has several rows, which meet at no barrier
  const Exchange<layer> exchange(memory, team);
  const Row row(p, index);
  pdl_wait();
  pdl_trigger();

  const char *x_row = row.x, *residual_row = row.residual;
  if (p.staged > 0) {
    char* shared = staged_rows + threadIdx.y * (O::add ? 2 : 1) * p.staged;
    x_row = stage(shared, row.x, p.n * sizeof(T), team.thread, team.threads);
    if constexpr (O::add)
      residual_row = stage(shared + p.staged, row.residual, p.n * sizeof(T), team.thread, team.threads);
    asm volatile("cp.async.wait_all;" ::: "memory");
    team.threads == 32 ? __syncwarp() : __syncthreads();
  }

  const int start = team.thread * size, stride = team.threads * size;
  float pivot = 0.f, s1 = 0.f, s2 = 0.f, count = 0.f;
  for (int64_t base = start; base - start < p.n; base += stride) {
    const int first = static_cast<int>(base < p.n ? base : p.n);
    float x[size];
    load_pack<A, T, true, true>(x_row, first, p.n).unpack(x);
    if constexpr (O::add) {
      const Pack<T> residual = load_pack<A, T, true, true>(residual_row, first, p.n);
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
  if constexpr (O::add) __syncwarp();  // another lane may have written a part of this one's residual
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
    for (int64_t base = start; base - start < p.n; base += stride) {
      const int first = static_cast<int>(base < p.n ? base : p.n);
      float y[size], w[size];
      load_pack<A, T, true, true>(O::add ? row.residual : x_row, first, p.n).unpack(y);
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
