// x [T, K] times a weight [N, K] of 4-bit codes, transposed, on Hopper: for more tokens than w4a16.cuh is for.
//
// A CTA has 256 rows of the weight, operand A of wgmma, decoded in registers; TOKENS of x, operand B; and a slice of K.
// The packed layout is A's fragments. One thread loads x, codes and scales (TMA). Consumer warpgroups have 64 or 128 rows each: while one decodes, others
// multiply. Scaled::sums: products of whole codes are added over a group and then scaled, as in w4a16.cuh.
// Scaled::weights: each weight is scaled and rounded once. Slices of K are added in order, as in w4a16.cuh.
#pragma once

#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/tma.cuh>
#include <kestrel/ptx/wgmma_registers.cuh>

#include "w4a16.cuh"

namespace kestrel::quant {

enum class Scaled { sums, weights };

// A pipeline stage: offsets in bytes of [m tile][block][lane][16 bytes] of codes, [block][token][128 bytes] of x in the
// 128-byte swizzle, and [group][row] of scales and zeros.
template <int TOKENS_, int GROUP_, Scaled SCALED_>
struct W4WideTile {
  static constexpr int tokens = TOKENS_, group = GROUP_, rows = 256;
  static constexpr Scaled scaled = SCALED_;
  static constexpr int blocks = tokens > 64 ? 2 : 1;  // of 64 rows, of a consumer warpgroup
  static constexpr int warpgroups = 4 / blocks, consumers = 128 * warpgroups, producers = 128,
                       threads = consumers + producers;
  static constexpr int groups = kStep / group;
  static constexpr int producer_registers = blocks == 1 ? 32 : 40, consumer_registers = blocks == 1 ? 112 : 224;
  static constexpr int code_bytes = rows * kStep / 2, block_bytes = tokens * kLineBytes,
                       scale_bytes = groups * rows * 2;
  static constexpr int x = code_bytes, scales = x + 2 * block_bytes, zeros = scales + scale_bytes;
  static constexpr int bytes = zeros + scale_bytes;
  static constexpr int alignment = 1024, max_stages = 12;
  static constexpr int sum_pitch = rows + 4, sum_bytes = tokens * sum_pitch * 4;
  static_assert(bytes % alignment == 0 && block_bytes % alignment == 0);
};

// The tensor maps of what a stage holds. Loads fill what does not exist with zeros.
struct W4WideParams : W4Params {
  CUtensorMap x_map;      // [T, K]
  CUtensorMap code_map;   // [N / 16, K / 16], of 8 bytes
  CUtensorMap scale_map;  // [groups, N]
  CUtensorMap zero_map;   // the same; of the scales where there are no zeros
};

// One thread: codes, scales and zeros of 128 k, into a stage that also expects x.
template <typename Tile>
__device__ __forceinline__ void load_weights(const W4WideParams& p, uint32_t to, uint64_t* full, int step,
                                             int first_row) {
  const int group = Tile::group == 128 ? step / p.steps_per_group : step * Tile::groups;
  ptx::mbarrier_arrive_expect_tx(full,
                                 Tile::code_bytes + 2 * Tile::block_bytes + Tile::scale_bytes * (p.zeros ? 2 : 1));
  ptx::tma_load(to, p.code_map, step * (2 * kBlockBytes / 8), first_row / 16, full);
  ptx::tma_load(to + Tile::scales, p.scale_map, first_row, group, full);
  if (p.zeros) ptx::tma_load(to + Tile::zeros, p.zero_map, first_row, group, full);
}

// What waits for what:
//   full[stage]    the producer, and the bytes of a stage
//   empty[stage]   the consumer warps
//   barrier 1      the consumers, in the epilogue
template <typename T, typename Tile>
__global__ void __launch_bounds__(Tile::threads, 1) w4a16_wgmma_kernel(const __grid_constant__ W4WideParams p) {
#ifdef KESTREL_HAS_WGMMA
  constexpr int N = Tile::tokens, kGroupEnd = Tile::group / 32;
  constexpr bool kSums = Tile::scaled == Scaled::sums;
  extern __shared__ char dynamic[];
  __shared__ uint64_t full[Tile::max_stages], empty[Tile::max_stages];
  const uint32_t ring = (ptx::shared_address(dynamic) + Tile::alignment - 1) / Tile::alignment * Tile::alignment;
  const int row_tile = blockIdx.x / p.splits, split = blockIdx.x - row_tile * p.splits;
  const int first_row = row_tile * Tile::rows, first_token = blockIdx.y * N;
  const int tokens = min(p.tokens - first_token, N);
  const int first_step = static_cast<int>(int64_t{p.steps} * split / p.splits);
  const int steps = static_cast<int>(int64_t{p.steps} * (split + 1) / p.splits) - first_step;
  if (threadIdx.x == 0) {
    for (int s = 0; s < p.stages; ++s) {
      ptx::mbarrier_init(full + s, 1);
      ptx::mbarrier_init(empty + s, Tile::consumers / 32);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;

  if (threadIdx.x < Tile::producers) {
    ptx::reduce_registers<Tile::producer_registers>();
    if (threadIdx.x == 0) {
      const auto load_x = [&](int stage, int step) {
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          const uint32_t to = ring + stage * Tile::bytes + Tile::x + block * Tile::block_bytes;
          ptx::tma_load(to, p.x_map, (first_step + step) * kStep + block * kBlock, first_token, full + stage);
        }
      };
      const int ahead = min(p.stages, steps);
      for (int s = 0; s < ahead; ++s)
        load_weights<Tile>(p, ring + s * Tile::bytes, full + s, first_step + s, first_row);
      pdl_wait();
      pdl_trigger();
      for (int s = 0; s < ahead; ++s) load_x(s, s);
      int stage = 0, phase = 0;
      for (int step = ahead; step < steps; ++step) {
        ptx::mbarrier_wait(empty + stage, phase);
        load_weights<Tile>(p, ring + stage * Tile::bytes, full + stage, first_step + step, first_row);
        load_x(stage, step);
        if (++stage == p.stages) {
          stage = 0;
          phase ^= 1;
        }
      }
    }
    if (p.cluster > 1) {
      __syncwarp();
      ptx::cluster_sync();
      ptx::cluster_sync();
    }
    return;
  }

  ptx::raise_registers<Tile::consumer_registers>();
  const int thread = threadIdx.x - Tile::producers, warp = thread / 32 % 4, warpgroup = thread / 128;

  // -- main loop --
  //
  // Turns of 32 k and 64 rows: two products. The fragments of a turn are decoded while the products of the last one
  // run.
  constexpr int M = Tile::blocks;
  float acc[M][N / 2] = {}, product[kSums ? N / 2 : 1] = {};
  uint32_t a[2][8] = {};
  const int row_of_lane = warpgroup * M * 64 + warp * 16 + lane / 4;  // and 8 rows on; of block 0
  const uint32_t from_codes = ring + (warpgroup * M * 4 + warp) * 2 * kBlockBytes + lane * 16;
  const uint32_t from_scales = ring + Tile::scales + row_of_lane * 2;
  const uint64_t x_descriptor = ptx::wgmma_descriptor(ring + Tile::x);
  uint4 words[M];
  uint32_t scale[M][2], minus_offset[M][2];
  int stage = 0, phase = 0, previous = 0;
  const auto release = [&](int of) {
    if (lane == 0) ptx::mbarrier_arrive(empty + of);
  };
  for (int left = steps; left > 0; --left) {
    ptx::mbarrier_wait(full + stage, phase);
    const uint32_t at = stage * Tile::bytes;
    const uint64_t x_stage = x_descriptor + (at >> 4);
#pragma unroll
    for (int turn = 0; turn < 4 * M; ++turn) {
      const int h = turn / M, m = turn % M;
      if (h % 2 == 0) words[m] = ptx::load_shared_uint4(from_codes + at + (m * 8 + h / 2) * kBlockBytes);
      if (h % kGroupEnd == 0) {
        const int of = h / kGroupEnd;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint32_t of_row = at + from_scales + (of * Tile::rows + m * 64 + r * 8) * 2;
          if constexpr (!kSums) scale[m][r] = load_shared_u16(of_row) * 0x10001u;
          const uint32_t zero = p.zeros ? load_shared_u16(of_row + Tile::scale_bytes) : 8u;
          minus_offset[m][r] = Decoder<T>::minus_offset(zero);
        }
      }
      uint32_t (&f)[8] = a[turn % 2];
      ptx::wgmma_wait<1>();  // those that read f are done
      ptx::wgmma_fence_registers(f);
      if (!kSums && turn == 1 && left < steps) release(previous);
      uint32_t codes[2][4];
      Decoder<T>::decode(h % 2 == 0 ? words[m].x : words[m].z, codes[0]);
      Decoder<T>::decode(h % 2 == 0 ? words[m].y : words[m].w, codes[1]);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        f[i] = Decoder<T>::centred(codes[i / 4][i % 4], minus_offset[m][i % 2]);
        if constexpr (!kSums) f[i] = times<T>(f[i], scale[m][i % 2]);
      }
      ptx::wgmma_fence_registers(f);
      const uint64_t b = x_stage + h / 2 * (Tile::block_bytes >> 4) + h % 2 * 4;
      if constexpr (kSums) {
        ptx::wgmma_fence_registers(product);
        ptx::wgmma_fence();
        ptx::wgmma_registers<T, N>(product, f[0], f[1], f[2], f[3], b, h % kGroupEnd != 0);
        ptx::wgmma_registers<T, N>(product, f[4], f[5], f[6], f[7], b + 2, true);
        ptx::wgmma_commit();
        if (h % kGroupEnd == kGroupEnd - 1) {
          const int of = h / kGroupEnd;
          float of_rows[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const uint32_t of_row = at + from_scales + (of * Tile::rows + r * 8) * 2;
            of_rows[r] = widen<T>(load_shared_u16(of_row));
          }
          ptx::wgmma_wait<0>();
          ptx::wgmma_fence_registers(product);
          if (h == 3) release(stage);
#pragma unroll
          for (int i = 0; i < N / 2; ++i) acc[m][i] = fmaf(product[i], of_rows[i / 2 % 2], acc[m][i]);
        }
      } else {
        ptx::wgmma_fence_registers(acc[m]);
        ptx::wgmma_fence();
        ptx::wgmma_registers<T, N>(acc[m], f[0], f[1], f[2], f[3], b, true);
        ptx::wgmma_registers<T, N>(acc[m], f[4], f[5], f[6], f[7], b + 2, true);
        ptx::wgmma_commit();
      }
    }
    previous = stage;
    if (++stage == p.stages) {
      stage = 0;
      phase ^= 1;
    }
  }
  ptx::wgmma_wait<0>();
#pragma unroll
  for (int m = 0; m < M; ++m) ptx::wgmma_fence_registers(acc[m]);

  // -- epilogue: the sums, [token][row], replace the ring --

  ptx::named_barrier(1, Tile::consumers);
  float* const sums = reinterpret_cast<float*>(__cvta_shared_to_generic(ring));
#pragma unroll
  for (int i = 0; i < M * N / 2; ++i) {
    const int m = i / (N / 2), c = i % (N / 2);
    const int token = c / 4 * 8 + lane % 4 * 2 + c % 2, row = row_of_lane + m * 64 + c / 2 % 2 * 8;
    sums[token * Tile::sum_pitch + row] = acc[m][c];
  }
  ptx::named_barrier(1, Tile::consumers);
  finish_sums<T, Tile::rows>(p, {sums, Tile::sum_pitch, 0, first_row, first_token, tokens, split}, thread,
                             Tile::consumers);
#endif
}

}  // namespace kestrel::quant
