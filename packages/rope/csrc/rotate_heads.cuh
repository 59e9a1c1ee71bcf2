// Rotary position embedding in place: the kernel behind rotary_embedding and multimodal_rotary_embedding.
//
// clang-format off
// Computes:   x, y = x cos - y sin, y cos + x sin for every pair (x, y) of the R turned dims of every query and key head of a
//             row, by the angles in the table's row at the row's position.
// Built for:  32 + 32 heads of 64 or 128 in bf16, from one row (latency) to 8192 (bandwidth).
// Must move:  every turned element in and out once, 3 operations each, and a row of the table per row of heads.
// Split:      a thread turns one piece (8 frequencies in bf16: two packs of 16 bytes) of U heads of a row, so that its
//             cosines and sines serve U times. Block: x pieces, y heads, z rows; no loops and no divisions.
// PDL:        the address in the table depends on a position, so nothing constant can be read before the wait. Heads and
//             positions are prefetched into L2 before it (that returns no data), read after it.
// Measured:   on an H200, of the limit (a launch and the bytes at 4.3 TB/s): 1.10, 1.00, 0.95 for 1, 4, 16 rows of 32 + 32
//             heads of 64, 0.94 for 740; 0.93 to 0.95 for 512 to 8192 rows of heads of 128 (results/h200.json). README.md has
//             every shape of record, what was predicted, and what came of it.
// clang-format on
#pragma once

#include <kestrel/pdl.cuh>
#include <kestrel/rotary.cuh>

#include <cstdint>

namespace kestrel::rope {

constexpr int MOST_THREADS = 256;
constexpr int AXES = 3;  // time, height, width

template <typename T_, typename W_, bool neox_, bool vectors_, bool multimodal_>
struct Op {
  using T = T_;  // of query and key
  using W = W_;  // of the table
  static constexpr bool neox = neox_;
  static constexpr bool vectors = vectors_;  // packs of 16 bytes; otherwise pair by pair
  static constexpr bool multimodal = multimodal_;
  static constexpr int frequencies = vectors ? Pack<T>::size : 1;  // of a thread
  static constexpr int axes = multimodal ? AXES : 1;               // positions of a row
};

// The heads of query or key, from the first turned dim on. Strides in bytes.
struct Heads {
  char* base = nullptr;
  int64_t row_stride[2] = {0, 0};  // outer, inner
  int64_t head_stride = 0;
  int count = 0;
};

struct Params {
  Heads query, key;
  const char* positions = nullptr;
  int64_t position_stride[2] = {0, 0};
  int64_t axis_stride = 0;  // from time to height to width
  const char* table = nullptr;
  int64_t table_stride = 0;
  uint64_t table_rows = 0;
  int rows = 0;
  unsigned inner_rows = 0;   // 0: rows are one stride apart everywhere, the inner one
  int half = 0;              // frequencies: R/2
  int sections[2] = {0, 0};  // frequencies of time (height) and of time and height (width); the latter if interleaved
  bool wide = false;         // positions are int64
  bool inverse = false;
  bool interleaved = false;
  bool prefetch = true;   // bring the heads into L2 before the wait
  bool streamed = false;  // the result fills L2: let it leave first
};

// What a thread turns of one head: two packs, or two elements.
template <typename O>
struct Piece {
  using T = typename O::T;
  Pack<T> first, second;
  __device__ __forceinline__ void load(const char* p, int64_t gap) {
    first.bits = load16_streamed(p);
    second.bits = load16_streamed(p + gap);
  }
  __device__ __forceinline__ void turn(const Angles<Pack<T>::size>& angles) {
    rotate_piece<O::neox>(first, second, angles);
  }
  __device__ __forceinline__ void store(char* p, int64_t gap, bool streamed) const {
    if (streamed) {
      store16_streamed(p, first.bits);
      store16_streamed(p + gap, second.bits);
    } else {
      store16(p, first.bits);
      store16(p + gap, second.bits);
    }
  }
};

template <typename T_, typename W, bool neox, bool multimodal>
struct Piece<Op<T_, W, neox, false, multimodal>> {
  using T = T_;
  T first, second;
  __device__ __forceinline__ void load(const char* p, int64_t gap) {
    first = *reinterpret_cast<const T*>(p);
    second = *reinterpret_cast<const T*>(p + gap);
  }
  __device__ __forceinline__ void turn(const Angles<1>& angles) {
    float x = to_float(first), y = to_float(second);
    rotate_pair(x, y, angles.cos[0], angles.sin[0]);
    first = from_float<T>(x);
    second = from_float<T>(y);
  }
  __device__ __forceinline__ void store(char* p, int64_t gap, bool) const {
    *reinterpret_cast<T*>(p) = first;
    *reinterpret_cast<T*>(p + gap) = second;
  }
};

// Which of the three positions turns a frequency.
__device__ __forceinline__ int axis_of(int frequency, const Params& p) {
  if (!p.interleaved) return (frequency >= p.sections[0]) + (frequency >= p.sections[1]);
  const int axis = frequency % AXES;
  return axis > 0 && frequency < AXES * p.sections[axis - 1] ? axis : 0;
}

// The cosines and sines that a thread needs, from the table's rows at one position or at three.
template <typename O>
__device__ __forceinline__ void load_angles(Angles<O::frequencies>& angles, const int64_t* at, int frequency,
                                            const Params& p) {
  const char* row[O::axes];
#pragma unroll
  for (int i = 0; i < O::axes; ++i) row[i] = p.table + at[i] * p.table_stride;
  // The pairs of a GPT-J piece are neighbours within its packs: two runs of frequencies.
  constexpr bool two_runs = O::vectors && !O::neox;
  const int first = two_runs ? frequency / 2 : frequency, second = (frequency + p.half) / 2;
  if constexpr (O::multimodal) {
    constexpr int run = two_runs ? O::frequencies / 2 : O::frequencies;
#pragma unroll
    for (int i = 0; i < O::frequencies; ++i) {
      const int f = i < run ? first + i : second + i - run, axis = axis_of(f, p);
      Angles<1> one;
      one.load<typename O::W>(axis == 0 ? row[0] : axis == 1 ? row[1] : row[2], f, p.half);
      angles.cos[i] = one.cos[0];
      angles.sin[i] = one.sin[0];
    }
  } else if constexpr (two_runs) {
    angles.template load_two_runs<typename O::W>(row[0], first, second, p.half);
  } else if constexpr (O::vectors) {
    angles.template load_packs<typename O::W>(row[0], first, p.half);
  } else {
    angles.template load<typename O::W>(row[0], first, p.half);
  }
  if (p.inverse) angles.invert();
}

template <typename O, int U>
__global__ void __launch_bounds__(MOST_THREADS, 2) rotate_heads(const __grid_constant__ Params p) {
  using T = typename O::T;
  const int row = blockIdx.x * blockDim.z + threadIdx.z;
  const int frequency = (blockIdx.z * blockDim.x + threadIdx.x) * O::frequencies;
  const int first_head = blockIdx.y * blockDim.y * U + threadIdx.y;
  const int heads = p.query.count + p.key.count;
  if (row >= p.rows || frequency >= p.half || first_head >= heads) return;

  unsigned outer = 0, inner = row;
  if (p.inner_rows) outer = row / p.inner_rows, inner = row % p.inner_rows;
  const char* position = p.positions + outer * p.position_stride[0] + inner * p.position_stride[1];
  // Packs stand R/2 apart, in either order of the pairs, so that neighbouring threads take neighbouring packs; so do
  // the two elements of a NeoX pair, but those of a GPT-J pair are neighbours.
  constexpr bool neighbours = !O::vectors && !O::neox;
  const int64_t in_head = (neighbours ? 2 * frequency : frequency) * static_cast<int64_t>(sizeof(T));
  const int64_t gap = (neighbours ? 1 : p.half) * static_cast<int64_t>(sizeof(T));
  char* query = p.query.base + outer * p.query.row_stride[0] + inner * p.query.row_stride[1] + in_head;
  char* key = p.key.base + outer * p.key.row_stride[0] + inner * p.key.row_stride[1] + in_head;
  char* piece_at[U];
  bool exists[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const int head = first_head + u * blockDim.y;
    exists[u] = head < heads;
    piece_at[u] =
        head < p.query.count ? query + head * p.query.head_stride : key + (head - p.query.count) * p.key.head_stride;
  }

  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < O::axes; ++i) prefetch_l2(position + i * p.axis_stride);
  }
  if constexpr (O::vectors) {
    if (p.prefetch && threadIdx.x % 8 == 0) {  // a line of 128 bytes is 8 packs
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (exists[u]) {
          prefetch_l2(piece_at[u]);
          if (gap >= 128) prefetch_l2(piece_at[u] + gap);
        }
      }
    }
  }
  pin(position);
#pragma unroll
  for (int u = 0; u < U; ++u) pin(piece_at[u]);
  pdl_wait();
  pdl_trigger();

  // A row whose position is not in the table is read as if it stood at 0, and not written: with a branch here the
  // loads of its heads would wait for the position.
  int64_t at[O::axes];
  bool inside = true;
#pragma unroll
  for (int i = 0; i < O::axes; ++i) {
    at[i] = read_position(position + i * p.axis_stride, p.wide);
  }
  Piece<O> piece[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (exists[u]) piece[u].load(piece_at[u], gap);
  }
  pdl_trigger();  // has been done; it keeps the assembler from sinking loads below the use of the position
#pragma unroll
  for (int i = 0; i < O::axes; ++i) {
    inside = inside && static_cast<uint64_t>(at[i]) < p.table_rows;
    at[i] = static_cast<uint64_t>(at[i]) < p.table_rows ? at[i] : 0;
  }
  Angles<O::frequencies> angles;
  load_angles<O>(angles, at, frequency, p);
#pragma unroll
  for (int u = 0; u < U; ++u) {
    piece[u].turn(angles);
    if (exists[u] && inside) piece[u].store(piece_at[u], gap, p.streamed);
  }
}

}  // namespace kestrel::rope
