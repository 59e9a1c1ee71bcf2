// The launches of experts_tma.cu, for experts.cu.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>

#include "experts_params.cuh"

namespace kestrel::moe {

constexpr int64_t kLargest = int64_t{1} << 30;  // sizes and pairs are int in the kernels

constexpr int kTokensOfWgmma = 64;  // tokens of its smallest tile

// Whether the device runs experts_tma_kernel.
bool has_wgmma(DLDevice device);

// Launches experts_tma_kernel for aligned pairs in tiles of 64, 128 or 192 tokens (FP8: 64 or 128), or of 128 in
// clusters of 2 CTAs, which share the weights of two tiles (not FP8). Results have 16 bits, except those of a gated FP8
// projection, which are float32.
void launch_experts_tma(const ExpertsParams& p, Projection projection, DLDataType weight, int tokens, int cluster,
                        int64_t tiles, DLDevice device);

}  // namespace kestrel::moe
