// How an alignment is checked and split over blocks and warps.
#pragma once

#include <kestrel/launch.h>
#include <kestrel/tensor.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "align_apart.cuh"

namespace kestrel::moe {

inline int64_t most_blocks(int64_t pairs, int64_t experts, int64_t block_size) {
  return (pairs + std::min(pairs, experts) * (block_size - 1)) / block_size;
}

inline void check_map(const Checks& check, const OptionalTensor& map, int64_t experts) {
  if (!map.has_value()) return;
  check.dtype("expert_map", *map, {kInt32});
  check.last_contiguous("expert_map", *map);
  check.shape("expert_map", *map, &experts, 1);
}

constexpr int kThreads = 1024;  // at most
constexpr int64_t kShared = 96 * 1024;
constexpr int kPairsOfOne = 1024;   // as many as one block does
constexpr int kPairsStaged = 2048;  // as many of a thread block are sorted in shared memory

// The sizes, where 32-bit slots hold them.
inline void set_sizes(Alignment* a, int64_t pairs, int64_t experts, int64_t block_size) {
  constexpr int64_t most = std::numeric_limits<int>::max();
  if (block_size > most / 2 || pairs > most / 2 - 32 * kThreads ||
      most_blocks(pairs, experts, block_size) > most / block_size) {
    unsupported("an alignment of 2^31 slots or more");
  }
  a->pairs = static_cast<int>(pairs);
  a->experts = static_cast<int>(experts);
  a->block_size = Divisor(static_cast<unsigned>(block_size));
}

inline size_t shared_bytes(const Alignment& a) { return static_cast<size_t>(align_words(a)) * 4; }

inline bool fits(const Alignment& a) { return align_words(a) * 4 <= kShared; }

// What a kernel must be allowed before it is launched with so much shared memory.
template <typename P>
void allow_shared(void (*kernel)(P), size_t bytes) {
  if (bytes <= 48 * 1024) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
             "cudaFuncSetAttribute");
}

constexpr int kWideCluster = 16;
constexpr int kCluster = 8;  // every GPU with clusters has these

// Whether a device runs a kernel in clusters of 16, which not every one does. Asked once, of the largest blocks.
template <auto KERNEL, int THREADS>
bool runs_wide(int device) {
  static std::atomic<int> answers[64];  // 0: not asked, 1: no, 2: yes
  if (device >= 64) return false;
  if (answers[device] == 0) {
    allow_shared(KERNEL, kShared);
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = kWideCluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(kWideCluster);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = kShared;
    config.attrs = &cluster;
    config.numAttrs = 1;
    int active = 0;
    const bool asked = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
                       cudaOccupancyMaxActiveClusters(&active, KERNEL, &config) == cudaSuccess;
    cudaGetLastError();  // a device without such clusters is no error
    answers[device] = asked && active > 0 ? 2 : 1;
  }
  return answers[device] == 2;
}

inline int widest_cluster(int device) {
  return device_attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9 ? kWideCluster : 1;
}

// Threads of a block that has its pairs and a scan over the experts to do.
inline int threads_for(const Alignment& a, int at_least, int at_most) {
  return std::clamp((std::max(a.experts, a.warps * 32) + 31) / 32 * 32, at_least, at_most);
}

constexpr int kBlocksApart = 32;  // at most

// Spreads an alignment over blocks that exchange nothing: each has a warp for each of its rounds, and all together one
// for each expert, whose name and padding it writes.
inline Apart spread(const Alignment& a, int threads) {
  const int rounds = (a.pairs + 31) / 32, least = std::min((a.experts * 32 + threads - 1) / threads, kBlocksApart);
  Apart split;
  split.own = std::max(1, (rounds + kBlocksApart - 1) / kBlocksApart);
  split.blocks = std::max(least, (rounds + split.own - 1) / split.own);
  return split;
}

// Splits the pairs over the warps of one block, or of a cluster of `widest`.
inline void split(Alignment* a, int widest) {
  constexpr int64_t most = std::numeric_limits<int>::max();
  const bool many = a->pairs > kPairsOfOne && int64_t{a->experts} * a->block_size.value <= most;
  const int64_t rounds = (int64_t{a->pairs} + 31) / 32;
  for (a->cluster = many ? widest : 1;; a->cluster = 1) {
    const int64_t own = std::max<int64_t>((rounds + a->cluster - 1) / a->cluster, 1);  // rounds of a block
    a->warps = static_cast<int>(std::min<int64_t>(own, kThreads / 32));
    while (a->warps > 1 && !fits(*a)) --a->warps;
    a->run = static_cast<int>((own + a->warps - 1) / a->warps * 32);
    a->own = a->warps * a->run;
    if (fits(*a)) break;
    if (a->cluster == 1) unsupported(std::to_string(a->experts) + " experts: their counters exceed shared memory");
  }
  a->staged = a->cluster > 1 && a->own >= kPairsStaged && a->own <= 65536 && a->experts <= 65536;
  if (a->staged && !fits(*a)) a->staged = false;
}

}  // namespace kestrel::moe
