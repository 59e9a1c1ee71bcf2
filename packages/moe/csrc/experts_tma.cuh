// Grouped GEMMs of routed experts on Hopper, warp-specialised, with weights loaded by TMA.
//
// A tile is 256 weight rows (up: 128 of each half of w1) by TOKENS tokens of one expert. One warp schedules: it writes
// the pairs, factors and rows of x of each tile into a slot of shared memory. One thread loads weights by TMA, two
// warps gather rows of x by cp.async. Two consumer warpgroups multiply 128 weight rows each, without waiting for each
// other. FP8 products are added to a second accumulator every 128 elements of K. CTAs are persistent; the two CTAs of a
// cluster multicast the weights of two token tiles.
#pragma once

#include <kestrel/fp8.cuh>
#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>
#include <kestrel/ptx/cluster.cuh>
#include <kestrel/ptx/cp_async.cuh>
#include <kestrel/ptx/matrix.cuh>
#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/named_barrier.cuh>
#include <kestrel/ptx/shared.cuh>
#include <kestrel/ptx/tma.cuh>
#include <kestrel/ptx/wgmma.cuh>

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

// Named barriers; 0 is that of __syncthreads().
constexpr int kBarrierOfWarpgroup = 2;  // and 3: one for each consumer warpgroup

struct TmaParams {
  CUtensorMap low, high;  // of the weights: up: the halves of w1; down: w2 twice
  ExpertsParams p;
  int low_step, high_step;  // of the expert's coordinate: 1, or 0 if all experts share one weight
  bool floats;              // results are float32, and the rows of the weights in shared memory even_first
};

template <int TOKENS_, int CLUSTER_>
struct TmaTile {
  static constexpr int tokens = TOKENS_, cluster = CLUSTER_;
  static constexpr int rows = 256, half_rows = 128, half_groups = half_rows / 16;  // of weights
  static constexpr int weight_bytes = rows * kLineBytes, stage_bytes = (rows + tokens) * kLineBytes;
  static constexpr int stages = tokens == 64 ? 5 : tokens == 128 ? 4 : 3;
  static constexpr int slots = 3;
  static constexpr int pass = 64;                     // tokens per pass of the epilogue
  static constexpr int result_bytes = pass * 64 * 2;  // of a warpgroup: 64 channels
  static constexpr int alignment = 1024;
  static constexpr int shared_bytes = stages * stage_bytes + 2 * result_bytes + alignment;
  static constexpr int gatherers = 64;
  static constexpr int producers = 128, consumers = 256, threads = producers + consumers;
};

// A tile as its CTA sees it, written by the scheduling warp.
template <int TOKENS>
struct TmaSlot {
  int pair[TOKENS];      // of each token; -1: none
  float factor[TOKENS];  // of its results
  uint32_t row[TOKENS];  // of x, in packs of 16 bytes; kNoRow: none
  int expert;            // -1: the end
  int slice, used;       // `used` tokens at most have a pair
  bool shared;           // by the cluster: each CTA loads half of the weights
};

// A store without a branch, so that the instructions of several results interleave.
__device__ __forceinline__ void store_if(bool condition, char* to, float2 v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.v2.f32 [%0], {%1, %2};\n}" ::"l"(to), "f"(v.x),
               "f"(v.y), "r"(static_cast<int>(condition))
               : "memory");
}

// What waits for what:
//   slot_full[slot]   32 arrivals: the lanes of the scheduling warp
//   slot_empty[slot]  8 arrivals: the consumer warps, after the epilogue
//   full[stage]       the gathering threads' copies; the TMA thread's arrival and its bytes
//   empty[stage]      the consumer warps of the cluster, once their products have read the stage
//   named barriers 2 and 3, one per warpgroup, twice per pass of the epilogue: results are staged; all have read them
template <typename W, typename R, Projection PROJECTION, typename Tile>
__global__ void __launch_bounds__(Tile::threads, 1) experts_tma_kernel(const __grid_constant__ TmaParams params) {
#ifdef KESTREL_HAS_WGMMA
  constexpr bool up = PROJECTION == Projection::up, fp8 = std::is_same_v<W, __nv_fp8_e4m3>;
  constexpr int element = fp8 ? 1 : 2, S = Tile::stages, C = Tile::cluster, kSlots = Tile::slots;
  constexpr int channels = up ? Tile::half_rows : Tile::rows;  // of the result, for a tile
  const ExpertsParams& p = params.p;
  extern __shared__ char dynamic[];
  __shared__ TmaSlot<Tile::tokens> slots[kSlots];
  __shared__ uint64_t full[S], empty[S], slot_full[kSlots], slot_empty[kSlots];
  __shared__ float stage_scales[fp8 ? S : 1][Tile::tokens];  // of x, with p.x_blocks
  const uint32_t ring = (ptx::shared_address(dynamic) + Tile::alignment - 1) / Tile::alignment * Tile::alignment;
  const int slices = (p.outputs + channels - 1) / channels;
  const int row_bytes = p.width * element, steps = (row_bytes + kLineBytes - 1) / kLineBytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = C == 1 ? 0 : blockIdx.x % C;
  if (threadIdx.x == 0) {
    for (int s = 0; s < S; ++s) {
      ptx::mbarrier_init(full + s, Tile::gatherers + 1);
      ptx::mbarrier_init(empty + s, 8 * C);
    }
    for (int s = 0; s < kSlots; ++s) {
      ptx::mbarrier_init(slot_full + s, 32);
      ptx::mbarrier_init(slot_empty + s, 8);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (C > 1) ptx::cluster_sync();
  int stage = 0, phase = 0, slot = 0, slot_phase = 0;
  const auto next_stage = [&]() {
    if (++stage == S) {
      stage = 0;
      phase ^= 1;
    }
  };
  const auto next_slot = [&]() {
    if (++slot == kSlots) {
      slot = 0;
      slot_phase ^= 1;
    }
  };
  const auto tile_count = [&]() {
    return min(min(max(*p.padded_pairs, 0) / Tile::tokens, p.blocks * p.tiles_of_block),
               (p.sorted_length + Tile::tokens - 1) / Tile::tokens);
  };
  const auto expert_of = [&](int tile, int tiles) {
    const int expert = tile < tiles ? p.tile_experts[tile / p.tiles_of_block] : -1;
    return expert < p.experts ? expert : -1;
  };
  const bool early = p.routed_early;

  if (threadIdx.x < Tile::producers) {
    ptx::reduce_registers<40>();
    if (warp == 0) {
      // -- the TMA thread: loads the weights --
      if (lane == 0) {
        ptx::prefetch_tensor_map(params.low);
        ptx::prefetch_tensor_map(params.high);
        const auto load = [&](int to_stage, int step, int expert, int slice, bool shared) {
          const uint32_t to = ring + to_stage * Tile::stage_bytes;
          const int k = step * (kLineBytes / element), group = slice * (channels / 16);
          uint64_t* const barrier = full + to_stage;
          ptx::mbarrier_arrive_expect_tx(barrier, Tile::weight_bytes);
          if (C > 1 && shared) {
            ptx::tma_load_grouped_multicast(to + rank * Tile::half_rows * kLineBytes, rank ? params.high : params.low,
                                            k, group + (up ? 0 : rank * Tile::half_groups),
                                            expert * (rank ? params.high_step : params.low_step), barrier,
                                            (1 << C) - 1);
          } else {
            ptx::tma_load_grouped(to, params.low, k, group, expert * params.low_step, barrier);
            ptx::tma_load_grouped(to + Tile::half_rows * kLineBytes, params.high, k,
                                  group + (up ? 0 : Tile::half_groups), expert * params.high_step, barrier);
          }
        };
        int ahead = 0;  // steps whose weights, which are constant, are loaded before the PDL wait
        if (C == 1 && early) {
          const int tiles = tile_count();
          const TmaItem at(blockIdx.x, tiles, slices);
          const int expert = static_cast<int>(blockIdx.x) < tiles * slices ? expert_of(at.tile, tiles) : -1;
          if (expert >= 0) {
            ahead = min(steps, S);
            for (int step = 0; step < ahead; ++step) load(step, step, expert, at.slice, false);
          }
        }
        pdl_wait();
        pdl_trigger();
        while (true) {
          ptx::mbarrier_wait(slot_full + slot, slot_phase);
          const int expert = slots[slot].expert, slice = slots[slot].slice;
          const bool shared = slots[slot].shared;
          if (expert < 0) break;
          for (int step = 0; step < steps; ++step) {
            if (step >= ahead) {
              ptx::mbarrier_wait(empty + stage, phase ^ 1);
              load(stage, step, expert, slice, shared);
            }
            next_stage();
          }
          ahead = 0;
          next_slot();
        }
      }
    } else if (warp == 1) {
      // -- the scheduling warp --
      if (!early) pdl_wait();
      const int tiles = tile_count(), pairs = p.tokens * p.choices;
      if (early) pdl_wait();
      pdl_trigger();
      const int groups = (tiles + C - 1) / C;  // of tiles that a cluster takes
      for (int item = blockIdx.x / C; item < groups * slices; item += gridDim.x / C) {
        const TmaItem at(item, groups, slices);
        const int tile = at.tile * C + rank;
        int expert = expert_of(tile, tiles);
        bool shared = false, mine = expert >= 0;
        if constexpr (C > 1) {
          const int other = expert_of(at.tile * C + (rank ^ 1), tiles);
          if (!mine) expert = other;  // multiplies along, and stores nothing
          shared = expert == other || other < 0;
        }
        if (expert < 0) continue;
        ptx::mbarrier_wait(slot_empty + slot, slot_phase ^ 1);
        TmaSlot<Tile::tokens>& to = slots[slot];
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
          if (pair >= 0 && fp8 && !p.x_blocks) factor = p.x_scale[(up ? token : pair) * p.x_scale_stride];
          if (pair >= 0 && !up) factor *= p.topk_weights[token * p.topk_weights_stride + (pair - token * p.choices)];
          to.pair[n] = max(pair, -1);
          to.factor[n] = factor;
          to.row[n] = pair < 0 ? kNoRow : static_cast<uint32_t>((up ? token : pair) * (p.x_stride / 16));
          const unsigned some = __ballot_sync(0xffffffffu, pair >= 0);
          if (some) used = i * 32 + 32 - __clz(some);
        }
        if (lane == 0) {
          to.expert = expert;
          to.slice = at.slice;
          to.used = used;
          to.shared = shared;
        }
        ptx::mbarrier_arrive(slot_full + slot);
        next_slot();
      }
      ptx::mbarrier_wait(slot_empty + slot, slot_phase ^ 1);
      if (lane == 0) slots[slot].expert = -1;
      ptx::mbarrier_arrive(slot_full + slot);
    } else {
      // -- the gathering warps: eight threads copy the 128 bytes of a row, eight rows at once --
      pdl_wait();
      pdl_trigger();
      const int thread = threadIdx.x - 64, row = thread / 8, pack = thread % 8;
      const uint32_t to = ring + (Tile::rows + row) * kLineBytes + (pack ^ row) * 16;
      while (true) {
        ptx::mbarrier_wait(slot_full + slot, slot_phase);
        const TmaSlot<Tile::tokens>& from = slots[slot];
        if (from.expert < 0) break;
        const int used = from.used;
        const char* x = p.x + pack * 16;
        for (int step = 0; step < steps; ++step) {
          ptx::mbarrier_wait(empty + stage, phase ^ 1);
          const uint32_t here = to + stage * Tile::stage_bytes;
          const bool inside = step * kLineBytes + pack * 16 < row_bytes;
#pragma unroll
          for (int first = 0; first < Tile::tokens; first += 64) {
            if (first >= used) break;
            uint32_t offset[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) offset[i] = from.row[first + 8 * i + row];
#pragma unroll
            for (int i = 0; i < 8; ++i) {  // the epilogue skips the columns of no row
              ptx::cp_async16_if(offset[i] != kNoRow, here + (first + 8 * i) * kLineBytes, x + uint64_t{offset[i]} * 16,
                                 inside ? 16 : 0);
            }
          }
          if (fp8 && p.x_blocks) {
#pragma unroll
            for (int n = thread; n < Tile::tokens; n += Tile::gatherers) {
              const int pair = from.pair[n];
              if (pair < 0) continue;
              ptx::cp_async4_or_zero(ptx::shared_address(&stage_scales[fp8 ? stage : 0][n]),
                                     p.x_scale + (up ? pair / p.choices : pair) * p.x_scale_stride + step,
                                     /*valid=*/true);
            }
          }
          x += kLineBytes;
          ptx::mbarrier_arrive_after_copies(full + stage);
          next_stage();
        }
        next_slot();
      }
    }
    __syncwarp();
  } else {
    // -- the consumer warpgroups: 128 weight rows each, in two blocks of 64 (up: one of each half of w1) --
    ptx::raise_registers<232>();
    pdl_wait();
    pdl_trigger();
    const int warpgroup = warp / 4 - 1, slab = warp % 4 * 16, group = lane / 4, quad = lane % 4;
    const auto release = [&](int of_stage) {
      __syncwarp();
      if constexpr (C == 1) {
        if (lane == 0) ptx::mbarrier_arrive(empty + of_stage);
      } else {
        if (lane < C) ptx::mbarrier_arrive_remote(ptx::map_shared(ptx::shared_address(empty + of_stage), lane));
      }
    };
    const uint32_t results = ring + S * Tile::stage_bytes + warpgroup * Tile::result_bytes;
    while (true) {
      ptx::mbarrier_wait(slot_full + slot, slot_phase);
      const TmaSlot<Tile::tokens>& at = slots[slot];
      const int64_t expert = at.expert;
      if (expert < 0) break;
      const int used = at.used;
      // The first row of this warp in each block: a channel of the result.
      int channel[2];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        channel[b] = at.slice * channels + warpgroup * (up ? 64 : 128) + (up ? 0 : 64 * b) + slab;
      }
      float scale[2][2] = {{1.f, 1.f}, {1.f, 1.f}};  // of [block][channel of this thread]
      if (fp8 && p.scale_rank < 3) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const float* const scales =
              (up && b ? p.weight_scale_high : p.weight_scale_low) + expert * p.scale_expert_stride;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            scale[b][r] = scales[min(channel[b] + (params.floats ? 2 * group + r : group + 8 * r), p.outputs - 1) *
                                 p.scale_row_stride];
          }
        }
      }

      // Main loop. acc[block][4 * j + 2 * r + c]: row group + 8 * r of the warp's 16, token 8 * j + 2 * quad + c.
      float acc[2][Tile::tokens / 2];
      const uint32_t block_bytes = (up ? Tile::half_rows : 64) * kLineBytes;
      const uint32_t my_rows = ring + warpgroup * (up ? 64 : 128) * kLineBytes;
      const auto multiply = [&](auto n_tag) {
        constexpr int N = decltype(n_tag)::value;
        if constexpr (fp8) {
          const float* block_scales[2] = {nullptr, nullptr};  // one per step
          if (p.scale_rank == 3) {
#pragma unroll
            for (int b = 0; b < 2; ++b) {
              const int row = min(channel[b], p.outputs - 1);
              const int scale_row = (row + (up && b && !p.split_scales ? p.outputs : 0)) / kScaleBlock;
              block_scales[b] = (up && b ? p.weight_scale_high : p.weight_scale_low) + expert * p.scale_expert_stride +
                                scale_row * p.scale_row_stride;
            }
          }
#pragma unroll
          for (int b = 0; b < 2; ++b) {
#pragma unroll
            for (int i = 0; i < N / 2; ++i) acc[b][i] = 0.f;
          }
          float of_line[N / 2];
          for (int step = 0; step < steps; ++step) {
            ptx::mbarrier_wait(full + stage, phase);
            ptx::fence_proxy_async();
            const uint64_t x = ptx::wgmma_descriptor(ring + stage * Tile::stage_bytes + Tile::weight_bytes);
#pragma unroll
            for (int b = 0; b < 2; ++b) {
              const uint64_t a = ptx::wgmma_descriptor(my_rows + stage * Tile::stage_bytes + b * block_bytes);
              ptx::wgmma_fence_registers(of_line);
              ptx::wgmma_fence();
#pragma unroll
              for (int k = 0; k < 4; ++k) ptx::wgmma<W, N>(of_line, a + 2 * k, x + 2 * k, k > 0);
              ptx::wgmma_commit();
              const float block_scale = block_scales[b] ? block_scales[b][step] : 1.f;
              ptx::wgmma_wait<0>();
              ptx::wgmma_fence_registers(of_line);
              if (b == 1 && !p.x_blocks) release(stage);
              if (p.x_blocks) {
#pragma unroll
                for (int i = 0; i < N / 2; i += 4) {
                  const float2 x_scale = *reinterpret_cast<const float2*>(&stage_scales[stage][i * 2 + 2 * quad]);
#pragma unroll
                  for (int c = 0; c < 4; ++c) {
                    acc[b][i + c] = fmaf(of_line[i + c] * (c % 2 ? x_scale.y : x_scale.x), block_scale, acc[b][i + c]);
                  }
                }
                if (b == 1) release(stage);
              } else {
#pragma unroll
                for (int i = 0; i < N / 2; ++i) acc[b][i] = fmaf(of_line[i], block_scale, acc[b][i]);
              }
            }
            next_stage();
          }
        } else {
          int previous = -1;
          for (int step = 0; step < steps; ++step) {
            ptx::mbarrier_wait(full + stage, phase);
            ptx::fence_proxy_async();
            const uint64_t x = ptx::wgmma_descriptor(ring + stage * Tile::stage_bytes + Tile::weight_bytes);
            const uint64_t a = ptx::wgmma_descriptor(my_rows + stage * Tile::stage_bytes);
            ptx::wgmma_fence_registers(acc[0]);
            ptx::wgmma_fence_registers(acc[1]);
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) {
#pragma unroll
              for (int b = 0; b < 2; ++b) {
                ptx::wgmma<W, N>(acc[b], a + b * (block_bytes >> 4) + 2 * k, x + 2 * k, step + k > 0);
              }
            }
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();  // the previous stage has been read
            if (previous >= 0) release(previous);
            previous = stage;
            next_stage();
          }
          ptx::wgmma_wait<0>();
          ptx::wgmma_fence_registers(acc[0]);
          ptx::wgmma_fence_registers(acc[1]);
          release(previous);
        }
      };
      if constexpr (fp8 || Tile::tokens == 64) {  // FP8: one N only, two accumulators leave few registers
        multiply(std::integral_constant<int, Tile::tokens>());
      } else {
        if (used <= 64) {
          multiply(std::integral_constant<int, 64>());
        } else if (Tile::tokens > 128 && used <= 128) {
          if constexpr (Tile::tokens > 128) multiply(std::integral_constant<int, 128>());
        } else {
          multiply(std::integral_constant<int, Tile::tokens>());
        }
      }

      // Epilogue.
      const auto scaled = [&](int b, int i, float factor) {
        return fp8 || !up ? acc[b][i] * scale[b][i % 4 / 2] * factor : acc[b][i];
      };
      // 16-bit results: 64 channels at a time through shared memory, whose packs are swizzled against bank conflicts.
      const auto store_block = [&](int b, const auto& value, int64_t offset) {
        const auto address_of = [&](int n, int pack) { return results + n * kLineBytes + (pack ^ n % 8) * 16; };
        const int first_channel = channel[b] - slab;
#pragma unroll
        for (int first = 0; first < Tile::tokens; first += Tile::pass) {
          if (first >= used) break;
#pragma unroll
          for (int j = first / 8; j < (first + Tile::pass) / 8; j += 2) {
            unsigned matrices[4];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
              const int i = 4 * (j + m / 2) + m % 2 * 2;
              const float2 factor = *reinterpret_cast<const float2*>(&at.factor[8 * (j + m / 2) + 2 * quad]);
              matrices[m] = ptx::pack_pair<R>(make_float2(value(i, factor.x), value(i + 1, factor.y)));
            }
            const int n = 8 * (j + lane / 16) - first + lane % 8;
            ptx::store_matrices_transposed(address_of(n, slab / 8 + lane / 8 % 2), matrices);
          }
          ptx::named_barrier(kBarrierOfWarpgroup + warpgroup, 128);
#pragma unroll
          for (int i = threadIdx.x % 128; i < Tile::pass * 8; i += 128) {
            const int n = i / 8, pack = i % 8, pair = at.pair[first + n], at_channel = first_channel + pack * 8;
            if (pair < 0 || at_channel >= p.outputs) continue;
            *reinterpret_cast<uint4*>(p.out + pair * p.out_stride + (offset + at_channel) * 2) =
                ptx::load_shared_uint4(address_of(n, pack));
          }
          ptx::named_barrier(kBarrierOfWarpgroup + warpgroup, 128);
        }
      };
      // float32 results: 8 bytes from registers.
      const auto store_floats = [&](int b, const auto& value, char* out, int64_t stride) {
        const int64_t at_channel = (channel[b] + 2 * group) * int64_t{4};
#pragma unroll
        for (int first = 0; first < Tile::tokens; first += 32) {
          if (first >= used) break;
#pragma unroll
          for (int j = first / 8; j < first / 8 + 4; ++j) {
            const int2 pairs = *reinterpret_cast<const int2*>(&at.pair[8 * j + 2 * quad]);
            const float2 factors = *reinterpret_cast<const float2*>(&at.factor[8 * j + 2 * quad]);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const int pair = c ? pairs.y : pairs.x;
              const float factor = c ? factors.y : factors.x;
              store_if(pair >= 0 && channel[b] < p.outputs, out + pair * stride + at_channel,
                       make_float2(value(4 * j + c, factor), value(4 * j + 2 + c, factor)));
            }
          }
        }
      };
      const auto store_gated = [&](auto gate_tag) {
        const auto value = [&](int i, float factor) {
          return gated_value(scaled(0, i, factor), scaled(1, i, factor), decltype(gate_tag)::value);
        };
        if constexpr (fp8) {  // the next kernel quantises them
          store_floats(0, value, p.out, p.out_stride);
        } else {
          store_block(0, value, 0);
        }
      };
      if (up && p.gate == Gate::silu_and_mul) {
        store_gated(std::integral_constant<Gate, Gate::silu_and_mul>());
      } else if (up && p.gate == Gate::gelu_and_mul) {
        store_gated(std::integral_constant<Gate, Gate::gelu_and_mul>());
      } else if (up && p.gate == Gate::gelu_residual) {
        store_gated(std::integral_constant<Gate, Gate::gelu_residual>());
      } else {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const auto value = [&](int i, float factor) { return scaled(b, i, factor); };
          if constexpr (!up && std::is_same_v<R, __half>) {
            // Terms of the sum over choices may exceed fp16 where the sum does not.
            if (p.partial) {
              store_floats(b, value, reinterpret_cast<char*>(p.partial), int64_t{p.outputs} * 4);
              continue;
            }
          }
          store_block(b, value, up && b ? p.outputs : 0);
        }
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(slot_empty + slot);
      next_slot();
    }
  }
  if constexpr (C > 1) {  // no CTA leaves while the other may still load into it or arrive on its barriers
    __syncwarp();
    ptx::cluster_sync();
  }
#endif
}

}  // namespace kestrel::moe
