// How rows are split over thread blocks, and the launch of kernels that split them.
#pragma once

#include <algorithm>

#include "entry.h"
#include "threshold_rows.cuh"
#include "top_k_candidates.cuh"

namespace kestrel::sampling {

// How a row is split: the blocks of its cluster, their threads, and whether they hold the row in shared memory.
struct Split {
  int cluster_size, threads;
  bool in_smem;
  size_t smem_bytes;
};

// A split given by the caller, for experiments; 0 leaves the choice to the host. Ids do not depend on it.
struct SplitRequest {
  int cluster_size = 0, threads = 0;
};

inline size_t candidate_bytes(int threads) { return kCandidatesPerThread * threads * sizeof(float); }

inline int elements_per_warp(int length, int warps, int unit) {
  return ((length + warps - 1) / warps + unit - 1) / unit * unit;
}

// Of threshold_rows.
inline size_t search_smem_bytes(int length, int cluster_size, int threads, Storage storage) {
  const int warps = threads / 32;
  const int row_elements = storage == Storage::shared ? elements_per_warp(length, cluster_size * warps, 8) * warps : 0;
  return sizeof(SearchScratch) + ClusterExchange::bytes(cluster_size * warps) + candidate_bytes(threads) +
         row_elements * sizeof(float);
}

inline Split split_for_search(int length, int64_t rows, DLDevice device, SplitRequest request) {
  const size_t max_bytes = max_smem_bytes(device);
  auto [cluster_size, threads] = request;
  if (!has_clusters(device)) cluster_size = 1;
  if (length <= kShortRow) {
    if (!cluster_size) cluster_size = 1;
    if (!threads) threads = std::min(kSearchThreads, (length + 127) / 128 * 32);
  }
  // Few rows: clusters of eight blocks. Many rows: one block each if that can hold a row.
  const bool few = rows * 8 <= num_sms(device);
  const bool fits = search_smem_bytes(length, 1, kSearchThreads, Storage::shared) <= max_bytes;
  if (!cluster_size) cluster_size = !few && fits ? 1 : 8;
  if (!threads) threads = kSearchThreads;
  threads = std::clamp(threads, kHistogramThreads, kSearchThreads);
  const bool in_smem = search_smem_bytes(length, cluster_size, threads, Storage::shared) <= max_bytes;
  const Storage storage = in_smem ? Storage::shared : Storage::global;
  return {cluster_size, threads, in_smem, search_smem_bytes(length, cluster_size, threads, storage)};
}

// Of top_k_draw and topk_rows. Eight blocks per row only if they fill at most half of the SMs, so that the next launch
// starts beside them. Rows of several waves are split too, which shortens the last wave.
inline Split split_for_top_k(int length, int64_t rows, int max_top_k, int64_t sms, bool has_clusters,
                             SplitRequest request) {
  auto [cluster_size, threads] = request;
  if (!cluster_size) {
    cluster_size = 2 * 8 * rows <= sms ? 8 : 4 * rows <= sms ? 4 : 2 * rows <= sms || rows > 2 * sms ? 2 : 1;
  }
  if (!has_clusters) cluster_size = 1;
  threads = threads && threads < kMaxSelectThreads ? kSelectThreads : kMaxSelectThreads;
  const size_t bytes = sizeof(TopKScratch) + TopKLayout(length, max_top_k).bytes();
  return {cluster_size, threads, false, bytes};
}

template <auto kernel, typename P>
void launch_split(P params, int64_t rows, const Split& split, DLDevice device, bool balanced = false) {
  params.cluster_size = split.cluster_size;
  raise_shared_limit<kernel>(device);
  launch_pdl(kernel, dim3(static_cast<unsigned>(rows * split.cluster_size)), dim3(split.threads), device, params,
             split.smem_bytes, split.cluster_size, balanced);
}

// For kernels that read a contiguous slice per warp, a multiple of `unit`.
template <auto kernel, typename P>
void launch_slices(P params, const Split& split, int unit, DLDevice device) {
  params.elements_per_warp = elements_per_warp(params.length, split.cluster_size * split.threads / 32, unit);
  launch_split<kernel>(params, params.num_rows, split, device);
}

}  // namespace kestrel::sampling
