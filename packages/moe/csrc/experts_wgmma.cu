// Launches of experts_wgmma_kernel.
#include "experts_wgmma.cuh"

#include <kestrel/launch.h>
#include <kestrel/tensor.h>

#include <algorithm>

#include "experts_launch.h"

namespace kestrel::moe {

bool has_wgmma(DLDevice device) {
  return device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id) == 9 &&
         device_attribute(cudaDevAttrComputeCapabilityMinor, device.device_id) == 0;
}

template <typename W, typename R, Projection PROJECTION, int TOKENS>
void launch(const ExpertsParams& p, int64_t tiles, DLDevice device) {
  using Tile = WgmmaTile<TOKENS>;
  constexpr int channels = PROJECTION == Projection::up ? Tile::rows / 2 : Tile::rows;
  constexpr auto kernel = experts_wgmma_kernel<W, R, PROJECTION, Tile>;
  raise_shared_limit<kernel, Tile::shared_bytes>(device);
  const int64_t items = tiles * ((p.outputs + channels - 1) / channels);
  if (items > kLargest) unsupported("more than 2^30 tiles of tokens and outputs");
  const int64_t wave = device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
  launch_pdl(kernel, dim3(static_cast<unsigned>(std::clamp<int64_t>(items, 1, wave))), dim3(Tile::threads), device, p,
             Tile::shared_bytes);
}

template <typename W, typename R, int TOKENS>
void launch_projection(const ExpertsParams& p, Projection projection, int64_t tiles, DLDevice device) {
  if (projection == Projection::up) {
    launch<W, R, Projection::up, TOKENS>(p, tiles, device);
  } else {
    launch<W, R, Projection::down, TOKENS>(p, tiles, device);
  }
}

template <typename W, typename R>
void launch_tile(const ExpertsParams& p, Projection projection, int tokens, int64_t tiles, DLDevice device) {
  if (tokens == 64) return launch_projection<W, R, 64>(p, projection, tiles, device);
  if (tokens == 128) return launch_projection<W, R, 128>(p, projection, tiles, device);
  if constexpr (!std::is_same_v<W, __nv_fp8_e4m3>) {  // two accumulators of 256 tokens are too many registers
    if (tokens == 256) return launch_projection<W, R, 256>(p, projection, tiles, device);
  }
  unsupported("token tiles of " + std::to_string(tokens));
}

void launch_experts_wgmma(const ExpertsParams& p, Projection projection, DLDataType weight, int tokens, int64_t tiles,
                          DLDevice device) {
  if (same_dtype(weight, kBFloat16)) {
    launch_tile<__nv_bfloat16, __nv_bfloat16>(p, projection, tokens, tiles, device);
  } else if (same_dtype(weight, kFloat16)) {
    launch_tile<__half, __half>(p, projection, tokens, tiles, device);
  } else if (p.fp16_result) {
    launch_tile<__nv_fp8_e4m3, __half>(p, projection, tokens, tiles, device);
  } else {
    launch_tile<__nv_fp8_e4m3, __nv_bfloat16>(p, projection, tokens, tiles, device);
  }
}

}  // namespace kestrel::moe
