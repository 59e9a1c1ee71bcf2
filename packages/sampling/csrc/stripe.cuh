// What one warp reads of a row: a contiguous piece, a chunk at a time, the next one under way. What a block reads may
// be kept in its shared memory, where the warps find their pieces again.
#pragma once

#include "row.cuh"

namespace kestrel::sampling {

template <Kind kind, int tiles>
struct Stripe {
  static constexpr int size = 4 * tiles;       // elements of a lane: four neighbours of every tile
  static constexpr int chunk = tiles * kTile;  // of a warp
  template <int n>
  struct Raw {
    uint4 words[n];
  };
  const char* row;
  int dtype;
  int length;  // of the row
  int begin, end;
  int longest;  // piece of any warp
  int lane;
  int group;             // chunks in one of at most 32 groups
  int whole;             // elements before it can be loaded four at a time
  char* keep = nullptr;  // where element 0 would be kept

  // per_warp: whole chunks. memory: for this block's elements, or null.
  __device__ __forceinline__ Stripe(const char* row_, int dtype_, int length_, int per_warp, const Team& team,
                                    char* memory = nullptr)
      : row(row_), dtype(dtype_), length(length_), longest(per_warp), lane(team.lane) {
    if (memory) keep = memory - int64_t{team.block} * team.warps * per_warp * (dtype == kRowFloat32 ? 4 : 2);
    begin = static_cast<int>(min(int64_t{team.warp} * per_warp, int64_t{length}));
    end = static_cast<int>(min(int64_t{begin} + per_warp, int64_t{length}));
    group = (per_warp / chunk + 31) / 32;
    whole = reinterpret_cast<uintptr_t>(row) % (dtype == kRowFloat32 ? 16 : 8) == 0 ? length : 0;
  }

  // Of a lane's element of the chunk at `base`.
  __device__ __forceinline__ int index(int base, int e) const { return base + (e / 4) * kTile + 4 * lane + e % 4; }

  template <int n>
  __device__ __forceinline__ Raw<n> load(int base) const {
    Raw<n> raw;
    const bool quick = base + n * kTile <= whole;
    if (__builtin_expect(dtype == kRowFloat32, 1)) {
      const float* from = reinterpret_cast<const float*>(row) + base + 4 * lane;
      if (__builtin_expect(quick, 1)) {
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
        if (quick) {
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

  // From now on, what was kept is read.
  __device__ __forceinline__ void read_kept() {
    if (!keep) return;
    row = keep, keep = nullptr, whole = INT32_MAX;
    __syncwarp();
  }

  // f(this lane's values, the first index), for n tiles at a time, with all lanes of the warp and in order.
  template <int n, typename F>
  __device__ __forceinline__ void each(F f) const {
    if (begin >= end) return;
    Raw<n> next = load<n>(begin);
#pragma unroll 1
    for (int base = begin; base < end; base += n * kTile) {
      float v[4 * n];
      unpack<n>(next, v);
      if (keep) {
#pragma unroll
        for (int u = 0; u < n; ++u) {
          const int64_t i = index(base, 4 * u);
          if (dtype == kRowFloat32) {
            *reinterpret_cast<uint4*>(keep + 4 * i) = next.words[u];
          } else {
            *reinterpret_cast<uint2*>(keep + 2 * i) = make_uint2(next.words[u].x, next.words[u].y);
          }
        }
      }
      if (base + n * kTile < end) next = load<n>(base + n * kTile);
      f(v, base);
    }
  }
};

// Adds masses to those of groups, the n-th of which is lane n's; a group is `group` of them.
struct Groups {
  int lane, left, group;
  __device__ __forceinline__ Groups(int lane_, int group_) : lane(lane_), left(group_), group(group_) {}
  __device__ __forceinline__ void add(u64& mine, u64 mass) {
    if (lane == 0) mine += mass;
    if (--left == 0) --lane, left = group;
  }
};

}  // namespace kestrel::sampling
