// Clusters of thread blocks (sm_90 and later): messages into each other's shared memory. Elsewhere a
// cluster is one block, and none of this is called.
#pragma once

#include <cstdint>

namespace kestrel::moe {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define KESTREL_CLUSTERS 1
#else
#define KESTREL_CLUSTERS 0
#endif

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A box in this block's shared memory that is complete when `bytes` have been sent to it. Every thread calls this, and
// cluster_ready() later; then every block may send to every other.
__device__ __forceinline__ void open_box(uint64_t* box, unsigned bytes) {
#if KESTREL_CLUSTERS
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(box)) : "memory");
  }
  __syncwarp();  // without it racecheck takes the two for accesses of two lanes
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(box)), "r"(bytes)
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_ready() {
#if KESTREL_CLUSTERS
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Stores v where p is in block `to` of the cluster, and counts its four bytes in that block's box.
__device__ __forceinline__ void send(unsigned to, const unsigned* p, unsigned v, const uint64_t* box) {
#if KESTREL_CLUSTERS
  uint32_t there, there_box;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(to));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there_box) : "r"(shared_address(box)), "r"(to));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(there), "r"(v),
               "r"(there_box)
               : "memory");
#endif
}

// The same for sixteen bytes.
__device__ __forceinline__ void send(unsigned to, const float4* p, float4 v, const uint64_t* box) {
#if KESTREL_CLUSTERS
  uint32_t there, there_box;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(to));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there_box) : "r"(shared_address(box)), "r"(to));
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(there_box)
      : "memory");
#endif
}

// Returns when this block's box is complete: what was sent can be read.
__device__ __forceinline__ void receive(const uint64_t* box) {
#if KESTREL_CLUSTERS
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(box))
        : "memory");
  }
#endif
}

}  // namespace kestrel::moe
