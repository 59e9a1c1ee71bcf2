// The kernel of gemv, of router_gemm in float32 and of dense layers for few tokens: x [T, K] times weight [N, K]
// transposed, plus a bias, an activation and a residual.
//
// Work: a CTA has four rows of the weight; its threads stride over K in packs of 16 bytes, two packs of each row in
// flight, the first before the PDL wait (the weight is constant). Each thread adds in float32 in the order of k, then
// lanes, then warps: the order depends on K and N alone, so a token's result is the same for every T.
#pragma once

#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>
#include <kestrel/reduce.cuh>

#include <algorithm>

#include "activation.cuh"
#include "linear.h"

namespace kestrel::moe {

constexpr int kGemvRows = 4;
constexpr int kGemvPacksInFlight = 2;  // of each row
constexpr int kGemvTokens = 4;         // of a CTA
constexpr int kGemvThreads = 256;      // halved from kManyOutputs rows on, which give enough CTAs
constexpr int kManyOutputs = 2048;

// CTAs per SM that the registers must allow: as many as fit without a spill on every architecture.
template <typename T, int TOKENS>
constexpr int kGemvCtasPerSm = TOKENS > 1       ? 2
                               : sizeof(T) == 4 ? 3
                                                : 4;

template <typename T, int TOKENS>
__global__ void __launch_bounds__(kGemvThreads, kGemvCtasPerSm<T, TOKENS>)
    gemv_kernel(const __grid_constant__ LinearParams p) {
  constexpr int size = Pack<T>::size;
  __shared__ float warp_sums[kGemvThreads / 32][kGemvRows][TOKENS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, step = blockDim.x * size;
  const int first_row = blockIdx.x * kGemvRows, first = threadIdx.x * size;
  const int first_token = sizeof(T) == 4 ? blockIdx.y * TOKENS : 0;  // 16-bit calls have one tile of tokens

  const char* rows[kGemvRows];  // past the end: the last row
  Pack<T> weight[kGemvRows][kGemvPacksInFlight];
#pragma unroll
  for (int r = 0; r < kGemvRows; ++r) rows[r] = p.weight + min(first_row + r, p.outputs - 1) * p.weight_stride;
  const auto load_weight = [&](int i, int k) {
#pragma unroll
    for (int r = 0; r < kGemvRows; ++r) {
      weight[r][i].bits = make_uint4(0, 0, 0, 0);
      if (k < p.width) weight[r][i].bits = load16_streamed(rows[r] + int64_t{k} * sizeof(T));
    }
  };
#pragma unroll
  for (int i = 0; i < kGemvPacksInFlight; ++i) load_weight(i, first + i * step);
  const int r = threadIdx.x / TOKENS, t = threadIdx.x % TOKENS, row = first_row + r;  // the result of this thread
  const bool has_result = r < kGemvRows && first_token + t < p.tokens && row < p.outputs;
  if (has_result && p.bias) prefetch_l2(p.bias + int64_t{row} * sizeof(T));
  pdl_wait();
  pdl_trigger();

  float sum[kGemvRows][TOKENS] = {};
  for (int k0 = first; k0 < p.width; k0 += kGemvPacksInFlight * step) {
    Pack<T> x[TOKENS][kGemvPacksInFlight];
#pragma unroll
    for (int i = 0; i < kGemvPacksInFlight; ++i) {
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
        const int k = k0 + i * step;
        x[t][i].bits = make_uint4(0, 0, 0, 0);
        if (k < p.width)
          x[t][i].bits = load16(p.x + min(first_token + t, p.tokens - 1) * p.x_stride + int64_t{k} * sizeof(T));
      }
    }
#pragma unroll
    for (int i = 0; i < kGemvPacksInFlight; ++i) {
      float w[kGemvRows][size];
#pragma unroll
      for (int r = 0; r < kGemvRows; ++r) weight[r][i].unpack(w[r]);
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
        float v[size];
        x[t][i].unpack(v);
#pragma unroll
        for (int r = 0; r < kGemvRows; ++r) {
#pragma unroll
          for (int j = 0; j < size; ++j) sum[r][t] = fmaf(w[r][j], v[j], sum[r][t]);
        }
      }
      load_weight(i, k0 + (kGemvPacksInFlight + i) * step);
    }
  }

#pragma unroll
  for (int i = 0; i < kGemvRows; ++i) {
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
    total = activate<T>(total, p.activation);
    if (p.residual) {
      total += to_float(reinterpret_cast<const T*>(p.residual + (first_token + t) * p.residual_stride)[row]);
    }
    reinterpret_cast<T*>(p.out + (first_token + t) * p.out_stride)[row] = from_float<T>(total);
  }
}

// Launches the kernel; 16-bit calls have up to kGemvTokens tokens.
template <typename T>
void launch_gemv(const LinearParams& p, DLDevice device) {
  const int packs = (p.width + Pack<T>::size - 1) / Pack<T>::size;
  const int max_threads = p.outputs < kManyOutputs ? kGemvThreads : kGemvThreads / 2;
  const int threads = std::clamp((packs / kGemvPacksInFlight + 31) / 32 * 32, 32, max_threads);
  const auto kernel = p.tokens == 1 ? gemv_kernel<T, 1> : gemv_kernel<T, kGemvTokens>;
  const int row_tiles = (p.outputs + kGemvRows - 1) / kGemvRows,
            token_tiles = (p.tokens + kGemvTokens - 1) / kGemvTokens;
  launch_pdl(kernel, dim3(row_tiles, token_tiles), dim3(threads), device, p);
}

}  // namespace kestrel::moe
