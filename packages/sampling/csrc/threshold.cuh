// What the search for a threshold is about: what is kept, where the threshold lies, and what a block shares meanwhile.
#pragma once

#include "row.cuh"

namespace kestrel::sampling {

constexpr int kBins = 1024;      // of the histogram of the row: 32 octaves below the largest weight
constexpr int kGuessers = 256;   // threads that look at it; a filtering block has no fewer
constexpr int kFine = 256;       // of the histograms of a list
constexpr int kEntries = 6;      // of a list, per thread
constexpr int kLastFew = 32;     // entries that one warp ends with, one a lane
constexpr int kSamples = 32768;  // elements of a row in its histogram, about

// The elements that stay: those above a value, and those equal to it up to an index.
struct Kept {
  float above = -INFINITY;
  int last = INT32_MAX;
  __device__ __forceinline__ bool has(float v, int i) const { return v > above || (v == above && i <= last); }
  __device__ __forceinline__ Kept and_also(const Kept& other) const {
    if (other.above != above) return other.above > above ? other : *this;
    return {above, min(last, other.last)};
  }
};

// Where t lies: low <= t < high as ordered integers, and the measure of what is >= high.
struct Range {
  int low, high;
  u64 above;
  __device__ __forceinline__ u32 width() const { return static_cast<u32>(high) - static_cast<u32>(low); }
};

// t, how many of the elements equal to it are needed, and how many there are (or more than there can be: not known).
struct Found {
  int key;
  u32 needed, equal;
};

// Shared by a block, beside the row, the exchange and the list.
struct alignas(16) Scratch {
  u32 bins[kBins];  // in the first block, later on, the fine bins: counts, then masses in three parts
  Range range;
  Found found;
  int guess[2][2];  // [count, mass][low, high]
  int guess_bin[2];
  u32 listed[2];  // entries of the list, one pass and the next
  u32 few;
  u32 in_range;
  u32 word;
  int cut;
  u64 warp_sums[32];
};
static_assert(4 * kFine <= kBins);

}  // namespace kestrel::sampling
