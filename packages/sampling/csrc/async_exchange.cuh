// Values of all warps of a cluster, exchanged with st.async and an mbarrier instead of a cluster barrier. A cluster
// barrier would wait for all outstanding memory operations. A cluster of one block uses its own shared memory.
#pragma once

#include <kestrel/ptx/mbarrier.cuh>

#include "cluster.cuh"

namespace kestrel::sampling {

// Stores `v` at the address of `to` in the block of that rank and counts its bytes on that block's `barrier`.
template <typename T>
__device__ __forceinline__ void send(T* to, T v, u64* barrier, int rank) {
  ptx::store_async(ptx::map_shared(ptx::shared_address(to), rank), v,
                   ptx::map_shared(ptx::shared_address(barrier), rank));
}

// Two buffers alternate, with an mbarrier each. In a round every warp broadcasts the same number of values and then
// waits for those of all warps. Before a warp writes a buffer a second time, it has received values that each warp sent
// after it had read that buffer.
struct AsyncExchange {
  static constexpr int kValues = 4;  // per warp and round
  u64* memory;
  u32 round = 0;
  u32 num_values = 0;  // broadcast by each warp in this round

  static __host__ __device__ size_t bytes(int num_warps) {
    return 2 * kValues * sizeof(u64) * num_warps + 2 * sizeof(u64);
  }

  __device__ __forceinline__ u64* barrier(const Cluster& cluster) const {
    return memory + 2 * kValues * cluster.num_warps + (round & 1);
  }
  // By one thread of each block, before the cluster's arrive().
  __device__ __forceinline__ void init(const Cluster& cluster) const {
    if (cluster.size == 1) return;
    ptx::mbarrier_init(memory + 2 * kValues * cluster.num_warps, 1);
    ptx::mbarrier_init(memory + 2 * kValues * cluster.num_warps + 1, 1);
    ptx::fence_mbarrier_init();
  }
  // `v` is the same in all lanes.
  __device__ __forceinline__ void broadcast(const Cluster& cluster, int which, u64 v) {
    u64* to = memory + ((round & 1) * kValues + which) * cluster.num_warps + cluster.warp;
    if (cluster.size == 1) {
      if (cluster.lane == 0) *to = v;
    } else {
      __syncwarp();  // every lane has finished its reads of the previous round when the value arrives
      if (cluster.lane < cluster.size) send(to, v, barrier(cluster), cluster.lane);
    }
    ++num_values;
  }
  __device__ __forceinline__ void broadcast_floats(const Cluster& cluster, int which, float x, float y) {
    broadcast(cluster, which, __float_as_uint(x) | (static_cast<u64>(__float_as_uint(y)) << 32));
  }
  // 16 bytes to every block, by one warp of the cluster.
  __device__ __forceinline__ void broadcast_int4(const Cluster& cluster, int4* to, int4 v) const {
    if (cluster.size == 1) {
      if (cluster.lane == 0) *to = v;
    } else if (cluster.lane < cluster.size) {
      send(to, v, barrier(cluster), cluster.lane);
    }
  }
  // Waits for the values of all warps, and for `num_int4` calls of broadcast_int4(). `leader` is true in one thread of
  // each block. After the wait its earlier writes to shared memory are visible; those of other threads are not.
  __device__ __forceinline__ void wait(const Cluster& cluster, bool leader, u32 num_int4 = 0) {
    if (cluster.size == 1) {
      __syncthreads();
    } else {
      if (leader) ptx::mbarrier_arrive_expect_tx(barrier(cluster), num_values * cluster.num_warps * 8 + num_int4 * 16);
      ptx::mbarrier_wait(barrier(cluster), (round >> 1) & 1);
    }
    ++round;
    num_values = 0;
  }

  // The functions below read the values of the last wait().
  __device__ __forceinline__ const u64* values(const Cluster& cluster, int which) const {
    return memory + (((round - 1) & 1) * kValues + which) * cluster.num_warps;
  }
  // Of the warps before `end`.
  __device__ __forceinline__ u64 sum(const Cluster& cluster, int which, int end) const {
    u64 total = 0;
#pragma unroll 1
    for (int w = cluster.lane; w < end; w += 32) total += values(cluster, which)[w];
    return warp_sum(total);
  }
  __device__ __forceinline__ float2 float_sums(const Cluster& cluster, int which) const {
    float2 sums = {0.f, 0.f};
#pragma unroll 1
    for (int w = cluster.lane; w < cluster.num_warps; w += 32) {
      const u64 both = values(cluster, which)[w];
      sums.x += __uint_as_float(static_cast<u32>(both)), sums.y += __uint_as_float(static_cast<u32>(both >> 32));
    }
    return {warp_float_sum(sums.x), warp_float_sum(sums.y)};
  }
  // Of pairs of a value and a sum of weights relative to it: the sum relative to weight_fn.top.
  template <typename Weight>
  __device__ __forceinline__ float sum_of_weights(const Cluster& cluster, int which, const Weight& weight_fn) const {
    float sum = 0.f;
#pragma unroll 1
    for (int w = cluster.lane; w < cluster.num_warps; w += 32) {
      const u64 both = values(cluster, which)[w];
      const float value = __uint_as_float(static_cast<u32>(both));
      if (value > -INFINITY) sum += weight_fn.weight(value) * __uint_as_float(static_cast<u32>(both >> 32));
    }
    return warp_float_sum(sum);
  }
  // Of pairs of counts of the warps before `end`.
  __device__ __forceinline__ uint2 count_sums(const Cluster& cluster, int which, int end) const {
    uint2 sums = {0, 0};
#pragma unroll 1
    for (int w = cluster.lane; w < end; w += 32) {
      const u64 both = values(cluster, which)[w];
      sums.x += static_cast<u32>(both), sums.y += static_cast<u32>(both >> 32);
    }
    return {__reduce_add_sync(kAllLanes, sums.x), __reduce_add_sync(kAllLanes, sums.y)};
  }
  __device__ __forceinline__ int max(const Cluster& cluster, int which) const {
    int most = INT32_MIN;
#pragma unroll 1
    for (int w = cluster.lane; w < cluster.num_warps; w += 32) {
      most = ::max(most, static_cast<int>(static_cast<u32>(values(cluster, which)[w])));
    }
    return __reduce_max_sync(kAllLanes, most);
  }
};

}  // namespace kestrel::sampling
