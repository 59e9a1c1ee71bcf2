// Estimates the threshold from the histogram of a sample of the row: two pivots, between which the threshold lies
// within 3.5 standard deviations. Runs in the first block of a cluster.
#pragma once

#include "threshold.cuh"

namespace kestrel::sampling {

// One of this many tiles enters the histogram: a power of two.
__device__ __forceinline__ int histogram_stride(int length) {
  return 1 << max(0, 32 - __clz((length - 1) / kHistogramSamples));
}

template <Kind kind>
struct PivotEstimate {
  const Cluster& cluster;
  const WeightFn<kind>& weight_fn;
  SearchScratch* scratch;
  int length;  // of the row

  static constexpr int kBinsPerThread = kBins / kHistogramThreads;
  static constexpr float kSigmas = 3.5f;  // a pivot is on the wrong side once in 4000 rows, which costs another pass
  // About half a bin, 2^(1/64): what a weight may be off bin_weight().
  static constexpr float kWeightError = 0.015f;
  // Added to a count that serves as its own variance: few samples may be too few by chance.
  static constexpr float kSpareSamples = 4.f;

  // This thread's bins, summed over the blocks of the cluster.
  __device__ __forceinline__ void load_bins(u32 (&count)[kBinsPerThread]) const {
    static_assert(kBinsPerThread == 4);
    uint4 sum = {0, 0, 0, 0};
    if (threadIdx.x < kHistogramThreads) {
#pragma unroll 8
      for (int rank = 0; rank < cluster.size; ++rank) {
        const uint4 n = reinterpret_cast<const uint4*>(cluster.map_shared(scratch->bins, rank))[threadIdx.x];
        sum.x += n.x, sum.y += n.y, sum.z += n.z, sum.w += n.w;
      }
    }
    count[0] = sum.x, count[1] = sum.y, count[2] = sum.z, count[3] = sum.w;
  }

  enum class Direction { forward, backward };

  // The inclusive sum over this thread and those before it (forward) or after it (backward), by all threads of a block.
  template <Direction direction>
  __device__ __forceinline__ float block_scan(float v, float* warp_sums) const {
    constexpr bool forward = direction == Direction::forward;
    float sum = v;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float down = __shfl_down_sync(kAllLanes, sum, distance), up = __shfl_up_sync(kAllLanes, sum, distance);
      if (forward && cluster.lane >= distance) sum += up;
      if (!forward && cluster.lane + distance < 32) sum += down;
    }
    const int warp = threadIdx.x >> 5;
    if (cluster.lane == (forward ? 31 : 0) && warp < kHistogramThreads / 32) warp_sums[warp] = sum;
    __syncthreads();
    for (int w = 0; w < kHistogramThreads / 32; ++w) {
      if (forward ? w < warp : w > warp) sum += warp_sums[w];
    }
    return sum;
  }

  // Reduces over the threads: low is the first bin at which the goal is surely reached, high the last at which it
  // surely is not. Sends both as pivots to all blocks.
  __device__ __forceinline__ void send_pivots(Measure measure, int low, int high) {
    low = __reduce_min_sync(kAllLanes, low);
    high = __reduce_max_sync(kAllLanes, high);
    if (cluster.lane == 0) atomicMin(&scratch->pivot_bins[0], low), atomicMax(&scratch->pivot_bins[1], high);
    __syncthreads();
    low = scratch->pivot_bins[0], high = scratch->pivot_bins[1];
    if (threadIdx.x < cluster.size) {
      int (*pivots)[2] = cluster.map_shared(scratch, threadIdx.x)->pivots;
      const int which = static_cast<int>(measure);
      pivots[which][0] = low >= kBins - 1 ? INT32_MIN : order_key(weight_fn.bin_end(low));
      pivots[which][1] = high < 0 ? INT32_MAX : order_key(weight_fn.bin_end(high));
    }
    __syncthreads();
  }

  __device__ __forceinline__ void reset() {
    if (threadIdx.x == 0) scratch->pivot_bins[0] = kBins, scratch->pivot_bins[1] = -1;
  }

  // Top-p: elements from the threshold up have a mass of at least `goal`, of `all`. The mass below the threshold is
  // summed from the smallest weights on, where the sampling error is smallest.
  __device__ __forceinline__ void estimate_mass_pivots(u64 all, u64 goal) {
    reset();
    u32 count[kBinsPerThread];
    load_bins(count);
    float samples = 0.f, sum = 0.f, squares = 0.f;
#pragma unroll
    for (int b = 0; b < kBinsPerThread; ++b) {
      const float w = weight_fn.bin_weight(threadIdx.x * kBinsPerThread + b), n = static_cast<float>(count[b]);
      samples += n;
      sum += n * w;
      squares += n * w * w;
    }
    float* warp_sums = reinterpret_cast<float*>(scratch->warp_sums);
    block_scan<Direction::forward>(samples, warp_sums);
    float below = block_scan<Direction::backward>(sum, warp_sums + 8) - sum,
          squares_below = block_scan<Direction::backward>(squares, warp_sums + 16) - squares;
    samples = 0.f;
    for (int w = 0; w < kHistogramThreads / 32; ++w) samples += warp_sums[w];
    const float part = __fdividef(samples, static_cast<float>(length));
    const float allowed = __fdividef(part * static_cast<float>(all - goal), weight_fn.scale * 0x1p20f);
    const float variance_factor = kSigmas * kSigmas * (1.f - part);
    int low = kBins, high = -1;
    if (threadIdx.x < kHistogramThreads) {
#pragma unroll
      for (int b = kBinsPerThread - 1; b >= 0; --b) {
        const int bin = threadIdx.x * kBinsPerThread + b;
        const float margin = allowed - (1.f + kWeightError) * below, excess = (1.f - kWeightError) * below - allowed;
        if (margin >= 0.f && margin * margin >= variance_factor * squares_below) low = bin;
        if (excess > 0.f && excess * excess > variance_factor * squares_below) high = max(high, bin);
        const float w = weight_fn.bin_weight(bin), n = static_cast<float>(count[b]) * w;
        below += n;
        squares_below += n * w;
      }
    }
    send_pivots(Measure::mass, low, high);
  }

  // Top-k: at least k elements reach the threshold.
  __device__ __forceinline__ void estimate_count_pivots(u64 k, int max_candidates) {
    reset();
    u32 count[kBinsPerThread];
    load_bins(count);
    const float of_thread = static_cast<float>(count[0] + count[1] + count[2] + count[3]);
    float* warp_sums = reinterpret_cast<float*>(scratch->warp_sums);
    float before = block_scan<Direction::forward>(of_thread, warp_sums) - of_thread, samples = 0.f;
    for (int w = 0; w < kHistogramThreads / 32; ++w) samples += warp_sums[w];
    const float part = __fdividef(samples, static_cast<float>(length));
    const float goal = static_cast<float>(k) * part, variance_factor = kSigmas * kSigmas * (1.f - part);
    // A list of all elements down to the low pivot also serves a top-p that follows, if it is short enough.
    const bool list_from_top =
        goal + 2.f * kSigmas * sqrtf(goal + kSpareSamples) < part * 0.5f * static_cast<float>(max_candidates);
    int low = kBins, high = -1;
    if (threadIdx.x < kHistogramThreads) {
#pragma unroll
      for (int b = 0; b < kBinsPerThread; ++b) {
        before += static_cast<float>(count[b]);
        const float over = before - goal;
        const int bin = threadIdx.x * kBinsPerThread + b;
        if (low == kBins && over >= 0.f && over * over >= variance_factor * before) low = bin;
        if (!list_from_top && over < 0.f && over * over > variance_factor * (before + kSpareSamples)) high = bin;
      }
    }
    send_pivots(Measure::count, low, high);
  }
};

}  // namespace kestrel::sampling
