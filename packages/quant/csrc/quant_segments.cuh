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
//             are not whole aligned packs go element by element.
// PDL:        everything is read after the wait; before it the first blocks bring their values into L2, and addresses are computed.
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

constexpr int kElementThreads = 512;  // of a block that is one team

// The same where rows are not whole, aligned packs: element by element, the second time from cache. A segment is one
// group of columns, or two where a byte holds two codes: it can belong to both.
template <typename C, typename T>
__global__ void __launch_bounds__(kElementThreads, 2) quant_elements(const __grid_constant__ Params p) {
  __shared__ float memory[C::per_byte][32];
  const bool block = p.lanes > 32;
  const int lanes = p.lanes, lane = block ? threadIdx.x : threadIdx.x & (lanes - 1);
  const unsigned number = block ? blockIdx.x : blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
  const Segment<C, T> segment(p, number, 0);
  const T* values = reinterpret_cast<const T*>(segment.values);
  pdl_wait();
  pdl_trigger();

  float scales[2];
#pragma unroll
  for (int half = 0; half < C::per_byte; ++half) {
    float* scale = segment.scale + half * (p.scale_segment / C::per_byte);
    const int first = half * p.group, end = segment.count - first > p.group ? first + p.group : segment.count;
    if (p.given) {
      scales[half] = end > first ? *scale : 1.f;
      continue;
    }
    float amax = 0.f;
#pragma unroll 4
    for (int i = first + lane; i < end; i += lanes) amax = fmaxf(amax, finite_magnitude(to_float(values[i])));
    amax = block ? TeamMaximum(memory[half], 0, lane, lanes)(amax) : team_amax(amax, lanes);
    scales[half] = C::scale(amax, p.bound);
    if (lane == 0 && end > first) {
      if (half == 0) {
        store_scale(p, segment, scales[0]);
      } else {
        *scale = scales[half];
      }
    }
  }
  for (int byte = lane; byte < segment.count / C::per_byte; byte += lanes) {
    const int i = byte * C::per_byte;
    const float first = i < p.group ? scales[0] : scales[C::per_byte - 1];
    const float second = i + 1 < p.group ? scales[0] : scales[C::per_byte - 1];
    segment.codes[byte] = encode_byte<C>(values + i, first, second);
  }
}

}  // namespace kestrel::quant
