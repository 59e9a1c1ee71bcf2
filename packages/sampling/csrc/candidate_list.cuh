// Finds the threshold among the candidates. A histogram of 256 bins narrows the range of the threshold to one bin,
// which the next histogram subdivides, until one warp can hold the remaining candidates. Runs in the first block of a
// cluster.
#pragma once

#include "threshold.cuh"

namespace kestrel::sampling {

template <Kind kind>
struct CandidateList {
  const Cluster& cluster;
  const WeightFn<kind>& weight_fn;
  SearchScratch* scratch;

  template <Measure measure>
  __device__ __forceinline__ u64 measured(float v) const {
    if constexpr (measure == Measure::mass) return mass_of(weight_fn.scaled(v));
    return 1;
  }

  // Narrows the range until one warp can hold its candidates, or the threshold is known.
  template <Measure measure>
  __device__ __forceinline__ Range narrow(const int (&key)[kCandidatesPerThread], Range range, u64 goal,
                                          u32 num_in_range) {
    while (num_in_range > kWarpCandidates && range.width() != 1) {
      const u32 width = range.width();
      const int shift = max(0, 32 - __clz(width - 1) - 8);
      for (int b = threadIdx.x; b < 4 * kFineBins; b += blockDim.x) scratch->bins[b] = 0;
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kCandidatesPerThread; ++j) {
        if (key[j] < range.low || key[j] >= range.high) continue;
        u32* bin = scratch->bins + ((static_cast<u32>(range.high - 1) - static_cast<u32>(key[j])) >> shift);
        atomicAdd(bin, 1u);
        if constexpr (measure == Measure::mass) {
          const u64 m = measured<Measure::mass>(from_order_key(key[j]));
          atomicAdd(bin + kFineBins, static_cast<u32>(m) & 0xffffu);
          atomicAdd(bin + 2 * kFineBins, static_cast<u32>(m >> 16) & 0x3fffu);
          atomicAdd(bin + 3 * kFineBins, static_cast<u32>(m >> 30));
        }
      }
      __syncthreads();
      if (threadIdx.x < 32) {
        constexpr int kBinsPerLane = kFineBins / 32;
        const u32* bins = scratch->bins + cluster.lane * kBinsPerLane;
        const auto sum_of = [&](int b) {
          if constexpr (measure == Measure::count) return static_cast<u64>(bins[b]);
          return bins[b + kFineBins] + (static_cast<u64>(bins[b + 2 * kFineBins]) << 16) +
                 (static_cast<u64>(bins[b + 3 * kFineBins]) << 30);
        };
        u64 sum = 0;
        for (int b = 0; b < kBinsPerLane; ++b) sum += sum_of(b);
        const u64 up_to = range.above + warp_inclusive_sum(sum, cluster.lane);
        const u32 reached = __ballot_sync(kAllLanes, up_to >= goal);
        if (reached != 0 && cluster.lane == __ffs(reached) - 1) {
          u64 above = up_to - sum;
          int b = 0;
          while (above + sum_of(b) < goal) above += sum_of(b), ++b;
          const u32 bin = cluster.lane * kBinsPerLane + b;
          Range next;
          next.high = static_cast<int>(static_cast<u32>(range.high) - (bin << shift));
          next.low =
              (bin + 1) << shift > width ? range.low : static_cast<int>(static_cast<u32>(next.high) - (1u << shift));
          next.above = above;
          scratch->range = next;
          scratch->num_in_range = bins[b];
        }
        if (reached == 0 && cluster.lane == 0) scratch->range = range, scratch->num_in_range = 0;
      }
      __syncthreads();
      range = scratch->range;
      num_in_range = scratch->num_in_range;
      __syncthreads();
    }
    return range;
  }

  // The threshold among at most kWarpCandidates candidates, by one warp. Each lane measures the elements that are at
  // least as large as its candidate.
  template <Measure measure>
  __device__ __forceinline__ Threshold find_in_warp(const float* candidates, u32 count, Range range, u64 goal) {
    const bool mine = cluster.lane < count;
    const float v = mine ? candidates[cluster.lane] : 0.f;
    const int key = mine ? order_key(v) : INT32_MIN;
    const u64 each = mine ? measured<measure>(v) : 0;
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
    return {range.low, number == 1 ? 1 : needed<measure>(range, goal), number};
  }

  // How many elements equal to range.low are needed to reach the goal: a quotient rounded up. A rare case, so computed
  // bit by bit.
  template <Measure measure>
  __device__ __forceinline__ u32 needed(const Range& range, u64 goal) const {
    const u64 missing = goal - range.above;
    if constexpr (measure == Measure::mass) {
      const u64 each = measured<Measure::mass>(from_order_key(range.low));
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

  // By all threads of the first block. num_in_range: an upper bound of the candidates in the range.
  template <Measure measure>
  __device__ __forceinline__ Threshold find_threshold(const int (&key)[kCandidatesPerThread], Range range, u64 goal,
                                                      u32 num_in_range) {
    range = narrow<measure>(key, range, goal, num_in_range);
    // The remaining candidates overwrite the bins, which are free by then.
    if (threadIdx.x == 0) scratch->num_warp_candidates = 0;
    __syncthreads();
    float* candidates = reinterpret_cast<float*>(scratch->bins);
#pragma unroll
    for (int j = 0; j < kCandidatesPerThread; ++j) {
      if (key[j] >= range.low && key[j] < range.high) {
        const u32 place = atomicAdd(&scratch->num_warp_candidates, 1u);
        if (place < kWarpCandidates) candidates[place] = from_order_key(key[j]);
      }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const u32 count = scratch->num_warp_candidates;
      // More candidates than one warp can hold remain only if they are all equal.
      const Threshold threshold = count <= kWarpCandidates ? find_in_warp<measure>(candidates, count, range, goal)
                                                           : Threshold{range.low, needed<measure>(range, goal), count};
      if (cluster.lane == 0) scratch->threshold = threshold;
    }
    __syncthreads();
    const Threshold threshold = scratch->threshold;
    __syncthreads();
    return threshold;
  }

  // The mass of the elements that top-k keeps, if the list holds all of them.
  __device__ __forceinline__ u64 kept_mass(const int (&key)[kCandidatesPerThread], const Threshold& threshold) {
    u64 mass = 0;
#pragma unroll
    for (int j = 0; j < kCandidatesPerThread; ++j) {
      if (key[j] > threshold.key) mass += measured<Measure::mass>(from_order_key(key[j]));
    }
    mass = warp_sum(mass);
    if (cluster.lane == 0) scratch->warp_sums[threadIdx.x >> 5] = mass;
    __syncthreads();
    const u64 all = warp_sum(cluster.lane < cluster.warps_per_block ? scratch->warp_sums[cluster.lane] : 0);
    __syncthreads();
    return all + threshold.needed * measured<Measure::mass>(from_order_key(threshold.key));
  }
};

}  // namespace kestrel::sampling
