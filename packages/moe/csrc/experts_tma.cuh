// Grouped GEMMs of routed experts on Hopper, warp-specialised, with weights loaded by TMA.
//
// A tile is 256 weight rows (up: 128 of each half of w1) by TOKENS tokens of one expert. One warp schedules: it writes
// the pairs, factors and rows of x of each tile into an entry of a ring in shared memory. One thread loads weights by
// TMA, two warps gather rows of x by cp.async. Two consumer warpgroups multiply 128 weight rows each. FP8 products are
// added to a second accumulator every 128 elements of K. CTAs are persistent; the two CTAs of a cluster multicast the
// weights of two token tiles. Between the projections of fused_experts the hidden layer lies in the form of pipeline
// stages, which bulk copies move as they are: [token tile][128 bytes of K][token][128 bytes, swizzled]. Scales:
// scale_position().
#pragma once

#include <kestrel/pdl.cuh>
#include <kestrel/ptx/cp_async.cuh>
#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/named_barrier.cuh>
#include <kestrel/ptx/shared.cuh>
#include <kestrel/ptx/tma.cuh>
#include <kestrel/ptx/wgmma.cuh>

#include "experts_roles.cuh"
#include "experts_rows.cuh"
#include "experts_tma_epilogue.cuh"

namespace kestrel::moe {

// What waits for what:
//   entry_full[entry]   32 arrivals: the lanes of the scheduling warp
//   entry_empty[entry]  8 arrivals: the consumer warps, after the epilogue
//   full[stage]         the gathering threads, once their copies are complete; the TMA thread's arrival and its bytes
//   empty[stage]        the consumer warps of the cluster, once their products have read the stage
//   named barriers 2 and 3, one per warpgroup, in each pass of the epilogue: results are staged, a buffer is free
//   named barriers 4 and 5, in the epilogue of a quantised tile: see their constants
template <typename W, typename R, Projection PROJECTION, typename TILE>
struct TmaRoles {
  using Tile = TILE;
  static constexpr bool up = PROJECTION == Projection::up, fp8 = std::is_same_v<W, __nv_fp8_e4m3>;
  static constexpr int element = fp8 ? 1 : 2, S = Tile::stages;
  static constexpr int channels = up ? Tile::half_rows : Tile::rows;  // of the result, for a tile
  static constexpr int lag = fp8 ? 2 : 0;                             // stages between a copy and its signal
  static constexpr int assistant_warps = Tile::gatherers / 32;
  static_assert(lag <= S - 2, "a stage is free once the step after it is multiplied");
  static_assert(lag <= 2, "the steps of two tiles: see what schedule_tiles waits for");
  using Shared = TmaShared<W, Tile>;
  using Entry = typename Shared::Entry;

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
    auto& barriers = shared_memory.barriers;
    auto& stage_scales = shared_memory.stage_scales;
    const uint64_t policy = prepare_loads(params);
    const auto load = [&](int stage, int step, int expert, int slice, bool shared) {
      const uint32_t to = ring + stage * Tile::stage_bytes;
      if (p.tiled_x) {
        ptx::mbarrier_expect_tx(barriers.full + stage, Tile::weight_bytes);
      } else {
        ptx::mbarrier_arrive_expect_tx(barriers.full + stage, Tile::weight_bytes);
      }
      load_weights<up, Tile>(params, to, step * (kLineBytes / element), expert, slice, shared, rank,
                             barriers.full + stage, policy);
    };
    const auto load_tiled_x = [&](int stage, int step, int tile, int used) {
      if (!p.tiled_x) return;
      const int64_t line = int64_t{tile} * params.steps + step;
      const int x_bytes = Tile::columns(used) * kLineBytes, scale_bytes = fp8 && p.x_blocks ? Tile::tokens * 4 : 0;
      if (absent) ptx::mbarrier_arrive_many(barriers.full + stage, absent);
      ptx::mbarrier_arrive_expect_tx(barriers.full + stage, x_bytes + scale_bytes);
      ptx::bulk_load(ring + stage * Tile::stage_bytes + Tile::weight_bytes, p.x + line * Tile::x_bytes, x_bytes,
                     barriers.full + stage);
      if (scale_bytes) {
        ptx::bulk_load(ptx::shared_address(stage_scales[fp8 ? stage : 0]), p.x_scale + line * Tile::tokens, scale_bytes,
                       barriers.full + stage);
      }
    };
    if (up) fetch_part(p.fetched, p.fetched_bytes);
    load_stages<PROJECTION>(params, slices(), shared_memory.entries, barriers, at_ring, first_item, load, load_tiled_x);
  }

  // The gathering warps: eight threads copy the 128 bytes of a row, eight rows at once.
  __device__ __forceinline__ void assist(RingPosition<Tile>& at_ring) const {
    auto& entries = shared_memory.entries;
    auto& barriers = shared_memory.barriers;
    auto& stage_scales = shared_memory.stage_scales;
    const int &stage = at_ring.stage, &phase = at_ring.phase, &entry = at_ring.entry,
              &entry_phase = at_ring.entry_phase;
    const int steps = params.steps;
    const int row_bytes = p.width * element;
    pdl_wait();
    pdl_trigger();
    const int thread = threadIdx.x - 64, row = thread / 8, pack = thread % 8;
    const uint32_t to = ring + (Tile::rows + row) * kLineBytes + (pack ^ row) * 16;
    // Rows that a thread looks up at once.
    constexpr int batch = Tile::tokens < 64 ? Tile::tokens / 8 : Tile::tokens % 64 ? 5 : 8;
    static_assert(Tile::tokens % (8 * batch) == 0, "whole batches");
    // With FP8 these warps fence the copies of a step for wgmma, `lag` steps after they have issued them, and signal
    // the step; with 16 bits the copies signal it themselves, and the consumers fence.
    int behind = 0, signalled = 0;  // steps that are not signalled, and the stage of the first of them
    const auto signal = [&]() {
      ptx::fence_proxy_async();
      ptx::mbarrier_arrive(barriers.full + signalled);
      if (++signalled == S) signalled = 0;
    };
    while (true) {
      ptx::mbarrier_wait(barriers.entry_full + entry, entry_phase);
      const Entry& from = entries[entry];
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
      at_ring.next_entry();
    }
    ptx::cp_async_wait<0>();
    for (; behind > 0; --behind) signal();
  }

  // The consumer warpgroups: 128 weight rows each, in two blocks of 64 (up: one of each half of w1). buffer: of the
  // results, that the next pass of an epilogue fills.
  __device__ __forceinline__ void multiply_tiles(RingPosition<Tile>& at_ring, int& buffer) const {
    auto& barriers = shared_memory.barriers;
    const ConsumerThread thread;
    int unsignalled = -1;  // the tile whose results may not be in memory
    while (true) {
      ptx::mbarrier_wait(barriers.entry_full + at_ring.entry, at_ring.entry_phase);
      Entry& at = shared_memory.entries[at_ring.entry];
      if (!at.belongs_to(PROJECTION)) break;
      const int64_t expert = at.expert;
      const int used = at.used;
      // The first row of this warp in each block: a channel of the result.
      int channel[2];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        channel[b] = at.slice * channels + thread.warpgroup * (up ? 64 : 128) + (up ? 0 : 64 * b) + thread.slab;
      }
      Sums acc;
      if constexpr (!fp8) {
        multiply_16_bits(at_ring, thread, used, acc);
      } else {
        multiply_fp8(at_ring, thread, expert, channel, acc);
      }
      Epilogue{thread, params, p, at, used, channel, acc, ring + S * Tile::stage_bytes, buffer, unsignalled}.store();
      if (up && p.ready && thread.copies && (!fp8 || thread.warpgroup == 0)) {
        signal_tile(p, unsignalled);
        unsignalled = at.tile;
      }
      __syncwarp();
      if (thread.lane == 0) ptx::mbarrier_arrive(barriers.entry_empty + at_ring.entry);
      at_ring.next_entry();
    }
    signal_tile(p, unsignalled);
    // The rows of the other projection go where the codes of the last tile were: once these have been copied.
    if constexpr (up && fp8) ptx::named_barrier(kBarrierOfWarpgroup + thread.warpgroup, 128);
  }

 private:
  using Epilogue = TmaEpilogue<W, R, PROJECTION, Tile>;
  using Sums = typename Epilogue::Sums;
  static constexpr uint32_t block_bytes = (up ? Tile::half_rows : 64) * kLineBytes;

  // Of a warpgroup in a stage at `ring`.
  __device__ __forceinline__ uint32_t rows_of(int warpgroup) const {
    return ring + warpgroup * (up ? 64 : 128) * kLineBytes;
  }

  // acc = the rows of a warpgroup, times the first `used` tokens.
  __device__ __forceinline__ void multiply_16_bits(RingPosition<Tile>& at_ring, const ConsumerThread& thread, int used,
                                                   Sums& acc) const {
    if constexpr (Tile::tokens <= 64) {
      multiply_columns<Tile::tokens>(at_ring, thread, acc);
    } else {
      const int columns = Tile::columns(used);
      const auto multiply_if = [&](auto n_tag) {
        constexpr int N = decltype(n_tag)::value;
        if constexpr (N <= Tile::tokens) {
          if (columns == N) multiply_columns<N>(at_ring, thread, acc);
        }
      };
      multiply_if(std::integral_constant<int, 32>());
      multiply_if(std::integral_constant<int, 64>());
      multiply_if(std::integral_constant<int, 96>());
      multiply_if(std::integral_constant<int, 128>());
      multiply_if(std::integral_constant<int, 160>());
      multiply_if(std::integral_constant<int, 192>());
    }
  }

  // The same for N tokens. A stage is released once the products of the next one are issued.
  template <int N>
  __device__ __forceinline__ void multiply_columns(RingPosition<Tile>& at_ring, const ConsumerThread& thread,
                                                   Sums& acc) const {
    auto& barriers = shared_memory.barriers;
    const int steps = params.steps;
    const uint32_t my_rows = rows_of(thread.warpgroup);
    int previous = -1;
    for (int step = 0; step < steps; ++step) {
      ptx::mbarrier_wait(barriers.full + at_ring.stage, at_ring.phase);
      if (!p.tiled_x) ptx::fence_proxy_async();
      const uint64_t x = ptx::wgmma_descriptor(ring + at_ring.stage * Tile::stage_bytes + Tile::weight_bytes);
      const uint64_t a = ptx::wgmma_descriptor(my_rows + at_ring.stage * Tile::stage_bytes);
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
      previous = at_ring.stage;
      at_ring.next_stage();
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_registers(acc[0]);
    ptx::wgmma_fence_registers(acc[1]);
    barriers.release(previous);
  }

  // FP8 products are added to a second accumulator every 128 elements of K.
  __device__ __forceinline__ void multiply_fp8(RingPosition<Tile>& at_ring, const ConsumerThread& thread,
                                               int64_t expert, const int (&channel)[2], Sums& acc) const {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int i = 0; i < Tile::tokens / 2; ++i) acc[b][i] = 0.f;
    }
    if (!p.x_blocks && p.scale_rank < 3) {  // the epilogue multiplies by the scales
      add_products(at_ring, thread, acc);
    } else {
      add_scaled_products(at_ring, thread, expert, channel, acc);
    }
  }

  // of_line = block b of the rows of a warpgroup, times all tokens, over the 128 elements of K of a stage.
  __device__ __forceinline__ void multiply_line(float (&of_line)[Tile::tokens / 2], int stage, uint32_t my_rows,
                                                int b) const {
    const uint64_t a = ptx::wgmma_descriptor(my_rows + stage * Tile::stage_bytes + b * block_bytes);
    const uint64_t x = ptx::wgmma_descriptor(ring + stage * Tile::stage_bytes + Tile::weight_bytes);
    ptx::wgmma_fence_registers(of_line);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) ptx::wgmma<W, Tile::tokens>(of_line, a + 2 * k, x + 2 * k, k > 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_registers(of_line);
  }

  __device__ __forceinline__ void add_products(RingPosition<Tile>& at_ring, const ConsumerThread& thread,
                                               Sums& acc) const {
    auto& barriers = shared_memory.barriers;
    const int steps = params.steps;
    const uint32_t my_rows = rows_of(thread.warpgroup);
    float of_line[Tile::tokens / 2];
    for (int step = 0; step < steps; ++step) {
      ptx::mbarrier_wait(barriers.full + at_ring.stage, at_ring.phase);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        multiply_line(of_line, at_ring.stage, my_rows, b);
        if (b == 1) barriers.release(at_ring.stage);
#pragma unroll
        for (int i = 0; i < Tile::tokens / 2; ++i) acc[b][i] += of_line[i];
      }
      at_ring.next_stage();
    }
  }

  // With scales of 128 elements of K, of the weights, of x, or both.
  __device__ __forceinline__ void add_scaled_products(RingPosition<Tile>& at_ring, const ConsumerThread& thread,
                                                      int64_t expert, const int (&channel)[2], Sums& acc) const {
    auto& barriers = shared_memory.barriers;
    auto& stage_scales = shared_memory.stage_scales;
    const int steps = params.steps;
    const uint32_t my_rows = rows_of(thread.warpgroup);
    float of_line[Tile::tokens / 2];
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
    for (int step = 0; step < steps; ++step) {
      ptx::mbarrier_wait(barriers.full + at_ring.stage, at_ring.phase);
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float block_scale = block_scales[b] ? block_scales[b][step] : 1.f;
        multiply_line(of_line, at_ring.stage, my_rows, b);
#pragma unroll
        for (int i = 0; i < Tile::tokens / 16; ++i) {
          float4 x_scale = make_float4(1.f, 1.f, 1.f, 1.f);
          if (p.x_blocks) {
            x_scale = *reinterpret_cast<const float4*>(&stage_scales[at_ring.stage][16 * i + 4 * thread.quad]);
          }
          const float scales[4] = {x_scale.x * block_scale, x_scale.y * block_scale, x_scale.z * block_scale,
                                   x_scale.w * block_scale};
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            acc[b][8 * i + j] = fmaf(of_line[8 * i + j], scales[j / 4 * 2 + j % 2], acc[b][8 * i + j]);
          }
        }
        if (b == 1) barriers.release(at_ring.stage);
      }
      at_ring.next_stage();
    }
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
