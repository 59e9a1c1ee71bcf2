// One exchange between the CTAs of a cluster through distributed shared memory: each CTA has an mbarrier that completes
// when all bytes sent to it have arrived. From sm_90 on; before it a cluster is one CTA and none of this is called.
#pragma once

#include <kestrel/ptx/cluster.cuh>
#include <kestrel/ptx/mbarrier.cuh>

namespace kestrel::moe {

// All threads call this: `barrier` of this CTA expects `bytes`. Sends to it may start after exchange_ready().
__device__ __forceinline__ void exchange_begin(uint64_t* barrier, unsigned bytes) {
  if (threadIdx.x == 0) ptx::mbarrier_init(barrier, 1);
  __syncwarp();  // for racecheck, which takes the two accesses for those of different lanes
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(barrier, bytes);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();
}

// Waits until every CTA of the cluster has begun.
__device__ __forceinline__ void exchange_ready() { ptx::cluster_wait(); }

// Stores v where p is in CTA `to`, and counts its bytes in that CTA's barrier.
template <typename T>
__device__ __forceinline__ void exchange_send(unsigned to, const T* p, T v, const uint64_t* barrier) {
  ptx::store_async(ptx::map_shared(ptx::shared_address(p), to), v, ptx::map_shared(ptx::shared_address(barrier), to));
}

// Waits until everything sent to this CTA has arrived.
__device__ __forceinline__ void exchange_wait(const uint64_t* barrier) { ptx::mbarrier_wait_cluster(barrier, 0); }

}  // namespace kestrel::moe
