// What the warps of a team tell each other without a barrier of the cluster, which would wait for all memory and empty
// L1: every warp writes its numbers into the shared memory of all blocks, and a counter there knows when all have
// arrived. A team of one block uses its own shared memory and barrier.
#pragma once

#include "team.cuh"

namespace kestrel::sampling {

__device__ __forceinline__ u32 address_in_block(u32 address, int block) {
  u32 mapped = address;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(block));
#endif
  return mapped;
}

__device__ __forceinline__ void begin_counting(u64* counter) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(counter)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void expect_bytes(u64* counter, u32 bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(counter)), "r"(bytes)
               : "memory");
#endif
}

__device__ __forceinline__ void wait_for_bytes(u64* counter, u32 parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  u32 done = 0;
  while (!done) {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(counter)), "r"(parity)
                 : "memory");
  }
#endif
}

// To where `to` stands in another block, counted there.
__device__ __forceinline__ void send(u64* to, u64 v, u64* counter, int block) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(
                   address_in_block(shared_address(to), block)),
               "l"(v), "r"(address_in_block(shared_address(counter), block))
               : "memory");
#endif
}

__device__ __forceinline__ void send(int4* to, int4 v, u64* counter, int block) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   address_in_block(shared_address(to), block)),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(address_in_block(shared_address(counter), block))
               : "memory");
#endif
}

// Two sets of `kept` numbers per warp that alternate: who writes a set again has had a message from everybody since
// they read it. In every round all warps put the same numbers, or somebody sends what is expected, and then all share.
struct Mail {
  static constexpr int kept = 3;
  u64* memory;
  u32 round = 0;
  u32 numbers = 0;  // of each warp, in this round

  static __host__ __device__ size_t bytes(int all_warps) {
    return 2 * kept * sizeof(u64) * all_warps + 2 * sizeof(u64);
  }

  __device__ __forceinline__ u64* counter(const Team& team) const {
    return memory + 2 * kept * team.all_warps + (round & 1);
  }
  // By one thread, before the team arrives.
  __device__ __forceinline__ void begin(const Team& team) const {
    if (team.blocks == 1) return;
    begin_counting(memory + 2 * kept * team.all_warps);
    begin_counting(memory + 2 * kept * team.all_warps + 1);
  }
  // `v` is the same in all lanes.
  __device__ __forceinline__ void put(const Team& team, int which, u64 v) {
    u64* slot = memory + ((round & 1) * kept + which) * team.all_warps + team.warp;
    if (team.blocks == 1) {
      if (team.lane == 0) *slot = v;
    } else {
      __syncwarp();  // what any lane read before, it has read when the message arrives
      if (team.lane < team.blocks) send(slot, v, counter(team), team.lane);
    }
    ++numbers;
  }
  __device__ __forceinline__ void put_floats(const Team& team, int which, float x, float y) {
    put(team, which, __float_as_uint(x) | (static_cast<u64>(__float_as_uint(y)) << 32));
  }
  // Four words to every block, by one warp.
  __device__ __forceinline__ void tell(const Team& team, int4* to, int4 v) const {
    if (team.blocks == 1) {
      if (team.lane == 0) *to = v;
    } else if (team.lane < team.blocks) {
      send(to, v, counter(team), team.lane);
    }
  }
  // Waits for what all warps put, and `told` calls of tell(). What the leader, a thread of every block, wrote into its
  // shared memory before is there, too; of what others wrote, only what they put.
  __device__ __forceinline__ void share(const Team& team, bool leader, u32 told = 0) {
    if (team.blocks == 1) {
      __syncthreads();
    } else {
      if (leader) expect_bytes(counter(team), numbers * team.all_warps * 8 + told * 16);
      wait_for_bytes(counter(team), (round >> 1) & 1);
    }
    ++round;
    numbers = 0;
  }

  // ---- of the numbers shared last -----------------------------------------------------------------------------------

  __device__ __forceinline__ const u64* shared(const Team& team, int which) const {
    return memory + (((round - 1) & 1) * kept + which) * team.all_warps;
  }
  // Of the warps before `end`.
  __device__ __forceinline__ u64 sum(const Team& team, int which, int end) const {
    u64 total = 0;
#pragma unroll 1
    for (int w = team.lane; w < end; w += 32) total += shared(team, which)[w];
    return warp_sum(total);
  }
  __device__ __forceinline__ float2 float_sums(const Team& team, int which) const {
    float2 sums = {0.f, 0.f};
#pragma unroll 1
    for (int w = team.lane; w < team.all_warps; w += 32) {
      const u64 both = shared(team, which)[w];
      sums.x += __uint_as_float(static_cast<u32>(both)), sums.y += __uint_as_float(static_cast<u32>(both >> 32));
    }
    return {warp_float_sum(sums.x), warp_float_sum(sums.y)};
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
