// The contiguous slice of a row that one warp reads, one chunk at a time, with the next chunk prefetched. The first
// pass can copy the slices of a block to its shared memory, from which later passes then read them.
#pragma once

#include <kestrel/ptx/cp_async.cuh>

#include "mass.cuh"

namespace kestrel::sampling {

constexpr int kStages = 8;  // chunks that are copied to shared memory meanwhile
template <int tiles>
constexpr int kAsyncBytes = kStages * tiles * kTile * static_cast<int>(sizeof(float));

// short_groups: groups of slices of up to 32 tiles are single tiles, so that an id is found in one step.
template <Kind kind, int tiles, bool short_groups = false>
struct RowSlice {
  static constexpr int size = 4 * tiles;       // elements of a lane: four neighbours of every tile
  static constexpr int chunk = tiles * kTile;  // elements of a warp
  template <int n>
  struct Raw {
    uint4 words[n];
  };
  const char* row;
  int dtype;
  int length;  // of the row
  int begin, end;
  int elements_per_warp;  // of the longest slice
  int lane;
  int vector_end;             // elements before it may be loaded four at a time
  char* smem_copy = nullptr;  // the address of element 0 in shared memory, while the slice is copied there

  // elements_per_warp_: whole chunks. smem: for this block's elements, or null.
  __device__ __forceinline__ RowSlice(const char* row_, int dtype_, int length_, int elements_per_warp_,
                                      const Cluster& cluster, char* smem = nullptr)
      : row(row_), dtype(dtype_), length(length_), elements_per_warp(elements_per_warp_), lane(cluster.lane) {
    if (smem) {
      smem_copy = smem - int64_t{cluster.block_rank} * cluster.warps_per_block * elements_per_warp *
                             (dtype == kRowFloat32 ? 4 : 2);
    }
    begin = static_cast<int>(min(int64_t{cluster.warp} * elements_per_warp, int64_t{length}));
    end = static_cast<int>(min(int64_t{begin} + elements_per_warp, int64_t{length}));
    vector_end = reinterpret_cast<uintptr_t>(row) % (dtype == kRowFloat32 ? 16 : 8) == 0 ? length : 0;
  }

  // The slice has at most 32 groups.
  __device__ __forceinline__ bool groups_are_tiles() const { return short_groups && elements_per_warp <= 32 * kTile; }
  __device__ __forceinline__ int chunks_per_group() const { return (elements_per_warp / chunk + 31) / 32; }
  __device__ __forceinline__ int tiles_per_group() const { return groups_are_tiles() ? 1 : chunks_per_group() * tiles; }

  // The index in the row of this lane's element e of the chunk at `base`.
  __device__ __forceinline__ int index(int base, int e) const { return base + (e / 4) * kTile + 4 * lane + e % 4; }

  template <int n>
  __device__ __forceinline__ Raw<n> load(int base) const {
    Raw<n> raw;
    const bool vectorized = base + n * kTile <= vector_end;
    if (__builtin_expect(dtype == kRowFloat32, 1)) {
      const float* from = reinterpret_cast<const float*>(row) + base + 4 * lane;
      if (__builtin_expect(vectorized, 1)) {
#pragma unroll
        for (int u = 0; u < n; ++u) raw.words[u] = *reinterpret_cast<const uint4*>(from + u * kTile);
      } else {
        const u32 none = kind == Kind::probs ? 0u : 0xff800000u;  // 0 or -inf
        const u32* bits = reinterpret_cast<const u32*>(row);
#pragma unroll
        for (int u = 0; u < n; ++u) {
          const int i = index(base, 4 * u);
          raw.words[u] = make_uint4(i < length ? bits[i] : none, i + 1 < length ? bits[i + 1] : none,
                                    i + 2 < length ? bits[i + 2] : none, i + 3 < length ? bits[i + 3] : none);
        }
      }
    } else {
      const uint16_t* bits = reinterpret_cast<const uint16_t*>(row);
      const u32 none = kind == Kind::probs ? 0u : dtype == kRowFloat16 ? 0xfc00u : 0xff80u;
#pragma unroll
      for (int u = 0; u < n; ++u) {
        const int i = index(base, 4 * u);
        uint2 pair;
        if (vectorized) {
          pair = *reinterpret_cast<const uint2*>(bits + i);
        } else {
          pair.x = (i < length ? bits[i] : none) | (i + 1 < length ? bits[i + 1] : none) << 16;
          pair.y = (i + 2 < length ? bits[i + 2] : none) | (i + 3 < length ? bits[i + 3] : none) << 16;
        }
        raw.words[u].x = pair.x, raw.words[u].y = pair.y;
      }
    }
    return raw;
  }

  template <int n>
  __device__ __forceinline__ void unpack(const Raw<n>& raw, float (&v)[4 * n]) const {
    if (__builtin_expect(dtype == kRowFloat32, 1)) {
#pragma unroll
      for (int u = 0; u < n; ++u) {
        v[4 * u] = __uint_as_float(raw.words[u].x), v[4 * u + 1] = __uint_as_float(raw.words[u].y);
        v[4 * u + 2] = __uint_as_float(raw.words[u].z), v[4 * u + 3] = __uint_as_float(raw.words[u].w);
      }
    } else {
      const auto low = [&](u32 word) {
        return dtype == kRowFloat16 ? __half2float(__ushort_as_half(static_cast<unsigned short>(word)))
                                    : __uint_as_float(word << 16);
      };
      const auto high = [&](u32 word) {
        return dtype == kRowFloat16 ? __half2float(__ushort_as_half(static_cast<unsigned short>(word >> 16)))
                                    : __uint_as_float(word & 0xffff0000u);
      };
#pragma unroll
      for (int u = 0; u < n; ++u) {
        v[4 * u] = low(raw.words[u].x), v[4 * u + 1] = high(raw.words[u].x);
        v[4 * u + 2] = low(raw.words[u].y), v[4 * u + 3] = high(raw.words[u].y);
      }
    }
  }

  // From here on, loads read the copy in shared memory.
  __device__ __forceinline__ void switch_to_smem() {
    if (!smem_copy) return;
    row = smem_copy, smem_copy = nullptr, vector_end = INT32_MAX;
    __syncwarp();
  }

  // f(this lane's values, the first index) for n tiles at a time, in order and with all lanes of the warp.
  template <int n, typename F>
  __device__ __forceinline__ void for_each_chunk(F f) const {
    if (begin >= end) return;
    Raw<n> next = load<n>(begin);
#pragma unroll 1
    for (int base = begin; base < end; base += n * kTile) {
      float v[4 * n];
      unpack<n>(next, v);
      if (smem_copy) {
#pragma unroll
        for (int u = 0; u < n; ++u) {
          const int64_t i = index(base, 4 * u);
          if (dtype == kRowFloat32) {
            *reinterpret_cast<uint4*>(smem_copy + 4 * i) = next.words[u];
          } else {
            *reinterpret_cast<uint2*>(smem_copy + 2 * i) = make_uint2(next.words[u].x, next.words[u].y);
          }
        }
      }
      if (base + n * kTile < end) next = load<n>(base + n * kTile);
      f(v, base);
    }
  }

  // The same with kStages chunks in flight, for a pass by one block. stages: kAsyncBytes<n> of this warp in shared
  // memory.
  template <int n, typename F>
  __device__ __forceinline__ void for_each_chunk_async(char* stages, F f) const {
    constexpr int step = n * kTile;
    char* const of_lane = stages + 16 * lane;
    const u32 to = ptx::shared_address(of_lane);
    const auto copy = [&](int base, u32 stage) {
      if (base < end && base + step <= vector_end) {
        const char* const from = row + (int64_t{base} + 4 * lane) * (dtype == kRowFloat32 ? 4 : 2);
#pragma unroll
        for (int u = 0; u < n; ++u) {
          const u32 own = to + (stage * n + u) * 512;
          if (dtype == kRowFloat32) {
            ptx::cp_async16(own, from + u * kTile * 4);
          } else {
            ptx::cp_async4_or_zero(own, from + u * kTile * 2, true);
            ptx::cp_async4_or_zero(own + 4, from + u * kTile * 2 + 4, true);
          }
        }
      }
      ptx::cp_async_commit();
    };
#pragma unroll 1
    for (int s = 0; s < kStages; ++s) copy(begin + s * step, s);
    u32 stage = 0;
#pragma unroll 1
    for (int base = begin; base < end; base += step) {
      Raw<n> raw;
      if (base + step <= vector_end) {
        ptx::cp_async_wait<kStages - 1>();
#pragma unroll
        for (int u = 0; u < n; ++u) raw.words[u] = *reinterpret_cast<const uint4*>(of_lane + (stage * n + u) * 512);
      } else {
        raw = load<n>(base);
      }
      float v[4 * n];
      unpack<n>(raw, v);
      f(v, base);
      copy(base + kStages * step, stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
  }
};

// Accumulates the masses of consecutive groups: lane n holds the n-th group, each of `size` additions.
struct GroupMasses {
  int lane, remaining, size;
  __device__ __forceinline__ GroupMasses(int lane_, int size_) : lane(lane_), remaining(size_), size(size_) {}
  __device__ __forceinline__ void add(u64& of_lane, u64 mass) {
    if (lane == 0) of_lane += mass;
    if (--remaining == 0) --lane, remaining = size;
  }
};

}  // namespace kestrel::sampling
