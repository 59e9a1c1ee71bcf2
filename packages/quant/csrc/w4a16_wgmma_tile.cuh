// What the wgmma kernels of w4a16_linear share: a tile, a stage of its ring, its loads and products, and results.
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

// Weights from codes, each scaled and rounded once. Row: what a row of the weight needs for a group.
template <typename T, Zeros ZEROS>
struct WeightDecoder {
  static constexpr float scale_of_sums = 1.f;
  struct Row {
    uint32_t scale, minus_offset;
  };

  template <int R>
  static __device__ __forceinline__ Row row(uint32_t scale, uint32_t zero) {
    return {scale * 0x10001u, Decoder<T>::minus_offset(zero)};
  }

  // The eight weights of a word: an A fragment of rows[0] (registers 0 and 2) and rows[1].
  static __device__ __forceinline__ void decode(uint32_t word, const Row (&rows)[2], uint32_t* a) {
    uint32_t codes[4];
    Decoder<T>::decode(word, codes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = times<T>(Decoder<T>::centred(codes[i], rows[i % 2].minus_offset), rows[i % 2].scale);
    }
  }
};

// bf16 without an offset: codes are subnormal numbers, so one multiply-add scales one and subtracts 8 * scale, which is
// exact. Weights, and so sums, are 2^-40 of what they are: scales are below 2^35.
template <>
struct WeightDecoder<__nv_bfloat16, Zeros::eight> {
  static constexpr float scale_of_sums = 1099511627776.f;  // 2^40
  struct Row {
    uint32_t scale, minus_8;
  };

  template <int R>
  static __device__ __forceinline__ Row row(uint32_t scale, uint32_t) {
    const uint32_t twice = scale * 0x10001u;
    return {times<__nv_bfloat16>(twice, power_bf16((R == 0 ? 133 : 129) - 40)),
            times<__nv_bfloat16>(twice, power_bf16(3 - 40) | kMinusBf16)};
  }

  static __device__ __forceinline__ void decode(uint32_t word, const Row (&rows)[2], uint32_t* a) {
    uint32_t codes[4];
    subnormal_codes(word, codes);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = multiply_add_bf16(codes[i], rows[i % 2].scale, rows[i % 2].minus_8);
  }
};

// In tiles of many tokens products hide the decoding, and subnormal codes are a loss.
template <typename T, Zeros ZEROS, typename Tile>
using WeightsOf = WeightDecoder<T, (Tile::tokens < 256) ? ZEROS : Zeros::any>;

// The tensor maps of what a stage holds. Loads fill what does not exist with zeros, but for tokens: a row outside a
// matrix costs TMA more than one inside, so boxes of the last tile end with x.
struct WgmmaParams : W4Params {
  CUtensorMap x_map;       // [T, K]
  CUtensorMap x_last_map;  // the same, in boxes for the last tile of tokens
  CUtensorMap code_map;    // [N / 16, K], of 8 bytes
  CUtensorMap scale_map;   // [groups, N]
  CUtensorMap zero_map;    // the same; of the scales where there are no zeros
  int row_tiles = 0;
  bool aligned_out = false;   // rows of out, and of the residual, are aligned to 16 bytes
  float scale_of_sums = 1.f;  // that of WeightDecoder
};

// The tensor maps of the threads that load weights and x, which these threads prefetch. For the start of a kernel.
template <typename Tile>
__device__ __forceinline__ void prefetch_maps(const WgmmaParams& p) {
  if (threadIdx.x == Tile::consumers) {
    ptx::prefetch_tensor_map(p.code_map);
    ptx::prefetch_tensor_map(p.scale_map);
    if (p.zeros) ptx::prefetch_tensor_map(p.zero_map);
  } else if (threadIdx.x == Tile::consumers + 32) {
    ptx::prefetch_tensor_map(p.x_map);
    ptx::prefetch_tensor_map(p.x_last_map);
  }
}

// One thread: the mbarriers of a ring. full[stage] waits for the threads that load weights and x, and for their bytes,
// empty[stage] for the consumer warps.
template <typename Tile>
__device__ __forceinline__ void init_ring(const WgmmaParams& p, uint64_t* full, uint64_t* empty) {
  for (int s = 0; s < p.stages; ++s) {
    ptx::mbarrier_init(full + s, 2);
    ptx::mbarrier_init(empty + s, Tile::consumers / 32);
  }
  ptx::fence_mbarrier_init();
}

// One thread: codes, scales and zeros of a stage.
template <typename Tile>
__device__ __forceinline__ void load_weights(const WgmmaParams& p, uint32_t to, uint64_t* full, int first_row,
                                             int step) {
  ptx::mbarrier_arrive_expect_tx(full, Tile::code_bytes + Tile::scale_bytes * (p.zeros ? 2 : 1));
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

// One thread: x of a stage.
template <typename Tile>
__device__ __forceinline__ void load_x(const WgmmaParams& p, uint32_t to, uint64_t* full, int first_token, int step) {
  const int tokens = min(Tile::tokens, p.tokens - first_token);
  const CUtensorMap& map = tokens < Tile::tokens ? p.x_last_map : p.x_map;
  ptx::mbarrier_arrive_expect_tx(full, tokens * (Tile::step / kBlock * kLineBytes));
#pragma unroll
  for (int block = 0; block < Tile::step / kBlock; ++block) {
    ptx::tma_load(to + Tile::x + block * Tile::block_bytes, map, step * Tile::step + block * kBlock, first_token, full);
  }
}

// A thread's place in the ring.
struct RingPlace {
  int stage = 0, phase = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Producers: all loads of a tile.
template <typename Tile>
__device__ __forceinline__ void load_tile(const WgmmaParams& p, uint32_t ring, uint64_t* full, const uint64_t* empty,
                                          int first_row, int first_token, int first_step, int steps) {
  RingPlace at;
  const bool weights = threadIdx.x == Tile::consumers, x = threadIdx.x == Tile::consumers + 32;
  if (weights) {
    for (int step = first_step; step < first_step + steps; ++step, at.advance(p.stages)) {
      ptx::mbarrier_wait(empty + at.stage, at.phase ^ 1);
      load_weights<Tile>(p, ring + at.stage * Tile::bytes, full + at.stage, first_row, step);
    }
  } else if (x) {
    pdl_wait();
    pdl_trigger();
    for (int step = first_step; step < first_step + steps; ++step, at.advance(p.stages)) {
      ptx::mbarrier_wait(empty + at.stage, at.phase ^ 1);
      load_x<Tile>(p, ring + at.stage * Tile::bytes, full + at.stage, first_token, step);
    }
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
template <typename T, Zeros ZEROS, typename Tile, typename PreviousDone>
__device__ __forceinline__ void multiply_stage(const WgmmaParams& p, float (&acc)[Tile::m_blocks][Tile::tokens / 2],
                                               uint32_t (&fragments)[Tile::depth][8 * Tile::batch],
                                               const StagePlace<Tile>& place, uint32_t at,
                                               const PreviousDone& previous_done, bool add = true) {
  constexpr int N = Tile::tokens, M = Tile::m_blocks, B = Tile::batch, D = Tile::depth, kGroupEnd = Tile::group / 32;
  constexpr int kTurns = Tile::step / (32 * B) * M;
  static_assert(kTurns % D == 0);
  using Weights = WeightsOf<T, ZEROS, Tile>;
  const uint64_t x_stage = place.x + (at >> 4);
  uint4 words[M];
  typename Weights::Row rows[M][2];
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
        const uint32_t from =
            place.scales + at + part * Tile::part_scale_bytes + (h / kGroupEnd * Tile::box_rows + m * 64) * 2;
        const bool zeros = ZEROS == Zeros::any && p.zeros;
        const auto zero = [&](int r) { return zeros ? load_shared_u16(from + Tile::scale_bytes + r * 16) : 8u; };
        rows[m][0] = Weights::template row<0>(load_shared_u16(from), zero(0));
        rows[m][1] = Weights::template row<1>(load_shared_u16(from + 16), zero(1));
      }
      Weights::decode(h % 2 == 0 ? words[m].x : words[m].z, rows[m], f + 8 * u);
      Weights::decode(h % 2 == 0 ? words[m].y : words[m].w, rows[m], f + 8 * u + 4);
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

// -- results ----------------------------------------------------------------------------------------------------------

// TOKENS of a tile's results in shared memory: 16 bits, [token][row].
template <typename Tile, int TOKENS>
struct ResultTile {
  static constexpr int tokens = TOKENS, rows = Tile::rows, consumers = Tile::consumers;
  static constexpr int pitch = rows * 2 + 16;  // bytes: keeps stmatrix free of bank conflicts
  static constexpr int bytes = (tokens + 15) / 16 * 16 * pitch;
};

// The bias of rows g and g + 8 of a warp's 16 from `row` on, g = lane / 4; 0 without one.
template <typename T>
__device__ __forceinline__ float2 load_bias(const WgmmaParams& p, int row, int lane) {
  if (!p.bias) return make_float2(0.f, 0.f);
  row += lane / 4;
  const T* const bias = reinterpret_cast<const T*>(p.bias) + row;
  return make_float2(row < p.outputs ? static_cast<float>(bias[0]) : 0.f,
                     row + 8 < p.outputs ? static_cast<float>(bias[8]) : 0.f);
}

// Starts copies of the residual of `count` tokens into the buffer of results. What does not exist is not read. All
// consumers call this.
template <typename Results>
__device__ __forceinline__ void start_residual(const WgmmaParams& p, uint32_t buffer, int first_row, int first_token,
                                               int count) {
  constexpr int kPacks = Results::rows / 8;
  pdl_wait();  // only the thread that loads x has waited
  for (int i = threadIdx.x; i < count * kPacks; i += Results::consumers) {
    const int token = i / kPacks, row = i % kPacks * 8;
    if (first_row + row >= p.outputs) continue;
    const char* const from = p.residual + (first_token + token) * p.residual_stride + int64_t{first_row + row} * 2;
    const uint32_t to = buffer + token * Results::pitch + row * 2;
    if (p.aligned_out) {
      ptx::cp_async16(to, from);
    } else {
#pragma unroll 1
      for (int e = 0; e < 8; ++e) {
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + e * 2), "h"(reinterpret_cast<const unsigned short*>(from)[e])
                     : "memory");
      }
    }
  }
}

// Waits until those copies are complete.
template <typename Results>
__device__ __forceinline__ void wait_for_residual() {
  ptx::cp_async_wait_all();
  ptx::named_barrier(1, Results::consumers);
}

// Sums of a warp's 16 rows from row_of_warp on, their bias, and the residual that lies there, into the buffer of
// results. sums: fragments of 8 tokens, of which `tokens` from the first_token-th on are those of the buffer.
template <typename T, typename Results, Residual RESIDUAL, int SIZE>
__device__ __forceinline__ void stage_results(const WgmmaParams& p, const float (&sums)[SIZE], int first_token,
                                              int tokens, float2 bias, uint32_t buffer, int row_of_warp, int lane) {
  const uint32_t to = buffer + (lane / 16 * 8 + lane % 8) * Results::pitch + (row_of_warp + lane / 8 % 2 * 8) * 2;
#pragma unroll
  for (int j = 0; j < (Results::tokens + 15) / 16; ++j) {
    if (j * 16 >= tokens) break;
    unsigned m[4] = {};
    if constexpr (RESIDUAL == Residual::added) ptx::load_matrices_transposed(to + j * 16 * Results::pitch, m);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int f = first_token / 2 + j * 8 + 2 * i;
      const float of_row = i % 2 == 0 ? bias.x : bias.y;
      if (j * 8 + 2 * i < tokens / 2) {
        float2 v = make_float2(fmaf(sums[f], p.scale_of_sums, of_row), fmaf(sums[f + 1], p.scale_of_sums, of_row));
        if constexpr (RESIDUAL == Residual::added) {
          const float2 more = ptx::unpack_pair<T>(m[i]);
          v = make_float2(v.x + more.x, v.y + more.y);
        }
        m[i] = ptx::pack_pair<T>(v);
      }
    }
    ptx::store_matrices_transposed(to + j * 16 * Results::pitch, m);
  }
}

// `count` tokens of the buffer to the result, from row and token `first_...` on. All consumers call this.
template <typename Results>
__device__ __forceinline__ void copy_results(const WgmmaParams& p, uint32_t buffer, int first_row, int first_token,
                                             int count) {
  constexpr int kPacks = Results::rows / 8;
  for (int i = threadIdx.x; i < count * kPacks; i += Results::consumers) {
    const int token = i / kPacks, row = i % kPacks * 8;
    if (first_row + row >= p.outputs) continue;
    const uint4 v = ptx::load_shared_uint4(buffer + token * Results::pitch + row * 2);
    char* const out = p.out + (first_token + token) * p.out_stride + int64_t{first_row + row} * 2;
    if (p.aligned_out) {
      *reinterpret_cast<uint4*>(out) = v;
    } else {
      const uint32_t words_of[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        reinterpret_cast<unsigned short*>(out)[e] = static_cast<unsigned short>(words_of[e / 2] >> 16 * (e % 2));
      }
    }
  }
}

}  // namespace kestrel::quant::w4_wgmma
