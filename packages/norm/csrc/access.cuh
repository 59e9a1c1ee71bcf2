// Reads and writes of row elements in packs of 16 bytes, for rows of any alignment.
#pragma once

#include "params.cuh"

namespace kestrel::norm {

// How a pack is loaded and stored, by the alignment of bases, strides and N.
// aligned16: in one access. aligned8: in two accesses of 8 bytes. unaligned: as parts of the two aligned 16-byte words
// that it straddles.
enum class Access { aligned16, aligned8, unaligned };

// Two loads of 8 bytes. The second one hits in L1, because the first one of the warp has loaded the same lines.
template <typename T>
__device__ __forceinline__ void load_8x2(uint4& bits, const char* p, int first, int n) {
  if (first < n) {
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(bits.x), "=r"(bits.y) : "l"(p) : "memory");
  }
  if (first + Pack<T>::size / 2 < n) {
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2 + 8];" : "=r"(bits.z), "=r"(bits.w) : "l"(p) : "memory");
  }
}

// `count` words from byte offset `bytes` on of the 2 * count words {low, high}.
template <int count>
__device__ __forceinline__ void shift_words(const uint32_t (&low)[count], const uint32_t (&high)[count], unsigned bytes,
                                            uint32_t (&word)[count]) {
  uint32_t both[2 * count];
#pragma unroll
  for (int i = 0; i < count; ++i) both[i] = low[i], both[count + i] = high[i];
#pragma unroll
  for (int step = count / 2; step > 0; step /= 2) {
    if ((bytes & 4 * step) != 0) {
#pragma unroll
      for (int i = 0; i + step < 2 * count; ++i) both[i] = both[i + step];
    }
  }
#pragma unroll
  for (int i = 0; i < count; ++i) word[i] = __funnelshift_r(both[i], both[i + 1], 8 * (bytes & 3));
}

// A pack at any address of global or shared memory. It loads only aligned words that hold an element of the pack, so it
// never leaves the page; bytes of such a word that lie outside the row are ignored.
template <typename T>
__device__ __forceinline__ uint4 load_unaligned(const char* p, int valid) {
  const unsigned shift = reinterpret_cast<uintptr_t>(p) % 16;
  const uint4* words = reinterpret_cast<const uint4*>(p - shift);
  uint4 a = make_uint4(0, 0, 0, 0), b = a;
  if (valid > 0) a = words[0];
  if (valid > Pack<T>::size - static_cast<int>(shift / sizeof(T))) b = words[1];
  const uint32_t low[4] = {a.x, a.y, a.z, a.w}, high[4] = {b.x, b.y, b.z, b.w};
  uint32_t word[4];
  shift_words(low, high, shift, word);
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// Stores a pack of 4 * count bytes per lane at any address; the packs of a warp are consecutive. A lane stores the
// aligned word in which its pack begins, with the head of that word shuffled in from the previous lane. Words that no
// lane holds completely, at the ends of the warp's range and of the row, are stored by elements E. valid: elements that
// the pack has.
template <typename E, int count>
__device__ __forceinline__ void store_unaligned(char* p, const uint32_t (&own)[count], int valid,
                                                bool evict_first = false) {
  constexpr int bytes = 4 * count, size = bytes / sizeof(E);
  const int lane = threadIdx.x & 31;
  if (__all_sync(0xffffffffu, valid <= 0)) return;
  const unsigned shift = reinterpret_cast<uintptr_t>(p) % bytes;
  const int carried = shift / sizeof(E);  // elements that lie in the next lane's word
  uint32_t before[count], word[count];
#pragma unroll
  for (int i = 0; i < count; ++i) before[i] = __shfl_up_sync(0xffffffffu, own[i], 1);
  shift_words(before, own, bytes - shift, word);
  const bool whole = valid >= size - carried && (lane > 0 || carried == 0);
  const bool next_whole = __shfl_down_sync(0xffffffffu, static_cast<int>(whole), 1) && lane < 31;
  if (whole) {
    uint32_t out[4] = {};
#pragma unroll
    for (int i = 0; i < count; ++i) out[i] = carried == 0 ? own[i] : word[i];
    if constexpr (count == 4) {
      const uint4 bits = make_uint4(out[0], out[1], out[2], out[3]);
      evict_first ? store16_streamed(p - shift, bits) : store16(p - shift, bits);
    } else if constexpr (count == 2) {
      *reinterpret_cast<uint2*>(p - shift) = make_uint2(out[0], out[1]);
    } else {
      *reinterpret_cast<uint32_t*>(p - shift) = out[0];
    }
  }
  const int from = whole ? size - carried : 0, to = min(valid, next_whole ? size - carried : size);
  E elements[size];
  memcpy(elements, own, bytes);
#pragma unroll
  for (int i = 0; i < size; ++i) {
    if (from <= i && i < to) reinterpret_cast<E*>(p)[i] = elements[i];
  }
}

// Where a pack is read from.
enum class Source {
  stream,           // global memory, read once: no allocation in L1
  constant,         // global memory, read by every row
  global_or_shared  // a staged row, or a row that several passes read
};

// One pack of a row from element `first` on; elements past the end are `fill`.
template <Access A, typename T, Source source = Source::stream>
__device__ __forceinline__ Pack<T> load_pack(const char* row, int first, int n, float fill = 0.f) {
  constexpr int size = Pack<T>::size;
  Pack<T> pack;
  T elements[size];
#pragma unroll
  for (int i = 0; i < size; ++i) elements[i] = from_float<T>(fill);
  const char* p = row + static_cast<int64_t>(first) * sizeof(T);
  if constexpr (A == Access::unaligned) {
    T loaded[size];
    const uint4 bits = load_unaligned<T>(p, n - first);
    memcpy(loaded, &bits, 16);
#pragma unroll
    for (int i = 0; i < size; ++i) {
      if (first + i < n) elements[i] = loaded[i];
    }
  }
  memcpy(&pack.bits, elements, 16);
  if constexpr (A == Access::aligned8) load_8x2<T>(pack.bits, p, first, n);
  if constexpr (A == Access::aligned16) {
    if (first < n) {
      if constexpr (source == Source::stream) pack.bits = load16_streamed(p);
      if constexpr (source == Source::constant) pack.bits = load16_constant(p);
      if constexpr (source == Source::global_or_shared) pack.bits = *reinterpret_cast<const uint4*>(p);
    }
  }
  return pack;
}

// Access::unaligned: called by all lanes of a warp together, also by those whose pack lies past the end.
template <Access A, typename T>
__device__ __forceinline__ void store_pack(char* row, int first, int n, const Pack<T>& pack, bool evict_first = false) {
  char* p = row + static_cast<int64_t>(first) * sizeof(T);
  if constexpr (A == Access::aligned16) {
    if (first >= n) return;
    evict_first ? store16_streamed(p, pack.bits) : store16(p, pack.bits);
  } else if constexpr (A == Access::aligned8) {
    if (first < n) *reinterpret_cast<uint2*>(p) = make_uint2(pack.bits.x, pack.bits.y);
    if (first + Pack<T>::size / 2 < n) *reinterpret_cast<uint2*>(p + 8) = make_uint2(pack.bits.z, pack.bits.w);
  } else {
    using Element = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
    const uint32_t words[4] = {pack.bits.x, pack.bits.y, pack.bits.z, pack.bits.w};
    store_unaligned<Element>(p, words, n - first, evict_first);
  }
}

// The codes of one pack: eight bytes, or four.
template <Access A, int size>
__device__ __forceinline__ void store_codes(char* row, int first, int n, const uint32_t (&codes)[size / 4]) {
  if constexpr (A == Access::unaligned) {
    store_unaligned<uint8_t>(row + first, codes, n - first);
  } else if (first < n) {
    using Word = std::conditional_t<size == 8, uint2, uint32_t>;
    Word word;
    memcpy(&word, codes, size);
    *reinterpret_cast<Word*>(row + first) = word;
  }
}

// As many weights as a pack of T holds: one pack of W, or two where W is float32 and T is not.
template <typename T, typename W>
struct WeightPack {
  static constexpr int size = Pack<T>::size;
  static constexpr int count = size / Pack<W>::size;
  Pack<W> packs[count];

  // Without a weight, all ones.
  template <Access A>
  __device__ __forceinline__ void load(const Params& p, int first) {
    const char* weight = static_cast<const char*>(p.weight);
#pragma unroll
    for (int i = 0; i < count; ++i) {
      packs[i] = load_pack<A, W, Source::constant>(weight, first + i * Pack<W>::size, weight ? p.n : 0, 1.f);
    }
  }
  __device__ __forceinline__ void unpack(float (&f)[size]) const {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      float part[Pack<W>::size];
      packs[i].unpack(part);
#pragma unroll
      for (int j = 0; j < Pack<W>::size; ++j) f[i * Pack<W>::size + j] = part[j];
    }
  }
};

// Without a bias, all zeros.
template <Access A, typename T>
__device__ __forceinline__ Pack<T> load_bias(const Params& p, int first) {
  return load_pack<A, T, Source::constant>(static_cast<const char*>(p.bias), first, p.bias ? p.n : 0);
}

}  // namespace kestrel::norm
