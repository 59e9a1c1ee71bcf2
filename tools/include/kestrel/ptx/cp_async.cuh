// Asynchronous copies from global to shared memory (sm_80): of 16 bytes past L1, or of 4. Both addresses are multiples
// of the size.
#pragma once

#include <cstdint>

namespace kestrel::ptx {

__device__ __forceinline__ void cp_async16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// Writes zeros and reads nothing where `valid` is false.
__device__ __forceinline__ void cp_async16_or_zero(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}

// The same with a policy of cache.cuh.
__device__ __forceinline__ void cp_async16_or_zero(uint32_t shared, const void* global, bool valid, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
               "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}

// Copies `bytes` bytes, 0 to 16, and zeros up to 16; copies nothing unless `condition`. There is no branch.
__device__ __forceinline__ void cp_async16_if(bool condition, uint32_t shared, const void* global, int bytes) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p cp.async.cg.shared.global [%0], [%1], 16, %2;\n}" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(static_cast<int>(condition))
      : "memory");
}

// As cp_async16_or_zero with 4 bytes, which pass through L1.
__device__ __forceinline__ void cp_async4_or_zero(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid ? 4 : 0)
               : "memory");
}

// Closes this thread's current group of copies.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of this thread's last groups are in flight.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Waits for all of this thread's copies, whether in a group or not.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace kestrel::ptx
