// How an alignment is checked and split over blocks and warps.
#pragma once

#include <kestrel/launch.h>
#include <kestrel/tensor.h>

#include <algorithm>
#include <limits>

#include "align.cuh"

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
constexpr int kShared = 96 * 1024;
#ifndef ALIGN_CLUSTER
#define ALIGN_CLUSTER 8
#endif
#ifndef ALIGN_ONE
#define ALIGN_ONE 1024
#endif
#ifndef ALIGN_ROUNDS
#define ALIGN_ROUNDS 1
#endif
constexpr int kCluster = ALIGN_CLUSTER;
constexpr int kPairsOfOne = ALIGN_ONE;  // as many as one block does

// The sizes, where 32-bit slots hold them.
inline void set_sizes(Alignment* a, int64_t pairs, int64_t experts, int64_t block_size) {
  constexpr int64_t most = std::numeric_limits<int>::max();
  if (experts > most / 4 || most_blocks(pairs, experts, block_size) > most / block_size ||
      pairs > most - 8 * kThreads) {
    unsupported("an alignment of 2^31 slots or more");
  }
  a->pairs = static_cast<int>(pairs);
  a->experts = static_cast<int>(experts);
  a->block_size = static_cast<int>(block_size);
}

// Splits the pairs over the warps of one block or of a cluster; returns the threads of a block.
inline unsigned split(Alignment* a, int device) {
  const bool clusters = device_attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9;
  a->cluster = clusters && a->pairs > kPairsOfOne ? kCluster : 1;
  const auto words = [&] { return static_cast<int64_t>(align_words(*a)) * 4; };
  const int64_t rounds = (int64_t{a->pairs} + 31) / 32, own = (rounds + a->cluster - 1) / a->cluster;
  const int64_t each = a->cluster > 1 ? ALIGN_ROUNDS : 1;  // rounds a warp should have
  a->warps = static_cast<int>(std::clamp<int64_t>((own + each - 1) / each, 1, kThreads / 32));
  while (a->warps > 1 && words() > kShared) --a->warps;
  if (words() > kShared) a->cluster = 1;
  if (words() > kShared) unsupported(std::to_string(a->experts) + " experts: their counters exceed shared memory");
  a->run = static_cast<int>(std::max<int64_t>(1, (rounds + a->cluster * a->warps - 1) / (a->cluster * a->warps)) * 32);
  a->own = a->warps * a->run;
  const int wanted = std::max(a->warps * 32, std::min((a->experts + 31) / 32 * 32, kThreads));
  return static_cast<unsigned>(std::max(wanted, 128));
}

inline size_t shared_bytes(const Alignment& a) { return static_cast<size_t>(align_words(a)) * 4; }

template <typename P>
void allow_shared(void (*kernel)(P), size_t bytes) {
  if (bytes <= 48 * 1024) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
             "cudaFuncSetAttribute");
}

}  // namespace kestrel::moe
