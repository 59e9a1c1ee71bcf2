// gemv: a linear layer for one to four tokens, x [T, K] times weight [N, K] transposed, plus a bias.
//
// For weights of 4096x4096 and larger. Memory-bound by one read of the weight: whole cache lines, and enough of them in
// flight.
//
// Work: a CTA has four rows of the weight; its threads stride over K in packs of 8, two packs of each row in flight,
// the first before the PDL wait (the weight is constant). Each thread adds in float32 in the order of k, then lanes,
// then warps: the order depends on K and N alone, so a token's result is the same for every T.
#include <tvm/ffi/function.h>
#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>
#include <kestrel/reduce.cuh>

#include <algorithm>

#include "linear.h"

namespace kestrel::moe {

constexpr int kRowsPerCta = 4;
constexpr int kPacksInFlight = 2;  // of each row
constexpr int kMaxTokens = 4;
constexpr int kMaxThreads = 256;  // half of them from kManyOutputs rows on, where there are CTAs enough
constexpr int kManyOutputs = 2048;

template <typename T, int TOKENS>
__global__ void __launch_bounds__(kMaxThreads, TOKENS == 1 ? 4 : 2)
    gemv_kernel(const __grid_constant__ LinearParams p) {
  constexpr int size = Pack<T>::size;
  __shared__ float warp_sums[kMaxThreads / 32][kRowsPerCta][TOKENS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, step = blockDim.x * size;
  const int first_row = blockIdx.x * kRowsPerCta, first = threadIdx.x * size;

  const char* rows[kRowsPerCta];  // past the end: the last row
  Pack<T> weight[kRowsPerCta][kPacksInFlight];
#pragma unroll
  for (int r = 0; r < kRowsPerCta; ++r) rows[r] = p.weight + min(first_row + r, p.outputs - 1) * p.weight_stride;
  const auto load_weight = [&](int i, int k) {
#pragma unroll
    for (int r = 0; r < kRowsPerCta; ++r) {
      weight[r][i].bits = make_uint4(0, 0, 0, 0);
      if (k < p.width) weight[r][i].bits = load16_streamed(rows[r] + int64_t{k} * sizeof(T));
    }
  };
#pragma unroll
  for (int i = 0; i < kPacksInFlight; ++i) load_weight(i, first + i * step);
  const int r = threadIdx.x / TOKENS, t = threadIdx.x % TOKENS, row = first_row + r;  // the result of this thread
  const bool has_result = r < kRowsPerCta && t < p.tokens && row < p.outputs;
  if (has_result && p.bias) prefetch_l2(p.bias + int64_t{row} * sizeof(T));
  pdl_wait();
  pdl_trigger();

  float sum[kRowsPerCta][TOKENS] = {};
  for (int k0 = first; k0 < p.width; k0 += kPacksInFlight * step) {
    Pack<T> x[TOKENS][kPacksInFlight];
#pragma unroll
    for (int i = 0; i < kPacksInFlight; ++i) {
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
        const int k = k0 + i * step;
        x[t][i].bits = make_uint4(0, 0, 0, 0);
        if (k < p.width) x[t][i].bits = load16(p.x + min(t, p.tokens - 1) * p.x_stride + int64_t{k} * sizeof(T));
      }
    }
#pragma unroll
    for (int i = 0; i < kPacksInFlight; ++i) {
      float w[kRowsPerCta][size];
#pragma unroll
      for (int r = 0; r < kRowsPerCta; ++r) weight[r][i].unpack(w[r]);
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
        float v[size];
        x[t][i].unpack(v);
#pragma unroll
        for (int r = 0; r < kRowsPerCta; ++r) {
#pragma unroll
          for (int j = 0; j < size; ++j) sum[r][t] = fmaf(w[r][j], v[j], sum[r][t]);
        }
      }
      load_weight(i, k0 + (kPacksInFlight + i) * step);
    }
  }

#pragma unroll
  for (int i = 0; i < kRowsPerCta; ++i) {
#pragma unroll
    for (int j = 0; j < TOKENS; ++j) {
      const float total = warp_sum(sum[i][j]);
      if (lane == 0) warp_sums[warp][i][j] = total;
    }
  }
  __syncthreads();
  if (has_result) {
    float total = warp_sums[0][r][t];
    for (int w = 1; w < blockDim.x / 32; ++w) total += warp_sums[w][r][t];
    if (p.bias) total += to_float(reinterpret_cast<const T*>(p.bias)[row]);
    reinterpret_cast<T*>(p.out + t * p.out_stride)[row] = from_float<T>(total);
  }
}

template <typename T>
void launch_gemv(const LinearParams& p, DLDevice device) {
  const int packs = (p.width + Pack<T>::size - 1) / Pack<T>::size;
  const int max_threads = p.outputs < kManyOutputs ? kMaxThreads : kMaxThreads / 2;
  const int threads = std::clamp((packs / kPacksInFlight + 31) / 32 * 32, 32, max_threads);
  const auto kernel = p.tokens == 1 ? gemv_kernel<T, 1> : gemv_kernel<T, kMaxTokens>;
  launch_pdl(kernel, dim3((p.outputs + kRowsPerCta - 1) / kRowsPerCta), dim3(threads), device, p);
}

void gemv(TensorView out, TensorView x, TensorView weight, OptionalTensor bias) {
  LinearParams p;
  if (!prepare_linear(Checks("gemv"), out, x.dtype(), x, weight, bias, &p)) return;
  if (p.tokens > kMaxTokens) unsupported("more than 4 tokens");
  const DeviceGuard guard(x.device().device_id);
  if (same_dtype(x.dtype(), kBFloat16)) {
    launch_gemv<__nv_bfloat16>(p, x.device());
  } else {
    launch_gemv<__half>(p, x.device());
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemv, gemv);

}  // namespace kestrel::moe
