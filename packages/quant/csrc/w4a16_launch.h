// The launch of a kernel whose CTAs share K, and the launch of those of wgmma, for w4a16.cu.
#pragma once

#include <kestrel/launch.h>

#include <algorithm>

#include "w4a16.cuh"

namespace kestrel::quant {

// p.splits: as many as there can be. Their sums are added up over a cluster or, with p.partial, by a second kernel.
// most_shared: what a CTA alone on its SM may have. On Hopper up to as many CTAs as SMs take more than half of it: a
// launch that finds some SMs free before others would put two on one of those.
template <typename T, typename Params>
void launch_slices(void (*kernel)(Params), Params p, int row_tiles, int token_tiles, int threads, int shared_bytes,
                   int most_shared, DLDevice device) {
  const int sms = device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
  // Clusters of more than two CTAs leave SMs of a GPC free: they fill the GPU in two waves. Kernels have the code of
  // clusters on sm_90 alone.
  const bool hopper = device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id) == 9;
  const bool clusters = hopper && (p.splits <= 2 || row_tiles * token_tiles * p.splits <= sms * 3 / 4);
  if (clusters || p.splits == 1) {
    p.partial = nullptr;
  } else if (!p.partial) {
    p.splits = hopper ? 2 : 1;
  }
  p.cluster = p.partial ? 1 : p.splits;
  if (p.partial && p.partial_floats < int64_t{p.splits} * p.tokens * p.outputs) {
    unsupported("too little scratch memory");
  }
  if (hopper && row_tiles * token_tiles * p.splits <= sms)
    shared_bytes = std::max(shared_bytes, most_shared / 2 + 1024);
  launch_pdl(kernel, dim3(row_tiles * p.splits, token_tiles), dim3(threads), device, p, shared_bytes, p.cluster);
  if (!p.partial) return;
  const int64_t packs = int64_t{p.tokens} * (p.outputs / 4);
  launch_pdl(w4a16_sum_kernel<T>, dim3(static_cast<unsigned>((packs + kW4SumThreads - 1) / kW4SumThreads)),
             dim3(kW4SumThreads), device, static_cast<const W4Params&>(p));
}

namespace w4_wgmma {

// Launches w4a16_wgmma_kernel or, with ctas, w4a16_stream_kernel or w4a16_pair_kernel, on sm_90: see
// w4a16_wgmma_launch.cuh. Defined for each T and ZEROS in a source of its own.
template <typename T, Zeros ZEROS>
void launch(const W4Params& p, int tile, int ctas, DLDevice device);

}  // namespace w4_wgmma

}  // namespace kestrel::quant
