// Reductions over a row: the sum of squares, or mean and variance. One barrier per row.
#pragma once

#include <kestrel/pdl.cuh>
#include <kestrel/ptx/shared.cuh>
#include <kestrel/reduce.cuh>

#include "access.cuh"

namespace kestrel::norm {

// The threads that share a row: one warp (MAX_WARPS 1, several rows per thread block), or a thread block of up to
// MAX_WARPS warps.
template <int MAX_WARPS>
struct ThreadGroup {
  int row, rank, lane, warp;  // rank and warp: index in the group
  int size;                   // threads

  __device__ __forceinline__ ThreadGroup() {
    lane = threadIdx.x & 31;
    if constexpr (MAX_WARPS == 1) {
      row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
      rank = lane;
      warp = 0;
      size = 32;
    } else {
      row = blockIdx.x;
      rank = threadIdx.x;
      warp = threadIdx.x >> 5;
      size = blockDim.x;
    }
  }
};

// Shared memory with one partial result per warp: {mean, sum of squared deviations from it, elements, 0} for LayerNorm,
// a sum of squares for RMSNorm. Entries of warps that the group does not have are zero.
template <bool layer>
struct WarpPartials {
  static constexpr int entry_bytes = layer ? 16 : 4;
  unsigned all = 0, mine = 0;  // addresses

  WarpPartials() = default;
  template <int MAX_WARPS>
  __device__ __forceinline__ WarpPartials(float4* smem, const ThreadGroup<MAX_WARPS>& group) {
    if constexpr (MAX_WARPS > 1) {
      all = ptx::shared_address(smem);
      mine = all + group.warp * entry_bytes;
      // A group of two or more warps has a thread for every entry; one warp alone needs no entries.
      if (group.size > 32 && group.rank < MAX_WARPS && group.rank >= (group.size >> 5)) {
        const unsigned address = all + group.rank * entry_bytes;
        if constexpr (layer) {
          ptx::store_shared(address, make_float4(0.f, 0.f, 0.f, 0.f));
        } else {
          ptx::store_shared(address, 0.f);
        }
      }
      pin(all);
      pin(mine);
    }
  }
};

// The row's sum of squares from every thread's.
template <int MAX_WARPS>
__device__ __forceinline__ float row_sum(float s, int lane, const WarpPartials<false>& partials) {
  s = warp_sum(s);
  if constexpr (MAX_WARPS > 1) {
    if (lane == 0) ptx::store_shared(partials.mine, s);
    __syncthreads();
    if constexpr (MAX_WARPS <= 8) {
      float sums[MAX_WARPS / 4];
#pragma unroll
      for (int i = 0; i < MAX_WARPS / 4; ++i) {
        const float4 four = ptx::load_shared_float4(partials.all + 16 * i);
        sums[i] = (four.x + four.y) + (four.z + four.w);
      }
      s = MAX_WARPS == 4 ? sums[0] : sums[0] + sums[MAX_WARPS / 4 - 1];
    } else {
      s = warp_sum(ptx::load_shared(partials.all + 4 * lane));
    }
  }
  return s;
}

struct Moments {
  float mean;
  float m2;  // sum of squared deviations from the mean
};

// Mean and squared deviations from every thread's sums s1 of (x - pivot) and s2 of (x - pivot)^2. `pivot` and `count`
// (of elements) are the warp's. Explicit roundings keep the compiler from contracting products and sums, so every
// kernel rounds alike. The pivot is the mean of one pack of the row. This bounds the cancellation in s2 - s1^2 / count:
// the loss is at most the warp's number of packs times the row's own sum of squares, even if the pivot is an outlier,
// since then the elements of its pack are outliers too.
template <int MAX_WARPS>
__device__ __forceinline__ Moments row_moments(float pivot, float s1, float s2, float count, float inv_count,
                                               float inv_n, int lane, const WarpPartials<true>& partials) {
#pragma unroll
  for (int other = 16; other > 0; other >>= 1) {
    s1 += __shfl_xor_sync(0xffffffffu, s1, other);
    s2 += __shfl_xor_sync(0xffffffffu, s2, other);
  }
  const float shift = __fmul_rn(s1, inv_count);
  const float spread = fmaf(-s1, shift, s2);
  const float mean = pivot + shift, m2 = spread < 0.f ? 0.f : spread;  // a NaN stays
  if constexpr (MAX_WARPS == 1) return {mean, m2};

  if (lane == 0) ptx::store_shared(partials.mine, make_float4(mean, m2, count, 0.f));
  __syncthreads();
  const float base = ptx::load_shared(partials.all);  // means are relative to it, so equal elements give an exact mean
  if constexpr (MAX_WARPS <= 8) {
    float d[MAX_WARPS], n[MAX_WARPS], within[MAX_WARPS], sums[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < MAX_WARPS; ++i) {
      const float4 part = ptx::load_shared_float4(partials.all + 16 * i);
      d[i] = part.x - base;
      within[i] = part.y;
      n[i] = part.z;
      sums[i & 1] = fmaf(d[i], n[i], sums[i & 1]);
    }
    const float delta = __fmul_rn(sums[0] + sums[1], inv_n);
    sums[0] = sums[1] = 0.f;
#pragma unroll
    for (int i = 0; i < MAX_WARPS; ++i) sums[i & 1] += fmaf((d[i] - delta) * n[i], d[i] - delta, within[i]);
    return {base + delta, sums[0] + sums[1]};
  } else {
    const float4 part = ptx::load_shared_float4(partials.all + 16 * lane);
    const float d = part.x - base;
    const float delta = __fmul_rn(warp_sum(d * part.z), inv_n);
    return {base + delta, warp_sum(fmaf((d - delta) * part.z, d - delta, part.y))};
  }
}

// The mean of lane 0's first pack, which is near the mean of the row.
template <Access A, typename T>
__device__ __forceinline__ float pivot_of(const float (&x)[Pack<T>::size], int first, int n) {
  float sums[Pack<T>::size];
#pragma unroll
  for (int i = 0; i < Pack<T>::size; ++i) sums[i] = x[i];
#pragma unroll
  for (int half = Pack<T>::size / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  float inv_valid = 1.f / Pack<T>::size;  // a pack past the end is all zeros
  if (A != Access::aligned16 && n - first < Pack<T>::size) inv_valid = __fdividef(1.f, max(1, n - first));
  return __shfl_sync(0xffffffffu, sums[0] * inv_valid, 0);
}

// How packs past the end of the row are skipped. A branch keeps the compiler from unpacking all packs of a lane at
// once, which saves registers; a select is faster where registers suffice.
enum class PastEnd { select, branch };

// Adds the elements of a pack that exist to s1 and s2, as differences from the pivot.
template <Access A, PastEnd past_end, typename T>
__device__ __forceinline__ void add_moments(const float (&x)[Pack<T>::size], int first, int n, float pivot, float& s1,
                                            float& s2) {
  constexpr int size = Pack<T>::size;
  if (past_end == PastEnd::branch && first >= n) return;
  float a[2] = {0.f, 0.f}, b[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < size; ++i) {
    float d = x[i] - pivot;
    if (A != Access::aligned16 && first + i >= n) d = 0.f;
    a[i & 1] += d;
    b[i & 1] = fmaf(d, d, b[i & 1]);
  }
  s1 += first < n ? a[0] + a[1] : 0.f;
  s2 += first < n ? b[0] + b[1] : 0.f;
}

template <typename T>
__device__ __forceinline__ float sum_of_squares(const float (&x)[Pack<T>::size]) {
  float a[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < Pack<T>::size; ++i) a[i & 1] = fmaf(x[i], x[i], a[i & 1]);
  return a[0] + a[1];
}

}  // namespace kestrel::norm
