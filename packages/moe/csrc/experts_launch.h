// The launches of experts_wgmma.cu, for experts.cu.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>

#include "experts_params.cuh"

namespace kestrel::moe {

constexpr int64_t kLargest = int64_t{1} << 30;  // sizes and pairs are int in the kernels

constexpr int kTokensOfWgmma = 64;  // tokens of its smallest tile

// Whether the device runs experts_wgmma_kernel.
bool has_wgmma(DLDevice device);

// Launches experts_wgmma_kernel for aligned pairs in tiles of 64, 128 or 256 tokens (FP8: 64 or 128). Results have 16
// bits, except those of a gated FP8 projection, which are float32.
void launch_experts_wgmma(const ExpertsParams& p, Projection projection, DLDataType weight, int tokens, int64_t tiles,
                          DLDevice device);

// The same by experts_tma_kernel, in tiles of 64 or 128 tokens. cluster: two CTAs share the weights of two tiles.
void launch_experts_tma(const ExpertsParams& p, Projection projection, DLDataType weight, int tokens, bool cluster,
                        int64_t tiles, DLDevice device);

}  // namespace kestrel::moe
