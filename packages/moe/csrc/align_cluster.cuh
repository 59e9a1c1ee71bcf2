// Alignment of many pairs by one cluster of CTAs (or one CTA): a stable counting sort by expert.
//
// Each warp owns a run of neighbouring pairs and a row of counters, one per expert. It ranks its pairs in rounds of 32.
// The rows become prefix sums over the warps of a CTA; the CTAs exchange their totals through distributed shared
// memory; every CTA scans the padded totals. Then each warp knows the positions of its pairs. A CTA with many pairs
// sorts them in shared memory first, so that its stores are runs of neighbours instead of scattered 4-byte stores.
// No atomics: the result does not depend on timing or on the split.
#pragma once

#include "align.cuh"
#include "exchange.cuh"

namespace kestrel::moe {

// Dynamic shared memory in 32-bit words; ClusterAlignMemory lays it out.
__host__ __device__ inline int64_t align_cluster_words(const Alignment& a) {
  const int64_t experts = a.num_experts;
  return 2 + 64 + a.warps * (experts + 1) + (a.cluster_size > 1 ? a.cluster_size * experts : 0) + 4 * (experts + 1) +
         (a.staged ? experts + a.pairs_per_cta : 0);
}

struct ClusterAlignMemory {
  uint64_t* barrier;       // completes when the totals of every CTA have arrived
  unsigned* warp_sums;     // [2][32]
  unsigned* counts;        // [warps][experts + 1], the last for dropped pairs
  unsigned* cta_totals;    // [cluster_size][experts]: the totals of every CTA; empty without a cluster
  unsigned* expert_total;  // [experts]: pairs of each expert
  unsigned* first_block;   // [experts + 1]
  int* expert_id;          // [experts], after the expert map
  int* position;           // [experts + 1]: of this CTA's first pair of each expert, or kDropped
  unsigned* local;         // [experts]: the same among the pairs of this CTA, if staged
  unsigned* staged;        // [pairs_per_cta]: expert << 16 | pair of this CTA

  __device__ __forceinline__ ClusterAlignMemory(const Alignment& a, unsigned* p) {
    barrier = reinterpret_cast<uint64_t*>(p);
    warp_sums = p + 2;
    counts = warp_sums + 64;
    cta_totals = counts + a.warps * (a.num_experts + 1);
    expert_total = cta_totals + (a.cluster_size > 1 ? a.cluster_size * a.num_experts : 0);
    first_block = expert_total + a.num_experts;
    expert_id = reinterpret_cast<int*>(first_block + a.num_experts + 1);
    position = expert_id + a.num_experts;
    local = reinterpret_cast<unsigned*>(position + a.num_experts + 1);
    staged = local + a.num_experts;
  }
};

// Runs before the PDL wait: clears the counters and initialises this CTA's barrier.
__device__ __forceinline__ void align_cluster_prologue(const Alignment& a, const ClusterAlignMemory& m) {
  for (int i = threadIdx.x; i < a.warps * (a.num_experts + 1); i += blockDim.x) m.counts[i] = 0;
  if (a.cluster_size > 1) exchange_begin(m.barrier, 4 * a.cluster_size * a.num_experts);
  __syncthreads();
}

// A single CTA fills the whole output with padding first and overwrites it after a barrier.
__device__ __forceinline__ void fill_with_padding(const Alignment& a) {
  const int thread = threadIdx.x, threads = blockDim.x;
  const int64_t packs = (reinterpret_cast<uintptr_t>(a.sorted_token_ids) % 16 == 0) ? a.num_positions / 4 : 0;
  const int4 four = make_int4(a.num_pairs, a.num_pairs, a.num_pairs, a.num_pairs);
  for (int64_t i = thread; i < packs; i += threads) reinterpret_cast<int4*>(a.sorted_token_ids)[i] = four;
  for (int64_t i = 4 * packs + thread; i < a.num_positions; i += threads) a.sorted_token_ids[i] = a.num_pairs;
}

// Counts each lane's pair in this warp's row of counters; returns its rank among the warp's pairs of that expert.
__device__ __forceinline__ unsigned count_and_rank(unsigned* row, unsigned expert, unsigned same) {
  const unsigned before = same & ((1u << (threadIdx.x % 32)) - 1);
  const unsigned base = row[expert];
  __syncwarp();
  if (before == 0) row[expert] = base + __popc(same);
  __syncwarp();
  return base + __popc(before);
}

// The sum of v over the threads before this one, of which the first `count` have one; adds the sum of all to *total.
// Successive calls alternate between the halves of `warp_sums`: `half` changes with every call.
__device__ __forceinline__ unsigned block_exclusive_sum(unsigned v, int count, unsigned* warp_sums, int* half,
                                                        unsigned* total) {
  const int warp = threadIdx.x / 32, warps = (min(count, static_cast<int>(blockDim.x)) + 31) / 32;
  unsigned* sums = warp_sums + *half;
  *half ^= 32;
  const unsigned through = warp_inclusive_sum(v);
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

// expert_at(pair): the expert of a pair of this CTA; a number outside 0..experts-1 drops it.
// ROUNDS rounds of 32 pairs stay in registers. A longer run is loaded and ranked a second time when it is written.
template <int ROUNDS, typename F>
__device__ __forceinline__ void align_cluster(const Alignment& a, const ClusterAlignMemory& m, unsigned cta_rank,
                                              F expert_at) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, experts = a.num_experts;
  const int origin = static_cast<int>(cta_rank) * a.pairs_per_cta, end = min(origin + a.pairs_per_cta, a.num_pairs);
  const int first = origin + warp * a.pairs_per_warp + lane;  // this lane's first pair
  const int run = warp < a.warps ? a.pairs_per_warp : 0;
  const int bits = 32 - __clz(experts);
  unsigned* const row = m.counts + warp * (experts + 1);
  int expert[ROUNDS];
  unsigned rank[ROUNDS];
  const auto load_and_rank = [&](int done) {  // up to ROUNDS rounds of the run
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
      rank[i] = count_and_rank(row, expert[i], lanes_with_same(expert[i], bits));
    }
  };
  const auto scatter = [&](int done, bool add_row) {  // add_row: ranks do not yet include the pairs of earlier warps
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      if (done + 32 * i >= run) break;
      if (expert[i] == experts) continue;
      const unsigned n = rank[i] + (add_row ? row[expert[i]] : 0);
      const int pair = first + done + 32 * i;
      if (a.positions && m.position[expert[i]] != kDropped) {
        a.positions[pair] = m.position[expert[i]] + static_cast<int>((a.staged ? m.local[expert[i]] : 0) + n);
      }
      if (a.staged) {
        m.staged[m.local[expert[i]] + n] = static_cast<unsigned>(expert[i]) << 16 | (pair - origin);
      } else {
        const int position = m.position[expert[i]];
        if (position != kDropped) a.sorted_token_ids[position + n] = pair;
      }
    }
  };
  for (int done = 0; done < run; done += 32 * ROUNDS) load_and_rank(done);
  if (a.cluster_size > 1) exchange_ready();
  __syncthreads();

  // Counters become prefix sums over the warps; this CTA's totals go to every CTA of the cluster.
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
    m.expert_total[e] = sum;
    m.expert_id[e] = mapped_expert(a, e);
  }
  const int cta_warps = blockDim.x / 32;
  int half = 0;
  unsigned num_staged = 0;
  if (a.cluster_size > 1) {
    __syncthreads();
    for (int to = warp; to < a.cluster_size; to += cta_warps) {
#pragma unroll 1
      for (int e = lane; e < experts; e += 32) {
        exchange_send(to, m.cta_totals + cta_rank * experts + e, m.expert_total[e], m.barrier);
      }
    }
    if (a.staged) {  // overlaps the exchange
#pragma unroll 1
      for (int base = 0; base < experts; base += blockDim.x) {
        const int e = base + threadIdx.x;
        const unsigned local =
            block_exclusive_sum(e < experts ? m.expert_total[e] : 0, experts - base, m.warp_sums, &half, &num_staged);
        if (e < experts) m.local[e] = local;
      }
    }
    exchange_wait(m.barrier);
  }

  // One thread per expert: its pairs, its blocks, and the blocks of the experts before it.
  unsigned blocks_used = 0;
#pragma unroll 1
  for (int base = 0; base < experts; base += blockDim.x) {
    const int e = base + threadIdx.x;
    unsigned total = 0, before = 0, blocks = 0;
    if (e < experts) {
      if (a.cluster_size == 1) total = m.expert_total[e];
#pragma unroll 8
      for (int from = 0; a.cluster_size > 1 && from < a.cluster_size; ++from) {
        const unsigned n = m.cta_totals[from * experts + e];
        if (from < static_cast<int>(cta_rank)) before += n;
        total += n;
      }
      blocks = m.expert_id[e] < 0 ? 0 : num_blocks_of(a, total);
    }
    const unsigned first_block = block_exclusive_sum(blocks, experts - base, m.warp_sums, &half, &blocks_used);
    if (e < experts) {
      m.expert_total[e] = total;
      m.first_block[e] = first_block;
      const int position = static_cast<int>(first_block * a.block_size.divisor + before);
      m.position[e] = m.expert_id[e] < 0 ? kDropped : a.staged ? position - static_cast<int>(m.local[e]) : position;
    }
  }
  if (threadIdx.x == 0) m.first_block[experts] = blocks_used;
  __syncthreads();
  if (cta_rank == 0 && threadIdx.x == 0) {
    *a.num_post_pad = static_cast<int>(static_cast<int64_t>(blocks_used) * a.block_size.divisor);
  }

  if (a.pairs_per_warp <= 32 * ROUNDS) {
    scatter(0, /*add_row=*/true);
  } else {
    for (int done = 0; done < run; done += 32 * ROUNDS) {
      load_and_rank(done);  // counts on from the prefix sums
      scatter(done, /*add_row=*/false);
    }
  }
  if (a.staged) {
    __syncthreads();
    for (unsigned i = threadIdx.x; i < num_staged; i += blockDim.x) {
      const unsigned pair = m.staged[i];
      const int position = m.position[pair >> 16];
      if (position != kDropped) a.sorted_token_ids[position + static_cast<int>(i)] = origin + (pair & 0xffff);
    }
  }

  if (a.cluster_size == 1) {
    // fill_with_padding() has written the padding. The last threads, which have fewer pairs, write the expert ids.
    for (int64_t b = blockDim.x - 1 - threadIdx.x; b < a.num_blocks; b += blockDim.x) {
      int e = -1;
      if (b < blocks_used) {  // binary search for the last expert that starts at or before block b
        e = 0;
        for (int step = 1 << (bits - 1); step > 0; step >>= 1) {
          if (e + step < experts && m.first_block[e + step] <= b) e += step;
        }
        e = m.expert_id[e];
      }
      a.expert_ids[b] = e;
    }
    return;
  }
  for (int e = cta_rank * cta_warps + warp; e < experts; e += a.cluster_size * cta_warps) {
    const unsigned from = m.first_block[e], to = m.first_block[e + 1];
    if (from == to) continue;
    write_expert(a, m.expert_id[e], from, to, m.expert_total[e]);
  }
  fill_tail(a, blocks_used, static_cast<int64_t>(cta_rank) * blockDim.x + threadIdx.x, a.cluster_size * blockDim.x);
}

}  // namespace kestrel::moe
