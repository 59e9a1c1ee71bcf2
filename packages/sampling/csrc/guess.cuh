// A guess at the threshold from a histogram of a part of the row: two values between which it lies but for 3.5 standard
// deviations. By the first block of a team.
#pragma once

#include "threshold.cuh"

namespace kestrel::sampling {

// One tile in so many is counted in the histogram: a power of two.
__device__ __forceinline__ int samples_every(int length) { return 1 << max(0, 32 - __clz((length - 1) / kSamples)); }

template <Kind kind>
struct Guess {
  const Team& team;
  const Weigher<kind>& weigher;
  Scratch* scratch;
  int length;  // of the row

  static constexpr int kMine = kBins / kGuessers;  // bins of a thread
  static constexpr float kWide = 3.5f;             // standard deviations

  // This thread's bins, summed over the team's blocks.
  __device__ __forceinline__ void my_bins(u32 (&count)[kMine]) const {
    static_assert(kMine == 4);
    uint4 sum = {0, 0, 0, 0};
    if (threadIdx.x < kGuessers) {
#pragma unroll 8
      for (int block = 0; block < team.blocks; ++block) {
        const uint4 n = reinterpret_cast<const uint4*>(in_block(scratch->bins, block, team.blocks))[threadIdx.x];
        sum.x += n.x, sum.y += n.y, sum.z += n.z, sum.w += n.w;
      }
    }
    count[0] = sum.x, count[1] = sum.y, count[2] = sum.z, count[3] = sum.w;
  }

  // The sum over this thread and those before it (or behind it), by all threads of a block.
  __device__ __forceinline__ float scanned(float mine, float* warps, bool forwards) const {
    float sum = mine;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float down = __shfl_down_sync(kAllLanes, sum, distance), up = __shfl_up_sync(kAllLanes, sum, distance);
      if (forwards && team.lane >= distance) sum += up;
      if (!forwards && team.lane + distance < 32) sum += down;
    }
    const int warp = threadIdx.x >> 5;
    if (team.lane == (forwards ? 31 : 0) && warp < kGuessers / 32) warps[warp] = sum;
    __syncthreads();
    for (int w = 0; w < kGuessers / 32; ++w) {
      if (forwards ? w < warp : w > warp) sum += warps[w];
    }
    return sum;
  }

  // Takes the lowest bin that surely reaches the goal and the highest that surely does not, and tells all blocks.
  __device__ __forceinline__ void write_guess(int which, int low, int high) {
    low = __reduce_min_sync(kAllLanes, low);
    high = __reduce_max_sync(kAllLanes, high);
    if (team.lane == 0) atomicMin(&scratch->guess_bin[0], low), atomicMax(&scratch->guess_bin[1], high);
    __syncthreads();
    low = scratch->guess_bin[0], high = scratch->guess_bin[1];
    if (threadIdx.x < team.blocks) {
      int (*guess)[2] = in_block(scratch, threadIdx.x, team.blocks)->guess;
      guess[which][0] = low >= kBins - 1 ? INT32_MIN : ordered(weigher.bin_end(low));
      guess[which][1] = high < 0 ? INT32_MAX : ordered(weigher.bin_end(high));
    }
    __syncthreads();
  }

  __device__ __forceinline__ void begin_guess() {
    if (threadIdx.x == 0) scratch->guess_bin[0] = kBins, scratch->guess_bin[1] = -1;
  }

  // Of `all` mass, `goal` is to be reached. The mass below t is summed from the smallest weights on, where chance
  // counts least.
  __device__ __forceinline__ void guess_mass(u64 all, u64 goal) {
    begin_guess();
    u32 count[kMine];
    my_bins(count);
    float samples = 0.f, sum = 0.f, squares = 0.f;
#pragma unroll
    for (int b = 0; b < kMine; ++b) {
      const float w = weigher.bin_weight(threadIdx.x * kMine + b), n = static_cast<float>(count[b]);
      samples += n;
      sum += n * w;
      squares += n * w * w;
    }
    float* warps = reinterpret_cast<float*>(scratch->warp_sums);
    scanned(samples, warps, true);
    float below = scanned(sum, warps + 8, false) - sum, squares_below = scanned(squares, warps + 16, false) - squares;
    samples = 0.f;
    for (int w = 0; w < kGuessers / 32; ++w) samples += warps[w];
    const float part = __fdividef(samples, static_cast<float>(length));
    const float allowed = __fdividef(part * static_cast<float>(all - goal), weigher.scale * 0x1p20f);
    const float wide = kWide * kWide * (1.f - part);
    int low = kBins, high = -1;
    if (threadIdx.x < kGuessers) {
#pragma unroll
      for (int b = kMine - 1; b >= 0; --b) {
        const int bin = threadIdx.x * kMine + b;
        const float room = allowed - 1.015f * below, excess = 0.985f * below - allowed;
        if (room >= 0.f && room * room >= wide * squares_below) low = bin;
        if (excess > 0.f && excess * excess > wide * squares_below) high = max(high, bin);
        const float w = weigher.bin_weight(bin), n = static_cast<float>(count[b]) * w;
        below += n;
        squares_below += n * w;
      }
    }
    write_guess(1, low, high);
  }

  __device__ __forceinline__ void guess_count(u64 k, int most_listed) {
    begin_guess();
    u32 count[kMine];
    my_bins(count);
    const float mine = static_cast<float>(count[0] + count[1] + count[2] + count[3]);
    float* warps = reinterpret_cast<float*>(scratch->warp_sums);
    float before = scanned(mine, warps, true) - mine, samples = 0.f;
    for (int w = 0; w < kGuessers / 32; ++w) samples += warps[w];
    const float part = __fdividef(samples, static_cast<float>(length));
    const float goal = static_cast<float>(k) * part, wide = kWide * kWide * (1.f - part);
    // A list of everything from the top on also serves the top-p that follows; it is cut where it would be too long.
    const bool whole = goal + 2.f * kWide * sqrtf(goal + 4.f) < part * 0.5f * static_cast<float>(most_listed);
    int low = kBins, high = -1;
    if (threadIdx.x < kGuessers) {
#pragma unroll
      for (int b = 0; b < kMine; ++b) {
        before += static_cast<float>(count[b]);
        const float over = before - goal;
        if (low == kBins && over >= 0.f && over * over >= wide * before) low = threadIdx.x * kMine + b;
        if (!whole && over < 0.f && over * over > wide * (before + 4.f)) high = threadIdx.x * kMine + b;
      }
    }
    write_guess(0, low, high);
  }
};

}  // namespace kestrel::sampling
