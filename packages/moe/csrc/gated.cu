// The gated activations: [T, 2F] -> [T, F], activation(h) * g or * (g + 1), and the same as FP8 with a scale per row.
//
// Built for F of 1024 (experts, 8 to 5920 rows) and 4096 to 18944 (dense layers, 2048 rows). It must read 4F bytes of a
// row and write 2F (FP8: F + 4); arithmetic is 10 to 20 operations per element, two of them on the special-function
// unit: 5920x1024 takes 3.3 us there against 8.5 for the bytes, so bytes decide from a few hundred rows on, and below
// that the latency of one chain of load, exp, store.
//
// Split: plain, a thread per pack of 16 bytes of the result: two packs in, one out; blocks cover one row's packs in
// turn. FP8, a block per row: its packs stay in registers as activated floats, the block agrees on the largest
// magnitude, and the codes are written; rows past 16384 elements (float32: 8192), and any that are not aligned, are
// read and activated twice instead. Before the wait few rows are prefetched into L2, many are not touched.
//
// Predicted: 10 % above the limit up to some hundred rows, the limit beyond; README.md has what was measured.
#include <kestrel/launch.h>
#include <kestrel/tensor.h>
#include <tvm/ffi/function.h>
#include <kestrel/fp8.cuh>
#include <kestrel/pdl.cuh>
#include <kestrel/reduce.cuh>

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

// How rows are read. any: by elements, those past the end are zero. The others by packs: few rows are prefetched into
// L2 before the wait and read past L1, which is faster by 0.06 us at 128 rows; many are not, which is faster by 4 % at
// 2048 rows of 14336.
enum class Access { any, few, many };

// One pack of a half row from element `first` on.
template <Access ACCESS, typename T>
__device__ __forceinline__ Pack<T> load_half(const char* row, int first, int width) {
  Pack<T> pack;
  if constexpr (ACCESS == Access::few) {
    pack.bits = load16_streamed(row + static_cast<int64_t>(first) * sizeof(T));
  } else if constexpr (ACCESS == Access::many) {
    pack.bits = load16(row + static_cast<int64_t>(first) * sizeof(T));
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
template <Access ACCESS, typename T>
__device__ __forceinline__ void gated_pack(const GatedParams& p, const char* row, int first,
                                           float (&h)[Pack<T>::size]) {
  const Pack<T> left = load_half<ACCESS, T>(row, first, p.width);
  const Pack<T> right = load_half<ACCESS, T>(row + static_cast<int64_t>(p.width) * sizeof(T), first, p.width);
  float g[Pack<T>::size];
  left.unpack(h);
  right.unpack(g);
  gate<T>(h, g, p.activation, p.shift);
}

template <typename T, Access ACCESS>
__global__ void __launch_bounds__(256) gated_kernel(const __grid_constant__ GatedParams p) {
  constexpr int size = Pack<T>::size;
  const int row = blockIdx.x / p.chunks;
  const int first = ((blockIdx.x - row * p.chunks) * blockDim.x + threadIdx.x) * size;
  const char* x = p.x + row * p.x_stride;
  char* out = p.out + row * p.out_stride + static_cast<int64_t>(first) * sizeof(T);
  if (first >= p.width) return;
  if (ACCESS == Access::few && threadIdx.x % 8 == 0) {  // a line is 8 packs
    prefetch_l2(x + static_cast<int64_t>(first) * sizeof(T));
    prefetch_l2(x + (static_cast<int64_t>(p.width) + first) * sizeof(T));
  }
  pdl_wait();
  pdl_trigger();
  float h[size];
  gated_pack<ACCESS, T>(p, x, first, h);
  Pack<T> y;
  y.pack(h);
  if constexpr (ACCESS != Access::any) {
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
__device__ __forceinline__ void write_codes(const float (&h)[size], float scale, float inverse, char* codes, int first,
                                            int width) {
  float q[size];
#pragma unroll
  for (int i = 0; i < size; ++i) q[i] = fp8_quotient(h[i], scale, inverse);
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
      gated_pack<Access::few, T>(p, x, first, kept[v]);
      most = fmaxf(most, largest_of(kept[v], first, p.width));
    }
  } else {
    for (int64_t first = threadIdx.x * size; first < p.width; first += step) {
      gated_pack<Access::any, T>(p, x, static_cast<int>(first), kept[0]);
      most = fmaxf(most, largest_of(kept[0], static_cast<int>(first), p.width));
    }
  }
  most = block_max<kFp8Threads / 32>(most, memory);
  const float scale = fp8_scale(most), inverse = __frcp_rn(scale);
  if (threadIdx.x == 0) p.scale[row] = scale;
  if constexpr (vectors) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int first = v * step + threadIdx.x * size;
      if (first < p.width) write_codes<true>(kept[v], scale, inverse, codes, first, p.width);
    }
  } else {
    for (int64_t first = threadIdx.x * size; first < p.width; first += step) {
      gated_pack<Access::any, T>(p, x, static_cast<int>(first), kept[0]);
      write_codes<false>(kept[0], scale, inverse, codes, static_cast<int>(first), p.width);
    }
  }
}

// -- entry points -----------------------------------------------------------------------------------------------------

inline Activation activation_of(const Checks& check, bool silu, const std::string& approximate) {
  if (approximate != "none" && approximate != "tanh") {
    check.fail("approximate", "one of 'none', 'tanh'", "'" + approximate + "'");
  }
  if (silu) return Activation::silu;
  return approximate == "tanh" ? Activation::gelu_tanh : Activation::gelu;
}

constexpr int64_t kFewPacks = 256 * 1024;  // of the result

// x [T, 2F] and a result of T rows of F; false when there is nothing to do.
inline bool prepare(const Checks& check, const TensorView& x, const TensorView& out, GatedParams* p) {
  constexpr int64_t most = int64_t{1} << 30;
  const int64_t rows = x.size(0), width = x.size(1) / 2;
  if (rows == 0) return false;
  if (rows > most || width > most) unsupported("more than 2^30 rows or columns");
  p->x = address(x);
  p->out = address(out);
  p->x_stride = x.stride(0) * element_bytes(x);
  p->out_stride = out.stride(0) * element_bytes(out);
  p->rows = static_cast<int>(rows);
  p->width = static_cast<int>(width);
  return true;
}

inline void check_gated(const Checks& check, const TensorView& x) {
  check.dtype("x", x, {kBFloat16, kFloat16, kFloat32});
  check.last_contiguous("x", x);
  check.rank("x", x, 2, 2);
  if (x.size(1) % 2 || x.size(1) == 0) {
    check.fail("x", "an even last dimension [..., 2F]", "shape " + shape_text(x.shape().data(), x.ndim()));
  }
}

inline void check_rows(const Checks& check, const char* name, const TensorView& t, DLDataType dtype, int64_t rows,
                       int64_t columns) {
  const int64_t shape[2] = {rows, columns};
  check.dtype(name, t, {dtype});
  check.last_contiguous(name, t);
  check.shape(name, t, shape, 2);
  check.disjoint(name, t);
}

void gated(TensorView out, TensorView x, bool silu, std::string approximate, double shift) {
  const Checks check(silu ? "silu_and_mul" : shift != 0 ? "gelu_residual" : "gelu_and_mul");
  check_gated(check, x);
  GatedParams p;
  p.activation = activation_of(check, silu, approximate);
  p.shift = static_cast<float>(shift);
  check_rows(check, "out", out, x.dtype(), x.size(0), x.size(1) / 2);
  check_devices(check, "x", x, {{"out", out}});
  if (!prepare(check, x, out, &p)) return;
  const DeviceGuard guard(x.device().device_id);
  dispatch_float(x, [&](auto t) {
    using T = decltype(t);
    constexpr int size = Pack<T>::size;
    const int packs = (p.width + size - 1) / size;
    const int threads = std::min(256, (packs + 31) / 32 * 32);
    p.chunks = (packs + threads - 1) / threads;
    if (int64_t{p.rows} * p.chunks > (int64_t{1} << 31) - 1) unsupported("more than 2^31 blocks");
    const bool vectors =
        p.width % size == 0 && aligned16(p.x) && aligned16(p.out) && p.x_stride % 16 == 0 && p.out_stride % 16 == 0;
    const auto kernel = !vectors                               ? gated_kernel<T, Access::any>
                        : int64_t{p.rows} * packs <= kFewPacks ? gated_kernel<T, Access::few>
                                                               : gated_kernel<T, Access::many>;
    launch_pdl(kernel, dim3(p.rows * p.chunks), dim3(threads), x.device(), p);
  });
}

void gated_fp8(TensorView codes, TensorView scale, TensorView x, bool silu, std::string approximate, double shift) {
  const Checks check(silu ? "silu_and_mul_fp8" : shift != 0 ? "gelu_residual_fp8" : "gelu_and_mul_fp8");
  check_gated(check, x);
  GatedParams p;
  p.activation = activation_of(check, silu, approximate);
  p.shift = static_cast<float>(shift);
  check_rows(check, "q", codes, kFloat8E4M3, x.size(0), x.size(1) / 2);
  check_rows(check, "scale", scale, kFloat32, x.size(0), 1);
  check_devices(check, "x", x, {{"q", codes}, {"scale", scale}});
  if (!prepare(check, x, codes, &p)) return;
  p.scale = reinterpret_cast<float*>(address(scale));
  const DeviceGuard guard(x.device().device_id);
  dispatch_float(x, [&](auto t) {
    using T = decltype(t);
    constexpr int size = Pack<T>::size;
    const int packs = (p.width + size - 1) / size;
    const bool vectors = p.width % size == 0 && aligned16(p.x) && p.x_stride % 16 == 0 && aligned16(p.out) &&
                         p.out_stride % 8 == 0 && packs <= 4 * kFp8Threads;
    const int kept = !vectors ? 0 : packs <= 256 ? 1 : packs <= 2 * kFp8Threads ? 2 : 4;
    const int per_thread = std::max(1, kept);
    const int threads = std::min(kFp8Threads, ((packs + per_thread - 1) / per_thread + 31) / 32 * 32);
    void (*const kernels[])(GatedParams) = {gated_fp8_kernel<T, 0>, gated_fp8_kernel<T, 1>, gated_fp8_kernel<T, 2>,
                                            gated_fp8_kernel<T, 4>};
    launch_pdl(kernels[kept == 4 ? 3 : kept], dim3(p.rows), dim3(threads), x.device(), p);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gated, gated);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gated_fp8, gated_fp8);

}  // namespace kestrel::moe
