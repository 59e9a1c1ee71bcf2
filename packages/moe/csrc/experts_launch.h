// The launches of other files, for experts.cu.
#pragma once

#include <dlpack/dlpack.h>
#include <kestrel/tensor.h>

#include <cstdint>

#include "experts_params.cuh"

namespace kestrel::moe {

constexpr int64_t kLargest = int64_t{1} << 30;  // sizes and pairs are int in the kernels

// Tokens of the smallest tile of the wgmma kernels; of FP8 layers, and of others.
constexpr int kTokensOfWgmmaFp8 = 32, kTokensOfWgmma = 64;

// Whether the device runs the wgmma kernels.
bool has_wgmma(DLDevice device);

// Whether fused_experts runs them for aligned token tiles of this size.
inline bool takes_wgmma(int64_t tile, bool fp8, DLDevice device) {
  return tile >= (fp8 ? kTokensOfWgmmaFp8 : kTokensOfWgmma) && has_wgmma(device);
}

// Warps for each row that is quantised: one, more for long rows and for few of them.
int quant_row_warps(int64_t packs, int64_t rows, DLDevice device);

// Quantises the rows of x into the tiles of pipeline stages of the up projection, and points it to them. dtype: of x,
// 16 bits. positions: of the pairs.
void permute_rows(ExpertsParams* up, DLDataType dtype, int tile, char* codes, float* scale, const int* positions,
                  DLDevice device);

// Launches a projection by the wgmma kernels for aligned pairs in tiles of 64 or 128 tokens, or of 128 in clusters of 2
// CTAs, which share the weights of two tiles. FP8 with x in tiles: experts_fp8_kernel, in clusters.
void launch_experts_tma(const ExpertsParams& p, Projection projection, DLDataType weight, int tokens, int cluster,
                        int64_t tiles, DLDevice device);

// Launches both projections as one kernel, in tiles of 64, 128 or 160 tokens, FP8 of 32, 64 or 128: up.ready counts the
// signals of each token tile, zeroed. FP8 tiles of 128: x in tiles.
void launch_experts_both(const ExpertsParams& up, const ExpertsParams& down, DLDataType weight, int tokens,
                         int64_t tiles, DLDevice device);

// Bytes of the results that experts_fused_kernel keeps apart: [pairs, blocks of channels of the hidden layer, Hd],
// float.
int64_t fused_scratch(int64_t pairs, int64_t inner, int64_t width);

// Launches experts_fused_kernel, which runs both projections, and the sum. Hopper; tile: 8 or 16, the most tokens.
void launch_experts_fused(const ExpertsParams& up, const ExpertsParams& down, DLDataType weight, int tile,
                          DLDevice device);

// The alignment of fused_experts, see moe_align.cu.
void align_for_experts(TensorView topk_ids, AnyView num_experts, AnyView block_size, TensorView sorted_token_ids,
                       TensorView expert_ids, TensorView num_tokens_post_pad, OptionalTensor expert_map,
                       OptionalTensor positions, int64_t local_experts);

}  // namespace kestrel::moe
