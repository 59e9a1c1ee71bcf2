// Row normalisation for rows that are too long for norm_single_pass or not aligned.
//
// Computes what norm_single_pass computes, with sums in the same order, so the choice of kernel never changes the
// result. One thread block per row, or four rows per block where a warp each suffices. Pass 1 reduces, pass 2
// normalises and stores; a quantised output has a pass for the row's largest magnitude in between. An unaligned row
// that fits is staged in shared memory by cp.async, so global memory is read once; other rows are read again from L1 or
// L2. PDL: nothing is read before the wait.
#pragma once

#include <kestrel/pdl.cuh>
#include <kestrel/ptx/cp_async.cuh>
#include <kestrel/ptx/shared.cuh>

#include "epilogue.cuh"
#include "statistics.cuh"

namespace kestrel::norm {

constexpr int kMultiPassMaxWarps = 32;

// Copies the aligned words that a row lies in to shared memory (asynchronously); returns where the row begins there.
__device__ __forceinline__ const char* stage_row(char* smem, const char* row, int bytes, int rank, int threads) {
  const int shift = reinterpret_cast<uintptr_t>(row) % 16;
  const unsigned to = ptx::shared_address(smem);
  for (int at = 16 * rank; at < shift + bytes; at += 16 * threads) {
    ptx::cp_async16(to + at, row - shift + at);
  }
  return smem + shift;
}

// Calls with the number of partial results that the group's reduction has, as a constant: 1, 8 or 32 warps.
template <typename F>
__device__ __forceinline__ auto with_max_warps(int threads, F call) {
  if (threads == 32) return call(std::integral_constant<int, 1>());
  if (threads <= 8 * 32) return call(std::integral_constant<int, 8>());
  return call(std::integral_constant<int, kMultiPassMaxWarps>());
}

template <typename S, Access A>
__global__ void __launch_bounds__(kMultiPassMaxWarps * 32, A == Access::aligned16 ? 0 : 1)
    norm_multi_pass(const __grid_constant__ Params p) {
  using T = typename S::T;
  using Output = typename S::Output;
  constexpr int size = Pack<T>::size;
  constexpr Source reread = Source::global_or_shared;
  extern __shared__ __align__(16) char staged_rows[];
  __shared__ float4 partials_smem[kMultiPassMaxWarps];
  __shared__ float largest_smem[Output::quantised ? kMultiPassMaxWarps : 1];
  const ThreadGroup<kMultiPassMaxWarps> group;
  const int index = group.row * blockDim.y + threadIdx.y;
  if (index >= p.rows) return;  // only in blocks of several rows, which have no barrier
  const WarpPartials<S::layer> partials(partials_smem, group);
  const RowPointers row(p, index);
  pdl_wait();
  pdl_trigger();

  const char *x_row = row.x, *residual_row = row.residual;
  if (p.row_smem_bytes > 0) {
    char* smem = staged_rows + threadIdx.y * (S::add ? 2 : 1) * p.row_smem_bytes;
    x_row = stage_row(smem, row.x, p.n * sizeof(T), group.rank, group.size);
    if constexpr (S::add)
      residual_row = stage_row(smem + p.row_smem_bytes, row.residual, p.n * sizeof(T), group.rank, group.size);
    ptx::cp_async_wait_all();
    group.size == 32 ? __syncwarp() : __syncthreads();
  }

  const int start = group.rank * size, stride = group.size * size;
  float pivot = 0.f, s1 = 0.f, s2 = 0.f, count = 0.f;
  for (int64_t base = start; base - start < p.n; base += stride) {
    const int first = static_cast<int>(base < p.n ? base : p.n);
    float x[size];
    load_pack<A, T, reread>(x_row, first, p.n).unpack(x);
    if constexpr (S::add) {
      const Pack<T> residual = load_pack<A, T, reread>(residual_row, first, p.n);
      add_residual<A, T>(x, residual, p, row.residual, first);
    }
    if constexpr (S::layer) {
      if (base == start) pivot = pivot_of<A, T>(x, first, p.n);
      add_moments<A, PastEnd::select, T>(x, first, p.n, pivot, s1, s2);
      count += min(size, p.n - first);
    } else {
      s2 += sum_of_squares<T>(x);
    }
  }
  if constexpr (S::add) __syncwarp();  // another lane may have stored a part of this one's residual
  float mean = 0.f, sum_sq;
  if constexpr (S::layer) {
    count = warp_sum(count);
    const float inv_count = count > 0.f ? __fdividef(1.f, count) : 0.f;
    const Moments moments = with_max_warps(group.size, [&](auto max_warps) {
      constexpr int warps = decltype(max_warps)::value;
      return row_moments<warps>(pivot, s1, s2, count, warps == 1 ? p.inv_n : inv_count, p.inv_n, group.lane, partials);
    });
    mean = moments.mean;
    sum_sq = moments.m2;
  } else {
    sum_sq = with_max_warps(
        group.size, [&](auto max_warps) { return row_sum<decltype(max_warps)::value>(s2, group.lane, partials); });
  }
  const float rstd = rsqrtf(fmaf(sum_sq, p.inv_n, p.eps));

  // The last pass stores; a quantised output finds the row's largest magnitude in the pass before it.
  float largest = 0.f, scale = 0.f, inverse = 0.f;
#pragma unroll 1
  for (int pass = Output::quantised ? 0 : 1; pass < 2; ++pass) {
    for (int64_t base = start; base - start < p.n; base += stride) {
      const int first = static_cast<int>(base < p.n ? base : p.n);
      float y[size], w[size];
      load_pack<A, T, reread>(S::add ? row.residual : x_row, first, p.n).unpack(y);
      Pack<T> bias;
      if constexpr (S::layer) bias = load_bias<A, T>(p, first);
      const auto load_weights = [&](auto pack) {
        pack.template load<A>(p, first);
        pack.unpack(w);
      };
      if (!S::layer && size > 4 && p.float_weight) {
        load_weights(WeightPack<T, float>());
      } else {
        load_weights(WeightPack<T, T>());
      }
      normalise<S>(y, mean, rstd, w, bias, p.weight_bias);
      if constexpr (!Output::quantised) {
        store_rounded<S, A>(y, p, row.out, first);
      } else if (pass == 0) {
#pragma unroll
        for (int i = 0; i < size; ++i) largest = fmaxf(largest, finite_magnitude(y[i]));
      } else {
#pragma unroll
        for (int i = 0; i < size; ++i) y[i] = Output::quotient(y[i], scale, inverse);
        store_quantised<Output, A>(y, p, row.out, first);
      }
    }
    if constexpr (Output::quantised) {
      if (pass == 0) {
        const float bound = scale_bound(p);
        const float amax = group.size == 32 ? warp_max(largest) : block_max<kMultiPassMaxWarps>(largest, largest_smem);
        scale = Output::scale(amax, bound);
        inverse = __frcp_rn(scale);
        if (group.rank == 0) p.scale[index] = scale;
      }
    }
  }
}

}  // namespace kestrel::norm
