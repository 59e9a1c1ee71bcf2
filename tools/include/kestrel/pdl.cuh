// Programmatic dependent launch, seen from a kernel. Before sm_90 there is none: both calls are empty.
#pragma once

namespace kestrel {

// Until this returns, only what the op's docstring marks *constant* may be read, and nothing written.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel may start, up to its own pdl_wait(). Call it after this kernel's own pdl_wait(): the
// next kernel then starts when all launches before this one have completed, so that a constant it reads early may have
// been written by any of them; only the launch just before it may not write one. A trigger before the wait would let a
// whole chain of kernels start at once, each of which could read constants that the first of them is still writing.
__device__ __forceinline__ void pdl_trigger() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Keeps a value from being computed later than here: the compiler sinks what it can past pdl_wait().
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void pin(unsigned& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void pin(int& value) { asm volatile("" : "+r"(value)); }
template <typename P>
__device__ __forceinline__ void pin(P*& pointer) {
  asm volatile("" : "+l"(pointer));
}

}  // namespace kestrel
