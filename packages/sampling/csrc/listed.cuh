// The threshold among listed elements: histograms of the range in which it lies, each 256 times as fine as the one
// before, until one warp can hold what is left. By the first block of a team.
#pragma once

#include "threshold.cuh"

namespace kestrel::sampling {

template <Kind kind>
struct Listed {
  const Team& team;
  const Weigher<kind>& weigher;
  Scratch* scratch;

  template <bool mass>
  __device__ __forceinline__ u64 measure(float v) const {
    if constexpr (mass) return mass_of(weigher.scaled(v));
    return 1;
  }

  // One histogram of the entries in the range, until one warp can hold them or t is known.
  template <bool mass>
  __device__ __forceinline__ Range narrow(const int (&key)[kEntries], Range range, u64 goal, u32 in_range) {
    while (in_range > kLastFew && range.width() != 1) {
      const u32 width = range.width();
      const int shift = max(0, 32 - __clz(width - 1) - 8);
      for (int b = threadIdx.x; b < 4 * kFine; b += blockDim.x) scratch->bins[b] = 0;
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kEntries; ++j) {
        if (key[j] < range.low || key[j] >= range.high) continue;
        u32* bin = scratch->bins + ((static_cast<u32>(range.high - 1) - static_cast<u32>(key[j])) >> shift);
        atomicAdd(bin, 1u);
        if constexpr (mass) {
          const u64 m = measure<true>(from_ordered(key[j]));
          atomicAdd(bin + kFine, static_cast<u32>(m) & 0xffffu);
          atomicAdd(bin + 2 * kFine, static_cast<u32>(m >> 16) & 0x3fffu);
          atomicAdd(bin + 3 * kFine, static_cast<u32>(m >> 30));
        }
      }
      __syncthreads();
      if (threadIdx.x < 32) {
        constexpr int kMine = kFine / 32;
        const u32* bins = scratch->bins + team.lane * kMine;
        const auto sum_of = [&](int b) {
          if constexpr (!mass) return static_cast<u64>(bins[b]);
          return bins[b + kFine] + (static_cast<u64>(bins[b + 2 * kFine]) << 16) +
                 (static_cast<u64>(bins[b + 3 * kFine]) << 30);
        };
        u64 sum = 0;
        for (int b = 0; b < kMine; ++b) sum += sum_of(b);
        const u64 up_to = range.above + warp_inclusive_sum(sum, team.lane);
        const u32 reached = __ballot_sync(kAllLanes, up_to >= goal);
        if (reached != 0 && team.lane == __ffs(reached) - 1) {
          u64 above = up_to - sum;
          int b = 0;
          while (above + sum_of(b) < goal) above += sum_of(b), ++b;
          const u32 bin = team.lane * kMine + b;
          Range next;
          next.high = static_cast<int>(static_cast<u32>(range.high) - (bin << shift));
          next.low =
              (bin + 1) << shift > width ? range.low : static_cast<int>(static_cast<u32>(next.high) - (1u << shift));
          next.above = above;
          scratch->range = next;
          scratch->in_range = bins[b];
        }
        if (reached == 0 && team.lane == 0) scratch->range = range, scratch->in_range = 0;
      }
      __syncthreads();
      range = scratch->range;
      in_range = scratch->in_range;
      __syncthreads();
    }
    return range;
  }

  // t among at most kLastFew entries, by one warp: every lane weighs what reaches its own entry.
  template <bool mass>
  __device__ __forceinline__ Found last_few(const float* few, u32 count, Range range, u64 goal) {
    const bool mine = team.lane < count;
    const float v = mine ? few[team.lane] : 0.f;
    const int key = mine ? ordered(v) : INT32_MIN;
    const u64 each = mine ? measure<mass>(v) : 0;
    u64 reached = range.above;
    for (u32 j = 0; j < count; ++j) {
      const int other = __shfl_sync(kAllLanes, key, j);
      const u64 more = __shfl_sync(kAllLanes, each, j);
      if (other >= key) reached += more;
    }
    range.low = __reduce_max_sync(kAllLanes, mine && reached >= goal ? key : INT32_MIN);
    const u32 equal = __ballot_sync(kAllLanes, key == range.low);
    range.above = __shfl_sync(kAllLanes, reached - __popc(equal) * each, __ffs(equal) - 1);
    const u32 number = __popc(equal);
    return {range.low, number == 1 ? 1 : needed<mass>(range, goal), number};
  }

  // How many elements equal to range.low reach the goal: the quotient rounded up, bit by bit, since it is seldom asked
  // for.
  template <bool mass>
  __device__ __forceinline__ u32 needed(const Range& range, u64 goal) const {
    const u64 missing = goal - range.above;
    if constexpr (mass) {
      const u64 each = measure<true>(from_ordered(range.low));
      u64 short_of = 0;  // the most elements that do not reach it
#pragma unroll 1
      for (int bit = min(30, __clzll(each) - 2); bit >= 0; --bit) {
        const u64 more = short_of | (u64{1} << bit);
        if (more * each < missing) short_of = more;
      }
      return static_cast<u32>(short_of) + 1;
    } else {
      return static_cast<u32>(missing);
    }
  }

  // By all threads of the first block; in_range: at most the entries that lie in the range.
  template <bool mass>
  __device__ __forceinline__ Found find_listed(const int (&key)[kEntries], Range range, u64 goal, u32 in_range) {
    range = narrow<mass>(key, range, goal, in_range);
    // The last few go into the bins, which are not needed now.
    if (threadIdx.x == 0) scratch->few = 0;
    __syncthreads();
    float* few = reinterpret_cast<float*>(scratch->bins);
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      if (key[j] >= range.low && key[j] < range.high) {
        const u32 place = atomicAdd(&scratch->few, 1u);
        if (place < kLastFew) few[place] = from_ordered(key[j]);
      }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const u32 count = scratch->few;
      // More than one warp can hold are left only if they are all equal.
      const Found found = count <= kLastFew ? last_few<mass>(few, count, range, goal)
                                            : Found{range.low, needed<mass>(range, goal), count};
      if (team.lane == 0) scratch->found = found;
    }
    __syncthreads();
    const Found found = scratch->found;
    __syncthreads();
    return found;
  }

  // The mass of the entries that top-k keeps, where the list holds them all.
  __device__ __forceinline__ u64 listed_mass(const int (&key)[kEntries], const Found& found) {
    u64 mass = 0;
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      if (key[j] > found.key) mass += measure<true>(from_ordered(key[j]));
    }
    mass = warp_sum(mass);
    if (team.lane == 0) scratch->warp_sums[threadIdx.x >> 5] = mass;
    __syncthreads();
    const u64 all = warp_sum(team.lane < team.warps ? scratch->warp_sums[team.lane] : 0);
    __syncthreads();
    return all + found.needed * measure<true>(from_ordered(found.key));
  }
};

}  // namespace kestrel::sampling
