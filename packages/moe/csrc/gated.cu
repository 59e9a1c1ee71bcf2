// The gated activations: [T, 2F] -> [T, F], activation(h) * g or * (g + 1), and the same as FP8 with a scale per row.
//
// Built for F of 1024 (experts, 8 to 5920 rows) and 4096 to 18944 (dense layers, 2048 rows). It must read 4F bytes of a
// row and write 2F (FP8: F + 4); arithmetic is 10 to 20 operations per element, two of them on the special-function
// unit: 5920x1024 takes 3.3 us there against 8.5 for the bytes, so bytes decide from a few hundred rows on, and below
// that the latency of one chain of load, exp, store.
//
// Split: plain, a thread per pack of 16 bytes of the result: two packs in, one out; blocks cover one row's packs in
// turn. FP8, a block per row: its packs stay in registers as activated floats, the block agrees on the largest
// magnitude, and the codes are written; rows past 16384 elements, and any that are not aligned, are read and activated
// twice instead. Before the wait rows are only prefetched into L2.
//
// Measured: results/h200.json, README.md.
#include <kestrel/fp8.cuh>
#include <kestrel/launch.h>
#include <kestrel/pdl.cuh>
#include <kestrel/reduce.cuh>
#include <kestrel/tensor.h>
#include <tvm/ffi/function.h>

#include <algorithm>

#include "activation.cuh"

namespace kestrel::moe {

struct GatedParams {
  const char* x = nullptr;
  char* out = nullptr;  // FP8: codes
  float* scale = nullptr;
  int64_t x_stride = 0, out_stride = 0;  // of a row, in bytes
  int rows = 0;
  int width = 0;  // F
  Activation activation = Activation::silu;
  float shift = 0.f;
  int chunks = 0;  // blocks per row
};

// One pack of a half row from element `first` on. VECTORS: it is one access; otherwise elements past the end are zero.
template <bool VECTORS, typename T>
__device__ __forceinline__ Pack<T> load_half(const char* row, int first, int width) {
  Pack<T> pack;
  if constexpr (VECTORS) {
    pack.bits = load16_streamed(row + static_cast<int64_t>(first) * sizeof(T));
  } else {
    T elements[Pack<T>::size];
#pragma unroll
    for (int i = 0; i < Pack<T>::size; ++i) {
      elements[i] = first + i < width ? reinterpret_cast<const T*>(row)[first + i] : from_float<T>(0.f);
    }
    memcpy(&pack.bits, elements, 16);
  }
  return pack;
}

// The activated floats of one pack of a row.
template <bool VECTORS, typename T>
__device__ __forceinline__ void gated_pack(const GatedParams& p, const char* row, int first,
                                           float (&h)[Pack<T>::size]) {
  const Pack<T> left = load_half<VECTORS, T>(row, first, p.width);
  const Pack<T> right = load_half<VECTORS, T>(row + static_cast<int64_t>(p.width) * sizeof(T), first, p.width);
  float g[Pack<T>::size];
  left.unpack(h);
  right.unpack(g);
  gate<T>(h, g, p.activation, p.shift);
}

template <typename T, bool VECTORS>
__global__ void __launch_bounds__(256) gated_kernel(const __grid_constant__ GatedParams p) {
  constexpr int size = Pack<T>::size;
  const int row = blockIdx.x / p.chunks;
  const int first = ((blockIdx.x - row * p.chunks) * blockDim.x + threadIdx.x) * size;
  const char* x = p.x + row * p.x_stride;
  char* out = p.out + row * p.out_stride + static_cast<int64_t>(first) * sizeof(T);
  if (first >= p.width) return;
  if (threadIdx.x % 8 == 0) {  // a line is 8 packs
    prefetch_l2(x + static_cast<int64_t>(first) * sizeof(T));
    prefetch_l2(x + (static_cast<int64_t>(p.width) + first) * sizeof(T));
  }
  pdl_wait();
  pdl_trigger();
  float h[size];
  gated_pack<VECTORS, T>(p, x, first, h);
  Pack<T> y;
  y.pack(h);
  if constexpr (VECTORS) {
    store16(out, y.bits);
  } else {
    T elements[size];
    memcpy(elements, &y.bits, 16);
#pragma unroll
    for (int i = 0; i < size; ++i) {
      if (first + i < p.width) reinterpret_cast<T*>(out)[i] = elements[i];
    }
  }
}

template <int size>
__device__ __forceinline__ float largest_of(const float (&h)[size], int first, int width) {
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < size; ++i) {
    if (first + i < width) most = fmaxf(most, finite_magnitude(h[i]));
  }
  return most;
}

template <bool VECTORS, int size>
__device__ __forceinline__ void write_codes(const float (&h)[size], const Divisor& scale, bool covered, char* codes,
                                            int first, int width) {
  float q[size];
#pragma unroll
  for (int i = 0; i < size; ++i) q[i] = covered ? scale(h[i]) : scale.exactly(h[i]);
  if constexpr (VECTORS) {
    uint32_t words[size / 4];
#pragma unroll
    for (int i = 0; i < size / 4; ++i) words[i] = to_fp8x4(q[4 * i], q[4 * i + 1], q[4 * i + 2], q[4 * i + 3]);
    if constexpr (size == 8) {
      *reinterpret_cast<uint2*>(codes + first) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<uint32_t*>(codes + first) = words[0];
    }
  } else {
#pragma unroll
    for (int i = 0; i < size; ++i) {
      if (first + i < width) codes[first + i] = static_cast<char>(to_fp8(q[i]));
    }
  }
}

constexpr int kFp8Threads = 512;

// V packs per thread are kept; V = 0: any row, activated twice.
template <typename T, int V>
__global__ void __launch_bounds__(kFp8Threads) gated_fp8_kernel(const __grid_constant__ GatedParams p) {
  constexpr int size = Pack<T>::size;
  constexpr bool vectors = V > 0;
  __shared__ float memory[kFp8Threads / 32];
  const int row = blockIdx.x, step = blockDim.x * size;
  const char* x = p.x + row * p.x_stride;
  char* codes = p.out + row * p.out_stride;
  if constexpr (vectors) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int first = v * step + threadIdx.x * size;
      if (threadIdx.x % 8 == 0 && first < p.width) {
        prefetch_l2(x + static_cast<int64_t>(first) * sizeof(T));
        prefetch_l2(x + (static_cast<int64_t>(p.width) + first) * sizeof(T));
      }
    }
  }
  pdl_wait();
  pdl_trigger();
  float kept[vectors ? V : 1][size];
  float most = 0.f;
  if constexpr (vectors) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int first = v * step + threadIdx.x * size;
      if (first >= p.width) continue;
      gated_pack<true, T>(p, x, first, kept[v]);
      most = fmaxf(most, largest_of(kept[v], first, p.width));
    }
  } else {
    for (int64_t first = threadIdx.x * size; first < p.width; first += step) {
      gated_pack<false, T>(p, x, static_cast<int>(first), kept[0]);
      most = fmaxf(most, largest_of(kept[0], static_cast<int>(first), p.width));
    }
  }
  most = block_max<kFp8Threads / 32>(most, memory);
  const Divisor scale(fp8_scale(most));
  // An infinite element passes the bound of finite ones, and the fast quotient would make NaN of it.
  const bool covered = false;
  if (threadIdx.x == 0) p.scale[row] = scale.value;
  if constexpr (vectors) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int first = v * step + threadIdx.x * size;
      if (first < p.width) write_codes<true>(kept[v], scale, covered, codes, first, p.width);
    }
  } else {
    for (int64_t first = threadIdx.x * size; first < p.width; first += step) {
      gated_pack<false, T>(p, x, static_cast<int>(first), kept[0]);
      write_codes<false>(kept[0], scale, covered, codes, static_cast<int>(first), p.width);
    }
  }
}
