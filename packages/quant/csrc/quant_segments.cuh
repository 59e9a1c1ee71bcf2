// Quantisation per group of columns, with scales that are given, and of rows that quant_rows.cuh does not take.
//
// clang-format off
// Computes:   scale = f(largest finite magnitude of a segment), or reads it; code = round(x / scale), bit for bit the reference's.
// Built for:  groups of 128 and rows of any length in bf16, from one row (latency) to 65536 (bandwidth).
// Must move:  x in, codes and scales out: 3 bytes per bf16 element for FP8 and INT8, 2.5 for INT4; about 6 operations per element
//             (two of them the quotient; five for float32), so memory decides: 4.3 TB/s.
// Split:      a team of threads per segment, which holds it in registers as packs of 16 bytes: 1 to 32 lanes of a warp, or, for long
//             segments, whole warps with one barrier. The order of a maximum does not matter: a row's codes are the same whatever
//             the team.
// Special:    a thread that holds a NaN or an inf, or whose scale is extreme, reads its values again and divides one by one; rows that
//             are not whole aligned packs go element by element, 8 to a thread, neighbours side by side.
// PDL:        everything is read after the wait; before it addresses are computed, and where rows are whole aligned packs the first
//             blocks bring their values into L2.
// Measured:   results/, README.md.
// clang-format on
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

constexpr int kPacks = 4;  // that a thread holds

// A team of p.lanes lanes of a warp per segment of at most kPacks packs per lane.
template <typename C, typename T, bool GIVEN>
__global__ void __launch_bounds__(256, 4) quant_segments(const __grid_constant__ Params p) {
  constexpr int V = kPacks;
  const int lane = threadIdx.x & (p.lanes - 1), lanes = p.lanes;
  Segment<C, T> segment(p, blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes, lane);
  if (blockIdx.x < p.prefetch) prefetch<V>(segment.values, 16, Pack<T>::size, lane, lanes, segment.count);
  segment.pin();
  pdl_wait();
  pdl_trigger();

  Held<T, V> held;
  held.load(segment.values, lanes, segment.count);
  const float largest = held.largest();
  float scale = 1.f;
  if constexpr (GIVEN) {
    if (segment.count > 0) scale = *segment.scale;
  } else {
    scale = C::scale(team_amax(held.amax(largest, segment.values, lanes, segment.count), lanes), p.bound);
  }
  encode(held, largest, DivisorOf<T>(scale), segment, lanes, p.streamed);
  if (!GIVEN && lane == 0 && segment.count > 0) store_scale(p, segment, scale);
}

// A team of whole warps per segment of any length, one or several teams to a block: threadIdx.y. What does not fit into
// V packs per thread is read twice.
template <typename C, typename T>
__global__ void __launch_bounds__(512, 2) quant_blocks(const __grid_constant__ Params p) {
  constexpr int V = kPacks;
  __shared__ float memory[32];
  const int lane = threadIdx.x, lanes = blockDim.x, step = V * lanes;
  const unsigned number = blockIdx.x * blockDim.y + threadIdx.y;
  Segment<C, T> segment(p, number, lane);
  if (blockIdx.x < p.prefetch) prefetch<V>(segment.values, 16, Pack<T>::size, lane, lanes, segment.count);
  const TeamMaximum team_amax(memory, threadIdx.y, lane, lanes);
  segment.pin();
  pdl_wait();
  pdl_trigger();

  Held<T, V> held;
  held.load(segment.values, lanes, segment.count);
  const float largest = held.largest();
  float amax = held.amax(largest, segment.values, lanes, segment.count);
  if (p.length > step * Pack<T>::size) {
    for (Segment<C, T> rest = segment.behind(step); rest.count > 0; rest = rest.behind(step)) {
      Held<T, V> more;
      more.load(rest.values, lanes, rest.count);
      amax = fmaxf(amax, more.amax(more.largest(), rest.values, lanes, rest.count));
    }
  }
  const float scale = C::scale(team_amax(amax), p.bound);
  const DivisorOf<T> by(scale);
  encode(held, largest, by, segment, lanes, p.streamed);
  if (lane == 0 && number < p.segments) store_scale(p, segment, scale);
  if (p.length > step * Pack<T>::size) {
    for (Segment<C, T> rest = segment.behind(step); rest.count > 0; rest = rest.behind(step)) {
      Held<T, V> more;
      more.load(rest.values, lanes, rest.count);
      encode(more, more.largest(), by, rest, lanes, p.streamed);
    }
  }
}

constexpr int kElementThreads = 512;  // of a block that is one team, at most

// The same where rows are not whole, aligned packs: neighbouring lanes take neighbouring elements. A team is p.lanes
// lanes of a warp, or, above 32, the block; what does not fit into kElements per thread is read twice.
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
  const TeamMaximum block_amax(memory, 0, lane, lanes);
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
    scale = C::scale(block ? block_amax(amax) : team_amax(amax, lanes), p.bound);
    if (lane == 0 && segment.count > 0) store_scale(p, segment, scale);
    if (count > step) load_elements(x, values, 0, lanes, count);
  }
  const DivisorOf<T> by(scale);
  for (int from = 0; from < count; from += step) {
    if (from > 0) load_elements(x, values, from, lanes, count);
    encode_elements<C>(x, by, values, codes, from, lanes, count);
  }
}

// The same where a byte holds two codes, and can belong to two groups: a segment is two groups of columns, read a
// second time from cache. A block is one team of kElementThreads, or has teams of p.lanes lanes of a warp.
template <typename C, typename T>
__global__ void __launch_bounds__(kElementThreads, 2) quant_pairs(const __grid_constant__ Params p) {
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
    amax = block ? TeamMaximum(memory[half], 0, lane, lanes)(amax) : team_amax(amax, lanes);
    scales[half] = C::scale(amax, p.bound);
    if (lane == 0 && end > first) {
      if (half == 0) {
        store_scale(p, segment, scales[0]);
      } else {
        *scale = scales[1];
      }
    }
  }
  constexpr int kBytes = 4;  // at a time: all are read before the first is written
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
