// Grouped GEMMs of routed experts, memory-bound by the weights: for up to about 60 tokens per expert.
//
// Weights are operand A (M = weight rows) and tokens operand B (N = 8), so few tokens waste little: mma.sync, or wgmma
// for FP8 on Hopper. A CTA computes 16 * m_tiles weight rows per warp over all of K. Each stage of its cp.async
// pipeline holds 128 bytes of every weight row and token. CTAs are persistent over work items (token tile, row slice),
// and the pipeline continues across items. Sums are in order of k: a token's result does not depend on its tile or on
// the other tokens. The up projection interleaves eight rows of each half of w1 in 16 weight rows, so that a lane holds
// both halves of a channel.
#pragma once

#include <kestrel/pdl.cuh>
#include <kestrel/ptx/cp_async.cuh>
#include <kestrel/ptx/shared.cuh>
#include <kestrel/ptx/wgmma.cuh>

#include "experts_loader.cuh"
#include "experts_mma.cuh"
#include "experts_pairs.cuh"
#include "experts_quantiser.cuh"
#include "experts_rows.cuh"
#include "experts_tile.cuh"

namespace kestrel::moe {

// Stores an element of the result, in W's type; with FP8 weights in fp16 or bf16, as `fp16_result` says.
template <typename W>
__device__ __forceinline__ void store_result(char* row, int64_t column, float value, bool fp16_result) {
  if (std::is_same_v<W, __half> || (std::is_same_v<W, __nv_fp8_e4m3> && fp16_result)) {
    reinterpret_cast<__half*>(row)[column] = __float2half_rn(value);
  } else {
    reinterpret_cast<__nv_bfloat16*>(row)[column] = __float2bfloat16_rn(value);
  }
}

// From L2, where the other CTAs' stores are.
__device__ __forceinline__ float load_cg(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}

// FP8: the block scales of the 16 weight rows from channel `first_channel` on, for 128 columns of K: of MMA rows 0 to 7
// and 8 to 15. (up: halves of w1; down: 16 rows lie in one block.)
template <typename Config>
__device__ __forceinline__ void load_block_scales(const ExpertsParams& p, int64_t expert, int first_channel, int step,
                                                  float& low, float& high) {
  const int channel = min(first_channel, p.outputs - 1);
  const int row_low = channel / kScaleBlock;
  const int row_high = Config::up && !p.split_scales ? (channel + p.outputs) / kScaleBlock : row_low;
  const int64_t at = expert * p.scale_expert_stride + step;
  low = p.weight_scale_low[at + row_low * p.scale_row_stride];
  high = Config::up ? p.weight_scale_high[at + row_high * p.scale_row_stride] : low;
}

// Products of a warp: sums of its weight rows and all tokens. Lane 4 * group + quad holds those of weight rows group
// and group + 8, columns 2 * quad and the next one.
template <typename Config>
using Products = float[Config::Tile::m_tiles][Config::Tile::n_tiles][4];

// product = the weights of this warpgroup in a stage, times x. `between` runs while the products do.
template <typename Config, typename F>
__device__ __forceinline__ void multiply_by_wgmma(Products<Config>& product, uint32_t weights, uint32_t x,
                                                  const F& between) {
  constexpr int n_tiles = Config::Tile::n_tiles;
  float d[4 * n_tiles];
  const uint64_t a = ptx::wgmma_descriptor(weights), b = ptx::wgmma_descriptor(x);
  ptx::wgmma_fence_registers(d);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k) ptx::wgmma<typename Config::W, 8 * n_tiles>(d, a + 2 * k, b + 2 * k, k > 0);
  ptx::wgmma_commit();
  between();
  ptx::wgmma_wait<0>();
  ptx::wgmma_fence_registers(d);
#pragma unroll
  for (int i = 0; i < 4 * n_tiles; ++i) product[0][i / 4][i % 4] = d[i];
}

// acc += the weights of this warp in a stage, times x. Both are addresses of this lane's fragments of the first 64
// bytes of K; those of the second lie at address ^ 64.
template <typename Config>
__device__ __forceinline__ void multiply_by_mma(Products<Config>& acc, uint32_t weights_address, uint32_t x_address) {
  constexpr int m_tiles = Config::Tile::m_tiles, n_tiles = Config::Tile::n_tiles;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t weights = weights_address ^ half * 64, x = x_address ^ half * 64;
    if constexpr (!Config::fp8) {
      uint4 b[n_tiles];
#pragma unroll
      for (int j = 0; j < n_tiles; ++j) b[j] = ptx::load_shared_uint4(x + j * 8 * kLineBytes);
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
        const uint4 low = ptx::load_shared_uint4(weights + i * 16 * kLineBytes);
        const uint4 high = ptx::load_shared_uint4(weights + (i * 16 + 8) * kLineBytes);
#pragma unroll
        for (int j = 0; j < n_tiles; ++j) multiply_line<typename Config::W>(acc[i][j], low, high, b[j]);
      }
    } else {
      HalfCodes low[m_tiles], high[m_tiles];
#pragma unroll
      for (int i = 0; i < m_tiles; ++i) {
        low[i] = HalfCodes(ptx::load_shared_uint4(weights + i * 16 * kLineBytes));
        high[i] = HalfCodes(ptx::load_shared_uint4(weights + (i * 16 + 8) * kLineBytes));
      }
#pragma unroll
      for (int j = 0; j < n_tiles; ++j) {
        const HalfCodes b(ptx::load_shared_uint4(x + j * 8 * kLineBytes));
#pragma unroll
        for (int i = 0; i < m_tiles; ++i) multiply_line(acc[i][j], low[i], high[i], b);
      }
    }
  }
}

// FP8: adds the product of a stage, times its scales if they are of 128 columns of K. first_channel: of the warp.
// x_scale_of(n): of column n.
template <typename Config, typename F>
__device__ __forceinline__ void add_scaled(Products<Config>& acc, const Products<Config>& product,
                                           const ExpertsParams& p, int64_t expert, int first_channel, int step,
                                           const F& x_scale_of) {
  constexpr int n_tiles = Config::Tile::n_tiles;
  const int lane = threadIdx.x % 32, quad = lane % 4;
#pragma unroll
  for (int i = 0; i < Config::Tile::m_tiles; ++i) {
    float low = 1.f, high = 1.f;
    if (p.scale_rank == 3) {
      load_block_scales<Config>(p, expert, first_channel + i * Config::m_tile_channels, step, low, high);
    }
    if (p.x_blocks) {
#pragma unroll
      for (int j = 0; j < n_tiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float x_scale = x_scale_of(j * 8 + 2 * quad + c % 2);
          acc[i][j][c] = fmaf(product[i][j][c] * x_scale, c < 2 ? low : high, acc[i][j][c]);
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < n_tiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[i][j][c] = fmaf(product[i][j][c], c < 2 ? low : high, acc[i][j][c]);
      }
    }
  }
}

// Stores the results of a pair: the gated or the raw ones of a channel, or the weighted ones of two channels, eight
// apart.
template <typename Config>
__device__ __forceinline__ void store_pair(const ExpertsParams& p, int pair, int token, int channel, float low,
                                           float high) {
  using W = typename Config::W;
  if constexpr (Config::up) {
    char* row = p.out + pair * p.out_stride;
    if (p.gate == Gate::none) {
      store_result<W>(row, channel, low, p.fp16_result);
      store_result<W>(row, p.outputs + channel, high, p.fp16_result);
    } else if constexpr (Config::fp8) {
      reinterpret_cast<float*>(row)[channel] = gated_value(low, high, p.gate);
    } else {
      store_result<W>(row, channel, gated_value(low, high, p.gate), /*fp16_result=*/false);
    }
  } else {
    const float weight = p.topk_weights[token * p.topk_weights_stride + (pair - token * p.choices)];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float value = weight * (h ? high : low);
      if (p.partial) {
        p.partial[int64_t{pair} * p.outputs + channel + 8 * h] = value;
      } else {
        store_result<W>(p.out + pair * p.out_stride, channel + 8 * h, value, p.fp16_result);
      }
    }
  }
}

// The epilogue of an item: scales, then gates or weights, then stores. pairs: of the columns. row_scales: of rows of x
// that were quantised here.
template <typename Config>
__device__ __forceinline__ void store_item(const Products<Config>& acc, const ExpertsParams& p, const int* pairs,
                                           const float* row_scales, int64_t expert, int first_channel) {
  using Tile = typename Config::Tile;
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
#pragma unroll
  for (int i = 0; i < Tile::m_tiles; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::n_tiles; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int n = j * 8 + 2 * quad + c;
        const int pair = pairs[n];
        const int channel = first_channel + i * Config::m_tile_channels + group;
        const int token = pair / p.choices;
        float low = acc[i][j][c], high = acc[i][j][c + 2];
        if (pair < 0 || channel >= p.outputs) continue;
        if constexpr (Config::fp8) {
          if (p.scale_rank < 3) {
            const int64_t at = expert * p.scale_expert_stride + channel * p.scale_row_stride;
            low *= p.weight_scale_low[at];
            high *= p.weight_scale_high[at];
          }
          if (!p.x_blocks) {
            const float x_scale = Tile::quantises ? row_scales[Tile::quantises ? n : 0]
                                                  : p.x_scale[(Config::up ? token : pair) * p.x_scale_stride];
            low *= x_scale;
            high *= x_scale;
          }
        }
        store_pair<Config>(p, pair, token, channel, low, high);
      }
    }
  }
}

// Sums the choices of every token in order, for the channels of a slice. All CTAs have stored their terms.
template <typename Config>
__device__ __forceinline__ void sum_choices(const ExpertsParams& p, const int* expert_of_pair, int slice) {
  constexpr int channels = Config::channels;
  for (int i = threadIdx.x; i < channels * p.tokens; i += Config::Tile::threads) {
    const int token = i / channels, channel = slice * channels + (i - token * channels);
    if (channel >= p.outputs) continue;
    float total = 0.f;
#pragma unroll 8
    for (int j = 0; j < p.choices; ++j) {
      const int pair = token * p.choices + j;
      const float value = expert_of_pair[pair] >= 0 ? load_cg(p.partial + int64_t{pair} * p.outputs + channel) : 0.f;
      total += value;
    }
    store_result<typename Config::W>(p.out + token * p.out_stride, channel, total, p.fp16_result);
  }
}

// By all CTAs: no chosen expert is on this device, so the result is 0.
template <typename Config>
__device__ __forceinline__ void store_zeros(const ExpertsParams& p) {
  constexpr int threads = Config::Tile::threads;
  for (int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x; i < int64_t{p.tokens} * p.outputs;
       i += int64_t{gridDim.x} * threads) {
    const int64_t token = i / p.outputs;
    store_result<typename Config::W>(p.out + token * p.out_stride, i - token * p.outputs, 0.f, p.fp16_result);
  }
}

// W: the element type of weights and x. With FP8 each stage's product is scaled (by block scales, else by 1) before it
// is added to the accumulator. IN_KERNEL: every CTA groups the pairs by expert itself, and with `arrivals` the last CTA
// of a row slice sums the choices; otherwise the pairs are aligned.
template <typename W, Projection PROJECTION, bool IN_KERNEL, typename Tile>
__device__ __forceinline__ void multiply_experts(const ExpertsParams& p) {
  using Config = ExpertsConfig<W, PROJECTION, IN_KERNEL, Tile>;
  constexpr bool up = Config::up, fp8 = Config::fp8, wgmma = Config::wgmma;
  constexpr int num_stages = Tile::stages, group_stages = Config::group_stages;
  constexpr int scales_of_row = kWidthQuantised / kScaleBlock;
  extern __shared__ __align__(128) char dynamic[];  // from `memory` on: stages, then the rows that the kernel quantises
  __shared__ PairGroups<Tile::tokens> groups;
  __shared__ int item_pairs[2][Tile::tokens];  // of this item and the next
  __shared__ bool is_last;                     // this CTA is the last one of its slice
  __shared__ float row_scales[Tile::quantises ? Tile::tokens * scales_of_row : 1];
  __shared__ StageScales<Config> stage_scales;
  const uint32_t memory = (ptx::shared_address(dynamic) + Tile::alignment - 1) / Tile::alignment * Tile::alignment;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int slices = (p.outputs + Config::channels - 1) / Config::channels;
  const int steps = (p.width * Config::element + kLineBytes - 1) / kLineBytes;  // of an item

  if constexpr (up) {  // the launch just before may have written the routing
    pdl_wait();
    pdl_trigger();
  }
  TokenTiles<Config> tiles{p, groups, 0};
  if constexpr (IN_KERNEL) {
    groups.build(p);
    tiles.count = groups.tiles;
  } else {
    if (!up && !p.routed_early) pdl_wait();
    tiles.count = min(min(max(*p.padded_pairs, 0) / Tile::tokens, p.blocks * p.tiles_of_block),
                      (p.sorted_length + Tile::tokens - 1) / Tile::tokens);
  }
  const int items = tiles.count * slices;
  if (up && p.arrivals && blockIdx.x == 0) {
    for (int i = threadIdx.x; i < p.arrival_slices; i += Tile::threads) p.arrivals[i] = 0;
  }

  // Prologue: rows of x that the CTA quantises, ahead of the weights, and the first stages.
  StageLoader<Config> loader(p, tiles, stage_scales, memory, items, slices, steps);
  [[maybe_unused]] RowQuantiser<Tile, up ? 2 : 4> rows;
  [[maybe_unused]] int quantised = -1;  // the tile whose rows are in shared memory
  const auto load_rows_of = [&](int tile) {
    rows.load(p, groups.tile_count[tile],
              [&](int n) { return up ? tiles.pair_of(tile, n) / p.choices : tiles.pair_of(tile, n); });
  };
  if (up && Tile::quantises && loader.item < items) load_rows_of(loader.item / slices);
  loader.start();
  if (IN_KERNEL && !up && tiles.count == 0) return store_zeros<Config>(p);

  // Where this lane's fragments lie in a stage, see multiply_by_mma.
  const uint32_t fragment = group * kLineBytes + (quad * 16 ^ (group & 1) * 64);
  const uint32_t from_weights = memory + warp * Tile::m_tiles * 16 * kLineBytes + fragment;
  const uint32_t x_codes =
      memory + num_stages * Tile::stage_bytes;  // of the rows quantised here, [step][token][128 bytes]
  const auto x_at = [&](int stage, int step) {
    return Tile::quantises ? x_codes + step * Tile::x_bytes
                           : memory + stage * Tile::stage_bytes + Tile::rows * kLineBytes;
  };
  int stage = 0, parity = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x, parity ^= 1) {
    const int tile = item / slices, slice = item - tile * slices;
    const int64_t expert = max(tiles.expert_of(tile), 0);
    const int first_channel = slice * Config::channels + warp * Tile::m_tiles * Config::m_tile_channels;
    // Read in the epilogue; two halves, as slow warps may still be in that of the previous item.
    if (threadIdx.x < Tile::tokens) item_pairs[parity][threadIdx.x] = tiles.pair_of(tile, threadIdx.x);
    if constexpr (Tile::quantises) {
      if (tile != quantised) {
        if (!up || quantised >= 0) load_rows_of(tile);
        __syncthreads();  // all warps are done with the previous rows
        if constexpr (!up) {
          rows.template store<float>(p, x_codes, row_scales, wgmma);
        } else if (p.fp16_result) {
          rows.template store<__half>(p, x_codes, row_scales, wgmma);
        } else {
          rows.template store<__nv_bfloat16>(p, x_codes, row_scales, wgmma);
        }
        quantised = tile;
      }
    }
    Products<Config> acc = {};
    for (int start = 0; start < steps; start += group_stages) {
      const int ready = min(group_stages, steps - start), from_stage = stage;  // ready: stages before the next barrier
      if (ready == group_stages) {
        ptx::cp_async_wait<(num_stages - 2 * group_stages > 0 ? num_stages - 2 * group_stages : 0)>();
      } else {
        ptx::cp_async_wait<num_stages - group_stages - 1>();
      }
      if constexpr (wgmma) ptx::fence_proxy_async();
      __syncthreads();  // all warps see these stages and have finished reading the previous ones
#pragma unroll
      for (int u = 0; u < group_stages; ++u) {
        if (u >= ready) break;
        const int step = start + u;
        const auto load_ahead = [&]() {
          if (u == 0) loader.load_ahead(from_stage, ready);
        };
        if constexpr (!fp8) {
          load_ahead();
          multiply_by_mma<Config>(acc, from_weights + stage * Tile::stage_bytes, x_at(stage, step) + fragment);
        } else {
          Products<Config> product = {};
          if constexpr (wgmma) {
            multiply_by_wgmma<Config>(product, memory + stage * Tile::stage_bytes + warp / 4 * 64 * kLineBytes,
                                      x_at(stage, step), load_ahead);
          } else {
            load_ahead();
            multiply_by_mma<Config>(product, from_weights + stage * Tile::stage_bytes, x_at(stage, step) + fragment);
          }
          add_scaled<Config>(acc, product, p, expert, first_channel, step, [&](int n) {
            return Tile::quantises ? row_scales[n * scales_of_row + step]
                                   : stage_scales[Tile::quantises ? 0 : stage][n];
          });
        }
        if (++stage == num_stages) stage = 0;
      }
    }
    store_item<Config>(acc, p, item_pairs[parity], row_scales, expert, first_channel);
    // The last CTA that stores an item of a slice sums the choices.
    if (IN_KERNEL && !up && p.arrivals) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) is_last = atomicAdd(p.arrivals + slice, 1u) == static_cast<unsigned>(tiles.count - 1);
      __syncthreads();
      if (is_last) {
        __threadfence();
        sum_choices<Config>(p, groups.expert, slice);
      }
    }
  }
}

template <typename W, Projection PROJECTION, bool IN_KERNEL, typename Tile>
__global__ void __launch_bounds__(Tile::threads, Tile::ctas_per_sm)
    experts_kernel(const __grid_constant__ ExpertsParams p) {
  if constexpr (is_built<Tile>()) multiply_experts<W, PROJECTION, IN_KERNEL, Tile>(p);
}

}  // namespace kestrel::moe
