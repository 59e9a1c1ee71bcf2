// Programmatic dependent launch, seen from a kernel. Before sm_90 there is none: both calls are empty.
#pragma once

namespace kestrel {

// Before this returns, a kernel may only read what the op's docstring marks *constant*, and write nothing.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel may start and run up to its own pdl_wait(). Call it after this kernel's own pdl_wait():
// the next kernel then starts after all launches before this one have completed, so only the launch just before it must
// not write its constants. With a trigger before the wait a chain of kernels could start at once, each reading
// constants that the first of them is still writing.
__device__ __forceinline__ void pdl_trigger() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Computes a value here: the compiler would otherwise move the computation past pdl_wait().
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void pin(unsigned& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void pin(int& value) { asm volatile("" : "+r"(value)); }
template <typename P>
__device__ __forceinline__ void pin(P*& pointer) {
  asm volatile("" : "+l"(pointer));
}

}  // namespace kestrel
