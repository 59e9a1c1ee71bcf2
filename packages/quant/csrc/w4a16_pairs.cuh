// w4a16_wgmma_kernel's product by pairs of CTAs, for up to half as many tiles as CTAs run at once: a cluster of two
// halves the K of a tile.
//
// Each CTA sends the other its sums of half of the tokens through DSMEM, from registers (st.async), adds those that it
// receives to its own, and writes the results of that half. The sums of rank 0 are of the lower K.
#pragma once

#include "w4a16_wgmma_tile.cuh"

namespace kestrel::quant::w4_wgmma {

// What a CTA receives and writes, in place of the ring: sums in float32, [fragment][consumer][16 bytes], then results.
template <typename Tile>
struct PairHalf {
  static constexpr int tokens = Tile::tokens / 2, fragments = Tile::fragments / 2;
  static constexpr int fragment_bytes = Tile::consumers * 16, sum_bytes = fragments * fragment_bytes;
  static constexpr int bytes = sum_bytes + ResultTile<Tile, tokens>::bytes;
  static_assert(Tile::m_blocks == 1 && Tile::fragments % 2 == 0 && bytes <= 2 * Tile::bytes);
};

template <typename T, Zeros ZEROS, typename Tile, Residual RESIDUAL>
__global__ void __launch_bounds__(Tile::threads, Tile::occupancy)
    w4a16_pair_kernel(const __grid_constant__ WgmmaParams p) {
#ifdef KESTREL_HAS_WGMMA
  using Half = PairHalf<Tile>;
  using Results = ResultTile<Tile, Half::tokens>;
  constexpr int N = Tile::tokens;
  extern __shared__ char dynamic[];
  __shared__ uint64_t full[Tile::max_stages], empty[Tile::max_stages], received;
  const uint32_t ring = (ptx::shared_address(dynamic) + Tile::alignment - 1) / Tile::alignment * Tile::alignment;
  const int rank = blockIdx.x % 2, first_row = blockIdx.x / 2 * Tile::rows, first_token = blockIdx.y * N;
  const int steps = (p.steps + 1 - rank) / 2, first_step = rank * ((p.steps + 1) / 2);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32 % 4, warpgroup = thread / 128;
  prefetch_maps<Tile>(p);
  if (thread == 0) {
    ptx::mbarrier_init(&received, 1);
    init_ring<Tile>(p, full, empty);
    ptx::mbarrier_arrive_expect_tx(&received, Half::sum_bytes);
  }
  __syncthreads();

  if (thread >= Tile::consumers) {
    ptx::reduce_registers<Tile::producer_registers>();
    load_tile<Tile>(p, ring, full, empty, first_row, first_token, first_step, steps);
    return;  // the cluster's barrier does not wait for threads that have left
  }

  ptx::raise_registers<Tile::consumer_registers>();

  // -- main loop, as that of w4a16_wgmma_kernel --

  float acc[1][N / 2];
  uint32_t fragments[Tile::depth][8 * Tile::batch];
  const int row_of_warp = warpgroup * 64 + warp * 16;
  const StagePlace<Tile> place(ring, row_of_warp, lane);
  RingPlace at;
  int previous = 0;
  for (int i = 0; i < steps; ++i) {
    ptx::mbarrier_wait(full + at.stage, at.phase);
    const auto previous_done = [&] {
      __syncwarp();
      if (i > 0 && lane == 0) ptx::mbarrier_arrive(empty + previous);
    };
    multiply_stage<T, ZEROS, Tile>(p, acc, fragments, place, at.stage * Tile::bytes, previous_done, i > 0);
    previous = at.stage;
    at.advance(p.stages);
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_fence_registers(acc[0]);

  // -- sums --

  __syncwarp();
  ptx::cluster_arrive_relaxed();
  ptx::cluster_wait();  // both rings are free
  const uint32_t to = ptx::map_shared(ring + thread * 16, 1 - rank),
                 barrier = ptx::map_shared(ptx::shared_address(&received), 1 - rank);
  const float2 bias = load_bias<T>(p, first_row + row_of_warp, lane);
  float sums[N / 4];
#pragma unroll
  for (int i = 0; i < Half::fragments; ++i) {
    constexpr int kOther = N / 4;
    float4 sent;
    sent.x = rank == 0 ? acc[0][kOther + 4 * i] : acc[0][4 * i];
    sent.y = rank == 0 ? acc[0][kOther + 4 * i + 1] : acc[0][4 * i + 1];
    sent.z = rank == 0 ? acc[0][kOther + 4 * i + 2] : acc[0][4 * i + 2];
    sent.w = rank == 0 ? acc[0][kOther + 4 * i + 3] : acc[0][4 * i + 3];
    ptx::store_async(to + i * Half::fragment_bytes, sent, barrier);
  }
#pragma unroll
  for (int i = 0; i < N / 4; ++i) sums[i] = rank == 0 ? acc[0][i] : acc[0][N / 4 + i];
  if constexpr (RESIDUAL == Residual::added) {
    const int first = first_token + rank * Half::tokens;
    start_residual<Results>(p, ring + Half::sum_bytes, first_row, first, min(Half::tokens, p.tokens - first));
  }
  ptx::mbarrier_wait_cluster(&received, 0);
#pragma unroll
  for (int i = 0; i < Half::fragments; ++i) {
    const float4 v = ptx::load_shared_float4(ring + thread * 16 + i * Half::fragment_bytes);
    sums[4 * i] += v.x;
    sums[4 * i + 1] += v.y;
    sums[4 * i + 2] += v.z;
    sums[4 * i + 3] += v.w;
  }

  // -- results --

  const int first = first_token + rank * Half::tokens;
  const uint32_t buffer = ring + Half::sum_bytes;
  if constexpr (RESIDUAL == Residual::added) wait_for_residual<Results>();
  stage_results<T, Results, RESIDUAL>(p, sums, 0, Half::tokens, bias, buffer, row_of_warp, lane);
  ptx::named_barrier(1, Tile::consumers);
  copy_results<Results>(p, buffer, first_row, first, min(Half::tokens, p.tokens - first));
#endif
}

}  // namespace kestrel::quant::w4_wgmma
