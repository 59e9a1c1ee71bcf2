// The sum of the exponentials of a row, from those of its chunks.
#pragma once

#include "async_exchange.cuh"
#include "logprob_reader.cuh"

namespace kestrel::sampling {

// Beside TopKScratch.
struct alignas(16) LogprobScratch {
  u64 before[kMaxTopKWarps];  // the elements before the token, by warp of the cluster
  double2 warp_sums[kMaxSelectThreads / 32];
  double2 row_sum;  // of elements equal to the largest, and of the others, relative to it
  double log_sum;
  u64 received;  // mbarrier of SecondBlockSum: the sums of chunks in the second block, their logarithm in the first
};

// The sum of a row from those of its chunks, by one warp: the elements equal to the largest, which is sum_fn.top, and
// the others relative to it; NaN if the row holds one.
template <Kind kind, typename Holders>
__device__ __forceinline__ double2 sum_chunks(const ChunkSum* chunks, int num_chunks, const TopKRow<kind>& row,
                                              const WeightFn<Kind::logits>& sum_fn, Holders holders) {
  const int lane = threadIdx.x % 32;
  double rest = 0., of_top = 0.;
  int top_chunk = -1, num_top = 0;
#pragma unroll 2
  for (int chunk = lane; chunk < num_chunks; chunk += 32) {
    const ChunkSum own = chunks[chunk];
    if (own.most == sum_fn.top) {
      of_top += own.of_top, rest += own.others;
      top_chunk = chunk, ++num_top;
    } else if (isnan(own.most)) {
      rest += own.others;
    } else {
      rest += (static_cast<double>(own.others) + own.of_top) * sum_fn.accurate_weight(own.most);
    }
  }
  top_chunk = __reduce_max_sync(kAllLanes, top_chunk), num_top = __reduce_add_sync(kAllLanes, num_top);
  double equal = 0.;
  if (num_top == 1) {
    const u32 groups = holders(top_chunk);
    if (__popc(groups) == 1) {  // else at least two elements are equal to the largest
      of_top = 0.;
      const int chunk_end = min(row.length, (top_chunk + 1) << row.chunk_bits), holder = __ffs(groups) - 1;
#pragma unroll 1
      for (int begin = top_chunk << row.chunk_bits; begin < chunk_end; begin += kTileOfGroups) {
        const int i = begin + row.place(lane, holder);
        const float v = i < row.length && row.is_allowed(i) ? row.element(i) + 0.f : -INFINITY;
        // of_top has no elements of a tile that does not hold the largest.
        if (!__any_sync(kAllLanes, v == sum_fn.top)) continue;
        if (v == sum_fn.top) {
          equal += 1.;
        } else {
          rest += isnan(v) ? v : v == -INFINITY ? 0.f : sum_fn.accurate_weight(v);  // which is 0 for NaN
        }
      }
    }
  }
  rest += of_top;
#pragma unroll
  for (int other = 16; other > 0; other /= 2) {
    equal += __shfl_xor_sync(kAllLanes, equal, other);
    rest += __shfl_xor_sync(kAllLanes, rest, other);
  }
  return {equal, rest};
}

// These sums, where the second block of a cluster adds them while the first selects elements.
template <Kind kind>
struct SecondBlockSum {
  static constexpr int kRank = 1;  // of the block that adds
  const Cluster& cluster;
  const TopKRow<kind>& row;
  LogprobScratch* scratch;
  ChunkSum* chunks;
  int num_chunks;

  // By every block, before the cluster's arrive().
  __device__ __forceinline__ void init() const {
    if (threadIdx.x != 0) return;
    ptx::mbarrier_init(&scratch->received, 1);
    ptx::fence_mbarrier_init();
  }
  // By one lane of the warp that has read the chunk.
  __device__ __forceinline__ void send_chunk(int chunk, const ChunkSum& sum) const {
    send(reinterpret_cast<int4*>(chunks + chunk), sum.bits(), &scratch->received, kRank);
  }
  // By the first warp of the second block: adds the sums of all chunks and sends their logarithm to the first block.
  __device__ __forceinline__ void sum_and_send(WeightFn<Kind::logits> sum_fn) const {
    if (cluster.lane == 0) ptx::mbarrier_arrive_expect_tx(&scratch->received, sizeof(ChunkSum) * num_chunks);
    ptx::mbarrier_wait_cluster(&scratch->received, 0);
    u32 largest = 0;
    for (int chunk = cluster.lane; chunk < num_chunks; chunk += 32) largest = max(largest, row.key(chunks[chunk].most));
    sum_fn.top = row.value(static_cast<u64>(__reduce_max_sync(kAllLanes, largest)) << 32);
    const double2 sum = sum_chunks(chunks, num_chunks, row, sum_fn, [&](int chunk) { return chunks[chunk].holders; });
    const double log_sum = log1p(sum.x - 1. + sum.y);
    if (cluster.lane == 0)
      send(reinterpret_cast<u64*>(&scratch->log_sum), static_cast<u64>(__double_as_longlong(log_sum)),
           &scratch->received, 0);
    __syncwarp();
  }
  // By the first block: expect() in one thread, then wait() for the logarithm.
  __device__ __forceinline__ void expect() const {
    ptx::mbarrier_arrive_expect_tx(&scratch->received, sizeof(scratch->log_sum));
  }
  __device__ __forceinline__ void wait() const { ptx::mbarrier_wait_cluster(&scratch->received, 0); }
};

// The sums of terms(n) over n < count, in an order that does not depend on the number of threads. By the block.
template <typename Terms>
__device__ __forceinline__ double2 block_sums(int count, double2* warp_sums, Terms terms) {
  for (int first = threadIdx.x; first < kMaxSelectThreads; first += blockDim.x) {
    double2 v = {0., 0.};
    for (int n = first; n < count; n += kMaxSelectThreads) {
      const double2 more = terms(n);
      v.x += more.x, v.y += more.y;
    }
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
      v.x += __shfl_xor_sync(kAllLanes, v.x, other);
      v.y += __shfl_xor_sync(kAllLanes, v.y, other);
    }
    if (first % 32 == 0) warp_sums[first / 32] = v;
  }
  __syncthreads();
  double2 sums = {0., 0.};
  for (int warp = 0; warp < kMaxSelectThreads / 32; ++warp) sums.x += warp_sums[warp].x, sums.y += warp_sums[warp].y;
  return sums;
}

}  // namespace kestrel::sampling
