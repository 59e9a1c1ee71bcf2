// What the wgmma kernels of routed experts share: token tiles, the warp that schedules them, and loads of weights.
//
// A tile is 256 weight rows (up: 128 of each half of w1) by some tokens of one expert. One warp of a CTA schedules: it
// writes the pairs, factors and scales of each tile into a slot of shared memory.
#pragma once

#include <kestrel/pdl.cuh>
#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/tma.cuh>

#include "experts_params.cuh"

namespace kestrel::moe {

constexpr int kRasterTiles = 8;           // token tiles, in clusters pairs of them, that run through all row slices
constexpr uint32_t kNoRow = 0xffffffffu;  // of a column that pads a tile

// Work item -> token tile and slice of weight rows.
struct TmaItem {
  int tile, slice;

  __device__ __forceinline__ TmaItem(int item, int tiles, int slices) {
    const int first = item / (kRasterTiles * slices) * kRasterTiles, rest = item - first * slices;
    const int tiles_here = min(kRasterTiles, tiles - first);
    slice = rest / tiles_here;
    tile = first + rest - slice * tiles_here;
  }
};

struct TmaParams {
  CUtensorMap low, high;  // of the weights: up: the halves of w1; down: w2 twice
  ExpertsParams p;
  int steps;                // of the pipeline for a tile: 128 bytes of K each
  int low_step, high_step;  // of the expert's coordinate: 1, or 0 if all experts share one weight
  bool even_first;          // the order of the weights' rows in shared memory: a thread has neighbouring channels
};

// A tile as its CTA sees it, written by the scheduling warp.
template <int TOKENS, int SCALES>
struct alignas(16) TmaSlot {
  int pair[TOKENS];      // of each token; -1: none
  float factor[TOKENS];  // of its results
  float scale[SCALES];   // of the rows of the weights
  int expert;            // -1: the end
  int tile;
  int slice, used;  // `used` tokens at most have a pair
  bool shared;      // by the cluster: each CTA loads half of the weights
};

// A store without a branch, so that the instructions of several results interleave.
__device__ __forceinline__ void store_if(bool condition, float* to, float2 v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.v2.f32 [%0], {%1, %2};\n}" ::"l"(to), "f"(v.x),
               "f"(v.y), "r"(static_cast<int>(condition))
               : "memory");
}

template <int TOKENS>
__device__ __forceinline__ int tile_count(const ExpertsParams& p) {
  return min(min(max(*p.padded_pairs, 0) / TOKENS, p.blocks * p.tiles_of_block),
             (p.sorted_length + TOKENS - 1) / TOKENS);
}

// The expert of a tile, -1: none.
__device__ __forceinline__ int expert_of_tile(const ExpertsParams& p, int tile, int tiles) {
  const int expert = tile < tiles ? p.tile_experts[tile / p.tiles_of_block] : -1;
  return expert < p.experts ? expert : -1;
}

// The scheduling warp of the CTA of this rank: fills slots with its tiles, and with the end.
template <bool UP, bool FP8, typename Tile, typename Slot>
__device__ __forceinline__ void schedule_tiles(const ExpertsParams& p, int slices, int rank, Slot* slots,
                                               uint64_t* slot_full, uint64_t* slot_empty) {
  constexpr int C = Tile::cluster, channels = UP ? Tile::half_rows : Tile::rows;
  const int lane = threadIdx.x % 32;
  int slot = 0, slot_phase = 0;
  const auto next = [&]() {
    if (++slot == Tile::slots) {
      slot = 0;
      slot_phase ^= 1;
    }
  };
  if (!p.routed_early) pdl_wait();
  const int tiles = tile_count<Tile::tokens>(p), pairs = p.tokens * p.choices;
  if (p.routed_early) pdl_wait();
  pdl_trigger();
  const int groups = (tiles + C - 1) / C;  // of tiles that a cluster takes
  for (int item = blockIdx.x / C; item < groups * slices; item += gridDim.x / C) {
    const TmaItem at(item, groups, slices);
    const int tile = at.tile * C + rank;
    int expert = expert_of_tile(p, tile, tiles);
    bool shared = false, mine = expert >= 0;
    if constexpr (C > 1) {
      const int other = expert_of_tile(p, at.tile * C + (rank ^ 1), tiles);
      if (!mine) expert = other;  // multiplies along, and stores nothing
      shared = expert == other || other < 0;
    }
    if (expert < 0) continue;
    ptx::mbarrier_wait(slot_empty + slot, slot_phase ^ 1);
    Slot& to = slots[slot];
    int used = 0, pair_of[Tile::tokens / 32];
#pragma unroll
    for (int i = 0; i < Tile::tokens / 32; ++i) {
      const int position = tile * Tile::tokens + i * 32 + lane;
      pair_of[i] = mine && position < p.sorted_length ? p.sorted_pairs[position] : -1;
    }
#pragma unroll
    for (int i = 0; i < Tile::tokens / 32; ++i) {
      const int pair = pair_of[i] < pairs ? pair_of[i] : -1, token = pair / p.choices, n = i * 32 + lane;
      float factor = 1.f;
      if (pair >= 0 && FP8 && !p.x_blocks) factor = p.x_scale[(UP ? token : pair) * p.x_scale_stride];
      if (pair >= 0 && !UP) factor *= p.topk_weights[token * p.topk_weights_stride + (pair - token * p.choices)];
      to.pair[n] = max(pair, -1);
      to.factor[n] = factor;
      if constexpr (Tile::gathers) {
        to.row[n] = pair < 0 ? kNoRow : static_cast<uint32_t>((UP ? token : pair) * (p.x_stride / 16));
      }
      const unsigned some = __ballot_sync(0xffffffffu, pair >= 0);
      if (some) used = i * 32 + 32 - __clz(some);
    }
    if (FP8 && p.scale_rank < 3) {
      float scales[Tile::rows / 32];
#pragma unroll
      for (int i = 0; i < Tile::rows / 32; ++i) {
        const int row = i * 32 + lane;
        const float* const of_expert =
            (UP && row >= Tile::half_rows ? p.weight_scale_high : p.weight_scale_low) + expert * p.scale_expert_stride;
        const int channel = at.slice * channels + (UP ? row % Tile::half_rows : row);
        scales[i] = of_expert[min(channel, p.outputs - 1) * p.scale_row_stride];
      }
#pragma unroll
      for (int i = 0; i < Tile::rows / 32; ++i) to.scale[FP8 ? i * 32 + lane : 0] = scales[i];
    }
    if (lane == 0) {
      to.expert = expert;
      to.slice = at.slice;
      to.tile = mine ? tile : tile ^ 1;
      to.used = used;
      to.shared = shared;
    }
    ptx::mbarrier_arrive(slot_full + slot);
    next();
  }
  ptx::mbarrier_wait(slot_empty + slot, slot_phase ^ 1);
  if (lane == 0) slots[slot].expert = -1;
  ptx::mbarrier_arrive(slot_full + slot);
}

// Loads the weights of a stage, and of a tile that the cluster shares this CTA's half, for both.
template <bool UP, typename Tile>
__device__ __forceinline__ void load_weights(const TmaParams& params, uint32_t to, int k, int expert, int slice,
                                             bool shared, int rank, uint64_t* barrier) {
  constexpr int C = Tile::cluster, channels = UP ? Tile::half_rows : Tile::rows;
  const int group = slice * (channels / 16);
  if (C > 1 && shared) {
    ptx::tma_load_grouped_multicast(to + rank * Tile::half_rows * kLineBytes, rank ? params.high : params.low, k,
                                    group + (UP ? 0 : rank * Tile::half_groups),
                                    expert * (rank ? params.high_step : params.low_step), barrier, (1 << C) - 1);
  } else {
    ptx::tma_load_grouped(to, params.low, k, group, expert * params.low_step, barrier);
    ptx::tma_load_grouped(to + Tile::half_rows * kLineBytes, params.high, k, group + (UP ? 0 : Tile::half_groups),
                          expert * params.high_step, barrier);
  }
}

}  // namespace kestrel::moe
