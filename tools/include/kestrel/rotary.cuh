// Rotary position embedding: rotation of pairs of the dimensions of a head, in packs of 16 bytes or pair by pair.
//
// Of the R dimensions that rotate, frequency f rotates the pair (f, f + R/2) (NeoX) or (2f, 2f + 1) (GPT-J). The unit
// of work of the vectorised form is two packs that rotate into each other: as many frequencies as a pack has elements,
// with one pack of cosines and one of sines, which all heads of a token share. Both forms give the same bits.
#pragma once

#include <kestrel/pack.cuh>

#include <cstdint>

namespace kestrel {

// Rotates one pair in float32. Explicit roundings keep the result independent of contraction by the compiler.
__device__ __forceinline__ void rotate_pair(float& x, float& y, float cos, float sin) {
  const float old_x = x;
  x = __fmaf_rn(x, cos, -__fmul_rn(y, sin));
  y = __fmaf_rn(y, cos, __fmul_rn(old_x, sin));
}

// Loads `count` adjacent constants as floats, by aligned 16-byte loads or one 8-byte load.
template <int count, typename W>
__device__ __forceinline__ void load_constants(float* f, const W* p) {
  constexpr int size = Pack<W>::size, each = count < size ? count : size;
  static_assert(count % each == 0 && (each == size || 2 * each == size));
#pragma unroll
  for (int i = 0; i < count; i += each) {
    Pack<W> pack;
    if constexpr (each == size) {
      pack.bits = load16_constant(p + i);
    } else {
      pack.bits = make_uint4(0, 0, 0, 0);
      asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(pack.bits.x), "=r"(pack.bits.y) : "l"(p + i) : "memory");
    }
    float unpacked[size];
    pack.unpack(unpacked);
#pragma unroll
    for (int j = 0; j < each; ++j) f[i + j] = unpacked[j];
  }
}

// Cosines and sines of `count` frequencies.
template <int count>
struct Angles {
  float cos[count], sin[count];

  // Adjacent frequencies from a row of the table (R/2 cosines, then R/2 sines, of type W), element by element.
  template <typename W>
  __device__ __forceinline__ void load(const char* row, int frequency, int half) {
    const W* elements = reinterpret_cast<const W*>(row);
#pragma unroll
    for (int i = 0; i < count; ++i) {
      cos[i] = to_float(elements[frequency + i]);
      sin[i] = to_float(elements[half + frequency + i]);
    }
  }

  // The same by packs: the row is aligned to 16 bytes, R/2 and the frequency are multiples of Pack<W>::size.
  template <typename W>
  __device__ __forceinline__ void load_packs(const char* row, int frequency, int half) {
    const W* elements = reinterpret_cast<const W*>(row) + frequency;
    load_constants<count>(cos, elements);
    load_constants<count>(sin, elements + half);
  }

  // By packs, half of the frequencies from `first` on and half from `second`, multiples of Pack<W>::size / 2.
  template <typename W>
  __device__ __forceinline__ void load_two_ranges(const char* row, int first, int second, int half) {
    const W* elements = reinterpret_cast<const W*>(row);
    load_constants<count / 2>(cos, elements + first);
    load_constants<count / 2>(cos + count / 2, elements + second);
    load_constants<count / 2>(sin, elements + half + first);
    load_constants<count / 2>(sin + count / 2, elements + half + second);
  }

  // Negates the angles.
  __device__ __forceinline__ void invert() {
#pragma unroll
    for (int i = 0; i < count; ++i) sin[i] = -sin[i];
  }
};

// The first elements of the two packs at a frequency, relative to the first dimension that rotates.
template <bool NEOX, typename T>
__device__ __forceinline__ int first_pack(int frequency) {
  return NEOX ? frequency : 2 * frequency;
}
template <bool NEOX, typename T>
__device__ __forceinline__ int second_pack(int frequency, int half) {
  return NEOX ? frequency + half : 2 * frequency + Pack<T>::size;
}

// Rotates two packs of a head. NeoX: angle i rotates element i of both. GPT-J: the first half of the angles rotates the
// pairs of `first`, the other half those of `second`.
template <bool NEOX, typename T>
__device__ __forceinline__ void rotate_packs(Pack<T>& first, Pack<T>& second, const Angles<Pack<T>::size>& angles) {
  constexpr int size = Pack<T>::size;
  float a[size], b[size];
  first.unpack(a);
  second.unpack(b);
#pragma unroll
  for (int i = 0; i < size; ++i) {
    if constexpr (NEOX) {
      rotate_pair(a[i], b[i], angles.cos[i], angles.sin[i]);
    } else {
      float (&both)[size] = i < size / 2 ? a : b;
      rotate_pair(both[2 * i % size], both[2 * i % size + 1], angles.cos[i], angles.sin[i]);
    }
  }
  first.pack(a);
  second.pack(b);
}

}  // namespace kestrel
