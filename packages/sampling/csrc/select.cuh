// Exact selection among integer keys by histograms, and the order of the selected ones. By all threads of one block.
#pragma once

#include "mass.cuh"

namespace kestrel::sampling {

constexpr int kSelectBits = 9;
constexpr int kSelectBins = 1 << kSelectBits;
constexpr int kBinCopies = 4;                 // by lane, so that equal keys collide less
constexpr int kCopyStride = kSelectBins + 8;  // in other banks
constexpr int kSelectThreads = 256;           // that sum the bins; a block has at least as many
constexpr int kMaxSelectThreads = 512;

// The bin with the k-th largest key, the keys above it and in it.
struct alignas(16) Bin {
  u32 index, above, count, unused;
};

struct alignas(16) SelectScratch {
  u32 bins[kBinCopies * kCopyStride];  // zero between calls
  u32 warp_counts[kSelectThreads / 32];
  u64 warp_least[kMaxSelectThreads / 32], warp_greatest[kMaxSelectThreads / 32];
  u32 larger;  // zero between calls
  Bin bin;

  __device__ __forceinline__ void clear_bins() {
    for (int b = threadIdx.x; b < kBinCopies * kCopyStride / 4; b += blockDim.x)
      reinterpret_cast<uint4*>(bins)[b] = make_uint4(0, 0, 0, 0);
  }
  // By all threads, before the barrier that precedes the first call.
  __device__ __forceinline__ void init() {
    clear_bins();
    if (threadIdx.x == 0) larger = 0;
  }
};

__device__ __forceinline__ u64 warp_max(u64 v) {
  const u32 high = __reduce_max_sync(kAllLanes, static_cast<u32>(v >> 32));
  const u32 low = __reduce_max_sync(kAllLanes, static_cast<u32>(v >> 32) == high ? static_cast<u32>(v) : 0u);
  return static_cast<u64>(high) << 32 | low;
}

// Appends `n` < 2^bits entries per lane to a list of `*size` entries. Returns the position of this lane's first.
template <int bits>
__device__ __forceinline__ u32 append_place(u32* size, u32 n, int lane) {
  const u32 some = __ballot_sync(kAllLanes, n > 0), below = (1u << lane) - 1;
  if (some == 0) return 0;
  u32 before = __popc(some & below), all = __popc(some);
  if (__any_sync(kAllLanes, n > 1)) {
    before = all = 0;
#pragma unroll
    for (int bit = 0; bit < bits; ++bit) {
      const u32 lanes = __ballot_sync(kAllLanes, n >> bit & 1);
      before += static_cast<u32>(__popc(lanes & below)) << bit, all += static_cast<u32>(__popc(lanes)) << bit;
    }
  }
  u32 place = 0;
  if (lane == 0) place = atomicAdd(size, all);
  return __shfl_sync(kAllLanes, place, 0) + before;
}

// Finds the bin with the k-th largest key (the lowest, if there are fewer) and clears the bins. `above` keys are above
// all bins. Call it after a barrier.
__device__ __forceinline__ Bin find_bin(SelectScratch* scratch, u32 above, u32 k) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  // Two bins per thread, the highest first.
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
    const u32 index = kSelectBins - 1 - 2 * threadIdx.x, reached = before + upper + lower;
    if (before < k && (reached >= k || threadIdx.x == kSelectThreads - 1)) {
      const bool in_upper = before + upper >= k;
      scratch->bin = in_upper ? Bin{index, before, upper, 0} : Bin{index - 1, before + upper, lower, 0};
    }
  }
  __syncthreads();
  return scratch->bin;
}

// Keys have a value in their upper half and an order among equal values, at most `last`, in their lower half.
//
// Returns a key that at least k (all of [low, high], if fewer) and at most `limit` keys reach, counting the `above`
// keys that exceed high. At most limit - k keys may be equal. for_each(visit) visits this thread's keys.
template <typename Items>
__device__ __forceinline__ u64 select(SelectScratch* scratch, u64 low, u64 high, u32 last, u32 above, u32 k, u32 limit,
                                      const Items& for_each) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 1
  for (;;) {
    const int shift = max(0, 64 - __clzll(static_cast<long long>(high - low)) - kSelectBits);
    u32 larger = 0;
    for_each([&](u64 key) {
      if (key < low || key > high) return;
      larger += key >> 32 > low >> 32;
      atomicAdd(&scratch->bins[lane % kBinCopies * kCopyStride + static_cast<u32>((key - low) >> shift)], 1u);
    });
    larger = __reduce_add_sync(kAllLanes, larger);
    if (lane == 0 && larger > 0) atomicAdd(&scratch->larger, larger);
    __syncthreads();
    larger = scratch->larger;
    if (high >> 32 > low >> 32 && above + larger < k) {
      // Too few values are larger than that of `low`: only the order of the equal ones remains.
      above += larger;
      high = (low >> 32 << 32) + last;
      __syncthreads();
      scratch->init();
      __syncthreads();
      continue;
    }
    const Bin bin = find_bin(scratch, above, k);
    if (threadIdx.x == 0) scratch->larger = 0;
    low += static_cast<u64>(bin.index) << shift;
    above = bin.above;
    if (above + bin.count <= limit || shift == 0) return low;
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

// The first round of select() for values alone, which nearly always suffices.
struct ValueRange {
  u32 low, high;     // high: of the bin
  u32 above, reach;  // keys above the bin, and those that reach `low`
};
template <typename Items>
__device__ __forceinline__ ValueRange select_values(SelectScratch* scratch, u32 low, u32 high, u32 k,
                                                    const Items& for_each) {
  const u32 width = high - low;
  const int shift = max(0, 32 - __clz(static_cast<int>(width)) - kSelectBits);
  const u32 bins = ptx::shared_address(scratch->bins + threadIdx.x % kBinCopies * kCopyStride);
  for_each([&](u32 key) { shared_add_if(key - low <= width, bins + 4 * ((key - low) >> shift), 1); });
  __syncthreads();
  const Bin bin = find_bin(scratch, 0, k);
  low += bin.index << shift;
  return {low, min(high, low + ((1u << shift) - 1)), bin.above, bin.above + bin.count};
}

// Calls write(n, place, low_place) for each of `count` different keys, by one thread: its places in descending order of
// the keys and of their lower halves, which differ too. Every key is compared with all others. Zeros follow the keys up
// to a multiple of 16.
template <typename Write>
__device__ __forceinline__ void rank_keys(const u64* keys, int count, Write write) {
  constexpr int kLanes = 8;  // that rank two keys
  const auto two = [&](int n) { return *reinterpret_cast<const ulonglong2*>(keys + n); };
  const int lane = threadIdx.x % kLanes;
#pragma unroll 1
  for (int own = 2 * (static_cast<int>(threadIdx.x) / kLanes); own / 8 * 8 < count; own += blockDim.x / kLanes * 2) {
    const ulonglong2 key = own < count ? two(own) : make_ulonglong2(0, 0);
    const u32 low_x = static_cast<u32>(key.x), low_y = static_cast<u32>(key.y);
    u32 first = 0, second = 0;  // place and 2^16 times low_place
#pragma unroll 4
    for (int other = 2 * lane; other < count; other += 2 * kLanes) {
      const ulonglong2 keys_of_other = two(other);
      const u64 a = keys_of_other.x, b = keys_of_other.y;
      first += a > key.x, first += b > key.x, second += a > key.y, second += b > key.y;
      first += static_cast<u32>(a) > low_x ? 0x10000 : 0, first += static_cast<u32>(b) > low_x ? 0x10000 : 0;
      second += static_cast<u32>(a) > low_y ? 0x10000 : 0, second += static_cast<u32>(b) > low_y ? 0x10000 : 0;
    }
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      first += __shfl_xor_sync(kAllLanes, first, distance);
      second += __shfl_xor_sync(kAllLanes, second, distance);
    }
    const u32 places = lane == 0 ? first : second;
    if (lane < 2 && own + lane < count)
      write(own + lane, static_cast<int>(places & 0xffff), static_cast<int>(places >> 16));
  }
}

// Sorts `count` keys in descending order. The array has space for the next power of two.
__device__ __forceinline__ void sort_descending(u64* keys, int count) {
  int size = 2;
  while (size < count) size *= 2;
  for (int i = count + threadIdx.x; i < size; i += blockDim.x) keys[i] = 0;
  bool across_warps = true;  // the previous stage, or the padding
#pragma unroll 1
  for (int run = 2; run <= size; run *= 2) {
#pragma unroll 1
    for (int distance = run / 2; distance > 0; distance /= 2) {
      // The 32 pairs of a warp cover the same 64 neighbours at any distance up to 32.
      across_warps || distance > 32 ? __syncthreads() : __syncwarp();
      across_warps = distance > 32;
      for (int pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
        const int low = 2 * pair - (pair & (distance - 1)), high = low + distance;
        const u64 a = keys[low], b = keys[high];
        if ((a < b) == ((low & run) == 0)) keys[low] = b, keys[high] = a;
      }
    }
  }
  __syncthreads();
}

}  // namespace kestrel::sampling
