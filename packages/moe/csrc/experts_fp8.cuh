// Grouped GEMMs of routed FP8 experts on Hopper, with both operands in tiles of pipeline stages.
//
// A tile is 128 tokens of one expert by 256 weight rows (up: 128 of each half of w1). A warp schedules, a thread loads
// weights by TMA and x by bulk copies: x and the hidden layer lie in the form of stages, [token tile][128
// columns][token] [128 codes, swizzled]. The hidden layer has a scale for each token and 128 columns, [token tile][128
// columns][token]. Each of two consumer warpgroups multiplies 64 tokens, from registers, by all rows, in units of 64
// rows and 128 of K: a unit is added to the second accumulator while the next one runs. The warpgroups share no
// barrier, so that the epilogue of one runs beside the products of the other.
#pragma once

#include <kestrel/fp8.cuh>
#include <kestrel/pdl.cuh>
#include <kestrel/ptx/cluster.cuh>
#include <kestrel/ptx/matrix.cuh>
#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/shared.cuh>
#include <kestrel/ptx/tma.cuh>
#include <kestrel/ptx/wgmma_registers.cuh>

#include "experts_roles.cuh"

namespace kestrel::moe {

template <int CLUSTER_>
struct Fp8Tile {
  static constexpr int tokens = 128, cluster = CLUSTER_, my_tokens = 64;                               // of a warpgroup
  static constexpr int rows = 256, half_rows = 128, half_groups = half_rows / 16, blocks = rows / 64;  // of weights
  static constexpr int weight_bytes = rows * kLineBytes, stage_bytes = (rows + tokens) * kLineBytes;
  static constexpr int my_x_bytes = my_tokens * kLineBytes, x_bytes = tokens * kLineBytes;
  static constexpr bool gathers = false;
  static constexpr int stages = 4, slots = 3;
  // Results of a warp on their way to memory: 8 tokens of 128 channels of 16 bits, in rows that are padded against bank
  // conflicts, or the codes of its 16 tokens.
  static constexpr int result_row = 256 + 16, result_bytes = 8 * result_row;
  static_assert(result_bytes >= 16 * kLineBytes, "the codes fit");
  static constexpr int alignment = 1024;
  static constexpr int shared_bytes = stages * stage_bytes + 8 * result_bytes + alignment;
  static constexpr int producers = 128, consumers = 256, threads = producers + consumers;
};

// What the roles of a CTA share.
template <typename Tile>
struct Fp8Shared {
  using Slot = TileSlot<TileTokens<Tile::tokens>, Tile::rows>;
  Slot slots[Tile::slots];
  TmaBarriers<Tile> barriers;
  alignas(16) float stage_scales[Tile::stages][Tile::tokens];     // of x, with p.x_blocks
  alignas(16) float block_scales[Tile::stages][Tile::rows / 16];  // of 16 weight rows each, with p.scale_rank 3
};

template <typename R, Projection PROJECTION, typename TILE>
struct Fp8Roles {
  using Tile = TILE;
  using W = __nv_fp8_e4m3;
  static constexpr bool up = PROJECTION == Projection::up, fp8 = true;
  static constexpr int assistant_warps = 1;
  static constexpr int S = Tile::stages, C = Tile::cluster, U = Tile::my_tokens, B = Tile::blocks;
  static constexpr int channels = up ? Tile::half_rows : Tile::rows;  // of the result, for a tile
  using Shared = Fp8Shared<Tile>;
  using Slot = typename Shared::Slot;

  const TmaParams& params;
  const ExpertsParams& p;
  Shared& shared_memory;
  uint32_t ring;
  int rank;

  // The warp of block scales arrives once for each stage.
  __device__ __forceinline__ int assistants() const { return p.scale_rank == 3 ? 1 : 0; }

  __device__ __forceinline__ int slices() const { return (p.outputs + channels - 1) / channels; }

  // The TMA thread. absent: assistants that the stages' barriers count, and that this projection has not.
  __device__ __forceinline__ void load_tiles(RingPosition<Tile>& at_ring, int first_item, int absent) const {
    auto& slots = shared_memory.slots;
    auto& barriers = shared_memory.barriers;
    auto& stage_scales = shared_memory.stage_scales;
    const int &stage = at_ring.stage, &phase = at_ring.phase, &slot = at_ring.slot, &slot_phase = at_ring.slot_phase;
    const int steps = params.steps;
    const uint64_t policy = prepare_loads(params);
    const auto load = [&](int to_stage, int step, int expert, int slice, bool shared) {
      const uint32_t to = ring + to_stage * Tile::stage_bytes;
      ptx::mbarrier_expect_tx(barriers.full + to_stage, Tile::weight_bytes);
      load_weights<up, Tile>(params, to, step * kLineBytes, expert, slice, shared, rank, barriers.full + to_stage,
                             policy);
    };
    int ahead = load_weights_ahead<Tile>(p, first_item, slices(), steps, load);  // steps whose weights are loaded
    pdl_wait();
    pdl_trigger();
    while (true) {
      ptx::mbarrier_wait(barriers.slot_full + slot, slot_phase);
      const int expert = slots[slot].expert, slice = slots[slot].slice, tile = slots[slot].tile;
      const bool shared = slots[slot].shared;
      if (!slots[slot].belongs_to(PROJECTION)) break;
      const int x_bytes = slots[slot].used > U ? Tile::x_bytes : Tile::my_x_bytes;
      const int scale_bytes = p.x_blocks ? Tile::tokens * 4 : 0;
      if (!up && p.ready && !is_ready(p.ready + tile, p.ready_signals)) {
        RingPosition<Tile> next = at_ring;
        for (; ahead < min(steps, S); ++ahead) {
          ptx::mbarrier_wait(barriers.empty + next.stage, next.phase ^ 1);
          load(next.stage, ahead, expert, slice, shared);
          next.next_stage();
        }
        while (!is_ready(p.ready + tile, p.ready_signals)) __nanosleep(100);
      }
      for (int step = 0; step < steps; ++step) {
        if (step >= ahead) {
          ptx::mbarrier_wait(barriers.empty + stage, phase ^ 1);
          load(stage, step, expert, slice, shared);
        }
        if (absent) ptx::mbarrier_arrive_many(barriers.full + stage, absent);
        ptx::mbarrier_arrive_expect_tx(barriers.full + stage, x_bytes + scale_bytes);
        const int64_t line = int64_t{tile} * steps + step;
        ptx::bulk_load(ring + stage * Tile::stage_bytes + Tile::weight_bytes, p.x + line * Tile::x_bytes, x_bytes,
                       barriers.full + stage);
        if (p.x_blocks) {
          ptx::bulk_load(ptx::shared_address(stage_scales[stage]), p.x_scale + line * Tile::tokens, scale_bytes,
                         barriers.full + stage);
        }
        at_ring.next_stage();
      }
      ahead = 0;
      at_ring.next_slot();
    }
  }

  // The warp of block scales, which are constant: a lane has those of 16 weight rows.
  __device__ __forceinline__ void assist(RingPosition<Tile>& at_ring) const {
    const int lane = threadIdx.x % 32;
    auto& slots = shared_memory.slots;
    auto& barriers = shared_memory.barriers;
    auto& block_scales = shared_memory.block_scales;
    const int &stage = at_ring.stage, &phase = at_ring.phase, &slot = at_ring.slot, &slot_phase = at_ring.slot_phase;
    const int steps = params.steps;
    pdl_wait();
    pdl_trigger();
    const bool high = up && lane % 16 >= 8;
    while (true) {
      ptx::mbarrier_wait(barriers.slot_full + slot, slot_phase);
      if (!slots[slot].belongs_to(PROJECTION)) break;
      const int row = min(slots[slot].slice * channels + (up ? lane % 8 : lane % 16) * 16, p.outputs - 1);
      const int scale_row = (row + (high && !p.split_scales ? p.outputs : 0)) / kScaleBlock;
      const float* const of_row = (high ? p.weight_scale_high : p.weight_scale_low) +
                                  slots[slot].expert * p.scale_expert_stride + scale_row * p.scale_row_stride;
      float scale = of_row[0];
      for (int step = 0; step < steps; ++step) {
        const float next = of_row[min(step + 1, steps - 1)];
        ptx::mbarrier_wait(barriers.empty + stage, phase ^ 1);
        if (lane < 16) block_scales[stage][lane] = scale;
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(barriers.full + stage);
        scale = next;
        at_ring.next_stage();
      }
      at_ring.next_slot();
    }
  }

  // The consumer warpgroups: 64 tokens each, the rows of their products, and all weight rows.
  __device__ __forceinline__ void multiply_tiles(RingPosition<Tile>& at_ring, int& /*buffer*/) const {
    auto& slots = shared_memory.slots;
    auto& barriers = shared_memory.barriers;
    auto& stage_scales = shared_memory.stage_scales;
    auto& block_scales = shared_memory.block_scales;
    const int &stage = at_ring.stage, &phase = at_ring.phase, &slot = at_ring.slot, &slot_phase = at_ring.slot_phase;
    const int steps = params.steps;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // uniform to the compiler
    const int warpgroup = warp / 4 - 1, swizzle = lane % 8, half = lane / 16;
    int unsignalled = -1;  // the tile whose results this warp has copied, but that may not be in memory
    const int first_token = warpgroup * U + warp % 4 * 16;  // of this warp's 16
    const uint32_t my_results = ring + S * Tile::stage_bytes + (warp - 4) * Tile::result_bytes;
    const auto multiply_tile = [&](const Slot& at) {
      // Of x: lane i gives the address of row i % 16, bytes i / 16 * 16 of K.
      const uint32_t my_x = ring + Tile::weight_bytes + (first_token + lane % 16) * kLineBytes;
      // acc[b][4 * j + 2 * r + c]: token group + 8 * r of this warp's, weight row 64 * b + 8 * j + 2 * quad + c.
      float acc[B][U / 2], of_unit[2][U / 2];
#pragma unroll
      for (int b = 0; b < B; ++b) {
#pragma unroll
        for (int i = 0; i < U / 2; ++i) acc[b][i] = 0.f;
      }
#pragma unroll
      for (int i = 0; i < U / 2; ++i) of_unit[1][i] = 0.f;
      const auto multiply = [&](auto blocks_tag) {
        constexpr bool blocks = decltype(blocks_tag)::value;  // the weights have a scale for 128 x 128 of them
        constexpr bool inside = blocks || !up;                // scales of 128 of K, applied here
        float x_scale[2] = {1.f, 1.f};                        // of the step that is added
        float4 of_rows[2] = {};                               // scales of 16 rows each, of a unit
        const auto add = [&](auto b_tag) {
          constexpr int b = decltype(b_tag)::value;
          float (&unit)[U / 2] = of_unit[b % 2];
#pragma unroll
          for (int i = 0; i < U / 2; ++i) {
            if constexpr (!inside) {
              acc[b][i] += unit[i];
            } else if constexpr (!blocks) {
              acc[b][i] = fmaf(unit[i], x_scale[i / 2 % 2], acc[b][i]);
            }
          }
          if constexpr (blocks) {
            const float block_scale[4] = {of_rows[b % 2].x, of_rows[b % 2].y, of_rows[b % 2].z, of_rows[b % 2].w};
#pragma unroll
            for (int i = 0; i < U / 2; ++i) {
              acc[b][i] = fmaf(unit[i], x_scale[i / 2 % 2] * block_scale[i / 8], acc[b][i]);
            }
          }
        };
        uint32_t x[16];
        const auto start_unit = [&](auto b_tag) {
          constexpr int b = decltype(b_tag)::value;
          float (&unit)[U / 2] = of_unit[b % 2];
          const uint64_t w = ptx::wgmma_descriptor(ring + stage * Tile::stage_bytes + b * 64 * kLineBytes);
          ptx::wgmma_fence_registers(unit);
          ptx::wgmma_fence_registers(x);
          ptx::wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            ptx::wgmma_registers<W, U>(unit, x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3], w + 2 * k, k > 0);
          }
          ptx::wgmma_commit();
          if (blocks) of_rows[b % 2] = *reinterpret_cast<const float4*>(&block_scales[stage][4 * b]);
        };
        for (int step = 0; step < steps; ++step) {
          ptx::mbarrier_wait(barriers.full + stage, phase);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            unsigned m[4];
            ptx::load_matrices(my_x + stage * Tile::stage_bytes + ((2 * k + half) ^ swizzle) * 16, m);
#pragma unroll
            for (int i = 0; i < 4; ++i) x[4 * k + i] = m[i];
          }
          start_unit(std::integral_constant<int, 0>());
          if (inside) {
#pragma unroll
            for (int r = 0; r < 2; ++r) x_scale[r] = stage_scales[stage][first_token + lane / 4 + 8 * r];
          }
          const auto next_unit = [&](auto b_tag) {
            constexpr int b = decltype(b_tag)::value;
            start_unit(std::integral_constant<int, b>());
            ptx::wgmma_wait<1>();
            ptx::wgmma_fence_registers(of_unit[1 - b % 2]);
            add(std::integral_constant<int, b - 1>());
          };
          next_unit(std::integral_constant<int, 1>());
          next_unit(std::integral_constant<int, 2>());
          next_unit(std::integral_constant<int, 3>());
          ptx::wgmma_wait<0>();
          ptx::wgmma_fence_registers(of_unit[1]);
          ptx::wgmma_fence_registers(x);
          barriers.release(stage);
          add(std::integral_constant<int, 3>());
          at_ring.next_stage();
        }
      };
      if (p.scale_rank == 3) {
        multiply(std::true_type());
      } else {
        multiply(std::false_type());  // the epilogue multiplies by the weights' scales
      }

      // Epilogue. The asm makes the compiler recompute what depends on the lane here: it does not keep it in registers
      // through the main loop.
      int own = lane;
      asm volatile("" : "+r"(own));
      const int group = own / 4, quad = own % 4;
      float factor[2];
      int pair[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        factor[r] = at.factor[first_token + group + 8 * r];
        pair[r] = at.pair[first_token + group + 8 * r];
      }
      const auto scale_of = [&](int b, int j) {  // of the two weight rows of this thread
        if (p.scale_rank == 3) return make_float2(1.f, 1.f);
        return *reinterpret_cast<const float2*>(&at.scale[64 * b + 8 * j + 2 * quad]);
      };
      if constexpr (up) {
        // The gated results of 128 channels as FP8 codes, 128 bytes of K of the hidden layer, with a scale for each
        // token.
        const auto store_codes = [&](auto gate_tag) {
          float largest[2] = {0.f, 0.f};
#pragma unroll
          for (int b = 0; b < B / 2; ++b) {
#pragma unroll
            for (int j = 0; j < U / 8; ++j) {
              const float2 low = scale_of(b, j), high = scale_of(b + B / 2, j);
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                acc[b][4 * j + i] = gated_codes<decltype(gate_tag)::value>(
                    acc[b][4 * j + i] * (i % 2 ? low.y : low.x), acc[b + B / 2][4 * j + i] * (i % 2 ? high.y : high.x),
                    factor[i / 2]);
                largest[i / 2] = fmaxf(largest[i / 2], fabsf(acc[b][4 * j + i]));
              }
            }
          }
          if (__any_sync(0xffffffffu, fmaxf(largest[0], largest[1]) > FLT_MAX)) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              largest[r] = 0.f;
#pragma unroll
              for (int i = 2 * r; i < U / 2; i += i % 2 ? 3 : 1) {
                largest[r] = fmaxf(largest[r], fmaxf(finite_magnitude(acc[0][i]), finite_magnitude(acc[1][i])));
              }
            }
          }
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 1));
            largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 2));
          }
          if (own == 0) {  // the codes before
            signal_tile(p, unsignalled);
            ptx::bulk_wait_read<0>();
          }
          __syncwarp();
          const int lines = (p.outputs + kLineBytes - 1) / kLineBytes;
          const int64_t line = int64_t{at.tile} * lines + at.slice;
          float inverse[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            inverse[r] = ptx::rcp_approx(fmaxf(largest[r], 1e-12f) * (1.f / kLargestE4M3));
            if (quad == 0) {
              p.out_scale[line * Tile::tokens + first_token + group + 8 * r] = fp8_scale(largest[r]);
            }
          }
          // Neighbouring lanes exchange pairs of codes: the even one has four of group j, the odd one of group j + 1.
          const uint32_t mine = my_results + group * kLineBytes + quad / 2 * 4 + quad % 2 * 8;
#pragma unroll
          for (int b = 0; b < B / 2; ++b) {
#pragma unroll
            for (int j = 0; j < U / 8; j += 2) {
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                const float* const v = &acc[b][4 * j + 2 * r];
                const unsigned codes = to_fp8x2(v[0] * inverse[r], v[1] * inverse[r]) |
                                       to_fp8x2(v[4] * inverse[r], v[5] * inverse[r]) << 16;
                const unsigned other = __shfl_xor_sync(0xffffffffu, codes, 1);
                const unsigned word = quad % 2 ? __byte_perm(other, codes, 0x7632) : __byte_perm(codes, other, 0x5410);
                ptx::store_shared(mine + 8 * r * kLineBytes + ((b * 4 + j / 2) ^ group) * 16, __uint_as_float(word));
              }
            }
          }
          ptx::fence_proxy_async();
          __syncwarp();
          if (own == 0) {
            ptx::bulk_store(p.out + line * Tile::x_bytes + first_token * kLineBytes, my_results, 16 * kLineBytes);
            ptx::bulk_commit();
          }
        };
        if (p.gate == Gate::silu_and_mul) {
          store_codes(std::integral_constant<Gate, Gate::silu_and_mul>());
        } else if (p.gate == Gate::gelu_and_mul) {
          store_codes(std::integral_constant<Gate, Gate::gelu_and_mul>());
        } else {
          store_codes(std::integral_constant<Gate, Gate::gelu_residual>());
        }
      } else if (std::is_same_v<R, __half> && p.partial) {
        // Terms of the sum over choices in float32: they may exceed fp16 where their sum does not.
#pragma unroll
        for (int b = 0; b < B; ++b) {
          const int first_channel = at.slice * channels + 64 * b + 2 * quad;
#pragma unroll
          for (int j = 0; j < U / 8; ++j) {
            const float2 scale = scale_of(b, j);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const float* const v = &acc[b][4 * j + 2 * r];
              store_if(pair[r] >= 0 && first_channel + 8 * j < p.outputs,
                       p.partial + pair[r] * int64_t{p.outputs} + first_channel + 8 * j,
                       make_float2(v[0] * scale.x * factor[r], v[1] * scale.y * factor[r]));
            }
          }
        }
      } else {
        // Rows of 16-bit results through shared memory, 8 tokens and 128 channels at a time.
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int first_channel = at.slice * channels + h * 128 + own % 16 * 8;
          const bool inside = first_channel < p.outputs;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int j = 0; j < 16; j += 4) {
              unsigned matrices[4];
#pragma unroll
              for (int m = 0; m < 4; ++m) {
                const int b = 2 * h + (j + m) / 8, jj = (j + m) % 8;
                const float2 scale = scale_of(b, jj);
                const float* const v = &acc[b][4 * jj + 2 * r];
                matrices[m] = ptx::pack_pair<R>(make_float2(v[0] * scale.x * factor[r], v[1] * scale.y * factor[r]));
              }
              ptx::store_matrices(my_results + own % 8 * Tile::result_row + (j + own / 8) * 16, matrices);
            }
            __syncwarp();
#pragma unroll
            for (int row = 0; row < 8; row += 2) {
              const int of_row = at.pair[first_token + 8 * r + row + own / 16];
              if (of_row >= 0 && inside) {
                *reinterpret_cast<uint4*>(p.out + first_channel * int64_t{2} + of_row * p.out_stride) =
                    ptx::load_shared_uint4(my_results + (row + own / 16) * Tile::result_row + own % 16 * 16);
              }
            }
            __syncwarp();
          }
        }
      }
    };
    while (true) {
      ptx::mbarrier_wait(barriers.slot_full + slot, slot_phase);
      const Slot& at = slots[slot];
      if (!at.belongs_to(PROJECTION)) break;
      if (at.used > warpgroup * U) {
        multiply_tile(at);
      } else {
        for (int step = 0; step < steps; ++step) {
          ptx::mbarrier_wait(barriers.full + stage, phase);
          barriers.release(stage);
          at_ring.next_stage();
        }
      }
      if (up && p.ready) {
        __syncwarp();
        if (lane == 0) {
          signal_tile(p, unsignalled);
          unsignalled = at.tile;
        }
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barriers.slot_empty + slot);
      at_ring.next_slot();
    }
    if (up && lane == 0) signal_tile(p, unsignalled);
  }
};

template <typename R, Projection PROJECTION, typename Tile>
__global__ void __launch_bounds__(Tile::threads, 1) experts_fp8_kernel(const __grid_constant__ TmaParams params) {
#ifdef KESTREL_HAS_WGMMA
  run_one<Fp8Roles<R, PROJECTION, Tile>>(params);
#endif
}

// Both projections.
template <typename R, typename Tile>
__global__ void __launch_bounds__(Tile::threads, 1)
    experts_fp8_both_kernel(const __grid_constant__ TmaBothParams params) {
#ifdef KESTREL_HAS_WGMMA
  run_both<Fp8Roles<R, Projection::up, Tile>, Fp8Roles<R, Projection::down, Tile>>(params);
#endif
}

}  // namespace kestrel::moe
