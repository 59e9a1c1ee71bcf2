// The three kinds of code: their scale, and how quotients become bytes and bytes become numbers again.
#pragma once

#include "segments.cuh"

namespace kestrel::quant {

// Adding it leaves a float of small magnitude, rounded half to even, as two's complement in the low bits.
constexpr float kRounder = 12582912.f;  // 1.5 * 2^23

// amax / largest code; 1 where that is zero.
template <int largest>
__device__ __forceinline__ float integer_scale(float amax) {
  if (amax >= 0x1p-64f) return divide(amax, largest, 1.f / largest);
  const float scale = __fdiv_rn(amax, largest);
  return scale > 0.f ? scale : 1.f;
}

// Round half to even and saturate; NaN becomes 0.
__device__ __forceinline__ int integer_code(float quotient, int largest) {
  return max(-largest, min(largest, __float2int_rn(quotient)));
}

struct Fp8 {
  static constexpr int per_byte = 1;
  __device__ __forceinline__ static float scale(float amax, const float* bound) { return fp8_scale(amax, bound); }
  // Four or eight quotients, finite ones, to 32-bit words.
  template <int size>
  __device__ __forceinline__ static uint2 encode(const float (&q)[size]) {
    uint2 words{to_fp8x4(q[0], q[1], q[2], q[3]), 0};
    if constexpr (size == 8) words.y = to_fp8x4(q[4], q[5], q[6], q[7]);
    return words;
  }
  __device__ __forceinline__ static unsigned element(float quotient) { return to_fp8(quotient); }
  // As many numbers as codes.
  template <int size>
  __device__ __forceinline__ static void decode(uint2 words, float (&f)[size]) {
#pragma unroll
    for (int i = 0; i < size / 2; ++i) {
      const uint32_t word = i < 2 ? words.x : words.y;
      const __half2 pair(
          __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(word >> 16 * (i & 1)), __NV_E4M3));
      const float2 both = __half22float2(pair);
      f[2 * i] = both.x;
      f[2 * i + 1] = both.y;
    }
  }
  __device__ __forceinline__ static float number(unsigned byte, int) { return from_fp8(byte); }
};

struct Int8 {
  static constexpr int per_byte = 1;
  __device__ __forceinline__ static float scale(float amax, const float*) { return integer_scale<127>(amax); }
  template <int size>
  __device__ __forceinline__ static uint2 encode(const float (&q)[size]) {
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < size; i += 4) {
      const uint32_t low = __byte_perm(round(q[i]), round(q[i + 1]), 0x0040);
      const uint32_t high = __byte_perm(round(q[i + 2]), round(q[i + 3]), 0x0040);
      words[i / 4] = __byte_perm(low, high, 0x5410);
    }
    return {words[0], words[1]};
  }
  __device__ __forceinline__ static unsigned element(float quotient) { return integer_code(quotient, 127) & 0xff; }
  template <int size>
  __device__ __forceinline__ static void decode(uint2 words, float (&f)[size]) {
    // The float 2^23 + 128 + code has code + 128 in its low byte, which is the code with its sign flipped.
    const uint32_t flipped[2] = {words.x ^ 0x80808080u, words.y ^ 0x80808080u};
#pragma unroll
    for (int i = 0; i < size; ++i) {
      f[i] = __uint_as_float(__byte_perm(flipped[i / 4], 0x4b000000u, 0x7440 + (i & 3))) - (8388608.f + 128.f);
    }
  }
  __device__ __forceinline__ static float number(unsigned byte, int) { return static_cast<int8_t>(byte); }

 private:
  __device__ __forceinline__ static uint32_t round(float q) { return __float_as_uint(q + kRounder); }
};

struct Int4 {
  static constexpr int per_byte = 2;
  __device__ __forceinline__ static float scale(float amax, const float*) { return integer_scale<7>(amax); }
  template <int size>
  __device__ __forceinline__ static uint2 encode(const float (&q)[size]) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < size; ++i) word |= (__float_as_uint(q[i] + kRounder) & 0xfu) << 4 * i;
    return {word, 0};
  }
  __device__ __forceinline__ static unsigned element(float quotient) { return integer_code(quotient, 7) & 0xf; }
  template <int size>
  __device__ __forceinline__ static void decode(uint2 words, float (&f)[size]) {
    const uint32_t flipped = words.x ^ 0x88888888u;  // as for INT8, with 8 for 128
#pragma unroll
    for (int i = 0; i < size; ++i) {
      f[i] = __uint_as_float((flipped >> 4 * i & 0xfu) | 0x4b000000u) - (8388608.f + 8.f);
    }
  }
  // Of the low nibble (0) or the high one (1).
  __device__ __forceinline__ static float number(unsigned byte, int nibble) {
    return static_cast<int>((byte >> 4 * nibble & 0xfu) ^ 8u) - 8;
  }
};

// Bytes of codes that a pack of T becomes: 2, 4 or 8.
template <typename C, typename T>
constexpr int kCodeBytes = Pack<T>::size / C::per_byte;

template <int bytes>
__device__ __forceinline__ void store_codes(char* p, uint2 words, bool streamed) {
  if constexpr (bytes == 8) {
    streamed ? __stcs(reinterpret_cast<uint2*>(p), words) : static_cast<void>(*reinterpret_cast<uint2*>(p) = words);
  } else if constexpr (bytes == 4) {
    streamed ? __stcs(reinterpret_cast<unsigned*>(p), words.x)
             : static_cast<void>(*reinterpret_cast<unsigned*>(p) = words.x);
  } else {
    *reinterpret_cast<unsigned short*>(p) = static_cast<unsigned short>(words.x);
  }
}

// Reads of codes, behind pdl_wait() and past L1.
template <int bytes>
__device__ __forceinline__ uint2 load_codes(const char* p) {
  uint2 words{0, 0};
  if constexpr (bytes == 8) {
    asm volatile("ld.global.L1::no_allocate.v2.b32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "l"(p) : "memory");
  } else if constexpr (bytes == 4) {
    asm volatile("ld.global.L1::no_allocate.b32 %0, [%1];" : "=r"(words.x) : "l"(p) : "memory");
  } else {
    unsigned short half;
    asm volatile("ld.global.L1::no_allocate.b16 %0, [%1];" : "=h"(half) : "l"(p) : "memory");
    words.x = half;
  }
  return words;
}

// One byte of codes from the elements at `values`, truly divided.
template <typename C, typename T>
__device__ __forceinline__ char encode_byte(const T* values, float first_scale, float second_scale) {
  unsigned byte = C::element(__fdiv_rn(to_float(values[0]), first_scale));
  if constexpr (C::per_byte == 2) byte |= C::element(__fdiv_rn(to_float(values[1]), second_scale)) << 4;
  return static_cast<char>(byte);
}

template <typename T>
using DivisorOf = std::conditional_t<sizeof(T) == 2, ShortDivisor, Divisor>;

// Writes the codes of the packs a thread holds. What the fast quotient does not cover is read again and truly divided.
template <typename C, typename T, int V>
__device__ __forceinline__ void encode(const Held<T, V>& held, float largest, const DivisorOf<T>& by,
                                       const Segment<C, T>& segment, int lanes, bool streamed) {
  constexpr int size = Pack<T>::size, bytes = kCodeBytes<C, T>;
  if (by.covers(largest)) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (v * lanes * size >= segment.count) break;
      float x[size];
      held.packs[v].unpack(x);
#pragma unroll
      for (int i = 0; i < size; ++i) x[i] = by(x[i]);
      store_codes<bytes>(segment.codes + v * lanes * bytes, C::encode(x), streamed);
    }
    return;
  }
#pragma unroll 1
  for (int v = 0; v < V; ++v) {
    if (v * lanes * size >= segment.count) break;
    const T* x = reinterpret_cast<const T*>(segment.values) + v * lanes * size;
#pragma unroll 1
    for (int i = 0; i < bytes; ++i) {
      segment.codes[v * lanes * bytes + i] = encode_byte<C>(x + i * C::per_byte, by.value, by.value);
    }
  }
}

// -- element by element: rows that are not whole, aligned packs -------------------------------------------------------

constexpr int kElements = 8;  // that a thread holds: every lanes-th one

// From `first` on; 0 past the end. All are asked for before the first is used, and before anything is written.
template <typename T>
__device__ __forceinline__ void load_elements(float (&x)[kElements], const T* values, int first, int lanes, int count) {
#pragma unroll
  for (int k = 0; k < kElements; ++k) x[k] = first + k * lanes < count ? to_float(values[first + k * lanes]) : 0.f;
}

// Their largest magnitude; NaN stays, inf too.
__device__ __forceinline__ float largest_of(const float (&x)[kElements]) {
  float result = 0.f;
#pragma unroll
  for (int k = 0; k < kElements; ++k) asm("max.NaN.f32 %0, %0, %1;" : "+f"(result) : "f"(fabsf(x[k])));
  return result;
}

__device__ __forceinline__ float finite_amax(const float (&x)[kElements]) {
  float result = largest_of(x);
  if (result <= FLT_MAX) return result;
  result = 0.f;
#pragma unroll
  for (int k = 0; k < kElements; ++k) result = fmaxf(result, finite_magnitude(x[k]));
  return result;
}

// Writes their codes, of a byte each.
template <typename C, typename T>
__device__ __forceinline__ void encode_elements(const float (&x)[kElements], const DivisorOf<T>& by, const T* values,
                                                char* codes, int first, int lanes, int count) {
  if (by.covers(largest_of(x))) {
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      const int i = first + k * lanes;
      if (i < count) codes[i] = static_cast<char>(C::element(by(x[k])));
    }
    return;
  }
#pragma unroll 1
  for (int i = first; i < count && i < first + kElements * lanes; i += lanes) {
    codes[i] = encode_byte<C>(values + i, by.value, by.value);
  }
}

}  // namespace kestrel::quant
