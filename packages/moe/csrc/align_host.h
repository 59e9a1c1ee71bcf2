// Host side of the alignment kernels: checks of their arguments, sizes, and the split over CTAs and warps.
#pragma once

#include <kestrel/launch.h>
#include <kestrel/tensor.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "align_cluster.cuh"
#include "align_independent.cuh"

namespace kestrel::moe {

constexpr int64_t kMostPositions = std::numeric_limits<int>::max();  // positions and pairs are int32

// No routing of so many pairs fills more blocks than this.
inline int64_t most_blocks(int64_t pairs, int64_t experts, int64_t block_size) {
  return (pairs + std::min(pairs, experts) * (block_size - 1)) / block_size;
}

// An integer from 1 to 2^31 - 1.
inline int64_t check_count(const Checks& check, const char* name, const AnyView& value) {
  const int64_t count = check.integer(name, value, 1);
  if (count > kMostPositions) {
    check.fail(name, "an integer <= " + std::to_string(kMostPositions), std::to_string(count));
  }
  return count;
}

inline void check_map(const Checks& check, const OptionalTensor& map, int64_t experts) {
  if (!map.has_value()) return;
  check.dtype("expert_map", *map, {kInt32});
  check.last_contiguous("expert_map", *map);
  check.shape("expert_map", *map, &experts, 1);
}

constexpr int kMaxThreads = 1024;
constexpr int kMaxSharedBytes = 96 * 1024;
constexpr int kSingleCtaPairs = 1024;   // up to so many pairs take one CTA
constexpr int kStagedPairsMin = 2048;   // from so many pairs of a CTA on they are sorted in shared memory
constexpr int kStagedPairsMax = 65536;  // a pair and an expert are 16 bits each there

inline void set_sizes(Alignment* a, int64_t pairs, int64_t experts, int64_t block_size) {
  if (block_size > kMostPositions / 2 || pairs > kMostPositions / 2 - 32 * kMaxThreads ||
      most_blocks(pairs, experts, block_size) > kMostPositions / block_size) {
    unsupported("an alignment of 2^31 positions or more");
  }
  a->num_pairs = static_cast<int>(pairs);
  a->num_experts = static_cast<int>(experts);
  a->block_size = FastDiv(static_cast<unsigned>(block_size));
}

inline size_t shared_bytes(const Alignment& a) { return static_cast<size_t>(align_cluster_words(a)) * 4; }

inline bool fits_shared(const Alignment& a) { return align_cluster_words(a) * 4 <= kMaxSharedBytes; }

constexpr int kWideCluster = 16;  // not portable: some GPUs do not run it
constexpr int kPortableCluster = 8;

// Whether a device runs the kernel in clusters of 16 CTAs of THREADS threads and the most shared memory. Asked once.
template <auto KERNEL, int THREADS>
bool runs_wide_clusters(int device) {
  enum Answer { unknown, no, yes };
  static std::atomic<Answer> answers[64];
  if (device >= 64) return false;
  if (answers[device] == unknown) {
    raise_shared_limit<KERNEL, kMaxSharedBytes>({kDLCUDA, device});
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = kWideCluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(kWideCluster);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = kMaxSharedBytes;
    config.attrs = &cluster;
    config.numAttrs = 1;
    int active = 0;
    const bool asked = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
                       cudaOccupancyMaxActiveClusters(&active, KERNEL, &config) == cudaSuccess;
    cudaGetLastError();  // a device without such clusters is no error
    answers[device] = asked && active > 0 ? yes : no;
  }
  return answers[device] == yes;
}

inline int largest_cluster(int device) {
  return device_attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9 ? kWideCluster : 1;
}

// Threads of a CTA of align_cluster: one per expert of the scan, and 32 per warp with pairs.
inline int threads_for(const Alignment& a, int at_least, int at_most) {
  return std::clamp((std::max(a.num_experts, a.warps * 32) + 31) / 32 * 32, at_least, at_most);
}

constexpr int kMaxIndependentCtas = 32;

// The split of align_independent: each CTA has one warp per own round, and all CTAs together one warp per expert.
inline IndependentSplit split_independent(const Alignment& a, int threads) {
  const int rounds = (a.num_pairs + 31) / 32;
  const int ctas_for_experts = std::min((a.num_experts * 32 + threads - 1) / threads, kMaxIndependentCtas);
  IndependentSplit split;
  split.rounds_per_cta = std::max(1, (rounds + kMaxIndependentCtas - 1) / kMaxIndependentCtas);
  split.ctas = std::max(ctas_for_experts, (rounds + split.rounds_per_cta - 1) / split.rounds_per_cta);
  return split;
}

// The split of align_cluster, over one CTA or a cluster of `largest`.
inline void split_cluster(Alignment* a, int largest) {
  const bool many = a->num_pairs > kSingleCtaPairs && int64_t{a->num_experts} * a->block_size.divisor <= kMostPositions;
  const int64_t rounds = (int64_t{a->num_pairs} + 31) / 32;
  for (a->cluster_size = many ? largest : 1;; a->cluster_size = 1) {
    const int64_t cta_rounds = std::max<int64_t>((rounds + a->cluster_size - 1) / a->cluster_size, 1);
    a->warps = static_cast<int>(std::min<int64_t>(cta_rounds, kMaxThreads / 32));
    while (a->warps > 1 && !fits_shared(*a)) --a->warps;
    a->pairs_per_warp = static_cast<int>((cta_rounds + a->warps - 1) / a->warps * 32);
    a->pairs_per_cta = a->warps * a->pairs_per_warp;
    if (fits_shared(*a)) break;
    if (a->cluster_size == 1) {
      unsupported(std::to_string(a->num_experts) + " experts: their counters exceed shared memory");
    }
  }
  a->staged = a->cluster_size > 1 && a->pairs_per_cta >= kStagedPairsMin && a->pairs_per_cta <= kStagedPairsMax &&
              a->num_experts <= kStagedPairsMax;
  if (a->staged && !fits_shared(*a)) a->staged = false;
}

}  // namespace kestrel::moe
