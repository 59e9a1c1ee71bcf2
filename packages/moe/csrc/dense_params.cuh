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
  CUtensorMap x, weight, residual, out;  // x, weight: boxes of a CTA's part of a stage; else 64 x 64
  const char* bias = nullptr;
  bool has_residual = false;
  int outputs = 0, steps = 0;           // N, and K in steps of 64
  int row_tiles = 0, column_tiles = 0;  // of a cluster
  ClusterShape cluster;
  LinearActivation activation = LinearActivation::none;
};

}  // namespace kestrel::moe
