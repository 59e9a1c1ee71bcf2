// quant_tensor: quantisation of a whole tensor with one computed scale, in one launch.
//
// A warp takes tiles of the tensor in turn: the first kRegisterTiles stay in registers, the next p.staged in shared
// memory, the rest is read twice, the last part of it from L2. A barrier over the grid separates the maximum from the
// codes, so all blocks must be resident: one block or one cluster for small tensors, else a cooperative launch. Maxima
// travel through DSMEM of the cluster or through p.partial_amax, which is written before it is read and needs no reset.
// PDL cannot deadlock the barrier: the previous kernel has started all its blocks when it triggers this one, and this
// one triggers the next when all its own blocks run.
#pragma once

#include <cooperative_groups.h>
#include <kestrel/ptx/cluster.cuh>
#include <kestrel/ptx/cp_async.cuh>

#include "codes.cuh"

namespace kestrel::quant {

constexpr int kTensorWarps = 14;  // per block: with two blocks per SM a thread has 72 registers
// On sm_120 the kernel needs more than those.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ / 10 == 120
constexpr int kTensorBlocksPerSM = 1;
#else
constexpr int kTensorBlocksPerSM = 2;
#endif
constexpr int kRegisterTiles = 2;  // per warp
constexpr int kTilePacks = 4;      // per lane of a tile
constexpr int kTileBytes = 32 * kTilePacks * 16;
constexpr int kStageBytes = kTensorWarps * kTileBytes;  // of shared memory: one tile per warp

// The maximum of the grid from the maximum of each block, for every thread.
__device__ __forceinline__ float grid_amax(float amax, const Params& p, float* memory, const SegmentAmax& block_amax) {
  if (p.cluster) {
    if (threadIdx.x < gridDim.x) *ptx::map_shared(memory + blockIdx.x, threadIdx.x) = amax;
    ptx::cluster_sync();
    amax = threadIdx.x < gridDim.x ? memory[threadIdx.x] : 0.f;
  } else {
    if (threadIdx.x == 0) __stcg(p.partial_amax + blockIdx.x, amax);
    cooperative_groups::this_grid().sync();
    for (int i = threadIdx.x; i < gridDim.x; i += blockDim.x) amax = fmaxf(amax, __ldcg(p.partial_amax + i));
  }
  return block_amax(amax);
}

// Starts the copy of a lane's packs of a tile to shared memory; only that lane reads them.
template <typename T, int V>
__device__ __forceinline__ void stage_tile(unsigned stage, const char* values, int count) {
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (v * 32 * Pack<T>::size >= count) break;
    ptx::cp_async16(stage + v * 512, values + v * 512);
  }
}

template <typename T, int V>
__device__ __forceinline__ RegisterTile<T, V> load_staged_tile(unsigned stage, int count) {
  RegisterTile<T, V> tile;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    tile.packs[v].bits = make_uint4(0, 0, 0, 0);
    if (v * 32 * Pack<T>::size >= count) continue;
    tile.packs[v].bits = ptx::load_shared_uint4(stage + v * 512);
  }
  return tile;
}

template <typename C, typename T, Access ACCESS>
__global__ void __launch_bounds__(kTensorWarps * 32, kTensorBlocksPerSM)
    quant_tensor(const __grid_constant__ Params p) {
  constexpr bool kPacked = ACCESS == Access::packs;
  __shared__ float memory[3][32];
  extern __shared__ uint4 staged_tiles[];  // [p.staged][kTensorWarps] tiles
  constexpr int V = kTilePacks;
  using Tile = Segment<C, T>;
  const int lane = threadIdx.x & 31, tile_lane = kPacked ? lane : 0;
  const unsigned first = (threadIdx.x >> 5) * gridDim.x + blockIdx.x, step = kTensorWarps * gridDim.x;
  const unsigned first_staged = first + kRegisterTiles * step;
  const unsigned first_reread = first + (kPacked ? kRegisterTiles + p.staged : 0) * step;
  const unsigned rereads = first_reread < p.segments ? (p.segments - first_reread - 1) / step + 1 : 0;
  const SegmentAmax block_amax(memory[0], 0, threadIdx.x, blockDim.x);
  const SegmentAmax block_amax_of_grid(memory[1], 0, threadIdx.x, blockDim.x);
  if (p.cluster) ptx::cluster_sync();  // the shared memory of all blocks exists
  const unsigned stage = ptx::shared_address(staged_tiles) + (threadIdx.x >> 5) * kTileBytes + lane * 16;
  RegisterTile<T, V> tiles[kRegisterTiles];
  float largest = 0.f, amax = 0.f;  // largest: of `tiles`, NaN and inf included
  if (kPacked && p.prefetch > 0) {
#pragma unroll
    for (int i = 0; i < kRegisterTiles; ++i) {
      const Tile tile(p, first + i * step, lane);
      prefetch<V>(tile.values, 16, Pack<T>::size, lane, 32, tile.count);
    }
  }
  pdl_wait();
  pdl_trigger();

  // The maximum: tiles in registers, tiles in shared memory, tiles that are read twice.
  if constexpr (kPacked) {
#pragma unroll
    for (int i = 0; i < kRegisterTiles; ++i) {
      const Tile tile(p, first + i * step, lane);
      tiles[i].load(tile.values, 32, tile.count);
    }
#pragma unroll 1
    for (unsigned i = 0; i < p.staged; ++i) {
      const Tile tile(p, first_staged + i * step, lane);
      stage_tile<T, V>(stage + i * kStageBytes, tile.values, tile.count);
    }
#pragma unroll
    for (int i = 0; i < kRegisterTiles; ++i) {
      const Tile tile(p, first + i * step, lane);
      const float tile_largest = tiles[i].largest();
      amax = fmaxf(amax, tiles[i].amax(tile_largest, tile.values, 32, tile.count));
      largest = ptx::max_nan(largest, tile_largest);
    }
    ptx::cp_async_wait_all();
#pragma unroll 1
    for (unsigned i = 0; i < p.staged; ++i) {
      const Tile tile(p, first_staged + i * step, lane);
      const RegisterTile<T, V> staged = load_staged_tile<T, V>(stage + i * kStageBytes, tile.count);
      amax = fmaxf(amax, staged.amax(staged.largest(), tile.values, 32, tile.count));
    }
  }
  for (unsigned i = 0; i < rereads; ++i) {
    const Tile tile(p, first_reread + i * step, tile_lane);
    if constexpr (kPacked) {
      RegisterTile<T, V> values;
      values.load(tile.values, 32, tile.count);
      amax = fmaxf(amax, values.amax(values.largest(), tile.values, 32, tile.count));
    } else {
      for (int j = lane; j < tile.count; j += 32 * kElements) {
        float x[kElements];
        load_elements(x, reinterpret_cast<const T*>(tile.values), j, 32, tile.count);
        amax = fmaxf(amax, finite_amax(x));
      }
    }
  }

  amax = block_amax(amax);
  if (gridDim.x > 1) amax = grid_amax(amax, p, memory[2], block_amax_of_grid);
  const float scale = C::scale(amax, p.scale_ub);
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.scales = scale;
  const DivisorOf<T> divisor(scale);

  // The codes, in the same order.
  if constexpr (kPacked) {
#pragma unroll
    for (int i = 0; i < kRegisterTiles; ++i) {
      encode(tiles[i], largest, divisor, Tile(p, first + i * step, lane), 32, p.streamed);
    }
#pragma unroll 1
    for (unsigned i = 0; i < p.staged; ++i) {
      const Tile tile(p, first_staged + i * step, lane);
      const RegisterTile<T, V> staged = load_staged_tile<T, V>(stage + i * kStageBytes, tile.count);
      encode(staged, staged.largest(), divisor, tile, 32, p.streamed);
    }
  }
  for (unsigned i = rereads; i-- > 0;) {  // the tiles that were read last are still in L2
    const Tile tile(p, first_reread + i * step, tile_lane);
    if constexpr (kPacked) {
      RegisterTile<T, V> values;
      values.load(tile.values, 32, tile.count);
      encode(values, values.largest(), divisor, tile, 32, p.streamed);
    } else {
      const T* values = reinterpret_cast<const T*>(tile.values);
      for (int j = lane; j < tile.count; j += 32 * kElements) {
        float x[kElements];
        load_elements(x, values, j, 32, tile.count);
        encode_elements<C>(x, divisor, values, tile.codes, j, 32, tile.count);
      }
    }
  }
}

}  // namespace kestrel::quant
