// 8 x 8 matrices of 16-bit elements between shared memory and registers, and pairs of such elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace kestrel::ptx {

// ldmatrix of four matrices. Lane i gives the address of row i % 8 of matrix i / 8, and receives elements 2 * (i % 4)
// and the next one of row i / 4 of each.
__device__ __forceinline__ void load_matrices(uint32_t address, unsigned (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// The same of the transposed matrices.
__device__ __forceinline__ void load_matrices_transposed(uint32_t address, unsigned (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// stmatrix (sm_90), the inverse of load_matrices. Empty before sm_90.
__device__ __forceinline__ void store_matrices(uint32_t address, const unsigned (&m)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m[0]), "r"(m[1]),
               "r"(m[2]), "r"(m[3])
               : "memory");
#endif
}

// The inverse of load_matrices_transposed.
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, const unsigned (&m)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(m[0]),
               "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
#endif
}

// A pair of 16-bit elements from two floats, the first one in the low half; and back.
template <typename T>
__device__ __forceinline__ unsigned pack_pair(float2 pair) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 both = __float22half2_rn(pair);
    return reinterpret_cast<const unsigned&>(both);
  } else {
    const __nv_bfloat162 both = __float22bfloat162_rn(pair);
    return reinterpret_cast<const unsigned&>(both);
  }
}

template <typename T>
__device__ __forceinline__ float2 unpack_pair(unsigned pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  } else {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
  }
}

}  // namespace kestrel::ptx
