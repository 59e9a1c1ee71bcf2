// Grouped GEMMs of routed FP8 experts on Hopper, with both operands in tiles of pipeline stages.
//
// A tile is 128 tokens of one expert by 256 weight rows (up: 128 of each half of w1). A warp schedules, a thread loads
// weights by TMA and x by bulk copies: x and the hidden layer lie in the form of stages, [token tile][128
// columns][token][128 codes, swizzled]. The hidden layer has a scale for each token and 128 columns, [token tile][128
// columns][token]. Each of two consumer warpgroups multiplies 64 tokens, from registers, by all rows, in units of 64
// rows and 128 of K: a unit is added to the second accumulator while the next one runs. The warpgroups share no
// barrier, so that the epilogue of one runs beside the products of the other.
#pragma once

#include <kestrel/pdl.cuh>
#include <kestrel/ptx/matrix.cuh>
#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/shared.cuh>
#include <kestrel/ptx/tma.cuh>
#include <kestrel/ptx/wgmma_registers.cuh>

#include "experts_fp8_epilogue.cuh"
#include "experts_roles.cuh"

namespace kestrel::moe {

// The products of a warpgroup's 64 tokens with units of 64 weight rows and 128 of K, one in flight while the one before
// is added. BLOCKS: the weights have a scale for 128 x 128 of them. INSIDE: scales of 128 of K are applied here.
template <bool BLOCKS, bool INSIDE, typename Tile>
struct Fp8Units {
  static constexpr int U = Tile::my_tokens;
  float of_unit[2][U / 2];
  uint32_t x[16];
  float x_scale[2] = {1.f, 1.f};  // of the step that is added
  float4 of_rows[2] = {};         // scales of 16 rows each, of a unit

  __device__ __forceinline__ Fp8Units() {
#pragma unroll
    for (int i = 0; i < U / 2; ++i) of_unit[1][i] = 0.f;
  }

  // from: the address of this lane in the rows of x of a stage.
  __device__ __forceinline__ void load_x(uint32_t from) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      unsigned m[4];
      ptx::load_matrices(from ^ 32 * k, m);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[4 * k + i] = m[i];
    }
  }

  // weights, block_scales: of the stage.
  template <int b>
  __device__ __forceinline__ void start(uint32_t weights, const float* block_scales) {
    float (&unit)[U / 2] = of_unit[b % 2];
    const uint64_t w = ptx::wgmma_descriptor(weights + b * 64 * kLineBytes);
    ptx::wgmma_fence_registers(unit);
    ptx::wgmma_fence_registers(x);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ptx::wgmma_registers<__nv_fp8_e4m3, U>(unit, x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3], w + 2 * k,
                                             k > 0);
    }
    ptx::wgmma_commit();
    if (BLOCKS) of_rows[b % 2] = *reinterpret_cast<const float4*>(block_scales + 4 * b);
  }

  // Starts a unit and adds the one before.
  template <int b>
  __device__ __forceinline__ void next(uint32_t weights, const float* block_scales, float (&acc)[Tile::blocks][U / 2]) {
    start<b>(weights, block_scales);
    ptx::wgmma_wait<1>();
    ptx::wgmma_fence_registers(of_unit[1 - b % 2]);
    add<b - 1>(acc);
  }

  // The last unit of a step is done, and x and the weights have been read.
  __device__ __forceinline__ void end() {
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_registers(of_unit[1]);
    ptx::wgmma_fence_registers(x);
  }

  template <int b>
  __device__ __forceinline__ void add(float (&acc)[Tile::blocks][U / 2]) {
    float (&unit)[U / 2] = of_unit[b % 2];
#pragma unroll
    for (int i = 0; i < U / 2; ++i) {
      if constexpr (!INSIDE) {
        acc[b][i] += unit[i];
      } else if constexpr (!BLOCKS) {
        acc[b][i] = fmaf(unit[i], x_scale[i / 2 % 2], acc[b][i]);
      }
    }
    if constexpr (BLOCKS) {
      const float block_scale[4] = {of_rows[b % 2].x, of_rows[b % 2].y, of_rows[b % 2].z, of_rows[b % 2].w};
#pragma unroll
      for (int i = 0; i < U / 2; ++i) {
        acc[b][i] = fmaf(unit[i], x_scale[i / 2 % 2] * block_scale[i / 8], acc[b][i]);
      }
    }
  }
};

template <typename R, Projection PROJECTION, typename TILE>
struct Fp8Roles {
  using Tile = TILE;
  static constexpr bool up = PROJECTION == Projection::up, fp8 = true;
  static constexpr int assistant_warps = 1;
  static constexpr int S = Tile::stages, U = Tile::my_tokens, B = Tile::blocks;
  static constexpr int channels = up ? Tile::half_rows : Tile::rows;  // of the result, for a tile
  using Shared = Fp8Shared<Tile>;
  using Entry = typename Shared::Entry;

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
    auto& barriers = shared_memory.barriers;
    const uint64_t policy = prepare_loads(params);
    const auto load = [&](int stage, int step, int expert, int slice, bool shared) {
      ptx::mbarrier_expect_tx(barriers.full + stage, Tile::weight_bytes);
      load_weights<up, Tile>(params, ring + stage * Tile::stage_bytes, step * kLineBytes, expert, slice, shared, rank,
                             barriers.full + stage, policy);
    };
    const auto load_x = [&](int stage, int step, int tile, int used) {
      const int64_t line = int64_t{tile} * params.steps + step;
      const int x_bytes = used > U ? Tile::x_bytes : Tile::my_x_bytes, scale_bytes = p.x_blocks ? Tile::tokens * 4 : 0;
      if (absent) ptx::mbarrier_arrive_many(barriers.full + stage, absent);
      ptx::mbarrier_arrive_expect_tx(barriers.full + stage, x_bytes + scale_bytes);
      ptx::bulk_load(ring + stage * Tile::stage_bytes + Tile::weight_bytes, p.x + line * Tile::x_bytes, x_bytes,
                     barriers.full + stage);
      if (p.x_blocks) {
        ptx::bulk_load(ptx::shared_address(shared_memory.stage_scales[stage]), p.x_scale + line * Tile::tokens,
                       scale_bytes, barriers.full + stage);
      }
    };
    load_stages<PROJECTION>(params, slices(), shared_memory.entries, barriers, at_ring, first_item, load, load_x);
  }

  // The warp of block scales, which are constant: a lane has those of 16 weight rows.
  __device__ __forceinline__ void assist(RingPosition<Tile>& at_ring) const {
    const int lane = threadIdx.x % 32;
    auto& entries = shared_memory.entries;
    auto& barriers = shared_memory.barriers;
    auto& block_scales = shared_memory.block_scales;
    const int &stage = at_ring.stage, &phase = at_ring.phase, &entry = at_ring.entry,
              &entry_phase = at_ring.entry_phase;
    const int steps = params.steps;
    pdl_wait();
    pdl_trigger();
    const bool high = up && lane % 16 >= 8;
    while (true) {
      ptx::mbarrier_wait(barriers.entry_full + entry, entry_phase);
      if (!entries[entry].belongs_to(PROJECTION)) break;
      const int row = min(entries[entry].slice * channels + (up ? lane % 8 : lane % 16) * 16, p.outputs - 1);
      const int scale_row = (row + (high && !p.split_scales ? p.outputs : 0)) / kScaleBlock;
      const float* const of_row = (high ? p.weight_scale_high : p.weight_scale_low) +
                                  entries[entry].expert * p.scale_expert_stride + scale_row * p.scale_row_stride;
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
      at_ring.next_entry();
    }
  }

  // The consumer warpgroups: 64 tokens each, the rows of their products, and all weight rows.
  __device__ __forceinline__ void multiply_tiles(RingPosition<Tile>& at_ring, int& /*buffer*/) const {
    auto& barriers = shared_memory.barriers;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // uniform to the compiler
    const int warpgroup = warp / 4 - 1;
    int unsignalled = -1;  // the tile whose results this warp has copied, but that may not be in memory
    while (true) {
      ptx::mbarrier_wait(barriers.entry_full + at_ring.entry, at_ring.entry_phase);
      const Entry& at = shared_memory.entries[at_ring.entry];
      if (!at.belongs_to(PROJECTION)) break;
      if (at.used > warpgroup * U) {
        multiply_tile(at_ring, at, warp, lane, unsignalled);
      } else {
        for (int step = 0; step < params.steps; ++step) {
          ptx::mbarrier_wait(barriers.full + at_ring.stage, at_ring.phase);
          barriers.release(at_ring.stage);
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
      if (lane == 0) ptx::mbarrier_arrive(barriers.entry_empty + at_ring.entry);
      at_ring.next_entry();
    }
    if (up && lane == 0) signal_tile(p, unsignalled);
  }

 private:
  using Epilogue = Fp8Epilogue<R, PROJECTION, Tile>;
  using Sums = typename Epilogue::Sums;

  __device__ __forceinline__ void multiply_tile(RingPosition<Tile>& at_ring, const Entry& at, int warp, int lane,
                                                int& unsignalled) const {
    const int first_token = (warp / 4 - 1) * U + warp % 4 * 16;  // of this warp's 16
    Sums acc;
#pragma unroll
    for (int b = 0; b < B; ++b) {
#pragma unroll
      for (int i = 0; i < U / 2; ++i) acc[b][i] = 0.f;
    }
    if (p.scale_rank == 3) {
      multiply<true>(at_ring, first_token, lane, acc);
    } else {
      multiply<false>(at_ring, first_token, lane, acc);  // the epilogue multiplies by the weights' scales
    }
    // The asm makes the compiler recompute what depends on the lane here: it does not keep it in registers through the
    // main loop.
    int own = lane;
    asm volatile("" : "+r"(own));
    Epilogue{p, at, acc, own, first_token, ring + S * Tile::stage_bytes + (warp - 4) * Tile::result_bytes, unsignalled}
        .store();
  }

  // The main loop of a tile. BLOCKS: the weights have a scale for 128 x 128 of them.
  template <bool BLOCKS>
  __device__ __forceinline__ void multiply(RingPosition<Tile>& at_ring, int first_token, int lane, Sums& acc) const {
    constexpr bool inside = BLOCKS || !up;  // scales of 128 of K, applied here
    auto& barriers = shared_memory.barriers;
    auto& stage_scales = shared_memory.stage_scales;
    const int& stage = at_ring.stage;
    const int steps = params.steps;
    // Of x: lane i gives the address of row i % 16, bytes i / 16 * 16 of K. Bytes 32 * k further are at ^ 32 * k. The
    // asm keeps the address in one register.
    uint32_t my_x = ring + Tile::weight_bytes + (first_token + lane % 16) * kLineBytes + (lane / 16 ^ lane % 8) * 16;
    asm volatile("" : "+r"(my_x));
    Fp8Units<BLOCKS, inside, Tile> units;
    for (int step = 0; step < steps; ++step) {
      ptx::mbarrier_wait(barriers.full + stage, at_ring.phase);
      units.load_x(my_x + stage * Tile::stage_bytes);
      const uint32_t weights = ring + stage * Tile::stage_bytes;
      const float* const block_scales = shared_memory.block_scales[stage];
      units.template start<0>(weights, block_scales);
      if (inside) {
#pragma unroll
        for (int r = 0; r < 2; ++r) units.x_scale[r] = stage_scales[stage][first_token + lane / 4 + 8 * r];
      }
      units.template next<1>(weights, block_scales, acc);
      units.template next<2>(weights, block_scales, acc);
      units.template next<3>(weights, block_scales, acc);
      units.end();
      barriers.release(stage);
      units.template add<3>(acc);
      at_ring.next_stage();
    }
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
