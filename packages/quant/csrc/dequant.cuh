// dequant_segments, dequant_elements: code * scale in float32, rounded once.
//
// 1 to 32 lanes of a warp per segment: a group of columns, or a part of a row where groups do not split it. A thread
// writes packs of 16 bytes. Everything is read after the PDL wait; before it the first blocks prefetch their codes.
#pragma once

#include "codes.cuh"

namespace kestrel::quant {

// p.lanes lanes of a warp per segment, which has one scale, of at most V packs of results per lane.
template <typename C, typename T, int V>
__global__ void __launch_bounds__(256) dequant_segments(const __grid_constant__ Params p) {
  constexpr int size = Pack<T>::size, bytes = kCodeBytes<C, T>;
  const int lane = threadIdx.x & (p.lanes - 1), lanes = p.lanes;
  Segment<C, T> segment(p, blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes, lane);
  if (blockIdx.x < p.prefetch) prefetch<V>(segment.codes, bytes, size, lane, lanes, segment.count);
  segment.pin();
  pdl_wait();
  pdl_trigger();

  uint2 words[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (v * lanes * size < segment.count) words[v] = load_codes<bytes>(segment.codes + v * lanes * bytes);
  }
  const float scale = segment.count > 0 ? *segment.scale : 1.f;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (v * lanes * size >= segment.count) break;
    float x[size];
    C::decode(words[v], x);
#pragma unroll
    for (int i = 0; i < size; ++i) x[i] *= scale;
    Pack<T> result;
    result.pack(x);
    char* at = segment.values + v * lanes * 16;
    p.streamed ? store16_streamed(at, result.bits) : store16(at, result.bits);
  }
}

// Element by element, where rows are not aligned packs or groups of columns are not whole packs.
template <typename C, typename T>
__global__ void __launch_bounds__(256) dequant_elements(const __grid_constant__ Params p) {
  const int lane = threadIdx.x & (p.lanes - 1);
  const unsigned number = blockIdx.x * (blockDim.x / p.lanes) + threadIdx.x / p.lanes;
  const Segment<C, T> segment(p, number, 0);
  const unsigned char* codes = reinterpret_cast<const unsigned char*>(segment.codes);
  T* values = reinterpret_cast<T*>(segment.values);
  const unsigned first = (number - segment.row * p.segments_per_row) * p.length;  // column; used only with groups
  pdl_wait();
  pdl_trigger();

  constexpr int kBytes = 4;  // per thread and step: all are read before the first is written
  const int bytes = segment.count / C::per_byte;
  for (int from = lane; from < bytes; from += kBytes * p.lanes) {
    float numbers[kBytes][C::per_byte];
#pragma unroll
    for (int k = 0; k < kBytes; ++k) {
      const int byte = from + k * p.lanes;
      if (byte >= bytes) break;
      const unsigned code = codes[byte];
#pragma unroll
      for (int j = 0; j < C::per_byte; ++j) {
        const unsigned group = p.group > 0 ? (first + byte * C::per_byte + j) / p.group : 0;
        const float scale = p.scales[segment.row * p.scale_row + group * p.scale_segment];
        numbers[k][j] = C::decode_one(code, j) * scale;
      }
    }
#pragma unroll
    for (int k = 0; k < kBytes; ++k) {
      const int byte = from + k * p.lanes;
      if (byte >= bytes) break;
#pragma unroll
      for (int j = 0; j < C::per_byte; ++j) values[byte * C::per_byte + j] = from_float<T>(numbers[k][j]);
    }
  }
}

}  // namespace kestrel::quant
