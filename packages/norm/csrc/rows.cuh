// What the norm kernels work on: the rows of tensors, read and written in packs of 16 bytes.
#pragma once

#include <kestrel/pack.cuh>

#include <cstdint>

namespace kestrel::norm {

enum class Norm { rms, layer };

template <Norm norm_, bool add_, bool fp8_, typename T_, typename W_ = T_>
struct Op {
  static constexpr Norm norm = norm_;
  static constexpr bool add = add_;  // x + residual is normalised, and stored
  static constexpr bool fp8 = fp8_;  // the result leaves as e4m3 codes with a scale per row
  using T = T_;
  using W = W_;  // the weight: T or float
};

// The rows of one tensor: up to three leading dimensions, strides in bytes, outermost first.
struct Rows {
  char* base = nullptr;
  int64_t stride[3] = {0, 0, 0};
};

struct Params {
  Rows x, residual, out;
  const void* weight = nullptr;
  const void* bias = nullptr;
  float* scale = nullptr;           // of FP8 codes, one per row
  const float* scale_ub = nullptr;  // not constant
  int rows = 0;
  int n = 0;
  int staged = 0;     // bytes of shared memory for a row, in the kernel that can hold it there; 0: it does not fit
  bool wide = false;  // the weight is float32, x is not
  unsigned sizes[2] = {1, 1};  // of the two inner leading dimensions
  bool flat = true;            // rows are one stride apart in every tensor: only stride[0] counts
  bool prefetch = true;        // bring the rows into L2 before the wait
  bool streamed = false;       // the result does not fit into L2: write past it
  float eps = 0;
  float inv_n = 0;
  float weight_bias = 0;
};

// Where one row begins in each tensor.
struct Row {
  const char* x;
  char* residual;
  char* out;

  Row() = default;
  __device__ __forceinline__ Row(const Params& p, int row) {
    if (p.flat) {
      x = p.x.base + row * p.x.stride[0];
      residual = p.residual.base + row * p.residual.stride[0];
      out = p.out.base + row * p.out.stride[0];
    } else {
      const unsigned i01 = row / p.sizes[1], i2 = row % p.sizes[1];
      const unsigned i0 = i01 / p.sizes[0], i1 = i01 % p.sizes[0];
      x = p.x.base + i0 * p.x.stride[0] + i1 * p.x.stride[1] + i2 * p.x.stride[2];
      residual = p.residual.base + i0 * p.residual.stride[0] + i1 * p.residual.stride[1] + i2 * p.residual.stride[2];
      out = p.out.base + i0 * p.out.stride[0] + i1 * p.out.stride[1] + i2 * p.out.stride[2];
    }
  }
};

// Keeps a value from being computed later than here: the compiler sinks what it can past pdl_wait().
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void pin(unsigned& value) { asm volatile("" : "+r"(value)); }
template <typename P>
__device__ __forceinline__ void pin(P*& pointer) {
  asm volatile("" : "+l"(pointer));
}

// How a pack moves, which is what bases, strides and n are multiples of: as 16 bytes at once, as twice 8, or as parts
// of the two aligned words of 16 bytes that it lies across.
enum class Access { whole, halves, across };

// The halves of a pack that exist. One access of a warp takes every second 8 bytes; the other finds the rest in L1.
template <typename T>
__device__ __forceinline__ void load_halves(uint4& bits, const char* p, int first, int n) {
  if (first < n) {
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(bits.x), "=r"(bits.y) : "l"(p) : "memory");
  }
  if (first + Pack<T>::size / 2 < n) {
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2 + 8];" : "=r"(bits.z), "=r"(bits.w) : "l"(p) : "memory");
  }
}

// What begins `bytes` into two neighbouring words, of which it takes one word's worth.
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

// A pack at any address, of global or shared memory: the aligned words that have an element of it. What they hold
// beside the row is not used; memory ends with an aligned word, so they exist.
template <typename T>
__device__ __forceinline__ uint4 load_across(const char* p, int valid) {
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

// Writes a pack of 4 * count bytes per lane, at any address: the packs of a whole warp, which follow one another. A
// lane writes the aligned word that its pack begins in, of which the lane before it has the beginning. What no lane
// writes so, at the ends of a warp and of the row, is written by elements E. valid: how many the pack has.
template <typename E, int count>
__device__ __forceinline__ void store_across(char* p, const uint32_t (&own)[count], int valid, bool streamed = false) {
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
      streamed ? store16_streamed(p - shift, bits) : store16(p - shift, bits);
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

// One pack of a row from element `first` on; what lies past the end is `fill`. `shared`: from shared memory, perhaps.
template <Access A, typename T, bool cached = false, bool shared = false>
__device__ __forceinline__ Pack<T> load_pack(const char* row, int first, int n, float fill = 0.f) {
  constexpr int size = Pack<T>::size;
  Pack<T> pack;
  T elements[size];
#pragma unroll
  for (int i = 0; i < size; ++i) elements[i] = from_float<T>(fill);
  const char* p = row + static_cast<int64_t>(first) * sizeof(T);
  if constexpr (A == Access::across) {
    T loaded[size];
    const uint4 bits = load_across<T>(p, n - first);
    memcpy(loaded, &bits, 16);
#pragma unroll
    for (int i = 0; i < size; ++i) {
      if (first + i < n) elements[i] = loaded[i];
    }
  }
  memcpy(&pack.bits, elements, 16);
  if constexpr (A == Access::halves) load_halves<T>(pack.bits, p, first, n);
  if constexpr (A == Access::whole) {
    if (first < n) {
      pack.bits = shared ? *reinterpret_cast<const uint4*>(p) : cached ? load16_constant(p) : load16_streamed(p);
    }
  }
  return pack;
}

// Access::across: all lanes of a warp together, also those whose pack lies past the end.
template <Access A, typename T>
__device__ __forceinline__ void store_pack(char* row, int first, int n, const Pack<T>& pack, bool streamed = false) {
  char* p = row + static_cast<int64_t>(first) * sizeof(T);
  if constexpr (A == Access::whole) {
    if (first >= n) return;
    streamed ? store16_streamed(p, pack.bits) : store16(p, pack.bits);
  } else if constexpr (A == Access::halves) {
    if (first < n) *reinterpret_cast<uint2*>(p) = make_uint2(pack.bits.x, pack.bits.y);
    if (first + Pack<T>::size / 2 < n) *reinterpret_cast<uint2*>(p + 8) = make_uint2(pack.bits.z, pack.bits.w);
  } else {
    using Element = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
    const uint32_t words[4] = {pack.bits.x, pack.bits.y, pack.bits.z, pack.bits.w};
    store_across<Element>(p, words, n - first, streamed);
  }
}

// As many weights as a pack of T holds: one pack of W, or two where W is float32 and T is not.
template <typename T, typename W>
struct WeightPack {
  static constexpr int size = Pack<T>::size;
  static constexpr int count = size / Pack<W>::size;
  Pack<W> packs[count];

  // A weight that is not given is all ones.
  template <Access A>
  __device__ __forceinline__ void load(const Params& p, int first) {
    const char* weight = static_cast<const char*>(p.weight);
#pragma unroll
    for (int i = 0; i < count; ++i) {
      packs[i] = load_pack<A, W, true>(weight, first + i * Pack<W>::size, weight ? p.n : 0, 1.f);
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

// The codes of one pack: eight bytes, or four.
template <Access A, int size>
__device__ __forceinline__ void store_codes(char* row, int first, int n, const uint32_t (&codes)[size / 4]) {
  if constexpr (A == Access::across) {
    store_across<uint8_t>(row + first, codes, n - first);
  } else if (first < n) {
    using Word = std::conditional_t<size == 8, uint2, uint32_t>;
    Word word;
    memcpy(&word, codes, size);
    *reinterpret_cast<Word*>(row + first) = word;
  }
}

}  // namespace kestrel::norm
