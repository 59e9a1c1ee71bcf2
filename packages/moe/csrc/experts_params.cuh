// What the kernels of routed experts share: their parameters, the place of an expert, the gate.
#pragma once

#include <cstdint>

#include "activation.cuh"

namespace kestrel::moe {

constexpr int kMostListedPairs = 32;  // (token, choice) pairs that a CTA groups by expert itself
constexpr int kLineBytes = 128;       // of each row, of a pipeline stage; 128 k of FP8
constexpr int kScaleBlock = 128;      // k and rows that share a scale

enum class Projection { up, down };
enum class Gate { none, gelu_residual, silu_and_mul, gelu_and_mul };  // none: both halves are written as they are

struct ExpertsParams {
  const char* x = nullptr;            // up: [T, K]; down: [pairs, K]
  const char* weight_low = nullptr;   // rows 0 to 7 of each 16: the gate half of w1 / even octets of w2's rows
  const char* weight_high = nullptr;  // rows 8 to 15: the up half of w1 / odd octets of w2's rows
  char* out = nullptr;
  float* partial = nullptr;             // down, summed here: [pairs, N]
  unsigned* arrivals = nullptr;         // [row slices of down], zeroed by up; null: another kernel adds up
  const float* topk_weights = nullptr;  // [T, choices]
  const int* topk_ids = nullptr;        // [T, choices]
  const int* expert_map = nullptr;
  const int* sorted_pairs = nullptr;  // null: the CTAs group topk_ids themselves
  const int* tile_experts = nullptr;
  const int* padded_pairs = nullptr;
  int64_t x_stride = 0, weight_stride = 0, expert_stride_low = 0, expert_stride_high = 0, out_stride = 0;  // bytes
  int64_t ids_stride = 0, topk_weights_stride = 0;                                                         // elements
  int tokens = 0, choices = 0, experts = 0, mapped_experts = 0;
  int width = 0;    // K
  int outputs = 0;  // up: I; down: Hd
  int arrival_slices = 0;
  int sorted_length = 0;      // of sorted_pairs
  int blocks = 0;             // of tile_experts
  int tiles_of_block = 1;     // of sorted_pairs: a block of one expert is so many tiles
  bool routed_early = false;  // down: sorted_pairs and the like were complete before the launch just before began
  Gate gate = Gate::none;
  // FP8
  const float* x_scale = nullptr;           // [rows of x] or [rows of x, ceil(K / 128)]; null where x is quantised here
  const float* weight_scale_low = nullptr;  // [E], [E, N] or [E, ceil(N / 128), ceil(K / 128)]
  const float* weight_scale_high = nullptr;
  int scale_rank = 0;
  bool fp16_result = false;
  bool split_scales = false;  // up: two weights with scales of their own, not two halves of one
  int64_t scale_expert_stride = 0, scale_row_stride = 0, x_scale_stride = 0;  // elements
};

__device__ __forceinline__ float gated_value(float h, float g, Gate gate) {
  using Fast = __nv_bfloat16;  // forms that are right to 1e-6
  switch (gate) {
    case Gate::gelu_residual:
      return activate<Activation::gelu, Fast>(h) * (g + 1.f);
    case Gate::silu_and_mul:
      return activate<Activation::silu, Fast>(h) * g;
    default:
      return activate<Activation::gelu, Fast>(h) * g;
  }
}

}  // namespace kestrel::moe
