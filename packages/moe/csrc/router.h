// Host side of topk_softmax and route_and_align: checks of their arguments, and the parameters of the kernels.
#pragma once

#include <kestrel/tensor.h>

#include <type_traits>

#include "topk.cuh"

namespace kestrel::moe {

inline Float float_type(const TensorView& t) {
  if (same_dtype(t.dtype(), kFloat32)) return Float::f32;
  return same_dtype(t.dtype(), kFloat16) ? Float::f16 : Float::bf16;
}

inline int64_t check_logits(const Checks& check, const char* name, const TensorView& logits, const AnyView& k) {
  check.dtype(name, logits, {kBFloat16, kFloat16, kFloat32});
  check.rank(name, logits, 2, 2);
  check.last_contiguous(name, logits);
  const int64_t top_k = check.integer("k", k, 1), experts = logits.size(1);
  if (top_k > experts) check.fail("k", "at most the " + std::to_string(experts) + " experts", std::to_string(top_k));
  return top_k;
}

inline void check_bias(const Checks& check, const OptionalTensor& bias, int64_t experts) {
  if (!bias.has_value()) return;
  check.dtype("bias", *bias, {kBFloat16, kFloat16, kFloat32});
  check.last_contiguous("bias", *bias);
  check.shape("bias", *bias, &experts, 1);
}

// A result that the launch function has allocated.
inline void check_result(const Checks& check, const char* name, const TensorView& t, DLDataType dtype, int64_t rows,
                         int64_t columns) {
  const int64_t expected[2] = {rows, columns};
  check.dtype(name, t, {dtype});
  check.shape(name, t, expected, 2);
  if (t.size(0) > 1 && t.stride(0) != columns) {
    check.fail(name, "contiguous rows", "stride " + std::to_string(t.stride(0)));
  }
  check.last_contiguous(name, t);
}

constexpr int kMaxExperts = 512;
constexpr int kMaxTopK = 32;  // one lane each

inline Router router_params(const TensorView& logits, int64_t k, bool renormalize, const OptionalTensor& bias,
                            const TensorView& weights, const TensorView& ids) {
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  if (experts > kMaxExperts) unsupported("more than " + std::to_string(kMaxExperts) + " experts");
  if (k > kMaxTopK) unsupported("more than " + std::to_string(kMaxTopK) + " experts per token");
  if (tokens > (int64_t{1} << 30)) unsupported("more than 2^30 tokens");
  Router r;
  r.logits = address(logits);
  r.bias = address(bias);
  r.weights = reinterpret_cast<float*>(address(weights));
  r.ids = reinterpret_cast<int*>(address(ids));
  r.stride = logits.stride(0) * element_bytes(logits);
  r.tokens = static_cast<int>(tokens);
  r.experts = static_cast<int>(experts);
  r.k = static_cast<int>(k);
  r.dtype = float_type(logits);
  if (bias.has_value()) r.bias_dtype = float_type(*bias);
  r.vectorized = aligned16(r.logits) && (tokens < 2 || r.stride % 16 == 0);
  r.renormalize = renormalize;
  return r;
}

// The table: number of experts -> experts per lane, with which `call` is called.
template <typename F>
void dispatch_experts(Router* r, F call) {
  const auto with = [&](auto per_lane) {
    r->vectorized = r->vectorized && r->experts % per_lane == 0;
    call(per_lane);
  };
  if (r->experts <= 64) return with(std::integral_constant<int, 2>());
  if (r->experts <= 128) return with(std::integral_constant<int, 4>());
  if (r->experts <= 256) return with(std::integral_constant<int, 8>());
  with(std::integral_constant<int, 16>());
}

}  // namespace kestrel::moe
