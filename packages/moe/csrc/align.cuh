// Grouping (token, choice) pairs by expert into padded blocks: the problem, and what its two algorithms share.
//
// A pair is the flat index t * K + j. Pairs of one expert form a group, ascending; each group is padded to a multiple
// of the block size. align_independent.cuh is for few pairs, align_cluster.cuh for many.
#pragma once

#include <kestrel/fastdiv.cuh>

#include <cstdint>

namespace kestrel::moe {

// The outputs, the sizes, and how a cluster of CTAs splits the pairs.
struct Alignment {
  int* sorted_token_ids = nullptr;  // [num_positions]
  int* expert_ids = nullptr;        // [num_blocks]
  int* num_post_pad = nullptr;
  int* positions = nullptr;  // of each pair in sorted_token_ids; dropped pairs are not written; may be null
  int* counters = nullptr;   // that are zeroed
  int num_counters = 0;
  const int* expert_map = nullptr;
  int64_t num_positions = 0;
  int64_t num_blocks = 0;
  int num_pairs = 0;
  int num_experts = 0;
  int num_mapped = 0x7fffffff;  // the map also drops experts whose index is not below it
  FastDiv block_size;
  // The split of align_cluster.cuh.
  int cluster_size = 1;
  int pairs_per_cta = 32;
  int warps = 1;            // of a CTA that have pairs
  int pairs_per_warp = 32;  // a multiple of 32
  bool staged = false;      // pairs are sorted in shared memory before they are written
};

constexpr int kDropped = static_cast<int>(0x80000000u);  // position of pairs whose expert the map drops

// Zeroes the counters, by the first CTA.
__device__ __forceinline__ void zero_counters(const Alignment& a) {
  if (blockIdx.x > 0) return;
  for (int i = threadIdx.x; i < a.num_counters; i += blockDim.x) a.counters[i] = 0;
}

// The id that is written for an expert, negative if the map drops it.
__device__ __forceinline__ int mapped_expert(const Alignment& a, int expert) {
  if (!a.expert_map) return expert;
  const int mapped = a.expert_map[expert];
  return mapped < a.num_mapped ? mapped : -1;
}

__device__ __forceinline__ unsigned num_blocks_of(const Alignment& a, unsigned pairs) {
  return a.block_size.divide(pairs + a.block_size.divisor - 1);
}

// The lanes that hold the same value, for values below 2^bits, bits <= 16.
__device__ __forceinline__ unsigned lanes_with_same(unsigned value, int bits) {
  unsigned differ = 0;
#pragma unroll
  for (int b = 0; b < 16; ++b) {
    if (b >= bits) break;
    const unsigned lanes = __ballot_sync(0xffffffffu, value & 1u << b);
    differ |= lanes ^ (value & 1u << b ? 0xffffffffu : 0u);
  }
  return ~differ;
}

__device__ __forceinline__ unsigned warp_inclusive_sum(unsigned v) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const unsigned below = __shfl_up_sync(0xffffffffu, v, d);
    if (static_cast<int>(threadIdx.x % 32) >= d) v += below;
  }
  return v;
}

// Fills the rest of sorted_token_ids with num_pairs and the rest of expert_ids with -1; `threads` threads share the
// work.
__device__ __forceinline__ void fill_tail(const Alignment& a, unsigned blocks_used, int64_t thread, int64_t threads) {
  const int64_t length = static_cast<int64_t>(blocks_used) * a.block_size.divisor;
  for (int64_t i = length + thread; i < a.num_positions; i += threads) a.sorted_token_ids[i] = a.num_pairs;
  for (int64_t b = blocks_used + thread; b < a.num_blocks; b += threads) a.expert_ids[b] = -1;
}

// One warp writes one expert: its id for its blocks, and the padding of the last of them.
__device__ __forceinline__ void write_expert(const Alignment& a, int expert_id, unsigned first_block,
                                             unsigned end_block, unsigned pairs) {
  const unsigned lane = threadIdx.x % 32;
  for (unsigned b = first_block + lane; b < end_block; b += 32) a.expert_ids[b] = expert_id;
  const unsigned end = end_block * a.block_size.divisor;
  for (unsigned i = first_block * a.block_size.divisor + pairs + lane; i < end; i += 32) {
    a.sorted_token_ids[i] = a.num_pairs;
  }
}

}  // namespace kestrel::moe
