// Sums over a row that a team of threads holds: of squares, or mean and variance. One barrier per row.
#pragma once

#include <kestrel/reduce.cuh>

#include "rows.cuh"

namespace kestrel::norm {

// Where a thread stands in its team. WARPS: the most warps a team of this kernel has; 1 means a warp per row.
template <int WARPS>
struct Team {
  int row, thread, lane, warp;  // thread and warp: in the team
  int threads;                  // of the team

  __device__ __forceinline__ Team() {
    lane = threadIdx.x & 31;
    if constexpr (WARPS == 1) {
      row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
      thread = lane;
      warp = 0;
      threads = 32;
    } else {
      row = blockIdx.x;
      thread = threadIdx.x;
      warp = threadIdx.x >> 5;
      threads = blockDim.x;
    }
  }
};

// Shared memory by its 32-bit address, which is computed before the wait.
__device__ __forceinline__ void store_shared(unsigned address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ void store_shared(unsigned address, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}
__device__ __forceinline__ float load_shared(unsigned address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float4 load_shared4(unsigned address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Shared memory with one entry per warp: {mean of its part of the row, sum of squared differences to that, elements, 0}
// for LayerNorm, a sum of squares for RMSNorm. Entries of warps that the team does not have are zero.
template <bool layer>
struct Exchange {
  static constexpr int entry_bytes = layer ? 16 : 4;
  unsigned all = 0, mine = 0;  // addresses

  Exchange() = default;
  template <int WARPS>
  __device__ __forceinline__ Exchange(float4* memory, const Team<WARPS>& team) {
    if constexpr (WARPS > 1) {
      all = static_cast<unsigned>(__cvta_generic_to_shared(memory));
      mine = all + team.warp * entry_bytes;
      // A team of at least two warps has a thread for every entry; a warp alone exchanges nothing.
      if (team.threads > 32 && team.thread < WARPS && team.thread >= (team.threads >> 5)) {
        const unsigned address = all + team.thread * entry_bytes;
        if constexpr (layer) {
          store_shared(address, make_float4(0.f, 0.f, 0.f, 0.f));
        } else {
          store_shared(address, 0.f);
        }
      }
      pin(all);
      pin(mine);
    }
  }
};

// The row's sum of squares from every thread's. WARPS: the most warps the team may have, here and below.
template <int WARPS>
__device__ __forceinline__ float team_sum(float s, int lane, const Exchange<false>& exchange) {
  s = warp_sum(s);
  if constexpr (WARPS > 1) {
    if (lane == 0) store_shared(exchange.mine, s);
    __syncthreads();
    if constexpr (WARPS <= 8) {
      float sums[WARPS / 4];
#pragma unroll
      for (int i = 0; i < WARPS / 4; ++i) {
        const float4 four = load_shared4(exchange.all + 16 * i);
        sums[i] = (four.x + four.y) + (four.z + four.w);
      }
      s = WARPS == 4 ? sums[0] : sums[0] + sums[WARPS / 4 - 1];
    } else {
      s = warp_sum(load_shared(exchange.all + 4 * lane));
    }
  }
  return s;
}

// Mean and squared differences from every thread's sums s1 of (x - pivot) and s2 of (x - pivot)^2, pivot the warp's,
// `count` the warp's elements. Products are kept from contraction with a sum, so that every kernel rounds alike. The
// pivot is the mean of one pack of the row, so what cancels in s2 - s1^2/count is at most the warp's number of packs
// times the row's own sum of squares, however far off the pivot: its pack's elements are then just as far from the
// mean.
struct Moments {
  float mean, squares;  // sum of squared differences to the mean
};

template <int WARPS>
__device__ __forceinline__ Moments team_moments(float pivot, float s1, float s2, float count, float inv_count,
                                                float inv_n, int lane, const Exchange<true>& exchange) {
#pragma unroll
  for (int other = 16; other > 0; other >>= 1) {
    s1 += __shfl_xor_sync(0xffffffffu, s1, other);
    s2 += __shfl_xor_sync(0xffffffffu, s2, other);
  }
  const float shift = __fmul_rn(s1, inv_count);
  const float spread = fmaf(-s1, shift, s2);
  const float mean = pivot + shift, squares = spread < 0.f ? 0.f : spread;  // a NaN stays
  if constexpr (WARPS == 1) return {mean, squares};

  if (lane == 0) store_shared(exchange.mine, make_float4(mean, squares, count, 0.f));
  __syncthreads();
  const float base = load_shared(exchange.all);  // means are relative to it, so equal elements give an exact mean
  if constexpr (WARPS <= 8) {
    float d[WARPS], n[WARPS], within[WARPS], sums[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
      const float4 part = load_shared4(exchange.all + 16 * i);
      d[i] = part.x - base;
      within[i] = part.y;
      n[i] = part.z;
      sums[i & 1] = fmaf(d[i], n[i], sums[i & 1]);
    }
    const float delta = __fmul_rn(sums[0] + sums[1], inv_n);
    sums[0] = sums[1] = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sums[i & 1] += fmaf((d[i] - delta) * n[i], d[i] - delta, within[i]);
    return {base + delta, sums[0] + sums[1]};
  } else {
    const float4 part = load_shared4(exchange.all + 16 * lane);
    const float d = part.x - base;
    const float delta = __fmul_rn(warp_sum(d * part.z), inv_n);
    return {base + delta, warp_sum(fmaf((d - delta) * part.z, d - delta, part.y))};
  }
}

// The mean of lane 0's first pack.
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
  if (A != Access::whole && n - first < Pack<T>::size) inv_valid = __fdividef(1.f, max(1, n - first));
  return __shfl_sync(0xffffffffu, sums[0] * inv_valid, 0);
}

// Adds the elements of a pack that exist to s1 and s2, as differences to the pivot. A branch around a missing pack
// keeps the compiler from unpacking all packs at once (5 packs: 80 registers, 128 without); a select is faster where
// that fits.
template <Access A, bool branch, typename T>
__device__ __forceinline__ void add_moments(const float (&x)[Pack<T>::size], int first, int n, float pivot, float& s1,
                                            float& s2) {
  constexpr int size = Pack<T>::size;
  if (branch && first >= n) return;
  float a[2] = {0.f, 0.f}, b[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < size; ++i) {
    float d = x[i] - pivot;
    if (A != Access::whole && first + i >= n) d = 0.f;
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
