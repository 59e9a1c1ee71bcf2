// Finding what a filter keeps: the value t for which the elements >= t are the fewest that reach a goal, counted
// (top-k) or weighed (top-p).
//
// A histogram of a part of the row says between which two values t lies; one pass over the row shows whether that is
// so, and collects the elements in between in lists; the first block of the team narrows the lists down to t. Where the
// guess fails (it is taken 3.5 standard deviations wide) or too many elements are equal, bisection with a pass a step
// takes over: exact as well, and slower.
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

// What locate() weighs: the elements that equal t,
struct EqualTo {
  float t;
  u32 count = 0;
  __device__ __forceinline__ void add(float4 v, int) { count += (v.x == t) + (v.y == t) + (v.z == t) + (v.w == t); }
  __device__ __forceinline__ u64 value() const { return count; }
  __device__ __forceinline__ void each(float4 v, int, u64 (&one)[4]) const {
    one[0] = v.x == t, one[1] = v.y == t, one[2] = v.z == t, one[3] = v.w == t;
  }
};

// and the masses of what is kept.
template <Kind kind, bool fine>
struct KeptMass {
  const Weigher<kind>& weigher;
  Kept kept;
  MassSum sum = {};
  __device__ __forceinline__ void scaled(float4 four, int i, float (&x)[4]) const {
    const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = kept.has(v[e], i + e) ? weigher.template scaled<fine>(v[e]) : 0.f;
  }
  __device__ __forceinline__ void add(float4 v, int i) {
    // With a filter most tiles have nothing to add.
    if (!__any_sync(kAllLanes, v.x >= kept.above || v.y >= kept.above || v.z >= kept.above || v.w >= kept.above))
      return;
    float x[4];
    scaled(v, i, x);
    sum.add(x);
  }
  __device__ __forceinline__ u64 value() { return sum.value(); }
  __device__ __forceinline__ void each(float4 v, int i, u64 (&mass)[4]) const {
    float x[4];
    scaled(v, i, x);
#pragma unroll
    for (int e = 0; e < 4; ++e) mass[e] = mass_of(x[e]);
  }
};

// One tile in so many is counted in the histogram: a power of two.
__device__ __forceinline__ int samples_every(int length) { return 1 << max(0, 32 - __clz((length - 1) / kSamples)); }

template <Kind kind, bool resident>
struct Search {
  const Team& team;
  const Piece<resident>& piece;
  const Weigher<kind>& weigher;
  Exchange& exchange;
  Scratch* scratch;
  float* list;
  int list_size;  // of one block
  int passes = 0;

  template <bool mass>
  __device__ __forceinline__ u64 measure(float v) const {
    if constexpr (mass) return mass_of(weigher.scaled(v));
    return 1;
  }

  // Whether one block's threads hold all elements: then no histogram is needed and no list.
  __device__ __forceinline__ bool is_held() const {
    return resident && team.blocks == 1 && piece.length <= kEntries * static_cast<int>(blockDim.x);
  }

  // ---- passes over the row, by the whole team -----------------------------------------------------------------------

  // The mass of this warp's piece (if asked for), and a histogram of every so many of its tiles.
  template <bool mass>
  __device__ __forceinline__ u64 survey_piece(bool histogram) {
    const int every = samples_every(piece.length);
    MassSum sum;
    int turn = 0;
    piece.each_tile(team.lane, [&](float4 four, int i) {
      const float v[4] = {four.x, four.y, four.z, four.w};
      if constexpr (mass) {
        // No weight of a common row is above 1; where one is, this is done again.
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = fminf(weigher.scaled(v[e]), 0x1p23f - 1.f);
        sum.add(x);
      }
      if (histogram && turn == 0) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (i + e < piece.length && i < piece.end && !isnan(v[e])) {
            atomicAdd(&scratch->bins[weigher.bin(v[e], kBins - 1)], 1u);
          }
        }
      }
      turn = (turn + 1) & (every - 1);
    });
    return warp_sum(sum.value());
  }

  // The same of the row.
  template <bool mass>
  __device__ __forceinline__ u64 survey(bool histogram) {
    const u64 mine = survey_piece<mass>(histogram);
    if (mass) exchange.put(team, 0, mine);
    exchange.share(team);
    return mass ? exchange.sum(team, 0) : 0;
  }

  // What is >= low, what is >= high, and how many elements lie in between; those are in the blocks' lists afterwards.
  struct Weighed {
    u64 from_low, from_high;
    u32 between;
    bool listed;  // the lists hold them all
  };

  template <bool mass>
  __device__ __forceinline__ Weighed weigh(float low, float high) {
    constexpr u64 kOverflow = u64{1} << 32;
    u32* listed = &scratch->listed[passes & 1];
    if (threadIdx.x == 0) scratch->listed[(passes & 1) ^ 1] = 0;
    ++passes;
    const auto is_between = [&](float v) { return v >= low && !(v >= high); };  // high may be one past infinity
    MassSum sum;
    u32 count = 0, between = 0;
    piece.each_tile(team.lane, [&](float4 four, int) {
      const float v[4] = {four.x, four.y, four.z, four.w};
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        between += is_between(v[e]);
        count += v[e] >= low;
        if constexpr (mass) x[e] = v[e] >= low ? weigher.scaled(v[e]) : 0.f;
      }
      if constexpr (mass) sum.add(x);
    });
    // Every lane's entries have their place in the block's list.
    const u32 up_to = static_cast<u32>(warp_inclusive_sum(between, team.lane));
    const u32 of_warp = __shfl_sync(kAllLanes, up_to, 31);
    u32 place = 0;
    if (team.lane == 0 && of_warp > 0) place = atomicAdd(listed, of_warp);
    place = __shfl_sync(kAllLanes, place, 0);
    const bool full = place + of_warp > list_size;
    place += up_to - between;
    u64 between_mass = 0;
    if (of_warp > 0) {
      piece.each_tile(team.lane, [&](float4 four, int) {
        const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (is_between(v[e])) {
            if (!full) list[place++] = v[e];
            if constexpr (mass) between_mass += mass_of(weigher.scaled(v[e]));
          }
        }
      });
    }
    exchange.put(team, 0, warp_sum(mass ? sum.value() : u64{count}));
    exchange.put(team, 1, of_warp + (full ? kOverflow : 0));
    if (mass) exchange.put(team, 2, warp_sum(between_mass));
    exchange.share(team);
    const u64 from_low = exchange.sum(team, 0), n = exchange.sum(team, 1);
    const u64 from_high = from_low - (mass ? exchange.sum(team, 2) : static_cast<u32>(n));
    return {from_low, from_high, static_cast<u32>(n), n < kOverflow};
  }

  // ---- the guess, by the first block --------------------------------------------------------------------------------

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
    const float part = __fdividef(samples, static_cast<float>(piece.length));
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
    const float part = __fdividef(samples, static_cast<float>(piece.length));
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

  // ---- lists, by the first block ------------------------------------------------------------------------------------

  // One histogram of the entries in the range, until one warp can hold them or t is known.
  template <bool mass>
  __device__ __forceinline__ Range narrow(const int (&key)[kEntries], Range range, u64 goal, u32 in_range) {
    while (in_range > kLastFew && range.width() != 1) {
      const u32 width = range.width();
      const int shift = max(0, 32 - __clz(width - 1) - 8);
      for (int b = threadIdx.x; b < 4 * kFine; b += blockDim.x) scratch->bins[b] = 0;
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kEntries; ++j) {
        if (key[j] < range.low || key[j] >= range.high) continue;
        u32* bin = scratch->bins + ((static_cast<u32>(range.high - 1) - static_cast<u32>(key[j])) >> shift);
        atomicAdd(bin, 1u);
        if constexpr (mass) {
          const u64 m = measure<true>(from_ordered(key[j]));
          atomicAdd(bin + kFine, static_cast<u32>(m) & 0xffffu);
          atomicAdd(bin + 2 * kFine, static_cast<u32>(m >> 16) & 0x3fffu);
          atomicAdd(bin + 3 * kFine, static_cast<u32>(m >> 30));
        }
      }
      __syncthreads();
      if (threadIdx.x < 32) {
        constexpr int kMine = kFine / 32;
        const u32* bins = scratch->bins + team.lane * kMine;
        const auto sum_of = [&](int b) {
          if constexpr (!mass) return static_cast<u64>(bins[b]);
          return bins[b + kFine] + (static_cast<u64>(bins[b + 2 * kFine]) << 16) +
                 (static_cast<u64>(bins[b + 3 * kFine]) << 30);
        };
        u64 sum = 0;
        for (int b = 0; b < kMine; ++b) sum += sum_of(b);
        const u64 up_to = range.above + warp_inclusive_sum(sum, team.lane);
        const u32 reached = __ballot_sync(kAllLanes, up_to >= goal);
        if (reached != 0 && team.lane == __ffs(reached) - 1) {
          u64 above = up_to - sum;
          int b = 0;
          while (above + sum_of(b) < goal) above += sum_of(b), ++b;
          const u32 bin = team.lane * kMine + b;
          Range next;
          next.high = static_cast<int>(static_cast<u32>(range.high) - (bin << shift));
          next.low =
              (bin + 1) << shift > width ? range.low : static_cast<int>(static_cast<u32>(next.high) - (1u << shift));
          next.above = above;
          scratch->range = next;
          scratch->in_range = bins[b];
        }
        if (reached == 0 && team.lane == 0) scratch->range = range, scratch->in_range = 0;
      }
      __syncthreads();
      range = scratch->range;
      in_range = scratch->in_range;
      __syncthreads();
    }
    return range;
  }

  // t among at most kLastFew entries, by one warp: every lane weighs what reaches its own entry.
  template <bool mass>
  __device__ __forceinline__ Found last_few(const float* few, u32 count, Range range, u64 goal) {
    const bool mine = team.lane < count;
    const float v = mine ? few[team.lane] : 0.f;
    const int key = mine ? ordered(v) : INT32_MIN;
    const u64 each = mine ? measure<mass>(v) : 0;
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
    return {range.low, number == 1 ? 1 : needed<mass>(range, goal), number};
  }

  // How many elements equal to range.low reach the goal: the quotient rounded up, bit by bit, since it is seldom asked
  // for.
  template <bool mass>
  __device__ __forceinline__ u32 needed(const Range& range, u64 goal) const {
    const u64 missing = goal - range.above;
    if constexpr (mass) {
      const u64 each = measure<true>(from_ordered(range.low));
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

  // By all threads of the first block; in_range: at most the entries that lie in the range.
  template <bool mass>
  __device__ __forceinline__ Found find_listed(const int (&key)[kEntries], Range range, u64 goal, u32 in_range) {
    range = narrow<mass>(key, range, goal, in_range);
    // The last few go into the bins, which are not needed now.
    if (threadIdx.x == 0) scratch->few = 0;
    __syncthreads();
    float* few = reinterpret_cast<float*>(scratch->bins);
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      if (key[j] >= range.low && key[j] < range.high) {
        const u32 place = atomicAdd(&scratch->few, 1u);
        if (place < kLastFew) few[place] = from_ordered(key[j]);
      }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      const u32 count = scratch->few;
      // More than one warp can hold are left only if they are all equal.
      const Found found = count <= kLastFew ? last_few<mass>(few, count, range, goal)
                                            : Found{range.low, needed<mass>(range, goal), count};
      if (team.lane == 0) scratch->found = found;
    }
    __syncthreads();
    const Found found = scratch->found;
    __syncthreads();
    return found;
  }

  // The mass of the entries that top-k keeps, where the list holds them all.
  __device__ __forceinline__ u64 listed_mass(const int (&key)[kEntries], const Found& found) {
    u64 mass = 0;
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      if (key[j] > found.key) mass += measure<true>(from_ordered(key[j]));
    }
    mass = warp_sum(mass);
    if (team.lane == 0) scratch->warp_sums[threadIdx.x >> 5] = mass;
    __syncthreads();
    const u64 all = warp_sum(team.lane < team.warps ? scratch->warp_sums[team.lane] : 0);
    __syncthreads();
    return all + found.needed * measure<true>(from_ordered(found.key));
  }

  // ---- the search, by the whole team --------------------------------------------------------------------------------

  // Top-k when `counted`, with top-p of what it keeps if then_parts is below 2^32 (`then_done` says whether that was
  // possible), or top-p. `range` is certain, `guess` is not.
  template <bool mass>
  __device__ __forceinline__ Found search(Range range, u64 goal, int guess_low, int guess_high, u64 then_parts,
                                          bool* then_done) {
    const int top = range.high;
    const u32 most_listed = kEntries * blockDim.x;
    int low = max(range.low, min(guess_low, range.high - 1)), high = max(low + 1, min(guess_high, range.high));
    // Three guesses and then bisection of 32 bits: the bound is out of reach.
    for (int tries = 0; tries < 64; ++tries) {
      const Weighed weighed = weigh<mass>(from_ordered(low), from_ordered(high));
      const bool reached = weighed.from_low >= goal, before = weighed.from_high < goal;
      if (reached && before) {
        range = {low, high, weighed.from_high};
        if (weighed.listed && weighed.between <= most_listed) break;
      } else if (reached) {
        range.low = high;
      } else {
        range.high = low;
        range.above = weighed.from_low;
      }
      if (range.width() == 1) {
        *then_done = false;
        return {range.low, needed<mass>(range, goal), UINT32_MAX};
      }
      // Equal elements at the top; then where t would lie if the elements in between lay evenly; then the middle.
      const float width = static_cast<float>(range.width());
      high = range.high;
      low = static_cast<int>(static_cast<u32>(range.low) + (range.width() >> 1));
      if (tries == 0 && range.high == top) {
        low = top - 1;
      } else if (tries < 2 && reached && before) {
        const float depth = __fdividef(static_cast<float>(goal - range.above),
                                       static_cast<float>(weighed.from_low - weighed.from_high));
        const float half = 0.35f * __fdividef(static_cast<float>(most_listed), static_cast<float>(weighed.between));
        const u32 upper = static_cast<u32>(fmaxf(depth - half, 0.f) * width);
        const u32 lower = static_cast<u32>(fminf(depth + half, 0.999f) * width);
        high = static_cast<int>(static_cast<u32>(range.high) - min(upper, range.width() - 1));
        low = static_cast<int>(static_cast<u32>(range.high) - min(max(lower, upper + 1), range.width()));
      }
    }
    *then_done = !mass && range.high == top && then_parts <= 0xffffffffu;
    if (team.block == 0) {
      // Entry q of all blocks' lists: lanes know where each block's begin.
      const u32 of_block =
          team.lane < team.blocks ? in_block(scratch, team.lane, team.blocks)->listed[(passes - 1) & 1] : 0;
      const u32 up_to = static_cast<u32>(warp_inclusive_sum(of_block, team.lane));
      const u32 count = __shfl_sync(kAllLanes, up_to, 31);
      int key[kEntries];
#pragma unroll
      for (int j = 0; j < kEntries; ++j) {
        key[j] = INT32_MIN;
        if (j * blockDim.x >= count) continue;
        const u32 q = threadIdx.x + j * blockDim.x;
        u32 block = 0, first = 0;
        for (int b = 0; b < team.blocks - 1; ++b) {
          const u32 end = __shfl_sync(kAllLanes, up_to, b);
          if (q >= end) block = b + 1, first = end;
        }
        if (q < count) key[j] = ordered(in_block(list, block, team.blocks)[q - first]);
      }
      finish<mass>(key, range, goal, count, then_parts, *then_done);
    }
    team.barrier();
    return scratch->found;
  }

  // The first block ends the search and tells the others; a barrier of the team follows.
  template <bool mass>
  __device__ __forceinline__ void finish(const int (&key)[kEntries], Range range, u64 goal, u32 count, u64 then_parts,
                                         bool then) {
    Found found = find_listed<mass>(key, range, goal, count);
    if (!mass && then) {
      const u64 kept = listed_mass(key, found);
      const Range rest = {found.key, range.high, 0};
      found = find_listed<true>(key, rest, max(u64{1}, fraction(kept, then_parts)), count);
    }
    if (threadIdx.x < team.blocks) in_block(scratch, threadIdx.x, team.blocks)->found = found;
  }

  // A row that one block's threads hold: no list is needed.
  template <bool mass>
  __device__ __forceinline__ Found search_held(Range range, u64 goal, u64 then_parts, bool* then_done) {
    *then_done = !mass && then_parts <= 0xffffffffu;
    __syncthreads();  // every warp's piece is there
    int key[kEntries];
#pragma unroll
    for (int j = 0; j < kEntries; ++j) {
      const int q = threadIdx.x + j * blockDim.x;
      key[j] = q < piece.length ? ordered(piece.held[q]) : INT32_MIN;
    }
    finish<mass>(key, range, goal, piece.length, then_parts, *then_done);
    team.barrier();
    return scratch->found;
  }

  // ---- places in the order of the vocabulary ------------------------------------------------------------------------

  // The index at which the running sum of what `of` weighs passes point_of(whole sum); true in the warp that has it.
  template <typename Of, typename Point>
  __device__ __forceinline__ bool locate(Of of, Point point_of, int* index) {
    piece.each_tile(team.lane, [&](float4 four, int i) { of.add(four, i); });
    exchange.put(team, 0, warp_sum(of.value()));
    exchange.share(team);
    return locate_shared(of, 0, point_of, index);
  }

  // The same where the warps' sums have been shared.
  template <typename Of, typename Point>
  __device__ __forceinline__ bool locate_shared(const Of& of, int which, Point point_of, int* index) {
    const u64 point = point_of(exchange.sum(team, which));
    const u64 mine = exchange.shared(team, which)[team.warp];
    u64 running = exchange.sum_of(team, which, 0, team.warp);
    if (point < running || point >= running + mine) return false;
    constexpr int kAtOnce = 4;  // tiles
    const float none = not_a_number();
    for (int first = piece.begin; first < piece.end; first += kAtOnce * kTile) {
      float4 four[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int i = first + u * kTile + 4 * team.lane;
        four[u] = i < piece.end ? piece.four(i) : make_float4(none, none, none, none);
      }
      // The tile in which the sum passes the point, if it is one of these.
      bool passed = false;
      int tile = first;
      float4 hit = four[0];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        u64 each[4];
        of.each(four[u], first + u * kTile + 4 * team.lane, each);
        const u64 whole = warp_sum(each[0] + each[1] + each[2] + each[3]);
        if (!passed) {
          hit = four[u];
          tile = first + u * kTile;
          passed = running + whole > point;
          if (!passed) running += whole;
        }
      }
      if (!passed) continue;
      int found = tile + 4 * team.lane;
      u64 each[4];
      of.each(hit, found, each);
      const u64 sum = each[0] + each[1] + each[2] + each[3];
      const u64 up_to = running + warp_inclusive_sum(sum, team.lane);
      u64 before = up_to - sum;
#pragma unroll
      for (int e = 0; e < 3; ++e) {
        before += each[e];
        found += before <= point;
      }
      *index = __shfl_sync(kAllLanes, found, __ffs(__ballot_sync(kAllLanes, up_to > point)) - 1);
      return true;
    }
    return false;
  }

  // The index at which the running sum of what `of` weighs passes `point`, in every warp of the team.
  template <typename Of>
  __device__ __forceinline__ int place_for_all(const Of& of, u64 point) {
    int index;
    if (locate(of, [&](u64) { return point; }, &index)) {
      for (int block = team.lane; block < team.blocks; block += 32) in_block(scratch, block, team.blocks)->cut = index;
    }
    team.barrier();
    return scratch->cut;
  }

  // From t and how many of its equals are needed to what is kept.
  __device__ __forceinline__ Kept resolve(const Found& found) {
    const float t = from_ordered(found.key);
    if (found.needed >= found.equal) return {t, INT32_MAX};
    return {t, place_for_all(EqualTo{t}, u64{found.needed} - 1)};
  }

  // Of what `of` weighs in the row.
  template <typename Of>
  __device__ __forceinline__ u64 total(Of& of) {
    piece.each_tile(team.lane, [&](float4 four, int i) { of.add(four, i); });
    exchange.put(team, 0, warp_sum(of.value()));
    exchange.share(team);
    return exchange.sum(team, 0);
  }

  template <bool fine = false>
  __device__ __forceinline__ KeptMass<kind, fine> mass_of_kept(const Kept& kept) const {
    return {weigher, kept};
  }
};

}  // namespace kestrel::sampling
