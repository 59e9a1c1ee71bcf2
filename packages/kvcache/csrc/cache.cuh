// How the kernels of this family address rows of tokens and slots of paged caches, and how they store values.
#pragma once

#include <kestrel/fp8.cuh>
#include <kestrel/pack.cuh>

#include <cstdint>

#include "quotient.cuh"

namespace kestrel::kvcache {

// Keys, values or queries [T', heads, D]; strides in bytes.
struct Rows {
  char* base = nullptr;
  int64_t token = 0, head = 0;

  __device__ __forceinline__ char* at(int64_t token_index, int64_t head_index = 0) const {
    return base + token_index * token + head_index * head;
  }
};

// A slot as a page and a place in it.
struct Place {
  int64_t block, offset;
};

// A cache [blocks, P, heads, ...] or its scales; strides in bytes.
struct Cache {
  char* base = nullptr;
  int64_t block = 0, offset = 0, head = 0;

  __device__ __forceinline__ char* at(Place place, int64_t head_index = 0) const {
    return base + place.block * block + place.offset * offset + head_index * head;
  }
};

// All reads above this are under way before anything below it is decided. Without it the assembler moves reads whose
// values only one branch needs into that branch, and two trips to memory follow one another.
__device__ __forceinline__ void issue_reads() { __syncwarp(); }

// Reads that stay behind pdl_wait().
__device__ __forceinline__ int64_t read_index(const char* base, bool wide, int64_t i) {
  int64_t index;
  if (wide) {
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(index) : "l"(base + 8 * i) : "memory");
  } else {
    int narrow;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(narrow) : "l"(base + 4 * i) : "memory");
    index = narrow;
  }
  return index;
}

__device__ __forceinline__ float read_float(const float* p) {
  float x;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
  return x;
}

// n / divisor for n < 2^31, without a division.
struct FastDivision {
  unsigned divisor = 1, multiplier = 0, shift = 0;

  FastDivision() = default;
  explicit FastDivision(unsigned divisor_) : divisor(divisor_) {
    if (divisor == 1) return;
    while ((uint64_t{1} << (shift + 1)) < divisor) ++shift;
    multiplier = static_cast<unsigned>((uint64_t{1} << (32 + shift)) / divisor + 1);
  }
  __device__ __forceinline__ unsigned operator()(unsigned n) const {
    return divisor == 1 ? n : __umulhi(n, multiplier) >> shift;
  }
};

// slot_mapping, and how a slot becomes a place.
struct Slots {
  const char* mapping = nullptr;
  bool wide = false;  // int64, not int32
  int64_t count = 0;  // blocks * P: what is negative or not below it is no slot
  FastDivision page;  // P, or 1 where a block is as far from the next as P slots are

  __device__ __forceinline__ const char* address(int64_t token) const { return mapping + token * (wide ? 8 : 4); }
  __device__ __forceinline__ int64_t read(int64_t token) const { return read_index(mapping, wide, token); }

  __device__ __forceinline__ bool exists(int64_t slot) const {
    return static_cast<uint64_t>(slot) < static_cast<uint64_t>(count);
  }

  __device__ __forceinline__ Place locate(int64_t slot) const {
    if (page.divisor == 1) return {slot, 0};
    if (count > int64_t{1} << 31) return {slot / page.divisor, slot % page.divisor};
    const unsigned small = static_cast<unsigned>(slot), block = page(small);
    return {block, small - block * page.divisor};
  }
};

// A scale [1] or [Hk], or none, which is 1.
struct Scale {
  const float* base = nullptr;
  bool per_head = false;

  __device__ __forceinline__ const float* address(int head) const { return per_head ? base + head : base; }
  __device__ __forceinline__ float of(int head) const { return base ? read_float(address(head)) : 1.f; }
};

// -- a pack of a row, `first` elements into the head ------------------------------------------------------------------

// VECTORS: every row begins at a multiple of 16 bytes and n is one of packs; otherwise elements are read one by one.
template <bool VECTORS, typename T>
__device__ __forceinline__ Pack<T> load_pack(const char* head, int first, int n) {
  const T* p = reinterpret_cast<const T*>(head) + first;
  Pack<T> pack;
  if constexpr (VECTORS) {
    pack.bits = load16_streamed(p);
  } else {
    T elements[Pack<T>::size] = {};
#pragma unroll
    for (int i = 0; i < Pack<T>::size; ++i) {
      if (first + i < n) elements[i] = p[i];
    }
    memcpy(&pack.bits, elements, 16);
  }
  return pack;
}

// -- formats: how a pack of T stands in the cache ---------------------------------------------------------------------

// Writes the first `count` codes of a pack to p. VECTORS: all of them, at once.
// streamed: what is written leaves L2 first.
template <bool VECTORS, int N, typename Code>
__device__ __forceinline__ void store_codes(char* p, const uint32_t* words, int count, bool streamed = false) {
  constexpr int bytes = N * sizeof(Code);
  const auto store = [&](auto value) {
    auto* target = reinterpret_cast<decltype(value)*>(p);
    streamed ? __stcs(target, value) : void(*target = value);
  };
  if constexpr (VECTORS && bytes == 16) {
    store(make_uint4(words[0], words[1], words[2], words[3]));
  } else if constexpr (VECTORS && bytes == 8) {
    store(make_uint2(words[0], words[1]));
  } else if constexpr (VECTORS && bytes == 4) {
    store(words[0]);
  } else if constexpr (VECTORS) {
    static_assert(bytes == 2);
    store(static_cast<unsigned short>(words[0]));
  } else {
    Code codes[N];
    memcpy(codes, words, bytes);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < count) reinterpret_cast<Code*>(p)[i] = codes[i];
    }
  }
}

template <bool VECTORS, typename T>
__device__ __forceinline__ void store_pack(char* head, int first, int n, const Pack<T>& pack, bool streamed = false) {
  const uint32_t words[4] = {pack.bits.x, pack.bits.y, pack.bits.z, pack.bits.w};
  store_codes<VECTORS, Pack<T>::size, T>(head + int64_t{first} * sizeof(T), words, n - first, streamed);
}

// The bits as they are. T: uint16_t or uint32_t.
template <typename T_>
struct Copy {
  using T = T_;
  using Code = T_;
  static constexpr bool scaled = false;

  template <bool VECTORS>
  static __device__ __forceinline__ void store(char* head, int first, int n, const Pack<T>& pack, float,
                                               bool streamed = false) {
    store_pack<VECTORS>(head, first, n, pack, streamed);
  }
};

// value / scale as FP8.
template <typename T_, __nv_fp8_interpretation_t kind>
struct Fp8 {
  using T = T_;
  using Code = uint8_t;
  static constexpr bool scaled = true;

  template <bool VECTORS>
  static __device__ __forceinline__ void store(char* head, int first, int n, const Pack<T>& pack, float scale,
                                               bool streamed = false) {
    constexpr int size = Pack<T>::size;
    float x[size];
    pack.unpack(x);
    Quotient<T>(scale).of(x);
    uint32_t words[size / 4];
#pragma unroll
    for (int i = 0; i < size / 4; ++i) {
      words[i] = to_fp8x4<kind>(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    }
    store_codes<VECTORS, size, Code>(head + first, words, n - first, streamed);
  }
};

}  // namespace kestrel::kvcache
