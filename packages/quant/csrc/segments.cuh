// What the quantising kernels work on: segments of rows, each with a scale of its own, in packs of 16 bytes.
#pragma once

#include <cuda_runtime.h>
#include <kestrel/divide.cuh>
#include <kestrel/fp8.cuh>
#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>

#include <cfloat>
#include <cstdint>
#include <type_traits>

namespace kestrel::quant {

// Every row is cut into `per_row` segments of `length` elements (the last may be shorter). `values` are floats of the
// op's dtype, `codes` its codes; both with their own row stride.
struct Params {
  char* values = nullptr;     // read by a quantisation, written by a dequantisation
  int64_t values_stride = 0;  // bytes
  char* codes = nullptr;      // as values, the other way round
  float* scales = nullptr;
  int length = 0;                // of a segment
  unsigned segments = 0;         // of all rows
  unsigned prefetch = 0;         // so many blocks, the first to run, bring what they read into L2 before the wait
  bool streamed = false;         // L2 need not keep the result
  bool given = false;            // scales are read, not computed
  bool cluster = false;          // the grid is one cluster
  const float* bound = nullptr;  // scale_ub
  int64_t codes_stride = 0;      // bytes
  int64_t scale_row = 0, scale_segment = 0;  // strides of the scales, in elements
  int64_t n = 0;                             // elements of a row
  unsigned per_row = 1;
  int lanes = 0;  // threads of a segment's team: a power of two up to 32, or the whole block
  unsigned rows = 0;
  int padding = 0;         // rows of scales behind the last, which are zeroed
  int group = 0;           // columns that share a scale; only where segments are cut otherwise
  unsigned kept = 0;       // pieces that each warp keeps in shared memory
  float* slots = nullptr;  // one per block, for maxima
};

// Where one segment stands, seen by a lane of its team: C is the kind of code, T the dtype of the values.
template <typename C, typename T>
struct Segment {
  static constexpr int size = Pack<T>::size, bytes = size / C::per_byte;  // of a pack: values, bytes of codes
  char* values;                                                           // of the lane's first pack
  char* codes;
  float* scale;
  unsigned row;
  int count;  // elements from the lane's first pack on; none past the last segment

  __device__ __forceinline__ Segment(char* values_, char* codes_, float* scale_, unsigned row_, int count_)
      : values(values_), codes(codes_), scale(scale_), row(row_), count(count_) {}

  __device__ __forceinline__ Segment(const Params& p, unsigned segment, int lane) {
    row = segment;
    values = p.values + lane * 16;
    codes = p.codes + lane * bytes;
    scale = p.scales;
    int64_t left = p.n;
    if (p.per_row > 1) {
      row = p.rows > 1 ? segment / p.per_row : 0;
      const unsigned index = segment - row * p.per_row;
      const int64_t first = static_cast<int64_t>(index) * p.length;
      values += first * static_cast<int64_t>(sizeof(T));
      codes += first / C::per_byte;
      scale += index * p.scale_segment;
      left -= first;
    }
    values += row * p.values_stride;
    codes += row * p.codes_stride;
    scale += row * p.scale_row;
    count = (segment >= p.segments ? 0 : left < p.length ? static_cast<int>(left) : p.length) - lane * size;
  }

  __device__ __forceinline__ void pin() {
    kestrel::pin(values);
    kestrel::pin(codes);
    kestrel::pin(scale);
    kestrel::pin(count);
  }

  // What lies `packs` packs further on.
  __device__ __forceinline__ Segment behind(int packs) const {
    Segment rest = *this;
    rest.values += static_cast<int64_t>(packs) * 16;
    rest.codes += static_cast<int64_t>(packs) * bytes;
    rest.count -= packs * size;
    return rest;
  }
};

// Largest magnitude of a pack and what came before; NaN stays, inf too.
template <typename T>
__device__ __forceinline__ float largest_of(const Pack<T>& pack, float before) {
  const uint32_t words[4] = {pack.bits.x, pack.bits.y, pack.bits.z, pack.bits.w};
  float result = before;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm("max.NaN.f32 %0, %0, %1;" : "+f"(result) : "f"(fabsf(__uint_as_float(words[i]))));
  } else {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    Pair most, pair;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      memcpy(&pair, &words[i], 4);
      most = i == 0 ? __habs2(pair) : __hmax2_nan(most, __habs2(pair));
    }
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(result) : "f"(to_float(__hmax_nan(most.x, most.y))));
  }
  return result;
}

// The packs of one segment that a thread holds: every lanes-th one.
template <typename T, int V>
struct Held {
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

  // The largest finite magnitude. Nearly always it is largest(); else the values are read again.
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

// Brings into L2 what a team will read behind the wait. It returns no data, so it cannot see a stale value.
template <int V>
__device__ __forceinline__ void prefetch(const char* values, int pack_bytes, int size, int lane, int lanes, int count) {
  const int line = 128 / pack_bytes;  // packs in it
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if ((v * lanes + lane) % line == 0 && v * lanes * size < count) prefetch_l2(values + v * lanes * pack_bytes);
  }
}

// Maxima of numbers that are not negative, which are ordered as their bits are.
__device__ __forceinline__ float warp_amax(float v) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(v)));
}

// Over teams of `lanes` neighbouring lanes.
__device__ __forceinline__ float team_amax(float v, int lanes) {
  if (lanes == 32) return warp_amax(v);
  for (int other = lanes >> 1; other > 0; other >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, other));
  return v;
}

// Over a team of whole warps, through shared memory of one float per warp of the block. Made before the wait, so that
// addresses are known behind it.
struct TeamMaximum {
  unsigned mine, theirs;  // addresses: of this warp's float, of that which this lane reads
  bool first, reads;

  __device__ __forceinline__ TeamMaximum(float* memory, int team, int lane, int lanes) {
    const unsigned base = static_cast<unsigned>(__cvta_generic_to_shared(memory)) + team * lanes / 8;
    mine = base + lane / 32 * 4;
    theirs = base + lane % 32 * 4;
    first = lane % 32 == 0;
    reads = lane % 32 < lanes / 32;
    asm volatile("" : "+r"(mine), "+r"(theirs));
  }

  __device__ __forceinline__ float operator()(float v) const {
    v = warp_amax(v);
    if (first) asm volatile("st.shared.f32 [%0], %1;" ::"r"(mine), "f"(v) : "memory");
    __syncthreads();  // of all teams: a barrier for each would take resources that hold up the next blocks
    v = 0.f;
    if (reads) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(theirs) : "memory");
    return warp_amax(v);
  }
};

}  // namespace kestrel::quant
