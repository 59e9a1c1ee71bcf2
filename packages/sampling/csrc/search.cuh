// Finding what a filter keeps: the value t for which the elements >= t are the fewest that reach a goal, counted
// (top-k) or weighed (top-p).
//
// A histogram of a part of the row says between which two values t lies; one pass over the row shows whether that is
// so, and collects the elements in between in lists; the first block of the team narrows the lists down to t. Where the
// guess fails (it is taken 3.5 standard deviations wide) or too many elements are equal, bisection with a pass a step
// takes over: exact as well, and slower.
#pragma once

#include "guess.cuh"
#include "listed.cuh"

namespace kestrel::sampling {

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

  __device__ __forceinline__ Guess<kind> guess() const { return {team, weigher, scratch, piece.length}; }
  __device__ __forceinline__ Listed<kind> listed() const { return {team, weigher, scratch}; }

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
        return {range.low, listed().template needed<mass>(range, goal), UINT32_MAX};
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
    Found found = listed().template find_listed<mass>(key, range, goal, count);
    if (!mass && then) {
      const u64 kept = listed().listed_mass(key, found);
      const Range rest = {found.key, range.high, 0};
      found = listed().template find_listed<true>(key, rest, max(u64{1}, fraction(kept, then_parts)), count);
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
