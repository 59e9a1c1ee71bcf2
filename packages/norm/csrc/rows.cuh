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
  int unit = 1;       // elements that bases, strides and n allow to move at once, where that is not a whole pack
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

// `bytes` of memory that are one access.
template <int bytes>
struct Word;
template <>
struct Word<1> {
  using Type = uint8_t;
};
template <>
struct Word<2> {
  using Type = uint16_t;
};
template <>
struct Word<4> {
  using Type = uint32_t;
};
template <>
struct Word<8> {
  using Type = uint2;
};

// Copies those of a pack's `size` elements that exist, `unit` at a time, from or to the row at element `first`.
template <bool store, int unit, int size, typename T>
__device__ __forceinline__ void copy_in_units(T (&elements)[size], char* row, int first, int n) {
  using Unit = typename Word<unit * sizeof(T)>::Type;
  Unit* p = reinterpret_cast<Unit*>(row + static_cast<int64_t>(first) * sizeof(T));
#pragma unroll
  for (int i = 0; i < size; i += unit) {
    if (first + i >= n) continue;
    Unit word;
    if constexpr (store) {
      memcpy(&word, &elements[i], sizeof(Unit));
      p[i / unit] = word;
    } else {
      word = p[i / unit];
      memcpy(&elements[i], &word, sizeof(Unit));
    }
  }
}

template <bool store, int size, typename T>
__device__ __forceinline__ void copy_elements(T (&elements)[size], char* row, int first, int n, int unit) {
  if constexpr (size > 4) {
    if (unit == 4) return copy_in_units<store, 4>(elements, row, first, n);
  }
  if (unit == 2) return copy_in_units<store, 2>(elements, row, first, n);
  copy_in_units<store, 1>(elements, row, first, n);
}

// How a pack moves, which is what bases, strides and n are multiples of: 16 bytes at once, twice 8, or `unit` elements
// at a time.
enum class Access { whole, halves, units };

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

// One pack of a row from element `first` on; what lies past the end is `fill`. `cached`: what is read again, by this
// block or another.
template <Access A, typename T, bool cached = false>
__device__ __forceinline__ Pack<T> load_pack(const char* row, int first, int n, int unit = 1, float fill = 0.f) {
  Pack<T> pack;
  T elements[Pack<T>::size];
#pragma unroll
  for (int i = 0; i < Pack<T>::size; ++i) elements[i] = from_float<T>(fill);
  const char* p = row + static_cast<int64_t>(first) * sizeof(T);
  if constexpr (A == Access::units) copy_elements<false>(elements, const_cast<char*>(row), first, n, unit);
  memcpy(&pack.bits, elements, 16);
  if constexpr (A == Access::halves) load_halves<T>(pack.bits, p, first, n);
  if (A == Access::whole && first < n) pack.bits = cached ? load16_constant(p) : load16_streamed(p);
  return pack;
}

template <Access A, typename T>
__device__ __forceinline__ void store_pack(char* row, int first, int n, int unit, const Pack<T>& pack,
                                           bool streamed = false) {
  char* p = row + static_cast<int64_t>(first) * sizeof(T);
  if constexpr (A == Access::whole) {
    if (first >= n) return;
    streamed ? store16_streamed(p, pack.bits) : store16(p, pack.bits);
  } else if constexpr (A == Access::halves) {
    if (first < n) *reinterpret_cast<uint2*>(p) = make_uint2(pack.bits.x, pack.bits.y);
    if (first + Pack<T>::size / 2 < n) *reinterpret_cast<uint2*>(p + 8) = make_uint2(pack.bits.z, pack.bits.w);
  } else {
    T elements[Pack<T>::size];
    memcpy(elements, &pack.bits, 16);
    copy_elements<true>(elements, row, first, n, unit);
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
      const int unit = count == 1 ? p.unit : 1;
      packs[i] = load_pack<A, W, true>(weight, first + i * Pack<W>::size, weight ? p.n : 0, unit, 1.f);
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
__device__ __forceinline__ void store_codes(char* row, int first, int n, int unit, uint32_t (&codes)[size / 4]) {
  if constexpr (A == Access::whole) {
    typename Word<size>::Type word;
    memcpy(&word, codes, size);
    if (first < n) *reinterpret_cast<decltype(word)*>(row + first) = word;
  } else {
    uint8_t elements[size];
    memcpy(elements, codes, size);
    copy_elements<true>(elements, row, first, n, unit);
  }
}

}  // namespace kestrel::norm
