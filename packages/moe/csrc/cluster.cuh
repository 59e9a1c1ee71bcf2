// Clusters of thread blocks (sm_90 and later): their barrier, and writes to a neighbour's shared memory. Elsewhere a
// cluster is one block.
#pragma once

#include <cstdint>

namespace kestrel::moe {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define KESTREL_CLUSTERS 1
#else
#define KESTREL_CLUSTERS 0
#endif

// All blocks of the cluster: what one wrote to shared memory before it arrived, the others find after they waited.
__device__ __forceinline__ void cluster_arrive() {
#if KESTREL_CLUSTERS
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if KESTREL_CLUSTERS
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// *p = v, where p is what a variable of this block's shared memory is in block `rank` of the cluster.
__device__ __forceinline__ void store_in(unsigned rank, unsigned* p, unsigned v) {
#if KESTREL_CLUSTERS
  const uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(p));
  uint32_t theirs;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(own), "r"(rank));
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(theirs), "r"(v) : "memory");
#else
  *p = v;
#endif
}

}  // namespace kestrel::moe
