// Grouped GEMMs of routed experts on Hopper, warp-specialised, with weights loaded by TMA.
//
// A tile is 256 weight rows (up: 128 of each half of w1) by TOKENS tokens of one expert. One warp schedules: it writes
// the pairs, factors and rows of x of each tile into a slot of shared memory. One thread loads weights by TMA, two
// warps gather rows of x by cp.async. Two consumer warpgroups multiply 128 weight rows each. FP8 products are added to
// a second accumulator every 128 elements of K. CTAs are persistent; the two CTAs of a cluster multicast the weights of
// two token tiles. Between the projections of fused_experts the hidden layer lies in the form of pipeline stages, which
// bulk copies move as they are: [token tile][128 bytes of K][token][128 bytes, swizzled]. Scales: scale_position().
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

#include "experts_roles.cuh"
#include "experts_rows.cuh"

namespace kestrel::moe {

// What waits for what:
//   slot_full[slot]   32 arrivals: the lanes of the scheduling warp
//   slot_empty[slot]  8 arrivals: the consumer warps, after the epilogue
//   full[stage]       the gathering threads, once their copies are complete; the TMA thread's arrival and its bytes
//   empty[stage]      the consumer warps of the cluster, once their products have read the stage
//   named barriers 2 and 3, one per warpgroup, in each pass of the epilogue: results are staged, a buffer is free
//   named barriers 4 and 5, in the epilogue of a quantised tile: see their constants
template <typename W, typename R, Projection PROJECTION, typename TILE>
struct TmaRoles {
  using Tile = TILE;
  static constexpr bool up = PROJECTION == Projection::up, fp8 = std::is_same_v<W, __nv_fp8_e4m3>;
  static constexpr int element = fp8 ? 1 : 2, S = Tile::stages, C = Tile::cluster;
  static constexpr int channels = up ? Tile::half_rows : Tile::rows;  // of the result, for a tile
  static constexpr int lag = fp8 ? 2 : 0;                             // stages between a copy and its signal
  static constexpr bool gates = up && (!fp8 || Tile::tokens <= 64);   // experts_fp8.cuh gates FP8 tiles of 128
  static constexpr int assistant_warps = Tile::gatherers / 32;
  static_assert(lag <= S - 2, "a stage is free once the step after it is multiplied");
  static_assert(lag <= 2, "the steps of two tiles: see what schedule_tiles waits for");
  using Shared = TmaShared<W, Tile>;
  using Slot = typename Shared::Slot;

  const TmaParams& params;
  const ExpertsParams& p;
  Shared& shared_memory;
  uint32_t ring;
  int rank;

  // Threads that gather rows, and signal each stage.
  __device__ __forceinline__ int assistants() const { return p.tiled_x ? 0 : Tile::gatherers; }

  __device__ __forceinline__ int slices() const { return (p.outputs + channels - 1) / channels; }

  // The TMA thread: loads the weights, and the tiles of x. absent: assistants that the stages' barriers count, and that
  // this projection has not.
  __device__ __forceinline__ void load_tiles(RingPosition<Tile>& at_ring, int first_item, int absent) const {
    auto& slots = shared_memory.slots;
    auto& barriers = shared_memory.barriers;
    auto& stage_scales = shared_memory.stage_scales;
    const int &stage = at_ring.stage, &phase = at_ring.phase, &slot = at_ring.slot, &slot_phase = at_ring.slot_phase;
    const int steps = params.steps;
    const uint64_t policy = prepare_loads(params);
    const auto load = [&](int to_stage, int step, int expert, int slice, bool shared) {
      const uint32_t to = ring + to_stage * Tile::stage_bytes;
      if (p.tiled_x) {
        ptx::mbarrier_expect_tx(barriers.full + to_stage, Tile::weight_bytes);
      } else {
        ptx::mbarrier_arrive_expect_tx(barriers.full + to_stage, Tile::weight_bytes);
      }
      load_weights<up, Tile>(params, to, step * (kLineBytes / element), expert, slice, shared, rank,
                             barriers.full + to_stage, policy);
    };
    const auto load_tiled_x = [&](int to_stage, int step, int tile, int x_bytes) {
      const int64_t line = int64_t{tile} * steps + step;
      const int scale_bytes = fp8 && p.x_blocks ? Tile::tokens * 4 : 0;
      if (absent) ptx::mbarrier_arrive_many(barriers.full + to_stage, absent);
      ptx::mbarrier_arrive_expect_tx(barriers.full + to_stage, x_bytes + scale_bytes);
      ptx::bulk_load(ring + to_stage * Tile::stage_bytes + Tile::weight_bytes, p.x + line * Tile::x_bytes, x_bytes,
                     barriers.full + to_stage);
      if (scale_bytes) {
        ptx::bulk_load(ptx::shared_address(stage_scales[fp8 ? to_stage : 0]), p.x_scale + line * Tile::tokens,
                       scale_bytes, barriers.full + to_stage);
      }
    };
    if (up) fetch_part(p.fetched, p.fetched_bytes);
    int ahead = load_weights_ahead<Tile>(p, first_item, slices(), steps, load);  // steps whose weights are loaded
    pdl_wait();
    pdl_trigger();
    while (true) {
      ptx::mbarrier_wait(barriers.slot_full + slot, slot_phase);
      const int expert = slots[slot].expert, slice = slots[slot].slice, tile = slots[slot].tile;
      const bool shared = slots[slot].shared;
      if (!slots[slot].belongs_to(PROJECTION)) break;
      const int x_bytes = Tile::columns(slots[slot].used) * kLineBytes;
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
        if (p.tiled_x) load_tiled_x(stage, step, tile, x_bytes);
        at_ring.next_stage();
      }
      ahead = 0;
      at_ring.next_slot();
    }
  }

  // The gathering warps: eight threads copy the 128 bytes of a row, eight rows at once.
  __device__ __forceinline__ void assist(RingPosition<Tile>& at_ring) const {
    auto& slots = shared_memory.slots;
    auto& barriers = shared_memory.barriers;
    auto& stage_scales = shared_memory.stage_scales;
    const int &stage = at_ring.stage, &phase = at_ring.phase, &slot = at_ring.slot, &slot_phase = at_ring.slot_phase;
    const int steps = params.steps;
    const int row_bytes = p.width * element;
    pdl_wait();
    pdl_trigger();
    const int thread = threadIdx.x - 64, row = thread / 8, pack = thread % 8;
    const uint32_t to = ring + (Tile::rows + row) * kLineBytes + (pack ^ row) * 16;
    // With FP8 these warps fence the copies of a step for wgmma, `lag` steps after they have issued them, and signal
    // the step; with 16 bits the copies signal it themselves, and the consumers fence.
    // Rows that a thread looks up at once.
    constexpr int batch = Tile::tokens < 64 ? Tile::tokens / 8 : Tile::tokens % 64 ? 5 : 8;
    static_assert(Tile::tokens % (8 * batch) == 0, "whole batches");
    int behind = 0, signalled = 0;  // steps that are not signalled, and the stage of the first of them
    const auto signal = [&]() {
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(barriers.full + signalled);
      if (++signalled == S) signalled = 0;
    };
    while (true) {
      ptx::mbarrier_wait(barriers.slot_full + slot, slot_phase);
      const Slot& from = slots[slot];
      if (!from.belongs_to(PROJECTION)) break;
      const int used = from.used;
      const char* x = p.x + pack * 16;
      for (int step = 0; step < steps; ++step) {
        ptx::mbarrier_wait(barriers.empty + stage, phase ^ 1);
        const uint32_t here = to + stage * Tile::stage_bytes;
        const bool inside = step * kLineBytes + pack * 16 < row_bytes;
#pragma unroll
        for (int first = 0; first < Tile::tokens; first += 8 * batch) {
          if (first >= used) break;
          uint32_t offset[batch];
#pragma unroll
          for (int i = 0; i < batch; ++i) offset[i] = from.row[first + 8 * i + row];
#pragma unroll
          for (int i = 0; i < batch; ++i) {  // the epilogue skips the columns of no row
            ptx::cp_async16_if(offset[i] != kNoRow, here + (first + 8 * i) * kLineBytes, x + uint64_t{offset[i]} * 16,
                               inside ? 16 : 0);
          }
        }
        if (fp8 && p.x_blocks) {
#pragma unroll
          for (int n = thread; n < Tile::tokens; n += Tile::gatherers) {
            const int pair = from.pair[n];
            if (pair < 0) continue;
            ptx::cp_async4_or_zero(ptx::shared_address(&stage_scales[fp8 ? stage : 0][scale_position(n)]),
                                   p.x_scale + (up ? pair / p.choices : pair) * p.x_scale_stride + step,
                                   /*valid=*/true);
          }
        }
        x += kLineBytes;
        if constexpr (lag == 0) {
          ptx::mbarrier_arrive_after_copies(barriers.full + stage);
        } else {
          ptx::cp_async_commit();
          if (behind == lag) {
            ptx::cp_async_wait<lag>();
            signal();
          } else {
            ++behind;
          }
        }
        at_ring.next_stage();
      }
      at_ring.next_slot();
    }
    ptx::cp_async_wait<0>();
    for (; behind > 0; --behind) signal();
  }

  // The consumer warpgroups: 128 weight rows each, in two blocks of 64 (up: one of each half of w1). buffer: of the
  // results, that the next pass of an epilogue fills.
  __device__ __forceinline__ void multiply_tiles(RingPosition<Tile>& at_ring, int& buffer) const {
    auto& slots = shared_memory.slots;
    auto& barriers = shared_memory.barriers;
    auto& stage_scales = shared_memory.stage_scales;
    const int &stage = at_ring.stage, &phase = at_ring.phase, &slot = at_ring.slot, &slot_phase = at_ring.slot_phase;
    const int steps = params.steps;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // uniform to the compiler
    const int warpgroup = warp / 4 - 1, slab = warp % 4 * 16, group = lane / 4, quad = lane % 4;
    const uint32_t results = ring + S * Tile::stage_bytes, my_results = results + warpgroup * Tile::result_bytes;
    const bool copies = threadIdx.x % 128 == 0;  // one thread of a warpgroup issues its copies
    int unsignalled = -1;                        // the tile whose results may not be in memory
    while (true) {
      ptx::mbarrier_wait(barriers.slot_full + slot, slot_phase);
      const Slot& at = slots[slot];
      if (!at.belongs_to(PROJECTION)) break;
      const int64_t expert = at.expert;
      const int used = at.used;
      // The first row of this warp in each block: a channel of the result.
      int channel[2];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        channel[b] = at.slice * channels + warpgroup * (up ? 64 : 128) + (up ? 0 : 64 * b) + slab;
      }
      // Main loop. acc[block][4 * j + 2 * r + c]: row group + 8 * r of the warp's 16, token 8 * j + 2 * quad + c.
      float acc[2][Tile::tokens / 2];
      const uint32_t block_bytes = (up ? Tile::half_rows : 64) * kLineBytes;
      const uint32_t my_rows = ring + warpgroup * (up ? 64 : 128) * kLineBytes;
      const auto multiply = [&](auto n_tag) {
        constexpr int N = decltype(n_tag)::value;
        if constexpr (fp8) {
#pragma unroll
          for (int b = 0; b < 2; ++b) {
#pragma unroll
            for (int i = 0; i < N / 2; ++i) acc[b][i] = 0.f;
          }
          float of_line[N / 2];
          const auto multiply_line = [&](int b) {
            const uint64_t a = ptx::wgmma_descriptor(my_rows + stage * Tile::stage_bytes + b * block_bytes);
            const uint64_t x = ptx::wgmma_descriptor(ring + stage * Tile::stage_bytes + Tile::weight_bytes);
            ptx::wgmma_fence_registers(of_line);
            ptx::wgmma_fence();
#pragma unroll
            for (int k = 0; k < 4; ++k) ptx::wgmma<W, N>(of_line, a + 2 * k, x + 2 * k, k > 0);
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            ptx::wgmma_fence_registers(of_line);
          };
          if (!p.x_blocks && p.scale_rank < 3) {  // the epilogue multiplies by the scales
            for (int step = 0; step < steps; ++step) {
              ptx::mbarrier_wait(barriers.full + stage, phase);
#pragma unroll
              for (int b = 0; b < 2; ++b) {
                multiply_line(b);
                if (b == 1) barriers.release(stage);
#pragma unroll
                for (int i = 0; i < N / 2; ++i) acc[b][i] += of_line[i];
              }
              at_ring.next_stage();
            }
          } else {
            const float* block_scales[2] = {nullptr, nullptr};  // one per step
            if (p.scale_rank == 3) {
#pragma unroll
              for (int b = 0; b < 2; ++b) {
                const int row = min(channel[b], p.outputs - 1);
                const int scale_row = (row + (up && b && !p.split_scales ? p.outputs : 0)) / kScaleBlock;
                block_scales[b] = (up && b ? p.weight_scale_high : p.weight_scale_low) +
                                  expert * p.scale_expert_stride + scale_row * p.scale_row_stride;
              }
            }
            for (int step = 0; step < steps; ++step) {
              ptx::mbarrier_wait(barriers.full + stage, phase);
#pragma unroll
              for (int b = 0; b < 2; ++b) {
                const float block_scale = block_scales[b] ? block_scales[b][step] : 1.f;
                multiply_line(b);
#pragma unroll
                for (int i = 0; i < N / 16; ++i) {
                  float4 x_scale = make_float4(1.f, 1.f, 1.f, 1.f);
                  if (p.x_blocks) {
                    x_scale = *reinterpret_cast<const float4*>(&stage_scales[stage][16 * i + 4 * quad]);
                  }
                  const float scales[4] = {x_scale.x * block_scale, x_scale.y * block_scale, x_scale.z * block_scale,
                                           x_scale.w * block_scale};
#pragma unroll
                  for (int j = 0; j < 8; ++j) {
                    acc[b][8 * i + j] = fmaf(of_line[8 * i + j], scales[j / 4 * 2 + j % 2], acc[b][8 * i + j]);
                  }
                }
                if (b == 1) barriers.release(stage);
              }
              at_ring.next_stage();
            }
          }
        } else {
          int previous = -1;
          for (int step = 0; step < steps; ++step) {
            ptx::mbarrier_wait(barriers.full + stage, phase);
            if (!p.tiled_x) ptx::fence_proxy_async();
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
            if (previous >= 0) barriers.release(previous);
            previous = stage;
            at_ring.next_stage();
          }
          ptx::wgmma_wait<0>();
          ptx::wgmma_fence_registers(acc[0]);
          ptx::wgmma_fence_registers(acc[1]);
          barriers.release(previous);
        }
      };
      if constexpr (fp8 || Tile::tokens <= 64) {  // FP8: one N only, two accumulators leave few registers
        multiply(std::integral_constant<int, Tile::tokens>());
      } else {
        const int columns = Tile::columns(used);
        const auto multiply_if = [&](auto n_tag) {
          if constexpr (decltype(n_tag)::value <= Tile::tokens) {
            if (columns == decltype(n_tag)::value) multiply(n_tag);
          }
        };
        multiply_if(std::integral_constant<int, 32>());
        multiply_if(std::integral_constant<int, 64>());
        multiply_if(std::integral_constant<int, 96>());
        multiply_if(std::integral_constant<int, 128>());
        multiply_if(std::integral_constant<int, 160>());
        multiply_if(std::integral_constant<int, 192>());
      }

      // Epilogue.
      float scale[2][2] = {{1.f, 1.f}, {1.f, 1.f}};  // of [block][channel of this thread]
      if (fp8 && p.scale_rank < 3) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int row = warpgroup * (up ? 64 : 128) + b * (up ? Tile::half_rows : 64) + slab +
                            (params.even_first ? 2 * group + r : group + 8 * r);
            scale[b][r] = at.scale[fp8 ? row : 0];
          }
        }
      }
      const auto scaled = [&](int b, int i, float factor) {
        return fp8 || !up ? acc[b][i] * scale[b][i % 4 / 2] * factor : acc[b][i];
      };
      // Rows of 16-bit results through shared memory: 64 channels of each block; down: these are 128 in sequence.
      const auto store_rows = [&](const auto& value) {
        const int pack = threadIdx.x % 16, first_row = threadIdx.x % 128 / 16;  // that this thread copies
        const int first_channel = channel[0] - slab + (up ? pack % 8 : pack) * 8;
        const bool inside = first_channel < p.outputs;
        char* const out = p.out + (first_channel + (up && pack >= 8 ? p.outputs : 0)) * int64_t{2};
#pragma unroll
        for (int first = 0; first < Tile::tokens; first += Tile::pass) {
          if (first >= used) break;
          const uint32_t rows = my_results + buffer * Tile::pass * Tile::result_row;
#pragma unroll
          for (int j = first / 8; j < (first + Tile::pass) / 8; ++j) {
            const float2 factor = *reinterpret_cast<const float2*>(&at.factor[8 * j + 2 * quad]);
            unsigned matrices[4];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
              const int i = 4 * j + m % 2 * 2;
              matrices[m] = ptx::pack_pair<R>(make_float2(value(m / 2, i, factor.x), value(m / 2, i + 1, factor.y)));
            }
            ptx::store_matrices_transposed(
                rows + (8 * j - first + lane % 8) * Tile::result_row + lane / 16 * 128 + (slab + lane / 8 % 2 * 8) * 2,
                matrices);
          }
          ptx::named_barrier(kBarrierOfWarpgroup + warpgroup, 128);
#pragma unroll
          for (int row = 0; row < Tile::pass; row += 8) {
            const int pair = at.pair[first + row + first_row];
            if (pair >= 0 && inside) {
              *reinterpret_cast<uint4*>(out + pair * p.out_stride) =
                  ptx::load_shared_uint4(rows + (row + first_row) * Tile::result_row + pack * 16);
            }
          }
          buffer ^= 1;
        }
      };
      // The gated results of 64 channels of 16 bits, 128 bytes of K of the hidden layer.
      const auto store_line = [&](const auto& value) {
        const int line = at.slice * 2 + warpgroup, lines = (p.outputs * 2 + kLineBytes - 1) / kLineBytes;
        if (line >= lines) return;
        char* const out = p.out + (int64_t{at.tile} * lines + line) * Tile::x_bytes;
        const unsigned mask = channel[0] < p.outputs ? ~0u : 0u;  // the K tail is 0, where inf * 0 would be NaN
        constexpr int pass = 2 * Tile::pass;
#pragma unroll
        for (int first = 0; first < Tile::tokens; first += pass) {
          if (first >= used) break;
          const uint32_t rows = my_results + buffer * Tile::pass * Tile::result_row;
#pragma unroll
          for (int j = first / 8; j < (first + pass) / 8; j += 2) {
            unsigned matrices[4];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
              const int i = 4 * (j + m / 2) + m % 2 * 2;
              matrices[m] = mask & ptx::pack_pair<R>(make_float2(value(i, 1.f), value(i + 1, 1.f)));
            }
            const int n = 8 * (j + lane / 16) - first + lane % 8;
            ptx::store_matrices_transposed(rows + n * kLineBytes + ((slab / 8 + lane / 8 % 2) ^ n % 8) * 16, matrices);
          }
          ptx::fence_proxy_async();
          if (copies) {
            signal_tile(p, unsignalled);
            ptx::bulk_wait_read<0>();  // of the other buffer
          }
          ptx::named_barrier(kBarrierOfWarpgroup + warpgroup, 128);
          if (copies) {
            ptx::bulk_store(out + first * kLineBytes, rows, pass * kLineBytes);
            ptx::bulk_commit();
          }
          buffer ^= 1;
        }
      };
      // The gated results of 128 channels as FP8 codes, 128 bytes of K of the hidden layer, with a scale for each
      // token.
      [[maybe_unused]] const auto store_codes = [&](const auto& value) {
        if (used == 0) return;
        constexpr int tokens = Tile::tokens;
        float (&v)[tokens / 2] = acc[0];
        float largest[tokens / 4];  // of the two channels of token 8 * (i / 2) + 2 * quad + i % 2
        float top = 0.f;
#pragma unroll
        for (int j = 0; j < tokens / 8; ++j) {
          const float2 factor = *reinterpret_cast<const float2*>(&at.factor[8 * j + 2 * quad]);
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int i = 4 * j + c;
            const float low = value(i, c ? factor.y : factor.x), high = value(i + 2, c ? factor.y : factor.x);
            v[i] = low;
            v[i + 2] = high;
            largest[2 * j + c] = fmaxf(fabsf(low), fabsf(high));
            top = fmaxf(top, largest[2 * j + c]);
          }
        }
        if (__any_sync(0xffffffffu, top > FLT_MAX)) {
#pragma unroll
          for (int i = 0; i < tokens / 4; ++i) {
            const int at_v = i / 2 * 4 + i % 2;
            largest[i] = fmaxf(finite_magnitude(v[at_v]), finite_magnitude(v[at_v + 2]));
          }
        }
        // The lanes of a quad's tokens exchange halves of their maxima, until each has the maxima of tokens / 32 of
        // them.
        const auto exchange = [&](auto half_tag, int mask) {
          constexpr int half = decltype(half_tag)::value;
          const bool upper = lane & mask;
#pragma unroll
          for (int i = 0; i < half; ++i) {
            const float mine = upper ? largest[i + half] : largest[i], other = upper ? largest[i] : largest[i + half];
            largest[i] = fmaxf(mine, __shfl_xor_sync(0xffffffffu, other, mask));
          }
        };
        exchange(std::integral_constant<int, tokens / 8>(), 16);
        exchange(std::integral_constant<int, tokens / 16>(), 8);
        exchange(std::integral_constant<int, tokens / 32>(), 4);
        Slot& mine = slots[slot];
#pragma unroll
        for (int i = 0; i < tokens / 32; ++i) {
          const int of = group * (tokens / 32) + i;
          atomicMax(&mine.largest[scale_position(of / 2 * 8 + 2 * quad + of % 2)], __float_as_uint(largest[i]));
        }
        if (copies && warpgroup == 0) {
          signal_tile(p, unsignalled);
          ptx::bulk_wait_read<0>();
        }
        ptx::named_barrier(kBarrierOfLargest, Tile::consumers);
        const int lines = (p.outputs + kLineBytes - 1) / kLineBytes;
        const int64_t line = int64_t{at.tile} * lines + at.slice;
        const int thread = threadIdx.x - Tile::producers;
        if (thread < tokens) p.out_scale[line * tokens + thread] = fp8_scale(__uint_as_float(mine.largest[thread]));
#pragma unroll
        for (int j = 0; j < tokens / 8; j += 4) {
          unsigned matrices[4];
#pragma unroll
          for (int m = 0; m < 4; m += 2) {
            const float4 top4 = *reinterpret_cast<const float4*>(&mine.largest[(j + m) * 8 + 4 * quad]);
            const float tops[4] = {top4.x, top4.y, top4.z, top4.w};
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              unsigned codes[2];
#pragma unroll
              for (int c = 0; c < 2; ++c) {
                const float inverse = ptx::rcp_approx(fmaxf(tops[2 * h + c], 1e-12f) * (1.f / kLargestE4M3));
                const int i = 4 * (j + m + h) + c;
                codes[c] = to_fp8x2(v[i] * inverse, v[i + 2] * inverse);
              }
              matrices[m + h] = codes[0] | codes[1] << 16;
            }
          }
          const int n = 8 * (j + lane / 8) + lane % 8;
          ptx::store_matrices_transposed(results + n * kLineBytes + ((warpgroup * 4 + slab / 16) ^ n % 8) * 16,
                                         matrices);
        }
        ptx::fence_proxy_async();
        if (thread < 32) {
          ptx::named_barrier(kBarrierOfCodes, Tile::consumers);
        } else {
          ptx::named_barrier_arrive(kBarrierOfCodes, Tile::consumers);
        }
        if (copies && warpgroup == 0) {
          ptx::bulk_store(p.out + line * Tile::x_bytes, results, Tile::x_bytes);
          ptx::bulk_commit();
        }
      };
      // Terms of the sum over choices in float32: 8 bytes from registers.
      [[maybe_unused]] const auto store_terms = [&](int b) {
        const int64_t at_channel = channel[b] + 2 * group, stride = p.outputs;
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
              store_if(pair >= 0 && channel[b] < p.outputs, p.partial + pair * stride + at_channel,
                       make_float2(scaled(b, 4 * j + c, factor), scaled(b, 4 * j + 2 + c, factor)));
            }
          }
        }
      };
      const auto store_gated = [&](auto gate_tag) {
        const auto value = [&](int i, float factor) {
          constexpr Gate gate = decltype(gate_tag)::value;
          if constexpr (!fp8) return gated_value(acc[0][i], acc[1][i], gate);
          return gated_codes<gate>(acc[0][i] * scale[0][i % 4 / 2], acc[1][i] * scale[1][i % 4 / 2], factor);
        };
        if constexpr (fp8) {
          store_codes(value);
        } else {
          store_line(value);
        }
      };
      if (gates && p.gate == Gate::silu_and_mul) {
        store_gated(std::integral_constant<Gate, Gate::silu_and_mul>());
      } else if (gates && p.gate == Gate::gelu_and_mul) {
        store_gated(std::integral_constant<Gate, Gate::gelu_and_mul>());
      } else if (gates && p.gate == Gate::gelu_residual) {
        store_gated(std::integral_constant<Gate, Gate::gelu_residual>());
      } else if (!up && std::is_same_v<R, __half> && p.partial) {
        // They may exceed fp16 where their sum does not.
#pragma unroll
        for (int b = 0; b < 2; ++b) store_terms(b);
      } else {
        store_rows(scaled);
      }
      if (up && p.ready && copies && (!fp8 || warpgroup == 0)) {
        signal_tile(p, unsignalled);
        unsignalled = at.tile;
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(barriers.slot_empty + slot);
      at_ring.next_slot();
    }
    signal_tile(p, unsignalled);
    // The rows of the other projection go where the codes of the last tile were: once these have been copied.
    if constexpr (up && fp8) ptx::named_barrier(kBarrierOfWarpgroup + warpgroup, 128);
  }
};

template <typename W, typename R, Projection PROJECTION, typename Tile>
__global__ void __launch_bounds__(Tile::threads, 1) experts_tma_kernel(const __grid_constant__ TmaParams params) {
#ifdef KESTREL_HAS_WGMMA
  run_one<TmaRoles<W, R, PROJECTION, Tile>>(params);
#endif
}

// Both projections.
template <typename W, typename R, typename Tile>
__global__ void __launch_bounds__(Tile::threads, 1)
    experts_tma_both_kernel(const __grid_constant__ TmaBothParams params) {
#ifdef KESTREL_HAS_WGMMA
  run_both<TmaRoles<W, R, Projection::up, Tile>, TmaRoles<W, R, Projection::down, Tile>>(params);
#endif
}

}  // namespace kestrel::moe
