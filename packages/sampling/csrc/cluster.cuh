// The thread blocks that share a row: a cluster with distributed shared memory (DSMEM) from sm_90 on, one block before.
// Values that are summed across warps and blocks are integers, so that sums do not depend on the order.
#pragma once

#include <kestrel/pdl.cuh>
#include <kestrel/ptx/cluster.cuh>
#include <kestrel/ptx/math.cuh>
#include <kestrel/ptx/shared.cuh>

#include <cstdint>

namespace kestrel::sampling {

using u32 = uint32_t;
using u64 = uint64_t;
constexpr u32 kAllLanes = 0xffffffffu;

// ---- warp primitives ------------------------------------------------------------------------------------------------

__device__ __forceinline__ u64 warp_sum(u64 v) {  // of sums below 2^62
  const u32 low = __reduce_add_sync(kAllLanes, static_cast<u32>(v) & 0x3fffffu);
  const u32 middle = __reduce_add_sync(kAllLanes, static_cast<u32>(v >> 22) & 0x3fffffu);
  const u32 high = __reduce_add_sync(kAllLanes, static_cast<u32>(v >> 44));
  return low + (static_cast<u64>(middle) << 22) + (static_cast<u64>(high) << 44);
}

__device__ __forceinline__ u64 warp_inclusive_sum(u64 v, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u64 below = __shfl_up_sync(kAllLanes, v, distance);
    if (lane >= distance) v += below;
  }
  return v;
}

__device__ __forceinline__ float warp_float_sum(float v) {
#pragma unroll
  for (int other = 16; other > 0; other /= 2) v += __shfl_xor_sync(kAllLanes, v, other);
  return v;
}

// ---- shared memory --------------------------------------------------------------------------------------------------

// A predicated reduction: no branch where most threads have nothing to add.
__device__ __forceinline__ void shared_add_if(bool adds, u32 address, u32 v) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p red.shared.add.u32 [%1], %2;\n}" ::"r"(static_cast<u32>(adds)),
      "r"(address), "r"(v)
      : "memory");
}

__device__ __forceinline__ char* dynamic_shared_memory() {
  extern __shared__ __align__(16) char memory[];
  return memory;
}

// ---- the cluster ----------------------------------------------------------------------------------------------------

// The position of a thread in its cluster. Call arrive() first, wait() before the first access to another block's
// shared memory, and sync() after the last one, so that no block exits while its memory is still accessed.
struct Cluster {
  int size;        // thread blocks, a power of two; 1 is a block without a cluster
  int block_rank;  // of this block
  int warps_per_block;
  int num_warps;  // of all blocks
  int warp;       // of this thread, within the cluster
  int lane;

  __device__ __forceinline__ explicit Cluster(int size_)
      : size(size_),
        block_rank(static_cast<int>(blockIdx.x & (size_ - 1))),
        warps_per_block(blockDim.x >> 5),
        num_warps(size_ * warps_per_block),
        warp(block_rank * warps_per_block + (threadIdx.x >> 5)),
        lane(threadIdx.x & 31) {}

  // The row that this cluster processes.
  __device__ __forceinline__ int64_t row_idx() const { return blockIdx.x >> (31 - __clz(size)); }

  __device__ __forceinline__ void arrive() const {
    if (size > 1) ptx::cluster_arrive_relaxed();
  }
  // Also publishes this block's shared memory to the blocks that wait().
  __device__ __forceinline__ void arrive_release() const { size > 1 ? ptx::cluster_arrive() : __syncthreads(); }
  __device__ __forceinline__ void wait() const {
    if (size > 1) ptx::cluster_wait_unaligned();
  }
  __device__ __forceinline__ void sync() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (size > 1) {
      ptx::cluster_sync();
      return;
    }
#endif
    __syncthreads();
  }

  // The address of this block's `p` in the shared memory of the block of that rank, as a generic pointer.
  template <typename T>
  __device__ __forceinline__ T* map_shared(T* p, int rank) const {
    return size > 1 ? ptx::map_shared(p, rank) : p;
  }
};

// Values of all warps, gathered in the shared memory of every block through DSMEM and published by a cluster barrier.
// Two buffers alternate, so that one barrier per round suffices: before a warp writes a buffer a second time, it passes
// the barrier that follows every read of that buffer.
struct ClusterExchange {
  static constexpr int kValues = 3;  // per warp and round
  u64* memory;
  int buffer;

  static __host__ __device__ size_t bytes(int num_warps) { return 2 * kValues * sizeof(u64) * num_warps; }

  // `v` is the same in all lanes.
  __device__ __forceinline__ void broadcast(const Cluster& cluster, int which, u64 v) {
    u64* values = memory + (buffer * kValues + which) * cluster.num_warps;
#pragma unroll 1
    for (int rank = cluster.lane; rank < cluster.size; rank += 32) cluster.map_shared(values, rank)[cluster.warp] = v;
  }
  __device__ __forceinline__ void sync(const Cluster& cluster) {
    cluster.sync();
    buffer ^= 1;
  }

  // The rest reads what the last sync() published.
  __device__ __forceinline__ const u64* values(const Cluster& cluster, int which) const {
    return memory + ((buffer ^ 1) * kValues + which) * cluster.num_warps;
  }
  __device__ __forceinline__ u64 sum(const Cluster& cluster, int which) const {
    return sum_range(cluster, which, 0, cluster.num_warps);
  }
  __device__ __forceinline__ u64 sum_range(const Cluster& cluster, int which, int first, int end) const {
    u64 total = 0;
#pragma unroll 1
    for (int w = first + cluster.lane; w < end; w += 32) total += values(cluster, which)[w];
    return warp_sum(total);
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
