// Checks of the arguments of routed experts. Bad input raises; what no kernel covers is unsupported.
#pragma once

#include <kestrel/check.h>
#include <kestrel/tensor.h>

#include <algorithm>
#include <string>

#include "experts_launch.h"

namespace kestrel::moe {

// A weight [E, N, K] of this dtype.
inline void check_weight(const Checks& check, const char* name, const TensorView& weight, DLDataType dtype,
                         int64_t experts, int64_t outputs, int64_t width) {
  const int64_t shape[3] = {experts, outputs, width};
  check.dtype(name, weight, {dtype});
  check.rank(name, weight, 3, 3);
  check.last_contiguous(name, weight);
  check.shape(name, weight, shape, 3);
  if (weight.size(0) == 0 || weight.size(1) == 0 || weight.size(2) == 0) {
    check.fail(name, "shape [E, N, K] with each at least 1", "shape " + shape_text(weight.shape().data(), 3));
  }
}

// Scales of FP8 weights: [E], [E, N] or [E, ceil(N / 128), ceil(K / 128)].
inline void check_weight_scale(const Checks& check, const char* name, const OptionalTensor& scale,
                               const TensorView& weight) {
  const bool fp8 = same_dtype(weight.dtype(), kFloat8E4M3);
  if (!scale.has_value()) {
    if (fp8) check.fail(name, "float32 scales with FP8 weights", "None");
    return;
  }
  if (!fp8) {
    check.fail(name, "None unless the weights are float8_e4m3fn",
               "scales with " + dtype_name(weight.dtype()) + " weights");
  }
  check.dtype(name, *scale, {kFloat32});
  check.rank(name, *scale, 1, 3);
  const int64_t n = weight.size(1), k = weight.size(2);
  const int64_t outer[2] = {weight.size(0), n}, blocks[3] = {weight.size(0), (n + 127) / 128, (k + 127) / 128};
  check.shape(name, *scale, (*scale).ndim() == 3 ? blocks : outer, (*scale).ndim());
}

inline void check_routing(const Checks& check, const TensorView& topk_ids, const OptionalTensor& topk_weights,
                          int64_t tokens) {
  check.dtype("topk_ids", topk_ids, {kInt32});
  check.rank("topk_ids", topk_ids, 2, 2);
  check.last_contiguous("topk_ids", topk_ids);
  const int64_t shape[2] = {tokens, topk_ids.size(1)};
  check.shape("topk_ids", topk_ids, shape, 2);
  if (topk_weights.has_value()) {
    check.dtype("topk_weights", *topk_weights, {kFloat32});
    check.rank("topk_weights", *topk_weights, 2, 2);
    check.last_contiguous("topk_weights", *topk_weights);
    check.shape("topk_weights", *topk_weights, shape, 2);
  }
}

// The outputs of moe_align_block_size.
struct Aligned {
  OptionalTensor sorted_token_ids, expert_ids, num_tokens_post_pad;
  int64_t block_size;
};

// counters: that follow the number of positions, see align_for_experts.
inline void check_aligned(const Checks& check, const Aligned& aligned, int64_t counters = 0) {
  const int64_t numbers = 1 + counters;
  check.dtype("sorted_token_ids", *aligned.sorted_token_ids, {kInt32});
  check.rank("sorted_token_ids", *aligned.sorted_token_ids, 1, 1);
  check.last_contiguous("sorted_token_ids", *aligned.sorted_token_ids);
  check.dtype("expert_ids", *aligned.expert_ids, {kInt32});
  check.rank("expert_ids", *aligned.expert_ids, 1, 1);
  check.last_contiguous("expert_ids", *aligned.expert_ids);
  check.dtype("num_tokens_post_pad", *aligned.num_tokens_post_pad, {kInt32});
  check.shape("num_tokens_post_pad", *aligned.num_tokens_post_pad, &numbers, 1);
  if (aligned.block_size < 8 || aligned.block_size % 8) unsupported("a block size that is no multiple of 8");
}

inline void check_result(const Checks& check, const TensorView& out, DLDataType dtype,
                         std::initializer_list<int64_t> shape) {
  check.dtype("out", out, {dtype});
  check.last_contiguous("out", out);
  check.shape("out", out, shape.begin(), static_cast<int>(shape.size()));
  check.disjoint("out", out);
}

// The arguments of fused_experts that do not come from an alignment. Returns the gate of `activation`.
inline Gate check_fused_experts(const Checks& check, const TensorView& out, const TensorView& scratch,
                                const TensorView& hidden, const TensorView& w1, const TensorView& w2,
                                const TensorView& topk_weights, const TensorView& topk_ids,
                                const OptionalTensor& w1_scale, const OptionalTensor& w2_scale,
                                const OptionalTensor& expert_map, const AnyView& activation) {
  check.dtype("hidden", hidden, {kBFloat16, kFloat16, kFloat32});
  check.rank("hidden", hidden, 2, 2);
  check.last_contiguous("hidden", hidden);
  const int64_t tokens = hidden.size(0), width = hidden.size(1);
  if (width == 0) {
    check.fail("hidden", "shape [T, Hd] with Hd at least 1", "shape " + shape_text(hidden.shape().data(), 2));
  }
  const int64_t w1_shape[3] = {kAny, kAny, width};
  check.dtype("w1", w1, {kBFloat16, kFloat16, kFloat32, kFloat8E4M3});
  check.rank("w1", w1, 3, 3);
  check.last_contiguous("w1", w1);
  check.shape("w1", w1, w1_shape, 3);
  const int64_t experts = w1.size(0), inner = w1.size(1) / 2, w2_shape[3] = {experts, width, inner};
  if (experts == 0 || inner == 0 || w1.size(1) % 2) {
    check.fail("w1", "shape [E, 2I, Hd] with E and I at least 1", "shape " + shape_text(w1.shape().data(), 3));
  }
  const bool fp8 = same_dtype(w1.dtype(), kFloat8E4M3);
  if (!fp8) check.same_dtype("w1", w1, "hidden", hidden);
  check.rank("w2", w2, 3, 3);
  check.last_contiguous("w2", w2);
  check.same_dtype("w2", w2, "w1", w1);
  check.shape("w2", w2, w2_shape, 3);
  check.dtype("topk_weights", topk_weights, {kFloat32});
  check.rank("topk_weights", topk_weights, 2, 2);
  check.last_contiguous("topk_weights", topk_weights);
  const int64_t pairs_shape[2] = {tokens, topk_weights.size(1)};
  check.shape("topk_weights", topk_weights, pairs_shape, 2);
  check.dtype("topk_ids", topk_ids, {kInt32, kInt64});
  check.rank("topk_ids", topk_ids, 2, 2);
  check.last_contiguous("topk_ids", topk_ids);
  check.shape("topk_ids", topk_ids, pairs_shape, 2);
  const std::string name = check.choice("activation", activation, {"gelu_residual", "silu_and_mul", "gelu_and_mul"});
  check_weight_scale(check, "w1_scale", w1_scale, w1);
  check_weight_scale(check, "w2_scale", w2_scale, w2);
  if (expert_map.has_value()) {
    check.dtype("expert_map", *expert_map, {kInt32});
    check.rank("expert_map", *expert_map, 1, 1);
    check.last_contiguous("expert_map", *expert_map);
  }
  check_result(check, out, hidden.dtype(), {tokens, width});
  check_memory(check, {{"hidden", hidden},
                       {"w1", w1},
                       {"w2", w2},
                       {"topk_weights", topk_weights},
                       {"topk_ids", topk_ids},
                       {"w1_scale", w1_scale},
                       {"w2_scale", w2_scale},
                       {"expert_map", expert_map},
                       {"out", out, /*written=*/true},
                       {"scratch", scratch}});
  return name == "gelu_residual"  ? Gate::gelu_residual
         : name == "silu_and_mul" ? Gate::silu_and_mul
                                  : Gate::gelu_and_mul;
}

// The kernels copy rows 16 bytes at a time.
inline void require_packs(const char* name, const TensorView& t) {
  bool fits = aligned16(address(t));
  for (int i = 0; i < t.ndim(); ++i) fits = fits && t.size(i) < kLargest;
  for (int i = 0; i + 1 < t.ndim(); ++i) fits = fits && (t.size(i) < 2 || t.stride(i) * element_bytes(t) % 16 == 0);
  if (!fits) unsupported(std::string(name) + " with rows that are not aligned to 16 bytes, or a size of 2^30 or more");
}

inline void require_sizes(DLDataType dtype, int64_t width, int64_t outputs, int64_t pairs) {
  if (same_dtype(dtype, kFloat32)) unsupported("float32: tensor cores would round its factors");
  if (width % 16 || outputs % 16) unsupported("Hd and I that are not multiples of 16");
  if (pairs > kLargest) unsupported("more than 2^30 (token, choice) pairs");
}

}  // namespace kestrel::moe
