// Grouping pairs by expert, by a cluster of blocks: a stable counting sort of expert ids.
//
// Each warp has a run of neighbouring pairs and a row of counters, one per expert. In rounds of 32 pairs it finds for
// each pair how many before it, in its run, chose the same expert. The rows become prefix sums over the warps of a
// block, the blocks send each other their totals through distributed shared memory, and every block scans the padded
// totals for itself. Then each warp knows where its pairs go. Scattered 4-byte stores are slow (an SM sends one sector
// at a time), so a block of many pairs sorts them in shared memory first and writes runs of neighbours. No atomics: the
// order of pairs is the order of their indices whatever the timing, and how the work was split shows in no result.
#pragma once

#include <cstdint>

#include "cluster.cuh"

namespace kestrel::moe {

// Division by a number that is known at the launch, for dividends below 2^31.
struct Divisor {
  unsigned value = 1, factor = 1, shift = 0;

  Divisor() = default;
  explicit Divisor(unsigned divisor) : value(divisor) {
    while (shift < 31 && (1u << shift) < divisor) ++shift;
    factor = static_cast<unsigned>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
  }

  __device__ __forceinline__ unsigned quotient(unsigned n) const { return (__umulhi(n, factor) + n) >> shift; }
};

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
  Divisor block_size;
  // split
  int cluster = 1;      // thread blocks of one alignment
  int own = 32;         // pairs of a thread block
  int warps = 1;        // of a thread block that have pairs
  int run = 32;         // pairs of a warp, a multiple of 32
  bool staged = false;  // pairs are sorted in shared memory before they are written
};

// 32-bit words of shared memory.
__host__ __device__ inline int64_t align_words(const Alignment& a) {
  const int64_t experts = a.experts;
  return 2 + 64 + a.warps * (experts + 1) + (a.cluster > 1 ? a.cluster * experts : 0) + 4 * (experts + 1) +
         (a.staged ? experts + a.own : 0);
}

struct AlignMemory {
  uint64_t* box;      // of the other blocks' totals
  unsigned* partial;  // [2][32]
  unsigned* counts;   // [warps][experts + 1], the last for dropped pairs
  unsigned* totals;   // [cluster][experts]: of every thread block; no cluster: none
  unsigned* size;     // [experts]: pairs of each expert
  unsigned* start;    // [experts + 1]: block where each expert starts
  int* name;          // [experts]: of each expert here
  int* place;         // [experts + 1]: slot of this thread block's first pair of each expert; NOWHERE: dropped
  unsigned* local;    // [experts]: the same among the pairs of this thread block, where they are staged
  unsigned* staged;   // [own]: expert << 16 | pair of this thread block

  __device__ __forceinline__ AlignMemory(const Alignment& a, unsigned* p) {
    box = reinterpret_cast<uint64_t*>(p);
    partial = p + 2;
    counts = partial + 64;
    totals = counts + a.warps * (a.experts + 1);
    size = totals + (a.cluster > 1 ? a.cluster * a.experts : 0);
    start = size + a.experts;
    name = reinterpret_cast<int*>(start + a.experts + 1);
    place = name + a.experts;
    local = reinterpret_cast<unsigned*>(place + a.experts + 1);
    staged = local + a.experts;
  }
};

constexpr int NOWHERE = static_cast<int>(0x80000000u);

// Before the input may be read: counters to zero, and this block can be sent to.
__device__ __forceinline__ void align_begin(const Alignment& a, const AlignMemory& m) {
  for (int i = threadIdx.x; i < a.warps * (a.experts + 1); i += blockDim.x) m.counts[i] = 0;
  if (a.cluster > 1) open_box(m.box, 4 * a.cluster * a.experts);
  __syncthreads();
}

// One block alone fills the whole result with padding first; its own later stores come after a barrier.
__device__ __forceinline__ void fill_with_padding(const Alignment& a) {
  const int thread = threadIdx.x, threads = blockDim.x;
  const int64_t packs = (reinterpret_cast<uintptr_t>(a.sorted) % 16 == 0) ? a.slots / 4 : 0;
  const int4 four = make_int4(a.pairs, a.pairs, a.pairs, a.pairs);
  for (int64_t i = thread; i < packs; i += threads) reinterpret_cast<int4*>(a.sorted)[i] = four;
  for (int64_t i = 4 * packs + thread; i < a.slots; i += threads) a.sorted[i] = a.pairs;
}

// The lanes whose value is the same, for values below 2^bits, bits <= 16.
__device__ __forceinline__ unsigned lanes_with(unsigned value, int bits) {
  unsigned differ = 0;
#pragma unroll
  for (int b = 0; b < 16; ++b) {
    if (b >= bits) break;
    const unsigned lanes = __ballot_sync(0xffffffffu, value & 1u << b);
    differ |= lanes ^ (value & 1u << b ? 0xffffffffu : 0u);
  }
  return ~differ;
}

// Each lane's pair becomes the next of its expert in this warp's row of counters, in the order of lanes.
__device__ __forceinline__ unsigned take_place(unsigned* row, unsigned expert, unsigned same) {
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

// The sum of v over the threads before this one, of which the first `count` have one; adds all to *total. Two calls in
// a row take different halves of `partial`: `half` changes with every call.
__device__ __forceinline__ unsigned exclusive_sum(unsigned v, int count, unsigned* partial, int* half,
                                                  unsigned* total) {
  const int warp = threadIdx.x / 32, warps = (min(count, static_cast<int>(blockDim.x)) + 31) / 32;
  unsigned* sums = partial + *half;
  *half ^= 32;
  const unsigned through = inclusive_sum(v);
  if (threadIdx.x % 32 == 31) sums[warp] = through;
  __syncthreads();
  unsigned before = *total + through - v;
#pragma unroll 4
  for (int w = 0; w < warps; ++w) {
    const unsigned n = sums[w];
    if (w < warp) before += n;
    *total += n;
  }
  return before;
}

// expert_at(pair): the expert of a pair of this block, any number outside 0..experts-1 to drop it.
// ROUNDS of 32 pairs stay in registers; a run is no longer than that, or, LONG, is ranked again where its pairs are
// written.
template <int ROUNDS, bool LONG, typename F>
__device__ __forceinline__ void align_pairs(const Alignment& a, const AlignMemory& m, unsigned rank, F expert_at) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, experts = a.experts;
  const int origin = static_cast<int>(rank) * a.own, end = min(origin + a.own, a.pairs);
  const int first = origin + warp * a.run + lane;  // this lane's
  const int run = warp < a.warps ? a.run : 0;
  const int bits = 32 - __clz(experts);
  unsigned* const row = m.counts + warp * (experts + 1);
  int expert[ROUNDS];
  unsigned nth[ROUNDS];
  const auto take = [&](int done) {  // ROUNDS rounds, or what is left of the run
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int pair = first + done + 32 * i;
      expert[i] = -1;
      if (done + 32 * i < run && pair < end) expert[i] = expert_at(pair);
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      if (done + 32 * i >= run) break;
      expert[i] = min(static_cast<unsigned>(expert[i]), static_cast<unsigned>(experts));
      nth[i] = take_place(row, expert[i], lanes_with(expert[i], bits));
    }
  };
  const auto put = [&](int done, bool within) {
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      if (done + 32 * i >= run) break;
      if (expert[i] == experts) continue;
      const unsigned n = nth[i] + (within ? row[expert[i]] : 0);
      const int pair = first + done + 32 * i;
      if (a.staged) {
        m.staged[m.local[expert[i]] + n] = static_cast<unsigned>(expert[i]) << 16 | (pair - origin);
      } else {
        const int place = m.place[expert[i]];
        if (place != NOWHERE) a.sorted[place + n] = pair;
      }
    }
  };
  if constexpr (LONG) {
    for (int done = 0; done < run; done += 32 * ROUNDS) take(done);
  } else {
    take(0);
  }
  if (a.cluster > 1) cluster_ready();
  __syncthreads();

  // Rows to prefix sums over the warps; this block's totals to every block of the cluster.
#pragma unroll 1
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    unsigned sum = 0;
#pragma unroll 16
    for (int w = 0; w < a.warps; ++w) {
      unsigned* count = m.counts + w * (experts + 1) + e;
      const unsigned n = *count;
      *count = sum;
      sum += n;
    }
    m.size[e] = sum;
    m.name[e] = a.expert_map ? a.expert_map[e] : e;
  }
  const int block_warps = blockDim.x / 32;
  int half = 0;
  unsigned staged = 0;
  if (a.cluster > 1) {
    __syncthreads();
    for (int to = warp; to < a.cluster; to += block_warps) {
#pragma unroll 1
      for (int e = lane; e < experts; e += 32) send(to, m.totals + rank * experts + e, m.size[e], m.box);
    }
    if (a.staged) {  // while they travel
#pragma unroll 1
      for (int base = 0; base < experts; base += blockDim.x) {
        const int e = base + threadIdx.x;
        const unsigned local = exclusive_sum(e < experts ? m.size[e] : 0, experts - base, m.partial, &half, &staged);
        if (e < experts) m.local[e] = local;
      }
    }
    receive(m.box);
  }

  // Every thread has an expert: its pairs, its blocks, and the blocks of the experts before.
  unsigned all = 0;
#pragma unroll 1
  for (int base = 0; base < experts; base += blockDim.x) {
    const int e = base + threadIdx.x;
    unsigned total = 0, before = 0, blocks = 0;
    if (e < experts) {
      if (a.cluster == 1) total = m.size[e];
#pragma unroll 8
      for (int from = 0; a.cluster > 1 && from < a.cluster; ++from) {
        const unsigned n = m.totals[from * experts + e];
        if (from < static_cast<int>(rank)) before += n;
        total += n;
      }
      blocks = m.name[e] < 0 ? 0 : a.block_size.quotient(total + a.block_size.value - 1);
    }
    const unsigned start = exclusive_sum(blocks, experts - base, m.partial, &half, &all);
    if (e < experts) {
      m.size[e] = total;
      m.start[e] = start;
      const int slot = static_cast<int>(start * a.block_size.value + before);
      m.place[e] = m.name[e] < 0 ? NOWHERE : a.staged ? slot - static_cast<int>(m.local[e]) : slot;
    }
  }
  if (threadIdx.x == 0) m.start[experts] = all;
  __syncthreads();
  const int64_t length = static_cast<int64_t>(all) * a.block_size.value;
  if (rank == 0 && threadIdx.x == 0) *a.length = static_cast<int>(length);

  if (!LONG || a.run <= 32 * ROUNDS) {
    put(0, true);
  } else {
    for (int done = 0; done < run; done += 32 * ROUNDS) {
      take(done);  // again, now from the sum of the warps before
      put(done, false);
    }
  }
  if (a.staged) {
    __syncthreads();
    for (unsigned i = threadIdx.x; i < staged; i += blockDim.x) {
      const unsigned pair = m.staged[i];
      const int place = m.place[pair >> 16];
      if (place != NOWHERE) a.sorted[place + static_cast<int>(i)] = origin + (pair & 0xffff);
    }
  }

  if (a.cluster == 1) {
    // The last threads, which have fewer pairs than the first, name the blocks' experts.
    for (int64_t b = blockDim.x - 1 - threadIdx.x; b < a.blocks; b += blockDim.x) {
      int e = -1;
      if (b < all) {  // the last expert that starts here or before
        e = 0;
        for (int step = 1 << (bits - 1); step > 0; step >>= 1) {
          if (e + step < experts && m.start[e + step] <= b) e += step;
        }
        e = m.name[e];
      }
      a.experts_of[b] = e;
    }
    return;
  }
  // A warp of the cluster for each expert: its name for its blocks, and the padding of the last of them.
  for (int e = rank * block_warps + warp; e < experts; e += a.cluster * block_warps) {
    const unsigned from = m.start[e], to = m.start[e + 1];
    if (from == to) continue;
    const int name = m.name[e];
    for (unsigned b = from + lane; b < to; b += 32) a.experts_of[b] = name;
    const unsigned last = to * a.block_size.value;
    const unsigned padding = from * a.block_size.value + m.size[e];
    for (unsigned slot = padding + lane; slot < last; slot += 32) a.sorted[slot] = a.pairs;
  }
  const int64_t thread = static_cast<int64_t>(rank) * blockDim.x + threadIdx.x, threads = a.cluster * blockDim.x;
  for (int64_t slot = length + thread; slot < a.slots; slot += threads) a.sorted[slot] = a.pairs;
  for (int64_t b = all + thread; b < a.blocks; b += threads) a.experts_of[b] = -1;
}

}  // namespace kestrel::moe
