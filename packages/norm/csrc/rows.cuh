// What the norm kernels work on: the rows of tensors, read and written in packs of 16 bytes.
#pragma once

#include <kestrel/pack.cuh>

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
  unsigned sizes[2] = {1, 1};  // of the two inner leading dimensions
  bool flat = true;            // rows are one stride apart in every tensor: only stride[0] counts
  bool early = true;           // let the next kernel start at the wait, not only when the rows have been asked for
  bool prefetch = true;        // bring the rows into L2 before the wait
  bool streamed = false;       // the result does not fit into L2: write past it
  float eps = 0;
  float inv_n = 0;
  float weight_bias = 0;
};

// Where one row begins in each tensor.
struct Row {
  const char* x;
  char* residual;
  char* out;

  __device__ __forceinline__ Row(const Params& p, int row) {
    if (p.flat) {
      x = p.x.base + row * p.x.stride[0];
      residual = p.residual.base + row * p.residual.stride[0];
      out = p.out.base + row * p.out.stride[0];
    } else {
      const unsigned i01 = row / p.sizes[1], i2 = row % p.sizes[1];
      const unsigned i0 = i01 / p.sizes[0], i1 = i01 % p.sizes[0];
      x = p.x.base + i0 * p.x.stride[0] + i1 * p.x.stride[1] + i2 * p.x.stride[2];
      residual = p.residual.base + i0 * p.residual.stride[0] + i1 * p.residual.stride[1] + i2 * p.residual.stride[2];
      out = p.out.base + i0 * p.out.stride[0] + i1 * p.out.stride[1] + i2 * p.out.stride[2];
    }
  }
};

// Keeps a value from being computed later than here: the compiler sinks what it can past pdl_wait().
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)); }
__device__ __forceinline__ void pin(unsigned& value) { asm volatile("" : "+r"(value)); }
template <typename P>
__device__ __forceinline__ void pin(P*& pointer) {
  asm volatile("" : "+l"(pointer));
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
__device__ __forceinline__ void store_pack(char* row, int first, int n, const Pack<T>& pack, bool streamed = false) {
  char* p = row + static_cast<int64_t>(first) * sizeof(T);
  if constexpr (VECTORS) {
    if (first >= n) return;
    streamed ? store16_streamed(p, pack.bits) : store16(p, pack.bits);
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

}  // namespace kestrel::norm
