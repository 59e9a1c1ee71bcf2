// The parameters of one linear layer.
#pragma once

#include <cstdint>

namespace kestrel::moe {

enum class LinearActivation { none, gelu_tanh, gelu };

struct LinearParams {
  const char* x = nullptr;
  const char* weight = nullptr;
  const char* bias = nullptr;
  const char* residual = nullptr;
  char* out = nullptr;
  int64_t x_stride = 0, weight_stride = 0, residual_stride = 0, out_stride = 0;  // of a row, in bytes
  int tokens = 0, outputs = 0, width = 0;                                        // T, N, K
  LinearActivation activation = LinearActivation::none;                          // before the residual
};

}  // namespace kestrel::moe
