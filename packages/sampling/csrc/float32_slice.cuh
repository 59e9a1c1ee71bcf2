// The slice of a row that one warp reads, converted to float32. It is read from global memory once and kept in shared
// memory. Where a block cannot hold its slices, every pass reads them from global memory.
#pragma once

#include "mass.cuh"

namespace kestrel::sampling {

// The memory that passes after the first one read.
enum class Storage { shared, global };

// The slice of one warp: elements [begin, end), with `end` rounded up to a multiple of four. Elements past the row are
// NaN, which no comparison selects.
template <Storage storage>
struct Float32Slice {
  const char* row;  // in global memory
  float* smem;      // this block's elements, if storage is shared
  int dtype;
  int begin, end;
  int length;  // of the row
  int first_in_smem;
  float factor;  // elements are multiplied by it: 2^64 for rows of tiny numbers, else 1

  __device__ __forceinline__ Float32Slice(const void* row_, int dtype_, int length_, int elements_per_warp,
                                          const Cluster& cluster, float* smem_)
      : row(static_cast<const char*>(row_)), smem(smem_), dtype(dtype_), length(length_), factor(1.f) {
    begin = cluster.warp * elements_per_warp;
    end = max(begin, min(begin + elements_per_warp, (length + 3) & ~3));
    first_in_smem = cluster.block_rank * cluster.warps_per_block * elements_per_warp;
  }

  // Adding 0 turns -0 into +0, so that equal numbers have equal order keys.
  __device__ __forceinline__ float element(int i) const {
    if (dtype == kRowFloat32) return reinterpret_cast<const float*>(row)[i] + 0.f;
    if (dtype == kRowFloat16) return __half2float(reinterpret_cast<const __half*>(row)[i]) + 0.f;
    return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[i]) + 0.f;
  }

  // Four elements from i on, i < end.
  __device__ __forceinline__ float4 four(int i) const {
    if constexpr (storage == Storage::shared) {
      return *reinterpret_cast<const float4*>(smem + (i - first_in_smem));
    } else {
      float v[4];
      if (dtype == kRowFloat32 && reinterpret_cast<uintptr_t>(row) % 16 == 0 && i + 4 <= length) {
        Pack<float> pack;
        pack.bits = load16_streamed(row + static_cast<int64_t>(i) * 4);
        pack.unpack(v);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = i + e < length ? element(i + e) : not_a_number();
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = (v[e] + 0.f) * factor;
      return make_float4(v[0], v[1], v[2], v[3]);
    }
  }

  // f(four values, the index of the first) for every tile, in order and with all lanes of the warp.
  template <typename F>
  __device__ __forceinline__ void for_each_tile(int lane, F f) const {
    for (int tile = begin; tile < end; tile += kTile) {
      const int i = tile + 4 * lane;
      const float none = not_a_number();
      f(i < end ? four(i) : make_float4(none, none, none, none), i);
    }
  }

  // The first pass: visit(values), with loads of 16 bytes where the row is aligned. Fills shared memory if that is the
  // storage.
  template <typename F>
  __device__ __forceinline__ void read(int lane, F visit) {
    int first = begin;
    if (reinterpret_cast<uintptr_t>(row) % 16 == 0) {
      if (dtype == kRowFloat32) first = read_packs<float>(lane, visit);
      if (dtype == kRowFloat16) first = read_packs<__half>(lane, visit);
      if (dtype == kRowBFloat16) first = read_packs<__nv_bfloat16>(lane, visit);
    }
#pragma unroll 4
    for (int i = first + lane; i < end; i += 32) {
      const float v[1] = {i < length ? element(i) : not_a_number()};
      if (i < length) visit(v);
      if constexpr (storage == Storage::shared) smem[i - first_in_smem] = v[0];
    }
    __syncwarp();
  }

  template <typename T, typename F>
  __device__ __forceinline__ int read_packs(int lane, F visit) {
    constexpr int size = Pack<T>::size, kLoads = 8;  // in flight
    const int vector_end = min(end, length / size * size);
    for (int base = begin; base < vector_end; base += kLoads * 32 * size) {
      Pack<T> pack[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        const int i = base + (u * 32 + lane) * size;
        if (i < vector_end) pack[u].bits = load16_streamed(row + static_cast<int64_t>(i) * sizeof(T));
      }
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        const int i = base + (u * 32 + lane) * size;
        if (i < vector_end) {
          float v[size];
          pack[u].unpack(v);
#pragma unroll
          for (int e = 0; e < size; ++e) v[e] += 0.f;
          visit(v);
          if constexpr (storage == Storage::shared) {
#pragma unroll
            for (int e = 0; e < size; e += 4) {
              *reinterpret_cast<float4*>(smem + (i + e - first_in_smem)) =
                  make_float4(v[e], v[e + 1], v[e + 2], v[e + 3]);
            }
          }
        }
      }
    }
    return max(begin, vector_end);
  }

  // Multiplies the row by 2^64.
  __device__ __forceinline__ void rescale(int lane) {
    factor = 0x1p64f;
    if constexpr (storage == Storage::shared) {
      for (int i = begin + lane; i < end; i += 32) smem[i - first_in_smem] *= factor;
      __syncwarp();
    }
  }
};

}  // namespace kestrel::sampling
