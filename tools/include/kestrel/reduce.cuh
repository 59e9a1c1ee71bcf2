// Sums over a warp, maxima over a warp or a block, in a fixed order. A sum keeps NaN, a maximum drops it.
#pragma once

#include <cfloat>

namespace kestrel {

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int other = 16; other > 0; other >>= 1) v += __shfl_xor_sync(0xffffffffu, v, other);
  return v;
}

// One maximum per group of `width` neighbouring lanes; `width` is a power of two.
template <int width = 32>
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int other = width / 2; other > 0; other >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, other));
  return v;
}

// Over a block of at most WARPS warps, for every thread. `memory` is shared, one float per warp; a barrier must precede
// its next use.
template <int WARPS>
__device__ __forceinline__ float block_max(float v, float* memory) {
  v = warp_max(v);
  if constexpr (WARPS == 1) return v;
  const int warps = (blockDim.x + 31) >> 5, lane = threadIdx.x & 31;
  if (lane == 0) memory[threadIdx.x >> 5] = v;
  __syncthreads();
  return warp_max(lane < warps ? memory[lane] : -FLT_MAX);
}

}  // namespace kestrel
