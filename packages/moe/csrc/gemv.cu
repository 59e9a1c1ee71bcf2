// gemv: a linear layer for one to four tokens, x [T, K] times weight [N, K], transposed, plus a bias.
//
// Built for one token and weights of 4096x4096 and 4096x14336. It must read the weight once: 33.5 MB, 7.8 us at 4.3
// TB/s, and 117 MB, 27.3 us; 2TNK operations, 34 million for one token, 2 us on the float32 units with their
// conversions. So the weight's bytes decide: whole lines, and enough of them under way.
//
// Split: a block has four rows of the weight, its threads the packs of 8 along K in turn, two of each row under way; a
// pack of x serves four rows. Products are added in float32 by each thread, in the order of k, then over the lanes,
// then over the warps. The order depends on K and N alone: a token's result is the same for every T.
//
// Before the wait the first packs of weight, which is constant, are asked for: half of 4096 columns, or all.
//
// Predicted 9 us for 4096x4096; measured 9.4 with blocks of 256 threads and 9.0 with 128, in turn
// (results/h200_designs.json). On record: 9.6, and 28.6 for 4096x14336 (results/h200.json).
#include <tvm/ffi/function.h>
#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>
#include <kestrel/reduce.cuh>

#include <algorithm>

#include "linear.h"

namespace kestrel::moe {

constexpr int kRows = 4;       // of a block
constexpr int kAhead = 2;      // packs under way, of each row
constexpr int kTokens = 4;     // at most
constexpr int kThreads = 256;  // at most; half of them where there are blocks enough
constexpr int kManyOutputs = 2048;

template <typename T, int TOKENS>
__global__ void __launch_bounds__(kThreads, TOKENS == 1 ? 4 : 2) gemv_kernel(const __grid_constant__ LinearParams p) {
  constexpr int size = Pack<T>::size;
  __shared__ float parts[kThreads / 32][kRows][TOKENS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, step = blockDim.x * size;
  const int first_row = blockIdx.x * kRows, first = threadIdx.x * size;

  const char* rows[kRows];  // the last may be there several times
  Pack<T> weight[kRows][kAhead];
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows[r] = p.weight + min(first_row + r, p.outputs - 1) * p.weight_stride;
  const auto ask = [&](int i, int k) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      weight[r][i].bits = make_uint4(0, 0, 0, 0);
      if (k < p.width) weight[r][i].bits = load16_streamed(rows[r] + int64_t{k} * sizeof(T));
    }
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) ask(i, first + i * step);
  const int r = threadIdx.x / TOKENS, t = threadIdx.x % TOKENS, row = first_row + r;  // this thread's result
  const bool has_result = r < kRows && t < p.tokens && row < p.outputs;
  if (has_result && p.bias) prefetch_l2(p.bias + int64_t{row} * sizeof(T));
  pdl_wait();
  pdl_trigger();

  float sum[kRows][TOKENS] = {};
  for (int k0 = first; k0 < p.width; k0 += kAhead * step) {
    Pack<T> x[TOKENS][kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
        const int k = k0 + i * step;
        x[t][i].bits = make_uint4(0, 0, 0, 0);
        if (k < p.width) x[t][i].bits = load16(p.x + min(t, p.tokens - 1) * p.x_stride + int64_t{k} * sizeof(T));
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      float w[kRows][size];
#pragma unroll
      for (int r = 0; r < kRows; ++r) weight[r][i].unpack(w[r]);
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
        float v[size];
        x[t][i].unpack(v);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int j = 0; j < size; ++j) sum[r][t] = fmaf(w[r][j], v[j], sum[r][t]);
        }
      }
      ask(i, k0 + (kAhead + i) * step);
    }
  }

#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < TOKENS; ++j) {
      const float total = warp_sum(sum[i][j]);
      if (lane == 0) parts[warp][i][j] = total;
    }
  }
  __syncthreads();
  if (has_result) {
    float total = parts[0][r][t];
    for (int w = 1; w < blockDim.x / 32; ++w) total += parts[w][r][t];
    if (p.bias) total += to_float(reinterpret_cast<const T*>(p.bias)[row]);
    reinterpret_cast<T*>(p.out + t * p.out_stride)[row] = from_float<T>(total);
  }
}

template <typename T>
void launch_gemv(const LinearParams& p, DLDevice device) {
  const int packs = (p.width + Pack<T>::size - 1) / Pack<T>::size;
  const int most = p.outputs < kManyOutputs ? kThreads : kThreads / 2;
  const int threads = std::clamp((packs / kAhead + 31) / 32 * 32, 32, most);
  launch_pdl(p.tokens == 1 ? gemv_kernel<T, 1> : gemv_kernel<T, kTokens>, dim3((p.outputs + kRows - 1) / kRows),
             dim3(threads), device, p);
}

void gemv(TensorView out, TensorView x, TensorView weight, OptionalTensor bias) {
  LinearParams p;
  if (!prepare_linear(Checks("gemv"), out, x.dtype(), x, weight, bias, &p)) return;
  if (p.tokens > kTokens) unsupported("more than 4 tokens");
  const DeviceGuard guard(x.device().device_id);
  if (same_dtype(x.dtype(), kBFloat16)) {
    launch_gemv<__nv_bfloat16>(p, x.device());
  } else {
    launch_gemv<__half>(p, x.device());
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemv, gemv);

}  // namespace kestrel::moe
