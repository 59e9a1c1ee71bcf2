// Quantisation per row, where rows are whole aligned packs: the shapes of record.
//
// clang-format off
// Computes:   scale = f(largest finite magnitude of a row); code = round(x / scale), bit for bit the reference's.
// Built for:  rows of 0.5 to 8 k elements in bf16, from one row (latency) to 65536 (bandwidth).
// Must move:  x in, codes and scales out: 3 bytes per bf16 element; about 5 operations per element, so memory decides: 4.3 TB/s.
// Split:      a team of whole warps per row, two packs of 16 bytes a thread, one barrier; blocks of at least 128 threads.
// PDL:        everything is read after the wait; before it the first blocks bring their rows into L2, and addresses are computed.
//             Parameters arrive cold: packed into 48 bytes they cost a short call 30 to 50 ns less than in 152.
//             Rows past L2 are not: 65536x1024 in bf16 48.1 us so, 49.6 with (results/h200_designs.json).
// Measured:   bf16 on an H200, of the limit: 104 % and more up to 128 rows, where that is a launch; 98 % of 5920x2048 and of
//             65536 rows (results/h200.json; designs: README.md).
// clang-format on
#pragma once

#include "codes.cuh"

namespace kestrel::quant {

constexpr int kRowPacks = 2;  // of a thread
constexpr int kRowThreads = 512;

// Codes and scales stand without gaps.
struct RowParams {
  char* values;
  char* codes;
  float* scales;
  const float* bound;  // scale_ub
  unsigned stride;     // from row to row of the values, in packs of 16 bytes
  unsigned rows;
  uint16_t packs;        // of a row
  uint16_t prefetch;     // so many blocks, the first to run, bring what they read into L2 before the wait
  uint8_t warps, teams;  // of a row, of a block
  bool streamed;         // L2 need not keep the result
};
static_assert(sizeof(RowParams) <= 48);

template <typename C, typename T>
__global__ void __launch_bounds__(kRowThreads) quant_rows(const __grid_constant__ RowParams p) {
  constexpr int size = Pack<T>::size, bytes = kCodeBytes<C, T>;
  __shared__ float memory[32];
  const int lane = threadIdx.x, lanes = 32 * p.warps;
  const unsigned row = blockIdx.x * p.teams + threadIdx.y;
  char* values = p.values + (uint64_t{row} * p.stride + lane) * 16;
  const int count = row < p.rows ? (p.packs - lane) * size : 0;
  if (blockIdx.x < p.prefetch) prefetch<kRowPacks>(values, 16, size, lane, lanes, count);
  char* codes = p.codes + (uint64_t{row} * p.packs + lane) * bytes;
  Segment<C, T> segment(values, codes, p.scales + row, row, count);
  const TeamMaximum team_amax(memory, threadIdx.y, lane, lanes);
  segment.pin();
  pdl_wait();
  pdl_trigger();

  Held<T, kRowPacks> held;
  held.load(segment.values, lanes, segment.count);
  const float largest = held.largest();
  float amax = held.amax(largest, segment.values, lanes, segment.count);
  amax = lanes == 32 ? warp_amax(amax) : team_amax(amax);
  const float scale = C::scale(amax, p.bound);
  encode(held, largest, DivisorOf<T>(scale), segment, lanes, p.streamed);
  if (lane == 0 && segment.count > 0) *segment.scale = scale;
}

}  // namespace kestrel::quant
