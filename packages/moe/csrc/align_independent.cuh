// Alignment of few pairs by CTAs that exchange nothing: each counts all pairs and writes its own.
//
// Each CTA owns consecutive rounds of 32 pairs, one warp per round. In shared memory it counts, per expert, the pairs
// before its own, all others, and those of each own round (integer atomics: the result does not depend on their order).
// Every warp then computes the padded start of each expert by one scan over its lanes, PER_LANE experts per lane. The
// warps of all CTAs divide the experts among them to write expert ids and padding.
#pragma once

#include <type_traits>

#include "align.cuh"

namespace kestrel::moe {

struct IndependentSplit {
  int ctas = 1;
  int rounds_per_cta = 1;
};

// Dynamic shared memory in 32-bit words: counters of the pairs before, of the others, and of each own round.
template <int PER_LANE>
__host__ __device__ constexpr int align_independent_words(int rounds_per_cta) {
  return (2 + rounds_per_cta) * 32 * PER_LANE;
}

// The warp's value of expert e, where each lane holds the values of PER_LANE experts in `mine`.
template <int PER_LANE, typename V>
__device__ __forceinline__ V value_of_expert(const V (&mine)[PER_LANE], int e) {
  V value = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const V theirs = __shfl_sync(0xffffffffu, mine[i], e / PER_LANE);
    if (e % PER_LANE == i) value = theirs;
  }
  return value;
}

// Runs before the input may be read.
template <int PER_LANE>
__device__ __forceinline__ void align_independent_prologue(int rounds_per_cta, unsigned* counters) {
  for (int i = threadIdx.x; i < align_independent_words<PER_LANE>(rounds_per_cta); i += blockDim.x) counters[i] = 0;
  __syncthreads();
}

// expert_at(pair): the expert of a pair; a number outside 0..experts-1 drops it.
template <int PER_LANE, typename F>
__device__ __forceinline__ void align_independent(const Alignment& a, const IndependentSplit& split, unsigned* counters,
                                                  int cta_rank, F expert_at) {
  constexpr int E = 32 * PER_LANE;
  unsigned* const before = counters;       // [E]: of pairs before this CTA's
  unsigned* const others = counters + E;   // [E]: of this CTA's and of later ones
  unsigned* const own = counters + 2 * E;  // [rounds_per_cta][E]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const unsigned experts = a.num_experts;
  const int rounds = (a.num_pairs + 31) / 32, first = cta_rank * split.rounds_per_cta;
  const int last = min(first + split.rounds_per_cta, rounds);

  int expert_id[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int e = lane * PER_LANE + i;
    expert_id[i] = e >= a.num_experts ? -1 : mapped_expert(a, e);
  }
  const int pair = (first + warp) * 32 + lane;
  const bool has_round = first + warp < last;
  unsigned expert = experts;
  if (has_round && pair < a.num_pairs) expert = expert_at(pair);
  const auto count = [&](auto unroll, int base) {  // `unroll` rounds of this warp, loaded before the first is counted
    constexpr int UNROLL = decltype(unroll)::value;
    unsigned id[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int round = base + i * warps, at = round * 32 + lane;
      id[i] = experts;
      if ((round < first || round >= last) && at < a.num_pairs) id[i] = expert_at(at);
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      if (id[i] < experts) atomicAdd((base + i * warps < first ? before : others) + id[i], 1u);
    }
  };
  if (rounds <= warps) {
    count(std::integral_constant<int, 1>(), warp);
  } else {
    for (int base = warp; base < rounds; base += 16 * warps) count(std::integral_constant<int, 16>(), base);
  }
  expert = min(expert, experts);  // here, so that the loads above do not wait for it
  unsigned rank = 0;
  if (has_round) {
    const unsigned same = lanes_with_same(expert, 32 - __clz(experts)), lower = same & ((1u << lane) - 1);
    rank = __popc(lower);
    if (lower == 0 && expert < experts) {
      own[warp * E + expert] = __popc(same);
      atomicAdd(others + expert, static_cast<unsigned>(__popc(same)));
    }
  }
  __syncthreads();

  unsigned total[PER_LANE], first_block[PER_LANE], position[PER_LANE], blocks = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    position[i] = before[lane * PER_LANE + i];
    total[i] = expert_id[i] < 0 ? 0 : position[i] + others[lane * PER_LANE + i];
    first_block[i] = blocks;
    blocks += num_blocks_of(a, total[i]);
  }
  const unsigned through = warp_inclusive_sum(blocks), blocks_used = __shfl_sync(0xffffffffu, through, 31);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    first_block[i] += through - blocks;
    position[i] += first_block[i] * a.block_size.divisor;
    if (expert_id[i] < 0) position[i] = static_cast<unsigned>(kDropped);
  }
  if (has_round) {
    const int e = min(expert, experts - 1);
    unsigned to = value_of_expert(position, e);
    if (expert < experts && to != static_cast<unsigned>(kDropped)) {
#pragma unroll 4
      for (int w = 0; w < warp; ++w) to += own[w * E + e];
      a.sorted_token_ids[to + rank] = pair;
      if (a.positions) a.positions[pair] = static_cast<int>(to + rank);
    }
  }
  if (cta_rank == 0 && threadIdx.x == 0) {
    *a.num_post_pad = static_cast<int>(static_cast<int64_t>(blocks_used) * a.block_size.divisor);
  }
  for (int e = (warps - 1 - warp) * split.ctas + cta_rank; e < a.num_experts; e += warps * split.ctas) {
    const unsigned from = value_of_expert(first_block, e), pairs = value_of_expert(total, e);
    const int id = value_of_expert(expert_id, e);
    write_expert(a, id, from, from + num_blocks_of(a, pairs), pairs);
  }
  fill_tail(a, blocks_used, static_cast<int64_t>(cta_rank) * blockDim.x + threadIdx.x, split.ctas * blockDim.x);
}

}  // namespace kestrel::moe
