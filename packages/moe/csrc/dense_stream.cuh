// A dense layer on Hopper that streams its weight: activation(x W' + bias) + residual, for up to 64 tokens.
//
// A tile is 128 outputs by 64 tokens; the CTAs of a cluster each sum a part of K. One producer thread loads 64 columns
// of K per stage (TMA), the first stages of the weight before the PDL wait. Two consumer warpgroups multiply 64 weight
// rows each (wgmma, weights as operand A) and write float32 sums to shared memory. Every CTA of the cluster then adds
// up its share of the tile from all of them through DSMEM, in the order of K.
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

struct StreamTile {
  static constexpr int outputs = 128, tokens = 64;
  static constexpr int stages = 9;
  static constexpr int line_bytes = 128;  // 64 elements of K
  static constexpr int stage_bytes = (outputs + tokens) * line_bytes;
  static constexpr int alignment = 1024;
  static constexpr int shared_bytes = stages * stage_bytes + alignment;
  static constexpr int consumers = 256, threads = consumers + 32;
  static constexpr int sums_stride = outputs + 4;  // floats of a token's sums; free of bank conflicts
  static constexpr int max_splits = 8;
};
static_assert(StreamTile::tokens * StreamTile::sums_stride * 4 <= StreamTile::stages * StreamTile::stage_bytes,
              "the sums reuse the memory of the stages");

struct DenseStreamParams {
  CUtensorMap x, weight;  // boxes of 64 tokens and of 128 outputs
  LinearParams layer;
  int steps = 0;  // K in steps of 64
  int token_tiles = 0;
  int splits = 1;  // CTAs of a cluster
};

template <typename T>
__global__ void __launch_bounds__(StreamTile::threads, 1)
    dense_stream_kernel(const __grid_constant__ DenseStreamParams p) {
#ifdef KESTREL_HAS_WGMMA
  using Tile = StreamTile;
  constexpr int S = Tile::stages;
  extern __shared__ char dynamic[];
  __shared__ uint64_t full[S], empty[S];
  const uint32_t ring = (ptx::shared_address(dynamic) + Tile::alignment - 1) / Tile::alignment * Tile::alignment;
  const int split = blockIdx.x % p.splits, tile = blockIdx.x / p.splits;
  const int output_tile = tile / p.token_tiles, first_token = (tile - output_tile * p.token_tiles) * Tile::tokens;
  const int first_output = output_tile * Tile::outputs;
  const int steps_per_split = (p.steps + p.splits - 1) / p.splits;
  const int first_step = split * steps_per_split, steps = max(min(steps_per_split, p.steps - first_step), 0);
  if (threadIdx.x == 0) {
    for (int s = 0; s < S; ++s) {
      ptx::mbarrier_init(full + s, 1);
      ptx::mbarrier_init(empty + s, 2);
    }
    ptx::fence_mbarrier_init();
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
    if (p.splits > 1) {
      ptx::cluster_sync();
      ptx::cluster_sync();
    }
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

  // This CTA's sums [token][output], in the memory of the pipeline stages.
  float* const sums = static_cast<float*>(__cvta_shared_to_generic(ring));
  ptx::named_barrier(1, Tile::consumers);  // both warpgroups have read all stages
#pragma unroll
  for (int i = 0; i < Tile::tokens / 2; ++i) {
    const int output = warp * 16 + lane / 4 + i / 2 % 2 * 8, token = i / 4 * 8 + lane % 4 * 2 + i % 2;
    sums[token * Tile::sums_stride + output] = acc[i];
  }
  if (p.splits > 1) {
    ptx::cluster_sync();
  } else {
    ptx::named_barrier(1, Tile::consumers);
  }

  // -- epilogue: the CTAs of the cluster divide the packs of the tile --

  constexpr int size = Pack<T>::size, packs = Tile::outputs / size;
  const LinearParams& layer = p.layer;
  const int tokens = min(Tile::tokens, layer.tokens - first_token);
  for (int at = split * Tile::consumers + threadIdx.x; at < tokens * packs; at += p.splits * Tile::consumers) {
    const int token = at / packs, output = first_output + at % packs * size;
    if (output >= layer.outputs) continue;
    const float* const mine = sums + token * Tile::sums_stride + at % packs * size;
    float4 parts[Tile::max_splits][2];
#pragma unroll
    for (int s = 0; s < Tile::max_splits; ++s) {
      if (s < p.splits) {
        const float4* const from = reinterpret_cast<const float4*>(p.splits > 1 ? ptx::map_shared(mine, s) : mine);
        parts[s][0] = from[0];
        parts[s][1] = from[1];
      }
    }
    float h[size] = {}, more[size];
#pragma unroll
    for (int s = 0; s < Tile::max_splits; ++s) {
      if (s < p.splits) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          h[4 * i] += parts[s][i].x;
          h[4 * i + 1] += parts[s][i].y;
          h[4 * i + 2] += parts[s][i].z;
          h[4 * i + 3] += parts[s][i].w;
        }
      }
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
  __syncwarp();
  if (p.splits > 1) ptx::cluster_sync();  // no CTA exits while others read its sums
#endif
}

}  // namespace kestrel::moe
