// INT8 and INT4 codes (two's complement, -127..127 and -7..7) to and from float. INT4 element 0 is in the low nibble.
#pragma once

#include <cstdint>

namespace kestrel {

// x + kRoundToInteger rounds |x| < 2^22 to an integer, half to even, and holds it in two's complement in its low bits.
constexpr float kRoundToInteger = 12582912.f;  // 1.5 * 2^23

__device__ __forceinline__ uint32_t round_to_bits(float x) { return __float_as_uint(x + kRoundToInteger); }

// One code: rounds half to even and saturates at +-largest; NaN becomes 0.
template <int largest>
__device__ __forceinline__ int to_integer_code(float x) {
  return max(-largest, min(largest, __float2int_rn(x)));
}

// Four INT8 codes, the first in the lowest byte, of finite numbers that round to -127..127.
__device__ __forceinline__ uint32_t to_int8x4(float a, float b, float c, float d) {
  const uint32_t low = __byte_perm(round_to_bits(a), round_to_bits(b), 0x0040);
  const uint32_t high = __byte_perm(round_to_bits(c), round_to_bits(d), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

// INT4 codes, up to eight, of finite numbers that round to -7..7.
template <int count>
__device__ __forceinline__ uint32_t to_int4(const float (&x)[count]) {
  static_assert(count <= 8);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < count; ++i) word |= (round_to_bits(x[i]) & 0xfu) << 4 * i;
  return word;
}

// The number of the INT8 code in byte `i` of a word: the float 2^23 + 128 + code has code + 128 in its low byte, which
// is the code with its sign flipped.
__device__ __forceinline__ float from_int8(uint32_t word, int i) {
  return __uint_as_float(__byte_perm(word ^ 0x80808080u, 0x4b000000u, 0x7440 + i)) - (8388608.f + 128.f);
}

// The numbers of up to eight INT4 codes.
template <int count>
__device__ __forceinline__ void from_int4(uint32_t word, float (&f)[count]) {
  static_assert(count <= 8);
  const uint32_t flipped = word ^ 0x88888888u;  // code + 8, as in from_int8()
#pragma unroll
  for (int i = 0; i < count; ++i) {
    f[i] = __uint_as_float((flipped >> 4 * i & 0xfu) | 0x4b000000u) - (8388608.f + 8.f);
  }
}

}  // namespace kestrel
