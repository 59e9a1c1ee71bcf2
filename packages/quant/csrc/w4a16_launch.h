// The launch of a kernel whose CTAs share K, and the launch of those of wgmma, for w4a16.cu.
#pragma once

#include <kestrel/launch.h>

#include <algorithm>

#include "w4a16.cuh"

namespace kestrel::quant {

// Shared memory that a CTA of a launch with PDL has to take: of up to as many CTAs as SMs, each more than half of
// `most`, what one alone on its SM may have. Else a launch that finds some SMs free before others puts two CTAs on one
// of those. 1 KB: what an SM has more than a CTA may have.
inline int least_shared_bytes(int most, int ctas, DLDevice device) {
  return ctas <= device_attribute(cudaDevAttrMultiProcessorCount, device.device_id) ? most / 2 + 1024 : 0;
}

// p.splits: as many as there can be. Their sums are added up over a cluster or, with p.partial, by a second kernel.
// most_shared: what a CTA alone on its SM may have.
template <typename T, Residual RESIDUAL, typename Params>
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
  if (hopper) {
    shared_bytes = std::max(shared_bytes, least_shared_bytes(most_shared, row_tiles * token_tiles * p.splits, device));
  }
  launch_pdl(kernel, dim3(row_tiles * p.splits, token_tiles), dim3(threads), device, p, shared_bytes, p.cluster);
  if (!p.partial) return;
  const int64_t packs = int64_t{p.tokens} * (p.outputs / 4);
  launch_pdl(w4a16_sum_kernel<T, RESIDUAL>, dim3(static_cast<unsigned>((packs + kW4SumThreads - 1) / kW4SumThreads)),
             dim3(kW4SumThreads), device, static_cast<const W4Params&>(p));
}

namespace w4_mma {

// Rows of a CTA so that every SM has a CTA, or nearly so. Arguments: tiles of 8 tokens, of 16 rows per warp, warps of a
// slice of K, stages, the most slices of K. Up to 16 tokens two stages are faster than more.
using Tile8Rows32 = W4Tile<1, 1, 2, 2, 8>;
using Tile8Half = W4Tile<1, 2, 2, 3, 4>;  // 64 rows, two CTAs on an SM
using Tile8Rows64 = W4Tile<1, 2, 2, 2, 8>;
using Tile8Rows128 = W4Tile<1, 2, 4, 2, 4>;
using Tile8LongRows128 = W4Tile<1, 4, 2, 2, 6>;
using Tile16Rows32 = W4Tile<2, 1, 2, 2, 8>;
using Tile16Half = W4Tile<2, 2, 2, 3, 4>;
using Tile16Rows64 = W4Tile<2, 2, 2, 2, 8>;
using Tile16Rows128 = W4Tile<2, 2, 4, 2, 4>;
using Tile16LongRows128 = W4Tile<2, 4, 2, 2, 6>;
using Tile32 = W4Tile<4, 2, 4, 4, 2>;
using Tile64 = W4Tile<8, 2, 4, 3, 2>;

// Largest: the tile with the most tokens among those whose results are to be the same, bit for bit.
template <typename T, int GROUP, typename Tile, typename Largest, Residual RESIDUAL>
void launch_tile(W4Params p, DLDevice device, int most_splits) {
  constexpr int bytes = W4Stage<Tile, GROUP>::shared_bytes;
  constexpr auto kernel = w4a16_kernel<T, GROUP, Tile, RESIDUAL>;
  const int limit = raise_shared_limit<kernel>(device);
  const int row_tiles = (p.outputs + Tile::rows - 1) / Tile::rows, tiles = (p.tokens + Tile::tokens - 1) / Tile::tokens;
  const int sms = device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
  p.parts = std::min({Tile::parts, p.steps, limit / W4Stage<Largest, GROUP>::shared_bytes});
  p.splits = std::max(1, std::min({sms / (row_tiles * tiles), most_splits, p.steps / p.parts}));
  launch_slices<T, RESIDUAL>(kernel, p, row_tiles, tiles, Tile::threads * p.parts, bytes * p.parts, limit, device);
}

// launch_tile() with a residual, for GROUP 128. Defined in a source of its own: beside those kernels the compiler
// orders the instructions of others anew.
template <typename T, typename Tile, typename Largest>
void launch_residual_tile(const W4Params& p, DLDevice device, int most_splits);

}  // namespace w4_mma

namespace w4_wgmma {

// Launches w4a16_wgmma_kernel or, with ctas, w4a16_stream_kernel or w4a16_pair_kernel, on sm_90: see
// w4a16_wgmma_launch.cuh. Defined for each T and ZEROS in a source of its own.
// False: no kernel adds the residual.
template <typename T, Zeros ZEROS>
bool launch(const W4Params& p, int tile, int ctas, DLDevice device);

}  // namespace w4_wgmma

}  // namespace kestrel::quant
