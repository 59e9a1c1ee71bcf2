// Launches of experts_permute.cuh.
#include "experts_permute.cuh"

#include <kestrel/launch.h>
#include <kestrel/tensor.h>

#include "experts_launch.h"

namespace kestrel::moe {

int quant_row_warps(int64_t packs, int64_t rows, DLDevice device) {
  const int64_t enough = 2 * kQuantWarps * device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
  int warps = 1;
  while (warps < kQuantWarps && (packs > kQuantPacks * 32 * warps || rows * warps < enough)) warps *= 2;
  return warps;
}

void permute_rows(ExpertsParams* up, DLDataType dtype, int tile, char* codes, float* scale, const int* positions,
                  DLDevice device) {
  ExpertsPermuteParams p;
  p.rows.x = up->x;
  p.rows.x_stride = up->x_stride;
  p.rows.codes = codes;
  p.rows.scale = scale;
  p.rows.width = up->width;
  p.rows.rows = up->tokens;
  p.rows.early = true;
  // Half of the warps that quantise rows elsewhere: with more registers for a thread, they are one wave.
  p.rows.row_warps = quant_row_warps(up->width / 8, 2 * int64_t{up->tokens}, device);
  p.positions = positions;
  p.topk_ids = up->topk_ids;
  p.expert_map = up->expert_map;
  p.ids_stride = up->ids_stride;
  p.choices = up->choices;
  p.experts = up->experts;
  p.mapped_experts = up->mapped_experts;
  p.tile = tile;
  p.lines = (up->width + kLineBytes - 1) / kLineBytes;
  if (int64_t{up->sorted_length} * p.lines > kLargest) unsupported("more than 2^30 lines of 128 codes of x");
  const int rows_of_cta = kQuantWarps / p.rows.row_warps;
  const dim3 grid((up->tokens + rows_of_cta - 1) / rows_of_cta);
  const auto launch = [&](auto t) {
    using T = decltype(t);
    const auto kernel = up->x_blocks ? experts_permute_kernel<T, true> : experts_permute_kernel<T, false>;
    launch_pdl(kernel, grid, dim3(kQuantThreads), device, p);
  };
  if (same_dtype(dtype, kBFloat16)) {
    launch(__nv_bfloat16());
  } else {
    launch(__half());
  }
  up->x = codes;
  up->x_scale = scale;
  up->x_scale_stride = 1;
  up->tiled_x = true;
}

}  // namespace kestrel::moe
