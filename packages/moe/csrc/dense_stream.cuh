// A dense layer on Hopper that streams its weight: activation(x W' + bias) + residual, for up to 64 tokens.
//
// A tile is 128 outputs by TOKENS tokens; the CTAs of a cluster each sum a part of K. Two CTAs share an SM, so that one
// loads while the other starts or ends. One producer thread loads 64 columns of K per stage (TMA), the first stages of
// the weight before the PDL wait. Two consumer warpgroups multiply 64 weight rows each (wgmma, weights as operand A).
// Each CTA of the cluster owns some groups of eight outputs: it receives their sums from all CTAs through DSMEM and
// adds them up in the order of K.
#pragma once

#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>
#include <kestrel/ptx/cluster.cuh>
#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/named_barrier.cuh>
#include <kestrel/ptx/shared.cuh>
#include <kestrel/ptx/tma.cuh>
#include <kestrel/ptx/wgmma.cuh>

#include "activation.cuh"
#include "linear_params.h"

namespace kestrel::moe {

template <int TOKENS>
struct StreamTile {
  static constexpr int outputs = 128, tokens = TOKENS;
  static constexpr int stages = tokens == 16 ? 6 : tokens == 32 ? 5 : 4;
  static constexpr int line_bytes = 128;  // 64 elements of K
  static constexpr int stage_bytes = (outputs + tokens) * line_bytes;
  static constexpr int alignment = 1024;
  static constexpr int shared_bytes = stages * stage_bytes + alignment;
  static constexpr int consumers = 256, threads = consumers + 32;
  static constexpr int groups = outputs / 8;
  static constexpr int sums_stride = tokens + 2;  // floats of an output's sums
  static constexpr int max_splits = 8;
  static_assert(shared_bytes <= 113 * 1024, "two CTAs share an SM");
  // What a CTA receives: of each split, ceil(groups / splits) groups at most.
  static_assert((groups + max_splits) * 8 * sums_stride * 4 <= stages * stage_bytes, "in the memory of the stages");
};

struct DenseStreamParams {
  CUtensorMap x, weight;  // boxes of a tile's tokens and of 128 outputs
  LinearParams layer;
  int steps = 0;  // K in steps of 64
  int token_tiles = 0;
  int splits = 1;  // CTAs of a cluster
};

template <typename T, int TOKENS>
__global__ void __launch_bounds__(StreamTile<TOKENS>::threads, 2)
    dense_stream_kernel(const __grid_constant__ DenseStreamParams p) {
#ifdef KESTREL_HAS_WGMMA
  using Tile = StreamTile<TOKENS>;
  constexpr int S = Tile::stages;
  extern __shared__ char dynamic[];
  __shared__ uint64_t full[S], empty[S], received;
  const uint32_t ring = (ptx::shared_address(dynamic) + Tile::alignment - 1) / Tile::alignment * Tile::alignment;
  const int split = blockIdx.x % p.splits, tile = blockIdx.x / p.splits;
  const int output_tile = tile / p.token_tiles, first_token = (tile - output_tile * p.token_tiles) * Tile::tokens;
  const int first_output = output_tile * Tile::outputs;
  const int steps_per_split = (p.steps + p.splits - 1) / p.splits;
  const int first_step = split * steps_per_split, steps = max(min(steps_per_split, p.steps - first_step), 0);
  // Group g of eight outputs is owned by CTA g / groups_of_cta of the cluster.
  const int groups_of_cta = (Tile::groups + p.splits - 1) / p.splits;
  const int groups = max(min(groups_of_cta, Tile::groups - split * groups_of_cta), 0);  // that this CTA owns
  if (threadIdx.x == 0) {
    for (int s = 0; s < S; ++s) {
      ptx::mbarrier_init(full + s, 1);
      ptx::mbarrier_init(empty + s, 2);
    }
    ptx::mbarrier_init(&received, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(&received, p.splits * groups * 8 * Tile::tokens * 4);
  }
  __syncthreads();

  // -- the producer warp: one thread loads; full[stage] counts its bytes --

  if (threadIdx.x >= Tile::consumers) {
    if (threadIdx.x == Tile::consumers) {
      const auto load_weight = [&](int stage, int step) {
        ptx::mbarrier_arrive_expect_tx(full + stage, Tile::stage_bytes);
        ptx::tma_load(ring + stage * Tile::stage_bytes, p.weight, (first_step + step) * 64, first_output, full + stage);
      };
      const auto load_x = [&](int stage, int step) {
        ptx::tma_load(ring + stage * Tile::stage_bytes + Tile::outputs * Tile::line_bytes, p.x,
                      (first_step + step) * 64, first_token, full + stage);
      };
      const int ahead = min(S, steps);
      for (int step = 0; step < ahead; ++step) load_weight(step, step);
      pdl_wait();
      pdl_trigger();
      for (int step = 0; step < ahead; ++step) load_x(step, step);
      for (int step = ahead; step < steps; ++step) {
        const int stage = step % S;
        ptx::mbarrier_wait(empty + stage, (step / S & 1) ^ 1);
        load_weight(stage, step);
        load_x(stage, step);
      }
    }
    __syncwarp();
    if (p.splits > 1) ptx::cluster_arrive_relaxed();
    return;
  }

  // -- the consumer warpgroups: 64 outputs each; one arrival of each frees a stage --

  const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float acc[Tile::tokens / 2];
#pragma unroll
  for (int i = 0; i < Tile::tokens / 2; ++i) acc[i] = 0.f;
  for (int step = 0; step < steps; ++step) {
    const int stage = step % S;
    ptx::mbarrier_wait(full + stage, step / S & 1);
    const uint32_t here = ring + stage * Tile::stage_bytes;
    const uint64_t a = ptx::wgmma_descriptor(here + warpgroup * 64 * Tile::line_bytes);
    const uint64_t b = ptx::wgmma_descriptor(here + Tile::outputs * Tile::line_bytes);
    ptx::wgmma_fence_registers(acc);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) ptx::wgmma<T, Tile::tokens>(acc, a + 2 * k, b + 2 * k, step + k > 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();  // the previous stage has been read
    if (step > 0 && threadIdx.x % 128 == 0) ptx::mbarrier_arrive(empty + (step - 1) % S);
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_fence_registers(acc);
  pdl_wait();
  pdl_trigger();

  // -- sums go to the CTAs that own their outputs, into the memory of the stages, [split][output][token] --

  if (p.splits > 1) {
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();  // all CTAs of the cluster have read their stages
  } else {
    ptx::named_barrier(1, Tile::consumers);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int output = warp * 16 + half * 8 + lane / 4, rank = output / 8 / groups_of_cta;
    const int row = split * groups_of_cta * 8 + output - rank * groups_of_cta * 8;
    uint32_t to = ring + (row * Tile::sums_stride + lane % 4 * 2) * 4, barrier = ptx::shared_address(&received);
    if (p.splits > 1) {
      to = ptx::map_shared(to, rank);
      barrier = ptx::map_shared(barrier, rank);
    }
#pragma unroll
    for (int j = 0; j < Tile::tokens / 8; ++j) {
      const float a = acc[4 * j + 2 * half], b = acc[4 * j + 2 * half + 1];
      if (p.splits > 1) {
        const uint64_t both = __float_as_uint(a) | static_cast<uint64_t>(__float_as_uint(b)) << 32;
        ptx::store_async(to + j * 32, both, barrier);
      } else {
        ptx::store_shared(to + j * 32, a);
        ptx::store_shared(to + j * 32 + 4, b);
      }
    }
  }
  if (p.splits > 1) {
    ptx::mbarrier_wait_cluster(&received, 0);
  } else {
    ptx::named_barrier(1, Tile::consumers);
  }

  // -- epilogue: a thread finishes eight outputs of a token --

  constexpr int size = Pack<T>::size;
  static_assert(size == 8);
  const LinearParams& layer = p.layer;
  const int tokens = min(Tile::tokens, layer.tokens - first_token);
  for (int at = threadIdx.x; at < (groups + 1) / 2 * 2 * Tile::tokens; at += Tile::consumers) {
    const int token = at / 2 % Tile::tokens, group = at / (2 * Tile::tokens) * 2 + at % 2;  // free of bank conflicts
    const int output = first_output + (split * groups_of_cta + group) * 8;
    if (token >= tokens || group >= groups || output >= layer.outputs) continue;
    float h[size] = {}, more[size];
    for (int s = 0; s < p.splits; ++s) {
      const uint32_t from = ring + ((s * groups_of_cta + group) * 8 * Tile::sums_stride + token) * 4;
#pragma unroll
      for (int i = 0; i < size; ++i) h[i] += ptx::load_shared(from + i * Tile::sums_stride * 4);
    }
    if (layer.bias) {
      Pack<T>{load16(layer.bias + int64_t{output} * sizeof(T))}.unpack(more);
#pragma unroll
      for (int i = 0; i < size; ++i) h[i] += more[i];
    }
    if (layer.activation != LinearActivation::none) {
#pragma unroll
      for (int i = 0; i < size; ++i) h[i] = activate<T>(h[i], layer.activation);
    }
    const int64_t row = first_token + token, offset = int64_t{output} * sizeof(T);
    if (layer.residual) {
      Pack<T>{load16(layer.residual + row * layer.residual_stride + offset)}.unpack(more);
#pragma unroll
      for (int i = 0; i < size; ++i) h[i] += more[i];
    }
    Pack<T> pack;
    pack.pack(h);
    store16(layer.out + row * layer.out_stride + offset, pack.bits);
  }
#endif
}

}  // namespace kestrel::moe
