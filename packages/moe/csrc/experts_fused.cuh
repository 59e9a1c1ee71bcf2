// A layer of routed experts for up to 16 tokens on Hopper, both projections in one kernel.
//
// A work item is 128 channels of the hidden layer of one expert: the rows of w1 that compute them, and the columns of
// w2 that multiply them. So no CTA waits for another one but its pair: the two CTAs of a cluster compute 64 channels
// each, exchange them through DSMEM, and multiply every second group of 128 rows of w2. Weights (M) come by TMA, 16 KB
// a stage, and the ring runs through both projections and all items, so that the memory never idles. All tokens are the
// columns of each product. Results go to [pair, block of channels, Hd] in float32; experts_fused_sum_kernel adds
// up blocks, then choices, in order.
#pragma once

#include <kestrel/fp8.cuh>
#include <kestrel/pdl.cuh>
#include <kestrel/ptx/cache.cuh>
#include <kestrel/ptx/cluster.cuh>
#include <kestrel/ptx/cp_async.cuh>
#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/named_barrier.cuh>
#include <kestrel/ptx/shared.cuh>
#include <kestrel/ptx/tma.cuh>
#include <kestrel/ptx/wgmma.cuh>

#include "experts_pairs.cuh"
#include "experts_rows.cuh"

namespace kestrel::moe {

constexpr int kFusedChoices = 8, kFusedExperts = 1024;  // at most; experts are bits in the lanes of a warp
constexpr int kFusedWidth = 8192;                       // of the longest rows, in scales of 128 columns
constexpr int kFusedStages = 8, kFusedStagesFp8 = 7;    // at most: deeper rings are slower
constexpr int kFusedFewestStages = 4;
static_assert(kFusedStagesFp8 <= kFusedStages, "the barriers of all stages");
constexpr int kBarrierOfFused = 1;    // named barrier of the consumers
constexpr int kRawBytes = 32 * 1024;  // of rows of x before quantisation
constexpr int kFusedSumThreads = 256, kFusedSumOutputs = 64;
constexpr int kBlocksInFlight = 16;  // loads of a thread of the sum

// Rows of x that are quantised at a time: a power of two, at most `most` if that is one.
__host__ __device__ inline int raw_rows(int width, int most) {
  const int bytes = (width + kScaleBlock - 1) / kScaleBlock * kScaleBlock * 2;
  int rows = 1;
  while (rows < most && 2 * rows * bytes <= kRawBytes) rows *= 2;
  return rows;
}

template <int TOKENS_>
struct FusedTile {
  static constexpr int tokens = TOKENS_, n_tiles = tokens / 8, cluster = 2, warps = 8;
  static constexpr int consumers = 32 * warps, threads = consumers + 32;
  static constexpr int rows = 128, channels = 128, my_channels = channels / cluster;  // of a stage; of an item
  static constexpr int x_bytes = tokens * kLineBytes, scales_of_row = kFusedWidth / kScaleBlock;
  static constexpr int hidden_bytes = tokens * channels * 4, stage_bytes = rows * kLineBytes, alignment = 1024;
  static __device__ __forceinline__ void barrier() { ptx::named_barrier(kBarrierOfFused, consumers); }
};

struct FusedParams {
  CUtensorMap w1, w2;
  int w1_step, w2_step;  // of the expert's coordinate: 1, or 0 if all experts share one weight
  ExpertsParams up, down;
  int blocks, stages;  // of channels; of the ring
};

// The distinct experts of all pairs, in ascending order, as bits in the lanes of a warp.
struct ExpertSet {
  unsigned bits;         // lane i: of experts 32 * i to 32 * i + 31
  int before, distinct;  // experts in lower lanes; in all

  // bits_of_warp: 32 words of shared memory for this warp, zeros.
  __device__ __forceinline__ ExpertSet(const ExpertsParams& p, unsigned* bits_of_warp) {
    const int lane = threadIdx.x % 32;
    for (int pair = lane; pair < p.tokens * p.choices; pair += 32) {
      const int token = pair / p.choices;
      const int expert = local_expert(p, p.topk_ids[token * p.ids_stride + (pair - token * p.choices)]);
      if (expert >= 0) atomicOr(bits_of_warp + expert / 32, 1u << expert % 32);
    }
    __syncwarp();
    bits = bits_of_warp[lane];
    int sum = __popc(bits);
#pragma unroll
    for (int other = 1; other < 32; other *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, sum, other);
      if (lane >= other) sum += below;
    }
    before = sum - __popc(bits);
    distinct = __shfl_sync(0xffffffffu, sum, 31);
  }

  __device__ __forceinline__ int operator[](int nth) const {
    const int lane = threadIdx.x % 32, rank = nth - before;
    const int from = __ffs(__ballot_sync(0xffffffffu, rank >= 0 && rank < __popc(bits))) - 1;
    const unsigned its_bits = __shfl_sync(0xffffffffu, bits, from);
    const int its_rank = __shfl_sync(0xffffffffu, rank, from);
    const bool is_it = (its_bits >> lane & 1) && __popc(its_bits & ((1u << lane) - 1)) == its_rank;
    return 32 * from + __ffs(__ballot_sync(0xffffffffu, is_it)) - 1;
  }
};

// Copies packs of 16 bytes of rows first to end - 1 of x to to(row, pack), and zeros past the end of a row. Then a
// barrier.
template <typename Tile, typename F>
__device__ __forceinline__ void copy_x(const ExpertsParams& p, int first, int end, int packs, const F& to) {
  for (int i = threadIdx.x; i < (end - first) * packs; i += Tile::consumers) {
    const int row = first + i / packs, pack = i % packs;
    const bool inside = pack < p.width / 8;
    ptx::cp_async16_or_zero(to(row, pack), inside ? p.x + row * p.x_stride + pack * 16 : p.x, inside);
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  Tile::barrier();
}

// Quantises x with the codes of fp8_quant, a few rows at a time, which wait in raw_x. Loops are not unrolled: their
// instructions come from memory, behind the weights that are being read.
template <typename R, typename Tile>
__device__ __forceinline__ void quantise_x(const ExpertsParams& p, uint32_t x_tile, uint32_t raw_x, float* row_scales) {
  __shared__ float largest_of_warp[Tile::warps];
  const int blocks = (p.width + kScaleBlock - 1) / kScaleBlock, packs = blocks * kScaleBlock / 8;
  const int rows = raw_rows(p.width, min(Tile::warps, p.tokens)),
            row_warps = Tile::warps / rows;  // at a time; of a row
  const int warp = threadIdx.x / 32, first_pack = threadIdx.x - warp / row_warps * row_warps * 32;
  const uint32_t from = raw_x + warp / row_warps * packs * 16;
#pragma unroll 1
  for (int first = 0; first < p.tokens; first += rows) {
    const int row = first + warp / row_warps;
    copy_x<Tile>(p, first, min(first + rows, p.tokens), packs,
                 [&](int n, int pack) { return raw_x + ((n - first) * packs + pack) * 16; });
    float scale = 0.f;
    if (!p.x_blocks) {
      float largest = 0.f;
#pragma unroll 1
      for (int i = first_pack; row < p.tokens && i < packs; i += row_warps * 32) {
        largest = fmaxf(largest, largest_magnitude(Pack<R>{ptx::load_shared_uint4(from + i * 16)}));
      }
      largest = warp_max(largest);
      if (threadIdx.x % 32 == 0) largest_of_warp[warp] = largest;
      Tile::barrier();
      for (int i = 0; i < row_warps; ++i) {
        largest = fmaxf(largest, largest_of_warp[warp / row_warps * row_warps + i]);
      }
      scale = fp8_scale(largest);
      if (row < p.tokens && first_pack == 0) row_scales[row] = scale;
    }
#pragma unroll 1
    for (int i = first_pack; row < p.tokens && i < packs; i += row_warps * 32) {  // packs are a multiple of 16
      const Pack<R> pack{ptx::load_shared_uint4(from + i * 16)};
      if (p.x_blocks) {
        const unsigned lanes = 0xffffu << (threadIdx.x & 16);  // of this block: each half of a warp is whole or absent
        float largest = largest_magnitude(pack);
#pragma unroll
        for (int other = 8; other > 0; other /= 2) largest = fmaxf(largest, __shfl_xor_sync(lanes, largest, other));
        scale = fp8_scale(largest);
        if (i % 16 == 0) row_scales[row * Tile::scales_of_row + i / 16] = scale;
      }
      const PackCodes<R> codes(pack, scale, __frcp_rn(scale));
      const uint32_t to = x_tile + i / 16 * Tile::x_bytes + row * kLineBytes + (i % 16 / 2 ^ row % 8) * 16 + i % 2 * 8;
      ptx::store_shared(to, make_float2(__uint_as_float(codes.words[0]), __uint_as_float(codes.words[1])));
    }
    Tile::barrier();
  }
}

// The ring of stages, as one of its users sees it.
template <typename Tile>
struct FusedRing {
  const uint32_t stages;
  uint64_t *const full, *const empty;  // barriers of the stages: their bytes; the consumer warps
  const int num_stages;
  int stage = 0, phase = 0;

  __device__ __forceinline__ uint32_t address() const { return stages + stage * Tile::stage_bytes; }

  __device__ __forceinline__ void next_stage() {
    if (++stage == num_stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// The work item of a cluster: 128 channels of the hidden layer of an expert.
struct FusedItem {
  int block, expert;

  __device__ __forceinline__ FusedItem(int item, int blocks, const ExpertSet& set) {
    const int nth = item / blocks;
    block = item - nth * blocks;
    expert = set[nth];
  }
};

// What all roles of a CTA know. up and down are in one type of weights, W.
template <typename W, typename Tile>
struct FusedRole {
  static constexpr bool fp8 = std::is_same_v<W, __nv_fp8_e4m3>;
  static_assert(!fp8 || Tile::channels == kScaleBlock, "a warp finds the largest magnitude of a scale's channels");
  static constexpr int element = fp8 ? 1 : 2, lines = Tile::channels * element / kLineBytes;  // of an item's channels
  static constexpr int n_tiles = Tile::n_tiles, cluster = Tile::cluster;
  using Sums = float[4 * n_tiles];

  const FusedParams& params;
  const ExpertsParams& p;
  FusedRing<Tile> ring;
  const int steps, rank, lane;
  const int groups = (p.width + Tile::rows - 1) / Tile::rows;  // of rows of w2

  // The TMA thread: the stages of an item.
  __device__ __forceinline__ void load_item(const FusedItem& at, uint64_t policy) {
    const auto load = [&](const CUtensorMap& map, int k, int group, int outer) {
      ptx::mbarrier_wait(ring.empty + ring.stage, ring.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(ring.full + ring.stage, Tile::stage_bytes);
      ptx::tma_load_grouped(ring.address(), map, k, group, outer, ring.full + ring.stage, policy);
      ring.next_stage();
    };
    const int first = (at.block * Tile::channels + rank * Tile::my_channels) / 8;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      load(params.w1, step * (kLineBytes / element), first, at.expert * params.w1_step);
    }
#pragma unroll 1
    for (int group = rank; group < groups; group += cluster) {
      for (int line = 0; line < lines; ++line) {
        load(params.w2, at.block * Tile::channels + line * (kLineBytes / element), group * (Tile::rows / 16),
             at.expert * params.w2_step);
      }
    }
  }
};

// The consumer warpgroups: 64 rows of each stage. A thread of a warpgroup holds the sums of weight rows 16 * (warp % 4)
// + group (+ 8) and tokens 8 * j + 2 * quad (+ 1). In the up projection these rows are the two halves of a channel.
template <typename W, typename Tile>
struct FusedConsumer : FusedRole<W, Tile> {
  using Role = FusedRole<W, Tile>;
  using Role::cluster;
  using Role::fp8;
  using Role::lane;
  using Role::lines;
  using Role::n_tiles;
  using Role::p;
  using Role::params;
  using Role::rank;
  using Role::ring;
  using Role::steps;
  using typename Role::Sums;

  const int warp;
  const float* const row_scales;  // FP8: of x
  const int group = lane / 4, quad = lane % 4, warpgroup = warp / 4;

  // d (+)= the rows of this warpgroup in the stage, times all tokens.
  __device__ __forceinline__ void multiply(Sums& d, uint32_t b_tile, bool add) {
    ptx::mbarrier_wait(ring.full + ring.stage, ring.phase);
    const uint64_t a = ptx::wgmma_descriptor(ring.address() + warpgroup * 64 * kLineBytes);
    const uint64_t b = ptx::wgmma_descriptor(b_tile);
    ptx::wgmma_fence_registers(d);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) ptx::wgmma<W, Tile::tokens>(d, a + 2 * k, b + 2 * k, add || k > 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_registers(d);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ring.empty + ring.stage);
    ring.next_stage();
  }

  // The up projection of an item: sends the gated values to `hidden` of all CTAs of the cluster.
  __device__ __forceinline__ void multiply_up(const FusedItem& at, uint32_t x_tile, uint32_t hidden, uint64_t* full) {
    const int64_t expert = at.expert;
    const int my_channel = rank * Tile::my_channels + warp * 8 + group;  // of the block
    const int channel = at.block * Tile::channels + my_channel, channel_read = min(channel, p.outputs - 1);
    float scale_low = 1.f, scale_high = 1.f;
    float block_low[2] = {1.f, 1.f}, block_high[2] = {1.f, 1.f};  // of 128 columns: of steps lane and lane + 32
    if constexpr (fp8) {
      const int64_t of_expert = expert * p.scale_expert_stride;
      if (p.scale_rank == 3) {
        const float* low = p.weight_scale_low + of_expert + channel_read / kScaleBlock * p.scale_row_stride;
        const float* high =
            p.weight_scale_high + of_expert + (channel_read + p.outputs) / kScaleBlock * p.scale_row_stride;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int step = min(lane + 32 * i, steps - 1);
          block_low[i] = low[step];
          block_high[i] = high[step];
        }
      } else {
        scale_low = p.weight_scale_low[of_expert + channel_read * p.scale_row_stride];
        scale_high = p.weight_scale_high[of_expert + channel_read * p.scale_row_stride];
      }
    }
    Sums acc = {};
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if constexpr (fp8) {
        Sums product;
        multiply(product, x_tile + step * Tile::x_bytes, false);
        if (p.x_blocks) {
          const float low = __shfl_sync(0xffffffffu, step < 32 ? block_low[0] : block_low[1], step % 32);
          const float high = __shfl_sync(0xffffffffu, step < 32 ? block_high[0] : block_high[1], step % 32);
#pragma unroll
          for (int i = 0; i < 4 * n_tiles; ++i) {
            const float x_scale = row_scales[(i / 4 * 8 + 2 * quad + i % 2) * Tile::scales_of_row + step];
            acc[i] = fmaf(product[i] * x_scale, i % 4 < 2 ? low : high, acc[i]);
          }
        } else {
#pragma unroll
          for (int i = 0; i < 4 * n_tiles; ++i) acc[i] += product[i];
        }
      } else {
        multiply(acc, x_tile + step * Tile::x_bytes, step > 0);
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * n_tiles; ++i) {
      const int token = i / 2 * 8 + 2 * quad + i % 2;
      float low = acc[i / 2 * 4 + i % 2], high = acc[i / 2 * 4 + i % 2 + 2];
      if constexpr (fp8) {
        low *= scale_low;
        high *= scale_high;
        if (!p.x_blocks && token < p.tokens) {
          low *= row_scales[token];
          high *= row_scales[token];
        }
      }
      const float value = channel < p.outputs ? gated_value(low, high, p.gate) : 0.f;
      const uint32_t to = hidden + (token * Tile::channels + my_channel) * 4;
#pragma unroll
      for (int r = 0; r < cluster; ++r) {
        ptx::store_async(ptx::map_shared(to, r), __float_as_uint(value), ptx::map_shared(ptx::shared_address(full), r));
      }
    }
  }

  // The hidden layer as the other operand of the down projection: a warp converts the channels of a token.
  __device__ __forceinline__ void convert_hidden(uint32_t hidden, uint32_t hidden_tile, float* hidden_scale) const {
#pragma unroll
    for (int token = warp; token < Tile::tokens; token += Tile::warps) {
      const uint32_t from = hidden + token * Tile::channels * 4, to = hidden_tile + token * kLineBytes;
      if constexpr (fp8) {
        Pack<float> pack;
        pack.bits = ptx::load_shared_uint4(from + 16 * lane);
        const float scale = fp8_scale(warp_max(largest_magnitude(pack)));
        const PackCodes<float> codes(pack, scale, __frcp_rn(scale));
        ptx::store_shared(to + (lane / 4 ^ token % 8) * 16 + lane % 4 * 4, __uint_as_float(codes.words[0]));
        if (lane == 0) hidden_scale[token] = scale;
      } else {
#pragma unroll
        for (int line = 0; line < lines; ++line) {  // two channels for each lane
          const W rounded[2] = {from_float<W>(ptx::load_shared(from + (64 * line + 2 * lane) * 4)),
                                from_float<W>(ptx::load_shared(from + (64 * line + 2 * lane) * 4 + 4))};
          float word;
          memcpy(&word, rounded, 4);
          ptx::store_shared(to + line * Tile::x_bytes + (lane / 4 ^ token % 8) * 16 + lane % 4 * 4, word);
        }
      }
    }
  }

  // Of token `lane`: its first pair with the expert; -1: none. experts: of all pairs.
  __device__ __forceinline__ int first_pair(const int* experts, int expert) const {
    int its_pair = -1;
    if (lane < p.tokens) {
      for (int j = p.choices - 1; j >= 0; --j) {
        const int pair = lane * p.choices + j;
        if (experts[pair] == expert) its_pair = pair;
      }
    }
    return its_pair;
  }

  // The down projection of an item. its_pair: of token `lane`.
  __device__ __forceinline__ void multiply_down(const FusedItem& at, uint32_t hidden_tile, const float* hidden_scale,
                                                int its_pair) {
    float token_scale[2 * n_tiles];
    float* to[2 * n_tiles];
#pragma unroll
    for (int i = 0; i < 2 * n_tiles; ++i) {
      const int token = i / 2 * 8 + 2 * quad + i % 2;
      token_scale[i] = fp8 ? hidden_scale[token] : 1.f;
      const int pair = __shfl_sync(0xffffffffu, its_pair, token);
      to[i] = pair < 0 ? nullptr
                       : params.down.partial + (int64_t{pair} * params.blocks + at.block) * p.width + warp * 16 + group;
    }
#pragma unroll 1
    for (int rows_group = rank; rows_group < this->groups; rows_group += cluster) {
      Sums d;
#pragma unroll
      for (int line = 0; line < lines; ++line) multiply(d, hidden_tile + line * Tile::x_bytes, line > 0);
#pragma unroll
      for (int i = 0; i < 4 * n_tiles; ++i) {
        const int of = i / 4 * 2 + i % 2, row = rows_group * Tile::rows + i / 2 % 2 * 8;
        if (to[of] && row + warp * 16 + group < p.width) to[of][row] = d[i] * token_scale[of];
      }
    }
  }
};

// R: the type of x.
template <typename W, typename R, typename Tile>
__global__ void __launch_bounds__(Tile::threads, 1) experts_fused_kernel(const __grid_constant__ FusedParams params) {
#ifdef KESTREL_HAS_WGMMA
  using Role = FusedRole<W, Tile>;
  constexpr bool fp8 = Role::fp8;
  const ExpertsParams& p = params.up;
  extern __shared__ char dynamic[];
  __shared__ uint64_t full[kFusedStages], empty[kFusedStages];
  __shared__ uint64_t hidden_full[2];  // the values of the cluster for every second item
  __shared__ float hidden_scale[2][Tile::tokens];
  __shared__ float row_scales[fp8 ? Tile::tokens * Tile::scales_of_row : 1];
  __shared__ unsigned bits_of_warps[Tile::warps + 1][kFusedExperts / 32];
  __shared__ int experts[kFusedChoices * Tile::tokens];
  const int num_stages = params.stages;
  const uint32_t stages = (ptx::shared_address(dynamic) + Tile::alignment - 1) / Tile::alignment * Tile::alignment;
  const int steps = (p.width * Role::element + kLineBytes - 1) / kLineBytes;
  const uint32_t x_tile = stages + num_stages * Tile::stage_bytes, hidden_tiles = x_tile + steps * Tile::x_bytes;
  const uint32_t hidden = hidden_tiles + 2 * Role::lines * Tile::x_bytes;   // [2][token][channel], float
  [[maybe_unused]] const uint32_t raw_x = hidden + 2 * Tile::hidden_bytes;  // FP8: some rows of x before quantisation
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int rank = blockIdx.x % Tile::cluster, clusters = gridDim.x / Tile::cluster;
  if (threadIdx.x == 0) {
    for (int s = 0; s < num_stages; ++s) {
      ptx::mbarrier_init(full + s, 1);
      ptx::mbarrier_init(empty + s, Tile::warps);
    }
    for (int i = 0; i < 2; ++i) ptx::mbarrier_init(hidden_full + i, 1);
    ptx::fence_mbarrier_init();
  }
  bits_of_warps[warp][lane] = 0;
  for (int i = threadIdx.x; i < steps * Tile::x_bytes / 16; i += Tile::threads) {  // rows of no token
    if (i / 8 % Tile::tokens >= p.tokens) ptx::store_shared(x_tile + i * 16, make_float4(0.f, 0.f, 0.f, 0.f));
  }
  if (warp == Tile::warps && lane == 0) {
    ptx::prefetch_tensor_map(params.w1);
    ptx::prefetch_tensor_map(params.w2);
  }
  __syncthreads();
  ptx::cluster_sync();
  const FusedRing<Tile> ring{stages, full, empty, num_stages};

  if (warp == Tile::warps) {
    pdl_wait();
    pdl_trigger();
    const ExpertSet set(p, bits_of_warps[warp]);
    const uint64_t policy = ptx::l2_policy(p.evict_first);
    Role loader{params, p, ring, steps, rank, lane};
    for (int item = blockIdx.x / Tile::cluster; item < set.distinct * params.blocks; item += clusters) {
      const FusedItem at(item, params.blocks, set);
      if (lane == 0) loader.load_item(at, policy);
      __syncwarp();
    }
    return;
  }

  pdl_wait();
  pdl_trigger();
  if constexpr (fp8) {
    quantise_x<R, Tile>(p, x_tile, raw_x, row_scales);
  } else {
    copy_x<Tile>(p, 0, p.tokens, steps * 8, [&](int n, int pack) {
      return x_tile + pack / 8 * Tile::x_bytes + n * kLineBytes + (pack % 8 ^ n % 8) * 16;
    });
  }
  for (int pair = threadIdx.x; pair < p.tokens * p.choices; pair += Tile::consumers) {
    const int token = pair / p.choices;
    experts[pair] = local_expert(p, p.topk_ids[token * p.ids_stride + (pair - token * p.choices)]);
  }
  const ExpertSet set(p, bits_of_warps[warp]);
  ptx::fence_proxy_async();
  Tile::barrier();

  FusedConsumer<W, Tile> consumer{{params, p, ring, steps, rank, lane}, warp, row_scales};
  int buffer = 0, hidden_phase = 0;
  for (int item = blockIdx.x / Tile::cluster; item < set.distinct * params.blocks; item += clusters) {
    const FusedItem at(item, params.blocks, set);
    const uint32_t values = hidden + buffer * Tile::hidden_bytes;
    const uint32_t hidden_tile = hidden_tiles + buffer * Role::lines * Tile::x_bytes;
    if (threadIdx.x == 0) ptx::mbarrier_arrive_expect_tx(hidden_full + buffer, Tile::hidden_bytes);
    consumer.multiply_up(at, x_tile, values, hidden_full + buffer);
    ptx::mbarrier_wait_cluster(hidden_full + buffer, hidden_phase);
    consumer.convert_hidden(values, hidden_tile, hidden_scale[buffer]);
    ptx::fence_proxy_async();
    const int its_pair = consumer.first_pair(experts, at.expert);
    Tile::barrier();
    consumer.multiply_down(at, hidden_tile, hidden_scale[buffer], its_pair);
    buffer ^= 1;
    hidden_phase ^= buffer ^ 1;
  }
#endif
}

// From L2, where the other CTAs' stores are; zeros if not `condition`. Without a branch.
__device__ __forceinline__ float2 load_if(bool condition, const float* from) {
  float2 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.f32 %0, 0f00000000;\nmov.f32 %1, 0f00000000;\n"
      "@p ld.global.cg.v2.f32 {%0, %1}, [%2];\n}"
      : "=f"(v.x), "=f"(v.y)
      : "l"(from), "r"(static_cast<int>(condition))
      : "memory");
  return v;
}

// The sum over blocks of channels, then over the choices of a token, in order. A warp adds up the blocks of a choice,
// or a part of many blocks.
template <typename R>
__global__ void __launch_bounds__(kFusedSumThreads)
    experts_fused_sum_kernel(const __grid_constant__ FusedParams params) {
  constexpr int warps = kFusedSumThreads / 32;
  const ExpertsParams& p = params.down;
  __shared__ float2 sums[warps][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int slices = (p.outputs + kFusedSumOutputs - 1) / kFusedSumOutputs;
  const int token = blockIdx.x / slices, output = (blockIdx.x - token * slices) * kFusedSumOutputs + 2 * lane;
  const bool inside = output < p.outputs;
  const int parts = params.blocks > kBlocksInFlight ? warps / p.choices : 1, choice = warp / parts;
  const int part_blocks = (params.blocks + parts - 1) / parts, first_block = warp % parts * part_blocks;
  const int blocks = min(part_blocks, params.blocks - first_block);  // may be negative
  // Routing and scales are older than the launch just before.
  const int* const ids = p.topk_ids + token * p.ids_stride;
  int expert = -1, source = choice;
  float weight = 0.f, scale[2] = {1.f, 1.f};
  if (choice < p.choices) {
    expert = local_expert(p, ids[choice]);
    weight = p.topk_weights[token * p.topk_weights_stride + choice];
    for (int j = choice - 1; j >= 0; --j) {
      if (local_expert(p, ids[j]) == expert) source = j;
    }
  }
  const float* block_scales = nullptr;
  if (expert >= 0 && p.scale_rank) {
    const float* of_expert = p.weight_scale_low + expert * p.scale_expert_stride;
    if (p.scale_rank == 3) {
      block_scales = of_expert + min(output, p.outputs - 1) / kScaleBlock * p.scale_row_stride + first_block;
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) scale[i] = of_expert[min(output + i, p.outputs - 1) * p.scale_row_stride];
    }
  }
  const float* const from =
      p.partial + ((int64_t{token} * p.choices + source) * params.blocks + first_block) * p.outputs + output;
  float total[2];
  // Twice: what the first time reads before the PDL wait is dropped, but its instructions are there the second time.
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
    if (round == 1) {
      pdl_wait();
      pdl_trigger();
    }
    float acc[2] = {};
#pragma unroll 1
    for (int b = 0; b < blocks; b += kBlocksInFlight) {
      float block_scale = 1.f;  // of block b + lane
      if (block_scales && lane < kBlocksInFlight && b + lane < blocks) block_scale = block_scales[b + lane];
      float2 values[kBlocksInFlight];
#pragma unroll
      for (int i = 0; i < kBlocksInFlight; ++i) {
        values[i] = load_if(expert >= 0 && inside && b + i < blocks, from + int64_t{b + i} * p.outputs);
      }
#pragma unroll
      for (int i = 0; i < kBlocksInFlight; ++i) {
        const float factor = __shfl_sync(0xffffffffu, block_scale, i);
        acc[0] = fmaf(values[i].x, factor, acc[0]);
        acc[1] = fmaf(values[i].y, factor, acc[1]);
      }
    }
    sums[warp][lane] = make_float2(weight * (acc[0] * scale[0]), weight * (acc[1] * scale[1]));
    if (expert < 0) sums[warp][lane] = make_float2(0.f, 0.f);
    __syncthreads();
    total[0] = total[1] = 0.f;
    for (int j = 0; j < p.choices * parts; ++j) {
      total[0] += sums[j][lane].x;
      total[1] += sums[j][lane].y;
    }
    __syncthreads();
  }
  if (warp || !inside) return;
  R* const out = reinterpret_cast<R*>(p.out + token * p.out_stride) + output;
  out[0] = from_float<R>(total[0]);
  out[1] = from_float<R>(total[1]);
}

}  // namespace kestrel::moe
