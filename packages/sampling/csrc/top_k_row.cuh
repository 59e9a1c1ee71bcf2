// A row of which top-k selects the largest elements: its keys, its loads, and the largest element of each group of 32.
#pragma once

#include "mass.cuh"

namespace kestrel::sampling {

constexpr int kGroup = 32;  // elements that a lane loads together
constexpr int kTileBits = 10, kTileOfGroups = 1 << kTileBits;
static_assert(kTileOfGroups == 32 * kGroup);

// What a row holds decides what NaN means: an invalid row, or (scores) the smallest of all elements.
template <Kind kind>
struct TopKRow {
  static constexpr bool masked = kind == Kind::masked_scores, scores = kind == Kind::scores || masked;
  static constexpr u32 kNan = scores ? 0u : 0xffffffffu;
  // Keys below it are those of -inf, NaN and, among probabilities, 0.
  static constexpr u32 kLeastValue = kind == Kind::probs ? 0x80000001u : 0x00800000u;
  // Keys below it are not selected: those of elements without mass.
  static constexpr u32 kLeastKey = scores ? 0u : kLeastValue;

  const char* row;
  int dtype, length;
  int chunk_bits;
  int pack_bits;              // log2 of the neighbours that a lane loads together
  const u32* mask = nullptr;  // masked: the allowed elements, or null for all

  __device__ __forceinline__ TopKRow(const char* row_, int dtype_, int length_, int chunk_bits_)
      : row(row_), dtype(dtype_), length(length_), chunk_bits(chunk_bits_) {
    pack_bits = reinterpret_cast<uintptr_t>(row) % 16 != 0 ? 0 : dtype == kRowFloat32 ? 2 : 3;
  }

  static __device__ __forceinline__ u32 key(float v) {
    return isnan(v) ? kNan : static_cast<u32>(order_key(v + 0.f)) ^ 0x80000000u;
  }
  // Keys of elements order larger values first, then lower indices.
  __device__ __forceinline__ u64 key(u32 of_value, int index) const {
    return static_cast<u64>(of_value) << 32 | static_cast<u32>(length - 1 - index);
  }
  static __device__ __forceinline__ float value(u64 key) {
    return from_order_key(static_cast<int>(static_cast<u32>(key >> 32) ^ 0x80000000u));
  }
  __device__ __forceinline__ int index(u64 key) const { return length - 1 - static_cast<int>(static_cast<u32>(key)); }
  static __device__ __forceinline__ float larger(float a, float b) { return scores ? fmaxf(a, b) : ptx::max_nan(a, b); }
  static __device__ __forceinline__ float padding() { return scores ? not_a_number() : -INFINITY; }

  __device__ __forceinline__ float element(int i) const {
    if (dtype == kRowFloat32) return reinterpret_cast<const float*>(row)[i];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[i];
    return dtype == kRowFloat16 ? __half2float(__ushort_as_half(bits)) : __uint_as_float(static_cast<u32>(bits) << 16);
  }

  __device__ __forceinline__ bool is_allowed(int i) const { return !masked || !mask || (mask[i / 32] >> (i % 32) & 1); }
  // The place in a tile of element e of a lane's group.
  __device__ __forceinline__ int place(int e, int lane) const {
    return ((e >> pack_bits) << (pack_bits + 5)) + (lane << pack_bits) + (e & ((1 << pack_bits) - 1));
  }

  // Four elements: neighbours in a row that is aligned, else 32 apart. Those past the row are padding.
  __device__ __forceinline__ int stride() const { return pack_bits == 0 ? 32 : 1; }
  __device__ __forceinline__ void load_four(int i, float (&v)[4]) const {
    load_unmasked(i, v);
    if constexpr (masked) {
      if (!mask) return;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int own = i + e * stride();
        if (own < length && !is_allowed(own)) v[e] = -INFINITY;
      }
    }
  }
  __device__ __forceinline__ void load_unmasked(int i, float (&v)[4]) const {
    if (pack_bits != 0 && i + 4 <= length) {
      if (dtype == kRowFloat32) {
        Pack<float>{load16(row + int64_t{i} * 4)}.unpack(v);
        return;
      }
      const uint2 bits = *reinterpret_cast<const uint2*>(row + int64_t{i} * 2);
      float both[8];
      if (dtype == kRowFloat16) {
        Pack<__half>{make_uint4(bits.x, bits.y, 0, 0)}.unpack(both);
      } else {
        Pack<__nv_bfloat16>{make_uint4(bits.x, bits.y, 0, 0)}.unpack(both);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = both[e];
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = i + e * stride() < length ? element(i + e * stride()) : padding();
  }

  template <typename T>
  static __device__ __forceinline__ float max_of(const Pack<T>& pack) {
    float v[Pack<T>::size];
    pack.unpack(v);
    float most = v[0];
#pragma unroll
    for (int e = 1; e < Pack<T>::size; ++e) most = larger(most, v[e]);
    return most;
  }

  static constexpr int kLoads = 2;  // of four elements, together
  // The groups whose elements the block loads together.
  __device__ __forceinline__ u32 groups_at_once() const { return kLoads * blockDim.x >> (chunk_bits - 7); }
  // Calls f(keys, indices) for the elements of the given groups, four at a time, with all lanes of a warp together.
  // Indices past the row are padding.
  template <typename F>
  __device__ __forceinline__ void for_each_four(const u32* groups, int num_groups, F f) const {
    const int fours_bits = chunk_bits - 7;  // of a group, as a power of two
    const int all = num_groups << fours_bits;
#pragma unroll 1
    for (int base = 0; base < all; base += kLoads * blockDim.x) {
      int i[kLoads];
      float v[kLoads][4];
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        const int own = base + n * blockDim.x + threadIdx.x;
        i[n] = length;
        if (own < all) {
          const u32 group = groups[own >> fours_bits];
          const int four = own & ((1 << fours_bits) - 1), lane = static_cast<int>(group & 31);
          i[n] = (static_cast<int>(group >> 5) << chunk_bits) + (pack_bits == 0 ? 128 * four + lane
                                                                 : pack_bits == 2
                                                                     ? 128 * four + 4 * lane
                                                                     : 256 * (four >> 1) + 8 * lane + 4 * (four & 1));
        }
        load_four(i[n], v[n]);
      }
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        if (n > 0 && base + n * static_cast<int>(blockDim.x) >= all) break;
        u32 keys[4];
        int indices[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) keys[e] = key(v[n][e]), indices[e] = i[n] + e * stride();
        f(keys, indices);
      }
    }
  }
};

// The 32 elements of each lane of a warp that are loaded next: 1024 of the row, a tile.
template <Kind kind>
struct TileLoader {
  const TopKRow<kind>& row;
  uint4 loaded[kGroup / 4];

  __device__ __forceinline__ const char* address(int begin, int lane) const {
    return row.row + ((static_cast<int64_t>(begin >> row.pack_bits) + lane) << 4);
  }
  // Starts the loads of a row that is aligned, none past it.
  __device__ __forceinline__ void load(int begin, int lane) {
    const int bits = row.pack_bits;
    if (bits == 0) return;
    const char* const from = address(begin, lane);
    if (begin + kTileOfGroups <= row.length) {
#pragma unroll
      for (int u = 0; u < kGroup / 8; ++u) loaded[u] = load16_streamed(from + 512 * u);
      if (bits == 3) return;
#pragma unroll
      for (int u = kGroup / 8; u < kGroup / 4; ++u) loaded[u] = load16_streamed(from + 512 * u);
      return;
    }
    const int packs = (((row.length - begin) >> bits) - lane + 31) >> 5;  // of this lane
#pragma unroll
    for (int u = 0; u < kGroup / 4; ++u) {
      if (u < min(packs, kGroup >> bits)) loaded[u] = load16_streamed(from + 512 * u);
    }
  }
  // The elements of pack u of a row of T; those past the row are padding.
  template <typename T>
  __device__ __forceinline__ void unpack(int begin, int lane, int u, float (&v)[Pack<T>::size]) const {
    constexpr int size = Pack<T>::size;
    const int i = begin + (u * 32 + lane) * size;
    if (begin + kTileOfGroups <= row.length || i + size <= row.length) {
      Pack<T>{loaded[u]}.unpack(v);
      return;
    }
#pragma unroll
    for (int e = 0; e < size; ++e)
      v[e] = i + e < row.length ? to_float(reinterpret_cast<const T*>(row.row)[i + e]) : row.padding();
  }
};

// The largest element of this lane's groups.
template <Kind kind>
struct GroupMaxReader {
  using Row = TopKRow<kind>;
  TileLoader<kind> loader;

  // The key of that of a chunk, whose first elements are being loaded. Starts the next chunk of the warp.
  __device__ __forceinline__ u32 read(int chunk, int next_chunk, int lane) {
    const Row& row = loader.row;
    const int end = min((chunk + 1) << row.chunk_bits, row.length);
    float most = row.padding();
#pragma unroll 1
    for (int begin = chunk << row.chunk_bits; begin < end; begin += kTileOfGroups) {
      const int64_t next = begin + kTileOfGroups < end ? begin + kTileOfGroups : int64_t{next_chunk} << row.chunk_bits;
      if (row.pack_bits == 0) {
#pragma unroll 16
        for (int e = 0; e < kGroup; ++e) {
          const int i = begin + 32 * e + lane;
          most = row.larger(most, i < row.length ? row.element(i) : row.padding());
        }
      } else if (row.dtype == kRowFloat32) {
        most = row.larger(most, largest<float>(begin, next, lane));
      } else if (row.dtype == kRowFloat16) {
        most = row.larger(most, largest<__half>(begin, next, lane));
      } else {
        most = row.larger(most, largest<__nv_bfloat16>(begin, next, lane));
      }
    }
    return row.key(most);
  }
  // Of a tile. Starts the loads of the tile at `next`.
  template <typename T>
  __device__ __forceinline__ float largest(int begin, int64_t next, int lane) {
    constexpr int packs = kGroup / Pack<T>::size;
    const Row& row = loader.row;
    float most = row.padding();
    if (next + kTileOfGroups <= row.length) {
      const char* const from = loader.address(static_cast<int>(next), lane);
#pragma unroll
      for (int u = 0; u < packs; ++u) {
        most = row.larger(most, row.max_of(Pack<T>{loader.loaded[u]}));
        loader.loaded[u] = load16_streamed(from + 512 * u);
      }
      return most;
    }
#pragma unroll
    for (int u = 0; u < packs; ++u) {
      float v[Pack<T>::size];
      loader.template unpack<T>(begin, lane, u, v);
#pragma unroll
      for (int e = 0; e < Pack<T>::size; ++e) most = row.larger(most, v[e]);
    }
    if (next < row.length) loader.load(static_cast<int>(next), lane);
    return most;
  }
};

}  // namespace kestrel::sampling
