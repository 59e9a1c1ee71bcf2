// One all-to-all exchange between the CTAs of a cluster through distributed shared memory. Each CTA has an mbarrier
// that completes when all bytes sent to it have arrived. Used from sm_90 on; before, there are no clusters.
#pragma once

#include <kestrel/ptx/cluster.cuh>
#include <kestrel/ptx/mbarrier.cuh>

namespace kestrel::moe {

// All threads call this: `barrier` of this CTA expects `bytes`. Sends to it may start after exchange_ready().
__device__ __forceinline__ void exchange_begin(uint64_t* barrier, unsigned bytes) {
  if (threadIdx.x == 0) ptx::mbarrier_init(barrier, 1);
  __syncwarp();  // compute-sanitizer's racecheck reports a false hazard without it
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(barrier, bytes);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();
}

// Waits until every CTA of the cluster has begun.
__device__ __forceinline__ void exchange_ready() { ptx::cluster_wait(); }

// Stores v at the address of p in CTA `to` and counts its bytes on that CTA's barrier.
template <typename T>
__device__ __forceinline__ void exchange_send(unsigned to, const T* p, T v, const uint64_t* barrier) {
  ptx::store_async(ptx::map_shared(ptx::shared_address(p), to), v, ptx::map_shared(ptx::shared_address(barrier), to));
}

// Waits until everything sent to this CTA has arrived.
__device__ __forceinline__ void exchange_wait(const uint64_t* barrier) { ptx::mbarrier_wait_cluster(barrier, 0); }

}  // namespace kestrel::moe
