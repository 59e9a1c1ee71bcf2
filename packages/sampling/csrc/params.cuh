// What the kernels that draw are told, and the random word of a row.
#pragma once

#include "row.cuh"

namespace kestrel::sampling {

constexpr u64 kWhole = u64{1} << 32;  // a top-p of 1
constexpr int kFew = 128;             // the largest k of few_rows.cuh and short_rows.cuh
constexpr int kShortRow = 4096;       // the longest of short_rows.cuh
constexpr int kDrawn = 4;             // ids at once

// A parameter: one number for all rows, or one per row, or a tensor of one.
template <typename N>
struct PerRow {
  const void* values = nullptr;
  N number = 0;
  int step = 0;
  __device__ __forceinline__ N at(int64_t row) const {
    return values ? static_cast<const N*>(values)[row * step] : number;
  }
};

// The same of integers of 32 or 64 bits.
struct CountPerRow : PerRow<int64_t> {
  bool wide = true;
  __device__ __forceinline__ int64_t at(int64_t row) const {
    return values && !wide ? static_cast<const int*>(values)[row * step] : PerRow<int64_t>::at(row);
  }
};

struct Params {
  const char* rows = nullptr;
  int64_t row_bytes = 0;  // from one row to the next
  int count = 0;          // of rows
  int dtype = kRowFloat32;
  int length = 0;
  int blocks = 1;  // of a team
  int per_warp = 0;
  int list_size = 0;
  bool held = false;  // draw_rows: a block keeps its elements in shared memory
  bool joint = false;
  bool left = false;  // sample_rows: only rows that few_rows left, or whose k is larger than its
  PerRow<float> temperature, top_p, min_p;
  CountPerRow top_k;
  PerRow<int64_t> seed, offset;
  // Either a draw,
  int* ids = nullptr;
  bool* valid = nullptr;
  // or probabilities.
  float* out = nullptr;
  int64_t out_step = 0;
};

// top-p in parts of 2^32; NaN counts as 1.
__device__ __forceinline__ u64 parts_of(float top_p) {
  return static_cast<u64>((top_p < 1.f ? fmaxf(top_p, 0.f) : 1.f) * 0x1p32f);
}

// min-p from 0 to 1; NaN counts as 0.
__device__ __forceinline__ float part_of(float min_p) { return min_p > 0.f ? fminf(min_p, 1.f) : 0.f; }

// The four words of Philox4x32-10 with key `seed` and counter (`offset`, `turn`).
__device__ __forceinline__ void random_words(u64 seed, u64 offset, u32 turn, u32 (&words)[4]) {
  u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
  u32 c0 = static_cast<u32>(offset), c1 = static_cast<u32>(offset >> 32), c2 = turn, c3 = 0;
#pragma unroll 1
  for (int step = 0; step < 10; ++step) {
    const u64 a = u64{0xd2511f53u} * c0, b = u64{0xcd9e8d57u} * c2;
    c0 = static_cast<u32>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<u32>(b);
    c2 = static_cast<u32>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<u32>(a);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

__device__ __forceinline__ u32 random_word(u64 seed, u64 offset) {
  u32 words[4];
  random_words(seed, offset, 0, words);
  return words[0];
}

}  // namespace kestrel::sampling
