// One id per row from what min-p and top-p keep of it, without sorting and without a search for a threshold.
//
// Computes:   reference_sampling.py for rows without top-k. Four ids are drawn from all mass at once; the first that
//             top-p keeps is the result. An id is kept if the mass of the entries before it (larger, or equal with a
//             lower id) is below the goal. If none is, four are drawn from the entries before all four.
// Built for:  rows of a vocabulary, from one row (latency) to hundreds (bandwidth).
// Must move:  a row once, 4 V bytes; about 10 instructions an element without a filter, 20 with a window.
// Split:      a row per team of blocks, a contiguous piece of whole chunks per warp, which keeps the masses of up to 32
//             groups of chunks, one a lane: only the chunk that holds an id is looked at again. A team's warps send
//             each other their sums (mail.cuh).
// Judgement:  one pass over the row adds what comes before each of the four ids in floats, with a bound on their error;
//             where that is not enough for one, another adds masses. Blocks keep their elements in shared memory for
//             these passes. Rows that are too many or too long for that are looked at in part first, for a window of
//             values in which the smallest kept entry should lie: while the row is read, what lies above the window is
//             added up, and what lies in it by bins, which decides about nearly all ids; the others need the pass.
// Measured:   on an H200, of the limit (launches and bytes): no filter 93 % at 256x128256 and 51 % at 1x51200; top-p
//             71 % and 30 % (results/h200_designs_later.json; predicted for 256x128256: 88 % and 68 %).
#pragma once

#include "mail.cuh"
#include "params.cuh"
#include "stripe.cuh"

namespace kestrel::sampling {

constexpr int kChunkTiles = 4;  // that a warp reads at once

enum Verdict : int { kUnknown, kKept, kDropped };

struct alignas(16) Drawn {
  int index;
  float value;
  int verdict;
  int unused;
  __device__ __forceinline__ bool is_before(const Drawn& other) const {
    return value > other.value || (value == other.value && index < other.index);
  }
};

constexpr int kWindowBits = 21;  // of a float's bits: a quarter of an octave
constexpr int kWindowBins = 256;

// Shared by a block, beside the mail.
struct alignas(16) DrawScratch {
  Drawn drawn[kDrawn];
  u32 words[4];
  u32 turn;  // which of the draws they are for
  int guess;
  u32 inside;             // of the elements that were looked at for it, how many are in the window around it
  u32 bins[kWindowBins];  // the weight of this block's elements in the window, times Window::unit
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

// The values around a guess at the smallest kept entry, in bins of equal size: what lies in them is summed apart, so
// that what comes before an element in the window is known but for its own bin.
struct Window {
  static constexpr int kBinBits = kWindowBits - 8;
  static_assert(kWindowBins == 1 << (kWindowBits - kBinBits));
  int begin = 0x7fc00000;  // as bits of a float, like an element; of no number
  float unit = 0.f;

  __device__ __forceinline__ Window() {}
  // longest: elements that one block may count.
  __device__ __forceinline__ Window(int guess, int longest) : begin(max(guess - (1 << (kWindowBits - 1)), 1 << 23)) {
    // So that `longest` elements, each less than 2^(its exponent + 1), stay below 2^32.
    const int exponent = (begin + (1 << kWindowBits)) >> 23;
    unit = __int_as_float(max(1, min(254, 253 - exponent + min(20, __clz(longest)))) << 23);
  }
  // Of a value that is not negative: from 0 to 2^kWindowBits within the window, below 0 for less.
  __device__ __forceinline__ int place(float v) const { return __float_as_int(v) - begin; }
};

template <Kind kind, bool looks_out>
struct Draw {
  static constexpr int tiles = kChunkTiles;
  using Row = Stripe<kind, tiles>;
  static constexpr int kOften = looks_out ? tiles : 2;  // tiles at a time in the pass that adds floats
  const Team& team;
  Row& row;
  Weigher<kind>& weigher;
  Mail& mail;
  DrawScratch* scratch;
  float factor = 1.f;  // what elements are multiplied with: 2^64 where the row is tiny
  // What is drawn from: elements from `at` on up to index `last`, larger ones behind it.
  float at = -INFINITY;
  int last = INT32_MAX;
  u64 mine = 0;  // the mass of a group of chunks

  // From now on, only what comes before an entry.
  __device__ __forceinline__ void cut(float value, int index) {
    at = value;
    last = index;
  }
  __device__ __forceinline__ bool has(float v, int i) const { return i < last ? v >= at : v > at; }
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

  // The same and, as if the row were a common one, the masses; and the sums of what lies in the window and above it.
  struct First {
    float most = -INFINITY, above = 0.f;
  };
  template <bool windowed>
  __device__ __forceinline__ First read(const Window& window) {
    First first;
    const u32 bins = shared_address(scratch->bins);
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
        if constexpr (windowed) {
          const int place = window.place(w);
          if (place >= 1 << kWindowBits) first.above += w;
          const u32 weight = __float_as_uint(__fmaf_rn(w, window.unit, 0x1p23f)) - MassSum::kBias;
          add_if(static_cast<u32>(place) < 1u << kWindowBits, bins + 4 * (static_cast<u32>(place) >> Window::kBinBits),
                 weight);
        }
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
    Groups groups(team.lane, row.group * tiles);
    row.template each<1>([&](const float (&v)[4], int base) {
      u32 upper = 0, lower = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float x = scaled(v[e], row.index(base, e));
        const float whole = __fadd_rz(x, 0x1p23f);
        const float rest = __fadd_rn(x, -__fadd_rn(whole, -0x1p23f));
        upper += __float_as_uint(whole);
        lower += __float_as_uint(__fmaf_rn(rest, 0x1p20f, 0x1p23f));
      }
      upper -= 4 * MassSum::kBias;
      lower = __reduce_add_sync(kAllLanes, lower - 4 * MassSum::kBias);
      const u32 part = __reduce_add_sync(kAllLanes, upper & 0xffffu), more = __reduce_add_sync(kAllLanes, upper >> 16);
      groups.add(mine, (static_cast<u64>(more) << 36) + (static_cast<u64>(part) << 20) + lower);
    });
  }

  // About the mass / 2^20 of what comes before each of the drawn entries. They have mass, so that nothing before them
  // is below a min-p.
  __device__ __forceinline__ void weigh_before(float (&sums)[kDrawn]) const {
    constexpr int chunk = kOften * kTile;
#pragma unroll
    for (int n = 0; n < kDrawn; ++n) sums[n] = 0.f;
    row.template each<kOften>([&](const float (&v)[4 * kOften], int base) {
      float w[4 * kOften];
#pragma unroll
      for (int e = 0; e < 4 * kOften; ++e) w[e] = kind == Kind::probs ? v[e] : weigher.scaled(v[e]);
#pragma unroll
      for (int n = 0; n < kDrawn; ++n) {
        const int index = scratch->drawn[n].index;
        const float value = scratch->drawn[n].value;
        const float from = base + chunk <= index ? value : from_ordered(ordered(value + 0.f) + 1);
#pragma unroll
        for (int e = 0; e < 4 * kOften; ++e) {
          if (v[e] >= from) sums[n] += w[e];
        }
        if (base <= index && index < base + chunk) {
#pragma unroll
          for (int e = 0; e < 4 * kOften; ++e) sums[n] += v[e] == value && row.index(base, e) < index ? w[e] : 0.f;
        }
      }
    });
#pragma unroll
    for (int n = 0; n < kDrawn; ++n) {
      sums[n] = warp_float_sum(kind == Kind::probs ? sums[n] * factor * weigher.scale : sums[n]);
    }
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
    low += (12 << 23) / 256;
    const Window window(low, row.length);
    u32 inside = 0;
#pragma unroll
    for (int e = 0; e < 4 * kSeen; ++e) inside += static_cast<u32>(window.place(v[e])) < 1u << kWindowBits;
    inside = __reduce_add_sync(kAllLanes, inside);
    if (team.lane == 0) atomicAdd(&scratch->guess, low / team.warps), atomicAdd(&scratch->inside, inside);
    __syncthreads();
    // Sums of many equal elements would wait for each other.
    if (scratch->inside > 4 * kSeen * blockDim.x / 4) return INT32_MAX;
    return scratch->guess;
  }

  // What the sums of the first pass say of an entry. above: the sum of what is above the window.
  __device__ __forceinline__ Verdict look_up(float value, float above, u64 goal) const {
    const Window window(scratch->guess, row.longest * team.warps);
    const int place = window.place(value), own = max(place >> Window::kBinBits, -1);
    if (own >= kWindowBins) return compare(above * weigher.scale, goal) == kKept ? kKept : kUnknown;
    float sum = 0.f, same = 0.f;
#pragma unroll 1
    for (int block = 0; block < team.blocks; ++block) {
      const u32* bins = in_block(scratch->bins, block, team.blocks);
#pragma unroll
      for (int b = 0; b < kWindowBins; b += 32) {
        const int bin = b + team.lane;
        const float weight = __uint2float_rn(bins[bin]);
        sum += bin > own ? weight : 0.f;
        same += bin == own ? weight : 0.f;
      }
    }
    sum = warp_float_sum(sum), same = sum + warp_float_sum(same);
    // Every weight was rounded to an integer.
    const float off = __fdividef(0.5f, __int_as_float(window.begin) * window.unit) + 0x1p-18f,
                unit = __fdividef(1.f, window.unit);
    if (compare((above + sum * unit * (1.f - off)) * weigher.scale, goal) == kDropped) return kDropped;
    return own >= 0 && compare((above + same * unit * (1.f + off)) * weigher.scale, goal) == kKept ? kKept : kUnknown;
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
      if (base + kTile < row.end) raw = row.template load<1>(base + kTile);
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
      return {index, __shfl_sync(kAllLanes, v[0], lane), kUnknown, 0};
    }
  }
};

// Threads of a block that has a multiprocessor to itself; and of one that looks out, of which two share a
// multiprocessor. Other architectures than sm_90 would spill with so few registers.
constexpr int kThreadsAlone = 640, kThreadsOfSharers = 320;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
constexpr int kSharers = 2;
#else
constexpr int kSharers = 1;
#endif
template <Kind kind, bool looks_out>
__global__ void __launch_bounds__(looks_out ? kThreadsOfSharers : kThreadsAlone, looks_out ? kSharers : 1)
    draw_rows(const __grid_constant__ Params p) {
  constexpr bool logits = kind == Kind::logits;
  using D = Draw<kind, looks_out>;
  const Team team(p.blocks);
  const int64_t number = team.row();
  DrawScratch* scratch = reinterpret_cast<DrawScratch*>(dynamic_shared_memory());
  Mail mail = {reinterpret_cast<u64*>(scratch + 1)};
  char* const memory = reinterpret_cast<char*>(scratch + 1) + Mail::bytes(team.all_warps);
  typename D::Row row(p.rows + number * p.row_bytes, p.dtype, p.length, p.per_warp, team,
                      !looks_out && p.held ? memory : nullptr);
  const bool first_warp = team.warp == 0 && team.lane == 0, keyed = threadIdx.x == blockDim.x - 32;
  if (threadIdx.x == 0) {
    scratch->guess = 0;
    scratch->inside = 0;
    mail.begin(team);
  }
  if (keyed) scratch->turn = 0;  // it alone counts them
  team.arrive();
  if (looks_out) {
    for (int bin = threadIdx.x; bin < kWindowBins; bin += blockDim.x) scratch->bins[bin] = 0;
  }
  pdl_wait();
  pdl_trigger();
  if (p.top_k.values) {  // rows with top-k are drawn by other kernels
    const int64_t k = p.top_k.at(number);
    if (k > 0 && k < p.length) return team.wait();
  }
  Weigher<kind> weigher;
  weigher.set_common(p.length);
  D draw = {team, row, weigher, mail, scratch};
  bool early, guesses;
  typename D::First first;
  {
    // Read the row; of probabilities find the mass as well, as if the row were a common one.
    const Asked<kind> asked(p, number);
    early = !logits && !(asked.min_p > 0.f) && !asked.greedy;
    guesses = looks_out && early && asked.parts < kWhole;
    const u64 seed = keyed ? p.seed.at(number) : 0, offset = keyed ? p.offset.at(number) : 0;
    if constexpr (logits) {
      first.most = draw.largest();
    } else {
      if (looks_out && guesses) {
        __syncthreads();
        const int guess = draw.guess(static_cast<float>(asked.parts) * 0x1p-32f);
        guesses = guess != INT32_MAX;
        first = draw.template read<true>(guesses ? Window(guess, row.longest * team.warps) : Window());
      } else {
        first = draw.template read<false>(Window());
      }
    }
    if (keyed) random_words(seed, offset, 0, scratch->words);
  }
  if (!looks_out) row.read_kept();
  team.wait();
  mail.put(team, 1,
           static_cast<u32>(__reduce_max_sync(kAllLanes, isnan(first.most) ? INT32_MAX : ordered(first.most + 0.f))));
  if (early) mail.put(team, 0, warp_sum(draw.mine));
  if (guesses) {
    mail.put_floats(team, 2, warp_float_sum(first.above), 0.f);
    if (team.blocks > 1) team.barrier();  // the bins of other blocks are complete behind it
  }
  mail.share(team, keyed);
  weigher.top = from_ordered(mail.largest(team, 1));
  const auto [temperature, min_p, parts, greedy] = Asked<kind>(p, number);  // again: registers are few
  if (!(weigher.top > (logits ? -INFINITY : 0.f) && weigher.top < INFINITY) || isnan(temperature)) {
    if (first_warp) p.ids[number] = 0, p.valid[number] = false;
    return;
  }
  bool weighed = early && weigher.is_common();  // the masses of what is drawn from are known
  guesses = guesses && weighed;
  if (!weighed) {
    const float part = part_of(min_p);
    if (greedy) draw.at = weigher.top;
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
  int n = kDrawn;  // which of the drawn ids is looked at
  int cut = -1;    // the first, in the order, of those that were dropped
  int verdicts = 0;
  bool weighed_before = false;  // verdicts say what a pass in floats can
#pragma unroll 1
  for (;;) {
    if (!weighed) {
      draw.weigh();
      mail.put(team, 0, warp_sum(draw.mine));
      mail.share(team, keyed);
    }
    const u64 all = mail.sum(team, 0, team.all_warps);
    if (goal == 0) goal = max(u64{1}, fraction(all, parts));
    if (n < kDrawn) {  // the masses were to decide about this one
      cut = n++;
      if (all < goal) {
        if (first_warp) p.ids[number] = scratch->drawn[cut].index, p.valid[number] = true;
        return;
      }
    } else {
      const u64 of_warp = mail.shared(team, 0)[team.warp], before = mail.sum(team, 0, team.warp);
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
        if (looks_out && guesses && drawn.verdict == kUnknown) {
          drawn.verdict = draw.look_up(drawn.value, mail.float_sums(team, 2).x, goal);
        }
        mail.tell(team, reinterpret_cast<int4*>(scratch->drawn + n),
                  {drawn.index, __float_as_int(drawn.value), drawn.verdict, 0});
      }
      if (sure) return;
      mail.put(team, 0, 0);  // whoever goes on knows that all warps are done with the masses
      mail.share(team, keyed, kDrawn);
      cut = -1;
      n = 0;
      guesses = weighed_before = false;
      verdicts = 0;
#pragma unroll
      for (int m = 0; m < kDrawn; ++m) verdicts |= scratch->drawn[m].verdict << (2 * m);
    }

    // The first that is kept, or else the first of all in the order.
    weighed = false;
#pragma unroll 1
    for (; n < kDrawn; ++n) {
      const Drawn drawn = scratch->drawn[n];
      if (cut >= 0 && !drawn.is_before(scratch->drawn[cut])) continue;
      int verdict = verdicts >> (2 * n) & 3;
      if (verdict == kUnknown && !weighed_before) {
        float sums[kDrawn];
        draw.weigh_before(sums);
        mail.put_floats(team, 1, sums[0], sums[1]);
        mail.put_floats(team, 2, sums[2], sums[3]);
        mail.share(team, keyed);
        weighed_before = true;
#pragma unroll
        for (int pair = 0; pair < kDrawn / 2; ++pair) {
          const float2 both = mail.float_sums(team, 1 + pair);
          verdicts |= (draw.compare(both.x, goal) | draw.compare(both.y, goal) << 2) << (4 * pair);
        }
        verdict = verdicts >> (2 * n) & 3;
      }
      if (verdict == kUnknown) {
        draw.cut(drawn.value, drawn.index);
        break;
      }
      if (verdict == kKept) {
        if (first_warp) p.ids[number] = drawn.index, p.valid[number] = true;
        return;
      }
      cut = n;
    }
    if (n == kDrawn) {
      draw.cut(scratch->drawn[cut].value, scratch->drawn[cut].index);
      if (keyed) random_words(p.seed.at(number), p.offset.at(number), ++scratch->turn, scratch->words);
    }
  }
}

}  // namespace kestrel::sampling
