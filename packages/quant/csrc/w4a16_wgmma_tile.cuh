// What the wgmma kernels of w4a16_linear share: a tile, a stage of its ring, the loads and the products of a stage.
//
// ROWS of the weight are operand A of wgmma, decoded in registers; TOKENS of x, operand B. The packed layout is A's
// fragments: 16 bytes of a lane are those of four products. Each consumer warpgroup has 64 rows and decodes while
// products of its last fragments run. Each weight is scaled and rounded once.
#pragma once

#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/tma.cuh>
#include <kestrel/ptx/wgmma_registers.cuh>

#include "w4a16.cuh"

namespace kestrel::quant::w4_wgmma {

// GROUP: as of w4a16_kernel. M_BLOCKS: blocks of 64 rows of a warpgroup. STEP: k of a pipeline stage. BATCH: products
// of 32 k that are started together. OCCUPANCY: CTAs per SM. DEPTH: batches in flight, with the one that is decoded.
//
// A stage: offsets in bytes of [128 k][m tile][block][lane][16 bytes] of codes, [block][token][128 bytes] of x
// in the 128-byte swizzle, and [256 rows or all][group][row] of scales and zeros.
template <int TOKENS_, int GROUP_, int M_BLOCKS_, int WARPGROUPS_, int STEP_, int BATCH_, int OCCUPANCY_, int DEPTH_>
struct WgmmaTile {
  static constexpr int tokens = TOKENS_, group = GROUP_, m_blocks = M_BLOCKS_, warpgroups = WARPGROUPS_, step = STEP_,
                       batch = BATCH_, occupancy = OCCUPANCY_, depth = DEPTH_;
  static constexpr int rows = 64 * m_blocks * warpgroups, consumers = 128 * warpgroups, producers = 128,
                       threads = consumers + producers;
  static constexpr int producer_registers = warpgroups == 2 && occupancy == 1 ? 40 : 32,
                       consumer_registers = occupancy == 2    ? 104
                                            : warpgroups == 2 ? 232
                                            : warpgroups == 3 ? 160
                                                              : 112;
  static constexpr int parts = step / kStep, groups_of_part = kStep / group;
  static constexpr int part_bytes = rows * kStep / 2, code_bytes = parts * part_bytes;
  static constexpr int block_bytes = tokens * kLineBytes, x_bytes = step / kBlock * block_bytes;
  static constexpr int box_rows = rows <= 256 ? rows : rows / 2;  // of scales: the most that one load takes
  static constexpr int box_bytes = groups_of_part * box_rows * 2;
  static constexpr int part_scale_bytes = groups_of_part * rows * 2, scale_bytes = parts * part_scale_bytes;
  static constexpr int x = code_bytes, scales = x + x_bytes, zeros = scales + scale_bytes;
  static constexpr int alignment = 1024, max_stages = 12;
  static constexpr int bytes = (zeros + scale_bytes + alignment - 1) / alignment * alignment;
  // Sums leave in fragments of 16 rows and 8 tokens for each warp: four a lane.
  static constexpr int fragments = m_blocks * tokens / 8;
  static_assert(step % kStep == 0 && rows % box_rows == 0);
  // The registers of the launch are all there are: what the consumers raise, the producers have given back.
  static_assert(consumers * consumer_registers + producers * producer_registers <=
                65536 / (occupancy * threads) / 8 * 8 * threads);

  // The epilogue's, in place of the ring: the CTA's sums, [token][row], and those that it receives, [slice of K][token]
  // [row].
  static constexpr int pitch = rows + 4;  // floats: keeps stores of fragments free of bank conflicts
  static constexpr int sum_bytes = tokens * pitch * 4;
  static constexpr int epilogue_bytes(int cluster) {
    return sum_bytes + (cluster - 1) * ((tokens + cluster - 1) / cluster) * pitch * 4;
  }
};

// The tensor maps of what a stage holds. Loads fill what does not exist with zeros.
struct WgmmaParams : W4Params {
  CUtensorMap x_map;      // [T, K]
  CUtensorMap code_map;   // [N / 16, K], of 8 bytes
  CUtensorMap scale_map;  // [groups, N]
  CUtensorMap zero_map;   // the same; of the scales where there are no zeros
  int row_tiles = 0;
};

// One thread: codes, scales and zeros of a stage, and the bytes that full waits for, those of x as well.
template <typename Tile>
__device__ __forceinline__ void load_weights(const WgmmaParams& p, uint32_t to, uint64_t* full, int first_row,
                                             int step) {
  ptx::mbarrier_arrive_expect_tx(full, Tile::code_bytes + Tile::x_bytes + Tile::scale_bytes * (p.zeros ? 2 : 1));
#pragma unroll
  for (int part = 0; part < Tile::parts; ++part) {
    const int k = step * Tile::step + part * kStep;
    const int group = Tile::group == kStep ? k / kStep / p.steps_per_group : k / Tile::group;
    const uint32_t to_scales = to + Tile::scales + part * Tile::part_scale_bytes;
    ptx::tma_load(to + part * Tile::part_bytes, p.code_map, k, first_row / 16, full);
#pragma unroll
    for (int box = 0; box < Tile::rows / Tile::box_rows; ++box) {
      const uint32_t to_box = to_scales + box * Tile::box_bytes;
      const int row = first_row + box * Tile::box_rows;
      ptx::tma_load(to_box, p.scale_map, row, group, full);
      if (p.zeros) ptx::tma_load(to_box + Tile::scale_bytes, p.zero_map, row, group, full);
    }
  }
}

template <typename Tile>
__device__ __forceinline__ void load_x(const WgmmaParams& p, uint32_t to, uint64_t* full, int first_token, int step) {
#pragma unroll
  for (int block = 0; block < Tile::step / kBlock; ++block) {
    ptx::tma_load(to + Tile::x + block * Tile::block_bytes, p.x_map, step * Tile::step + block * kBlock, first_token,
                  full);
  }
}

// Of a consumer thread, in the stage at `ring`: where it reads codes, scales and zeros, and operand B.
template <typename Tile>
struct StagePlace {
  uint32_t codes, scales;
  uint64_t x;

  __device__ __forceinline__ StagePlace(uint32_t ring, int row_of_warp, int lane)
      : codes(ring + row_of_warp / 16 * 2 * kBlockBytes + lane * 16),
        scales(ring + Tile::scales + row_of_warp / Tile::box_rows * Tile::box_bytes +
               (row_of_warp % Tile::box_rows + lane / 4) * 2),
        x(ptx::wgmma_descriptor(ring + Tile::x)) {}
};

// The products of the stage `at` bytes behind `place`. Turns of 32 * B k and 64 rows: 2 * B products. The fragments of
// a turn are decoded while the products of the last ones run. previous_done is called when the products of the stage
// before are complete. add: false for the first stage of a tile, to overwrite the sums.
template <typename T, typename Tile, typename PreviousDone>
__device__ __forceinline__ void multiply_stage(const WgmmaParams& p, float (&acc)[Tile::m_blocks][Tile::tokens / 2],
                                               uint32_t (&fragments)[Tile::depth][8 * Tile::batch],
                                               const StagePlace<Tile>& place, uint32_t at,
                                               const PreviousDone& previous_done, bool add = true) {
  constexpr int N = Tile::tokens, M = Tile::m_blocks, B = Tile::batch, D = Tile::depth, kGroupEnd = Tile::group / 32;
  constexpr int kTurns = Tile::step / (32 * B) * M;
  static_assert(kTurns % D == 0);
  const uint64_t x_stage = place.x + (at >> 4);
  uint4 words[M];
  uint32_t scale[M][2], minus_offset[M][2];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int m = turn % M;
    uint32_t (&f)[8 * B] = fragments[turn % D];
    ptx::wgmma_wait<D - 1>();  // those that read f are done
    ptx::wgmma_fence_registers(f);
    if (turn == D - 1) previous_done();
#pragma unroll
    for (int u = 0; u < B; ++u) {
      const int k32 = turn / M * B + u, part = k32 / 4, h = k32 % 4;
      if (h % 2 == 0) {
        const int of = part * Tile::part_bytes + (m * 8 + h / 2) * kBlockBytes;
        words[m] = ptx::load_shared_uint4(place.codes + at + of);
      }
      if (h % kGroupEnd == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int of = part * Tile::part_scale_bytes + (h / kGroupEnd * Tile::box_rows + m * 64 + r * 8) * 2;
          scale[m][r] = load_shared_u16(place.scales + at + of) * 0x10001u;
          const uint32_t zero = p.zeros ? load_shared_u16(place.scales + at + of + Tile::scale_bytes) : 8u;
          minus_offset[m][r] = Decoder<T>::minus_offset(zero);
        }
      }
      uint32_t codes[2][4];
      Decoder<T>::decode(h % 2 == 0 ? words[m].x : words[m].z, codes[0]);
      Decoder<T>::decode(h % 2 == 0 ? words[m].y : words[m].w, codes[1]);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        f[8 * u + i] = times<T>(Decoder<T>::centred(codes[i / 4][i % 4], minus_offset[m][i % 2]), scale[m][i % 2]);
      }
    }
    ptx::wgmma_fence_registers(f);
    ptx::wgmma_fence_registers(acc[m]);
    ptx::wgmma_fence();
#pragma unroll
    for (int u = 0; u < B; ++u) {
      const int k32 = turn / M * B + u;
      const uint64_t b = x_stage + k32 / 2 * (Tile::block_bytes >> 4) + k32 % 2 * 4;
      ptx::wgmma_registers<T, N>(acc[m], f[8 * u], f[8 * u + 1], f[8 * u + 2], f[8 * u + 3], b,
                                 add || turn >= M || u > 0);
      ptx::wgmma_registers<T, N>(acc[m], f[8 * u + 4], f[8 * u + 5], f[8 * u + 6], f[8 * u + 7], b + 2, true);
    }
    ptx::wgmma_commit();
  }
}

}  // namespace kestrel::quant::w4_wgmma
