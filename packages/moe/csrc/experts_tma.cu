// Launches of experts_tma_kernel and experts_fp8_kernel.
#include "experts_fp8.cuh"
#include "experts_tma.cuh"

#include <kestrel/launch.h>
#include <kestrel/tensor.h>
#include <kestrel/tensor_map.h>

#include <algorithm>

#include "experts_launch.h"

namespace kestrel::moe {

bool has_wgmma(DLDevice device) {
  return KESTREL_EXPERTS_MMA_SYNC == 0 && device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id) == 9 &&
         device_attribute(cudaDevAttrComputeCapabilityMinor, device.device_id) == 0;
}

template <typename W>
constexpr CUtensorMapDataType map_type() {
  if (std::is_same_v<W, __nv_bfloat16>) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return std::is_same_v<W, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

// Work items of a projection.
template <bool UP, typename Tile>
int64_t count_items(const ExpertsParams& p, int64_t tiles) {
  constexpr int channels = UP ? Tile::half_rows : Tile::rows;
  const int64_t items = (tiles + Tile::cluster - 1) / Tile::cluster * ((p.outputs + channels - 1) / channels);
  if (items > kLargest / Tile::cluster) unsupported("more than 2^30 tiles of tokens and outputs");
  return items;
}

template <typename W, bool UP, typename Tile>
TmaParams tma_params(const ExpertsParams& p, RowOrder order) {
  constexpr int64_t stride_limit = int64_t{1} << 40;  // of a tensor map
  if (p.weight_stride <= 0 || p.weight_stride >= stride_limit / 16 || p.expert_stride_low >= stride_limit ||
      p.expert_stride_high >= stride_limit) {
    unsupported("weights with rows that coincide, or lie 64 GiB apart");
  }
  TmaParams params;
  params.even_first = order == RowOrder::even_first;
  const auto map = [&](const char* weight, int64_t expert_stride) {
    return grouped_rows_map(weight, map_type<W>(), sizeof(W), expert_stride ? p.experts : 1, p.outputs, p.width,
                            expert_stride, p.weight_stride, Tile::half_groups, order,
                            sizeof(W) == 1 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
  };
  params.low = map(p.weight_low, p.expert_stride_low);
  params.high = UP ? map(p.weight_high, p.expert_stride_high) : params.low;
  params.low_step = p.expert_stride_low != 0;
  params.high_step = p.expert_stride_high != 0;
  params.steps = static_cast<int>((p.width * int64_t{sizeof(W)} + kLineBytes - 1) / kLineBytes);
  params.p = p;
  return params;
}

// A CTA, or a cluster, for each SM, but no more than there are work items.
template <typename Tile>
dim3 grid_of(int64_t items, DLDevice device) {
  const int64_t wave = device_attribute(cudaDevAttrMultiProcessorCount, device.device_id) / Tile::cluster;
  return dim3(static_cast<unsigned>(std::clamp<int64_t>(items, 1, wave) * Tile::cluster));
}

template <typename W, bool UP, typename Tile, auto KERNEL>
void launch_kernel(const ExpertsParams& p, RowOrder order, int64_t tiles, DLDevice device) {
  raise_shared_limit<KERNEL, Tile::shared_bytes>(device);
  launch_pdl(KERNEL, grid_of<Tile>(count_items<UP, Tile>(p, tiles), device), dim3(Tile::threads), device,
             tma_params<W, UP, Tile>(p, order), Tile::shared_bytes, Tile::cluster);
}

// signals: of a work item of the up projection.
template <typename W, typename Tile, auto KERNEL>
void launch_both(const ExpertsParams& up, const ExpertsParams& down, int signals, RowOrder up_order,
                 RowOrder down_order, int64_t tiles, DLDevice device) {
  raise_shared_limit<KERNEL, Tile::shared_bytes>(device);
  TmaBothParams params{tma_params<W, true, Tile>(up, up_order), tma_params<W, false, Tile>(down, down_order)};
  params.down.p.ready_signals = (up.outputs + Tile::half_rows - 1) / Tile::half_rows * signals;
  const int64_t items = std::max(count_items<true, Tile>(up, tiles), count_items<false, Tile>(down, tiles));
  launch_pdl(KERNEL, grid_of<Tile>(items, device), dim3(Tile::threads), device, params, Tile::shared_bytes);
}

template <typename W, typename R, int TOKENS>
void launch_both(const ExpertsParams& up, const ExpertsParams& down, int64_t tiles, DLDevice device) {
  using Tile = TmaTile<TOKENS, 1>;
  constexpr bool fp8 = sizeof(W) == 1;
  launch_both<W, Tile, experts_tma_both_kernel<W, R, Tile>>(
      up, down, fp8 ? 1 : 2, fp8 ? RowOrder::even_first : RowOrder::ascending,
      std::is_same_v<R, __half> && down.partial ? RowOrder::even_first : RowOrder::ascending, tiles, device);
}

template <typename W, typename R, Projection PROJECTION, int TOKENS, int CLUSTER>
void launch(const ExpertsParams& p, int64_t tiles, DLDevice device) {
  using Tile = TmaTile<TOKENS, CLUSTER>;
  constexpr bool up = PROJECTION == Projection::up;
  const bool even_first = up ? sizeof(W) == 1 && p.gate != Gate::none : std::is_same_v<R, __half> && p.partial;
  launch_kernel<W, up, Tile, experts_tma_kernel<W, R, PROJECTION, Tile>>(
      p, even_first ? RowOrder::even_first : RowOrder::ascending, tiles, device);
}

template <typename R, int CLUSTER>
void launch_fp8(const ExpertsParams& p, Projection projection, int64_t tiles, DLDevice device) {
  using W = __nv_fp8_e4m3;
  using Tile = Fp8Tile<CLUSTER>;
  if (projection == Projection::up) {
    launch_kernel<W, true, Tile, experts_fp8_kernel<R, Projection::up, Tile>>(p, RowOrder::ascending, tiles, device);
  } else {
    launch_kernel<W, false, Tile, experts_fp8_kernel<R, Projection::down, Tile>>(p, RowOrder::ascending, tiles, device);
  }
}

template <typename W, typename R, int TOKENS, int CLUSTER>
void launch_projection(const ExpertsParams& p, Projection projection, int64_t tiles, DLDevice device) {
  if (projection == Projection::up) {
    launch<W, R, Projection::up, TOKENS, CLUSTER>(p, tiles, device);
  } else {
    launch<W, R, Projection::down, TOKENS, CLUSTER>(p, tiles, device);
  }
}

template <typename W, typename R>
void launch_tile(const ExpertsParams& p, Projection projection, int tokens, int cluster, int64_t tiles,
                 DLDevice device) {
  if constexpr (std::is_same_v<W, __nv_fp8_e4m3>) {
    const bool gated = projection == Projection::up && p.gate != Gate::none;
    if (gated && p.tiled_x != (tokens == Fp8Tile<1>::tokens)) {
      unsupported("tiles of 128 tokens without the positions of their pairs, or others with them");
    }
    if (p.tiled_x && tokens == Fp8Tile<1>::tokens) {
      if (cluster != 2) unsupported("one projection in tiles of 128 tokens without clusters");
      return launch_fp8<R, 2>(p, projection, tiles, device);
    }
  }
  if (cluster == 1 && tokens == 64) return launch_projection<W, R, 64, 1>(p, projection, tiles, device);
  if (cluster == 1 && tokens == 128) return launch_projection<W, R, 128, 1>(p, projection, tiles, device);
  if constexpr (!std::is_same_v<W, __nv_fp8_e4m3>) {  // FP8: two accumulators are too many registers, clusters no gain
    if (cluster == 2 && tokens == 128) return launch_projection<W, R, 128, 2>(p, projection, tiles, device);
  }
  unsupported("token tiles of " + std::to_string(tokens) + " in clusters of " + std::to_string(cluster));
}

template <typename W, typename R>
void launch_both_tile(const ExpertsParams& up, const ExpertsParams& down, int tokens, int64_t tiles, DLDevice device) {
  if constexpr (std::is_same_v<W, __nv_fp8_e4m3>) {
    using Tile = Fp8Tile<1>;
    if (tokens == 32) return launch_both<W, R, 32>(up, down, tiles, device);
    if (tokens == 64) return launch_both<W, R, 64>(up, down, tiles, device);
    if (!up.tiled_x) unsupported("tiles of 128 tokens without the positions of their pairs");
    if (tokens == Tile::tokens) {
      return launch_both<W, Tile, experts_fp8_both_kernel<R, Tile>>(up, down, Tile::consumers / 32, RowOrder::ascending,
                                                                    RowOrder::ascending, tiles, device);
    }
  } else {
    if (tokens == 64) return launch_both<W, R, 64>(up, down, tiles, device);
    if (tokens == 128) return launch_both<W, R, 128>(up, down, tiles, device);
    if (tokens == 160) return launch_both<W, R, 160>(up, down, tiles, device);
  }
  unsupported("both projections in one launch in tiles of " + std::to_string(tokens));
}

void launch_experts_both(const ExpertsParams& up, const ExpertsParams& down, DLDataType weight, int tokens,
                         int64_t tiles, DLDevice device) {
  if (same_dtype(weight, kBFloat16)) {
    launch_both_tile<__nv_bfloat16, __nv_bfloat16>(up, down, tokens, tiles, device);
  } else if (same_dtype(weight, kFloat16)) {
    launch_both_tile<__half, __half>(up, down, tokens, tiles, device);
  } else if (up.fp16_result) {
    launch_both_tile<__nv_fp8_e4m3, __half>(up, down, tokens, tiles, device);
  } else {
    launch_both_tile<__nv_fp8_e4m3, __nv_bfloat16>(up, down, tokens, tiles, device);
  }
}

void launch_experts_tma(const ExpertsParams& p, Projection projection, DLDataType weight, int tokens, int cluster,
                        int64_t tiles, DLDevice device) {
  if (same_dtype(weight, kBFloat16)) {
    launch_tile<__nv_bfloat16, __nv_bfloat16>(p, projection, tokens, cluster, tiles, device);
  } else if (same_dtype(weight, kFloat16)) {
    launch_tile<__half, __half>(p, projection, tokens, cluster, tiles, device);
  } else if (p.fp16_result) {
    launch_tile<__nv_fp8_e4m3, __half>(p, projection, tokens, cluster, tiles, device);
  } else {
    launch_tile<__nv_fp8_e4m3, __nv_bfloat16>(p, projection, tokens, cluster, tiles, device);
  }
}

}  // namespace kestrel::moe
