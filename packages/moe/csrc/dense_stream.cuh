// The epilogue of dense layers that stream_linear_kernel computes: activation(sums + bias) + residual.
#pragma once

#include <kestrel/pack.cuh>

#include "activation.cuh"
#include "linear_params.h"

namespace kestrel::moe {

template <typename T>
struct DenseEpilogue {
  const char *bias = nullptr, *residual = nullptr;
  char* out = nullptr;
  int64_t residual_stride = 0, out_stride = 0;  // bytes
  LinearActivation activation = LinearActivation::none;

  __device__ __forceinline__ void finish(float (&h)[8], int64_t token, int output) const {
    const int64_t offset = int64_t{output} * sizeof(T);
    float more[8];
    if (bias) {
      Pack<T>{load16(bias + offset)}.unpack(more);
#pragma unroll
      for (int i = 0; i < 8; ++i) h[i] += more[i];
    }
    if (activation != LinearActivation::none) {
#pragma unroll
      for (int i = 0; i < 8; ++i) h[i] = activate<T>(h[i], activation);
    }
    if (residual) {
      Pack<T>{load16(residual + token * residual_stride + offset)}.unpack(more);
#pragma unroll
      for (int i = 0; i < 8; ++i) h[i] += more[i];
    }
    Pack<T> pack;
    pack.pack(h);
    store16(out + token * out_stride + offset, pack.bits);
  }
};

}  // namespace kestrel::moe
