// x [T, K] times a weight [N, K] of 4-bit codes, transposed, on Hopper: for many tokens, or many rows.
//
// A CTA has ROWS of the weight, TOKENS of x and a slice of K (w4a16_wgmma_tile.cuh). One thread loads codes and scales,
// one x (TMA): weights need not wait for the launch before, and x not for weights. Slices of K are added in order:
// those of a cluster through DSMEM, others by w4a16_wgmma_sum_kernel.
#pragma once

#include "w4a16_wgmma_tile.cuh"

namespace kestrel::quant::w4_wgmma {

// The transpose of an 8 x 8 matrix of 16-bit elements; a lane holds two neighbours of row lane / 4.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(pair));
  return d;
}

__device__ __forceinline__ float4 scaled(float4 sum, float scale) {
  return make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale);
}

// The residual that store_fragment() adds. The launch before may write it: called after pdl_wait().
__device__ __forceinline__ uint2 load_residual_fragment(const WgmmaParams& p, int token, int row, int lane) {
  uint32_t pairs[2] = {};
  if (token + lane / 4 < p.tokens) {
    const char* const from = p.residual + (token + lane / 4) * p.residual_stride + int64_t{row + lane % 4 * 2} * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= p.outputs) break;
      if (p.packed_out) {
        pairs[r] = *reinterpret_cast<const uint32_t*>(from + 16 * r);
      } else {
        const auto* const elements = reinterpret_cast<const unsigned short*>(from + 16 * r);
        pairs[r] = elements[0] | uint32_t{elements[1]} << 16;
      }
    }
  }
  return make_uint2(pairs[0], pairs[1]);
}

// Sums of a fragment, with bias and residual, into the result: rows g (x, y) and g + 8 (z, w) from `row` on, tokens 2 q
// and the next one from `token` on. All lanes of a warp call this.
template <typename T, Residual RESIDUAL>
__device__ __forceinline__ void store_fragment(const WgmmaParams& p, int token, int row, float4 sum, uint2 residual,
                                               int lane) {
  const int group = lane / 4, quad = lane % 4;
  sum = scaled(sum, p.scale_of_sums);
  const float2 bias = load_bias<T>(p, row, lane);
  sum = make_float4(sum.x + bias.x, sum.y + bias.x, sum.z + bias.y, sum.w + bias.y);
  if constexpr (RESIDUAL == Residual::added) {
    const float2 low = ptx::unpack_pair<T>(transposed(residual.x)), high = ptx::unpack_pair<T>(transposed(residual.y));
    sum = make_float4(sum.x + low.x, sum.y + low.y, sum.z + high.x, sum.w + high.y);
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

// The tokens of a tile that a CTA of a cluster finishes.
struct TokenRange {
  int first, count;
};

__device__ __forceinline__ TokenRange tokens_of(int rank, int cluster, int tokens) {
  const int first = tokens * rank / cluster;
  return {first, tokens * (rank + 1) / cluster - first};
}

// Adds up the slices of K of a cluster, if there is one, and writes the result. Each CTA finishes some tokens: the
// others copy it their sums. The order of the slices is the same for all tokens. All consumers call this.
template <typename T, typename Tile, Residual RESIDUAL>
__device__ __forceinline__ void finish_tile(const WgmmaParams& p, uint32_t ring, const float* sums,
                                            const uint64_t* received, int rank, int first_row, int first_token,
                                            int thread) {
  constexpr int kPitch = Tile::pitch, kPacks = Tile::rows / 4;
  const int tokens = min(p.tokens - first_token, Tile::tokens), most = (Tile::tokens + p.cluster - 1) / p.cluster;
  const TokenRange own = tokens_of(rank, p.cluster, tokens);
  if (p.cluster > 1) ptx::fence_proxy_async();
  ptx::named_barrier(1, Tile::consumers);
  if (p.cluster > 1) {
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();  // all rings are free
    if (thread < p.cluster && thread != rank) {
      const TokenRange of = tokens_of(thread, p.cluster, tokens);
      const int number = rank < thread ? rank : rank - 1;
      if (of.count > 0) {
        ptx::copy_shared_async(ptx::map_shared(ring + Tile::sum_bytes + number * most * (kPitch * 4), thread),
                               ring + of.first * (kPitch * 4), of.count * (kPitch * 4),
                               ptx::map_shared(ptx::shared_address(received), thread));
      }
    }
    __syncwarp();
    ptx::mbarrier_wait_cluster(received, 0);
    __syncwarp();
    ptx::cluster_arrive_relaxed();  // this CTA's copies of the peers' sums are complete
  }
  const float* const others = sums + Tile::sum_bytes / 4;
  if constexpr (RESIDUAL == Residual::added) pdl_wait();  // only the thread that loads x has waited
  for (int i = thread; i < own.count * kPacks; i += Tile::consumers) {
    const int token = i / kPacks, row = i % kPacks * 4;
    if (first_row + row >= p.outputs) continue;
    uint2 residual{};
    if constexpr (RESIDUAL == Residual::added) {
      residual = load_residual(p, first_token + own.first + token, first_row + row);
    }
    float4 sum{};
    for (int slice = 0; slice < p.cluster; ++slice) {
      const float* const from = slice == rank  ? sums + own.first * kPitch
                                : slice < rank ? others + slice * most * kPitch
                                               : others + (slice - 1) * most * kPitch;
      const float4 v = *reinterpret_cast<const float4*>(from + token * kPitch + row);
      sum = slice == 0 ? v : added(sum, v);
    }
    store_sums<T, RESIDUAL>(p, first_token + own.first + token, first_row + row, scaled(sum, p.scale_of_sums),
                            residual);
  }
  if (p.cluster > 1) {
    __syncwarp();
    ptx::cluster_wait();
  }
}

template <typename T, Zeros ZEROS, typename Tile, Residual RESIDUAL>
__global__ void __launch_bounds__(Tile::threads, Tile::occupancy)
    w4a16_wgmma_kernel(const __grid_constant__ WgmmaParams p) {
#ifdef KESTREL_HAS_WGMMA
  constexpr int N = Tile::tokens, M = Tile::m_blocks;
  extern __shared__ char dynamic[];
  __shared__ uint64_t full[Tile::max_stages], empty[Tile::max_stages], received;
  const uint32_t ring = (ptx::shared_address(dynamic) + Tile::alignment - 1) / Tile::alignment * Tile::alignment;
  const int row_tile = blockIdx.x / p.splits, split = blockIdx.x - row_tile * p.splits;
  const int first_row = row_tile * Tile::rows, first_token = blockIdx.y * N;
  const int first_step = static_cast<int>(int64_t{p.steps} * split / p.splits);
  const int steps = static_cast<int>(int64_t{p.steps} * (split + 1) / p.splits) - first_step;
  prefetch_maps<Tile>(p);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&received, 1);
    init_ring<Tile>(p, full, empty);
    if (p.cluster > 1) {
      const int of_rank = tokens_of(split, p.cluster, min(p.tokens - first_token, N)).count;
      ptx::mbarrier_arrive_expect_tx(&received, (p.cluster - 1) * of_rank * (Tile::pitch * 4));
    }
  }
  __syncthreads();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32 % 4, warpgroup = thread / 128;

  if (thread >= Tile::consumers) {
    ptx::reduce_registers<Tile::producer_registers>();
    load_tile<Tile>(p, ring, full, empty, first_row, first_token, first_step, steps);
    if (p.cluster > 1) {  // as the consumers do in finish_tile()
      __syncwarp();
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();
    }
    return;
  }

  ptx::raise_registers<Tile::consumer_registers>();

  // -- main loop --

  float acc[M][N / 2] = {};
  uint32_t fragments[Tile::depth][8 * Tile::batch] = {};
  const int row_of_warp = warpgroup * M * 64 + warp * 16;  // of block 0
  const StagePlace<Tile> place(ring, row_of_warp, lane);
  RingPlace at;
  int previous = 0;
  for (int left = steps; left > 0; --left) {
    ptx::mbarrier_wait(full + at.stage, at.phase);
    const auto previous_done = [&] {
      __syncwarp();
      if (left < steps && lane == 0) ptx::mbarrier_arrive(empty + previous);
    };
    multiply_stage<T, ZEROS, Tile>(p, acc, fragments, place, at.stage * Tile::bytes, previous_done, left < steps);
    previous = at.stage;
    at.advance(p.stages);
  }
  ptx::wgmma_wait<0>();
#pragma unroll
  for (int m = 0; m < M; ++m) ptx::wgmma_fence_registers(acc[m]);

  // -- epilogue --

  if (p.splits > p.cluster) {
    float4* const partial =
        reinterpret_cast<float4*>(p.partial) +
        ((int64_t{split} * gridDim.y + blockIdx.y) * p.row_tiles + row_tile) * (Tile::fragments * Tile::consumers) +
        thread;
#pragma unroll
    for (int i = 0; i < Tile::fragments; ++i) {
      const float* const f = acc[i / (N / 8)] + i % (N / 8) * 4;
      partial[i * Tile::consumers] = make_float4(f[0], f[1], f[2], f[3]);
    }
    return;
  }
  float* const sums = reinterpret_cast<float*>(dynamic + (ring - ptx::shared_address(dynamic)));
  ptx::named_barrier(1, Tile::consumers);  // the ring is free
#pragma unroll
  for (int i = 0; i < M * N / 2; ++i) {
    const int token = i % (N / 2) / 4 * 8 + lane % 4 * 2 + i % 2, row = i / (N / 2) * 64 + lane / 4 + i / 2 % 2 * 8;
    sums[token * Tile::pitch + row_of_warp + row] = acc[i / (N / 2)][i % (N / 2)];
  }
  finish_tile<T, Tile, RESIDUAL>(p, ring, sums, &received, split, first_row, first_token, thread);
#endif
}

// Adds up the slices of K, [slice][token tile][row tile][fragment][consumer], in order. A CTA has a fragment of a
// warpgroup: blockIdx is (row tile and warpgroup, 8 tokens).
template <typename T, Zeros ZEROS, typename Tile, Residual RESIDUAL>
__global__ void __launch_bounds__(128) w4a16_wgmma_sum_kernel(const __grid_constant__ WgmmaParams p) {
  static_assert(Tile::m_blocks == 1);
  const int warpgroup = blockIdx.x % Tile::warpgroups, row_tile = blockIdx.x / Tile::warpgroups;
  const int fragment = blockIdx.y % Tile::fragments, token_tile = blockIdx.y / Tile::fragments;
  const int row = row_tile * Tile::rows + warpgroup * 64 + static_cast<int>(threadIdx.x) / 32 * 16;
  const int64_t tile_size = Tile::fragments * Tile::consumers;
  const int64_t pitch = tile_size * p.row_tiles * ((p.tokens + Tile::tokens - 1) / Tile::tokens);
  const float4* const from = reinterpret_cast<const float4*>(p.partial) +
                             (int64_t{token_tile} * p.row_tiles + row_tile) * tile_size + fragment * Tile::consumers +
                             warpgroup * 128 + threadIdx.x;
  pdl_wait();
  pdl_trigger();
  const int token = static_cast<int>(blockIdx.y) * 8, lane = static_cast<int>(threadIdx.x) % 32;
  uint2 residual{};
  if constexpr (RESIDUAL == Residual::added) residual = load_residual_fragment(p, token, row, lane);
  float4 slices[kMaxSplits];
#pragma unroll
  for (int s = 0; s < kMaxSplits; ++s) {
    if (s < p.splits) slices[s] = from[s * pitch];
  }
  float4 sum = slices[0];
#pragma unroll
  for (int s = 1; s < kMaxSplits; ++s) {
    if (s < p.splits) sum = added(sum, slices[s]);
  }
  store_fragment<T, RESIDUAL>(p, token, row, sum, residual, lane);
}

}  // namespace kestrel::quant::w4_wgmma
