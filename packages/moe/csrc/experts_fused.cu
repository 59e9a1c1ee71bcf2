// Launches of experts_fused_kernel and its sum.
#include "experts_fused.cuh"

#include <kestrel/launch.h>
#include <kestrel/tensor.h>
#include <kestrel/tensor_map.h>

#include <algorithm>

#include "experts_launch.h"

namespace kestrel::moe {

int64_t fused_blocks(int64_t inner) { return (inner + kScaleBlock - 1) / kScaleBlock; }

int64_t fused_scratch(int64_t pairs, int64_t inner, int64_t width) { return pairs * fused_blocks(inner) * width * 4; }

template <typename W>
constexpr CUtensorMapDataType fused_map_type() {
  if (std::is_same_v<W, __nv_bfloat16>) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return std::is_same_v<W, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

template <typename W, typename R, typename Tile>
void launch_fused_tile(const ExpertsParams& up, const ExpertsParams& down, DLDevice device) {
  constexpr auto kernel = experts_fused_kernel<W, R, Tile>;
  FusedParams params;
  params.up = up;
  params.down = down;
  params.blocks = static_cast<int>(fused_blocks(up.outputs));
  params.w1_step = up.expert_stride_low != 0;
  params.w2_step = down.expert_stride_low != 0;
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const int64_t width = up.width, inner = up.outputs, row = up.weight_stride;
  const int64_t experts = params.w1_step ? up.experts : 1;
  constexpr int64_t stride_limit = int64_t{1} << 40;  // of a tensor map
  if (row <= 0 || inner * row >= stride_limit || up.expert_stride_low >= stride_limit || down.weight_stride <= 0 ||
      down.weight_stride >= stride_limit / 16 || down.expert_stride_low >= stride_limit) {
    unsupported("weights with rows that coincide, or lie 64 GiB apart");
  }
  // [columns, 8 channels, half, groups of 8 channels, expert]: rows of the halves alternate by 8.
  const cuuint64_t sizes[5] = {size(width), 8, 2, size(inner / 8), size(experts)};
  const cuuint64_t strides[4] = {size(row), size(inner * row), size(8 * row),
                                 size(experts > 1 ? up.expert_stride_low : 8 * row)};
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(kLineBytes / sizeof(W)), 8, 2, Tile::my_channels / 8, 1};
  params.w1 = encode_map(up.weight_low, fused_map_type<W>(), sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B,
                         CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  params.w2 = grouped_rows_map(down.weight_low, fused_map_type<W>(), sizeof(W), params.w2_step ? down.experts : 1,
                               width, inner, down.expert_stride_low, down.weight_stride, Tile::rows / 16,
                               RowOrder::ascending, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  const int64_t lines = Tile::channels * sizeof(W) / kLineBytes;
  const int64_t steps = (width * sizeof(W) + kLineBytes - 1) / kLineBytes;
  const int64_t raw =
      sizeof(W) == 1 ? raw_rows(up.width, std::min(int{Tile::warps}, up.tokens)) * steps * 2 * kLineBytes : 0;
  const int64_t others = Tile::alignment + (steps + 2 * lines) * Tile::x_bytes + 2 * Tile::hidden_bytes + raw;
  // A CTA of the sum fits beside it, so that it is there when the last item ends.
  const int64_t limit = raise_shared_limit<kernel>(device) - 3 * 1024;
  constexpr int most = sizeof(W) == 1 ? kFusedStagesFp8 : kFusedStages;
  params.stages = static_cast<int>(std::min<int64_t>(most, (limit - others) / Tile::stage_bytes));
  if (params.stages < kFusedFewestStages) unsupported("rows that leave no memory for stages");
  const int64_t pairs = up.tokens * int64_t{up.choices};
  const int64_t clusters = std::clamp<int64_t>(
      pairs * params.blocks, 1, device_attribute(cudaDevAttrMultiProcessorCount, device.device_id) / Tile::cluster);
  launch_pdl(kernel, dim3(static_cast<unsigned>(clusters * Tile::cluster)), dim3(Tile::threads), device, params,
             static_cast<size_t>(others + params.stages * int64_t{Tile::stage_bytes}), Tile::cluster);
  const int64_t slices = (width + kFusedSumOutputs - 1) / kFusedSumOutputs;
  launch_pdl(experts_fused_sum_kernel<R>, dim3(static_cast<unsigned>(up.tokens * slices)), dim3(kFusedSumThreads),
             device, params);
}

template <typename W, typename R>
void launch_fused(const ExpertsParams& up, const ExpertsParams& down, int tokens, DLDevice device) {
  if (tokens == 8) return launch_fused_tile<W, R, FusedTile<8>>(up, down, device);
  if (tokens == 16) return launch_fused_tile<W, R, FusedTile<16>>(up, down, device);
  unsupported("token tiles of " + std::to_string(tokens) + " in one kernel for both projections");
}

void launch_experts_fused(const ExpertsParams& up, const ExpertsParams& down, DLDataType weight, int tile,
                          DLDevice device) {
  if (!has_wgmma(device)) unsupported("one kernel for both projections without wgmma");
  if (up.tokens > tile || up.choices > kFusedChoices || up.width > kFusedWidth || up.experts > kFusedExperts) {
    unsupported(
        "more tokens than the tile, 8 choices, 1024 experts or 8192 columns in one kernel for both projections");
  }
  if (same_dtype(weight, kBFloat16)) {
    launch_fused<__nv_bfloat16, __nv_bfloat16>(up, down, tile, device);
  } else if (same_dtype(weight, kFloat16)) {
    launch_fused<__half, __half>(up, down, tile, device);
  } else if (up.fp16_result) {
    launch_fused<__nv_fp8_e4m3, __half>(up, down, tile, device);
  } else {
    launch_fused<__nv_fp8_e4m3, __nv_bfloat16>(up, down, tile, device);
  }
}

}  // namespace kestrel::moe
