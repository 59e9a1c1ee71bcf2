// State of the threshold search: what is kept, where the threshold lies, and the shared memory of a block.
#pragma once

#include "float32_slice.cuh"

namespace kestrel::sampling {

constexpr int kBins = 1024;               // of the row's histogram: 32 octaves below the largest weight
constexpr int kHistogramThreads = 256;    // threads that evaluate it; a block has at least as many
constexpr int kHistogramSamples = 32768;  // elements of a row in its histogram, approximately
constexpr int kFineBins = 256;            // of the histograms of a candidate list
constexpr int kCandidatesPerThread = 6;
constexpr int kWarpCandidates = 32;  // most candidates of the last step, in one warp: one per lane

// What a search sums: the number of elements (top-k) or their masses (top-p).
enum class Measure { count, mass };

// Whether the pass that builds the histogram also sums the mass of the row.
enum class SumMass { no, yes };

// The elements that a filter keeps: those above a value, and those equal to it up to an index.
struct KeptSet {
  float above = -INFINITY;
  int last = INT32_MAX;
  __device__ __forceinline__ bool has(float v, int i) const { return v > above || (v == above && i <= last); }
  __device__ __forceinline__ KeptSet intersect(const KeptSet& other) const {
    if (other.above != above) return other.above > above ? other : *this;
    return {above, min(last, other.last)};
  }
};

// The interval of order keys that holds the threshold, low <= threshold < high, and the measure of elements >= high.
struct Range {
  int low, high;
  u64 above;
  __device__ __forceinline__ u32 width() const { return static_cast<u32>(high) - static_cast<u32>(low); }
};

// The order key of the threshold, how many of the elements equal to it are kept, and how many there are (UINT32_MAX if
// that is not known).
struct Threshold {
  int key;
  u32 needed, equal;
};

// Shared by a block, beside the row, the exchange and the candidate list.
struct alignas(16) SearchScratch {
  u32 bins[kBins];  // in the first block, later on, the fine bins: counts, then masses in three parts
  Range range;
  Threshold threshold;
  int pivots[2][2];  // [Measure][low, high]
  int pivot_bins[2];
  u32 num_candidates[2];  // in the list, of this pass and the next
  u32 num_warp_candidates;
  u32 num_in_range;
  u32 random_word;
  int located;  // index of an element
  u64 warp_sums[32];
};
static_assert(4 * kFineBins <= kBins);

}  // namespace kestrel::sampling
