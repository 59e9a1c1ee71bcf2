// What the kernels of routed experts share: their parameters and the gate.
#pragma once

#include <cstdint>

#include "activation.cuh"

// For tests of the other architectures' kernels on Hopper: a build with 1 multiplies by mma.sync alone, with 2 also in
// the tiles for 99 KB of shared memory.
#ifndef KESTREL_EXPERTS_MMA_SYNC
#define KESTREL_EXPERTS_MMA_SYNC 0
#endif

namespace kestrel::moe {

constexpr int kMaxPairsInKernel = 64;  // the most (token, choice) pairs that each CTA groups by expert itself
constexpr int kLineBytes = 128;        // bytes of K per row and pipeline stage: 64 elements of 16 bits, 128 of FP8
constexpr int kScaleBlock = 128;       // rows and columns of a weight that share a block scale
constexpr int kWidthQuantised = 3072;  // the longest rows that the CTAs of a projection quantise themselves

enum class Projection { up, down };
enum class Gate { none, gelu_residual, silu_and_mul, gelu_and_mul };  // none: both halves are written as they are

struct ExpertsParams {
  const char* x = nullptr;  // up: [T, K]; down: [pairs, K]
  // up: the activated half of w1 and the other one. down: w2 from its first and from its ninth row on; experts_kernel
  // takes eight MMA rows from each in turn. The TMA kernels read w2 through weight_low alone.
  const char* weight_low = nullptr;
  const char* weight_high = nullptr;
  char* out = nullptr;
  float* partial = nullptr;             // down: weighted results before the sum over choices, [pairs, N]
  unsigned* arrivals = nullptr;         // counters [row slices of down], zeroed by up; null: another kernel sums
  const float* topk_weights = nullptr;  // [T, choices]
  const int* topk_ids = nullptr;        // [T, choices]
  const int* expert_map = nullptr;
  const int* sorted_pairs = nullptr;  // null: the CTAs group topk_ids themselves
  const int* tile_experts = nullptr;
  const int* padded_pairs = nullptr;
  int* tickets = nullptr;  // a counter of work items that CTAs take in turn; null: they divide them evenly
  int64_t x_stride = 0, weight_stride = 0, expert_stride_low = 0, expert_stride_high = 0, out_stride = 0;  // bytes
  int64_t ids_stride = 0, topk_weights_stride = 0;                                                         // elements
  int tokens = 0, choices = 0, experts = 0, mapped_experts = 0;
  int width = 0;    // K
  int outputs = 0;  // up: I; down: Hd
  int arrival_slices = 0;
  int sorted_length = 0;          // of sorted_pairs
  int blocks = 0;                 // of tile_experts
  int tiles_of_block = 1;         // token tiles per alignment block
  int* ready = nullptr;           // both projections in one launch: signals of each token tile of the hidden layer
  int ready_signals = 0;          // down: of a complete tile
  const char* fetched = nullptr;  // up: weights that are fetched into L2 while the alignment runs
  int64_t fetched_bytes = 0;
  bool routed_early = false;  // the launch just before quantises x (up), or is up (down): it writes no routing
  // Tiles of the pipeline's stages in place of rows, see experts_tma.cuh and experts_fp8.cuh.
  bool tiled_x = false;      // down; FP8: up, too
  bool tiled_out = false;    // up
  bool evict_first = false;  // weights leave L2 first: most of them are read once
  Gate gate = Gate::none;
  // FP8
  const float* x_scale = nullptr;           // of the rows of x; unused where the kernel quantises them
  float* out_scale = nullptr;               // up, with tiled_out
  const float* weight_scale_low = nullptr;  // [E], [E, N] or [E, ceil(N / 128), ceil(K / 128)]
  const float* weight_scale_high = nullptr;
  int scale_rank = 0;
  bool x_blocks = false;  // x has a scale per row and 128 columns, not one per row
  bool fp16_result = false;
  bool split_scales = false;  // up: two weights with scales of their own, not two halves of one
  int64_t scale_expert_stride = 0, scale_row_stride = 0, x_scale_stride = 0;  // elements
};

// The gate of FP8 layers in the wgmma kernels with TMA: h and g are still to be multiplied by their token's factor.
template <Gate gate>
__device__ __forceinline__ float gated_codes(float h, float g, float factor) {
  if constexpr (gate == Gate::silu_and_mul) return silu(h * factor) * (g * factor);
  constexpr float one = gate == Gate::gelu_residual ? 1.f / kGeluScale : 0.f;
  return gelu_times(h * (factor * kGeluScale), fmaf(g, factor * (1.f / kGeluScale), one));
}

// With the errors of the activations of 16-bit inputs, about 1e-6, in few instructions: exponentials below 2^-126 are
// 0.
__device__ __forceinline__ float gated_value(float h, float g, Gate gate) {
  switch (gate) {
    case Gate::gelu_residual:
      return times_normal_cdf</*FLUSH=*/true>(h) * (g + 1.f);
    case Gate::silu_and_mul:
      return silu(h) * g;
    default:
      return times_normal_cdf</*FLUSH=*/true>(h) * g;
  }
}

}  // namespace kestrel::moe
