// Parameters of the dense layers' wgmma kernels.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "linear_params.h"

namespace kestrel::moe {

// How CTAs of a cluster divide a cluster's tile: `rows` x `columns` of them, each of which computes its own tile, times
// `splits` that each sum a part of K. Operands that several CTAs need are loaded once and multicast.
struct ClusterShape {
  int rows = 1, columns = 1, splits = 1;

  __host__ __device__ int size() const { return rows * columns * splits; }
};

struct DenseParams {
  // Boxes of a CTA's part of a stage, and those that end with the matrices: TMA is slow for rows outside a matrix.
  CUtensorMap x, weight, x_tail, weight_tail;
  const char *bias = nullptr, *residual = nullptr;
  char* out = nullptr;
  int64_t residual_stride = 0, out_stride = 0;  // bytes
  int tokens = 0, outputs = 0, steps = 0;       // T, N, and K in steps of 64
  int row_tiles = 0, column_tiles = 0;          // of a cluster
  ClusterShape cluster;
  LinearActivation activation = LinearActivation::none;
};

}  // namespace kestrel::moe
