// Thread block clusters and distributed shared memory (DSMEM), sm_90. Before sm_90 a cluster is one block: addresses
// map to themselves, and barriers and asynchronous stores are empty.
#pragma once

#include <cstdint>

namespace kestrel::ptx {

// -- barriers ---------------------------------------------------------------------------------------------------------
//
// Every thread of the cluster arrives and waits once per barrier. The aligned forms need converged warps.

// Orders no memory: for "this block has started", where the wait needs to acquire nothing.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// For warps that may have diverged.
__device__ __forceinline__ void cluster_wait_unaligned() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// -- distributed shared memory ----------------------------------------------------------------------------------------

// The DSMEM address of a shared-memory address of this block in the block of that rank.
__device__ __forceinline__ uint32_t map_shared(uint32_t address, uint32_t rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address), "r"(rank));
#endif
  return address;
}

// The same of a generic pointer, which plain loads and stores take.
template <typename T>
__device__ __forceinline__ T* map_shared(T* p, uint32_t rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint64_t mapped;
  asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(p), "r"(rank));
  return reinterpret_cast<T*>(mapped);
#else
  return p;
#endif
}

// Asynchronous stores. The mbarrier, of the same block as the target, counts the bytes when they are visible there.
// Both addresses come from map_shared().
__device__ __forceinline__ void store_async(uint32_t address, uint32_t v, uint32_t mbarrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address), "r"(v),
               "r"(mbarrier)
               : "memory");
#endif
}

__device__ __forceinline__ void store_async(uint32_t address, uint64_t v, uint32_t mbarrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(address), "l"(v),
               "r"(mbarrier)
               : "memory");
#endif
}

__device__ __forceinline__ void store_async(uint32_t address, int4 v, uint32_t mbarrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(mbarrier)
      : "memory");
#endif
}

__device__ __forceinline__ void store_async(uint32_t address, float4 v, uint32_t mbarrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(mbarrier)
      : "memory");
#endif
}

// Starts to copy `bytes` bytes, a multiple of 16, of this block's shared memory to `to`. The mbarrier, of the same
// block as `to`, counts them. Both come from map_shared(). The source must stay, and this block run, until they have
// arrived.
__device__ __forceinline__ void copy_shared_async(uint32_t to, uint32_t from, uint32_t bytes, uint32_t mbarrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(mbarrier)
               : "memory");
#endif
}

}  // namespace kestrel::ptx
