// Policies of the L2 cache for copies (sm_80).
#pragma once

#include <cstdint>

namespace kestrel::ptx {

// evict_first: what is copied leaves L2 first. Data that is read once then does not evict what is read again, such as
// instructions.
__device__ __forceinline__ uint64_t l2_policy(bool evict_first) {
  uint64_t policy;
  if (evict_first) {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}

}  // namespace kestrel::ptx
