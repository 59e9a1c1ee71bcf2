// Compile-time policies of a norm kernel (Spec) and its launch parameters (Params).
#pragma once

#include <kestrel/fp8.cuh>
#include <kestrel/pack.cuh>

#include <cstdint>

namespace kestrel::norm {

enum class Norm { rms, layer };
enum class Residual { none, add };  // add: x + residual is rounded, stored as the new residual, and normalised

// Output policies. A quantised output has 8-bit codes and one float32 scale per row; its policy says how the scale
// follows from the row's largest magnitude and how quotients become codes. An INT8 policy needs the same members.
struct OutputSame {  // x's dtype, rounded once
  static constexpr bool quantised = false;
};
struct OutputFp8 {
  static constexpr bool quantised = true;
  static constexpr float saturated = 512.f;  // quotients from here on have the largest code

  __device__ __forceinline__ static float scale(float amax, float bound) { return fp8_scale(amax, &bound); }
  __device__ __forceinline__ static float quotient(float y, float scale, float inverse) {
    return fp8_quotient(y, scale, inverse);
  }
  __device__ __forceinline__ static uint32_t codes4(float a, float b, float c, float d) { return to_fp8x4(a, b, c, d); }
};

// T: the dtype of x.
template <Norm norm, Residual residual, typename Output_, typename T_>
struct Spec {
  static constexpr bool layer = norm == Norm::layer;
  static constexpr bool add = residual == Residual::add;
  using Output = Output_;
  using T = T_;
};

// The rows of one tensor: up to three leading dimensions, strides in bytes, outermost first.
struct Rows {
  char* base = nullptr;
  int64_t stride[3] = {0, 0, 0};
};

struct Params {
  Rows x, residual, out;
  const void* weight = nullptr;
  const void* bias = nullptr;
  float* scale = nullptr;           // of a quantised output, one per row
  const float* scale_ub = nullptr;  // not constant
  int rows = 0;
  int n = 0;
  int row_smem_bytes = 0;            // norm_multi_pass: dynamic shared memory of a staged row; 0: rows are not staged
  bool float_weight = false;         // the weight is float32, x is not
  unsigned inner_sizes[2] = {1, 1};  // of the two inner leading dimensions
  bool single_stride = true;         // rows are one stride apart in every tensor: only stride[0] counts
  bool prefetch = true;              // prefetch the rows into L2 before the PDL wait
  bool evict_first = false;          // the output does not fit into L2: store it with the evict-first hint
  float eps = 0;
  float inv_n = 0;
  float weight_bias = 0;
};

// Where one row begins in each tensor.
struct RowPointers {
  const char* x;
  char* residual;
  char* out;

  RowPointers() = default;
  __device__ __forceinline__ RowPointers(const Params& p, int row) {
    if (p.single_stride) {
      x = p.x.base + row * p.x.stride[0];
      residual = p.residual.base + row * p.residual.stride[0];
      out = p.out.base + row * p.out.stride[0];
    } else {
      const unsigned i01 = row / p.inner_sizes[1], i2 = row % p.inner_sizes[1];
      const unsigned i0 = i01 / p.inner_sizes[0], i1 = i01 % p.inner_sizes[0];
      x = p.x.base + i0 * p.x.stride[0] + i1 * p.x.stride[1] + i2 * p.x.stride[2];
      residual = p.residual.base + i0 * p.residual.stride[0] + i1 * p.residual.stride[1] + i2 * p.residual.stride[2];
      out = p.out.base + i0 * p.out.stride[0] + i1 * p.out.stride[1] + i2 * p.out.stride[2];
    }
  }
};

}  // namespace kestrel::norm
