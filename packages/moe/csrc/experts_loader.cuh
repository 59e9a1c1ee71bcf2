// The loads of experts_kernel: which rows of the weights and of x a CTA copies into which stage.
#pragma once

#include <kestrel/pdl.cuh>
#include <kestrel/ptx/cache.cuh>
#include <kestrel/ptx/cp_async.cuh>
#include <kestrel/ptx/shared.cuh>

#include "experts_pairs.cuh"
#include "experts_tile.cuh"

namespace kestrel::moe {

// The token tiles of a launch: of the pairs that this CTA has grouped itself, or of aligned ones.
template <typename Config>
struct TokenTiles {
  using Tile = typename Config::Tile;
  const ExpertsParams& p;
  const PairGroups<Tile::tokens>& groups;
  int count;

  __device__ __forceinline__ int expert_of(int tile) const {  // -1: not on this device
    const int expert = Config::in_kernel ? groups.tile_expert[tile] : p.tile_experts[tile / p.tiles_of_block];
    return expert < p.experts ? expert : -1;
  }

  __device__ __forceinline__ int pair_of(int tile, int n) const {  // of column n; -1: none
    if constexpr (Config::in_kernel) {
      return n < groups.tile_count[tile] ? groups.pairs[groups.tile_offset[tile] + n] : -1;
    }
    const int at = tile * Tile::tokens + n;
    const int pair = at < p.sorted_length && expert_of(tile) >= 0 ? p.sorted_pairs[at] : -1;
    return pair < p.tokens * p.choices ? pair : -1;
  }

  // The row of x of a pair.
  __device__ __forceinline__ int row_of(int pair) const { return Config::up && pair >= 0 ? pair / p.choices : pair; }
};

// FP8 scales of x in shared memory: of each stage, with p.x_blocks.
template <typename Config>
using StageScales = float[Config::fp8 && !Config::Tile::quantises ? Config::Tile::stages : 1][Config::Tile::tokens];

// The loads of a CTA, `ahead` stages ahead of the MMAs, with an item and a step of their own.
//
// A warp copies four rows of 128 bytes at a time. For mma.sync the 64-byte halves of odd rows are swapped, so that
// fragments are read without bank conflicts; wgmma has its own swizzle. What does not exist becomes zeros.
template <typename Config>
struct StageLoader {
  using Tile = typename Config::Tile;
  static constexpr bool up = Config::up, fp8 = Config::fp8, wgmma = Config::wgmma;
  static constexpr int m_tile_channels = Config::m_tile_channels, ahead = Tile::stages - Config::group_stages;

  const ExpertsParams& p;
  const TokenTiles<Config>& tiles;
  StageScales<Config>& stage_scales;
  const uint32_t memory;
  const int items, slices, steps, row_bytes;
  const uint64_t policy;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, copy_row = lane / 8, copy_byte = lane % 8 * 16;
  const uint32_t to_weights;
  int item = blockIdx.x, step = 0;
  int rows = 0;  // output rows from this thread's first one on
  const char* low = nullptr;
  const char* high = nullptr;
  int x_row[Tile::x_copies];  // of x, -1: none
  int scale_row = -1;

  __device__ __forceinline__ StageLoader(const ExpertsParams& p, const TokenTiles<Config>& tiles,
                                         StageScales<Config>& stage_scales, uint32_t memory, int items, int slices,
                                         int steps)
      : p(p),
        tiles(tiles),
        stage_scales(stage_scales),
        memory(memory),
        items(items),
        slices(slices),
        steps(steps),
        row_bytes(p.width * Config::element),
        policy(ptx::l2_policy(p.evict_first)),
        to_weights(memory + (warp * Tile::m_tiles * 16 + copy_row) * kLineBytes +
                   (copy_byte ^ (wgmma ? copy_row * 16 : copy_row % 2 * 64))) {
    seek_item();
  }

  __device__ __forceinline__ void seek_item() {
    if (item >= items) return;
    const int tile = item / slices, slice = item - tile * slices;
    const int64_t expert = max(tiles.expert_of(tile), 0);
    const int row = slice * Config::channels + warp * Tile::m_tiles * m_tile_channels + copy_row;
    rows = p.outputs - row;
    low = p.weight_low + expert * p.expert_stride_low + row * p.weight_stride + copy_byte;
    high = p.weight_high + expert * p.expert_stride_high + row * p.weight_stride + copy_byte;
#pragma unroll
    for (int i = 0; i < Tile::x_copies; ++i) {
      const int n = (threadIdx.x + i * Tile::threads) / 8;
      x_row[i] = tiles.row_of(n < Tile::tokens ? tiles.pair_of(tile, n) : -1);
    }
    if (fp8 && !Tile::quantises && p.x_blocks && threadIdx.x < Tile::tokens) {
      scale_row = tiles.row_of(tiles.pair_of(tile, threadIdx.x));
    }
  }

  __device__ __forceinline__ void load_weights(int stage) const {
    const int byte = step * kLineBytes;
    const bool inside = item < items && byte + copy_byte < row_bytes;
    const uint32_t to = to_weights + stage * Tile::stage_bytes;
#pragma unroll
    for (int i = 0; i < Tile::m_tiles; ++i) {
#pragma unroll
      for (int r = 0; r < 8; r += 4) {
        const bool valid = inside && i * m_tile_channels + r < rows;
        const int64_t at = valid ? (i * m_tile_channels + r) * p.weight_stride + byte : 0;
        const uint32_t to_row = to ^ (wgmma ? r * 16 : 0);
        ptx::cp_async16_or_zero(to_row + (i * 16 + r) * kLineBytes, valid ? low + at : p.weight_low, valid, policy);
        ptx::cp_async16_or_zero(to_row + (i * 16 + 8 + r) * kLineBytes, valid ? high + at : p.weight_low, valid,
                                policy);
      }
    }
  }

  // Also closes the stage's group of copies.
  __device__ __forceinline__ void load_x(int stage) const {
    if constexpr (!Tile::quantises) {
      const int byte = step * kLineBytes + copy_byte;
      const bool inside = item < items && byte < row_bytes;
#pragma unroll
      for (int i = 0; i < Tile::x_copies; ++i) {
        const int n = (threadIdx.x + i * Tile::threads) / 8;
        const bool valid = inside && x_row[i] >= 0;
        if (n < Tile::tokens) {
          ptx::cp_async16_or_zero(memory + stage * Tile::stage_bytes + (Tile::rows + n) * kLineBytes +
                                      (copy_byte ^ (wgmma ? n % 8 * 16 : n % 2 * 64)),
                                  valid ? p.x + x_row[i] * p.x_stride + byte : p.x, valid);
        }
      }
      if (fp8 && p.x_blocks && threadIdx.x < Tile::tokens) {
        const bool valid = item < items && scale_row >= 0;
        ptx::cp_async4_or_zero(ptx::shared_address(&stage_scales[fp8 ? stage : 0][threadIdx.x]),
                               valid ? p.x_scale + scale_row * p.x_scale_stride + step : p.x_scale, valid);
      }
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ void next_step() {
    if (++step == steps) {
      step = 0;
      item += gridDim.x;
      seek_item();
    }
  }

  __device__ __forceinline__ void load_stage(int stage) {
    load_weights(stage);
    load_x(stage);
    next_step();
  }

  // The first stages.
  __device__ __forceinline__ void start() {
    if constexpr (up) {
#pragma unroll 1
      for (int s = 0; s < ahead; ++s) load_stage(s);
    } else {  // weights are constant: those of the first item are loaded before the PDL wait
      const int first = min(ahead, steps);
#pragma unroll 1
      for (; step < first; ++step) load_weights(step);
      step = 0;
      if (Config::in_kernel || p.routed_early) pdl_wait();
      pdl_trigger();
#pragma unroll 1
      for (int s = 0; s < ahead; ++s) {
        if (s >= first) load_weights(s);
        load_x(s);
        next_step();
      }
    }
  }

  // Loads as many stages as are consumed from `from` on, into those of the group before it, which all warps have read.
  __device__ __forceinline__ void load_ahead(int from, int consumed) {
#pragma unroll
    for (int i = 0; i < Config::group_stages; ++i) {
      if (i >= consumed) break;
      int free_stage = from + ahead + i;
      if (free_stage >= Tile::stages) free_stage -= Tile::stages;
      load_stage(free_stage);
    }
  }
};

}  // namespace kestrel::moe
