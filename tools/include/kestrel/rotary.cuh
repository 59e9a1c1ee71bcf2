// Rotation of pairs of a head's dimensions (rotary position embedding), in packs of 16 bytes or pair by pair.
//
// Of the R dims that turn, frequency f turns the pair (f, f + R/2) (NeoX) or (2f, 2f + 1) (GPT-J). A *piece* is as many
// frequencies as a pack has elements: two packs of a head, whichever the order, and one pack's worth of cosines and
// sines, which serve all heads of a token. Both ways give the same bits.
#pragma once

#include <kestrel/index.cuh>
#include <kestrel/pack.cuh>

#include <cstdint>

namespace kestrel {

// One pair, turned in float32. The roundings are spelt out: they must not depend on what the compiler contracts.
__device__ __forceinline__ void rotate_pair(float& x, float& y, float cos, float sin) {
  const float before = x;
  x = __fmaf_rn(x, cos, -__fmul_rn(y, sin));
  y = __fmaf_rn(y, cos, __fmul_rn(before, sin));
}

// `count` neighbouring constants as floats, in accesses of 16 bytes or one of 8, to which they must be aligned.
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

  // Of neighbouring frequencies, from a row of the table (R/2 cosines, then R/2 sines, of type W), element by element.
  template <typename W>
  __device__ __forceinline__ void load(const char* row, int frequency, int half) {
    const W* elements = reinterpret_cast<const W*>(row);
#pragma unroll
    for (int i = 0; i < count; ++i) {
      cos[i] = to_float(elements[frequency + i]);
      sin[i] = to_float(elements[half + frequency + i]);
    }
  }

  // The same in packs: the row is aligned to 16 bytes, R/2 and the frequency are multiples of Pack<W>::size.
  template <typename W>
  __device__ __forceinline__ void load_packs(const char* row, int frequency, int half) {
    const W* elements = reinterpret_cast<const W*>(row) + frequency;
    load_constants<count>(cos, elements);
    load_constants<count>(sin, elements + half);
  }

  // In packs too, half of the frequencies from one on and half from another; both are multiples of Pack<W>::size / 2.
  template <typename W>
  __device__ __forceinline__ void load_two_runs(const char* row, int first, int second, int half) {
    const W* elements = reinterpret_cast<const W*>(row);
    load_constants<count / 2>(cos, elements + first);
    load_constants<count / 2>(cos + count / 2, elements + second);
    load_constants<count / 2>(sin, elements + half + first);
    load_constants<count / 2>(sin + count / 2, elements + half + second);
  }

  // The negative angles: they turn back.
  __device__ __forceinline__ void invert() {
#pragma unroll
    for (int i = 0; i < count; ++i) sin[i] = -sin[i];
  }
};

// Where the two packs of the piece at a frequency begin, in elements from the first dim that turns.
template <bool NEOX, typename T>
__device__ __forceinline__ int first_pack(int frequency) {
  return NEOX ? frequency : 2 * frequency;
}
template <bool NEOX, typename T>
__device__ __forceinline__ int second_pack(int frequency, int half) {
  return NEOX ? frequency + half : 2 * frequency + Pack<T>::size;
}

// Turns two packs of a head. NeoX: angle i turns element i of both. GPT-J: the first half of the angles turns the pairs
// of the first pack, the other half those of the second, which may stand anywhere.
template <bool NEOX, typename T>
__device__ __forceinline__ void rotate_piece(Pack<T>& first, Pack<T>& second, const Angles<Pack<T>::size>& angles) {
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

__device__ __forceinline__ int64_t read_position(const void* p, bool wide) { return load_index(p, wide); }

}  // namespace kestrel
