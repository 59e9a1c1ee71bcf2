// Grouping pairs by expert, by blocks that exchange nothing: each counts all pairs and places its own.
//
// For some thousand pairs that is cheaper than an exchange: reading them takes one trip to L2 whoever does it, and
// counting is one addition in shared memory per pair, which no order shows in. A block has a run of rounds of 32 pairs,
// a warp each. It counts apart what comes before its run, and per round what is in it; then every warp has the padded
// start of each expert by one scan over its lanes, PER_LANE experts each, and knows where its pairs go. Names and
// padding are shared out over the warps of all blocks, an expert at a time.
#pragma once

#include <type_traits>

#include "align.cuh"

namespace kestrel::moe {

// How the pairs are split over blocks: `own` rounds each.
struct Apart {
  int blocks = 1;
  int own = 1;
};

// 32-bit words of shared memory: a row of counters for the pairs before, one for the others, one per own round.
template <int PER_LANE>
__host__ __device__ constexpr int apart_words(int own) {
  return (2 + own) * 32 * PER_LANE;
}

// One value per expert, `mine` of this lane's; the warp's value of expert e.
template <int PER_LANE, typename V>
__device__ __forceinline__ V of_expert(const V (&mine)[PER_LANE], int e) {
  V value = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const V theirs = __shfl_sync(0xffffffffu, mine[i], e / PER_LANE);
    if (e % PER_LANE == i) value = theirs;
  }
  return value;
}

// Before the input may be read.
template <int PER_LANE>
__device__ __forceinline__ void apart_begin(int own, unsigned* counters) {
  for (int i = threadIdx.x; i < apart_words<PER_LANE>(own); i += blockDim.x) counters[i] = 0;
  __syncthreads();
}

// expert_at(pair): the expert of a pair, any number outside 0..experts-1 to drop it. rank: of this block, of a.blocks.
template <int PER_LANE, typename F>
__device__ __forceinline__ void align_apart(const Alignment& a, const Apart& split, unsigned* counters, int rank,
                                            F expert_at) {
  constexpr int E = 32 * PER_LANE;
  unsigned* const before = counters;       // [E]: of pairs before this block's
  unsigned* const others = counters + E;   // [E]: of this block's and of later ones
  unsigned* const own = counters + 2 * E;  // [own rounds][E]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const unsigned experts = a.experts;
  const int rounds = (a.pairs + 31) / 32, first = rank * split.own, last = min(first + split.own, rounds);

  int name[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int e = lane * PER_LANE + i;
    name[i] = e >= a.experts ? -1 : a.expert_map ? a.expert_map[e] : e;
  }
  const int pair = (first + warp) * 32 + lane;
  const bool owner = first + warp < last;
  unsigned expert = experts;
  if (owner && pair < a.pairs) expert = expert_at(pair);
  const auto count = [&](auto at_once, int base) {  // so many rounds of this warp
    constexpr int AT_ONCE = decltype(at_once)::value;
    unsigned id[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int round = base + i * warps, at = round * 32 + lane;
      id[i] = experts;
      if ((round < first || round >= last) && at < a.pairs) id[i] = expert_at(at);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (id[i] < experts) atomicAdd((base + i * warps < first ? before : others) + id[i], 1u);
    }
  };
  if (rounds <= warps) {
    count(std::integral_constant<int, 1>(), warp);
  } else {
    for (int base = warp; base < rounds; base += 16 * warps) count(std::integral_constant<int, 16>(), base);
  }
  expert = min(expert, experts);  // not before: the loads above would wait for it
  unsigned nth = 0;
  if (owner) {
    const unsigned same = lanes_with(expert, 32 - __clz(experts)), lower = same & ((1u << lane) - 1);
    nth = __popc(lower);
    if (lower == 0 && expert < experts) {
      own[warp * E + expert] = __popc(same);
      atomicAdd(others + expert, static_cast<unsigned>(__popc(same)));
    }
  }
  __syncthreads();

  unsigned total[PER_LANE], start[PER_LANE], place[PER_LANE], blocks = 0;  // start: in blocks
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    place[i] = before[lane * PER_LANE + i];
    total[i] = name[i] < 0 ? 0 : place[i] + others[lane * PER_LANE + i];
    start[i] = blocks;
    blocks += a.block_size.quotient(total[i] + a.block_size.value - 1);
  }
  const unsigned through = inclusive_sum(blocks), all = __shfl_sync(0xffffffffu, through, 31);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    start[i] += through - blocks;
    place[i] += start[i] * a.block_size.value;
    if (name[i] < 0) place[i] = static_cast<unsigned>(NOWHERE);
  }
  if (owner) {
    const int e = min(expert, experts - 1);
    unsigned to = of_expert(place, e);
    if (expert < experts && to != static_cast<unsigned>(NOWHERE)) {
#pragma unroll 4
      for (int w = 0; w < warp; ++w) to += own[w * E + e];
      a.sorted[to + nth] = pair;
    }
  }
  const int64_t length = static_cast<int64_t>(all) * a.block_size.value;
  if (rank == 0 && threadIdx.x == 0) *a.length = static_cast<int>(length);
  for (int e = (warps - 1 - warp) * split.blocks + rank; e < a.experts; e += warps * split.blocks) {
    const unsigned from = of_expert(start, e), n = of_expert(total, e);
    const int called = of_expert(name, e);
    const unsigned to = from + a.block_size.quotient(n + a.block_size.value - 1);
    for (unsigned b = from + lane; b < to; b += 32) a.experts_of[b] = called;
    const unsigned end = to * a.block_size.value;
    for (unsigned slot = from * a.block_size.value + n + lane; slot < end; slot += 32) a.sorted[slot] = a.pairs;
  }
  const int64_t thread = static_cast<int64_t>(rank) * blockDim.x + threadIdx.x, threads = split.blocks * blockDim.x;
  for (int64_t slot = length + thread; slot < a.slots; slot += threads) a.sorted[slot] = a.pairs;
  for (int64_t b = all + thread; b < a.blocks; b += threads) a.experts_of[b] = -1;
}

}  // namespace kestrel::moe
