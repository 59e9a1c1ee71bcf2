// Row normalisation: the kernels behind layer_norm, rms_norm and fused_add_rms_norm.
//
// Computes  y = (x - mean) * rstd * (weight + weight_bias) + bias  for every row of N elements (LayerNorm), or the same
// without mean and bias (RMSNorm); with a residual, x + residual is rounded, stored as the new residual, and normalised.
// Built for: rows of 1 to 8 k elements in bf16, from one row (latency) to 65536 (bandwidth).
// Must move: x once in, y once out (with a residual, that once in and once out too); 4 to 6 operations per element.
// Split: a team of threads per row, a function of N alone: one warp up to 128 packs of 16 bytes (four rows a block),
//   else one block of up to 32 warps. A thread holds V packs of its row in registers: pack c of a row belongs to thread
//   c % team, so the order of every sum follows from N and the dtype, not from alignment, strides or the batch.
// PDL: weight and bias are read before the wait, rows after it. A row is prefetched into L2 before
//   the wait: a prefetch returns no data, so it cannot see a stale value, and it hides the latency of rows that the
//   kernel before did not write (a residual, say).
// Measured fraction of the limit: results/*.json, drawn in README.md.
#pragma once

#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>

#include <cstdint>

namespace kestrel::norm {

enum class Norm { rms, layer };

template <Norm norm_, bool add_, typename T_, typename W_ = T_>
struct Op {
  static constexpr Norm norm = norm_;
  static constexpr bool add = add_;  // x + residual is normalised, and stored
  using T = T_;
  using W = W_;
};

// The rows of one tensor: up to three leading dimensions, strides in bytes, outermost first.
struct Rows {
  char* base = nullptr;
  int64_t stride[3] = {0, 0, 0};
};

struct Params {
  Rows x, residual, out;
  const void* weight = nullptr;
  const void* bias = nullptr;
  int rows = 0;
  int n = 0;
  int sizes[2] = {1, 1};  // of the two inner leading dimensions
  float eps = 0;
  float inv_n = 0;
  float weight_bias = 0;
};

__device__ __forceinline__ char* row_of(const Rows& t, const Params& p, int row) {
  if (p.sizes[0] * p.sizes[1] == 1) return t.base + row * t.stride[0];
  const int i2 = row % p.sizes[1], i01 = row / p.sizes[1];
  return t.base + (i01 / p.sizes[0]) * t.stride[0] + (i01 % p.sizes[0]) * t.stride[1] + i2 * t.stride[2];
}

// One pack of a row from element `first` on; what lies past the end is `fill`. VECTORS: every base and stride is a
// multiple of 16 bytes and n of a pack, so a pack is one access; otherwise its elements are read one by one.
template <bool VECTORS, typename T, bool constant = false>
__device__ __forceinline__ Pack<T> load_pack(const char* row, int first, int n, float fill = 0.f) {
  Pack<T> pack;
  T elements[Pack<T>::size];
#pragma unroll
  for (int i = 0; i < Pack<T>::size; ++i) elements[i] = from_float<T>(fill);
  memcpy(&pack.bits, elements, 16);
  const char* p = row + static_cast<int64_t>(first) * sizeof(T);
  if constexpr (VECTORS) {
    if (first < n) pack.bits = constant ? load16_constant(p) : load16_streamed(p);
  } else {
#pragma unroll
    for (int i = 0; i < Pack<T>::size; ++i) {
      if (first + i < n) elements[i] = reinterpret_cast<const T*>(p)[i];
    }
    memcpy(&pack.bits, elements, 16);
  }
  return pack;
}

template <bool VECTORS, typename T>
__device__ __forceinline__ void store_pack(char* row, int first, int n, const Pack<T>& pack) {
  char* p = row + static_cast<int64_t>(first) * sizeof(T);
  if constexpr (VECTORS) {
    if (first < n) store16(p, pack.bits);
  } else {
    T elements[Pack<T>::size];
    memcpy(elements, &pack.bits, 16);
#pragma unroll
    for (int i = 0; i < Pack<T>::size; ++i) {
      if (first + i < n) reinterpret_cast<T*>(p)[i] = elements[i];
    }
  }
}

// As many weights as a pack of T holds: one pack of W, or two when W is float32 and T is not.
template <typename T, typename W>
struct WeightPack {
  static constexpr int size = Pack<T>::size;
  static constexpr int count = size / Pack<W>::size;
  Pack<W> packs[count];

  // A weight that is not given is all ones.
  template <bool VECTORS>
  __device__ __forceinline__ void load(const void* weight, int first, int n) {
    const char* row = static_cast<const char*>(weight);
#pragma unroll
    for (int i = 0; i < count; ++i) {
      packs[i] = load_pack<VECTORS, W, true>(row, first + i * Pack<W>::size, weight ? n : 0, 1.f);
    }
  }
  __device__ __forceinline__ void unpack(float (&f)[size]) const {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      float part[Pack<W>::size];
      packs[i].unpack(part);
#pragma unroll
      for (int j = 0; j < Pack<W>::size; ++j) f[i * Pack<W>::size + j] = part[j];
    }
  }
};

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int other = 16; other > 0; other >>= 1) v += __shfl_xor_sync(0xffffffffu, v, other);
  return v;
}

// Where a thread stands in its team. WARPS: the most warps a team of this kernel has; 1 means a warp per row.
template <int WARPS>
struct Team {
  int row, thread, lane, warp;  // thread and warp: in the team
  int threads;                  // of the team

  __device__ __forceinline__ Team() {
    lane = threadIdx.x & 31;
    if constexpr (WARPS == 1) {
      row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
      thread = lane;
      warp = 0;
      threads = 32;
    } else {
      row = blockIdx.x;
      thread = threadIdx.x;
      warp = threadIdx.x >> 5;
      threads = blockDim.x;
    }
  }
};

// What each warp knows of its part of a row: {mean, sum of squared differences to it, elements, 0} for LayerNorm; for
// RMSNorm only the sum of squares, in .x.
template <int WARPS>
struct Shared {
  float4 part[WARPS];

  // Entries of warps that the team does not have.
  __device__ __forceinline__ void clear(const Team<WARPS>& team) {
    if (WARPS > 1 && team.thread < WARPS && team.thread >= (team.threads >> 5)) {
      part[team.thread] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
};

// The row's sum of squares from every thread's.
template <int WARPS>
__device__ __forceinline__ float team_sum(float s, const Team<WARPS>& team, Shared<WARPS>& shared) {
  s = warp_sum(s);
  if constexpr (WARPS > 1) {
    if (team.lane == 0) shared.part[team.warp].x = s;
    __syncthreads();
    if constexpr (WARPS <= 8) {
      float sums[WARPS];
#pragma unroll
      for (int i = 0; i < WARPS; ++i) sums[i] = shared.part[i].x;
#pragma unroll
      for (int half = WARPS / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
      }
      s = sums[0];
    } else {
      s = warp_sum(team.lane < WARPS ? shared.part[team.lane].x : 0.f);
    }
  }
  return s;
}

// Mean and variance from every thread's sums s1 of (x - pivot) and s2 of (x - pivot)^2, pivot the warp's, `count` the
// warp's elements. The pivot is the mean of one pack of the row, so what cancels in s2 - s1^2/count is at most 32 V times
// the row's own sum of squares, however far off the pivot: its pack's elements are then just as far from the mean.
struct Moments {
  float mean, variance;
};

template <int WARPS>
__device__ __forceinline__ Moments team_moments(float pivot, float s1, float s2, float count, float inv_count,
                                                const Params& p, const Team<WARPS>& team, Shared<WARPS>& shared) {
#pragma unroll
  for (int other = 16; other > 0; other >>= 1) {
    s1 += __shfl_xor_sync(0xffffffffu, s1, other);
    s2 += __shfl_xor_sync(0xffffffffu, s2, other);
  }
  const float shift = s1 * inv_count;
  const float spread = fmaf(-s1, shift, s2);
  const float mean = pivot + shift, squares = spread < 0.f ? 0.f : spread;  // a NaN stays
  if constexpr (WARPS == 1) return {mean, squares * p.inv_n};

  if (team.lane == 0) shared.part[team.warp] = make_float4(mean, squares, count, 0.f);
  __syncthreads();
  const float base = shared.part[0].x;  // means are taken relative to it, so equal elements give an exact mean
  if constexpr (WARPS <= 8) {
    float d[WARPS], n[WARPS], within[WARPS], sums[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
      const float4 part = shared.part[i];
      d[i] = part.x - base;
      within[i] = part.y;
      n[i] = part.z;
      sums[i & 1] = fmaf(d[i], n[i], sums[i & 1]);
    }
    const float delta = (sums[0] + sums[1]) * p.inv_n;
    sums[0] = sums[1] = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sums[i & 1] += fmaf((d[i] - delta) * n[i], d[i] - delta, within[i]);
    return {base + delta, (sums[0] + sums[1]) * p.inv_n};
  } else {
    const float4 part = team.lane < WARPS ? shared.part[team.lane] : make_float4(base, 0.f, 0.f, 0.f);
    const float d = part.x - base;
    const float delta = warp_sum(d * part.z) * p.inv_n;
    return {base + delta, warp_sum(fmaf((d - delta) * part.z, d - delta, part.y)) * p.inv_n};
  }
}

// The mean of lane 0's first pack.
template <typename T>
__device__ __forceinline__ float pivot_of(const float (&x)[Pack<T>::size], int first, int n) {
  float sums[Pack<T>::size];
#pragma unroll
  for (int i = 0; i < Pack<T>::size; ++i) sums[i] = x[i];
#pragma unroll
  for (int half = Pack<T>::size / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  const int valid = n - first;
  const float mean = valid >= Pack<T>::size ? sums[0] * (1.f / Pack<T>::size) : valid > 0 ? sums[0] / valid : 0.f;
  return __shfl_sync(0xffffffffu, mean, 0);
}

// Adds the elements of a pack that exist to s1 and s2, as differences to the pivot.
template <bool VECTORS, typename T>
__device__ __forceinline__ void add_moments(const float (&x)[Pack<T>::size], int first, int n, float pivot, float& s1,
                                            float& s2) {
  constexpr int size = Pack<T>::size;
  if (first >= n) return;
  float a[2] = {0.f, 0.f}, b[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < size; ++i) {
    float d = x[i] - pivot;
    if (!VECTORS && first + i >= n) d = 0.f;
    a[i & 1] += d;
    b[i & 1] = fmaf(d, d, b[i & 1]);
  }
  s1 += a[0] + a[1];
  s2 += b[0] + b[1];
}

template <typename T>
__device__ __forceinline__ float sum_of_squares(const float (&x)[Pack<T>::size]) {
  float a[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < Pack<T>::size; ++i) a[i & 1] = fmaf(x[i], x[i], a[i & 1]);
  return a[0] + a[1];
}

// Rounds x + residual, stores it as the new residual and leaves the rounded sum in x.
template <bool VECTORS, typename T>
__device__ __forceinline__ void add_residual(float (&x)[Pack<T>::size], const Pack<T>& residual, char* row, int first,
                                             int n) {
  float r[Pack<T>::size];
  residual.unpack(r);
#pragma unroll
  for (int i = 0; i < Pack<T>::size; ++i) x[i] += r[i];
  Pack<T> sum;
  sum.pack(x);
  store_pack<VECTORS>(row, first, n, sum);
  sum.unpack(x);
}

template <bool VECTORS, typename O>
__device__ __forceinline__ void write_normalised(float (&x)[Pack<typename O::T>::size], float mean, float rstd,
                                                 const WeightPack<typename O::T, typename O::W>& weight,
                                                 const Pack<typename O::T>& bias, const Params& p, char* row,
                                                 int first) {
  using T = typename O::T;
  float w[Pack<T>::size], b[Pack<T>::size];
  weight.unpack(w);
  if constexpr (O::norm == Norm::layer) bias.unpack(b);
#pragma unroll
  for (int i = 0; i < Pack<T>::size; ++i) {
    if constexpr (O::norm == Norm::layer) {
      x[i] = fmaf((x[i] - mean) * rstd, w[i], b[i]);
    } else {
      x[i] = x[i] * rstd * (w[i] + p.weight_bias);
    }
  }
  Pack<T> y;
  y.pack(x);
  store_pack<VECTORS>(row, first, p.n, y);
}

// Keeps a value from being computed later than here: the compiler sinks it past pdl_wait() otherwise.
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)); }

// Rows that fit into the registers of a team: N <= V * WARPS * 32 packs.
template <typename O, int V, int WARPS, bool VECTORS>
__global__ void __launch_bounds__(WARPS == 1 ? 128 : WARPS * 32, VECTORS ? 0 : 1) norm_rows(const __grid_constant__ Params p) {
  using T = typename O::T;
  constexpr int size = Pack<T>::size;
  constexpr bool layer = O::norm == Norm::layer;
  __shared__ Shared<WARPS> shared;

  constexpr bool early = !(layer && WARPS == 1);
  if (early) pdl_trigger();
  const Team<WARPS> team;
  if (WARPS == 1 && team.row >= p.rows) return;
  int first[V];  // elements this thread holds: `size` from each on
#pragma unroll
  for (int v = 0; v < V; ++v) first[v] = (v * team.threads + team.thread) * size;

  const char* mx = row_of(p.x, p, team.row);
  char* mresidual = O::add ? row_of(p.residual, p, team.row) : nullptr;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (team.thread % 8 == 0 && first[v] < p.n) {  // a line of 128 bytes is 8 packs
      prefetch_l2(mx + static_cast<int64_t>(first[v]) * sizeof(T));
      if constexpr (O::add) prefetch_l2(mresidual + static_cast<int64_t>(first[v]) * sizeof(T));
    }
  }
  WeightPack<T, typename O::W> weight[V];
  Pack<T> bias[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    weight[v].template load<VECTORS>(p.weight, first[v], p.n);
    if constexpr (layer) {
      bias[v] = load_pack<VECTORS, T, true>(static_cast<const char*>(p.bias), first[v], p.bias ? p.n : 0);
    }
  }
  float count = 0.f, inv_count = 0.f;  // of this warp's elements
  if constexpr (layer) {
    int elements = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) elements += min(32 * size, max(0, p.n - (v * team.threads + team.warp * 32) * size));
    count = elements;
    inv_count = WARPS == 1 ? p.inv_n : elements > 0 ? __frcp_rn(count) : 0.f;
    pin(count);
    pin(inv_count);
  }
  shared.clear(team);
  pdl_wait();

  Pack<T> loaded[V], residual[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    loaded[v] = load_pack<VECTORS, T>(mx, first[v], p.n);
    if constexpr (O::add) residual[v] = load_pack<VECTORS, T>(mresidual, first[v], p.n);
  }
  if (!early) pdl_trigger();

  float x[V][size];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    loaded[v].unpack(x[v]);
    if constexpr (O::add) add_residual<VECTORS, T>(x[v], residual[v], mresidual, first[v], p.n);
  }
  float mean = 0.f, variance;
  if constexpr (layer) {
    const float pivot = pivot_of<T>(x[0], first[0], p.n);
    float s1 = 0.f, s2 = 0.f;
#pragma unroll
    for (int v = 0; v < V; ++v) add_moments<VECTORS, T>(x[v], first[v], p.n, pivot, s1, s2);
    const Moments moments = team_moments<WARPS>(pivot, s1, s2, count, inv_count, p, team, shared);
    mean = moments.mean;
    variance = moments.variance;
  } else {
    float s = 0.f;
#pragma unroll
    for (int v = 0; v < V; ++v) s += sum_of_squares<T>(x[v]);
    variance = team_sum<WARPS>(s, team, shared) * p.inv_n;
  }
  const float rstd = rsqrtf(variance + p.eps);
  char* mout = row_of(p.out, p, team.row);
#pragma unroll
  for (int v = 0; v < V; ++v) write_normalised<VECTORS, O>(x[v], mean, rstd, weight[v], bias[v], p, mout, first[v]);
}

// Rows of any length, one block of LONG_WARPS warps each: read twice, the second time mostly from L2.
constexpr int LONG_WARPS = 32;

template <typename O, bool VECTORS>
__global__ void __launch_bounds__(LONG_WARPS * 32) norm_long_rows(const __grid_constant__ Params p) {
  using T = typename O::T;
  constexpr int size = Pack<T>::size;
  constexpr int stride = LONG_WARPS * 32 * size;
  constexpr bool layer = O::norm == Norm::layer;
  __shared__ Shared<LONG_WARPS> shared;
  pdl_trigger();
  pdl_wait();

  const Team<LONG_WARPS> team;
  const int start = team.thread * size;
  const char* mx = row_of(p.x, p, team.row);
  char* mresidual = O::add ? row_of(p.residual, p, team.row) : nullptr;
  float pivot = 0.f, s1 = 0.f, s2 = 0.f, count = 0.f;
  for (int64_t base = start; base - start < p.n; base += stride) {
    const int first = static_cast<int>(base < p.n ? base : p.n);
    float x[size];
    load_pack<VECTORS, T>(mx, first, p.n).unpack(x);
    if constexpr (O::add) {
      add_residual<VECTORS, T>(x, load_pack<VECTORS, T>(mresidual, first, p.n), mresidual, first, p.n);
    }
    if constexpr (layer) {
      if (base == start) pivot = pivot_of<T>(x, first, p.n);
      add_moments<VECTORS, T>(x, first, p.n, pivot, s1, s2);
      count += min(size, p.n - first);
    } else {
      s2 += sum_of_squares<T>(x);
    }
  }
  float mean = 0.f, variance;
  if constexpr (layer) {
    count = warp_sum(count);
    const Moments moments =
        team_moments<LONG_WARPS>(pivot, s1, s2, count, count > 0.f ? 1.f / count : 0.f, p, team, shared);
    mean = moments.mean;
    variance = moments.variance;
  } else {
    variance = team_sum<LONG_WARPS>(s2, team, shared) * p.inv_n;
  }
  const float rstd = rsqrtf(variance + p.eps);
  char* mout = row_of(p.out, p, team.row);
  for (int64_t base = start; base < p.n; base += stride) {
    const int first = static_cast<int>(base);
    float x[size];
    load_pack<VECTORS, T>(O::add ? mresidual : mx, first, p.n).unpack(x);
    WeightPack<T, typename O::W> weight;
    Pack<T> bias;
    weight.template load<VECTORS>(p.weight, first, p.n);
    if constexpr (layer) {
      bias = load_pack<VECTORS, T, true>(static_cast<const char*>(p.bias), first, p.bias ? p.n : 0);
    }
    write_normalised<VECTORS, O>(x, mean, rstd, weight, bias, p, mout, first);
  }
}

}  // namespace kestrel::norm
