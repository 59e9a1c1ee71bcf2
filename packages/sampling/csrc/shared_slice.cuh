// The slice of a row that one warp reads, held in the shared memory of its block, which bulk copies fill. It has the
// members of RowSlice that the passes use. Elements past the row are 0 (probabilities) or -inf.
#pragma once

#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/tma.cuh>

#include "row_slice.cuh"

namespace kestrel::sampling {

template <Kind kind, int tiles>
struct SharedSlice {
  using Global = RowSlice<kind, tiles>;
  static constexpr int size = Global::size, chunk = Global::chunk;
  int dtype;
  int length;  // of the row
  int begin, end;
  int elements_per_warp;
  int lane;
  int chunks_per_group;
  int offset;  // in dynamic shared memory, of element 0 of the row if this block held it

  // Shared memory: an mbarrier for each warp, then the slices of the block.
  static __host__ __device__ size_t bytes(int warps, int elements, int dtype) {
    return barrier_bytes(warps) + static_cast<size_t>(elements) * element_bytes(dtype);
  }
  static __host__ __device__ int barrier_bytes(int warps) { return (warps + 1) / 2 * 16; }
  static __host__ __device__ int element_bytes(int dtype) { return dtype == kRowFloat32 ? 4 : 2; }

  // first_byte: of the memory in dynamic shared memory. Initialises this warp's mbarrier.
  __device__ __forceinline__ SharedSlice(int dtype_, int length_, int elements_per_warp_, const Cluster& cluster,
                                         int first_byte)
      : dtype(dtype_), length(length_), elements_per_warp(elements_per_warp_), lane(cluster.lane) {
    begin = static_cast<int>(min(int64_t{cluster.warp} * elements_per_warp, int64_t{length}));
    end = static_cast<int>(min(int64_t{begin} + elements_per_warp, int64_t{length}));
    chunks_per_group = (elements_per_warp / chunk + 31) / 32;
    offset = first_byte + barrier_bytes(cluster.warps_per_block) -
             cluster.block_rank * cluster.warps_per_block * elements_per_warp * element_bytes(dtype);
    if (lane == 0) {
      ptx::mbarrier_init(barrier(first_byte), 1);
      ptx::fence_mbarrier_init();
    }
  }
  __device__ __forceinline__ static u64* barrier(int first_byte) {
    return reinterpret_cast<u64*>(dynamic_shared_memory() + first_byte) + (threadIdx.x >> 5);
  }

  // Copies the slice. True if the copy is asynchronous: then await it.
  __device__ __forceinline__ bool copy(const char* row, const Cluster& cluster, int first_byte) const {
    if (begin >= end) return false;
    char* const memory = dynamic_shared_memory();
    const int each = element_bytes(dtype);
    const bool bulk = (reinterpret_cast<uintptr_t>(row) | static_cast<uintptr_t>(length * each)) % 16 == 0;
    if (__builtin_expect(bulk, 1)) {
      if (lane == 0) {
        const u32 bytes = (end - begin) * each;
        ptx::mbarrier_arrive_expect_tx(barrier(first_byte), bytes);
        ptx::bulk_load(ptx::shared_address(memory + offset + begin * each), row + int64_t{begin} * each, bytes,
                       barrier(first_byte));
      }
      const int padded = (end + chunk - 1) / chunk * chunk;
      for (int i = end + lane; i < padded; i += 32) {
        if (dtype == kRowFloat32) {
          *reinterpret_cast<u32*>(memory + offset + 4 * i) = kind == Kind::probs ? 0u : 0xff800000u;
        } else {
          *reinterpret_cast<uint16_t*>(memory + offset + 2 * i) =
              kind == Kind::probs ? 0u : dtype == kRowFloat16 ? 0xfc00u : 0xff80u;
        }
      }
    } else {
      const Global from(row, dtype, length, elements_per_warp, cluster);
#pragma unroll 1
      for (int base = begin; base < end; base += chunk) {
        const auto raw = from.template load<tiles>(base);
#pragma unroll
        for (int u = 0; u < tiles; ++u) {
          char* const to = memory + offset + index(base, 4 * u) * each;
          if (dtype == kRowFloat32) {
            *reinterpret_cast<uint4*>(to) = raw.words[u];
          } else {
            *reinterpret_cast<uint2*>(to) = make_uint2(raw.words[u].x, raw.words[u].y);
          }
        }
      }
    }
    __syncwarp();
    return bulk;
  }

  // The index in the row of this lane's element e of the chunk at `base`.
  __device__ __forceinline__ int index(int base, int e) const { return base + (e / 4) * kTile + 4 * lane + e % 4; }

  template <int n>
  __device__ __forceinline__ Raw<n> load(int base) const {
    Raw<n> raw;
    const char* const memory = dynamic_shared_memory() + offset;
    if (__builtin_expect(dtype == kRowFloat32, 1)) {
#pragma unroll
      for (int u = 0; u < n; ++u) raw.words[u] = *reinterpret_cast<const uint4*>(memory + 4 * index(base, 4 * u));
    } else {
#pragma unroll
      for (int u = 0; u < n; ++u) {
        const uint2 pair = *reinterpret_cast<const uint2*>(memory + 2 * index(base, 4 * u));
        raw.words[u].x = pair.x, raw.words[u].y = pair.y;
      }
    }
    return raw;
  }
  template <int n>
  __device__ __forceinline__ void unpack(const Raw<n>& raw, float (&v)[4 * n]) const {
    unpack_row<n>(raw, dtype, v);
  }

  // f(this lane's values, the first index) for n tiles at a time, in order and with all lanes of the warp.
  template <int n, typename F>
  __device__ __forceinline__ void for_each_chunk(F f) const {
#pragma unroll 1
    for (int base = begin; base < end; base += n * kTile) {
      float v[4 * n];
      unpack<n>(load<n>(base), v);
      f(v, base);
    }
  }
};

}  // namespace kestrel::sampling
