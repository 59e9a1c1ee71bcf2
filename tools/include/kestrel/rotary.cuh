// Rotation of pairs of a head's dimensions (rotary position embedding), in packs of 16 bytes or pair by pair.
//
// Of the R dims that turn, frequency f turns the pair (f, f + R/2) (NeoX) or (2f, 2f + 1) (GPT-J). A *piece* is as many
// frequencies as a pack has elements: two packs of a head, whichever the order, and one pack's worth of cosines and
// sines, which serve all heads of a token. Both ways give the same bits.
#pragma once

#include <kestrel/pack.cuh>

#include <cstdint>

namespace kestrel {

// One pair, turned in float32. The roundings are spelt out: they must not depend on what the compiler contracts.
__device__ __forceinline__ void rotate_pair(float& x, float& y, float cos, float sin) {
  const float before = x;
  x = __fmaf_rn(x, cos, -__fmul_rn(y, sin));
  y = __fmaf_rn(y, cos, __fmul_rn(before, sin));
}

// Cosines and sines of `count` neighbouring frequencies.
template <int count>
struct Angles {
  float cos[count], sin[count];

  // From a row of the table (R/2 cosines, then R/2 sines, of type W), element by element.
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
    constexpr int size = Pack<W>::size;
    static_assert(count % size == 0);
    const W* elements = reinterpret_cast<const W*>(row) + frequency;
    Pack<W> packs[2][count / size];
#pragma unroll
    for (int i = 0; i < count / size; ++i) {
      packs[0][i].bits = load16_constant(elements + i * size);
      packs[1][i].bits = load16_constant(elements + half + i * size);
    }
#pragma unroll
    for (int i = 0; i < count / size; ++i) {
      float c[size], s[size];
      packs[0][i].unpack(c);
      packs[1][i].unpack(s);
#pragma unroll
      for (int j = 0; j < size; ++j) {
        cos[i * size + j] = c[j];
        sin[i * size + j] = s[j];
      }
    }
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

// Turns one piece: the packs at first_pack and second_pack.
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

// A position, int32 or int64 (`wide`); `volatile` and "memory" keep the read behind pdl_wait(). As an unsigned number it
// is below the table's rows exactly if the table has its row.
__device__ __forceinline__ int64_t read_position(const void* p, bool wide) {
  int64_t position;
  if (wide) {
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(position) : "l"(p) : "memory");
  } else {
    int narrow;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(narrow) : "l"(p) : "memory");
    position = narrow;
  }
  return position;
}

}  // namespace kestrel
