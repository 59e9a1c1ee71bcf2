// Rotary position embedding in place: the kernel of rotary_embedding and multimodal_rotary_embedding.
//
// Computes x, y = x cos - y sin, y cos + x sin for each pair (x, y) of the R rotated dimensions of every query and key
// head, with the angles of the table's row at the row's position. A thread rotates one pair of packs of 16 bytes (8
// frequencies in bf16) in HEADS_PER_THREAD heads of a row, so it loads cosines and sines once for all of them.
// Thread block: x packs, y heads, z rows; no loops and no divisions.
// PDL: the address in the table depends on a position, so nothing is read before the wait. Heads and positions are
// prefetched into L2 before it: a prefetch returns no data, so it cannot return stale data.
#pragma once

#include <kestrel/index.cuh>
#include <kestrel/pdl.cuh>
#include <kestrel/rotary.cuh>

#include <cstdint>

namespace kestrel::rope {

constexpr int kMaxThreads = 256;
constexpr int kAxes = 3;  // time, height, width

enum class Pairs { neox, gptj };         // (i, i + R/2) or (2i, 2i + 1)
enum class Access { packs, elements };   // 16 bytes at a time, or pair by pair
enum class Positions { one, per_axis };  // per row

// T: dtype of query and key. W: dtype of the table.
template <typename T_, typename W_, Pairs pairs, Access access, Positions positions>
struct Spec {
  using T = T_;
  using W = W_;
  static constexpr bool neox = pairs == Pairs::neox;
  static constexpr bool packs = access == Access::packs;
  static constexpr bool multimodal = positions == Positions::per_axis;
  static constexpr int frequencies = packs ? Pack<T>::size : 1;  // per thread
  static constexpr int axes = multimodal ? kAxes : 1;
};

// The heads of query or key, from the first rotated dimension on. Strides in bytes.
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
  unsigned inner_rows = 0;   // 0: all rows are the inner stride apart
  int half = 0;              // frequencies: R/2
  int sections[2] = {0, 0};  // ends of the frequencies of time and height; if interleaved, sizes of height and width
  bool int64_positions = false;
  bool inverse = false;
  bool interleaved = false;
  bool prefetch = true;      // prefetch the heads into L2 before the PDL wait
  bool evict_first = false;  // the output fills L2: store it with the evict-first hint
};

// The two operands of the rotation in one head: two packs, or two elements.
template <typename S>
struct Operands {
  using T = typename S::T;
  Pack<T> first, second;
  __device__ __forceinline__ void load(const char* p, int64_t distance) {
    first.bits = load16_streamed(p);
    second.bits = load16_streamed(p + distance);
  }
  __device__ __forceinline__ void rotate(const Angles<Pack<T>::size>& angles) {
    rotate_packs<S::neox>(first, second, angles);
  }
  __device__ __forceinline__ void store(char* p, int64_t distance, bool evict_first) const {
    if (evict_first) {
      store16_streamed(p, first.bits);
      store16_streamed(p + distance, second.bits);
    } else {
      store16(p, first.bits);
      store16(p + distance, second.bits);
    }
  }
};

template <typename T_, typename W, Pairs pairs, Positions positions>
struct Operands<Spec<T_, W, pairs, Access::elements, positions>> {
  using T = T_;
  T first, second;
  __device__ __forceinline__ void load(const char* p, int64_t distance) {
    first = *reinterpret_cast<const T*>(p);
    second = *reinterpret_cast<const T*>(p + distance);
  }
  __device__ __forceinline__ void rotate(const Angles<1>& angles) {
    float x = to_float(first), y = to_float(second);
    rotate_pair(x, y, angles.cos[0], angles.sin[0]);
    first = from_float<T>(x);
    second = from_float<T>(y);
  }
  __device__ __forceinline__ void store(char* p, int64_t distance, bool) const {
    *reinterpret_cast<T*>(p) = first;
    *reinterpret_cast<T*>(p + distance) = second;
  }
};

// The axis (time, height, width) whose position gives a frequency its angle.
__device__ __forceinline__ int axis_of(int frequency, const Params& p) {
  if (!p.interleaved) return (frequency >= p.sections[0]) + (frequency >= p.sections[1]);
  const int axis = frequency % kAxes;
  return axis > 0 && frequency < kAxes * p.sections[axis - 1] ? axis : 0;
}

// The cosines and sines of a thread, from the table's rows at one position or at three.
template <typename S>
__device__ __forceinline__ void load_angles(Angles<S::frequencies>& angles, const int64_t* table_row, int frequency,
                                            const Params& p) {
  const char* row[S::axes];
#pragma unroll
  for (int i = 0; i < S::axes; ++i) row[i] = p.table + table_row[i] * p.table_stride;
  // The pairs of GPT-J packs are neighbours, so the two packs need two separate ranges of frequencies.
  constexpr bool two_ranges = S::packs && !S::neox;
  const int first = two_ranges ? frequency / 2 : frequency, second = (frequency + p.half) / 2;
  if constexpr (S::multimodal) {
    constexpr int range = two_ranges ? S::frequencies / 2 : S::frequencies;
#pragma unroll
    for (int i = 0; i < S::frequencies; ++i) {
      const int f = i < range ? first + i : second + i - range, axis = axis_of(f, p);
      Angles<1> one;
      one.load<typename S::W>(axis == 0 ? row[0] : axis == 1 ? row[1] : row[2], f, p.half);
      angles.cos[i] = one.cos[0];
      angles.sin[i] = one.sin[0];
    }
  } else if constexpr (two_ranges) {
    angles.template load_two_ranges<typename S::W>(row[0], first, second, p.half);
  } else if constexpr (S::packs) {
    angles.template load_packs<typename S::W>(row[0], first, p.half);
  } else {
    angles.template load<typename S::W>(row[0], first, p.half);
  }
  if (p.inverse) angles.invert();
}

template <typename S, int HEADS_PER_THREAD>
__global__ void __launch_bounds__(kMaxThreads, 2) rotate_heads(const __grid_constant__ Params p) {
  using T = typename S::T;
  const int row = blockIdx.x * blockDim.z + threadIdx.z;
  const int frequency = (blockIdx.z * blockDim.x + threadIdx.x) * S::frequencies;
  const int first_head = blockIdx.y * blockDim.y * HEADS_PER_THREAD + threadIdx.y;
  const int heads = p.query.count + p.key.count;
  if (row >= p.rows || frequency >= p.half || first_head >= heads) return;

  unsigned outer = 0, inner = row;
  if (p.inner_rows) outer = row / p.inner_rows, inner = row % p.inner_rows;
  const char* position = p.positions + outer * p.position_stride[0] + inner * p.position_stride[1];
  // Packs are R/2 apart in either order of the pairs, so that neighbouring threads access neighbouring packs. So are
  // the two elements of a NeoX pair; those of a GPT-J pair are neighbours.
  constexpr bool neighbours = !S::packs && !S::neox;
  const int64_t in_head = (neighbours ? 2 * frequency : frequency) * static_cast<int64_t>(sizeof(T));
  const int64_t distance = (neighbours ? 1 : p.half) * static_cast<int64_t>(sizeof(T));
  char* query = p.query.base + outer * p.query.row_stride[0] + inner * p.query.row_stride[1] + in_head;
  char* key = p.key.base + outer * p.key.row_stride[0] + inner * p.key.row_stride[1] + in_head;
  char* address[HEADS_PER_THREAD];
  bool exists[HEADS_PER_THREAD];
#pragma unroll
  for (int i = 0; i < HEADS_PER_THREAD; ++i) {
    const int head = first_head + i * blockDim.y;
    exists[i] = head < heads;
    address[i] =
        head < p.query.count ? query + head * p.query.head_stride : key + (head - p.query.count) * p.key.head_stride;
  }

  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < S::axes; ++i) prefetch_l2(position + i * p.axis_stride);
  }
  if constexpr (S::packs) {
    if (p.prefetch && threadIdx.x % 8 == 0) {  // a line of 128 bytes is 8 packs
#pragma unroll
      for (int i = 0; i < HEADS_PER_THREAD; ++i) {
        if (exists[i]) {
          prefetch_l2(address[i]);
          if (distance >= 128) prefetch_l2(address[i] + distance);
        }
      }
    }
  }
  pin(position);
#pragma unroll
  for (int i = 0; i < HEADS_PER_THREAD; ++i) pin(address[i]);
  pdl_wait();
  pdl_trigger();

  // A row whose position is outside the table is rotated as at position 0 but not stored: with a branch here, the loads
  // of its heads would wait for the position.
  int64_t table_row[S::axes];
  bool inside = true;
#pragma unroll
  for (int i = 0; i < S::axes; ++i) {
    table_row[i] = load_index(position + i * p.axis_stride, p.int64_positions);
  }
  Operands<S> operands[HEADS_PER_THREAD];
#pragma unroll
  for (int i = 0; i < HEADS_PER_THREAD; ++i) {
    if (exists[i]) operands[i].load(address[i], distance);
  }
  pdl_trigger();  // a no-op by now; it keeps ptxas from moving loads below the use of the position
#pragma unroll
  for (int i = 0; i < S::axes; ++i) {
    inside = inside && static_cast<uint64_t>(table_row[i]) < p.table_rows;
    table_row[i] = static_cast<uint64_t>(table_row[i]) < p.table_rows ? table_row[i] : 0;
  }
  Angles<S::frequencies> angles;
  load_angles<S>(angles, table_row, frequency, p);
#pragma unroll
  for (int i = 0; i < HEADS_PER_THREAD; ++i) {
    operands[i].rotate(angles);
    if (exists[i] && inside) operands[i].store(address[i], distance, p.evict_first);
  }
}

}  // namespace kestrel::rope
