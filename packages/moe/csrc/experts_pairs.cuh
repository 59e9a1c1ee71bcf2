// The (token, choice) pairs of few tokens, grouped by expert in every CTA.
#pragma once

#include "experts_params.cuh"

namespace kestrel::moe {

// The index of an expert in the weights on this device, or -1 if it is not here.
__device__ __forceinline__ int local_expert(const ExpertsParams& p, int id) {
  if (p.expert_map) id = id >= 0 && id < p.mapped_experts ? p.expert_map[id] : -1;
  return id >= 0 && id < p.experts ? id : -1;
}

// Up to kMaxPairsInKernel pairs, grouped by expert in order of first appearance and split into tiles of TOKENS.
template <int TOKENS>
struct PairGroups {
  int expert[kMaxPairsInKernel];  // of each pair; -1: not on this device
  int pairs[kMaxPairsInKernel];
  int tile_expert[kMaxPairsInKernel];
  int tile_offset[kMaxPairsInKernel];  // of its first pair in `pairs`
  int tile_count[kMaxPairsInKernel];
  int sizes[kMaxPairsInKernel];  // pairs of an expert, at its first pair; else 0
  int tiles;

  // Called by all threads of the CTA. The first threads do the work, one per pair.
  __device__ void build(const ExpertsParams& p) {
    const int pair = threadIdx.x, count = p.tokens * p.choices;
    int mine = -1, leader = pair, rank = 0, total = 0;
    if (pair < count) {
      const int token = pair / p.choices;
      mine = local_expert(p, p.topk_ids[token * p.ids_stride + (pair - token * p.choices)]);
      expert[pair] = mine;
    }
    __syncthreads();
    if (pair < count) {
#pragma unroll 8
      for (int other = 0; other < count; ++other) {
        if (expert[other] != mine) continue;
        leader = min(leader, other);
        rank += other < pair;
        ++total;
      }
      sizes[pair] = mine >= 0 && leader == pair ? total : 0;
    }
    __syncthreads();
    if (pair < count) {
      int before_pairs = 0, before_tiles = 0, all_tiles = 0;
#pragma unroll 8
      for (int other = 0; other < count; ++other) {
        const int tiles_of = (sizes[other] + TOKENS - 1) / TOKENS;
        before_pairs += other < leader ? sizes[other] : 0;
        before_tiles += other < leader ? tiles_of : 0;
        all_tiles += tiles_of;
      }
      if (mine >= 0) {
        pairs[before_pairs + rank] = pair;
        if (rank % TOKENS == 0) {
          const int tile = before_tiles + rank / TOKENS;
          tile_expert[tile] = mine;
          tile_offset[tile] = before_pairs + rank;
          tile_count[tile] = min(total - rank, TOKENS);
        }
      }
      if (pair == 0) tiles = all_tiles;
    }
    __syncthreads();
  }
};

}  // namespace kestrel::moe
