// One id per row of at most 4096 elements: top-k up to 128, top-p and min-p, each optional.
//
// A thread block processes a row. Every thread keeps four neighbouring elements and their masses in registers, so that
// the row is read once. One more warp than the elements need computes the random words.
// Without top-k, four ids are drawn at once and checked in turn until top-p accepts one (rejection_rows.cuh). With
// top-k, counts at four pivots at a time narrow the row down to little more than k candidates, which are compared
// pairwise.
#pragma once

#include "params.cuh"
#include "row_slice.cuh"

namespace kestrel::sampling {

constexpr int kShortThreads = 1024;
constexpr int kPivots = 4;
constexpr int kFewCandidates = 64;    // which eight warps compare with one another in one step
constexpr int kSpareCandidates = 16;  // accepted beyond k, so that the search need not end exactly there
static_assert(kShortRow / 4 <= kShortThreads && kShortRow < 1 << 16);

struct alignas(16) ShortScratch {
  u64 warp_values[2][32];  // two buffers that alternate
  // Of each candidate:
  u64 mass[kMaxSmallK];
  u64 before[kMaxSmallK];  // the mass of the candidates before it in descending order; ~0 if top-k drops it
  u32 rank_key[kMaxSmallK];
  int id[kMaxSmallK];

  int2 proposals[kProposals];  // index and value
  u32 words[4];
};

struct Result {
  bool is_writer;  // this thread writes the id
  int id;
};

// An unsigned order key, above 0.
__device__ __forceinline__ u32 unsigned_order_key(float v) {
  return static_cast<u32>(order_key(v + 0.f)) ^ 0x80000000u;
}

template <Kind kind>
struct ShortRow {
  static constexpr u64 kNotKept = ~u64{0};
  ShortScratch* scratch;
  int lane, warp, warps, first;  // index of the first element of this thread
  float v[4];
  u64 mass[4];
  u32 round = 0;

  // Gathers the values of all warps, that of warp w in lane w. Also a barrier of the block.
  __device__ __forceinline__ u64 gather(u64 of_warp) {
    u64* values = scratch->warp_values[round++ & 1];
    if (lane == 0) values[warp] = of_warp;
    __syncthreads();
    return lane < warps ? values[lane] : 0;
  }
  __device__ __forceinline__ bool is_before(int e, int2 proposal) const {
    const float value = __int_as_float(proposal.y);
    return v[e] > value || (v[e] == value && first + e < proposal.x);
  }
  // 0 for an element without mass.
  __device__ __forceinline__ u32 rank_key(int e) const { return mass[e] > 0 ? unsigned_order_key(v[e]) : 0; }
  __device__ __forceinline__ u64 sum() const { return mass[0] + mass[1] + mass[2] + mass[3]; }

  // Whether the prefix sum of masses exceeds the point at an element of this thread, and at which. up_to: the prefix
  // sum that includes this thread.
  __device__ __forceinline__ bool has(u64 point, u64 up_to, int& e) const {
    u64 reached = up_to - sum();
    if (point < reached || point >= up_to) return false;
    e = 0;
#pragma unroll
    for (int next = 0; next < 3; ++next) {
      reached += mass[next];
      if (reached <= point) e = next + 1;
    }
    return true;
  }
  __device__ __forceinline__ float value(int e) const { return e < 2 ? (e ? v[1] : v[0]) : e == 2 ? v[2] : v[3]; }

  // Without top-k: rejection sampling. next_words(round) computes the random words of another round.
  template <typename F>
  __device__ __forceinline__ Result draw(u64 q32, bool greedy, F next_words) {
    const bool unfiltered = greedy || q32 == kQ32One;  // the first proposal is accepted
    u64 goal = 0;
    int2 bound = {INT32_MAX, __float_as_int(-INFINITY)};  // the first of the rejected, in descending order
#pragma unroll 1
    for (u32 draw_round = 1;; ++draw_round) {
      u64 up_to = warp_inclusive_sum(sum(), lane);
      const u64 of_warps = gather(__shfl_sync(kAllLanes, up_to, 31)), all = warp_sum(of_warps);
      up_to += warp_sum(lane < warp ? of_warps : 0);
      int e;
      // Every lane computes one of the points.
      const u64 points = greedy ? 0 : scale_q32(all, scratch->words[lane % kProposals]);
      if (unfiltered) return {has(__shfl_sync(kAllLanes, points, 0), up_to, e), first + e};
      if (goal == 0) goal = max(u64{1}, scale_q32(all, q32));
#pragma unroll 1
      for (int n = 0; n < kProposals; ++n) {
        if (has(__shfl_sync(kAllLanes, points, n), up_to, e)) {
          scratch->proposals[n] = {first + e, __float_as_int(value(e))};
        }
      }
      __syncthreads();
#pragma unroll 1
      for (int n = 0; n < kProposals; ++n) {
        const int2 proposal = scratch->proposals[n];
        const float value = __int_as_float(proposal.y), other = __int_as_float(bound.y);
        if (value < other || (value == other && proposal.x >= bound.x)) continue;
        u64 before = 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) before += is_before(e, proposal) ? mass[e] : 0;
        if (warp_sum(gather(warp_sum(before))) < goal) return {threadIdx.x == 0, proposal.x};
        bound = proposal;
      }
      if (draw_round >= rounds_from_row(q32)) {
#pragma unroll
        for (int e = 0; e < 4; ++e) mass[e] = is_before(e, bound) ? mass[e] : 0;
      }
      next_words(draw_round);
    }
  }

  // Collects the k largest elements and a few more, in the order of the row, or all elements with mass if those are
  // fewer. top: the largest rank key. Returns the number of candidates.
  __device__ __forceinline__ int collect_candidates(int& k, u32 top) {
    const int most = min(kMaxSmallK, max(kFewCandidates, k + kSpareCandidates));
    u32 keys[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) keys[e] = rank_key(e);
    u32 low = 0, high = top + 1;       // fewer than k elements reach high, more than `most` reach low
    constexpr u32 kOctave = 1u << 23;  // keys of an octave of positive values
    u32 pivot[kPivots] = {high - kOctave / 2, high - kOctave, high - 4 * kOctave, 1};  // the last: all with mass
    int count = 0, chosen = 0;
    u64 of_warps;
#pragma unroll 1
    for (;;) {
      u32 counts[2] = {};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int j = 0; j < kPivots; ++j) counts[j / 2] += keys[e] >= pivot[j] ? 1u << (16 * (j % 2)) : 0;
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) counts[j] = __reduce_add_sync(kAllLanes, counts[j]);
      of_warps = gather(counts[0] | static_cast<u64>(counts[1]) << 32);
      const u64 all = __reduce_add_sync(kAllLanes, static_cast<u32>(of_warps)) |
                      static_cast<u64>(__reduce_add_sync(kAllLanes, static_cast<u32>(of_warps >> 32))) << 32;
      if (low == 0) k = min(k, static_cast<int>(all >> 48)), low = 1;
      chosen = -1;
#pragma unroll
      for (int j = kPivots - 1; j >= 0; --j) {
        const int reach = static_cast<int>(all >> (16 * j) & 0xffff);
        if (reach >= k) {
          chosen = j, count = reach, low = pivot[j];
        } else {
          high = min(high, pivot[j]);
        }
      }
      if (chosen >= 0 && count <= most) break;
      if (high - low == 1) {  // too many are equal: order them by index
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          keys[e] = keys[e] > low ? ~0u : keys[e] == low ? ~static_cast<u32>(first + e + 1) : 0;
        }
        low = ~(kShortRow + 1u), high = ~0u;  // around the keys of all indices
      }
      const u32 step = max(1u, (high - low) / (kPivots + 1));
#pragma unroll
      for (int j = 0; j < kPivots; ++j) pivot[j] = min(low + (kPivots - j) * step, high - 1);
    }
    int place = static_cast<int>(
        __reduce_add_sync(kAllLanes, lane < warp ? static_cast<u32>(of_warps >> (16 * chosen) & 0xffff) : 0));
    bool is_candidate[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      is_candidate[e] = keys[e] >= low;
      place += __popc(__ballot_sync(kAllLanes, is_candidate[e]) & ((1u << lane) - 1));
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!is_candidate[e]) continue;
      scratch->id[place] = first + e, scratch->rank_key[place] = rank_key(e), scratch->mass[place] = mass[e];
      ++place;
    }
    return count;
  }

  // With top-k. all: the mass of which top-p is a fraction; 0: the mass that top-k keeps.
  __device__ __forceinline__ Result draw_from_candidates(int k, u32 top, u64 q32, u64 all) {
    const int count = collect_candidates(k, top);
    __syncthreads();
    // How many candidates come before each, and their mass: four threads per candidate.
#pragma unroll 1
    for (int base = 8 * warp; base < count; base += 8 * warps) {
      const int candidate = min(base + lane / 4, count - 1);
      const u32 key = scratch->rank_key[candidate];
      u64 before = 0;
      int place = 0;
#pragma unroll 4
      for (int other = lane % 4; other < count; other += 4) {
        const u32 other_key = scratch->rank_key[other];
        const bool is_before = other_key > key || (other_key == key && other < candidate);
        place += is_before;
        before += is_before ? scratch->mass[other] : 0;
      }
#pragma unroll
      for (int other = 1; other < 4; other *= 2) {
        place += __shfl_xor_sync(kAllLanes, place, other);
        before += __shfl_xor_sync(kAllLanes, before, other);
      }
      if (lane % 4 == 0) scratch->before[candidate] = place < k ? before : kNotKept;
    }
    __syncthreads();
    if (warp > 0) return {};
    u64 before[4];
    first = 4 * lane;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      before[e] = first + e < count ? scratch->before[first + e] : kNotKept;
      mass[e] = before[e] != kNotKept ? scratch->mass[first + e] : 0;
    }
    const u64 goal = max(u64{1}, scale_q32(all ? all : warp_sum(sum()), q32));
#pragma unroll
    for (int e = 0; e < 4; ++e) mass[e] = before[e] < goal ? mass[e] : 0;
    const u64 up_to = warp_inclusive_sum(sum(), lane);
    int e;
    const bool found = has(scale_q32(__shfl_sync(kAllLanes, up_to, 31), scratch->words[0]), up_to, e);
    return {found, found ? scratch->id[first + e] : 0};
  }
};

template <Kind kind>
__global__ void __launch_bounds__(kShortThreads, 1) short_rows(const __grid_constant__ Params p) {
  constexpr bool logits = kind == Kind::logits;
  __shared__ ShortScratch scratch;
  const Cluster cluster(1);
  const int64_t row_idx = blockIdx.x;
  const RowSlice<kind, 1> row(p.rows + row_idx * p.row_bytes, p.dtype, p.length, kTile, cluster);
  const bool is_rng_thread = threadIdx.x >= blockDim.x - 32;
  ShortRow<kind> elements = {&scratch, cluster.lane, cluster.warp, cluster.warps_per_block, row.index(row.begin, 0)};
  pdl_wait();
  pdl_trigger();
  typename RowSlice<kind, 1>::template Raw<1> raw;
  if (row.begin < p.length) raw = row.template load<1>(row.begin);
  const u64 seed = is_rng_thread ? p.seed.at(row_idx) : 0, offset = is_rng_thread ? p.offset.at(row_idx) : 0;
  const float temperature = logits ? p.temperature.at(row_idx) : 1.f, min_p = clamp_min_p(p.min_p.at(row_idx));
  const u64 q32 = top_p_q32(p.top_p.at(row_idx));
  const int64_t top_k = p.top_k.at(row_idx);
  const bool has_top_k = top_k > 0 && top_k < p.length;
  if (has_top_k && top_k > kMaxSmallK) return;  // threshold_rows.cuh draws this row
  const bool greedy = (logits && temperature <= 0.f) || (has_top_k ? top_k == 1 : q32 == 0);
  if (is_rng_thread) random_words(seed, offset, 0, scratch.words);

#pragma unroll
  for (int e = 0; e < 4; ++e) elements.v[e] = logits ? -INFINITY : 0.f;
  if (row.begin < p.length) row.template unpack<1>(raw, elements.v);
  const float most =
      ptx::max_nan(ptx::max_nan(elements.v[0], elements.v[1]), ptx::max_nan(elements.v[2], elements.v[3]));
  const u32 largest_key = isnan(most) ? ~0u : unsigned_order_key(most);
  const u32 top =
      __reduce_max_sync(kAllLanes, static_cast<u32>(elements.gather(__reduce_max_sync(kAllLanes, largest_key))));
  WeightFn<kind> weight_fn;
  weight_fn.top = top == ~0u ? not_a_number() : from_order_key(static_cast<int>(top ^ 0x80000000u));
  if (!(weight_fn.top > (logits ? -INFINITY : 0.f) && weight_fn.top < INFINITY) || isnan(temperature)) {
    if (threadIdx.x == 0) p.ids[row_idx] = 0, p.valid[row_idx] = false;
    return;
  }
  const float highest = weight_fn.top, factor = !logits && highest < 0x1p-60f ? 0x1p64f : 1.f;
  if constexpr (logits) weight_fn.set_temperature(temperature <= 0.f ? 1.f : temperature);
  weight_fn.least = logits ? min_p : __fmul_rn(min_p, highest) * factor;
  weight_fn.top *= factor;
  weight_fn.set_scale(p.length);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    elements.mass[e] = mass_of(greedy && elements.v[e] < highest ? 0.f : weight_fn.scaled(elements.v[e] * factor));
  }
  Result result;
  if (has_top_k && !greedy) {
    const bool of_row = p.joint && q32 < kQ32One;
    const u64 all = of_row ? warp_sum(elements.gather(warp_sum(elements.sum()))) : 0;
    result = elements.draw_from_candidates(static_cast<int>(top_k), top, q32, all);
  } else {
    result = elements.draw(q32, greedy, [&](u32 draw_round) {
      if (is_rng_thread) random_words(seed, offset, draw_round, scratch.words);
    });
  }
  if (result.is_writer) p.ids[row_idx] = result.id, p.valid[row_idx] = true;
}

}  // namespace kestrel::sampling
