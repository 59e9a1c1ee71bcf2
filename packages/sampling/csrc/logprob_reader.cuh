// What logprob_rows.cuh reads of a row: of every group of 32 elements the largest, and of every chunk the sum of
// exponentials relative to the largest of its elements, split into the groups that hold it and the others.
#pragma once

#include <type_traits>

#include "tile_ring.cuh"
#include "top_k_candidates.cuh"

namespace kestrel::sampling {

// Of a chunk: the largest element; the sums of exponentials relative to it, of the groups that hold it and of the
// others; and which groups hold it, a bit for each.
struct alignas(16) ChunkSum {
  float most = not_a_number(), of_top = 0.f, others = 0.f;
  u32 holders = 0;  // set with a TileRing alone
  __device__ __forceinline__ int4 bits() const {
    return {__float_as_int(most), __float_as_int(of_top), __float_as_int(others), static_cast<int>(holders)};
  }
};

// The elements of this lane's groups, the next of which are being loaded, and the sums of this warp's chunks.
// rings: elements come through a TileRing.
template <Kind kind, bool counts, bool rings>
struct LogprobReader {
  using Row = TopKRow<kind>;
  const Row& row;
  std::conditional_t<rings, TileRing<kind>, TileLoader<kind>> loader;
  float slope;  // above 0: -inf has weight 0
  int token;
  float of_token;
  u32 before = 0;             // elements before the token in descending order
  u32 allowed = ~0u;          // masked: word `lane` of the bitmask of the tile that is being loaded
  const u32* mask = nullptr;  // masked, with a ring: the bitmask in shared memory

  __device__ __forceinline__ float weight(float below) const { return ptx::ex2_approx_ftz(__fmul_rn(below, slope)); }
  // Starts the loads of a tile.
  __device__ __forceinline__ void load(int begin, int lane) {
    static_assert(!rings);
    loader.load(begin, lane);
    if constexpr (Row::masked) {
      if (!row.mask) return;
      const int word = begin / 32 + lane, rest = row.length - 32 * word;
      allowed = rest > 0 ? row.mask[word] : ~0u;
      if (rest > 0 && rest < 32) allowed |= ~0u << rest;
    }
  }
  // With a ring: word `lane` of the bitmask of a tile. What is past the row is allowed.
  __device__ __forceinline__ u32 words_of_tile(int begin, int lane) const {
    const int word = begin / 32 + lane, rest = row.length - 32 * word;
    return rest <= 0 ? ~0u : rest < 32 ? mask[word] | ~0u << rest : mask[word];
  }
  // Takes the elements of a tile that are not allowed for -inf.
  __device__ __forceinline__ void apply_mask(u32 words, int lane, float (&v)[kGroup]) const {
    if (row.pack_bits == 0) {
#pragma unroll
      for (int e = 0; e < kGroup; ++e) {
        if (!(__shfl_sync(kAllLanes, words, e) >> lane & 1)) v[e] = -INFINITY;
      }
      return;
    }
#pragma unroll
    for (int e = 0; e < kGroup; e += 4) {
      const int first = row.place(e, lane);
      const u32 bits = __shfl_sync(kAllLanes, words, first / 32) >> (first % 32);
#pragma unroll
      for (int n = 0; n < 4; ++n) v[e + n] = bits >> n & 1 ? v[e + n] : -INFINITY;
    }
  }

  // The elements that are loaded; those past the row are NaN.
  __device__ __forceinline__ void take(int begin, int lane, float (&v)[kGroup]) const {
    if (row.dtype == kRowFloat32) {
      take_as<float>(begin, lane, v);
    } else if (row.dtype == kRowFloat16) {
      take_as<__half>(begin, lane, v);
    } else {
      take_as<__nv_bfloat16>(begin, lane, v);
    }
  }
  template <typename T>
  __device__ __forceinline__ void take_as(int begin, int lane, float (&v)[kGroup]) const {
    constexpr int size = Pack<T>::size;
    const T* const from = reinterpret_cast<const T*>(row.row);
    if (!rings && row.pack_bits == 0) {
#pragma unroll
      for (int e = 0; e < kGroup; ++e) {
        const int i = begin + 32 * e + lane;
        v[e] = i < row.length ? to_float(from[i]) : not_a_number();
      }
      return;
    }
    const bool is_full = begin + kTileOfGroups <= row.length;
#pragma unroll
    for (int u = 0; u < kGroup / size; ++u) {
      float some[size];
      if constexpr (rings) {
        Pack<T>{loader.pack(u)}.unpack(some);
      } else {
        Pack<T>{loader.loaded[u]}.unpack(some);
      }
#pragma unroll
      for (int e = 0; e < size; ++e) v[u * size + e] = some[e];
    }
    if (is_full) return;
    if constexpr (rings) {
#pragma unroll
      for (int e = 0; e < kGroup; ++e) v[e] = begin + row.place(e, lane) < row.length ? v[e] : not_a_number();
    } else {
#pragma unroll
      for (int u = 0; u < kGroup / size; ++u) {
        float some[size];
        loader.template unpack<T>(begin, lane, u, some);
#pragma unroll
        for (int e = 0; e < size; ++e) v[u * size + e] = some[e];
      }
    }
  }

  // The sum of a tile, the same in all lanes. Returns the largest element of this lane.
  __device__ __forceinline__ float add(int begin, int lane, float (&v)[kGroup], ChunkSum& chunk) {
    float most_of_four[4] = {v[0], v[1], v[2], v[3]};
#pragma unroll
    for (int e = 4; e < kGroup; ++e) most_of_four[e % 4] = fmaxf(most_of_four[e % 4], v[e]);
    const float own = fmaxf(fmaxf(most_of_four[0], most_of_four[1]), fmaxf(most_of_four[2], most_of_four[3]));
    if (begin + kTileOfGroups > row.length) {  // what is past the row has no weight
#pragma unroll
      for (int e = 0; e < kGroup; ++e) v[e] = begin + row.place(e, lane) < row.length ? v[e] : -INFINITY;
    }
    ChunkSum sum;
    sum.most = Row::value(static_cast<u64>(__reduce_max_sync(kAllLanes, Row::key(own))) << 32);
    const float base = fabsf(sum.most) < INFINITY ? sum.most : 0.f;
    // Equal elements before the token count too.
    const float from = begin + kTileOfGroups <= token ? of_token : from_order_key(order_key(of_token) + 1);
    float weights[2] = {};
#pragma unroll
    for (int e = 0; e < kGroup; ++e) {
      weights[e & 1] += weight(v[e] - base);
      if constexpr (counts) before += v[e] >= from;
    }
    if (counts && begin <= token && token < begin + kTileOfGroups) {
#pragma unroll
      for (int e = 0; e < kGroup; ++e) before += v[e] == of_token && begin + row.place(e, lane) < token;
    }
    const float own_sum = weights[0] + weights[1];
    const bool is_top = own == sum.most;
    sum.of_top = warp_float_sum(is_top ? own_sum : 0.f);
    sum.others = warp_float_sum(is_top ? 0.f : own_sum);
    merge(chunk, sum);
    return own;
  }
  __device__ __forceinline__ void merge(ChunkSum& a, ChunkSum b) const {
    if (isnan(a.most) || b.most > a.most) {
      const ChunkSum larger = b;
      b = a, a = larger;
    }
    if (a.most == b.most) {
      a.of_top += b.of_top, a.others += b.others;
    } else if (b.most > -INFINITY) {
      a.others += (b.others + b.of_top) * weight(b.most - a.most);
    } else {
      a.others += b.others;  // 0 or NaN; b may be empty
    }
  }

  // The key of the largest element of this lane's group of the chunk, whose first elements are being loaded, and the
  // sum of the chunk. Starts the next chunk of the warp.
  __device__ __forceinline__ u32 read(int chunk, int next_chunk, int lane, ChunkSum& sum) {
    const int end = min((chunk + 1) << row.chunk_bits, row.length);
    float most = not_a_number();
    sum = ChunkSum();
#pragma unroll 1
    for (int begin = chunk << row.chunk_bits; begin < end; begin += kTileOfGroups) {
      const int64_t next = begin + kTileOfGroups < end ? begin + kTileOfGroups : int64_t{next_chunk} << row.chunk_bits;
      float v[kGroup];
      u32 words = allowed;
      if constexpr (rings) {
        if constexpr (Row::masked) words = words_of_tile(begin, lane);
        loader.wait();
        take(begin, lane, v);
        loader.release();
      } else {
        take(begin, lane, v);
        if (next < row.length) load(static_cast<int>(next), lane);
      }
      if (Row::masked && __any_sync(kAllLanes, words != ~0u)) {
        if (begin + kTileOfGroups <= row.length && __all_sync(kAllLanes, words == 0)) {
          most = fmaxf(most, -INFINITY);  // without weight
          continue;
        }
        apply_mask(words, lane, v);
      }
      most = fmaxf(most, add(begin, lane, v, sum));
    }
    if constexpr (rings) sum.holders = __ballot_sync(kAllLanes, most == sum.most);
    return Row::key(most);
  }
};

}  // namespace kestrel::sampling
