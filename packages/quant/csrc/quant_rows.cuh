// quant_rows: quantisation per row, for rows of up to 1024 packs of 16 bytes that are all aligned.
//
// Whole warps per row, two packs per thread and one barrier; blocks of at least 128 threads. Everything is read after
// the PDL wait; before it the first blocks prefetch their rows into L2 and addresses are computed. Parameters arrive
// cold, 64 bytes at a time, so they are packed into 48 bytes.
#pragma once

#include "codes.cuh"

namespace kestrel::quant {

constexpr int kRowPacks = 2;  // per thread
constexpr int kRowThreads = 512;

// Codes and scales are contiguous.
struct RowParams {
  char* values;
  char* codes;
  float* scales;
  const float* scale_ub;
  unsigned stride;  // of the rows of values, in packs
  unsigned rows;
  uint16_t packs;     // per row
  uint16_t prefetch;  // as in Params
  uint8_t warps_per_row, rows_per_block;
  bool streamed;
};
static_assert(sizeof(RowParams) <= 48);

template <typename C, typename T>
__global__ void __launch_bounds__(kRowThreads) quant_rows(const __grid_constant__ RowParams p) {
  constexpr int size = Pack<T>::size, bytes = kCodeBytes<C, T>;
  __shared__ float memory[32];
  const int lane = threadIdx.x, lanes = 32 * p.warps_per_row;
  const unsigned row = blockIdx.x * p.rows_per_block + threadIdx.y;
  char* values = p.values + (uint64_t{row} * p.stride + lane) * 16;
  const int count = row < p.rows ? (p.packs - lane) * size : 0;
  if (blockIdx.x < p.prefetch) prefetch<kRowPacks>(values, 16, size, lane, lanes, count);
  char* codes = p.codes + (uint64_t{row} * p.packs + lane) * bytes;
  Segment<C, T> segment(values, codes, p.scales + row, row, count);
  const SegmentAmax row_amax(memory, threadIdx.y, lane, lanes);
  segment.pin();
  pdl_wait();
  pdl_trigger();

  RegisterTile<T, kRowPacks> tile;
  tile.load(segment.values, lanes, segment.count);
  const float largest = tile.largest();
  float amax = tile.amax(largest, segment.values, lanes, segment.count);
  amax = lanes == 32 ? warp_amax(amax) : row_amax(amax);
  const float scale = C::scale(amax, p.scale_ub);
  encode(tile, largest, DivisorOf<T>(scale), segment, lanes, p.streamed);
  if (lane == 0 && segment.count > 0) *segment.scale = scale;
}

}  // namespace kestrel::quant
