// Segments: the parts of rows that have one scale each, and how the threads of a kernel read them.
#pragma once

#include <cuda_runtime.h>
#include <kestrel/divide.cuh>
#include <kestrel/fp8.cuh>
#include <kestrel/int8.cuh>
#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>
#include <kestrel/ptx/math.cuh>
#include <kestrel/ptx/shared.cuh>

#include <cfloat>
#include <cstdint>
#include <type_traits>

namespace kestrel::quant {

// How rows are read and written: as aligned packs of 16 bytes, or element by element.
enum class Access { elements, packs };

// Whether the kernel computes the scales or reads them.
enum class Scales { computed, given };

// Every row is split into segments of `length` elements; the last may be shorter. `values` are bf16, fp16 or float32.
struct Params {
  char* values = nullptr;     // read by a quantisation, written by a dequantisation
  int64_t values_stride = 0;  // bytes
  char* codes = nullptr;      // written by a quantisation, read by a dequantisation
  float* scales = nullptr;
  int length = 0;
  unsigned segments = 0;  // in all rows
  unsigned prefetch = 0;  // how many blocks, from the first on, prefetch their input into L2 before the wait
  bool streamed = false;  // the results leave L2 first
  bool given = false;     // quant_elements: scales are read, not computed
  bool cluster = false;   // quant_tensor: the grid is one cluster
  const float* scale_ub = nullptr;
  int64_t codes_stride = 0;                  // bytes
  int64_t scale_row = 0, scale_segment = 0;  // strides of the scales, in elements
  int64_t n = 0;                             // elements of a row
  unsigned segments_per_row = 1;
  int lanes = 0;  // threads per segment: a power of two up to 32, or the whole block
  unsigned rows = 0;
  int padding = 0;                // rows of scales behind the last, which are zeroed
  int group = 0;                  // columns that share a scale, where segments are not groups
  unsigned staged = 0;            // quant_tensor: tiles of each warp in shared memory
  float* partial_amax = nullptr;  // quant_tensor: [blocks]
};

// The addresses of one segment for one of its threads. C: the kind of code, T: the dtype of the values.
template <typename C, typename T>
struct Segment {
  static constexpr int size = Pack<T>::size, bytes = size / C::per_byte;  // of a pack: values, bytes of codes
  char* values;                                                           // of this thread's first pack
  char* codes;
  float* scale;
  unsigned row;
  int count;  // elements from this thread's first pack on; not positive if there are none

  __device__ __forceinline__ Segment(char* values_, char* codes_, float* scale_, unsigned row_, int count_)
      : values(values_), codes(codes_), scale(scale_), row(row_), count(count_) {}

  __device__ __forceinline__ Segment(const Params& p, unsigned segment, int lane) {
    row = segment;
    values = p.values + lane * 16;
    codes = p.codes + lane * bytes;
    scale = p.scales;
    int64_t remaining = p.n;
    if (p.segments_per_row > 1) {
      row = p.rows > 1 ? segment / p.segments_per_row : 0;
      const unsigned index = segment - row * p.segments_per_row;
      const int64_t first = static_cast<int64_t>(index) * p.length;
      values += first * static_cast<int64_t>(sizeof(T));
      codes += first / C::per_byte;
      scale += index * p.scale_segment;
      remaining -= first;
    }
    values += row * p.values_stride;
    codes += row * p.codes_stride;
    scale += row * p.scale_row;
    count = (segment >= p.segments ? 0 : remaining < p.length ? static_cast<int>(remaining) : p.length) - lane * size;
  }

  __device__ __forceinline__ void pin() {
    kestrel::pin(values);
    kestrel::pin(codes);
    kestrel::pin(scale);
    kestrel::pin(count);
  }

  // The rest of the segment, `packs` packs further on.
  __device__ __forceinline__ Segment advanced(int packs) const {
    Segment rest = *this;
    rest.values += static_cast<int64_t>(packs) * 16;
    rest.codes += static_cast<int64_t>(packs) * bytes;
    rest.count -= packs * size;
    return rest;
  }
};

// The larger of `so_far` and the largest magnitude of a pack, NaN and inf included.
template <typename T>
__device__ __forceinline__ float largest_of(const Pack<T>& pack, float so_far) {
  const uint32_t words[4] = {pack.bits.x, pack.bits.y, pack.bits.z, pack.bits.w};
  float result = so_far;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) result = ptx::max_nan(result, fabsf(__uint_as_float(words[i])));
  } else {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    Pair largest, pair;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      memcpy(&pair, &words[i], 4);
      largest = i == 0 ? __habs2(pair) : __hmax2_nan(largest, __habs2(pair));
    }
    result = ptx::max_nan(result, to_float(__hmax_nan(largest.x, largest.y)));
  }
  return result;
}

// The packs of one segment that a thread holds in registers: every lanes-th one, V at most.
template <typename T, int V>
struct RegisterTile {
  static constexpr int size = Pack<T>::size;
  Pack<T> packs[V];

  __device__ __forceinline__ void load(const char* values, int lanes, int count) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      packs[v].bits = make_uint4(0, 0, 0, 0);
      if (v * lanes * size < count) packs[v].bits = load16_streamed(values + v * lanes * 16);
    }
  }

  __device__ __forceinline__ float largest() const {
    float result = 0.f;
#pragma unroll
    for (int v = 0; v < V; ++v) result = largest_of<T>(packs[v], result);
    return result;
  }

  // The largest finite magnitude: `largest` if that is finite; otherwise the values are read a second time.
  __device__ __forceinline__ static float amax(float largest, const char* values, int lanes, int count) {
    if (largest <= FLT_MAX) return largest;
    float result = 0.f;
#pragma unroll 1
    for (int v = 0; v < V && v * lanes * size < count; ++v) {
#pragma unroll 1
      for (int i = 0; i < size; ++i) {
        const T value = reinterpret_cast<const T*>(values)[v * lanes * size + i];
        result = fmaxf(result, finite_magnitude(to_float(value)));
      }
    }
    return result;
  }
};

// Prefetches into L2 what the threads of a segment read after the wait. It returns no data, so it is never stale.
template <int V>
__device__ __forceinline__ void prefetch(const char* values, int pack_bytes, int size, int lane, int lanes, int count) {
  const int line = 128 / pack_bytes;  // packs in it
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if ((v * lanes + lane) % line == 0 && v * lanes * size < count) prefetch_l2(values + v * lanes * pack_bytes);
  }
}

// The maximum over a warp of numbers >= 0, whose bits have the same order.
__device__ __forceinline__ float warp_amax(float v) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(v)));
}

// The maximum over `lanes` neighbouring lanes, a power of two.
__device__ __forceinline__ float lanes_amax(float v, int lanes) {
  if (lanes == 32) return warp_amax(v);
  for (int other = lanes >> 1; other > 0; other >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, other));
  return v;
}

// The maximum over a segment of whole warps, for each of its threads, through shared memory of one float per warp of
// the block. Constructed before the wait, so that the addresses are known after it.
struct SegmentAmax {
  unsigned warp_address, lane_address;  // of this warp's float, and of the one this lane reads
  bool writes, reads;

  __device__ __forceinline__ SegmentAmax(float* memory, int segment, int lane, int lanes) {
    const unsigned base = ptx::shared_address(memory) + segment * lanes / 8;
    warp_address = base + lane / 32 * 4;
    lane_address = base + lane % 32 * 4;
    writes = lane % 32 == 0;
    reads = lane % 32 < lanes / 32;
    pin(warp_address);
    pin(lane_address);
  }

  __device__ __forceinline__ float operator()(float v) const {
    v = warp_amax(v);
    if (writes) ptx::store_shared(warp_address, v);
    __syncthreads();  // of the whole block: named barriers per segment would limit how many blocks an SM holds
    v = 0.f;
    if (reads) v = ptx::load_shared(lane_address);
    return warp_amax(v);
  }
};

}  // namespace kestrel::quant
