// Eight codes of a word become one A fragment of mma.sync or wgmma, in 16 bits: code idx of half e is at bit
// 16 e + 4 idx + 3 (of a ring of 32), element e of register idx. Registers 0 and 2 are of one row, 1 and 3 of another.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace kestrel::quant {

// (codes & mask) | magic
template <uint32_t mask, uint32_t magic>
__device__ __forceinline__ uint32_t masked(uint32_t codes) {
  uint32_t v;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(codes), "n"(mask), "n"(magic));
  return v;
}

// Codes as mantissa bits, 3 to 6 in bf16 and 6 to 9 in fp16: they are 16 + code, exactly.
template <typename T>
struct Decoder {
  static constexpr bool bf16 = std::is_same_v<T, __nv_bfloat16>;
  static constexpr uint32_t magic = bf16 ? 0x41804180u : 0x4c004c00u, mask = bf16 ? 0x00780078u : 0x03c003c0u;
  static constexpr uint32_t code_step = bf16 ? 8 : 64;

  static __device__ __forceinline__ void decode(uint32_t codes, uint32_t (&a)[4]) {
    constexpr int first = bf16 ? 0 : 3;  // bits to shift to the left
    a[0] = masked<mask, magic>(codes << first);
    a[1] = masked<mask, magic>(codes >> 4 - first);
    a[2] = masked<mask, magic>(codes >> 8 - first);
    a[3] = masked<mask, magic>(__funnelshift_r(codes, codes, 12 - first));
  }

  // -(16 + zero), twice; a zero point is at most 16.
  static __device__ __forceinline__ uint32_t minus_offset(uint32_t zero) {
    return ((magic & 0xffffu | 0x8000u) + code_step * zero) * 0x10001u;
  }

  // 16 + code to code - zero, which is exact.
  static __device__ __forceinline__ uint32_t centred(uint32_t pair, uint32_t offset) {
    uint32_t d;
    if constexpr (bf16) {
      asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(pair), "r"(0x3f803f80u), "r"(offset));
    } else {
      asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(pair), "r"(offset));
    }
    return d;
  }
};

// Two elements times two others, and plus two more, rounded once.
__device__ __forceinline__ uint32_t multiply_add_bf16(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// 2^exponent in bf16, twice.
__host__ __device__ constexpr uint32_t power_bf16(int exponent) {
  return static_cast<uint32_t>(exponent + 127 << 7) * 0x10001u;
}

constexpr uint32_t kMinusBf16 = 0x80008000u;  // the signs of two elements

// The codes of a word as subnormal numbers of bf16, each in its place: code * 2^-133 in bits 0 to 3, of registers 0 and
// 2, and code * 2^-129 in bits 4 to 7, of registers 1 and 3.
__device__ __forceinline__ void subnormal_codes(uint32_t word, uint32_t (&a)[4]) {
  const uint32_t first = __funnelshift_r(word, word, 3), second = first >> 8;
  a[0] = first & 0x000f000fu;
  a[1] = first & 0x00f000f0u;
  a[2] = second & 0x000f000fu;
  a[3] = second & 0x00f000f0u;
}

// Codes less their zero points, exactly, divided by `unit`. SUBNORMAL: of bf16, with fewer instructions.
template <typename T, bool SUBNORMAL>
struct CentredCodes {
  static constexpr float unit = 1.f;

  static __device__ __forceinline__ uint32_t minus_zero(uint32_t zero) { return Decoder<T>::minus_offset(zero); }

  // minus_zeros: those of the two rows.
  static __device__ __forceinline__ void decode(uint32_t word, const uint32_t (&minus_zeros)[2], uint32_t (&a)[4]) {
    Decoder<T>::decode(word, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = Decoder<T>::centred(a[i], minus_zeros[i % 2]);
  }
};

template <>
struct CentredCodes<__nv_bfloat16, true> {
  static constexpr float unit = 64.f;

  static __device__ __forceinline__ uint32_t minus_zero(uint32_t zero) {
    return multiply_add_bf16(zero * 0x10001u, power_bf16(133 - 6) | kMinusBf16, kMinusBf16);
  }

  static __device__ __forceinline__ void decode(uint32_t word, const uint32_t (&minus_zeros)[2], uint32_t (&a)[4]) {
    subnormal_codes(word, a);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = multiply_add_bf16(a[i], i % 2 == 0 ? power_bf16(133 - 6) : power_bf16(129 - 6), minus_zeros[i % 2]);
    }
  }
};

// Two elements times two others, rounded.
template <typename T>
__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
  uint32_t d;
  if constexpr (!std::is_same_v<T, __nv_bfloat16>) {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    d = multiply_add_bf16(a, b, kMinusBf16);
#else
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#endif
  }
  return d;
}

}  // namespace kestrel::quant
