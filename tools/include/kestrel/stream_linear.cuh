// A linear layer of up to 64 tokens on Hopper that streams its weight: epilogue(x W').
//
// A tile is 128 outputs by TOKENS tokens; the CTAs of a cluster each sum a part of K. Two CTAs can share an SM, so that
// one loads while the other starts or ends. One producer thread loads 64 columns of K per stage (TMA), the first stages
// of the weight before the PDL wait. Two consumer warpgroups multiply 64 weight rows each (wgmma, weights as operand
// A). Each CTA of the cluster owns some groups of eight outputs: it receives their sums from all CTAs through DSMEM and
// adds them up in the order of K.
#pragma once

#include <kestrel/launch.h>
#include <kestrel/tensor_map.h>
#include <kestrel/pdl.cuh>
#include <kestrel/ptx/cluster.cuh>
#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/named_barrier.cuh>
#include <kestrel/ptx/shared.cuh>
#include <kestrel/ptx/tma.cuh>
#include <kestrel/ptx/wgmma.cuh>

#include <algorithm>

namespace kestrel {

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
  static constexpr int group_bytes = 8 * (tokens + 8) * 4;  // of the sums of a group; padded against bank conflicts
  static constexpr int max_splits = 8;
  static_assert(shared_bytes <= 113 * 1024, "two CTAs share an SM");
  // Sums to send, and those received: of each split, ceil(groups / splits) groups at most.
  static_assert((2 * groups + max_splits) * group_bytes <= stages * stage_bytes, "in the memory of the stages");
};

// x [tokens, K] and weight [outputs, K], outputs a multiple of 8. The epilogue's finish(h, token, output) takes eight
// sums of a token and stores their results.
template <typename Epilogue>
struct StreamParams {
  // Boxes of a tile, and of the weight's last, incomplete tile. TMA is slow for rows outside a matrix.
  CUtensorMap x, weight, weight_tail;
  int x_rows = 0, weight_tail_rows = 0;  // of these boxes
  Epilogue epilogue;
  int tokens = 0, outputs = 0;
  int steps = 0;  // K in steps of 64
  int token_tiles = 0;
  int splits = 1;  // CTAs of a cluster
};

template <typename T, int TOKENS, typename Epilogue>
__global__ void __launch_bounds__(StreamTile<TOKENS>::threads, 2)
    stream_linear_kernel(const __grid_constant__ StreamParams<Epilogue> p) {
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
    ptx::prefetch_tensor_map(p.weight);
    ptx::prefetch_tensor_map(p.weight_tail);
    ptx::prefetch_tensor_map(p.x);
    for (int s = 0; s < S; ++s) {
      ptx::mbarrier_init(full + s, 1);
      ptx::mbarrier_init(empty + s, 2);
    }
    ptx::mbarrier_init(&received, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(&received, p.splits * groups * Tile::group_bytes);
  }
  __syncthreads();

  // -- the producer warp: one thread loads; full[stage] counts its bytes --

  if (threadIdx.x >= Tile::consumers) {
    if (threadIdx.x == Tile::consumers) {
      const bool whole = p.outputs - first_output >= Tile::outputs;
      const CUtensorMap& weight = whole ? p.weight : p.weight_tail;
      const int bytes = ((whole ? Tile::outputs : p.weight_tail_rows) + p.x_rows) * Tile::line_bytes;
      const auto load_weight = [&](int stage, int step) {
        ptx::mbarrier_arrive_expect_tx(full + stage, bytes);
        ptx::tma_load(ring + stage * Tile::stage_bytes, weight, (first_step + step) * 64, first_output, full + stage);
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
      for (int barrier = 0; barrier < 2; ++barrier) {
        ptx::cluster_arrive_relaxed();
        ptx::cluster_wait();
      }
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

  // -- sums go to the CTAs that own their outputs --
  //
  // In the memory of the stages: those to send as [output][token], those received as [split][output][token].

  const uint32_t sums = ring, others = ring + Tile::groups * Tile::group_bytes;
  if (p.splits > 1) {
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();  // all CTAs of the cluster have read their stages
  } else {
    ptx::named_barrier(1, Tile::consumers);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t to =
        sums + (warp * 2 + half) * Tile::group_bytes + lane / 4 * (Tile::group_bytes / 8) + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < Tile::tokens / 8; ++j) {
      ptx::store_shared(to + j * 32, make_float2(acc[4 * j + 2 * half], acc[4 * j + 2 * half + 1]));
    }
  }
  if (p.splits > 1) ptx::fence_proxy_async();
  ptx::named_barrier(1, Tile::consumers);
  if (p.splits > 1) {
    const int owned = min(groups_of_cta, Tile::groups - static_cast<int>(threadIdx.x) * groups_of_cta);
    if (threadIdx.x < p.splits && owned > 0) {
      const uint32_t to = ptx::map_shared(others + split * groups_of_cta * Tile::group_bytes, threadIdx.x);
      ptx::copy_shared_async(to, sums + threadIdx.x * groups_of_cta * Tile::group_bytes, owned * Tile::group_bytes,
                             ptx::map_shared(ptx::shared_address(&received), threadIdx.x));
    }
    __syncwarp();
    ptx::mbarrier_wait_cluster(&received, 0);
    ptx::cluster_arrive_relaxed();
  }

  // -- epilogue: a thread finishes eight outputs of a token --

  const int tokens = min(Tile::tokens, p.tokens - first_token);
  for (int at = threadIdx.x; at < (groups + 1) / 2 * 2 * Tile::tokens; at += Tile::consumers) {
    const int token = at / 2 % Tile::tokens, group = at / (2 * Tile::tokens) * 2 + at % 2;
    const int output = first_output + (split * groups_of_cta + group) * 8;
    if (token >= tokens || group >= groups || output >= p.outputs) continue;
    float h[8] = {};
    for (int s = 0; s < p.splits; ++s) {
      const uint32_t from =
          (p.splits > 1 ? others : sums) + (s * groups_of_cta + group) * Tile::group_bytes + token * 4;
#pragma unroll
      for (int i = 0; i < 8; ++i) h[i] += ptx::load_shared(from + i * (Tile::group_bytes / 8));
    }
    p.epilogue.finish(h, first_token + token, output);
  }
  __syncwarp();
  if (p.splits > 1) ptx::cluster_wait();  // no CTA exits before its sums have arrived
#endif
}

// Addresses and row strides, in bytes, are multiples of 16; strides of x and the weight are at least a row's bytes.
struct StreamOperands {
  const char *x = nullptr, *weight = nullptr;
  int64_t x_stride = 0, weight_stride = 0;
  int tokens = 0, outputs = 0, width = 0;  // T, N, K
};

// The splits of K: as many as run at once on an H200, with two steps each. Clusters of five and seven leave SMs idle.
inline int stream_splits(int outputs, int width) {
  constexpr int ctas = 200;
  const int tiles = (outputs + 127) / 128, steps = (width + 63) / 64;
  for (int splits : {8, 6, 4, 3, 2}) {
    if (tiles * splits <= ctas && 2 * splits <= steps) return splits;
  }
  return 1;
}

// Whether clusters surely run at once with an SM for each CTA. A cluster lies in a GPC, which has 14 to 18 SMs: sizes
// that are no powers of two leave more of them over.
inline bool stream_has_sms(int64_t clusters, int splits, int sms) {
  const bool power_of_two = (splits & (splits - 1)) == 0;
  return splits > 1 && clusters * splits <= (power_of_two ? sms * 7 / 8 : sms * 3 / 4);
}

// The splits of 17 to 32 tokens behind a short kernel: CTAs with an SM each, if they fill 5/8 of the SMs.
inline int stream_splits_behind(int outputs, int width, int sms) {
  const int tiles = (outputs + 127) / 128, steps = (width + 63) / 64;
  for (int splits : {8, 6, 4, 3, 2}) {
    if (stream_has_sms(tiles, splits, sms) && 2 * splits <= steps && tiles * splits >= sms * 5 / 8) return splits;
  }
  return stream_splits(outputs, width);
}

template <typename T, int TOKENS, typename Epilogue>
void launch_stream_tile(const StreamOperands& of, const Epilogue& epilogue, int splits, DLDevice device) {
  using Tile = StreamTile<TOKENS>;
  constexpr auto kernel = stream_linear_kernel<T, TOKENS, Epilogue>;
  constexpr bool bf16 = std::is_same_v<T, __nv_bfloat16>;
  StreamParams<Epilogue> p;
  p.x_rows = std::min(Tile::tokens, (of.tokens + 7) / 8 * 8);
  p.x = matrix_map(of.x, bf16, of.tokens, of.width, of.x_stride, p.x_rows);
  const auto map_weight = [&](int rows) {
    return matrix_map(of.weight, bf16, of.outputs, of.width, of.weight_stride, rows);
  };
  p.weight = map_weight(Tile::outputs);
  p.weight_tail_rows = (of.outputs % Tile::outputs + 7) / 8 * 8;
  p.weight_tail = p.weight_tail_rows ? map_weight(p.weight_tail_rows) : p.weight;
  p.epilogue = epilogue;
  p.tokens = of.tokens;
  p.outputs = of.outputs;
  p.steps = (of.width + 63) / 64;
  p.token_tiles = (of.tokens + Tile::tokens - 1) / Tile::tokens;
  p.splits = splits;
  const int64_t tiles = int64_t{p.token_tiles} * ((of.outputs + Tile::outputs - 1) / Tile::outputs);
  if (tiles > (int64_t{1} << 27)) unsupported("more than 2^27 tiles");
  const int most = raise_shared_limit<kernel>(device);
  int bytes = Tile::shared_bytes;
  // CTAs for which there are SMs enough take more than half of one each: a launch that finds some SMs free before
  // others would put two on one of those. Calls that are too short for that to cost time start beside the next launch.
  const int sms = device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
  const bool shared = TOKENS == 64 || (TOKENS == 16 && p.steps < splits * Tile::stages);
  if (!shared && stream_has_sms(tiles, splits, sms)) bytes = std::max(bytes, most / 2 + 1024);
  launch_pdl(kernel, dim3(static_cast<unsigned>(tiles * splits)), dim3(Tile::threads), device, p, bytes, splits);
}

template <typename T, typename Epilogue>
void launch_stream_linear(const StreamOperands& of, const Epilogue& epilogue, int splits, DLDevice device) {
  if (of.tokens <= 16) return launch_stream_tile<T, 16>(of, epilogue, splits, device);
  if (of.tokens <= 32) return launch_stream_tile<T, 32>(of, epilogue, splits, device);
  return launch_stream_tile<T, 64>(of, epilogue, splits, device);
}

}  // namespace kestrel
