// x [T, K] times a weight [N, K] of 4-bit codes, transposed, on Hopper: for more tokens than w4a16.cuh is for.
//
// A CTA has ROWS of the weight, operand A of wgmma, decoded in registers; TOKENS of x, operand B; and a slice of K. The
// packed layout is A's fragments: 16 bytes of a lane are those of four products. One thread loads x, codes and scales
// (TMA). Each consumer warpgroup has 64 rows, or twice that, and decodes while products of its last fragments run. Each
// weight is scaled and rounded once. Slices of K are added in order: those of a cluster of two through DSMEM, more by
// w4a16_wgmma_sum_kernel.
#pragma once

#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/tma.cuh>
#include <kestrel/ptx/wgmma_registers.cuh>

#include "w4a16.cuh"

namespace kestrel::quant {

// GROUP: as of w4a16_kernel. M_BLOCKS: blocks of 64 rows of a warpgroup. STEP: k of a pipeline stage. BATCH: products
// of 32 k that are started together.
//
// A stage: offsets in bytes of [128 k][m tile][block][lane][16 bytes] of codes, [block][token][128 bytes] of x in the
// 128-byte swizzle, and [group][row] of scales and zeros.
template <int TOKENS_, int GROUP_, int M_BLOCKS_, int WARPGROUPS_, int STEP_, int BATCH_>
struct W4WideTile {
  static constexpr int tokens = TOKENS_, group = GROUP_, m_blocks = M_BLOCKS_, warpgroups = WARPGROUPS_, step = STEP_,
                       batch = BATCH_;
  static constexpr int rows = 64 * m_blocks * warpgroups, consumers = 128 * warpgroups, producers = 128,
                       threads = consumers + producers;
  static constexpr int producer_registers = warpgroups == 4 ? 32 : 40, consumer_registers = warpgroups == 4 ? 112 : 232;
  static constexpr int parts = step / kStep, groups_of_part = kStep / group;
  static constexpr int part_bytes = rows * kStep / 2, code_bytes = parts * part_bytes;
  static constexpr int block_bytes = tokens * kLineBytes, x_bytes = step / kBlock * block_bytes;
  static constexpr int part_scale_bytes = groups_of_part * rows * 2, scale_bytes = parts * part_scale_bytes;
  static constexpr int x = code_bytes, scales = x + x_bytes, zeros = scales + scale_bytes;
  static constexpr int alignment = 1024, max_stages = 12;
  static constexpr int bytes = (zeros + scale_bytes + alignment - 1) / alignment * alignment;
  // Sums leave in fragments of 16 rows and 8 tokens for each warp: four a lane.
  static constexpr int fragments = m_blocks * tokens / 8;
  static constexpr int exchange_bytes = fragments / 2 * consumers * 16;  // of a cluster of two
  static_assert(step % kStep == 0 && fragments % 2 == 0);
};

// The tensor maps of what a stage holds. Loads fill what does not exist with zeros.
struct W4WideParams : W4Params {
  CUtensorMap x_map;              // [T, K]
  CUtensorMap code_map;           // [N / 16, K], of 8 bytes
  CUtensorMap scale_map;          // [groups, N]
  CUtensorMap zero_map;           // the same; of the scales where there are no zeros
  int row_tiles = 0, slices = 1;  // slices of K that w4a16_wgmma_sum_kernel adds
};

// The transpose of an 8 x 8 matrix of 16-bit elements; a lane holds two neighbours of row lane / 4.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(pair));
  return d;
}

// Sums of a fragment, with the bias, into the result: rows g (x, y) and g + 8 (z, w) from `row` on, tokens 2 q and the
// next one from `token` on. All lanes of a warp call this.
template <typename T>
__device__ __forceinline__ void store_fragment(const W4Params& p, int token, int row, float4 sum, int lane) {
  const int group = lane / 4, quad = lane % 4;
  if (p.bias) {
    const T* const bias = reinterpret_cast<const T*>(p.bias) + row + group;
    const float low = row < p.outputs ? static_cast<float>(bias[0]) : 0.f;
    const float high = row + 8 < p.outputs ? static_cast<float>(bias[8]) : 0.f;
    sum = make_float4(sum.x + low, sum.y + low, sum.z + high, sum.w + high);
  }
  const uint32_t bits[2] = {transposed(narrow<T>(sum.x) | narrow<T>(sum.y) << 16),
                            transposed(narrow<T>(sum.z) | narrow<T>(sum.w) << 16)};
  if (token + group >= p.tokens) return;
  char* const to = p.out + (token + group) * p.out_stride + int64_t{row + 2 * quad} * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row + 8 * r >= p.outputs) break;
    if (p.packed_out) {
      *reinterpret_cast<uint32_t*>(to + 16 * r) = bits[r];
    } else {
      reinterpret_cast<unsigned short*>(to + 16 * r)[0] = static_cast<unsigned short>(bits[r]);
      reinterpret_cast<unsigned short*>(to + 16 * r)[1] = static_cast<unsigned short>(bits[r] >> 16);
    }
  }
}

__device__ __forceinline__ void store_dsmem_float4(uint32_t address, float4 v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z),
               "f"(v.w)
               : "memory");
#endif
}

// One thread: all loads of a CTA. full[stage] waits for it and the bytes of a stage, empty[stage] for the consumer
// warps.
template <typename Tile>
__device__ __forceinline__ void load_stages(const W4WideParams& p, uint32_t ring, uint64_t* full, const uint64_t* empty,
                                            int first_row, int first_token, int first_step, int steps) {
  const auto load_weights = [&](int stage, int step) {
    const uint32_t to = ring + stage * Tile::bytes;
    ptx::mbarrier_arrive_expect_tx(full + stage,
                                   Tile::code_bytes + Tile::x_bytes + Tile::scale_bytes * (p.zeros ? 2 : 1));
#pragma unroll
    for (int part = 0; part < Tile::parts; ++part) {
      const int k = (first_step + step) * Tile::step + part * kStep;
      const int group = Tile::group == kStep ? k / kStep / p.steps_per_group : k / Tile::group;
      const uint32_t to_scales = to + Tile::scales + part * Tile::part_scale_bytes;
      ptx::tma_load(to + part * Tile::part_bytes, p.code_map, k, first_row / 16, full + stage);
      ptx::tma_load(to_scales, p.scale_map, first_row, group, full + stage);
      if (p.zeros) ptx::tma_load(to_scales + Tile::scale_bytes, p.zero_map, first_row, group, full + stage);
    }
  };
  const auto load_x = [&](int stage, int step) {
#pragma unroll
    for (int block = 0; block < Tile::step / kBlock; ++block) {
      ptx::tma_load(ring + stage * Tile::bytes + Tile::x + block * Tile::block_bytes, p.x_map,
                    (first_step + step) * Tile::step + block * kBlock, first_token, full + stage);
    }
  };
  const int ahead = min(p.stages, steps);
  for (int s = 0; s < ahead; ++s) load_weights(s, s);
  pdl_wait();
  pdl_trigger();
  for (int s = 0; s < ahead; ++s) load_x(s, s);
  int stage = 0, phase = 0;
  for (int step = ahead; step < steps; ++step) {
    ptx::mbarrier_wait(empty + stage, phase);
    load_weights(stage, step);
    load_x(stage, step);
    if (++stage == p.stages) {
      stage = 0;
      phase ^= 1;
    }
  }
}

template <typename T, typename Tile>
__global__ void __launch_bounds__(Tile::threads, 1) w4a16_wgmma_kernel(const __grid_constant__ W4WideParams p) {
#ifdef KESTREL_HAS_WGMMA
  constexpr int N = Tile::tokens, M = Tile::m_blocks, B = Tile::batch, kGroupEnd = Tile::group / 32;
  extern __shared__ char dynamic[];
  __shared__ uint64_t full[Tile::max_stages], empty[Tile::max_stages];
  const uint32_t ring = (ptx::shared_address(dynamic) + Tile::alignment - 1) / Tile::alignment * Tile::alignment;
  const int row_tile = blockIdx.x / p.splits, split = blockIdx.x - row_tile * p.splits;
  const int first_row = row_tile * Tile::rows, first_token = blockIdx.y * N;
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
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32 % 4, warpgroup = thread / 128;

  if (thread >= Tile::consumers) {
    ptx::reduce_registers<Tile::producer_registers>();
    if (thread == Tile::consumers) load_stages<Tile>(p, ring, full, empty, first_row, first_token, first_step, steps);
    if (p.cluster > 1) {
      __syncwarp();
      ptx::cluster_sync();
      ptx::cluster_sync();
    }
    return;
  }

  ptx::raise_registers<Tile::consumer_registers>();

  // -- main loop --
  //
  // Turns of 32 * B k and 64 rows: 2 * B products. The fragments of a turn are decoded while the products of the last
  // one run.
  float acc[M][N / 2] = {};
  uint32_t fragments[2][8 * B] = {};
  const int row_of_warp = warpgroup * M * 64 + warp * 16;  // of block 0
  const uint32_t from_codes = ring + row_of_warp / 16 * 2 * kBlockBytes + lane * 16;
  const uint32_t from_scales = ring + Tile::scales + (row_of_warp + lane / 4) * 2;
  const uint64_t x_descriptor = ptx::wgmma_descriptor(ring + Tile::x);
  uint4 words[M];
  uint32_t scale[M][2], minus_offset[M][2];
  uint32_t at = 0;
  int stage = 0, phase = 0, previous = 0;
  for (int left = steps; left > 0; --left) {
    ptx::mbarrier_wait(full + stage, phase);
    const uint64_t x_stage = x_descriptor + (at >> 4);
#pragma unroll
    for (int turn = 0; turn < Tile::step / (32 * B) * M; ++turn) {
      const int m = turn % M;
      uint32_t (&f)[8 * B] = fragments[turn % 2];
      ptx::wgmma_wait<1>();  // those that read f are done
      ptx::wgmma_fence_registers(f);
      if (turn == 1 && left < steps && lane == 0) ptx::mbarrier_arrive(empty + previous);
#pragma unroll
      for (int u = 0; u < B; ++u) {
        const int k32 = turn / M * B + u, part = k32 / 4, h = k32 % 4;
        if (h % 2 == 0) {
          const int of = part * Tile::part_bytes + (m * 8 + h / 2) * kBlockBytes;
          words[m] = ptx::load_shared_uint4(from_codes + at + of);
        }
        if (h % kGroupEnd == 0) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int of = part * Tile::part_scale_bytes + (h / kGroupEnd * Tile::rows + m * 64 + r * 8) * 2;
            scale[m][r] = load_shared_u16(from_scales + at + of) * 0x10001u;
            const uint32_t zero = p.zeros ? load_shared_u16(from_scales + at + of + Tile::scale_bytes) : 8u;
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
        ptx::wgmma_registers<T, N>(acc[m], f[8 * u], f[8 * u + 1], f[8 * u + 2], f[8 * u + 3], b, true);
        ptx::wgmma_registers<T, N>(acc[m], f[8 * u + 4], f[8 * u + 5], f[8 * u + 6], f[8 * u + 7], b + 2, true);
      }
      ptx::wgmma_commit();
    }
    previous = stage;
    at += Tile::bytes;
    if (++stage == p.stages) {
      stage = 0;
      phase ^= 1;
      at = 0;
    }
  }
  ptx::wgmma_wait<0>();
#pragma unroll
  for (int m = 0; m < M; ++m) ptx::wgmma_fence_registers(acc[m]);

  // -- epilogue --
  //
  // Of a cluster of two, each CTA finishes half of the fragments: it sends the other half to its peer.
  const auto fragment = [&](int i) -> float* { return acc[i / (N / 8)] + i % (N / 8) * 4; };
  constexpr int kHalf = Tile::fragments / 2;
  const int rank = split % 2;
  if (p.cluster > 1) {
    ptx::cluster_sync();  // both rings are free
    const uint32_t to = ptx::map_shared(ring, rank ^ 1) + thread * 16, from = ring + thread * 16;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float *low = fragment(i), *high = fragment(kHalf + i);
      store_dsmem_float4(to + i * (Tile::consumers * 16), rank ? make_float4(low[0], low[1], low[2], low[3])
                                                               : make_float4(high[0], high[1], high[2], high[3]));
    }
    ptx::cluster_sync();
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const uint4 bits = ptx::load_shared_uint4(from + i * (Tile::consumers * 16));
      const uint32_t other[4] = {bits.x, bits.y, bits.z, bits.w};
      float *low = fragment(i), *high = fragment(kHalf + i);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (rank) {
          high[c] += __uint_as_float(other[c]);
        } else {
          low[c] += __uint_as_float(other[c]);
        }
      }
    }
  }
  const int slice = split / p.cluster;
  float4* const partial =
      reinterpret_cast<float4*>(p.partial) +
      ((int64_t{slice} * gridDim.y + blockIdx.y) * p.row_tiles + row_tile) * (Tile::fragments * Tile::consumers) +
      thread;
#pragma unroll
  for (int i = 0; i < Tile::fragments; ++i) {
    if (p.cluster > 1 && (i >= kHalf) != (rank == 1)) continue;
    const float* const f = fragment(i);
    const float4 sum = make_float4(f[0], f[1], f[2], f[3]);
    if (p.slices > 1) {
      partial[i * Tile::consumers] = sum;
    } else {
      store_fragment<T>(p, first_token + i % (N / 8) * 8, first_row + row_of_warp + i / (N / 8) * 64, sum, lane);
    }
  }
#endif
}

// Adds up the slices of K, [slice][token tile][row tile][fragment][consumer], in order. A CTA has a fragment of a
// warpgroup.
template <typename T, typename Tile>
__global__ void __launch_bounds__(128) w4a16_wgmma_sum_kernel(const __grid_constant__ W4WideParams p) {
  const int warpgroup = blockIdx.x % Tile::warpgroups, fragment = blockIdx.x / Tile::warpgroups % Tile::fragments,
            row_tile = blockIdx.x / (Tile::warpgroups * Tile::fragments);
  const int m = fragment / (Tile::tokens / 8), token = blockIdx.y * Tile::tokens + fragment % (Tile::tokens / 8) * 8;
  const int row =
      row_tile * Tile::rows + (warpgroup * Tile::m_blocks + m) * 64 + static_cast<int>(threadIdx.x) / 32 * 16;
  const int64_t pitch = int64_t{gridDim.y} * gridDim.x * 128;
  const float4* const from =
      reinterpret_cast<const float4*>(p.partial) + (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * 128 + threadIdx.x;
  pdl_wait();
  pdl_trigger();
  if (token >= p.tokens) return;
  float4 slices[kMaxSplits];
#pragma unroll
  for (int s = 0; s < kMaxSplits; ++s) {
    if (s < p.slices) slices[s] = from[s * pitch];
  }
  float4 sum = slices[0];
#pragma unroll
  for (int s = 1; s < kMaxSplits; ++s) {
    if (s < p.slices) sum = added(sum, slices[s]);
  }
  store_fragment<T>(p, token, row, sum, static_cast<int>(threadIdx.x) % 32);
}

}  // namespace kestrel::quant
