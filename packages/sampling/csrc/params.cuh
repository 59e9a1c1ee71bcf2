// The parameters of the sampling kernels, and the random words of a row.
#pragma once

#include "mass.cuh"

namespace kestrel::sampling {

constexpr u64 kQ32One = u64{1} << 32;  // a top-p of 1 in parts of 2^32
constexpr int kMaxSmallK = 128;        // the largest k of short_rows.cuh
constexpr int kShortRow = 4096;        // the longest row of short_rows.cuh
constexpr int kProposals = 4;          // ids drawn in one round of rejection sampling

// Rounds whose proposals are drawn from the whole row. A small top-p rejects most of these, so that it needs fewer
// rounds if they come from less and less of the row.
constexpr u32 kRowRounds = 16;
__device__ __forceinline__ u32 rounds_from_row(u64 q32) { return q32 < kQ32One / 8 ? 1 : kRowRounds; }

// A parameter: a number for all rows, a tensor of one, or a tensor of one per row.
template <typename N>
struct PerRow {
  const void* values = nullptr;
  N value = 0;
  int stride = 0;
  __device__ __forceinline__ N at(int64_t row) const {
    return values ? static_cast<const N*>(values)[row * stride] : value;
  }
};

// The same of int32 or int64.
struct CountPerRow : PerRow<int64_t> {
  bool is_int64 = true;
  __device__ __forceinline__ int64_t at(int64_t row) const {
    return values && !is_int64 ? static_cast<const int*>(values)[row * stride] : PerRow<int64_t>::at(row);
  }
};

// The same of offsets: without a tensor, row b has `value + b * stride`.
struct OffsetPerRow : PerRow<int64_t> {
  __device__ __forceinline__ int64_t at(int64_t row) const {
    return values ? PerRow<int64_t>::at(row) : value + row * stride;
  }
};

struct Params {
  const char* rows = nullptr;
  int64_t row_bytes = 0;  // from one row to the next
  int num_rows = 0;
  int dtype = kRowFloat32;
  int length = 0;  // of a row
  int cluster_size = 1;
  int elements_per_warp = 0;
  int list_capacity = 0;
  bool copy_to_smem = false;  // rejection_rows: a block copies its elements to shared memory
  bool joint = false;         // top-p counts the mass of the row, not of what top-k keeps
  int largest_other_k = 0;    // threshold_rows: if not 0, rows with k up to it are skipped
  int max_top_k = 0;          // top_k_draw: see TopKLayout
  PerRow<float> temperature, top_p, min_p;
  CountPerRow top_k;
  PerRow<int64_t> seed;
  OffsetPerRow offset;
  // Either ids are drawn,
  int* ids = nullptr;
  bool* valid = nullptr;
  // or probabilities are written.
  float* out = nullptr;
  int64_t out_stride = 0;
};

// top-p in parts of 2^32, rounded down; NaN counts as 1.
__device__ __forceinline__ u64 top_p_q32(float top_p) {
  return static_cast<u64>((top_p < 1.f ? fmaxf(top_p, 0.f) : 1.f) * 0x1p32f);
}

// min-p clamped to [0, 1]; NaN counts as 0.
__device__ __forceinline__ float clamp_min_p(float min_p) { return min_p > 0.f ? fminf(min_p, 1.f) : 0.f; }

// The four words of Philox4x32-10 with key `seed` and counter (`offset`, `round`).
__device__ __forceinline__ void random_words(u64 seed, u64 offset, u32 round, u32 (&words)[4]) {
  u32 k0 = static_cast<u32>(seed), k1 = static_cast<u32>(seed >> 32);
  u32 c0 = static_cast<u32>(offset), c1 = static_cast<u32>(offset >> 32), c2 = round, c3 = 0;
#pragma unroll 1
  for (int i = 0; i < 10; ++i) {
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
