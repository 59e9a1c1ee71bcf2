// One-dimensional arrays of int32 or int64 (positions, slots, ids), read as int64.
#pragma once

#include <cstdint>

namespace kestrel {

// `volatile` and "memory" keep the compiler from moving the read above pdl_wait().
__device__ __forceinline__ int64_t load_index(const void* p, bool is_int64) {
  int64_t index;
  if (is_int64) {
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(index) : "l"(p) : "memory");
  } else {
    int narrow;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(narrow) : "l"(p) : "memory");
    index = narrow;
  }
  return index;
}

struct IndexArray {
  const char* base = nullptr;
  bool is_int64 = false;

  __device__ __forceinline__ const char* address(int64_t i) const { return base + i * (is_int64 ? 8 : 4); }
  __device__ __forceinline__ int64_t load(int64_t i) const { return load_index(address(i), is_int64); }
};

}  // namespace kestrel
