// The launches of dense layers: by gemv.cu, dense_wgmma.cu and dense_vendor.cu, for dense.cu.
#pragma once

#include <dlpack/dlpack.h>

#include "dense_params.cuh"
#include "linear.h"

namespace kestrel::moe {

// The kernels of a layer, numbered as in src/kestrel_moe/_dense_plan.py. vendor: none, the caller computes the layer.
// vendor_epilogue: its product with bias, activation and residual in one.
enum class DenseKernel { vendor, few_tokens, stream, cooperative, ping_pong, vendor_epilogue };

// columns: of a tile of dense_wgmma_kernel. The cluster of stream_linear_kernel has only splits; 0: stream_splits().
struct DensePlan {
  DenseKernel kernel = DenseKernel::vendor;
  int columns = 0;
  ClusterShape cluster;
};

// Launches gemv_kernel, for one to four tokens.
void launch_few_tokens(const LinearParams& p, DLDataType dtype, DLDevice device);

// Launches stream_linear_kernel or dense_wgmma_kernel. Rows must be aligned to 16 bytes.
void launch_dense_wgmma(const LinearParams& p, const DensePlan& plan, DLDataType dtype, DLDevice device);

// Launches the vendor's product with its epilogue. False: it has none for these operands, and nothing was launched.
bool launch_vendor(const LinearParams& p, DLDataType dtype, DLDevice device);

}  // namespace kestrel::moe
