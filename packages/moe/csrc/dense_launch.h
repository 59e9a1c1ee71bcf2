// The launches of dense layers: by gemv.cu and dense_wgmma.cu, for dense.cu.
#pragma once

#include <dlpack/dlpack.h>

#include "dense_params.cuh"
#include "linear.h"

namespace kestrel::moe {

// The kernel of one layer. columns: of a tile of dense_wgmma_kernel; 0: gemv_kernel, for up to four tokens; negative:
// none, the caller computes the layer.
struct DensePlan {
  int columns = 0;
  bool ping_pong = false;
  ClusterShape cluster;
};

// Launches gemv_kernel, for one to four tokens.
void launch_few_tokens(const LinearParams& p, DLDataType dtype, DLDevice device);

// Launches dense_wgmma_kernel. Rows must be aligned to 16 bytes.
void launch_dense_wgmma(const LinearParams& p, const DensePlan& plan, DLDataType dtype, DLDevice device);

}  // namespace kestrel::moe
