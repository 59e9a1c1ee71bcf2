// quant_segments and its variants: quantisation per group of columns, per row where quant_rows.cuh does not apply, and
// with given scales.
//
// A segment has one scale. Its threads, 1 to 32 lanes or whole warps, hold it in registers as packs of 16 bytes; a
// maximum has no order, so codes do not depend on how a segment is split. Threads that hold NaN or inf, or whose scale
// is extreme, read their values a second time and divide. Unaligned rows go element by element. Everything is read
// after the PDL wait; before it the first blocks prefetch their packs into L2.
#pragma once

#include "codes.cuh"

namespace kestrel::quant {

template <typename C, typename T>
__device__ __forceinline__ void store_scale(const Params& p, const Segment<C, T>& segment, float scale) {
  *segment.scale = scale;
  if (p.padding > 0 && segment.row + 1 == p.rows) {
#pragma unroll 1
    for (int row = 1; row <= p.padding; ++row) segment.scale[row * p.scale_row] = 0.f;
  }
}

constexpr int kPacks = 4;  // per thread

// p.lanes lanes of a warp per segment of at most kPacks packs per lane.
template <typename C, typename T, Scales SCALES>
__global__ void __launch_bounds__(256, 4) quant_segments(const __grid_constant__ Params p) {
  constexpr int V = kPacks;
  const int lane = threadIdx.x & (p.lanes - 1), lanes = p.lanes;
  Segment<C, T> segment(p, blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes, lane);
  if (blockIdx.x < p.prefetch) prefetch<V>(segment.values, 16, Pack<T>::size, lane, lanes, segment.count);
  segment.pin();
  pdl_wait();
  pdl_trigger();

  RegisterTile<T, V> tile;
  tile.load(segment.values, lanes, segment.count);
  const float largest = tile.largest();
  float scale = 1.f;
  if constexpr (SCALES == Scales::given) {
    if (segment.count > 0) scale = *segment.scale;
  } else {
    scale = C::scale(lanes_amax(tile.amax(largest, segment.values, lanes, segment.count), lanes), p.scale_ub);
  }
  encode(tile, largest, DivisorOf<T>(scale), segment, lanes, p.streamed);
  if (SCALES == Scales::computed && lane == 0 && segment.count > 0) store_scale(p, segment, scale);
}

// Whole warps per segment of any length; threadIdx.y is the segment within the block. What exceeds kPacks packs per
// thread is read twice.
template <typename C, typename T>
__global__ void __launch_bounds__(512, 2) quant_long_segments(const __grid_constant__ Params p) {
  constexpr int V = kPacks;
  __shared__ float memory[32];
  const int lane = threadIdx.x, lanes = blockDim.x, step = V * lanes;
  const unsigned number = blockIdx.x * blockDim.y + threadIdx.y;
  Segment<C, T> segment(p, number, lane);
  if (blockIdx.x < p.prefetch) prefetch<V>(segment.values, 16, Pack<T>::size, lane, lanes, segment.count);
  const SegmentAmax segment_amax(memory, threadIdx.y, lane, lanes);
  segment.pin();
  pdl_wait();
  pdl_trigger();

  RegisterTile<T, V> tile;
  tile.load(segment.values, lanes, segment.count);
  const float largest = tile.largest();
  float amax = tile.amax(largest, segment.values, lanes, segment.count);
  if (p.length > step * Pack<T>::size) {
    for (Segment<C, T> rest = segment.advanced(step); rest.count > 0; rest = rest.advanced(step)) {
      RegisterTile<T, V> next_tile;
      next_tile.load(rest.values, lanes, rest.count);
      amax = fmaxf(amax, next_tile.amax(next_tile.largest(), rest.values, lanes, rest.count));
    }
  }
  const float scale = C::scale(segment_amax(amax), p.scale_ub);
  const DivisorOf<T> divisor(scale);
  encode(tile, largest, divisor, segment, lanes, p.streamed);
  if (lane == 0 && number < p.segments) store_scale(p, segment, scale);
  if (p.length > step * Pack<T>::size) {
    for (Segment<C, T> rest = segment.advanced(step); rest.count > 0; rest = rest.advanced(step)) {
      RegisterTile<T, V> next_tile;
      next_tile.load(rest.values, lanes, rest.count);
      encode(next_tile, next_tile.largest(), divisor, rest, lanes, p.streamed);
    }
  }
}

constexpr int kElementThreads = 512;  // most threads per segment

// Rows that are not aligned packs: neighbouring lanes take neighbouring elements. A segment has p.lanes lanes of a warp
// or, above 32, the whole block. What exceeds kElements per thread is read twice.
template <typename C, typename T>
__global__ void __launch_bounds__(kElementThreads, 2) quant_elements(const __grid_constant__ Params p) {
  __shared__ float memory[32];
  const bool block = p.lanes > 32;
  const int lanes = p.lanes, lane = block ? threadIdx.x : threadIdx.x & (lanes - 1);
  const Segment<C, T> segment(p, block ? blockIdx.x : blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes, 0);
  const T* values = reinterpret_cast<const T*>(segment.values) + lane;
  char* codes = segment.codes + lane;
  const int count = segment.count - lane, step = kElements * lanes;
  if (blockIdx.x < p.prefetch && lane * 128 < segment.count * static_cast<int>(sizeof(T))) {
    prefetch_l2(segment.values + lane * 128);
  }
  const SegmentAmax block_amax(memory, 0, lane, lanes);
  pdl_wait();
  pdl_trigger();

  float x[kElements];
  load_elements(x, values, 0, lanes, count);
  float scale = 1.f;
  if (p.given) {
    if (segment.count > 0) scale = *segment.scale;
  } else {
    float amax = finite_amax(x);
    for (int from = step; from < count; from += step) {
      load_elements(x, values, from, lanes, count);
      amax = fmaxf(amax, finite_amax(x));
    }
    scale = C::scale(block ? block_amax(amax) : lanes_amax(amax, lanes), p.scale_ub);
    if (lane == 0 && segment.count > 0) store_scale(p, segment, scale);
    if (count > step) load_elements(x, values, 0, lanes, count);
  }
  const DivisorOf<T> divisor(scale);
  for (int from = 0; from < count; from += step) {
    if (from > 0) load_elements(x, values, from, lanes, count);
    encode_elements<C>(x, divisor, values, codes, from, lanes, count);
  }
}

// The same for two codes per byte, where a byte can belong to two groups: a segment is two groups of columns, read a
// second time from cache.
template <typename C, typename T>
__global__ void __launch_bounds__(kElementThreads, 2) quant_int4_elements(const __grid_constant__ Params p) {
  static_assert(C::per_byte == 2);
  __shared__ float memory[2][32];
  const bool block = p.lanes > 32;
  const int lanes = p.lanes, lane = block ? threadIdx.x : threadIdx.x & (lanes - 1);
  const Segment<C, T> segment(p, block ? blockIdx.x : blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes, 0);
  const T* values = reinterpret_cast<const T*>(segment.values);
  pdl_wait();
  pdl_trigger();

  float scales[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* scale = segment.scale + half * (p.scale_segment / 2);
    const int first = half * p.group, end = segment.count - first > p.group ? first + p.group : segment.count;
    float amax = 0.f;
#pragma unroll 4
    for (int i = first + lane; i < end; i += lanes) amax = fmaxf(amax, finite_magnitude(to_float(values[i])));
    amax = block ? SegmentAmax(memory[half], 0, lane, lanes)(amax) : lanes_amax(amax, lanes);
    scales[half] = C::scale(amax, p.scale_ub);
    if (lane == 0 && end > first) {
      if (half == 0) {
        store_scale(p, segment, scales[0]);
      } else {
        *scale = scales[1];
      }
    }
  }
  constexpr int kBytes = 4;  // per thread and step: all are read before the first is written
  const int bytes = segment.count / 2;
  for (int from = lane; from < bytes; from += kBytes * lanes) {
    T pairs[kBytes][2] = {};
#pragma unroll
    for (int k = 0; k < kBytes; ++k) {
      if (from + k * lanes >= bytes) break;
      pairs[k][0] = values[2 * (from + k * lanes)];
      pairs[k][1] = values[2 * (from + k * lanes) + 1];
    }
#pragma unroll
    for (int k = 0; k < kBytes; ++k) {
      const int byte = from + k * lanes, i = 2 * byte;
      if (byte >= bytes) break;
      segment.codes[byte] = encode_byte<C>(pairs[k], scales[i < p.group ? 0 : 1], scales[i + 1 < p.group ? 0 : 1]);
    }
  }
}

}  // namespace kestrel::quant
