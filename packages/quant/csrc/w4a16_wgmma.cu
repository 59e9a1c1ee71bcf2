// Launches of w4a16_wgmma_kernel: the choice of a tile and of the slices of K.
#include "w4a16_wgmma.cuh"

#include <kestrel/tensor.h>
#include <kestrel/tensor_map.h>

#include <algorithm>

#include "w4a16_launch.h"

namespace kestrel::quant {

template <typename T, typename Tile>
void launch_tile(const W4Params& params, DLDevice device) {
  W4WideParams p;
  static_cast<W4Params&>(p) = params;
  constexpr auto kernel = w4a16_wgmma_kernel<T, Tile>;
  const int limit = raise_shared_limit<kernel>(device);
  const int row_tiles = (p.outputs + Tile::rows - 1) / Tile::rows, tiles = (p.tokens + Tile::tokens - 1) / Tile::tokens;
  const int sms = device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
  p.splits = std::max(1, std::min({sms / (row_tiles * tiles), kMaxSplits, p.steps}));
  const int steps = (p.steps + p.splits - 1) / p.splits;
  p.stages = std::min({(limit - Tile::alignment) / Tile::bytes, Tile::max_stages, steps});
  const auto map = [](const char* address, CUtensorMapDataType type, int64_t rows, int64_t columns, int64_t stride,
                      cuuint32_t box_rows, cuuint32_t box_columns) {
    const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride)};
    const cuuint32_t box[2] = {box_columns, box_rows};
    return encode_map(address, type, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE);
  };
  const auto rows_map = [&](const char* address) {
    return map(address, CU_TENSOR_MAP_DATA_TYPE_UINT16, p.groups, p.outputs, int64_t{p.outputs} * 2, Tile::groups,
               Tile::rows);
  };
  constexpr int kWords = kBlockBytes / 8;  // of a block
  p.x_map = matrix_map(p.x, true, p.tokens, p.width, p.x_stride, Tile::tokens);
  p.code_map = map(p.codes, CU_TENSOR_MAP_DATA_TYPE_UINT64, (p.outputs + 15) / 16, int64_t{p.blocks} * kWords,
                   int64_t{p.blocks} * kBlockBytes, Tile::rows / 16, 2 * kWords);
  p.scale_map = rows_map(p.scales);
  p.zero_map = p.zeros ? rows_map(p.zeros) : p.scale_map;
  const int bytes = std::max(p.stages * Tile::bytes, Tile::sum_bytes) + Tile::alignment;
  launch_slices<T>(kernel, p, row_tiles, tiles, Tile::threads, bytes, device);
}

template <typename T, int GROUP>
void launch_group(const W4Params& p, DLDevice device) {
  if (p.tokens > 128) return launch_tile<T, W4WideTile<128, GROUP, Scaled::weights>>(p, device);
  if (p.tokens <= 16) return launch_tile<T, W4WideTile<16, GROUP, Scaled::sums>>(p, device);
  if (p.tokens <= 32) return launch_tile<T, W4WideTile<32, GROUP, Scaled::sums>>(p, device);
  launch_tile<T, W4WideTile<64, GROUP, Scaled::sums>>(p, device);
}

template <typename T>
void launch_type(const W4Params& p, DLDevice device) {
  if (p.group == 32) return launch_group<T, 32>(p, device);
  if (p.group == 64) return launch_group<T, 64>(p, device);
  launch_group<T, 128>(p, device);
}

void launch_w4a16_wgmma(const W4Params& p, DLDataType dtype, DLDevice device) {
  same_dtype(dtype, kBFloat16) ? launch_type<__nv_bfloat16>(p, device) : launch_type<__half>(p, device);
}

}  // namespace kestrel::quant
