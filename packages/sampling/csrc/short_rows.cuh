// One id per row of at most 4096 elements: with or without top-k up to 128, top-p and min-p.
//
// Computes:  reference_sampling.py, integer for integer.
// Built for: a few to some hundred short rows, where a launch and the instructions on the way to the id are the time.
// Must move: a row once, 4 V bytes; by its machine code some 400 instructions a thread without a filter, 600 with
// top-p,
//            1000 with top-k.
// Split:     a row per block, four neighbours per thread, which keeps them and their masses in registers: nothing is
//            read twice, and every sum is one of integers, so that nothing has to be decided again. One more warp than
//            the elements need makes the random words meanwhile.
// Filters:   without top-k, four ids are drawn at once, and what comes before each is weighed, one after the other,
//            until one is kept. With top-k, counts at four values at a time narrow the row down to little more than k
//            elements, which are listed in the order of the row; every pair of them is compared.
// Measured:  32x1024 1.82, 2.95 and 3.63 us, 1.17, 0.72 and 0.59 of the limit (results/h200.json). Predicted
//            1.5 us without a filter, 2.2 with top-p, 2.5 with top-k then top-p.
#pragma once

#include "params.cuh"
#include "stripe.cuh"

namespace kestrel::sampling {

constexpr int kShortThreads = 1024;
constexpr int kPivots = 4;
static_assert(kShortRow / 4 <= kShortThreads && kShortRow < 1 << 16);

struct alignas(16) ShortScratch {
  u64 slots[2][32];  // a number per warp, and the next one
  u64 mass[kFew];    // of the list,
  u64 before[kFew];  // and of what comes before an entry in the order; ~0 for what top-k drops
  u32 rank[kFew];
  int id[kFew];
  int2 drawn[kDrawn];  // index and value
  u32 words[4];
};

struct Result {
  bool mine;  // this thread writes it
  int id;
};

// A number that orders elements as their values do, above 0.
__device__ __forceinline__ u32 rank_of(float v) { return static_cast<u32>(ordered(v + 0.f)) ^ 0x80000000u; }

template <Kind kind>
struct ShortRow {
  static constexpr u64 kCut = ~u64{0};
  ShortScratch* scratch;
  int lane, warp, warps, first;  // index of the first element of this thread
  float v[4];
  u64 mass[4];
  u32 round = 0;

  // The numbers of all warps, that of warp w in lane w; what was written before can be read behind it.
  __device__ __forceinline__ u64 gather(u64 of_warp) {
    u64* slots = scratch->slots[round++ & 1];
    if (lane == 0) slots[warp] = of_warp;
    __syncthreads();
    return lane < warps ? slots[lane] : 0;
  }
  __device__ __forceinline__ bool is_before(int e, int2 drawn) const {
    const float value = __int_as_float(drawn.y);
    return v[e] > value || (v[e] == value && first + e < drawn.x);
  }
  // 0 for what has no mass.
  __device__ __forceinline__ u32 rank(int e) const { return mass[e] > 0 ? rank_of(v[e]) : 0; }
  __device__ __forceinline__ u64 sum() const { return mass[0] + mass[1] + mass[2] + mass[3]; }

  // The element at which the running mass passes the point; `up_to`: with this thread's elements.
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

  // Without top-k. next_words(turn) makes the words of another round.
  template <typename F>
  __device__ __forceinline__ Result draw(u64 parts, bool greedy, F next_words) {
    const bool sure = greedy || parts == kWhole;  // whatever is drawn is kept
    u64 goal = 0;
#pragma unroll 1
    for (u32 turn = 1;; ++turn) {
      u64 up_to = warp_inclusive_sum(sum(), lane);
      const u64 of_warps = gather(__shfl_sync(kAllLanes, up_to, 31)), all = warp_sum(of_warps);
      up_to += warp_sum(lane < warp ? of_warps : 0);
      int e;
      // Every lane works out one of the points.
      const u64 points = greedy ? 0 : fraction(all, scratch->words[lane % kDrawn]);
      if (sure) return {has(__shfl_sync(kAllLanes, points, 0), up_to, e), first + e};
      if (goal == 0) goal = max(u64{1}, fraction(all, parts));
#pragma unroll 1
      for (int n = 0; n < kDrawn; ++n) {
        if (has(__shfl_sync(kAllLanes, points, n), up_to, e)) {
          scratch->drawn[n] = {first + e, __float_as_int(value(e))};
        }
      }
      __syncthreads();
      int2 cut = {INT32_MAX, __float_as_int(-INFINITY)};  // the first of those that were dropped
#pragma unroll 1
      for (int n = 0; n < kDrawn; ++n) {
        const int2 drawn = scratch->drawn[n];
        const float mine = __int_as_float(drawn.y), other = __int_as_float(cut.y);
        if (mine < other || (mine == other && drawn.x >= cut.x)) continue;
        u64 before = 0;
#pragma unroll
        for (int e = 0; e < 4; ++e) before += is_before(e, drawn) ? mass[e] : 0;
        if (warp_sum(gather(warp_sum(before))) < goal) return {threadIdx.x == 0, drawn.x};
        cut = drawn;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) mass[e] = is_before(e, cut) ? mass[e] : 0;
      next_words(turn);
    }
  }

  // Lists k elements or a few more, the largest, in the order of the row; all that have mass where they are fewer.
  // top: the largest rank. Returns how many are listed.
  __device__ __forceinline__ int list(int& k, u32 top) {
    const int most = min(kFew, max(64, k + 16));
    u32 ranks[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) ranks[e] = rank(e);
    u32 low = 0, high = top + 1;  // fewer than k reach high, and more than `most` low
    u32 pivot[kPivots] = {high - (1u << 22), high - (1u << 23), high - (1u << 25), 1};
    int count = 0, chosen = 0;
    u64 of_warps;
#pragma unroll 1
    for (;;) {
      u32 counts[2] = {};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int j = 0; j < kPivots; ++j) counts[j / 2] += ranks[e] >= pivot[j] ? 1u << (16 * (j % 2)) : 0;
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
      if (high - low == 1) {  // more equal ones than fit: the first of them
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          ranks[e] = ranks[e] > low ? ~0u : ranks[e] == low ? ~static_cast<u32>(first + e + 1) : 0;
        }
        low = ~(kShortRow + 1u), high = ~0u;
      }
      const u32 step = max(1u, (high - low) / (kPivots + 1));
#pragma unroll
      for (int j = 0; j < kPivots; ++j) pivot[j] = min(low + (kPivots - j) * step, high - 1);
    }
    int place = static_cast<int>(
        __reduce_add_sync(kAllLanes, lane < warp ? static_cast<u32>(of_warps >> (16 * chosen) & 0xffff) : 0));
    bool listed[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      listed[e] = ranks[e] >= low;
      place += __popc(__ballot_sync(kAllLanes, listed[e]) & ((1u << lane) - 1));
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!listed[e]) continue;
      scratch->id[place] = first + e, scratch->rank[place] = rank(e), scratch->mass[place] = mass[e];
      ++place;
    }
    return count;
  }

  // With top-k. all: the mass that top-p counts, 0 for what top-k keeps.
  __device__ __forceinline__ Result draw_listed(int k, u32 top, u64 parts, u64 all) {
    const int count = list(k, top);
    __syncthreads();
    // How many come before an entry, and their mass: four threads for each entry.
#pragma unroll 1
    for (int base = 8 * warp; base < count; base += 8 * warps) {
      const int entry = min(base + lane / 4, count - 1);
      const u32 mine = scratch->rank[entry];
      u64 before = 0;
      int place = 0;
#pragma unroll 4
      for (int other = lane % 4; other < count; other += 4) {
        const u32 its = scratch->rank[other];
        const bool is_before = its > mine || (its == mine && other < entry);
        place += is_before;
        before += is_before ? scratch->mass[other] : 0;
      }
#pragma unroll
      for (int other = 1; other < 4; other *= 2) {
        place += __shfl_xor_sync(kAllLanes, place, other);
        before += __shfl_xor_sync(kAllLanes, before, other);
      }
      if (lane % 4 == 0) scratch->before[entry] = place < k ? before : kCut;
    }
    __syncthreads();
    if (warp > 0) return {};
    u64 before[4];
    first = 4 * lane;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      before[e] = first + e < count ? scratch->before[first + e] : kCut;
      mass[e] = before[e] != kCut ? scratch->mass[first + e] : 0;
    }
    const u64 goal = max(u64{1}, fraction(all ? all : warp_sum(sum()), parts));
#pragma unroll
    for (int e = 0; e < 4; ++e) mass[e] = before[e] < goal ? mass[e] : 0;
    const u64 up_to = warp_inclusive_sum(sum(), lane);
    int e;
    const bool found = has(fraction(__shfl_sync(kAllLanes, up_to, 31), scratch->words[0]), up_to, e);
    return {found, found ? scratch->id[first + e] : 0};
  }
};

template <Kind kind>
__global__ void __launch_bounds__(kShortThreads, 1) short_rows(const __grid_constant__ Params p) {
  constexpr bool logits = kind == Kind::logits;
  __shared__ ShortScratch scratch;
  const Team team(1);
  const int64_t number = blockIdx.x;
  const Stripe<kind, 1> row(p.rows + number * p.row_bytes, p.dtype, p.length, kTile, team);
  const bool keyed = threadIdx.x >= blockDim.x - 32;
  ShortRow<kind> held = {&scratch, team.lane, team.warp, team.warps, row.index(row.begin, 0)};
  pdl_wait();
  pdl_trigger();
  typename Stripe<kind, 1>::template Raw<1> raw;
  if (row.begin < p.length) raw = row.template load<1>(row.begin);
  const u64 seed = keyed ? p.seed.at(number) : 0, offset = keyed ? p.offset.at(number) : 0;
  const float temperature = logits ? p.temperature.at(number) : 1.f, min_p = part_of(p.min_p.at(number));
  const u64 parts = parts_of(p.top_p.at(number));
  const int64_t top_k = p.top_k.at(number);
  const bool filtered = top_k > 0 && top_k < p.length;
  if (filtered && top_k > kFew) {  // sample_rows.cuh draws it
    if (threadIdx.x == 0) p.ids[number] = -1;
    return;
  }
  const bool greedy = (logits && temperature <= 0.f) || (filtered ? top_k == 1 : parts == 0);
  if (keyed) random_words(seed, offset, 0, scratch.words);

#pragma unroll
  for (int e = 0; e < 4; ++e) held.v[e] = logits ? -INFINITY : 0.f;
  if (row.begin < p.length) row.template unpack<1>(raw, held.v);
  const float most = max_or_nan(max_or_nan(held.v[0], held.v[1]), max_or_nan(held.v[2], held.v[3]));
  const u32 key = isnan(most) ? ~0u : rank_of(most);
  const u32 top = __reduce_max_sync(kAllLanes, static_cast<u32>(held.gather(__reduce_max_sync(kAllLanes, key))));
  Weigher<kind> weigher;
  weigher.top = top == ~0u ? not_a_number() : from_ordered(static_cast<int>(top ^ 0x80000000u));
  if (!(weigher.top > (logits ? -INFINITY : 0.f) && weigher.top < INFINITY) || isnan(temperature)) {
    if (threadIdx.x == 0) p.ids[number] = 0, p.valid[number] = false;
    return;
  }
  const float highest = weigher.top, factor = !logits && highest < 0x1p-60f ? 0x1p64f : 1.f;
  if constexpr (logits) weigher.set_temperature(temperature <= 0.f ? 1.f : temperature);
  weigher.least = logits ? min_p : __fmul_rn(min_p, highest) * factor;
  weigher.top *= factor;
  weigher.set_scale(p.length);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    held.mass[e] = mass_of(greedy && held.v[e] < highest ? 0.f : weigher.scaled(held.v[e] * factor));
  }
  Result result;
  if (filtered && !greedy) {
    const bool of_row = p.joint && parts < kWhole;
    const u64 all = of_row ? warp_sum(held.gather(warp_sum(held.sum()))) : 0;
    result = held.draw_listed(static_cast<int>(top_k), top, parts, all);
  } else {
    result = held.draw(parts, greedy, [&](u32 turn) {
      if (keyed) random_words(seed, offset, turn, scratch.words);
    });
  }
  if (result.mine) p.ids[number] = result.id, p.valid[number] = true;
}

}  // namespace kestrel::sampling
