// Host side of gemv and router_gemm: their parameters and checks.
#pragma once

#include <kestrel/launch.h>
#include <kestrel/tensor.h>

namespace kestrel::moe {

struct LinearParams {
  const char* x = nullptr;
  const char* weight = nullptr;
  const char* bias = nullptr;
  char* out = nullptr;
  int64_t x_stride = 0, weight_stride = 0, out_stride = 0;  // of a row, in bytes
  int tokens = 0, outputs = 0, width = 0;                   // T, N, K
};

// Makes the checks and fills in the parameters; false when there is nothing to do.
inline bool prepare_linear(const Checks& check, const TensorView& out, DLDataType out_dtype, const TensorView& x,
                           const TensorView& weight, const OptionalTensor& bias, LinearParams* p) {
  check.dtype("x", x, {kBFloat16, kFloat16, kFloat32});
  check.last_contiguous("x", x);
  check.rank("x", x, 2, 2);
  const int64_t tokens = x.size(0), width = x.size(1);
  check.dtype("weight", weight, {kBFloat16, kFloat16, kFloat32});
  check.rank("weight", weight, 2, 2);
  check.last_contiguous("weight", weight);
  const int64_t outputs = weight.size(0), weight_shape[2] = {kAny, width}, out_shape[2] = {tokens, outputs};
  check.shape("weight", weight, weight_shape, 2);
  check.same_dtype("weight", weight, "x", x);
  if (bias.has_value()) {
    check.dtype("bias", *bias, {kBFloat16, kFloat16, kFloat32});
    check.last_contiguous("bias", *bias);
    check.shape("bias", *bias, &outputs, 1);
    check.same_dtype("bias", *bias, "x", x);
  }
  check.dtype("out", out, {out_dtype});
  check.last_contiguous("out", out);
  check.shape("out", out, out_shape, 2);
  check.disjoint("out", out);
  check_overlaps(check, {{"x", x}, {"weight", weight}, {"bias", bias}, {"out", out, /*written=*/true}});
  check_devices(check, "x", x, {{"weight", weight}, {"bias", bias}, {"out", out}});
  if (tokens == 0 || outputs == 0) return false;

  constexpr int64_t max_size = int64_t{1} << 30;
  if (outputs > max_size || width > max_size) unsupported("a dimension of more than 2^30");
  if (tokens > 65535 * 4) unsupported("more than 262140 tokens");
  p->x = address(x);
  p->weight = address(weight);
  p->bias = address(bias);
  p->out = address(out);
  p->x_stride = x.stride(0) * element_bytes(x);
  p->weight_stride = weight.stride(0) * element_bytes(weight);
  p->out_stride = out.stride(0) * element_bytes(out);
  p->tokens = static_cast<int>(tokens);
  p->outputs = static_cast<int>(outputs);
  p->width = static_cast<int>(width);
  if (width * element_bytes(x) % 16 || !aligned16(p->x) || !aligned16(p->weight) || (tokens > 1 && p->x_stride % 16) ||
      (outputs > 1 && p->weight_stride % 16)) {
    unsupported("rows that are not multiples of 16 bytes");
  }
  return true;
}

}  // namespace kestrel::moe
