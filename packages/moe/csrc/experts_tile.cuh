// The tile of a CTA of experts_kernel, its shared memory, and what follows from the tile and the element type.
#pragma once

#include <cuda_fp8.h>
#include <kestrel/ptx/wgmma.cuh>

#include <type_traits>

#include "experts_params.cuh"

namespace kestrel::moe {

enum class Rows { as_given, quantised_here };  // of x; quantised rows of a tile stay in shared memory for all of K

// The tile of a CTA and its pipeline. FOR_SMALL: built only for GPUs with 99 KB of shared memory per CTA.
template <int N_TILES_, int M_TILES_, int WARPS_, int STAGES_, int CTAS_PER_SM_, bool FOR_SMALL_ = false,
          Rows X_ = Rows::as_given>
struct ExpertsTile {
  static constexpr bool for_small = FOR_SMALL_, quantises = X_ == Rows::quantised_here;
  static constexpr int n_tiles = N_TILES_;  // of 8 tokens
  static constexpr int m_tiles = M_TILES_;  // of 16 weight rows, per warp
  static constexpr int warps = WARPS_;
  static constexpr int threads = 32 * warps;
  static constexpr int stages = STAGES_;
  static constexpr int ctas_per_sm = CTAS_PER_SM_;
  static constexpr int tokens = 8 * n_tiles;
  static constexpr int rows = 16 * m_tiles * warps;    // of weights
  static constexpr int x_bytes = tokens * kLineBytes;  // of 128 bytes of K
  // A stage holds [weight rows of each warp, then tokens][128 bytes of K].
  static constexpr int stage_bytes = rows * kLineBytes + (quantises ? 0 : x_bytes);
  static constexpr int alignment = 1024;  // of wgmma's operands
  static constexpr int shared_bytes =
      stages * stage_bytes + (quantises ? kWidthQuantised / kLineBytes * x_bytes : 0) + alignment;
  static constexpr int x_copies = (tokens * 8 + threads - 1) / threads;  // of 16 bytes, per thread and stage
};

constexpr int kSmallSharedBytes = 96 * 1024;  // dynamic, for a CTA of sm_86, sm_89 and sm_120

// Whether the architecture that is compiled for can run a kernel with this tile.
template <typename Tile>
__device__ constexpr bool is_built() {
#ifdef KESTREL_SHARED_86
#error "DISTINCT_86 of CMakeLists.txt must name every source of these kernels: sm_86 may not run those of sm_80"
#endif
#ifdef __CUDA_ARCH__
  constexpr bool small =
      __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200 || KESTREL_EXPERTS_MMA_SYNC == 2;
  return small ? Tile::shared_bytes <= kSmallSharedBytes : !Tile::for_small;
#else
  return true;
#endif
}

// The compile-time choices of the parts of a kernel.
template <typename W_, Projection PROJECTION, bool IN_KERNEL, typename Tile_>
struct ExpertsConfig {
  using W = W_;  // the element type of weights and x
  using Tile = Tile_;
  static constexpr bool up = PROJECTION == Projection::up, fp8 = std::is_same_v<W, __nv_fp8_e4m3>;
  static constexpr bool in_kernel = IN_KERNEL;                          // every CTA groups the pairs itself
  static constexpr int element = fp8 ? 1 : 2;                           // bytes, of weights and x
  static constexpr int group_stages = fp8 || Tile::stages < 5 ? 1 : 2;  // consumed between two barriers of the CTA
  static constexpr int m_tile_channels = up ? 8 : 16;                   // output channels of 16 weight rows
  // Whether products are wgmma's. FP8 mma.sync is emulated on Hopper, by conversions that take as long as the loads.
#if defined(KESTREL_HAS_WGMMA) && KESTREL_EXPERTS_MMA_SYNC == 0
  static constexpr bool wgmma = fp8;
#else
  static constexpr bool wgmma = false;
#endif
  static_assert(!wgmma || Tile::m_tiles == 1, "a warpgroup's rows are those of its warps in turn");
  static constexpr int channels = m_tile_channels * Tile::m_tiles * Tile::warps;  // of the result, for a CTA
};

}  // namespace kestrel::moe
