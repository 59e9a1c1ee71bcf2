// Barriers of some of a CTA's threads.
#pragma once

namespace kestrel::ptx {

// bar.sync over `threads` threads, whole warps. A CTA has barriers 0 to 15; 0 is that of __syncthreads().
__device__ __forceinline__ void named_barrier(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Counts as one of `threads` without waiting for the others.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace kestrel::ptx
