// Packs of 16 bytes: the unit of global accesses, and their conversion to and from float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kestrel {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

template <typename T>
struct Pack {
  static constexpr int size = 16 / sizeof(T);
  uint4 bits;

  __device__ __forceinline__ void unpack(float (&f)[size]) const {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        f[i] = __uint_as_float(words[i]);
      } else if constexpr (std::is_same_v<T, __half>) {
        __half2 pair;
        memcpy(&pair, &words[i], 4);
        const float2 both = __half22float2(pair);
        f[2 * i] = both.x;
        f[2 * i + 1] = both.y;
      } else {
        f[2 * i] = __uint_as_float(words[i] << 16);
        f[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      }
    }
  }

  __device__ __forceinline__ void pack(const float (&f)[size]) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = __float_as_uint(f[i]);
      } else if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = __floats2half2_rn(f[2 * i], f[2 * i + 1]);
        memcpy(&words[i], &pair, 4);
      } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(f[2 * i], f[2 * i + 1]);
        memcpy(&words[i], &pair, 4);
      }
    }
    bits = make_uint4(words[0], words[1], words[2], words[3]);
  }
};

// Loads that do not allocate in L1, for data that is read once. `volatile` and "memory" keep them after pdl_wait().
__device__ __forceinline__ uint4 load16_streamed(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// Plain loads that stay after pdl_wait().
__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// Loads of constants, to be issued before pdl_wait(). Not ld.global.nc: ptxas moves those past the wait.
__device__ __forceinline__ uint4 load16_constant(const void* p) { return load16(p); }

__device__ __forceinline__ void store16(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }

// A store whose line L2 evicts first, for results larger than L2.
__device__ __forceinline__ void store16_streamed(void* p, uint4 v) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

}  // namespace kestrel
