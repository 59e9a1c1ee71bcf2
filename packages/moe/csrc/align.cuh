// Grouping pairs by expert, by a cluster of blocks: a stable counting sort of expert ids.
//
// Each warp has a run of neighbouring pairs and a row of counters, one per expert. In rounds of 32 pairs it finds for
// each pair how many before it, in its run, chose the same expert. The rows become prefix sums over the warps of a
// block, the blocks tell each other their totals through distributed shared memory, and every block scans the padded
// totals for itself. Then each warp knows where its pairs go. No atomics: the order of pairs is the order of their
// indices whatever the timing, and the number of blocks and warps shows in no result.
#pragma once

#include <cstdint>

#include "cluster.cuh"

namespace kestrel::moe {

// Where the result goes and how the work is split.
struct Alignment {
  int* sorted = nullptr;      // [slots]
  int* experts_of = nullptr;  // [blocks]: of the grouped matrix product
  int* length = nullptr;
  const int* expert_map = nullptr;
  int64_t slots = 0;
  int64_t blocks = 0;
  int pairs = 0;
  int experts = 0;
  int block_size = 0;
  // split
  int cluster = 1;  // thread blocks of one alignment
  int own = 32;     // pairs of a thread block
  int warps = 1;    // of a thread block that have pairs
  int run = 32;     // pairs of a warp, a multiple of 32
};

// 32-bit words of shared memory.
__host__ __device__ inline int align_words(const Alignment& a) {
  return a.warps * (a.experts + 1) + a.cluster * a.experts + 3 * (a.experts + 1) + 33;
}

struct AlignMemory {
  unsigned* counts;   // [warps][experts + 1], the last for dropped pairs
  unsigned* totals;   // [cluster][experts]: of every thread block
  unsigned* size;     // [experts]: pairs of each expert
  unsigned* start;    // [experts + 1]: slot of each expert; the last is the padded length
  int* place;         // [experts + 1]: slot of this thread block's first pair of each expert, -1: dropped
  unsigned* partial;  // [33]

  __device__ __forceinline__ AlignMemory(const Alignment& a, unsigned* p)
      : counts(p),
        totals(counts + a.warps * (a.experts + 1)),
        size(totals + a.cluster * a.experts),
        start(size + a.experts),
        place(reinterpret_cast<int*>(start + a.experts + 1)),
        partial(reinterpret_cast<unsigned*>(place + a.experts + 1)) {}
};

// Before the input may be read: counters to zero, and this block is there.
__device__ __forceinline__ void align_begin(const Alignment& a, const AlignMemory& m) {
  for (int i = threadIdx.x; i < a.warps * (a.experts + 1); i += blockDim.x) m.counts[i] = 0;
  if (a.cluster > 1) cluster_arrive();
  __syncthreads();
}

// Each lane's pair becomes the next of its expert in this warp's row of counters, in the order of lanes.
__device__ __forceinline__ unsigned take_place(unsigned* row, int expert) {
  const unsigned same = __match_any_sync(0xffffffffu, expert);
  const unsigned before = same & ((1u << (threadIdx.x % 32)) - 1);
  const unsigned base = row[expert];
  __syncwarp();
  if (before == 0) row[expert] = base + __popc(same);
  __syncwarp();
  return base + __popc(before);
}

__device__ __forceinline__ unsigned inclusive_sum(unsigned v) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const unsigned below = __shfl_up_sync(0xffffffffu, v, d);
    if (static_cast<int>(threadIdx.x % 32) >= d) v += below;
  }
  return v;
}

// expert_at(pair): the expert of a pair of this block, any number outside 0..experts-1 to drop it.
// ROUNDS of 32 pairs stay in registers; a longer run is ranked again where its pairs are written.
template <int ROUNDS, typename F>
__device__ __forceinline__ void align_pairs(const Alignment& a, const AlignMemory& m, unsigned rank, F expert_at) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, experts = a.experts;
  const int64_t first = static_cast<int64_t>(rank) * a.own + warp * a.run + lane;  // this lane's
  const int64_t end = min((static_cast<int64_t>(rank) + 1) * a.own, static_cast<int64_t>(a.pairs));
  const bool works = warp < a.warps;
  unsigned* row = m.counts + (works ? warp : 0) * (experts + 1);
  int expert[ROUNDS];
  unsigned nth[ROUNDS];
  const auto take = [&](int done) {  // ROUNDS rounds, or what is left of the run
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int64_t pair = first + done + 32 * i;
      expert[i] = experts;
      if (done + 32 * i < a.run && pair < end) {
        const int e = expert_at(static_cast<int>(pair));
        if (e >= 0 && e < experts) expert[i] = e;
      }
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      if (done + 32 * i < a.run) nth[i] = take_place(row, expert[i]);
    }
  };
  const auto put = [&](int done, bool within) {
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      if (done + 32 * i < a.run) {
        const int place = m.place[expert[i]];
        if (place >= 0) {
          a.sorted[place + nth[i] + (within ? row[expert[i]] : 0)] = static_cast<int>(first + done + 32 * i);
        }
      }
    }
  };
  if (works) {
    for (int done = 0; done < a.run; done += 32 * ROUNDS) take(done);
  }
  if (a.cluster > 1) cluster_wait();  // the others are there
  __syncthreads();

  // Rows to prefix sums over the warps; this block's totals to every block of the cluster.
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    unsigned sum = 0;
#pragma unroll 8
    for (int w = 0; w < a.warps; ++w) {
      unsigned* count = m.counts + w * (experts + 1) + e;
      const unsigned n = *count;
      *count = sum;
      sum += n;
    }
    if (a.cluster == 1) {
      m.totals[e] = sum;
    } else {
      for (unsigned to = 0; to < static_cast<unsigned>(a.cluster); ++to)
        store_in(to, m.totals + rank * experts + e, sum);
    }
  }
  if (a.cluster > 1) {
    cluster_arrive();
    cluster_wait();
  }

  // Every thread has an expert: pairs, blocks, and the sum of the blocks of the experts before.
  unsigned carry = 0;
  for (int base = 0; base < experts; base += blockDim.x) {
    const int e = base + threadIdx.x;
    unsigned total = 0, before = 0, blocks = 0;
    bool kept = false;
    if (e < experts) {
      for (unsigned from = 0; from < static_cast<unsigned>(a.cluster); ++from) {
        const unsigned n = m.totals[from * experts + e];
        if (from < rank) before += n;
        total += n;
      }
      kept = !a.expert_map || a.expert_map[e] >= 0;
      blocks = kept ? (total + a.block_size - 1) / a.block_size : 0;
    }
    const unsigned through = inclusive_sum(blocks);
    if (lane == 31) m.partial[warp] = through;
    __syncthreads();
    const unsigned warps = (blockDim.x + 31) / 32;
    const unsigned of_warp = lane < warps ? m.partial[lane] : 0;
    const unsigned through_warp = inclusive_sum(of_warp);
    const unsigned earlier = __shfl_sync(0xffffffffu, through_warp - of_warp, warp);
    const unsigned all = __shfl_sync(0xffffffffu, through_warp, 31);
    if (e < experts) {
      const unsigned start = (carry + earlier + through - blocks) * a.block_size;
      m.size[e] = total;
      m.start[e] = start;
      m.place[e] = kept ? static_cast<int>(start + before) : -1;
    }
    carry += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    m.start[experts] = carry * a.block_size;
    m.place[experts] = -1;
  }
  __syncthreads();
  const int64_t length = static_cast<int64_t>(carry) * a.block_size;
  if (rank == 0 && threadIdx.x == 0) *a.length = static_cast<int>(length);

  if (works) {
    if (a.run <= 32 * ROUNDS) {
      put(0, true);
    } else {
      for (int done = 0; done < a.run; done += 32 * ROUNDS) {
        take(done);  // again, now from the sum of the warps before
        put(done, false);
      }
    }
  }
  // A warp per expert: its padding, and the expert of its blocks.
  const int block_warps = blockDim.x / 32;
  for (int e = rank * block_warps + warp; e < experts; e += a.cluster * block_warps) {
    const unsigned begin = m.start[e], end = m.start[e + 1];
    if (begin == end) continue;
    for (unsigned slot = begin + m.size[e] + lane; slot < end; slot += 32) a.sorted[slot] = a.pairs;
    const int name = a.expert_map ? a.expert_map[e] : e;
    for (unsigned b = begin / a.block_size + lane; b < end / a.block_size; b += 32) a.experts_of[b] = name;
  }
  const int64_t thread = static_cast<int64_t>(rank) * blockDim.x + threadIdx.x, threads = a.cluster * blockDim.x;
  for (int64_t slot = length + thread; slot < a.slots; slot += threads) a.sorted[slot] = a.pairs;
  for (int64_t b = carry + thread; b < a.blocks; b += threads) a.experts_of[b] = -1;
}

}  // namespace kestrel::moe
