// One id per row from what min-p and top-p keep of it, without sorting and without a search for a threshold.
//
// Computes:   reference_sampling.py for rows without top-k. Four ids are drawn from all mass at once; the first that
//             top-p keeps is the result. An id is kept if the mass of the entries before it (larger, or equal with a
//             lower id) is below the goal. If none is, four are drawn from the entries before all four.
// Built for:  rows of a vocabulary, from one row (latency) to hundreds (bandwidth).
// Must move:  a row once, 4 V bytes; about 14 instructions an element.
// Split:      a row per team of blocks, a contiguous piece of whole chunks per warp, which keeps the masses of up to 32
//             groups of chunks, one a lane: only the chunk that holds an id is read again. A team's warps exchange
//             their sums at one barrier.
// Shortcuts:  of long rows a part is looked at first, for two values between which the smallest kept entry should lie;
//             what is >= each is weighed while the row is read and decides about most ids. About the others decides a
//             pass that adds floats, with a bound on its error, and where that is not enough, one that adds masses.
// Measured:   on an H200, of the limit (launches and bytes): no filter 93 % at 256x128256 and 52 % at 1x51200; top-p
//             44 % and 21 % (results/h200.json; predicted for 256x128256: 88 % and 68 %).
#pragma once

#include "params.cuh"
#include "stripe.cuh"

namespace kestrel::sampling {

constexpr int kDrawn = 4;  // ids at once

enum Verdict : int { kUnknown, kKept, kDropped };

struct Drawn {
  int index;
  float value;
  int verdict;
};

// Shared by a block, beside the exchange.
struct alignas(16) DrawScratch {
  Drawn drawn[kDrawn];
  u32 words[4];
  int guess;
};

// What the caller asks of one row.
template <Kind kind>
struct Asked {
  float temperature, min_p;
  u64 parts;    // top-p
  bool greedy;  // the first of the largest elements
  __device__ __forceinline__ Asked(const Params& p, int64_t row)
      : temperature(kind == Kind::logits ? p.temperature.at(row) : 1.f),
        min_p(p.min_p.at(row)),
        parts(parts_of(p.top_p.at(row))),
        greedy(parts == 0 || (kind == Kind::logits && temperature <= 0.f)) {}
};

// A quarter of an octave around a guess: two standard deviations of it.
__device__ __forceinline__ float high_of(int guess) { return __int_as_float(guess + (1 << 21)); }
__device__ __forceinline__ float low_of(int guess) { return __int_as_float(max(guess - (1 << 21), 0)); }

__device__ __forceinline__ float warp_float_sum(float v) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) v += __shfl_xor_sync(kAllLanes, v, other);
  return v;
}

// few: rows; then every instruction that a pass does not have counts, since it is fetched for one use.
template <Kind kind, int tiles, bool few>
struct Draw {
  using Row = Stripe<kind, tiles>;
  // Tiles at a time: in the pass that adds floats, and in the rare one that adds masses again.
  static constexpr int kOften = few ? 1 : tiles, kSeldom = few || tiles == 1 ? 1 : 2;
  const Team& team;
  const Row& row;
  Weigher<kind>& weigher;
  Exchange& exchange;
  DrawScratch* scratch;
  float factor = 1.f;  // what elements are multiplied with: 2^64 where the row is tiny
  // What is drawn from: elements from `at` on up to index `last`, from `above` on behind it.
  float at = -INFINITY, above = -INFINITY;
  int last = INT32_MAX;
  u64 mine = 0;  // the mass of a group of chunks

  // From now on, only what comes before an entry.
  __device__ __forceinline__ void cut(float value, int index) {
    at = value;
    above = from_ordered(ordered(value + 0.f) + 1);
    last = index;
  }
  __device__ __forceinline__ bool has(float v, int i) const { return v >= (i < last ? at : above); }
  __device__ __forceinline__ float scaled(float v, int i) const { return has(v, i) ? weigher.scaled(v * factor) : 0.f; }

  // ---- passes over the row ------------------------------------------------------------------------------------------

  // The largest element of this warp's piece.
  __device__ __forceinline__ float largest() const {
    float most = -INFINITY;
    row.template each<tiles>([&](const float (&v)[Row::size], int) {
#pragma unroll
      for (int e = 0; e < Row::size; ++e) most = max_or_nan(most, v[e]);
    });
    return most;
  }

  // The same and, as if the row were a common one, the masses; and the sums of what is >= high and >= low.
  struct First {
    float most = -INFINITY, from_high = 0.f, from_low = 0.f;
  };
  __device__ __forceinline__ First read(float high, float low) {
    First first;
    Groups groups(team.lane, row.group);
    row.template each<tiles>([&](const float (&v)[Row::size], int) {
      u32 upper = 0, lower = 0;
#pragma unroll
      for (int e = 0; e < Row::size; ++e) {
        first.most = max_or_nan(first.most, v[e]);
        const float w = fmaxf(v[e], 0.f);
        const float whole = __fmaf_rz(w, weigher.scale, 0x1p23f);
        const float rest = __fmaf_rn(w, weigher.scale, -__fadd_rn(whole, -0x1p23f));
        upper += __float_as_uint(whole);
        lower += __float_as_uint(__fmaf_rn(rest, 0x1p20f, 0x1p23f));
        if (v[e] >= high) first.from_high += v[e];
        if (v[e] >= low) first.from_low += v[e];
      }
      upper = __reduce_add_sync(kAllLanes, upper - Row::size * MassSum::kBias);
      lower = __reduce_add_sync(kAllLanes, lower - Row::size * MassSum::kBias);
      groups.add(mine, (static_cast<u64>(upper) << 20) + lower);
    });
    return first;
  }

  // The masses of what is drawn from.
  __device__ __forceinline__ void weigh() {
    mine = 0;
    Groups groups(team.lane, row.group * (tiles / kSeldom));
    row.template each<kSeldom>([&](const float (&v)[4 * kSeldom], int base) {
      u32 upper = 0, lower = 0;
#pragma unroll
      for (int e = 0; e < 4 * kSeldom; ++e) {
        const float x = scaled(v[e], row.index(base, e));
        const float whole = __fadd_rz(x, 0x1p23f);
        const float rest = __fadd_rn(x, -__fadd_rn(whole, -0x1p23f));
        upper += __float_as_uint(whole);
        lower += __float_as_uint(__fmaf_rn(rest, 0x1p20f, 0x1p23f));
      }
      upper -= 4 * kSeldom * MassSum::kBias;
      lower = __reduce_add_sync(kAllLanes, lower - 4 * kSeldom * MassSum::kBias);
      const u32 part = __reduce_add_sync(kAllLanes, upper & 0xffffu), more = __reduce_add_sync(kAllLanes, upper >> 16);
      groups.add(mine, (static_cast<u64>(more) << 36) + (static_cast<u64>(part) << 20) + lower);
    });
  }

  // About the mass / 2^20 of what is drawn from.
  __device__ __forceinline__ float estimate() const {
    float sum = 0.f;
    row.template each<kOften>([&](const float (&v)[4 * kOften], int base) {
#pragma unroll
      for (int e = 0; e < 4 * kOften; ++e) sum += scaled(v[e], row.index(base, e));
    });
    return sum;
  }

  // Whether a mass is below the goal (an entry it comes before is kept), from its sum in floats. n floats, added in any
  // order, are off by n 2^-24 of their sum; masses are rounded to integers. The same in every warp, whatever its piece:
  // they branch on it.
  __device__ __forceinline__ Verdict compare(float sum, u64 goal) const {
    const int added = row.longest / 32 + Row::size + 5 + team.all_warps;
    const float off = static_cast<float>(2 * added + 8) * 0x1p-24f, rounded = static_cast<float>(row.length) * 0x1p-20f;
    const float wanted = __ull2float_rn(goal) * 0x1p-20f;
    if (__fmaf_ru(sum, off, sum) + rounded < wanted * (1.f - 0x1p-22f)) return kKept;
    if (__fmaf_rd(sum, -off, sum) - rounded > wanted * (1.f + 0x1p-22f)) return kDropped;
    return kUnknown;
  }

  // ---- the guess ----------------------------------------------------------------------------------------------------

  // The value from which on a part of the elements of the row weighs about `part` of it: every warp looks at four
  // tiles, the same in every block, and bisects twelve octaves; the block takes the mean.
  __device__ __forceinline__ int guess(float part) const {
    constexpr int kSeen = 4;
    const int own = threadIdx.x >> 5, all = (row.length - 1) / kTile;
    float v[4 * kSeen];
    const int tile = static_cast<int>(int64_t{own} * all / team.warps);
    row.template unpack<kSeen>(row.template load<kSeen>(tile * kTile), v);
    float most = 0.f, sum = 0.f;
#pragma unroll
    for (int e = 0; e < 4 * kSeen; ++e) most = fmaxf(most, v[e]), sum += fmaxf(v[e], 0.f);
    const int top = __reduce_max_sync(kAllLanes, __float_as_int(most));
    const float unit = __fdividef(0x1p22f, __int_as_float(top));  // every element counts up to 2^22
    const u32 goal =
        static_cast<u32>(static_cast<float>(__reduce_add_sync(kAllLanes, __float2uint_rz(sum * unit))) * part);
    int low = max(top - (12 << 23), 0);
#pragma unroll 1
    for (int step = (12 << 23) / 2; step >= (12 << 23) / 128; step /= 2) {
      const float pivot = __int_as_float(low + step);
      float from = 0.f;
#pragma unroll
      for (int e = 0; e < 4 * kSeen; ++e) from += v[e] >= pivot ? v[e] : 0.f;
      if (__reduce_add_sync(kAllLanes, __float2uint_rz(from * unit)) >= goal) low += step;
    }
    if (team.lane == 0) atomicAdd(&scratch->guess, (low + (12 << 23) / 256) / team.warps);
    __syncthreads();
    return scratch->guess;
  }

  // ---- one id -------------------------------------------------------------------------------------------------------

  // The element at which the running mass passes the point, by the warp that has it; `before` is the mass of the warps
  // before. mass: of the element.
  __device__ __forceinline__ Drawn locate(u64 point, u64 before, u64* mass) const {
    u64 running = before;
    int base = row.begin;
    if (row.end - row.begin > Row::chunk) {
      const u64 up_to = before + warp_inclusive_sum(mine, team.lane);
      const int group = __ffs(__ballot_sync(kAllLanes, up_to > point)) - 1;
      running = __shfl_sync(kAllLanes, up_to - mine, group);
      base += group * row.group * Row::chunk;
    }
    auto raw = row.template load<1>(base);
    // A row that changes under this kernel may lead past the end.
#pragma unroll 1
    for (;; base += kTile) {
      float v[4];
      row.template unpack<1>(raw, v);
      raw = row.template load<1>(base + kTile);
      u64 each[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) each[e] = mass_of(scaled(v[e], row.index(base, e)));
      const u64 sum = each[0] + each[1] + each[2] + each[3], tile = warp_sum(sum);
      if (running + tile <= point && base + kTile < row.end) {
        running += tile;
        continue;
      }
      u64 reached = running + warp_inclusive_sum(sum, team.lane);
      const int lane = (__ffs(__ballot_sync(kAllLanes, reached > point)) - 1) & 31;
      reached -= sum;
      int found = 0;
#pragma unroll
      for (int e = 0; e < 3; ++e) {
        reached += each[e];
        if (reached <= point) found = e + 1, each[0] = each[e + 1], v[0] = v[e + 1];
      }
      *mass = __shfl_sync(kAllLanes, each[0], lane);
      const int index = min(__shfl_sync(kAllLanes, row.index(base, found), lane), row.length - 1);
      return {index, __shfl_sync(kAllLanes, v[0], lane), kUnknown};
    }
  }
};

// few: rows, so that a block has a multiprocessor to itself; else two share it. Other architectures than sm_90 would
// spill with so few registers.
constexpr int kMostOfMany = 384;  // threads
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
constexpr int kSharers = 2;
#else
constexpr int kSharers = 1;
#endif
template <Kind kind, int tiles, bool few>
__global__ void __launch_bounds__(few ? kMostThreads : kMostOfMany, few ? 1 : kSharers)
    draw_rows(const __grid_constant__ Params p) {
  constexpr bool logits = kind == Kind::logits;
  using D = Draw<kind, tiles, few>;
  const Team team(p.blocks);
  team.arrive();
  const int64_t number = team.row();
  DrawScratch* scratch = reinterpret_cast<DrawScratch*>(dynamic_shared_memory());
  Exchange exchange = {reinterpret_cast<u64*>(scratch + 1), 0};
  const Stripe<kind, tiles> row(p.rows + number * p.row_bytes, p.dtype, p.length, p.per_warp, team);
  const bool first_warp = team.warp == 0 && team.lane == 0, keyed = threadIdx.x == blockDim.x - 32;
  if (threadIdx.x == 0) scratch->guess = 0;
  pdl_wait();
  pdl_trigger();
  if (p.top_k.values) {  // rows with top-k are drawn by other kernels
    const int64_t k = p.top_k.at(number);
    if (k > 0 && k < p.length) return team.wait();
  }
  Weigher<kind> weigher;
  weigher.set_common(p.length);
  D draw = {team, row, weigher, exchange, scratch};
  bool early, guesses;
  typename D::First first;
  {
    // Read the row; of probabilities find the mass as well, as if the row were a common one.
    const Asked<kind> asked(p, number);
    early = !logits && !(asked.min_p > 0.f) && !asked.greedy;
    guesses = tiles > 1 && !few && early && asked.parts < kWhole;
    const u64 seed = keyed ? p.seed.at(number) : 0, offset = keyed ? p.offset.at(number) : 0;
    if constexpr (logits) {
      first.most = draw.largest();
    } else {
      float high = INFINITY, low = INFINITY;
      if (guesses) {
        __syncthreads();
        const int middle = draw.guess(static_cast<float>(asked.parts) * 0x1p-32f);
        high = high_of(middle), low = low_of(middle);
      }
      first = draw.read(high, low);
    }
    if (keyed) random_words(seed, offset, 0, scratch->words);
  }
  team.wait();
  exchange.put(
      team, 1,
      static_cast<u32>(__reduce_max_sync(kAllLanes, isnan(first.most) ? INT32_MAX : ordered(first.most + 0.f))));
  if (early) exchange.put(team, 0, warp_sum(draw.mine));
  if (guesses) exchange.put_floats(team, 2, warp_float_sum(first.from_high), warp_float_sum(first.from_low));
  exchange.share(team);
  weigher.top = from_ordered(exchange.largest(team, 1));
  const auto [temperature, min_p, parts, greedy] = Asked<kind>(p, number);  // again: registers are few
  if (!(weigher.top > (logits ? -INFINITY : 0.f) && weigher.top < INFINITY) || isnan(temperature)) {
    if (first_warp) p.ids[number] = 0, p.valid[number] = false;
    return;
  }
  bool weighed = early && weigher.is_common();  // the masses of what is drawn from are known
  guesses = guesses && weighed;
  if (!weighed) {
    const float part = part_of(min_p);
    if (greedy) draw.at = draw.above = weigher.top;
    if constexpr (logits) {
      weigher.set_temperature(temperature <= 0.f ? 1.f : temperature);
      weigher.least = part;
    } else {
      weigher.least = __fmul_rn(part, weigher.top);
      if (weigher.top < 0x1p-60f) draw.factor = 0x1p64f, weigher.top *= 0x1p64f, weigher.least *= 0x1p64f;
    }
    weigher.set_scale(p.length);
  }

  const bool sure = greedy || parts == kWhole;  // whatever is drawn is kept
  u64 goal = 0;
  u32 turn = 0;
  int n = kDrawn;  // which of the drawn ids is looked at
  Drawn cut = {};  // the first of those that were dropped
#pragma unroll 1
  for (;;) {
    if (!weighed) {
      draw.weigh();
      exchange.put(team, 0, warp_sum(draw.mine));
      exchange.share(team);
    }
    const u64 all = exchange.sum(team, 0);
    if (goal == 0) goal = max(u64{1}, fraction(all, parts));
    if (n < kDrawn) {  // the masses were to decide about this one
      cut = scratch->drawn[n++];
      if (all < goal) {
        if (first_warp) p.ids[number] = cut.index, p.valid[number] = true;
        return;
      }
    } else {
      const u64 of_warp = exchange.shared(team, 0)[team.warp], before = exchange.sum_of(team, 0, 0, team.warp);
#pragma unroll 1
      for (n = 0; n < (sure ? 1 : kDrawn); ++n) {
        const u64 point = greedy ? 0 : fraction(all, scratch->words[n]);
        if (point < before || point - before >= of_warp) continue;
        u64 mass;
        Drawn drawn = draw.locate(point, before, &mass);
        if (sure) {
          if (team.lane == 0) p.ids[number] = drawn.index, p.valid[number] = true;
          return;
        }
        if (all - mass < goal) drawn.verdict = kKept;
        if (guesses) {
          const float2 from = exchange.float_sums(team, 2);
          if (drawn.value >= high_of(scratch->guess) && draw.compare(from.x * weigher.scale, goal) == kKept) {
            drawn.verdict = kKept;
          }
          if (drawn.value < low_of(scratch->guess) && draw.compare(from.y * weigher.scale, goal) == kDropped) {
            drawn.verdict = kDropped;
          }
        }
#pragma unroll 1
        for (int b = team.lane; b < team.blocks; b += 32) in_block(scratch, b, team.blocks)->drawn[n] = drawn;
      }
      if (sure) return;
      team.barrier();
      cut = {INT32_MAX, -INFINITY, kUnknown};
      n = 0;
      guesses = false;
    }

    // The first that is kept, or else the first of all in the order.
    weighed = false;
#pragma unroll 1
    for (; n < kDrawn; ++n) {
      Drawn drawn = scratch->drawn[n];
      if (drawn.value < cut.value || (drawn.value == cut.value && drawn.index >= cut.index)) continue;
      if (drawn.verdict == kUnknown) {
        draw.cut(drawn.value, drawn.index);
        exchange.put_floats(team, 1, warp_float_sum(draw.estimate()), 0.f);
        exchange.share(team);
        drawn.verdict = draw.compare(exchange.float_sums(team, 1).x, goal);
      }
      if (drawn.verdict == kUnknown) break;
      if (drawn.verdict == kKept) {
        if (first_warp) p.ids[number] = drawn.index, p.valid[number] = true;
        return;
      }
      cut = drawn;
    }
    if (n == kDrawn) {
      draw.cut(cut.value, cut.index);
      if (keyed) random_words(p.seed.at(number), p.offset.at(number), ++turn, scratch->words);
    }
  }
}

}  // namespace kestrel::sampling
