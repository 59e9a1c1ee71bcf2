// moe_sum: adds the K results of each token, in order of k: [T, K, N] -> [T, N].
//
// For 1 to 1024 tokens of 8 results of 2048. Memory-bound from some hundred tokens on, latency-bound below.
//
// Work: one thread per pack of 16 bytes of the result. It loads up to eight of its K packs before it adds the first;
// the order of additions is that of k, so a row does not depend on the batch. K = 8 is compiled separately. Nothing is
// prefetched before the PDL wait: that would load each line twice.
#include <kestrel/export.h>
#include <kestrel/launch.h>
#include <kestrel/tensor.h>
#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>

#include <algorithm>

namespace kestrel::moe {

struct MoeSumParams {
  const char* x = nullptr;
  char* out = nullptr;
  int64_t token_stride = 0, k_stride = 0, out_stride = 0;  // in bytes
  int top_k = 0;
  int width = 0;
  int ctas_per_token = 0;
};

constexpr int kMaxThreads = 256;
constexpr int kFewThreads = 64;  // spreads few packs over more SMs
constexpr int64_t kFewPacks = 64 * 1024;
constexpr int kLoadsInFlight = 8;

enum class SumAccess { packs, elements };

// TOP_K: K, or 0 where it is not known at compile time.
template <typename T, SumAccess ACCESS, int TOP_K>
__global__ void __launch_bounds__(kMaxThreads, 1) moe_sum_kernel(const __grid_constant__ MoeSumParams p) {
  constexpr int size = ACCESS == SumAccess::packs ? Pack<T>::size : 1;
  const int token = blockIdx.x / p.ctas_per_token;
  const int first = ((blockIdx.x - token * p.ctas_per_token) * blockDim.x + threadIdx.x) * size;
  if (first >= p.width) return;
  const char* x = p.x + token * p.token_stride + static_cast<int64_t>(first) * sizeof(T);
  char* out = p.out + token * p.out_stride + static_cast<int64_t>(first) * sizeof(T);
  pdl_wait();
  pdl_trigger();
  float sum[size];
#pragma unroll
  for (int i = 0; i < size; ++i) sum[i] = 0.f;
  if constexpr (ACCESS == SumAccess::packs) {
    const int top_k = TOP_K ? TOP_K : p.top_k;
#pragma unroll(TOP_K ? (TOP_K + kLoadsInFlight - 1) / kLoadsInFlight : 1)
    for (int k0 = 0; k0 < top_k; k0 += kLoadsInFlight) {
      Pack<T> packs[kLoadsInFlight];
#pragma unroll
      for (int k = 0; k < kLoadsInFlight; ++k) {
        if (k0 + k < top_k) packs[k].bits = load16_streamed(x);
        x += p.k_stride;
        pin(x);  // one address in registers, not eight
      }
      __syncwarp();  // keeps ptxas from moving loads below additions to save registers
#pragma unroll
      for (int k = 0; k < kLoadsInFlight; ++k) {
        if (k0 + k < top_k) {
          float f[size];
          packs[k].unpack(f);
#pragma unroll
          for (int i = 0; i < size; ++i) sum[i] += f[i];
        }
      }
    }
    Pack<T> y;
    y.pack(sum);
    store16(out, y.bits);
  } else {
    for (int k = 0; k < p.top_k; ++k) sum[0] += to_float(*reinterpret_cast<const T*>(x + k * p.k_stride));
    *reinterpret_cast<T*>(out) = from_float<T>(sum[0]);
  }
}

void moe_sum(TensorView out, TensorView x) {
  const Checks check("moe_sum");
  check.dtype("x", x, {kBFloat16, kFloat16, kFloat32});
  check.rank("x", x, 3, 3);
  check.last_contiguous("x", x);
  const int64_t tokens = x.size(0), width = x.size(2), shape[2] = {tokens, width};
  check.dtype("out", out, {x.dtype()});
  check.last_contiguous("out", out);
  check.shape("out", out, shape, 2);
  check.disjoint("out", out);
  check.no_overlap("out", out, "x", x);
  check_devices(check, "x", x, {{"out", out}});
  if (tokens == 0 || width == 0) return;
  constexpr int64_t max_size = int64_t{1} << 30;
  if (tokens > max_size || width > max_size || x.size(1) > max_size) unsupported("a dimension of more than 2^30");

  MoeSumParams p;
  p.x = address(x);
  p.out = address(out);
  p.token_stride = x.stride(0) * element_bytes(x);
  p.k_stride = x.stride(1) * element_bytes(x);
  p.out_stride = out.stride(0) * element_bytes(x);
  p.top_k = static_cast<int>(x.size(1));
  p.width = static_cast<int>(width);
  const DeviceGuard guard(x.device().device_id);
  dispatch_float(x, [&](auto t) {
    using T = decltype(t);
    const bool aligned = width % Pack<T>::size == 0 && aligned16(p.x) && aligned16(p.out) && p.token_stride % 16 == 0 &&
                         p.k_stride % 16 == 0 && p.out_stride % 16 == 0;
    const int packs = p.width / (aligned ? Pack<T>::size : 1);
    const int max_threads = tokens * packs < kFewPacks ? kFewThreads : kMaxThreads;
    const int threads = std::min(max_threads, (packs + 31) / 32 * 32);
    p.ctas_per_token = (packs + threads - 1) / threads;
    if (tokens * p.ctas_per_token > (int64_t{1} << 31) - 1) unsupported("more than 2^31 CTAs");
    const auto kernel = !aligned       ? moe_sum_kernel<T, SumAccess::elements, 0>
                        : p.top_k == 8 ? moe_sum_kernel<T, SumAccess::packs, 8>
                                       : moe_sum_kernel<T, SumAccess::packs, 0>;
    launch_pdl(kernel, dim3(static_cast<unsigned>(tokens * p.ctas_per_token)), dim3(threads), x.device(), p);
  });
}

KESTREL_EXPORT(moe_sum, moe_sum);

}  // namespace kestrel::moe
