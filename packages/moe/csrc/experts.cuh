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
#include <kestrel/ptx/cache.cuh>
#include <kestrel/ptx/cp_async.cuh>
#include <kestrel/ptx/shared.cuh>
#include <kestrel/ptx/wgmma.cuh>

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

// W: the element type of weights and x. With FP8 each stage's product is scaled (by block scales, else by 1) before it
// is added to the accumulator. IN_KERNEL: every CTA groups the pairs by expert itself, and with `arrivals` the last CTA
// of a row slice sums the choices; otherwise the pairs are aligned.
template <typename W, Projection PROJECTION, bool IN_KERNEL, typename Tile>
__device__ __forceinline__ void multiply_experts(const ExpertsParams& p) {
  using Config = ExpertsConfig<W, PROJECTION, Tile>;
  constexpr bool up = PROJECTION == Projection::up, fp8 = std::is_same_v<W, __nv_fp8_e4m3>;
  constexpr bool wgmma = Config::wgmma;
  constexpr int m_tiles = Tile::m_tiles, n_tiles = Tile::n_tiles, num_stages = Tile::stages;
  constexpr int group_stages = fp8 || num_stages < 5 ? 1 : 2;  // consumed between two barriers of the CTA
  constexpr int element = fp8 ? 1 : 2;                         // bytes, of weights and x
  constexpr int m_tile_channels = up ? 8 : 16;                 // output channels of 16 weight rows
  constexpr int channels = Config::channels;                   // of a CTA
  extern __shared__ __align__(128) char dynamic[];  // from `memory` on: stages, then the rows that the kernel quantises
  __shared__ PairGroups<Tile::tokens> groups;
  __shared__ int item_pairs[2][Tile::tokens];  // of this item and the next
  __shared__ bool is_last;                     // this CTA is the last one of its slice
  __shared__ float row_scales[Tile::quantises ? Tile::tokens * (kWidthQuantised / kScaleBlock) : 1];
  __shared__ float stage_scales[fp8 && !Tile::quantises ? num_stages : 1][Tile::tokens];  // of x, with p.x_blocks
  const uint32_t memory = (ptx::shared_address(dynamic) + Tile::alignment - 1) / Tile::alignment * Tile::alignment;
  // Lane 4 * group + quad holds sums of weight rows group and group + 8, columns 2 * quad and the next one.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int slices = (p.outputs + channels - 1) / channels;
  const int row_bytes = p.width * element;
  const int steps = (row_bytes + kLineBytes - 1) / kLineBytes;  // of an item

  // -- token tiles --

  if constexpr (up) {  // the launch just before may have written the routing
    pdl_wait();
    pdl_trigger();
  }
  int tiles;
  if constexpr (IN_KERNEL) {
    groups.build(p);
    tiles = groups.tiles;
  } else {
    if (!up && !p.routed_early) pdl_wait();
    tiles = min(min(max(*p.padded_pairs, 0) / Tile::tokens, p.blocks * p.tiles_of_block),
                (p.sorted_length + Tile::tokens - 1) / Tile::tokens);
  }
  const int items = tiles * slices;
  if (up && p.arrivals && blockIdx.x == 0) {
    for (int i = threadIdx.x; i < p.arrival_slices; i += Tile::threads) p.arrivals[i] = 0;
  }
  const auto expert_of = [&](int tile) {  // -1: not on this device
    const int expert = IN_KERNEL ? groups.tile_expert[tile] : p.tile_experts[tile / p.tiles_of_block];
    return expert < p.experts ? expert : -1;
  };
  const auto pair_of = [&](int tile, int n) {  // of column n; -1: none
    if constexpr (IN_KERNEL) return n < groups.tile_count[tile] ? groups.pairs[groups.tile_offset[tile] + n] : -1;
    const int at = tile * Tile::tokens + n;
    const int pair = at < p.sorted_length && expert_of(tile) >= 0 ? p.sorted_pairs[at] : -1;
    return pair < p.tokens * p.choices ? pair : -1;
  };

  // -- loads: num_stages - group_stages stages ahead of the MMAs, with an item and a step of their own --
  //
  // A warp copies four rows of 128 bytes at a time. For mma.sync the 64-byte halves of odd rows are swapped, so that
  // fragments are read without bank conflicts; wgmma has its own swizzle. What does not exist becomes zeros.
  const uint64_t policy = ptx::l2_policy(p.evict_first);
  const int copy_row = lane / 8, copy_byte = lane % 8 * 16;
  const uint32_t to_weights = memory + (warp * m_tiles * 16 + copy_row) * kLineBytes +
                              (copy_byte ^ (wgmma ? copy_row * 16 : copy_row % 2 * 64));
  int load_item = blockIdx.x, load_step = 0;
  int load_rows = 0;  // output rows from this thread's first one on
  const char* load_low = nullptr;
  const char* load_high = nullptr;
  int x_row[Tile::x_copies];  // of x, -1: none
  [[maybe_unused]] int scale_row = -1;
  const auto seek_item = [&]() {
    if (load_item >= items) return;
    const int tile = load_item / slices, slice = load_item - tile * slices;
    const int64_t expert = max(expert_of(tile), 0);
    const int row = slice * channels + warp * m_tiles * m_tile_channels + copy_row;
    load_rows = p.outputs - row;
    load_low = p.weight_low + expert * p.expert_stride_low + row * p.weight_stride + copy_byte;
    load_high = p.weight_high + expert * p.expert_stride_high + row * p.weight_stride + copy_byte;
#pragma unroll
    for (int i = 0; i < Tile::x_copies; ++i) {
      const int n = (threadIdx.x + i * Tile::threads) / 8;
      const int pair = n < Tile::tokens ? pair_of(tile, n) : -1;
      x_row[i] = up && pair >= 0 ? pair / p.choices : pair;
    }
    if (fp8 && !Tile::quantises && p.x_blocks && threadIdx.x < Tile::tokens) {
      const int pair = pair_of(tile, threadIdx.x);
      scale_row = up && pair >= 0 ? pair / p.choices : pair;
    }
  };
  const auto load_weights = [&](int stage) {
    const int byte = load_step * kLineBytes;
    const bool inside = load_item < items && byte + copy_byte < row_bytes;
    const uint32_t to = to_weights + stage * Tile::stage_bytes;
#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
      for (int r = 0; r < 8; r += 4) {
        const bool valid = inside && i * m_tile_channels + r < load_rows;
        const int64_t at = valid ? (i * m_tile_channels + r) * p.weight_stride + byte : 0;
        const uint32_t to_row = to ^ (wgmma ? r * 16 : 0);
        ptx::cp_async16_or_zero(to_row + (i * 16 + r) * kLineBytes, valid ? load_low + at : p.weight_low, valid,
                                policy);
        ptx::cp_async16_or_zero(to_row + (i * 16 + 8 + r) * kLineBytes, valid ? load_high + at : p.weight_low, valid,
                                policy);
      }
    }
  };
  const auto load_x = [&](int stage) {  // and closes the stage's group of copies
    if constexpr (!Tile::quantises) {
      const int byte = load_step * kLineBytes + copy_byte;
      const bool inside = load_item < items && byte < row_bytes;
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
        const bool valid = load_item < items && scale_row >= 0;
        ptx::cp_async4_or_zero(ptx::shared_address(&stage_scales[fp8 ? stage : 0][threadIdx.x]),
                               valid ? p.x_scale + scale_row * p.x_scale_stride + load_step : p.x_scale, valid);
      }
    }
    ptx::cp_async_commit();
  };
  const auto next_step = [&]() {
    if (++load_step == steps) {
      load_step = 0;
      load_item += gridDim.x;
      seek_item();
    }
  };
  seek_item();

  // -- prologue: the first num_stages - group_stages stages --

  [[maybe_unused]] RowQuantiser<Tile, up ? 2 : 4> rows;
  [[maybe_unused]] int quantised = -1;  // the tile whose rows are in shared memory
  const auto load_rows_of = [&](int tile) {
    rows.load(p, groups.tile_count[tile], [&](int n) { return up ? pair_of(tile, n) / p.choices : pair_of(tile, n); });
  };
  if constexpr (up) {
    if (Tile::quantises && load_item < items) load_rows_of(load_item / slices);  // ahead of the weights
#pragma unroll 1
    for (int s = 0; s < num_stages - group_stages; ++s) {
      load_weights(s);
      load_x(s);
      next_step();
    }
  } else {  // weights are constant: those of the first item are loaded before the PDL wait
    const int first = min(num_stages - group_stages, steps);
#pragma unroll 1
    for (; load_step < first; ++load_step) load_weights(load_step);
    load_step = 0;
    if (IN_KERNEL || p.routed_early) pdl_wait();
    pdl_trigger();
#pragma unroll 1
    for (int s = 0; s < num_stages - group_stages; ++s) {
      if (s >= first) load_weights(s);
      load_x(s);
      next_step();
    }
  }

  if (IN_KERNEL && !up && tiles == 0) {  // no chosen expert is on this device: the result is 0
    for (int64_t i = int64_t{blockIdx.x} * Tile::threads + threadIdx.x; i < int64_t{p.tokens} * p.outputs;
         i += int64_t{gridDim.x} * Tile::threads) {
      const int64_t token = i / p.outputs;
      store_result<W>(p.out + token * p.out_stride, i - token * p.outputs, 0.f, p.fp16_result);
    }
    return;
  }

  // -- main loop over items --

  // Where this lane's fragments lie in a stage: those of the first 64 bytes; those of the second are at address ^ 64.
  const uint32_t fragment = group * kLineBytes + (quad * 16 ^ (group & 1) * 64);
  const uint32_t from_weights = memory + warp * m_tiles * 16 * kLineBytes + fragment;
  const uint32_t x_codes =
      memory + num_stages * Tile::stage_bytes;  // of the rows quantised here, [step][token][128 bytes]
  const auto x_at = [&](int stage, int step) {
    return Tile::quantises ? x_codes + step * Tile::x_bytes
                           : memory + stage * Tile::stage_bytes + Tile::rows * kLineBytes;
  };
  int stage = 0, parity = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x, parity ^= 1) {
    const int tile = item / slices, slice = item - tile * slices;
    const int64_t expert = max(expert_of(tile), 0);
    const int first_channel = slice * channels + warp * m_tiles * m_tile_channels;
    // Read in the epilogue; two halves, as slow warps may still be in that of the previous item.
    if (threadIdx.x < Tile::tokens) item_pairs[parity][threadIdx.x] = pair_of(tile, threadIdx.x);
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
    float acc[m_tiles][n_tiles][4] = {};
    for (int start = 0; start < steps; start += group_stages) {
      const int ready = min(group_stages, steps - start), from_stage = stage;  // ready: stages before the next barrier
      if (ready == group_stages) {
        ptx::cp_async_wait<(num_stages - 2 * group_stages > 0 ? num_stages - 2 * group_stages : 0)>();
      } else {
        ptx::cp_async_wait<num_stages - group_stages - 1>();
      }
      if constexpr (wgmma) ptx::fence_proxy_async();
      __syncthreads();  // all warps see these stages and have finished reading the previous ones
      const auto load_ahead = [&]() {
#pragma unroll
        for (int i = 0; i < group_stages; ++i) {
          if (i >= ready) break;
          int free_stage = from_stage + num_stages - group_stages + i;
          if (free_stage >= num_stages) free_stage -= num_stages;
          load_weights(free_stage);
          load_x(free_stage);
          next_step();
        }
      };
#pragma unroll
      for (int u = 0; u < group_stages; ++u) {
        if (u >= ready) break;
        const int step = start + u;
        float product[fp8 ? m_tiles : 1][fp8 ? n_tiles : 1][4] = {};
        if constexpr (wgmma) {
          float d[4 * n_tiles];
          const uint64_t a = ptx::wgmma_descriptor(memory + stage * Tile::stage_bytes + warp / 4 * 64 * kLineBytes);
          const uint64_t b = ptx::wgmma_descriptor(x_at(stage, step));
          ptx::wgmma_fence_registers(d);
          ptx::wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k) ptx::wgmma<W, 8 * n_tiles>(d, a + 2 * k, b + 2 * k, k > 0);
          ptx::wgmma_commit();
          if (u == 0) load_ahead();
          ptx::wgmma_wait<0>();
          ptx::wgmma_fence_registers(d);
#pragma unroll
          for (int i = 0; i < 4 * n_tiles; ++i) product[0][i / 4][i % 4] = d[i];
        } else {
          if (u == 0) load_ahead();
        }
#pragma unroll
        for (int half = 0; half < (wgmma ? 0 : 2); ++half) {
          const uint32_t weights = (from_weights + stage * Tile::stage_bytes) ^ half * 64;
          const uint32_t x = (x_at(stage, step) + fragment) ^ half * 64;
          if constexpr (!fp8) {
            uint4 b[n_tiles];
#pragma unroll
            for (int j = 0; j < n_tiles; ++j) b[j] = ptx::load_shared_uint4(x + j * 8 * kLineBytes);
#pragma unroll
            for (int i = 0; i < m_tiles; ++i) {
              const uint4 low = ptx::load_shared_uint4(weights + i * 16 * kLineBytes);
              const uint4 high = ptx::load_shared_uint4(weights + (i * 16 + 8) * kLineBytes);
#pragma unroll
              for (int j = 0; j < n_tiles; ++j) multiply_line<W>(acc[i][j], low, high, b[j]);
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
              for (int i = 0; i < m_tiles; ++i) multiply_line(product[i][j], low[i], high[i], b);
            }
          }
        }
        if constexpr (fp8) {
#pragma unroll
          for (int i = 0; i < m_tiles; ++i) {
            float low = 1.f, high = 1.f;
            if (p.scale_rank == 3) {
              load_block_scales<Config>(p, expert, first_channel + i * m_tile_channels, step, low, high);
            }
            if (p.x_blocks) {
#pragma unroll
              for (int j = 0; j < n_tiles; ++j) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                  const int n = j * 8 + 2 * quad + c % 2;
                  const float x_scale = Tile::quantises ? row_scales[n * (kWidthQuantised / kScaleBlock) + step]
                                                        : stage_scales[Tile::quantises ? 0 : stage][n];
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
        if (++stage == num_stages) stage = 0;
      }
    }

    // -- epilogue: scale, gate or weight, store --

#pragma unroll
    for (int i = 0; i < m_tiles; ++i) {
#pragma unroll
      for (int j = 0; j < n_tiles; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int pair = item_pairs[parity][j * 8 + 2 * quad + c];
          const int channel = first_channel + i * m_tile_channels + group;
          const int token = pair / p.choices;
          float low = acc[i][j][c], high = acc[i][j][c + 2];
          if (pair < 0 || channel >= p.outputs) continue;
          if constexpr (fp8) {
            if (p.scale_rank < 3) {
              const int64_t at = expert * p.scale_expert_stride + channel * p.scale_row_stride;
              low *= p.weight_scale_low[at];
              high *= p.weight_scale_high[at];
            }
            if (!p.x_blocks) {
              const float x_scale = Tile::quantises ? row_scales[Tile::quantises ? j * 8 + 2 * quad + c : 0]
                                                    : p.x_scale[(up ? token : pair) * p.x_scale_stride];
              low *= x_scale;
              high *= x_scale;
            }
          }
          if constexpr (up) {
            char* row = p.out + pair * p.out_stride;
            if (p.gate == Gate::none) {
              store_result<W>(row, channel, low, p.fp16_result);
              store_result<W>(row, p.outputs + channel, high, p.fp16_result);
            } else if constexpr (fp8) {
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
      }
    }
    // The last CTA that stores an item of a slice sums the choices of every token, in order.
    if (IN_KERNEL && !up && p.arrivals) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) is_last = atomicAdd(p.arrivals + slice, 1u) == static_cast<unsigned>(tiles - 1);
      __syncthreads();
      if (is_last) {
        __threadfence();
        for (int i = threadIdx.x; i < channels * p.tokens; i += Tile::threads) {
          const int token = i / channels, channel = slice * channels + (i - token * channels);
          if (channel >= p.outputs) continue;
          float total = 0.f;
#pragma unroll 8
          for (int j = 0; j < p.choices; ++j) {
            const int pair = token * p.choices + j;
            const float value =
                groups.expert[pair] >= 0 ? load_cg(p.partial + int64_t{pair} * p.outputs + channel) : 0.f;
            total += value;
          }
          store_result<W>(p.out + token * p.out_stride, channel, total, p.fp16_result);
        }
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
