// Signals between CTAs through global memory, beside bulk copies (sm_90).
#pragma once

#include <kestrel/ptx/shared.cuh>

#include <cstdint>

namespace kestrel::ptx {

// Fetches memory into L2: a multiple of 16 bytes.
__device__ __forceinline__ void bulk_prefetch(const char* from, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// Waits until at most `pending` of this thread's last bulk groups still have to write memory.
template <int pending>
__device__ __forceinline__ void bulk_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
#endif
}

// Adds to a counter, after all that this thread knows of has been written.
__device__ __forceinline__ void add_release(int* counter, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}

__device__ __forceinline__ int load_acquire(const int* counter) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// Orders earlier accesses of this thread before its bulk copies, in memory of all kinds.
__device__ __forceinline__ void fence_proxy_async_all() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

// `arrivals` arrivals.
__device__ __forceinline__ void mbarrier_arrive_many(uint64_t* barrier, uint32_t arrivals) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#endif
}

}  // namespace kestrel::ptx
