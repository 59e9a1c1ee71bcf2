// Exact selection among integer keys by histograms, and the order of the selected ones. By all threads of one block.
#pragma once

#include "mass.cuh"

namespace kestrel::sampling {

constexpr int kSelectBins = 512;
constexpr int kBinCopies = 4;                 // by lane, so that equal keys collide less
constexpr int kCopyStride = kSelectBins + 8;  // in other banks
constexpr int kSelectThreads = 256;           // that sum the bins; a block has at least as many
constexpr int kMaxSelectThreads = 512;

struct alignas(16) SelectScratch {
  u32 bins[kBinCopies * kCopyStride];  // zero between calls
  u32 warp_counts[kSelectThreads / 32];
  u64 warp_least[kMaxSelectThreads / 32], warp_greatest[kMaxSelectThreads / 32];
  u32 in_range, larger;   // zero between calls
  u32 bin, above, count;  // the bin with the k-th largest key, the keys above it and in it

  __device__ __forceinline__ void clear_bins() {
    for (int b = threadIdx.x; b < kBinCopies * kCopyStride / 4; b += blockDim.x)
      reinterpret_cast<uint4*>(bins)[b] = make_uint4(0, 0, 0, 0);
  }
  // By all threads, before the barrier that precedes the first call.
  __device__ __forceinline__ void init() {
    clear_bins();
    if (threadIdx.x == 0) in_range = larger = 0;
  }
};

__device__ __forceinline__ u64 warp_max(u64 v) {
  const u32 high = __reduce_max_sync(kAllLanes, static_cast<u32>(v >> 32));
  const u32 low = __reduce_max_sync(kAllLanes, static_cast<u32>(v >> 32) == high ? static_cast<u32>(v) : 0u);
  return static_cast<u64>(high) << 32 | low;
}

// The place of a lane's `n` entries, at most 15, in a list, which grows by those of all lanes.
__device__ __forceinline__ u32 append_place(u32* size, u32 n, int lane) {
  const u32 some = __ballot_sync(kAllLanes, n > 0), below = (1u << lane) - 1;
  if (some == 0) return 0;
  u32 before = __popc(some & below), all = __popc(some);
  if (__any_sync(kAllLanes, n > 1)) {
    before = all = 0;
#pragma unroll
    for (int bit = 0; bit < 4; ++bit) {
      const u32 lanes = __ballot_sync(kAllLanes, n >> bit & 1);
      before += static_cast<u32>(__popc(lanes & below)) << bit, all += static_cast<u32>(__popc(lanes)) << bit;
    }
  }
  u32 place = 0;
  if (lane == 0) place = atomicAdd(size, all);
  return __shfl_sync(kAllLanes, place, 0) + before;
}

// Keys have a value in their upper half and an order among equal values, at most `last`, in their lower half.
//
// A key L such that at least k keys reach it (all of [low, high], if there are fewer), and at most `limit`, among them
// `above` keys that exceed high. No more than limit - k keys may be equal. for_each(visit) visits this thread's keys.
template <typename Items>
__device__ __forceinline__ u64 select(SelectScratch* scratch, u64 low, u64 high, u32 last, u32 above, u32 k, u32 limit,
                                      const Items& for_each) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 1
  for (;;) {
    const int shift = max(0, 64 - __clzll(static_cast<long long>(high - low)) - 9);
    static_assert(kSelectBins == 1 << 9);
    u32 in_range = 0, larger = 0;
    for_each([&](u64 key) {
      if (key < low || key > high) return;
      ++in_range;
      larger += key >> 32 > low >> 32;
      const u32 bin = static_cast<u32>((key - low) >> shift);
      if (bin > 0) atomicAdd(&scratch->bins[lane % kBinCopies * kCopyStride + bin], 1u);
    });
    in_range = __reduce_add_sync(kAllLanes, in_range), larger = __reduce_add_sync(kAllLanes, larger);
    if (lane == 0 && in_range > 0) {
      atomicAdd(&scratch->in_range, in_range);
      if (larger > 0) atomicAdd(&scratch->larger, larger);
    }
    __syncthreads();
    if (high >> 32 > low >> 32 && above + scratch->larger < k) {
      // Too few values are larger than that of `low`: only the order of the equal ones remains.
      above += scratch->larger;
      high = (low >> 32 << 32) + last;
      __syncthreads();
      scratch->init();
      __syncthreads();
      continue;
    }
    // From the highest bin on, two a thread.
    u32 upper = 0, lower = 0, up_to = 0;
    if (threadIdx.x < kSelectThreads) {
#pragma unroll
      for (int copy = 0; copy < kBinCopies; ++copy) {
        uint2* bins = reinterpret_cast<uint2*>(scratch->bins + copy * kCopyStride + kSelectBins - 2 - 2 * threadIdx.x);
        const uint2 n = *bins;
        *bins = make_uint2(0, 0);
        lower += n.x, upper += n.y;
      }
      up_to = lower + upper;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const u32 before = __shfl_up_sync(kAllLanes, up_to, distance);
        if (lane >= distance) up_to += before;
      }
      if (lane == 31) scratch->warp_counts[warp] = up_to;
    }
    __syncthreads();
    if (threadIdx.x < kSelectThreads) {
      u32 before = above + up_to - upper - lower;
#pragma unroll
      for (int w = 0; w < kSelectThreads / 32 - 1; ++w) before += w < warp ? scratch->warp_counts[w] : 0;
      const u32 bin = kSelectBins - 1 - 2 * threadIdx.x, reached = before + upper + lower;
      if (before < k && reached >= k) {
        const bool in_upper = before + upper >= k;
        scratch->bin = in_upper ? bin : bin - 1;
        scratch->above = in_upper ? before : before + upper;
        scratch->count = in_upper ? upper : lower;
      }
      if (threadIdx.x == kSelectThreads - 1) {
        if (reached < k) {
          scratch->bin = 0;
          scratch->above = reached;
          scratch->count = scratch->in_range - (reached - above);
        }
        scratch->in_range = scratch->larger = 0;
      }
    }
    __syncthreads();
    low += static_cast<u64>(scratch->bin) << shift;
    above = scratch->above;
    if (above + scratch->count <= limit || shift == 0) return low;
    // The range of the keys in this bin, which may be much narrower.
    high = min(high, low + (u64{1} << shift) - 1);
    u64 least = ~u64{0}, greatest = 0;
    for_each([&](u64 key) {
      if (key < low || key > high) return;
      least = min(least, key), greatest = max(greatest, key);
    });
    least = ~warp_max(~least), greatest = warp_max(greatest);
    if (lane == 0) scratch->warp_least[warp] = least, scratch->warp_greatest[warp] = greatest;
    __syncthreads();
    const int other = lane % (blockDim.x / 32);
    low = ~warp_max(~scratch->warp_least[other]), high = warp_max(scratch->warp_greatest[other]);
  }
}

// Calls write(place, key) for the k largest of `count` different keys: every key is compared with all others.
template <typename Write>
__device__ __forceinline__ void rank_keys(const u64* keys, int count, int k, Write write) {
  constexpr int kLanes = 8;  // per key
#pragma unroll 1
  for (int base = 0; base < count; base += blockDim.x / kLanes) {
    const int own = base + threadIdx.x / kLanes;
    const u64 key = keys[min(own, count - 1)];
    int place = 0;
#pragma unroll 4
    for (int other = threadIdx.x % kLanes; other < count; other += kLanes) place += keys[other] > key;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) place += __shfl_xor_sync(kAllLanes, place, distance);
    if (threadIdx.x % kLanes == 0 && own < count && place < k) write(place, key);
  }
}

// Sorts `count` keys in descending order. The array has space for the next power of two.
__device__ __forceinline__ void sort_descending(u64* keys, int count) {
  int size = 2;
  while (size < count) size *= 2;
  for (int i = count + threadIdx.x; i < size; i += blockDim.x) keys[i] = 0;
#pragma unroll 1
  for (int run = 2; run <= size; run *= 2) {
#pragma unroll 1
    for (int distance = run / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
        const int low = 2 * pair - (pair & (distance - 1)), high = low + distance;
        const u64 a = keys[low], b = keys[high];
        if ((a < b) == ((low & run) == 0)) keys[low] = b, keys[high] = a;
      }
    }
  }
}

}  // namespace kestrel::sampling
