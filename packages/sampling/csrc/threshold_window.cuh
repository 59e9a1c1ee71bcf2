// A window of values around the threshold of top-p, which a sample of the row gives. The pass over the row sums what
// lies above the window and what each bin of it holds, so that nearly every element can be compared with the threshold.
#pragma once

#include "row_slice.cuh"

namespace kestrel::sampling {

constexpr int kBinBits = 9, kWindowBins = 1 << kBinBits;
constexpr int kOctave = 1 << 23;         // float bit patterns
constexpr int kSearched = 12 * kOctave;  // below the largest element of a sample: where its threshold is searched
constexpr int kUsualWindowBits = 21;     // a quarter of an octave
constexpr int kMaxWindowShare = 8;       // the part of a row in a window, inverted: atomics of more would serialise
constexpr int kMaxWindowBits = 26;       // a window spans up to 2^26 float bit patterns, eight octaves, around a value,
constexpr int kTopWindowBits = 27;       // and sixteen below 1
constexpr int kWindowedThreads = 256;    // of a block with a window, at most
constexpr int kWindowedWarps = kWindowedThreads / 32;
static_assert(2 * kWindowedThreads >= kWindowBins);

// A window of values around the estimated threshold, in bins of equal width. The sums of the bins give the mass before
// an element in the window, up to the mass of its own bin. With 0 bits it is two values that many elements have.
struct Window {
  int begin = 0x7fc00000;  // bits of a float, or of the lower of two values; the default is above every row
  int bits = 0;            // log2 of the width
  float unit = 0.f;
  float upper_value = 0.f;
  bool lists = false;  // so few elements are in it that they are listed

  __device__ __forceinline__ Window() {}
  // Around a value. max_count: elements that one block may add. Each of them, less than 2^(the last exponent + 1),
  // gives less than 2^log2_most, so that their sum stays below 2^32, and at least 1.
  __device__ __forceinline__ Window(int center, int bits_, int max_count) {
    const int log2_most = min(20, __clz(max_count));
    bits = bits_;
    while ((1 << bits) > max(1, log2_most - 2) * kOctave) --bits;
    set_unit(center - (1 << (bits - 1)), log2_most);
  }
  // The octaves below 1 of a row of few large elements. Their sum is checked once it is known.
  __device__ __forceinline__ static Window below_one() {
    Window window;
    window.bits = kTopWindowBits;
    window.set_unit(__float_as_int(1.f) + 1 - (1 << kTopWindowBits), 22);
    return window;
  }
  __device__ __forceinline__ void set_unit(int begin_, int log2_most) {
    begin = max(begin_, kOctave);  // the smallest normal number
    const int last_exponent = static_cast<int>((static_cast<u32>(begin) + (1u << bits)) >> 23);
    // 2^log2_most over 2^(last_exponent - 126), which is above the window. The exponent of a float is biased by 127.
    unit = __int_as_float(max(1, min(254, 253 - last_exponent + log2_most)) << 23);
  }
  __device__ __forceinline__ Window(int one, int other) {
    begin = min(one, other);
    upper_value = __int_as_float(max(one, other));
  }
  // False if nothing is in or above the window.
  __device__ __forceinline__ bool has_elements() const { return begin < 0x7f800000; }
  __device__ __forceinline__ bool is_two_values() const { return bits == 0 && has_elements(); }
  __device__ __forceinline__ float lower_value() const { return __int_as_float(begin); }
  // The position of a non-negative value: 0 to 2^bits - 1 inside the window, negative below it.
  __device__ __forceinline__ int position(float v) const { return __float_as_int(v) - begin; }
  __device__ __forceinline__ int bin(int position) const { return position >> (bits - kBinBits); }
  __device__ __forceinline__ float bin_begin(int bin) const {
    return __int_as_float(begin + (bin << (bits - kBinBits)));
  }
};

// usual: a window of kUsualWindowBits. few: one whose elements are listed as well.
enum class WindowMode { none, usual, bins, few, two_values };

// The elements in a window, by a block that has the row to itself.
constexpr int kMaxListed = 1024;
struct ListedElement {
  float value;
  int index;
};
struct WindowList {
  ListedElement elements[kMaxListed];
  alignas(16) u32 count;  // may exceed kMaxListed: elements that did not fit are missing

  // The place of the first of n elements, which are left out once the list is full.
  __device__ __forceinline__ u32 reserve(u32 n) {
    return *reinterpret_cast<volatile u32*>(&count) > kMaxListed ? kMaxListed : atomicAdd(&count, n);
  }
  __device__ __forceinline__ void put(u32 place, float value, int index) {
    if (place < kMaxListed) elements[place] = {value, index};
  }
};

// Of the row, as a warp needs them to decide a proposal in its slice.
struct WindowSums {
  float mass;                   // of the row
  float above, above_lower;     // above the window, or its upper value; above its lower value
  uint2 counts, counts_before;  // the elements that have the upper and the lower value; those in the slices before
};

// Shared by a block.
struct WindowScratch {
  int threshold;                         // the mean of those that the warps estimate
  u32 num_in_window, num_with_few;       // elements of the sample, and warps in whose part few elements have the mass
  float sample_sums[kWindowedWarps];     // of the elements that a warp estimates from: their sum,
  float sample_squares[kWindowedWarps];  // that of their squares,
  int sample_tops[kWindowedWarps];       // the bits of the largest,
  int thresholds[kWindowedWarps];        // the bits of the threshold,
  int widths[kWindowedWarps];            // log2 of the width of a window, and 2^16 times the elements below_one() has,
  u32 counts[kWindowedWarps];            // the elements equal to the threshold, and 2^16 times those above it
  Window window;
  WindowSums sums[kWindowedWarps];
  // The weight of this block's elements in the window, times Window::unit; or the elements of each lane's group that
  // have the upper value, then those that have the lower one.
  alignas(16) u32 bins[2 * kWindowedThreads];
  __device__ __forceinline__ void init() { threshold = 0, num_in_window = num_with_few = 0; }
};

// The part of a row that windows are estimated from: four tiles for every warp, the same in every block.
struct WindowSample {
  static constexpr int kTiles = 4, kOwn = 4 * kTiles, kOfWarp = kTiles * kTile;
  float v[kOwn];  // weights, at least 0
  float sum;      // of this warp
  int top;        // the bits of the largest of this warp

  template <typename Slice, typename Weight>
  __device__ __forceinline__ WindowSample(const Cluster& cluster, const Slice& row, const Weight& weight_fn) {
    const int tile = static_cast<int>(int64_t{threadIdx.x >> 5} * ((row.length - 1) / kTile) / cluster.warps_per_block);
    row.template unpack<kTiles>(row.template load<kTiles>(tile * kTile), v);
    float most = 0.f, own = 0.f;
#pragma unroll
    for (int e = 0; e < kOwn; ++e) {
      v[e] = fmaxf(weight_fn.weight(v[e]), 0.f);
      most = fmaxf(most, v[e]), own += v[e];
    }
    top = __reduce_max_sync(kAllLanes, __float_as_int(most));
    sum = own;
  }
  // What the elements of a warp sum up to, on average, in a row of that sum.
  static __device__ __forceinline__ float share(float row_sum, int length) {
    return row_sum * __fdividef(kOfWarp, static_cast<float>(length));
  }
  // Whether the sum of a sample agrees with an expected one, within some standard deviations and 2 %. Its error comes
  // from the largest elements, which matter little to a threshold below them: where it agrees, the expected sum gives
  // the better threshold.
  static __device__ __forceinline__ bool may_be(float expected, float sum, float squares, float deviations) {
    return fabsf(sum - expected) <= deviations * sqrtf(squares) + 0.02f * expected;
  }
  __device__ __forceinline__ float squares() const {
    float own = 0.f;
#pragma unroll
    for (int e = 0; e < kOwn; ++e) own = __fmaf_rn(v[e], v[e], own);
    return warp_float_sum(own);
  }
  // The sum of the elements that `counts` selects, in units of which every element has up to 2^22.
  template <typename Counts>
  __device__ __forceinline__ u32 sum_of(float unit, Counts counts) const {
    float own = 0.f;
#pragma unroll
    for (int e = 0; e < kOwn; ++e) own += counts(v[e]) ? v[e] : 0.f;
    return __reduce_add_sync(kAllLanes, __float2uint_rz(own * unit));
  }
};

// A window for rows of any distribution: around the threshold that the warps estimate, as wide as few elements allow,
// because the atomics of many would serialise. The block takes the median of its warps.
template <typename Slice>
__device__ __forceinline__ Window adapted_window(const Cluster& cluster, const Slice& row, WindowScratch* scratch,
                                                 const WindowSample& sample, float sum, float squares, float part,
                                                 float expected) {
  constexpr int kSample = WindowSample::kOfWarp, kMaxInWindow = kSample / kMaxWindowShare;
  constexpr int kMinEqual = kSample / 16;  // elements equal to the threshold that make a window of two values
  constexpr int kMinAbove = 64;            // elements of the sample above a threshold that is to be trusted
  constexpr float kFewShare = 0.02f;       // of the sample's sum: a larger element means that few have most of it
  constexpr int kHalvings = 14;            // of twelve octaves, which leave less than 1/1000 of one
  const int own = threadIdx.x >> 5, num_warps = cluster.warps_per_block;
  const bool is_warp = cluster.lane < num_warps;  // this lane stands for a warp
  const int top = max(sample.top, kOctave);
  if (cluster.lane == 0)
    scratch->sample_sums[own] = sum, scratch->sample_squares[own] = squares, scratch->sample_tops[own] = top;
  u32 least = static_cast<u32>(top);
#pragma unroll
  for (int e = 0; e < WindowSample::kOwn; ++e) {
    if (sample.v[e] > 0.f) least = min(least, __float_as_uint(sample.v[e]));
  }
  least = __reduce_min_sync(kAllLanes, least);
  __syncthreads();
  const int largest = __reduce_max_sync(kAllLanes, is_warp ? scratch->sample_tops[cluster.lane] : 0);
  const float total = warp_float_sum(is_warp ? scratch->sample_sums[cluster.lane] : 0.f);
  const float all_squares = warp_float_sum(is_warp ? scratch->sample_squares[cluster.lane] : 0.f);
  // If few elements have most of the mass, the sum of a sample says nothing about that of the row.
  const bool has_few = __int_as_float(largest) > kFewShare * total;
  const bool as_expected = has_few || sample.may_be(num_warps * expected, total, all_squares, 6.f);
  const float below = (1.f - part) * (as_expected ? expected : sum);
  const float unit = __fdividef(0x1p22f, __int_as_float(top));
  const u32 goal = __float2uint_rz(below * unit);
  int low = max(top - kSearched, static_cast<int>(least));
  int step = 1 << (31 - __clz(top + 1 - low));
#pragma unroll 1
  for (int n = 0; n < kHalvings && step > 0; ++n, step /= 2) {
    if (low + step > top + 1) continue;
    const float pivot = __int_as_float(low + step);
    if (sample.sum_of(unit, [&](float v) { return v < pivot; }) <= goal) low += step;
  }
  // The next element of the sample; if there is none, the largest or 1/8.
  int threshold = max(largest, __float_as_int(0.125f));
#pragma unroll
  for (int e = 0; e < WindowSample::kOwn; ++e) {
    if (__float_as_int(sample.v[e]) >= low) threshold = min(threshold, __float_as_int(sample.v[e]));
  }
  threshold = __reduce_min_sync(kAllLanes, threshold);
  if (cluster.lane == 0) scratch->thresholds[own] = threshold;
  __syncthreads();
  const int of_warp = is_warp ? scratch->thresholds[cluster.lane] : INT32_MAX;
  int place = 0, same = 0;
#pragma unroll 1
  for (int other = 0; other < num_warps; ++other) {
    const int of_other = scratch->thresholds[other];
    same += of_other == of_warp;
    place += of_other < of_warp || (of_other == of_warp && other < cluster.lane);
  }
  const u32 is_median = __ballot_sync(kAllLanes, is_warp && place == num_warps / 2);
  threshold = __shfl_sync(kAllLanes, of_warp, __ffs(is_median) - 1);
  // The value that most of the other warps estimate.
  const int vote = __reduce_max_sync(kAllLanes, is_warp && of_warp != threshold ? same * 32 + cluster.lane : -1);
  const int other_threshold = __shfl_sync(kAllLanes, of_warp, vote & 31);

  int bits = kBinBits;
#pragma unroll 1
  for (int more = 16; more > 0; more /= 2) {
    if (bits + more > kMaxWindowBits) continue;
    u32 in_window = 0;
#pragma unroll
    for (int e = 0; e < WindowSample::kOwn; ++e)
      in_window += abs(__float_as_int(sample.v[e]) - threshold) < 1 << (bits + more - 1);
    if (__reduce_add_sync(kAllLanes, in_window) <= kMaxInWindow) bits += more;
  }
  u32 counts = 0;  // of the elements equal to the threshold, and of those above it
#pragma unroll
  for (int e = 0; e < WindowSample::kOwn; ++e) {
    const int v = __float_as_int(sample.v[e]);
    counts += v == threshold ? 1 : 0, counts += v > threshold ? 0x10000 : 0;
  }
  counts = __reduce_add_sync(kAllLanes, counts);
  Window below_one = Window::below_one();
  u32 in_window = 0;
#pragma unroll
  for (int e = 0; e < WindowSample::kOwn; ++e) in_window += below_one.position(sample.v[e]) >= 0;
  in_window = __reduce_add_sync(kAllLanes, in_window);
  if (cluster.lane == 0) scratch->widths[own] = bits | in_window << 16, scratch->counts[own] = counts;
  __syncthreads();
  const int widths = __reduce_add_sync(kAllLanes, is_warp ? scratch->widths[cluster.lane] : 0);
  bits = (widths & 0xffff) / num_warps;
  counts = __reduce_add_sync(kAllLanes, is_warp ? scratch->counts[cluster.lane] : 0);
  if ((counts & 0xffff) > static_cast<u32>(kMinEqual * num_warps))
    return Window(threshold, vote < 0 ? threshold : other_threshold);
  // Of a threshold that so few elements of the sample reach nothing is known but that it is at most 1.
  if (has_few && counts >> 16 < kMinAbove) {
    const float expected_elements = __fdividef(static_cast<float>(widths >> 16) * row.length, kSample * num_warps);
    below_one.lists = cluster.size == 1 && expected_elements < 3 * kMaxListed / 8;
    return below_one;
  }
  return Window(threshold, bits, row.elements_per_warp * num_warps);
}

// A window for top-p, which keeps `part` of the mass. row_sum: of the weights, known or estimated. The usual one is
// around the mean of the thresholds that the warps find by bisection of twelve octaves. Where many elements lie in it,
// few have the mass, or the warps disagree, it decides little, and the window is an adapted one.
template <typename Slice, typename Weight>
__device__ __forceinline__ Window estimate_window(const Cluster& cluster, const Slice& row, WindowScratch* scratch,
                                                  const Weight& weight_fn, float part, float row_sum) {
  constexpr int kMaxSpread = kOctave / 2;  // of the thresholds that the warps find
  const WindowSample sample(cluster, row, weight_fn);
  const int num_warps = cluster.warps_per_block, max_count = row.elements_per_warp * num_warps;
  const float unit = __fdividef(0x1p22f, __int_as_float(sample.top));
  const u32 all = __reduce_add_sync(kAllLanes, __float2uint_rz(sample.sum * unit));
  u32 goal = static_cast<u32>(static_cast<float>(all) * part);
  const float expected = sample.share(row_sum, row.length);
  const float sum = warp_float_sum(sample.sum), squares = sample.squares();
  if (sample.may_be(expected, sum, squares, 4.f))
    goal = all - min(all, __float2uint_rz((1.f - part) * expected * unit));
  int low = max(sample.top - kSearched, 0);
#pragma unroll 1
  for (int step = kSearched / 2; step >= kSearched / 128; step /= 2) {  // down to an eleventh of an octave
    const float pivot = __int_as_float(low + step);
    if (sample.sum_of(unit, [&](float v) { return v >= pivot; }) >= goal) low += step;
  }
  low += kSearched / 256;  // the middle of the last step
  const Window of_warp(low, kUsualWindowBits, max_count);
  u32 num_in_window = 0;
#pragma unroll
  for (int e = 0; e < WindowSample::kOwn; ++e)
    num_in_window += static_cast<u32>(of_warp.position(sample.v[e])) < 1u << kUsualWindowBits;
  num_in_window = __reduce_add_sync(kAllLanes, num_in_window);
  if (cluster.lane == 0) {
    atomicAdd(&scratch->threshold, low / num_warps), atomicAdd(&scratch->num_in_window, num_in_window);
    if (all < 16u << 22) atomicAdd(&scratch->num_with_few, 1u);  // the largest element has a sixteenth of the sum
    scratch->thresholds[threadIdx.x >> 5] = low;
  }
  __syncthreads();
  const u32 in_window = scratch->num_in_window, num_sampled = WindowSample::kOfWarp * num_warps;
  const int threshold = scratch->thresholds[min(cluster.lane, num_warps - 1)];
  const int spread = __reduce_max_sync(kAllLanes, threshold) - __reduce_min_sync(kAllLanes, threshold);
  if (in_window > num_sampled / kMaxWindowShare || scratch->num_with_few > num_warps / 2u || spread > kMaxSpread)
    return adapted_window(cluster, row, scratch, sample, sum, squares, part, expected);
  return Window(scratch->threshold, kUsualWindowBits, max_count);
}

}  // namespace kestrel::sampling
