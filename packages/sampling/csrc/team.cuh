// The blocks that share a row: a cluster with distributed shared memory from sm_90 on, one block before.
// Everything that is summed here is an integer, so the order of warps and blocks does not show in a result.
#pragma once

#include <kestrel/pdl.cuh>

#include <cstdint>

namespace kestrel::sampling {

using u32 = uint32_t;
using u64 = uint64_t;
constexpr u32 kAllLanes = 0xffffffffu;

// ---- one warp -------------------------------------------------------------------------------------------------------

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

// ---- PTX ------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float max_or_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

__device__ __forceinline__ float power_of_two(float x) {  // below 2^-126 it is 0
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ void team_barrier(int blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    return;
  }
#endif
  __syncthreads();
}

// A block may touch the memory of another one once that has started: each says so, and waits before it first does.
__device__ __forceinline__ void team_arrive(int blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (blocks > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void team_wait(int blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (blocks > 1) asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}

// The address of this block's `p` in another block of the cluster, usable as any other pointer.
template <typename T>
__device__ __forceinline__ T* in_block(T* p, int block, int blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    u64 mapped;
    asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(p), "r"(block));
    return reinterpret_cast<T*>(mapped);
  }
#endif
  return p;
}

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Without a branch, where most threads have nothing to add.
__device__ __forceinline__ void add_if(bool adds, u32 address, u32 v) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %0, 0;\n@p red.shared.add.u32 [%1], %2;\n}" ::"r"(static_cast<u32>(adds)),
      "r"(address), "r"(v)
      : "memory");
}

__device__ __forceinline__ char* dynamic_shared_memory() {
  extern __shared__ __align__(16) char memory[];
  return memory;
}

// ---- the team -------------------------------------------------------------------------------------------------------

// Where a thread stands among the warps of all blocks of a row.
struct Team {
  int blocks;     // of the cluster: a power of two
  int block;      // which of them
  int warps;      // of a block
  int all_warps;  // of the team
  int warp;       // of this thread, within the team
  int lane;

  __device__ __forceinline__ explicit Team(int blocks_)
      : blocks(blocks_),
        block(static_cast<int>(blockIdx.x & (blocks_ - 1))),
        warps(blockDim.x >> 5),
        all_warps(blocks_ * warps),
        warp(block * warps + (threadIdx.x >> 5)),
        lane(threadIdx.x & 31) {}

  // The row of this block: its number among all teams.
  __device__ __forceinline__ int64_t row() const { return blockIdx.x >> (31 - __clz(blocks)); }
  // arrive() first of all, then wait() before exchanging anything. After its last barrier() no block touches another's
  // memory, so that each may end.
  __device__ __forceinline__ void arrive() const { team_arrive(blocks); }
  __device__ __forceinline__ void wait() const { team_wait(blocks); }
  __device__ __forceinline__ void barrier() const { team_barrier(blocks); }
};

// One number per warp of the team, in every block: two sets of `kept` numbers that alternate, so that one barrier a
// round is enough (who writes a set again has passed the barrier after everybody read it).
struct Exchange {
  static constexpr int kept = 3;
  u64* memory;
  int set;

  static __host__ __device__ size_t bytes(int all_warps) { return 2 * kept * sizeof(u64) * all_warps; }

  __device__ __forceinline__ u64* slots(const Team& team, int which) const {
    return memory + (set * kept + which) * team.all_warps;
  }
  // `v` is the same in all lanes.
  __device__ __forceinline__ void put(const Team& team, int which, u64 v) {
#pragma unroll 1
    for (int b = team.lane; b < team.blocks; b += 32) {
      in_block(slots(team, which), b, team.blocks)[team.warp] = v;
    }
  }
  __device__ __forceinline__ void share(const Team& team) {
    team.barrier();
    set ^= 1;
  }
  // Of the numbers shared last.
  __device__ __forceinline__ const u64* shared(const Team& team, int which) const {
    return memory + ((set ^ 1) * kept + which) * team.all_warps;
  }
  __device__ __forceinline__ u64 sum(const Team& team, int which) const {
    return sum_of(team, which, 0, team.all_warps);
  }
  __device__ __forceinline__ u64 sum_of(const Team& team, int which, int first, int end) const {
    u64 total = 0;
#pragma unroll 1
    for (int w = first + team.lane; w < end; w += 32) total += shared(team, which)[w];
    return warp_sum(total);
  }
  __device__ __forceinline__ int largest(const Team& team, int which) const {
    int most = INT32_MIN;
#pragma unroll 1
    for (int w = team.lane; w < team.all_warps; w += 32) {
      most = max(most, static_cast<int>(static_cast<u32>(shared(team, which)[w])));
    }
    return __reduce_max_sync(kAllLanes, most);
  }
};

}  // namespace kestrel::sampling
