// How the kernels address rows of tokens and slots of paged caches, and how they store values.
#pragma once

#include <kestrel/fastdiv.cuh>
#include <kestrel/fp8.cuh>
#include <kestrel/index.cuh>
#include <kestrel/pack.cuh>

#include <cstdint>

#include "scale_quotient.cuh"

namespace kestrel::kvcache {

// How heads are read and written: element by element, or as packs, where all rows begin at multiples of 16 bytes and
// are whole packs.
enum class Access { elements, packs };

// Keys, values or queries [T', heads, D]; strides in bytes.
struct Rows {
  char* base = nullptr;
  int64_t token = 0, head = 0;

  __device__ __forceinline__ char* at(int64_t token_index, int64_t head_index = 0) const {
    return base + token_index * token + head_index * head;
  }
};

// A slot as its block (page) and its offset there.
struct CachePosition {
  int64_t block, offset;
};

// A cache [blocks, P, heads, ...] or its scales; strides in bytes.
struct Cache {
  char* base = nullptr;
  int64_t block = 0, offset = 0, head = 0;

  __device__ __forceinline__ char* at(CachePosition position, int64_t head_index = 0) const {
    return base + position.block * block + position.offset * offset + head_index * head;
  }
};

// Loads above this call are issued before the branches below it. Without it ptxas moves a load into the only branch
// that needs its value, and the latencies of two loads add up.
__device__ __forceinline__ void issue_loads() { __syncwarp(); }

// A load that stays after pdl_wait().
__device__ __forceinline__ float load_float(const float* p) {
  float x;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
  return x;
}

// slot_mapping, and the position of a slot in the caches.
struct SlotMapping {
  IndexArray slots;
  int64_t count = 0;  // blocks * P; a slot outside 0..count-1 is padding
  FastDiv page;       // P, or 1 where slots have equal distances across blocks

  __device__ __forceinline__ bool contains(int64_t slot) const {
    return static_cast<uint64_t>(slot) < static_cast<uint64_t>(count);
  }

  __device__ __forceinline__ CachePosition locate(int64_t slot) const {
    if (page.divisor == 1) return {slot, 0};
    const int64_t block = count > int64_t{1} << 31 ? slot / page.divisor : page.divide(static_cast<unsigned>(slot));
    return {block, slot - block * page.divisor};
  }
};

// A scale [1] or [Hk]; 1 if there is none.
struct Scale {
  const float* base = nullptr;
  bool per_head = false;

  __device__ __forceinline__ const float* address(int head) const { return per_head ? base + head : base; }
  __device__ __forceinline__ float load(int head) const { return base ? load_float(address(head)) : 1.f; }
};

// -- a pack of a head, from element `first` of n on -------------------------------------------------------------------

template <Access ACCESS, typename T>
__device__ __forceinline__ Pack<T> load_pack(const char* head, int first, int n) {
  const T* p = reinterpret_cast<const T*>(head) + first;
  Pack<T> pack;
  if constexpr (ACCESS == Access::packs) {
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

// -- formats: how a pack of T is stored in the cache ------------------------------------------------------------------

// Writes the first `count` codes of a pack to p; with Access::packs all of them, in one store. streamed: L2 evicts the
// written lines first.
template <Access ACCESS, int N, typename Code>
__device__ __forceinline__ void store_codes(char* p, const uint32_t* words, int count, bool streamed = false) {
  constexpr int bytes = N * sizeof(Code);
  const auto store = [&](auto value) {
    auto* target = reinterpret_cast<decltype(value)*>(p);
    streamed ? __stcs(target, value) : void(*target = value);
  };
  if constexpr (ACCESS == Access::packs && bytes == 16) {
    store(make_uint4(words[0], words[1], words[2], words[3]));
  } else if constexpr (ACCESS == Access::packs && bytes == 8) {
    store(make_uint2(words[0], words[1]));
  } else if constexpr (ACCESS == Access::packs && bytes == 4) {
    store(words[0]);
  } else if constexpr (ACCESS == Access::packs) {
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

template <Access ACCESS, typename T>
__device__ __forceinline__ void store_pack(char* head, int first, int n, const Pack<T>& pack, bool streamed = false) {
  const uint32_t words[4] = {pack.bits.x, pack.bits.y, pack.bits.z, pack.bits.w};
  store_codes<ACCESS, Pack<T>::size, T>(head + int64_t{first} * sizeof(T), words, n - first, streamed);
}

// The format that stores bits unchanged. T: uint16_t or uint32_t.
template <typename T_>
struct Copy {
  using T = T_;
  using Code = T_;
  static constexpr bool scaled = false;

  template <Access ACCESS>
  static __device__ __forceinline__ void store(char* head, int first, int n, const Pack<T>& pack, float,
                                               bool streamed = false) {
    store_pack<ACCESS>(head, first, n, pack, streamed);
  }
};

// The format that stores value / scale as FP8.
template <typename T_, __nv_fp8_interpretation_t kind>
struct Fp8 {
  using T = T_;
  using Code = uint8_t;
  static constexpr bool scaled = true;

  template <Access ACCESS>
  static __device__ __forceinline__ void store(char* head, int first, int n, const Pack<T>& pack, float scale,
                                               bool streamed = false) {
    constexpr int size = Pack<T>::size;
    float x[size];
    pack.unpack(x);
    ScaleQuotient<T>(scale).apply(x);
    uint32_t words[size / 4];
#pragma unroll
    for (int i = 0; i < size / 4; ++i) {
      words[i] = to_fp8x4<kind>(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    }
    store_codes<ACCESS, size, Code>(head + first, words, n - first, streamed);
  }
};

}  // namespace kestrel::kvcache
