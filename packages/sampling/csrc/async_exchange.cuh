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
// after it had read that buffer. Values 0 and 1, and 2 and 3, are neighbours, which one message can hold.
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
  // The value of a warp in a round.
  __device__ __forceinline__ u64* address(const Cluster& cluster, u32 of_round, int which, int warp) const {
    return memory + (((of_round & 1) * (kValues / 2) + which / 2) * cluster.num_warps + warp) * 2 + which % 2;
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
    u64* to = address(cluster, round, which, cluster.warp);
    if (cluster.size == 1) {
      if (cluster.lane == 0) *to = v;
    } else {
      __syncwarp();  // every lane has finished its reads of the previous round when the value arrives
      if (cluster.lane < cluster.size) send(to, v, barrier(cluster), cluster.lane);
    }
    ++num_values;
  }
  // `which`, which is even, and the next value.
  __device__ __forceinline__ void broadcast_pair(const Cluster& cluster, int which, u64 v, u64 next) {
    int4* to = reinterpret_cast<int4*>(address(cluster, round, which, cluster.warp));
    const int4 both =
        make_int4(static_cast<int>(v), static_cast<int>(v >> 32), static_cast<int>(next), static_cast<int>(next >> 32));
    if (cluster.size == 1) {
      if (cluster.lane == 0) *to = both;
    } else {
      __syncwarp();
      if (cluster.lane < cluster.size) send(to, both, barrier(cluster), cluster.lane);
    }
    num_values += 2;
  }
  static __device__ __forceinline__ u64 pack(float x, float y) {
    return __float_as_uint(x) | static_cast<u64>(__float_as_uint(y)) << 32;
  }
  static __device__ __forceinline__ float2 unpack(u64 v) {
    return {__uint_as_float(static_cast<u32>(v)), __uint_as_float(static_cast<u32>(v >> 32))};
  }
  __device__ __forceinline__ void broadcast_floats(const Cluster& cluster, int which, float x, float y) {
    broadcast(cluster, which, pack(x, y));
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
  __device__ __forceinline__ u64 value(const Cluster& cluster, int which, int warp) const {
    return *address(cluster, round - 1, which, warp);
  }
  // f(warp, its values `which` and the next) by one lane for each warp before `end`. Loads do not wait for one another.
  template <int kLoads = 1, typename F>
  __device__ __forceinline__ void for_each_pair(const Cluster& cluster, int which, int end, F f) const {
    const ulonglong2* const pairs = reinterpret_cast<const ulonglong2*>(address(cluster, round - 1, which, 0));
#pragma unroll 1
    for (int first = cluster.lane; first < end; first += 32 * kLoads) {
      ulonglong2 v[kLoads];
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        if (first + 32 * n < end) v[n] = pairs[first + 32 * n];
      }
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        if (first + 32 * n < end) f(first + 32 * n, v[n].x, v[n].y);
      }
    }
  }
  // Of values 0: of all warps, and of those before this one.
  struct Masses {
    u64 all, before;
  };
  __device__ __forceinline__ Masses masses(const Cluster& cluster) const {
    u64 all = 0, before = 0;
    for_each_pair(cluster, 0, cluster.num_warps,
                  [&](int warp, u64 v, u64) { all += v, before += warp < cluster.warp ? v : 0; });
    return {warp_sum(all), warp_sum(before)};
  }
  // The sum of values `which`, which is even.
  __device__ __forceinline__ u64 sum(const Cluster& cluster, int which) const {
    u64 all = 0;
    for_each_pair(cluster, which, cluster.num_warps, [&](int, u64 v, u64) { all += v; });
    return warp_sum(all);
  }
  // The masses, and the largest of values 1.
  struct Totals {
    Masses masses;
    int most;
  };
  __device__ __forceinline__ Totals totals(const Cluster& cluster) const {
    u64 all = 0, before = 0;
    int most = INT32_MIN;
    for_each_pair<4>(cluster, 0, cluster.num_warps, [&](int warp, u64 v, u64 key) {
      all += v, before += warp < cluster.warp ? v : 0;
      most = max(most, static_cast<int>(static_cast<u32>(key)));
    });
    return {{warp_sum(all), warp_sum(before)}, __reduce_max_sync(kAllLanes, most)};
  }
  // Of the pairs of floats in values 2 and 3.
  template <int kLoads>
  __device__ __forceinline__ float4 float_sums(const Cluster& cluster) const {
    float4 sums = {0.f, 0.f, 0.f, 0.f};
    for_each_pair<kLoads>(cluster, 2, cluster.num_warps, [&](int, u64 v, u64 next) {
      const float2 a = unpack(v), b = unpack(next);
      sums.x += a.x, sums.y += a.y, sums.z += b.x, sums.w += b.y;
    });
    return {warp_float_sum(sums.x), warp_float_sum(sums.y), warp_float_sum(sums.z), warp_float_sum(sums.w)};
  }
  // The same of values 2 alone.
  __device__ __forceinline__ float2 first_float_sums(const Cluster& cluster) const {
    float2 sums = {0.f, 0.f};
    for_each_pair(cluster, 2, cluster.num_warps, [&](int, u64 v, u64) {
      const float2 a = unpack(v);
      sums.x += a.x, sums.y += a.y;
    });
    return {warp_float_sum(sums.x), warp_float_sum(sums.y)};
  }
  // Of values 2, a value and a sum of weights relative to it: the sum relative to weight_fn.top.
  template <typename Weight>
  __device__ __forceinline__ float sum_of_weights(const Cluster& cluster, const Weight& weight_fn) const {
    float sum = 0.f;
    for_each_pair(cluster, 2, cluster.num_warps, [&](int, u64 v, u64) {
      const float2 of_warp = unpack(v);
      if (of_warp.x > -INFINITY) sum += weight_fn.weight(of_warp.x) * of_warp.y;
    });
    return warp_float_sum(sum);
  }
  // Of values 3, pairs of counts, of the warps before `end`.
  __device__ __forceinline__ uint2 count_sums(const Cluster& cluster, int end) const {
    uint2 sums = {0, 0};
    for_each_pair(cluster, 2, end,
                  [&](int, u64, u64 v) { sums.x += static_cast<u32>(v), sums.y += static_cast<u32>(v >> 32); });
    return {__reduce_add_sync(kAllLanes, sums.x), __reduce_add_sync(kAllLanes, sums.y)};
  }
};

}  // namespace kestrel::sampling
