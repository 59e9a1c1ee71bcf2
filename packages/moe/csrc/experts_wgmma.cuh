// Grouped GEMMs of routed experts on Hopper, warp-specialised, for several tens of tokens per expert and more.
//
// A tile is 128 weight rows by TOKENS tokens of one expert. The up projection interleaves eight rows of each half of
// w1, so a thread holds both halves of a channel. The producer warpgroup loads 128 bytes of K per row and stage with
// cp.async, which gathers token rows and pads with zeros. Two consumer warpgroups multiply 64 weight rows each (wgmma)
// and write 16-bit results through shared memory. CTAs are persistent; tiles are rasterised in groups of eight token
// tiles for L2 reuse of both operands. FP8 products are added to a second accumulator every 128 elements of K.
#pragma once

#include <kestrel/fp8.cuh>
#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>
#include <kestrel/ptx/cp_async.cuh>
#include <kestrel/ptx/matrix.cuh>
#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/named_barrier.cuh>
#include <kestrel/ptx/shared.cuh>
#include <kestrel/ptx/wgmma.cuh>

#include "experts_params.cuh"

namespace kestrel::moe {

template <int TOKENS_>
struct WgmmaTile {
  static constexpr int tokens = TOKENS_;
  static constexpr int rows = 128;  // of weights
  static constexpr int stages = tokens == 64 ? 8 : tokens == 128 ? 6 : 4;
  static constexpr int stage_bytes = (rows + tokens) * kLineBytes;
  static constexpr int pass = 64;                  // tokens per pass of the epilogue
  static constexpr int result_bytes = pass * 128;  // of a warpgroup
  static constexpr int alignment = 1024;
  static constexpr int shared_bytes = stages * stage_bytes + 2 * result_bytes + alignment;
  static constexpr int producers = 128, consumers = 256, threads = producers + consumers;
};

constexpr int kRasterTiles = 8;           // token tiles that run through all row slices together
constexpr uint32_t kNoRow = 0xffffffffu;  // of a column that pads a tile

// Work item -> token tile and slice of weight rows.
struct WgmmaItem {
  int tile, slice;

  __device__ __forceinline__ WgmmaItem(int item, int tiles, int slices) {
    const int first = item / (kRasterTiles * slices) * kRasterTiles, rest = item - first * slices;
    const int tiles_here = min(kRasterTiles, tiles - first);
    slice = rest / tiles_here;
    tile = first + rest - slice * tiles_here;
  }
};

// Named barriers; 0 is that of __syncthreads().
constexpr int kBarrierOfConsumers = 1;
constexpr int kBarrierOfWarpgroup = 2;  // and 3: one for each consumer warpgroup

// W: the element type of weights and x. R: that of the result, W's own except for FP8.
//
// What waits for what:
//   full[stage]     128 arrivals: each producer thread's, once its copies into the stage are complete
//   empty[stage]    2 arrivals: one of each consumer warpgroup, once its products have read the stage
//   kBarrierOfConsumers, per item: pair_of_token and factor_of_token are complete; all have read them
//   kBarrierOfWarpgroup, per epilogue pass: results are staged; all have read them. FP8: all have read a stage's scales
template <typename W, typename R, Projection PROJECTION, typename Tile>
__global__ void __launch_bounds__(Tile::threads, 1) experts_wgmma_kernel(const __grid_constant__ ExpertsParams p) {
#ifdef KESTREL_HAS_WGMMA
  constexpr bool up = PROJECTION == Projection::up, fp8 = std::is_same_v<W, __nv_fp8_e4m3>;
  constexpr int element = fp8 ? 1 : 2, S = Tile::stages;
  constexpr int channels = up ? Tile::rows / 2 : Tile::rows;  // of the result, for a tile
  extern __shared__ char dynamic[];
  __shared__ uint64_t full[S], empty[S];
  __shared__ int pair_of_token[Tile::tokens];
  __shared__ float factor_of_token[Tile::tokens];
  __shared__ float stage_scales[fp8 ? S : 1][Tile::tokens];  // of x, with p.x_blocks
  const uint32_t ring = (ptx::shared_address(dynamic) + Tile::alignment - 1) / Tile::alignment * Tile::alignment;
  const int slices = (p.outputs + channels - 1) / channels, pairs = p.tokens * p.choices;
  const int row_bytes = p.width * element, steps = (row_bytes + kLineBytes - 1) / kLineBytes;
  if (threadIdx.x == 0) {
    for (int s = 0; s < S; ++s) {
      ptx::mbarrier_init(full + s, Tile::producers);
      ptx::mbarrier_init(empty + s, 2);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  bool waited = up || !p.routed_early;
  if (waited) {
    pdl_wait();
    pdl_trigger();
  }
  const int tiles = min(min(max(*p.padded_pairs, 0) / Tile::tokens, p.blocks * p.tiles_of_block),
                        (p.sorted_length + Tile::tokens - 1) / Tile::tokens);
  const int items = tiles * slices;
  const auto expert_of = [&](int tile) {
    const int expert = p.tile_experts[tile / p.tiles_of_block];
    return expert < p.experts ? expert : -1;
  };
  const auto pair_at = [&](int tile, int n) {  // -1: none
    const int at = tile * Tile::tokens + n;
    const int pair = at < p.sorted_length ? p.sorted_pairs[at] : -1;
    return pair < pairs ? pair : -1;
  };
  const auto used_tokens = [&](int tile) {  // rounded up to a multiple of 64; padding is at the end of a block
    int used = 64;
#pragma unroll
    for (int n = 64; n < Tile::tokens; n += 64) used += pair_at(tile, n) >= 0 ? 64 : 0;
    return used;
  };
  int stage = 0, phase = 0;
  const auto next_stage = [&]() {
    if (++stage == S) {
      stage = 0;
      phase ^= 1;
    }
  };

  // -- the producer warpgroup: eight threads copy the 128 bytes of a row, sixteen rows at once --

  if (threadIdx.x < Tile::producers) {
    ptx::reduce_registers<56>();
    constexpr int rows_at_once = Tile::producers / 8, weight_copies = Tile::rows / rows_at_once;
    constexpr int x_copies = Tile::tokens / rows_at_once, copies_of_64 = 64 / rows_at_once;
    const int row = threadIdx.x / 8, pack = threadIdx.x % 8;
    const uint32_t to = ring + row * kLineBytes + (pack ^ row % 8) * 16;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const WgmmaItem at(item, tiles, slices);
      const int64_t expert = expert_of(at.tile);
      if (expert < 0) continue;
      // Offsets of this thread's rows, in packs of 16 bytes. Weight rows past the end repeat the last row.
      const int used = used_tokens(at.tile), channel = at.slice * channels + (up ? row % 8 : row);
      uint32_t weight_row[weight_copies], x_row[x_copies];
#pragma unroll
      for (int i = 0; i < weight_copies; ++i) {
        weight_row[i] = static_cast<uint32_t>(min(channel + i * (up ? 8 : 16), p.outputs - 1) * (p.weight_stride / 16));
      }
      const char* weights = (up && row >= 8 ? p.weight_high + expert * p.expert_stride_high
                                            : p.weight_low + expert * p.expert_stride_low) +
                            pack * 16;
      const char* x = p.x + pack * 16;
      const auto copy_weights = [&](int to_stage, const auto& copy) {
#pragma unroll
        for (int i = 0; i < weight_copies; ++i) {
          copy(to + to_stage * Tile::stage_bytes + i * rows_at_once * kLineBytes,
               weights + uint64_t{weight_row[i]} * 16);
        }
      };
      const auto copy_x = [&](int to_stage, const auto& copy) {
#pragma unroll
        for (int first = 0; first < x_copies; first += copies_of_64) {
          if (first * rows_at_once >= used) break;
#pragma unroll
          for (int i = first; i < first + copies_of_64; ++i) {
            if (x_row[i] == kNoRow) continue;  // the epilogue skips this column
            copy(to + to_stage * Tile::stage_bytes + (Tile::rows + i * rows_at_once) * kLineBytes,
                 x + uint64_t{x_row[i]} * 16);
          }
        }
      };
      const auto with_copy = [&](int step, const auto& copies) {  // zeros past the end of K
        if ((step + 1) * kLineBytes <= row_bytes) {
          copies([](uint32_t shared, const char* global) { ptx::cp_async16(shared, global); });
        } else {
          const bool inside = step * kLineBytes + pack * 16 < row_bytes;
          copies([&](uint32_t shared, const char* global) {
            ptx::cp_async16_or_zero(shared, inside ? global : p.x, inside);
          });
        }
      };
      int loaded = 0;  // steps whose weights, which are constant, are loaded before the PDL wait
      if (!waited) {
        loaded = min(steps, S);
        for (int step = 0; step < loaded; ++step, weights += kLineBytes) {
          with_copy(step, [&](const auto& copy) { copy_weights(step, copy); });
        }
        weights -= loaded * kLineBytes;
        pdl_wait();
        pdl_trigger();
        waited = true;
      }
#pragma unroll
      for (int i = 0; i < x_copies; ++i) {
        const int pair = pair_at(at.tile, i * rows_at_once + row);
        x_row[i] = pair < 0 ? kNoRow : static_cast<uint32_t>((up ? pair / p.choices : pair) * (p.x_stride / 16));
      }
      constexpr int scale_copies = (Tile::tokens + Tile::producers - 1) / Tile::producers;
      [[maybe_unused]] int scale_row[scale_copies];
      if (fp8 && p.x_blocks) {
#pragma unroll
        for (int i = 0; i < scale_copies; ++i) {
          const int n = threadIdx.x + i * Tile::producers, pair = n < used ? pair_at(at.tile, n) : -1;
          scale_row[i] = up && pair >= 0 ? pair / p.choices : pair;
        }
      }
      for (int step = 0; step < steps; ++step) {
        ptx::mbarrier_wait(empty + stage, phase ^ 1);
        with_copy(step, [&](const auto& copy) {
          if (step >= loaded) copy_weights(stage, copy);
          copy_x(stage, copy);
        });
        if (fp8 && p.x_blocks) {
#pragma unroll
          for (int i = 0; i < scale_copies; ++i) {
            if (scale_row[i] < 0) continue;
            ptx::cp_async4_or_zero(
                ptx::shared_address(&stage_scales[fp8 ? stage : 0][threadIdx.x + i * Tile::producers]),
                p.x_scale + scale_row[i] * p.x_scale_stride + step, /*valid=*/true);
          }
        }
        weights += kLineBytes;
        x += kLineBytes;
        ptx::mbarrier_arrive_after_copies(full + stage);
        next_stage();
      }
    }
    return;
  }

  // -- the consumer warpgroups: 64 weight rows each --

  ptx::raise_registers<224>();
  if (!waited) {
    pdl_wait();
    pdl_trigger();
  }
  const int thread = threadIdx.x - Tile::producers, warpgroup = thread / 128, warp = thread % 128 / 32;
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const uint32_t results = ring + S * Tile::stage_bytes + warpgroup * Tile::result_bytes;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const WgmmaItem at(item, tiles, slices);
    const int64_t expert = expert_of(at.tile);
    if (expert < 0) continue;
    const int used = used_tokens(at.tile);
    for (int n = thread; n < used; n += Tile::consumers) {
      const int pair = pair_at(at.tile, n), token = pair / p.choices;
      float factor = 1.f;
      if (pair >= 0 && fp8 && !p.x_blocks) factor = p.x_scale[(up ? token : pair) * p.x_scale_stride];
      if (pair >= 0 && !up) factor *= p.topk_weights[token * p.topk_weights_stride + (pair - token * p.choices)];
      pair_of_token[n] = pair;
      factor_of_token[n] = factor;
    }
    // This thread accumulates the two halves of a channel (up) or two channels eight apart (down).
    const int low_channel = at.slice * channels + (warpgroup * 4 + warp) * (up ? 8 : 16) + group;

    // Main loop. acc[4 * j + 2 * r + c]: row group + 8 * r of the warp's 16, column 8 * j + 2 * quad + c.
    float acc[Tile::tokens / 2];
    const auto multiply = [&](auto n_tag) {
      constexpr int N = decltype(n_tag)::value;
      [[maybe_unused]] float of_line[fp8 ? Tile::tokens / 2 : 1];
      if constexpr (fp8) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[i] = 0.f;
      }
      [[maybe_unused]] int previous = -1;
      [[maybe_unused]] const float* low_scales = nullptr;  // block scales, one per step
      [[maybe_unused]] const float* high_scales = nullptr;
      if (fp8 && p.scale_rank == 3) {
        const int row = min(low_channel - group, p.outputs - 1);
        const int row_low = row / kScaleBlock;
        const int row_high = up && !p.split_scales ? (row + p.outputs) / kScaleBlock : row_low;
        low_scales = p.weight_scale_low + expert * p.scale_expert_stride + row_low * p.scale_row_stride;
        high_scales = p.weight_scale_high + expert * p.scale_expert_stride + row_high * p.scale_row_stride;
        if (!up) high_scales = low_scales;
      }
      for (int step = 0; step < steps; ++step) {
        ptx::mbarrier_wait(full + stage, phase);
        ptx::fence_proxy_async();
        const uint32_t here = ring + stage * Tile::stage_bytes;
        const uint64_t a = ptx::wgmma_descriptor(here + warpgroup * 64 * kLineBytes);
        const uint64_t b = ptx::wgmma_descriptor(here + Tile::rows * kLineBytes);
        if constexpr (fp8) {
          ptx::wgmma_fence_registers(of_line);
          ptx::wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k) ptx::wgmma<W, N>(of_line, a + 2 * k, b + 2 * k, k > 0);
          ptx::wgmma_commit();
          const float low = low_scales ? low_scales[step] : 1.f, high = high_scales ? high_scales[step] : 1.f;
          ptx::wgmma_wait<0>();
          ptx::wgmma_fence_registers(of_line);
          if (p.x_blocks) {
#pragma unroll
            for (int i = 0; i < N / 2; i += 4) {
              const float2 x_scale = *reinterpret_cast<const float2*>(&stage_scales[stage][i * 2 + 2 * quad]);
#pragma unroll
              for (int c = 0; c < 4; ++c) {
                acc[i + c] = fmaf(of_line[i + c] * (c % 2 ? x_scale.y : x_scale.x), c < 2 ? low : high, acc[i + c]);
              }
            }
            ptx::named_barrier(kBarrierOfWarpgroup + warpgroup, 128);  // all have read the scales
          }
          if (thread % 128 == 0) ptx::mbarrier_arrive(empty + stage);
          if (!p.x_blocks) {
#pragma unroll
            for (int i = 0; i < N / 2; ++i) acc[i] = fmaf(of_line[i], i % 4 < 2 ? low : high, acc[i]);
          }
        } else {
          ptx::wgmma_fence_registers(acc);
          ptx::wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k) ptx::wgmma<W, N>(acc, a + 2 * k, b + 2 * k, step + k > 0);
          ptx::wgmma_commit();
          ptx::wgmma_wait<1>();  // the previous stage has been read
          if (previous >= 0 && thread % 128 == 0) ptx::mbarrier_arrive(empty + previous);
          previous = stage;
        }
        next_stage();
      }
      if constexpr (!fp8) {
        ptx::wgmma_wait<0>();
        ptx::wgmma_fence_registers(acc);
        if (thread % 128 == 0) ptx::mbarrier_arrive(empty + previous);
      }
    };
    if constexpr (fp8) {  // one N only: two accumulators leave few registers
      multiply(std::integral_constant<int, Tile::tokens>());
    } else if constexpr (Tile::tokens == 64) {
      multiply(std::integral_constant<int, 64>());
    } else {
      if (used == 64) multiply(std::integral_constant<int, 64>());
      if (used == 128) multiply(std::integral_constant<int, 128>());
      if constexpr (Tile::tokens == 256) {
        if (used == 192) multiply(std::integral_constant<int, 192>());
        if (used == 256) multiply(std::integral_constant<int, 256>());
      }
    }
    ptx::named_barrier(kBarrierOfConsumers, Tile::consumers);  // pair_of_token and factor_of_token are complete

    // Epilogue: in float32 from registers where the next kernel needs float32, else in R through shared memory.
    float low_scale = 1.f, high_scale = 1.f;
    if (fp8 && p.scale_rank < 3) {
      const int64_t low_at = min(low_channel, p.outputs - (up ? 1 : 9)) * p.scale_row_stride;
      low_scale = p.weight_scale_low[expert * p.scale_expert_stride + low_at];
      high_scale = p.weight_scale_high[expert * p.scale_expert_stride + low_at];
    }
    if constexpr (fp8 && up) {
      if (p.gate != Gate::none) {  // written as float32; the next kernel quantises it
#pragma unroll
        for (int i = 0; i < Tile::tokens / 2; i += 4) {
          if (i * 2 >= used) break;
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int n = i * 2 + 2 * quad + c, pair = pair_of_token[n];
            const float factor = factor_of_token[n];
            if (pair < 0 || low_channel >= p.outputs) continue;
            const float h = acc[i + c] * low_scale * factor, g = acc[i + c + 2] * high_scale * factor;
            reinterpret_cast<float*>(p.out + pair * p.out_stride)[low_channel] = gated_value(h, g, p.gate);
          }
        }
        ptx::named_barrier(kBarrierOfConsumers, Tile::consumers);
        continue;
      }
    }
    if constexpr (!up && std::is_same_v<R, __half>) {
      if (p.partial) {  // written as float32: the terms of the sum over choices may exceed fp16 where the sum does not
#pragma unroll
        for (int i = 0; i < Tile::tokens / 2; i += 4) {
          if (i * 2 >= used) break;
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int n = i * 2 + 2 * quad + c, pair = pair_of_token[n];
            float* const row = p.partial + int64_t{pair} * p.outputs + low_channel;
            if (pair < 0) continue;
            if (low_channel < p.outputs) row[0] = acc[i + c] * low_scale * factor_of_token[n];
            if (low_channel + 8 < p.outputs) row[8] = acc[i + c + 2] * high_scale * factor_of_token[n];
          }
        }
        ptx::named_barrier(kBarrierOfConsumers, Tile::consumers);
        continue;
      }
    }
    // Staged results [token of the pass][channels of the warpgroup], with packs swizzled against bank conflicts.
    constexpr int row_packs = up ? 4 : 8;
    const auto address_of = [&](int n, int pack) {
      return results + n * row_packs * 16 + (pack ^ (up ? n / 2 % 4 : n % 8)) * 16;
    };
    const int halves = up && p.gate == Gate::none ? 2 : 1;
#pragma unroll
    for (int first = 0; first < Tile::tokens; first += Tile::pass) {
      if (first >= used) break;
      for (int half = 0; half < halves; ++half) {
#pragma unroll
        for (int j = 0; j < 8; j += row_packs == 4 ? 4 : 2) {  // groups of eight tokens
          unsigned matrices[4];
          if constexpr (up) {
#pragma unroll
            for (int m = 0; m < 4; ++m) {
              float v[2];
#pragma unroll
              for (int c = 0; c < 2; ++c) {
                const int i = first / 2 + 4 * (j + m) + c;
                const float factor = fp8 ? factor_of_token[first + 8 * (j + m) + 2 * quad + c] : 1.f;
                const float h = acc[i] * (fp8 ? low_scale * factor : 1.f);
                const float g = acc[i + 2] * (fp8 ? high_scale * factor : 1.f);
                v[c] = halves == 2 ? (half ? g : h) : gated_value(h, g, p.gate);
              }
              matrices[m] = ptx::pack_pair<R>(make_float2(v[0], v[1]));
            }
            ptx::store_matrices_transposed(address_of(8 * (j + lane / 8) + lane % 8, warp), matrices);
          } else {
#pragma unroll
            for (int m = 0; m < 4; ++m) {
              const int i = first / 2 + 4 * (j + m / 2) + m % 2 * 2, n = first + 8 * (j + m / 2) + 2 * quad;
              const float scale = m % 2 ? high_scale : low_scale;
              matrices[m] = ptx::pack_pair<R>(
                  make_float2(acc[i] * scale * factor_of_token[n], acc[i + 1] * scale * factor_of_token[n + 1]));
            }
            ptx::store_matrices_transposed(address_of(8 * (j + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2),
                                           matrices);
          }
        }
        ptx::named_barrier(kBarrierOfWarpgroup + warpgroup, 128);
#pragma unroll
        for (int i = thread % 128; i < Tile::pass * row_packs; i += 128) {
          const int n = i / row_packs, pack = i % row_packs, pair = pair_of_token[first + n];
          const int channel = at.slice * channels + warpgroup * row_packs * 8 + pack * 8;
          if (pair < 0 || channel >= p.outputs) continue;
          char* const to = p.out + pair * p.out_stride + (int64_t{half} * p.outputs + channel) * 2;
          *reinterpret_cast<uint4*>(to) = ptx::load_shared_uint4(address_of(n, pack));
        }
        ptx::named_barrier(kBarrierOfWarpgroup + warpgroup, 128);
      }
    }
    ptx::named_barrier(kBarrierOfConsumers, Tile::consumers);  // all have read pair_of_token
  }
#endif
}

}  // namespace kestrel::moe
