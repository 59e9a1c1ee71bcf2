// The gated activations: [T, 2F] -> [T, F], activation(h) * g or * (g + 1), and the same as FP8 with a scale per row.
//
// For F of 1024 (experts, 8 to 5920 rows) and 4096 to 18944 (dense layers, 2048 rows). Memory-bound from some hundred
// rows on, latency-bound below.
//
// Work: plain, one thread per pack of 16 bytes of the result. FP8, one CTA per row: activated packs stay in registers,
// the CTA reduces the largest magnitude, then writes the codes; rows that are too long or not aligned are read and
// activated twice. Few rows are prefetched into L2 before the PDL wait, many are not (enum Access).
#include <kestrel/export.h>
#include <kestrel/launch.h>
#include <kestrel/tensor.h>
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
  float gate_offset = 0.f;  // added to g
  int ctas_per_row = 0;
};

// How a kernel reads its rows.
//   elements: one by one, for rows that are not aligned; elements past the end are zero
//   prefetched: packs, prefetched into L2 before the PDL wait and loaded past L1: faster for few rows
//   direct: packs, plain loads: faster for many rows
enum class Access { elements, prefetched, direct };

// One pack of a half row from element `first` on.
template <Access ACCESS, typename T>
__device__ __forceinline__ Pack<T> load_half(const char* row, int first, int width) {
  Pack<T> pack;
  if constexpr (ACCESS == Access::prefetched) {
    pack.bits = load16_streamed(row + static_cast<int64_t>(first) * sizeof(T));
  } else if constexpr (ACCESS == Access::direct) {
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

// Activates one pack of a row.
template <Access ACCESS, typename T>
__device__ __forceinline__ void gated_pack(const GatedParams& p, const char* row, int first,
                                           float (&h)[Pack<T>::size]) {
  const Pack<T> left = load_half<ACCESS, T>(row, first, p.width);
  const Pack<T> right = load_half<ACCESS, T>(row + static_cast<int64_t>(p.width) * sizeof(T), first, p.width);
  float g[Pack<T>::size];
  left.unpack(h);
  right.unpack(g);
  gate<T>(h, g, p.activation, p.gate_offset);
}

constexpr int kGatedThreads = 256;

template <typename T, Access ACCESS>
__global__ void __launch_bounds__(kGatedThreads) gated_kernel(const __grid_constant__ GatedParams p) {
  constexpr int size = Pack<T>::size;
  const int row = blockIdx.x / p.ctas_per_row;
  const int first = ((blockIdx.x - row * p.ctas_per_row) * blockDim.x + threadIdx.x) * size;
  const char* x = p.x + row * p.x_stride;
  char* out = p.out + row * p.out_stride + static_cast<int64_t>(first) * sizeof(T);
  if (first >= p.width) return;
  if (ACCESS == Access::prefetched && threadIdx.x % 8 == 0) {  // one cache line is 8 packs
    prefetch_l2(x + static_cast<int64_t>(first) * sizeof(T));
    prefetch_l2(x + (static_cast<int64_t>(p.width) + first) * sizeof(T));
  }
  pdl_wait();
  pdl_trigger();
  float h[size];
  gated_pack<ACCESS, T>(p, x, first, h);
  Pack<T> y;
  y.pack(h);
  if constexpr (ACCESS != Access::elements) {
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
__device__ __forceinline__ float amax_of(const float (&h)[size], int first, int width) {
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < size; ++i) {
    if (first + i < width) amax = fmaxf(amax, finite_magnitude(h[i]));
  }
  return amax;
}

template <Access ACCESS, int size>
__device__ __forceinline__ void write_codes(const float (&h)[size], float scale, float inverse, char* codes, int first,
                                            int width) {
  float q[size];
#pragma unroll
  for (int i = 0; i < size; ++i) q[i] = fp8_quotient(h[i], scale, inverse);
  if constexpr (ACCESS != Access::elements) {
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

// PACKS packs per thread stay in registers; 0: any row, activated twice.
template <typename T, int PACKS>
__global__ void __launch_bounds__(kFp8Threads) gated_fp8_kernel(const __grid_constant__ GatedParams p) {
  constexpr int size = Pack<T>::size;
  constexpr bool kept = PACKS > 0;
  __shared__ float warp_maxima[kFp8Threads / 32];
  const int row = blockIdx.x, step = blockDim.x * size;
  const char* x = p.x + row * p.x_stride;
  char* codes = p.out + row * p.out_stride;
  if constexpr (kept) {
#pragma unroll
    for (int v = 0; v < PACKS; ++v) {
      const int first = v * step + threadIdx.x * size;
      if (threadIdx.x % 8 == 0 && first < p.width) {
        prefetch_l2(x + static_cast<int64_t>(first) * sizeof(T));
        prefetch_l2(x + (static_cast<int64_t>(p.width) + first) * sizeof(T));
      }
    }
  }
  pdl_wait();
  pdl_trigger();
  float h[kept ? PACKS : 1][size];
  float amax = 0.f;
  if constexpr (kept) {
#pragma unroll
    for (int v = 0; v < PACKS; ++v) {
      const int first = v * step + threadIdx.x * size;
      if (first >= p.width) continue;
      gated_pack<Access::prefetched, T>(p, x, first, h[v]);
      amax = fmaxf(amax, amax_of(h[v], first, p.width));
    }
  } else {
    for (int64_t first = threadIdx.x * size; first < p.width; first += step) {
      gated_pack<Access::elements, T>(p, x, static_cast<int>(first), h[0]);
      amax = fmaxf(amax, amax_of(h[0], static_cast<int>(first), p.width));
    }
  }
  amax = block_max<kFp8Threads / 32>(amax, warp_maxima);
  const float scale = fp8_scale(amax), inverse = __frcp_rn(scale);
  if (threadIdx.x == 0) p.scale[row] = scale;
  if constexpr (kept) {
#pragma unroll
    for (int v = 0; v < PACKS; ++v) {
      const int first = v * step + threadIdx.x * size;
      if (first < p.width) write_codes<Access::prefetched>(h[v], scale, inverse, codes, first, p.width);
    }
  } else {
    for (int64_t first = threadIdx.x * size; first < p.width; first += step) {
      gated_pack<Access::elements, T>(p, x, static_cast<int>(first), h[0]);
      write_codes<Access::elements>(h[0], scale, inverse, codes, static_cast<int>(first), p.width);
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

constexpr int64_t kFewPacks = 256 * 1024;  // results of at most this many packs use Access::prefetched

// Fills in the parameters of x [T, 2F] and a result [T, F]; false when there is nothing to do.
inline bool prepare(const TensorView& x, const TensorView& out, GatedParams* p) {
  constexpr int64_t max_size = int64_t{1} << 30;
  const int64_t rows = x.size(0), width = x.size(1) / 2;
  if (rows == 0) return false;
  if (rows > max_size || width > max_size) unsupported("more than 2^30 rows or columns");
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

// out may be one half of x: a thread reads both halves before it writes. Other overlaps are refused.
inline void check_halves(const Checks& check, const TensorView& out, const TensorView& x) {
  const int64_t half = address(out) - address(x), row_bytes = out.size(1) * element_bytes(x);
  const bool is_half = (half == 0 || half == row_bytes) && (out.size(0) < 2 || out.stride(0) == x.stride(0));
  if (!is_half) check.no_overlap("out", out, "x", x);
}

void gated(TensorView out, TensorView x, bool silu, std::string approximate, double shift) {
  const Checks check(silu ? "silu_and_mul" : shift != 0 ? "gelu_residual" : "gelu_and_mul");
  check_gated(check, x);
  GatedParams p;
  p.activation = activation_of(check, silu, approximate);
  p.gate_offset = static_cast<float>(shift);
  check_rows(check, "out", out, x.dtype(), x.size(0), x.size(1) / 2);
  check_halves(check, out, x);
  check_devices(check, "x", x, {{"out", out}});
  if (!prepare(x, out, &p)) return;
  const DeviceGuard guard(x.device().device_id);
  dispatch_float(x, [&](auto t) {
    using T = decltype(t);
    constexpr int size = Pack<T>::size;
    const int packs = (p.width + size - 1) / size;
    const int threads = std::min(kGatedThreads, (packs + 31) / 32 * 32);
    p.ctas_per_row = (packs + threads - 1) / threads;
    if (int64_t{p.rows} * p.ctas_per_row > (int64_t{1} << 31) - 1) unsupported("more than 2^31 CTAs");
    const bool aligned =
        p.width % size == 0 && aligned16(p.x) && aligned16(p.out) && p.x_stride % 16 == 0 && p.out_stride % 16 == 0;
    const auto kernel = !aligned                               ? gated_kernel<T, Access::elements>
                        : int64_t{p.rows} * packs <= kFewPacks ? gated_kernel<T, Access::prefetched>
                                                               : gated_kernel<T, Access::direct>;
    launch_pdl(kernel, dim3(p.rows * p.ctas_per_row), dim3(threads), x.device(), p);
  });
}

void gated_fp8(TensorView codes, TensorView scale, TensorView x, bool silu, std::string approximate, double shift) {
  const Checks check(silu ? "silu_and_mul_fp8" : shift != 0 ? "gelu_residual_fp8" : "gelu_and_mul_fp8");
  check_gated(check, x);
  GatedParams p;
  p.activation = activation_of(check, silu, approximate);
  p.gate_offset = static_cast<float>(shift);
  check_rows(check, "q", codes, kFloat8E4M3, x.size(0), x.size(1) / 2);
  check_rows(check, "scale", scale, kFloat32, x.size(0), 1);
  check_devices(check, "x", x, {{"q", codes}, {"scale", scale}});
  if (!prepare(x, codes, &p)) return;
  p.scale = reinterpret_cast<float*>(address(scale));
  const DeviceGuard guard(x.device().device_id);
  dispatch_float(x, [&](auto t) {
    using T = decltype(t);
    constexpr int size = Pack<T>::size;
    const int packs = (p.width + size - 1) / size;
    const bool aligned =
        p.width % size == 0 && aligned16(p.x) && p.x_stride % 16 == 0 && aligned16(p.out) && p.out_stride % 8 == 0;
    struct Choice {
      bool applies;
      void (*kernel)(GatedParams);
      int packs_per_thread;
    };
    const Choice table[] = {
        {!aligned || packs > 4 * kFp8Threads, gated_fp8_kernel<T, 0>, 1},
        {packs <= 256, gated_fp8_kernel<T, 1>, 1},
        {packs <= 2 * kFp8Threads, gated_fp8_kernel<T, 2>, 2},
        {true, gated_fp8_kernel<T, 4>, 4},
    };
    const Choice& choice = *std::find_if(std::begin(table), std::end(table), [](const Choice& c) { return c.applies; });
    const int threads =
        std::min(kFp8Threads, ((packs + choice.packs_per_thread - 1) / choice.packs_per_thread + 31) / 32 * 32);
    launch_pdl(choice.kernel, dim3(p.rows), dim3(threads), x.device(), p);
  });
}

KESTREL_EXPORT(gated, gated);
KESTREL_EXPORT(gated_fp8, gated_fp8);

}  // namespace kestrel::moe
