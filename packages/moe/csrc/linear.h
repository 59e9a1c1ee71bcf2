// Host side of gemv, router_gemm and the dense layers: their parameters and checks.
#pragma once

#include <kestrel/launch.h>
#include <kestrel/tensor.h>

#include <string>

#include "linear_params.h"

namespace kestrel::moe {

constexpr int64_t kMaxSize = int64_t{1} << 30;  // sizes are int in the kernels
constexpr int64_t kMaxTokens = 65535 * 4;       // the grid of gemv_kernel

// Checks the weight and bias of one layer, but not their devices and overlaps.
inline void check_operands(const Checks& check, const TensorView& x, const char* weight_name, const TensorView& weight,
                           const char* bias_name, const OptionalTensor& bias, int64_t width) {
  check.dtype(weight_name, weight, {kBFloat16, kFloat16, kFloat32});
  check.rank(weight_name, weight, 2, 2);
  check.last_contiguous(weight_name, weight);
  const int64_t outputs = weight.size(0), weight_shape[2] = {kAny, width};
  check.shape(weight_name, weight, weight_shape, 2);
  check.same_dtype(weight_name, weight, "x", x);
  if (bias.has_value()) {
    check.dtype(bias_name, *bias, {kBFloat16, kFloat16, kFloat32});
    check.last_contiguous(bias_name, *bias);
    check.shape(bias_name, *bias, &outputs, 1);
    check.same_dtype(bias_name, *bias, "x", x);
  }
}

inline void check_rows(const Checks& check, const TensorView& x) {
  check.dtype("x", x, {kBFloat16, kFloat16, kFloat32});
  check.last_contiguous("x", x);
  check.rank("x", x, 2, 2);
}

inline void check_result(const Checks& check, const char* name, const TensorView& out, DLDataType dtype, int64_t tokens,
                         int64_t outputs) {
  const int64_t shape[2] = {tokens, outputs};
  check.dtype(name, out, {dtype});
  check.last_contiguous(name, out);
  check.shape(name, out, shape, 2);
  check.disjoint(name, out);
}

inline void check_residual(const Checks& check, const OptionalTensor& residual, const TensorView& x, int64_t outputs) {
  if (!residual.has_value()) return;
  const int64_t shape[2] = {x.size(0), outputs};
  check.dtype("residual", *residual, {kBFloat16, kFloat16, kFloat32});
  check.last_contiguous("residual", *residual);
  check.shape("residual", *residual, shape, 2);
  check.same_dtype("residual", *residual, "x", x);
}

inline LinearParams linear_params(const TensorView& out, const TensorView& x, const TensorView& weight,
                                  const OptionalTensor& bias, const OptionalTensor& residual) {
  if (weight.size(0) > kMaxSize || x.size(1) > kMaxSize) unsupported("a dimension of more than 2^30");
  if (x.size(0) > kMaxTokens) unsupported("more than " + std::to_string(kMaxTokens) + " tokens");
  LinearParams p;
  p.x = address(x);
  p.weight = address(weight);
  p.bias = address(bias);
  p.residual = address(residual);
  p.out = address(out);
  p.x_stride = x.stride(0) * element_bytes(x);
  p.weight_stride = weight.stride(0) * element_bytes(weight);
  if (residual.has_value()) p.residual_stride = (*residual).stride(0) * element_bytes(x);
  p.out_stride = out.stride(0) * element_bytes(out);
  p.tokens = static_cast<int>(x.size(0));
  p.outputs = static_cast<int>(weight.size(0));
  p.width = static_cast<int>(x.size(1));
  if (x.size(1) * element_bytes(x) % 16 || !aligned16(p.x) || !aligned16(p.weight) ||
      (p.tokens > 1 && p.x_stride % 16) || (p.outputs > 1 && p.weight_stride % 16)) {
    unsupported("rows that are not multiples of 16 bytes");
  }
  return p;
}

// Makes the checks and fills in the parameters; false when there is nothing to do.
inline bool prepare_linear(const Checks& check, const TensorView& out, DLDataType out_dtype, const TensorView& x,
                           const TensorView& weight, const OptionalTensor& bias, LinearParams* p) {
  check_rows(check, x);
  check_operands(check, x, "weight", weight, "bias", bias, x.size(1));
  check_result(check, "out", out, out_dtype, x.size(0), weight.size(0));
  check_overlaps(check, {{"x", x}, {"weight", weight}, {"bias", bias}, {"out", out, /*written=*/true}});
  check_devices(check, "x", x, {{"weight", weight}, {"bias", bias}, {"out", out}});
  if (x.size(0) == 0 || weight.size(0) == 0) return false;
  *p = linear_params(out, x, weight, bias, OptionalTensor());
  return true;
}

}  // namespace kestrel::moe
