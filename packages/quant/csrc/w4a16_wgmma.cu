// Launches of w4a16_wgmma_kernel: the choice of a tile and of the slices of K.
#include "w4a16_wgmma.cuh"

#include <kestrel/tensor.h>
#include <kestrel/tensor_map.h>

#include <algorithm>

#include "w4a16_launch.h"

namespace kestrel::quant {

template <typename T, typename Tile>
void launch_wide_tile(const W4Params& params, DLDevice device) {
  W4WideParams p;
  static_cast<W4Params&>(p) = params;
  constexpr auto kernel = w4a16_wgmma_kernel<T, Tile>;
  const int limit = raise_shared_limit<kernel>(device);
  const int tiles = (p.tokens + Tile::tokens - 1) / Tile::tokens;
  const int sms = device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
  p.row_tiles = (p.outputs + Tile::rows - 1) / Tile::rows;
  p.steps = (p.width + Tile::step - 1) / Tile::step;
  p.splits = std::max(1, std::min({sms / (p.row_tiles * tiles), kMaxSplits, p.steps}));
  p.cluster = p.splits % 2 ? 1 : 2;
  p.slices = p.splits / p.cluster;
  if (p.slices > 1 && p.partial_floats < int64_t{p.slices} * tiles * Tile::tokens * p.row_tiles * Tile::rows) {
    unsupported("too little scratch memory");
  }
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
    return map(address, CU_TENSOR_MAP_DATA_TYPE_UINT16, p.groups, p.outputs, int64_t{p.outputs} * 2,
               Tile::groups_of_part, Tile::rows);
  };
  constexpr int kWords = kBlockBytes / 8;  // of a block
  p.x_map = matrix_map(p.x, true, p.tokens, p.width, p.x_stride, Tile::tokens);
  p.code_map = map(p.codes, CU_TENSOR_MAP_DATA_TYPE_UINT64, (p.outputs + 15) / 16, int64_t{p.blocks} * kWords,
                   int64_t{p.blocks} * kBlockBytes, Tile::rows / 16, kStep / kBlock * kWords);
  p.scale_map = rows_map(p.scales);
  p.zero_map = p.zeros ? rows_map(p.zeros) : p.scale_map;
  const int bytes = std::max(p.stages * Tile::bytes, p.cluster > 1 ? Tile::exchange_bytes : 0) + Tile::alignment;
  launch_pdl(kernel, dim3(p.row_tiles * p.splits, tiles), dim3(Tile::threads), device, p, bytes, p.cluster);
  if (p.slices == 1) return;
  launch_pdl(w4a16_wgmma_sum_kernel<T, Tile>, dim3(p.row_tiles * Tile::fragments * Tile::warpgroups, tiles), dim3(128),
             device, p);
}

template <typename T, int GROUP>
void launch_wide_group(const W4Params& p, DLDevice device) {
  if (p.tokens > 64) return launch_wide_tile<T, W4WideTile<128, GROUP, 2, 2, 128, 1>>(p, device);
  launch_wide_tile<T, W4WideTile<64, GROUP, 1, 4, 256, 2>>(p, device);
}

template <typename T>
void launch_wide(const W4Params& p, DLDevice device) {
  if (p.group == 32) return launch_wide_group<T, 32>(p, device);
  if (p.group == 64) return launch_wide_group<T, 64>(p, device);
  launch_wide_group<T, 128>(p, device);
}

void launch_w4a16_wgmma(const W4Params& p, DLDataType dtype, DLDevice device) {
  same_dtype(dtype, kBFloat16) ? launch_wide<__nv_bfloat16>(p, device) : launch_wide<__half>(p, device);
}

}  // namespace kestrel::quant
