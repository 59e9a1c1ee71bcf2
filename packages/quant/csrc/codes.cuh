// The three kinds of code (FP8 e4m3, INT8, INT4): their scale, encoding and decoding.
#pragma once

#include "segments.cuh"

namespace kestrel::quant {

// amax / largest code, correctly rounded; 1 where that is zero.
template <int largest>
__device__ __forceinline__ float integer_scale(float amax) {
  if (amax >= 0x1p-64f) return divide(amax, largest, 1.f / largest);
  const float scale = __fdiv_rn(amax, largest);
  return scale > 0.f ? scale : 1.f;
}

// Each kind has
//   scale(amax, scale_ub)        the computed scale of a segment
//   encode(quotients)            the codes of 4 or 8 finite quotients, in one or two words
//   encode_one(quotient)         one code; any quotient
//   decode(words, numbers)       the numbers of as many codes
//   decode_one(byte, nibble)     one number; nibble 0 is the low one
struct Fp8 {
  static constexpr int per_byte = 1;
  __device__ __forceinline__ static float scale(float amax, const float* scale_ub) { return fp8_scale(amax, scale_ub); }
  template <int size>
  __device__ __forceinline__ static uint2 encode(const float (&q)[size]) {
    uint2 words{to_fp8x4(q[0], q[1], q[2], q[3]), 0};
    if constexpr (size == 8) words.y = to_fp8x4(q[4], q[5], q[6], q[7]);
    return words;
  }
  __device__ __forceinline__ static unsigned encode_one(float quotient) { return to_fp8(quotient); }
  template <int size>
  __device__ __forceinline__ static void decode(uint2 words, float (&f)[size]) {
#pragma unroll
    for (int i = 0; i < size / 2; ++i) {
      const uint32_t word = i < 2 ? words.x : words.y;
      const float2 pair = from_fp8x2(static_cast<uint16_t>(word >> 16 * (i & 1)));
      f[2 * i] = pair.x;
      f[2 * i + 1] = pair.y;
    }
  }
  __device__ __forceinline__ static float decode_one(unsigned byte, int) { return from_fp8(byte); }
};

struct Int8 {
  static constexpr int per_byte = 1;
  __device__ __forceinline__ static float scale(float amax, const float*) { return integer_scale<127>(amax); }
  template <int size>
  __device__ __forceinline__ static uint2 encode(const float (&q)[size]) {
    uint2 words{to_int8x4(q[0], q[1], q[2], q[3]), 0};
    if constexpr (size == 8) words.y = to_int8x4(q[4], q[5], q[6], q[7]);
    return words;
  }
  __device__ __forceinline__ static unsigned encode_one(float quotient) {
    return to_integer_code<127>(quotient) & 0xff;
  }
  template <int size>
  __device__ __forceinline__ static void decode(uint2 words, float (&f)[size]) {
    const uint32_t both[2] = {words.x, words.y};
#pragma unroll
    for (int i = 0; i < size; ++i) f[i] = from_int8(both[i / 4], i & 3);
  }
  __device__ __forceinline__ static float decode_one(unsigned byte, int) { return static_cast<int8_t>(byte); }
};

struct Int4 {
  static constexpr int per_byte = 2;
  __device__ __forceinline__ static float scale(float amax, const float*) { return integer_scale<7>(amax); }
  template <int size>
  __device__ __forceinline__ static uint2 encode(const float (&q)[size]) {
    return {to_int4(q), 0};
  }
  __device__ __forceinline__ static unsigned encode_one(float quotient) { return to_integer_code<7>(quotient) & 0xf; }
  template <int size>
  __device__ __forceinline__ static void decode(uint2 words, float (&f)[size]) {
    from_int4(words.x, f);
  }
  __device__ __forceinline__ static float decode_one(unsigned byte, int nibble) {
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

// Loads that stay after pdl_wait() and do not allocate in L1.
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

// One byte of codes of the elements at `values`, by true divisions.
template <typename C, typename T>
__device__ __forceinline__ char encode_byte(const T* values, float first_scale, float second_scale) {
  unsigned byte = C::encode_one(__fdiv_rn(to_float(values[0]), first_scale));
  if constexpr (C::per_byte == 2) byte |= C::encode_one(__fdiv_rn(to_float(values[1]), second_scale)) << 4;
  return static_cast<char>(byte);
}

template <typename T>
using DivisorOf = std::conditional_t<sizeof(T) == 2, ShortDivisor, Divisor>;

// Writes the codes of the packs a thread holds. Values that the fast quotient does not cover are read again and
// divided.
template <typename C, typename T, int V>
__device__ __forceinline__ void encode(const RegisterTile<T, V>& tile, float largest, const DivisorOf<T>& divisor,
                                       const Segment<C, T>& segment, int lanes, bool streamed) {
  constexpr int size = Pack<T>::size, bytes = kCodeBytes<C, T>;
  if (divisor.covers(largest)) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (v * lanes * size >= segment.count) break;
      float x[size];
      tile.packs[v].unpack(x);
#pragma unroll
      for (int i = 0; i < size; ++i) x[i] = divisor(x[i]);
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
      segment.codes[v * lanes * bytes + i] = encode_byte<C>(x + i * C::per_byte, divisor.value, divisor.value);
    }
  }
}

// -- element by element: rows that are not whole, aligned packs -------------------------------------------------------

constexpr int kElements = 8;  // per thread: every lanes-th one

// From `first` on; 0 past the end. All loads are issued before the first use and before any store.
template <typename T>
__device__ __forceinline__ void load_elements(float (&x)[kElements], const T* values, int first, int lanes, int count) {
#pragma unroll
  for (int k = 0; k < kElements; ++k) x[k] = first + k * lanes < count ? to_float(values[first + k * lanes]) : 0.f;
}

// The largest magnitude, NaN and inf included.
__device__ __forceinline__ float largest_of(const float (&x)[kElements]) {
  float result = 0.f;
#pragma unroll
  for (int k = 0; k < kElements; ++k) result = ptx::max_nan(result, fabsf(x[k]));
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

// Writes the codes, one byte each.
template <typename C, typename T>
__device__ __forceinline__ void encode_elements(const float (&x)[kElements], const DivisorOf<T>& divisor,
                                                const T* values, char* codes, int first, int lanes, int count) {
  if (divisor.covers(largest_of(x))) {
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      const int i = first + k * lanes;
      if (i < count) codes[i] = static_cast<char>(C::encode_one(divisor(x[k])));
    }
    return;
  }
#pragma unroll 1
  for (int i = first; i < count && i < first + kElements * lanes; i += lanes) {
    codes[i] = encode_byte<C>(values + i, divisor.value, divisor.value);
  }
}

}  // namespace kestrel::quant
