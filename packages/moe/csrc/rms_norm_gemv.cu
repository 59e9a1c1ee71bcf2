// rms_norm_gemv: RMSNorm of one token x [K], then a linear layer with weight [N, K], a bias, and a gated activation.
//
// For the decode step of one sequence: memory-bound by one read of the weight. Work is split as in gemv.cuh; a gated
// layer's CTA has two rows of each half. The norm's factor multiplies the sums: each thread adds up the squares of what
// it reads of x beside its products. The sums depend on K and N alone.
#include <kestrel/export.h>
#include <kestrel/launch.h>
#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>
#include <kestrel/reduce.cuh>

#include <algorithm>

#include "activation.cuh"
#include "linear.h"

namespace kestrel::moe {

constexpr int kNormGemvRows = 4;
constexpr int kNormGemvPacks = 2;  // in flight, of each row
constexpr int kNormGemvThreads = 256;
constexpr int kNormGemvManyRows = 2048;  // from here on half of the threads: there are enough CTAs

struct NormGemvParams {
  LinearParams linear;  // outputs: rows of the weight
  const char* norm_weight = nullptr;
  float eps = 0.f, weight_bias = 0.f;
  Activation activation = Activation::silu;
};

template <typename T, bool GATED>
__global__ void __launch_bounds__(kNormGemvThreads, sizeof(T) == 4 ? 2 : 3)
    rms_norm_gemv_kernel(const __grid_constant__ NormGemvParams p) {
  constexpr int size = Pack<T>::size, R = kNormGemvRows, P = kNormGemvPacks, max_warps = kNormGemvThreads / 32;
  __shared__ float warp_sums[max_warps][R + 1];
  const LinearParams& l = p.linear;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, step = blockDim.x * size, first = threadIdx.x * size;
  constexpr int results = GATED ? R / 2 : R;  // of a CTA
  const int width = GATED ? l.outputs / 2 : l.outputs, first_result = blockIdx.x * results;

  const char* rows[R];  // past the end: the last row
  Pack<T> weight[R][P], norm[P];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int row = min(first_result + r % results, width - 1) + r / results * width;
    rows[r] = l.weight + row * l.weight_stride;
  }
  const auto load_weights = [&](int i, int k) {
    norm[i].bits = make_uint4(0, 0, 0, 0);
    if (k < l.width) norm[i].bits = load16_constant(p.norm_weight + int64_t{k} * sizeof(T));
#pragma unroll
    for (int r = 0; r < R; ++r) {
      weight[r][i].bits = make_uint4(0, 0, 0, 0);
      if (k < l.width) weight[r][i].bits = load16_streamed(rows[r] + int64_t{k} * sizeof(T));
    }
  };
#pragma unroll
  for (int i = 0; i < P; ++i) load_weights(i, first + i * step);
  const int result = first_result + threadIdx.x;  // of this thread
  const bool has_result = threadIdx.x < results && result < width;
  if (has_result && l.bias) {
    prefetch_l2(l.bias + int64_t{result} * sizeof(T));
    if (GATED) prefetch_l2(l.bias + int64_t{result + width} * sizeof(T));
  }
  pdl_wait();
  pdl_trigger();

  float sum[R] = {}, squares = 0.f;
  for (int k0 = first; k0 < l.width; k0 += P * step) {
    Pack<T> x[P];
#pragma unroll
    for (int i = 0; i < P; ++i) {
      const int k = k0 + i * step;
      x[i].bits = make_uint4(0, 0, 0, 0);
      if (k < l.width) x[i].bits = load16(l.x + int64_t{k} * sizeof(T));
    }
#pragma unroll
    for (int i = 0; i < P; ++i) {
      float v[size], n[size];
      x[i].unpack(v);
      norm[i].unpack(n);
#pragma unroll
      for (int j = 0; j < size; ++j) {
        squares = fmaf(v[j], v[j], squares);
        v[j] *= n[j] + p.weight_bias;
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
        float w[size];
        weight[r][i].unpack(w);
#pragma unroll
        for (int j = 0; j < size; ++j) sum[r] = fmaf(w[j], v[j], sum[r]);
      }
      load_weights(i, k0 + (P + i) * step);
    }
  }

#pragma unroll
  for (int r = 0; r <= R; ++r) {
    const float total = warp_sum(r < R ? sum[r < R ? r : 0] : squares);
    if (lane == 0) warp_sums[warp][r] = total;
  }
  __syncthreads();
  if (!has_result) return;
  const auto total_of = [&](int r) {
    float total = warp_sums[0][r];
    for (int w = 1; w < blockDim.x / 32; ++w) total += warp_sums[w][r];
    return total;
  };
  const float factor = rsqrtf(total_of(R) / static_cast<float>(l.width) + p.eps);
  const auto output = [&](int r, int row) {
    const float product = total_of(r) * factor;
    return l.bias ? product + to_float(reinterpret_cast<const T*>(l.bias)[row]) : product;
  };
  float value = output(threadIdx.x, result);
  if constexpr (GATED) {
    const float up = output(threadIdx.x + results, result + width);
    if (p.activation == Activation::silu) {
      value = activate<Activation::silu, T>(value) * up;
    } else if (p.activation == Activation::gelu) {
      value = activate<Activation::gelu, T>(value) * up;
    } else {
      value = activate<Activation::gelu_tanh, T>(value) * up;
    }
  }
  reinterpret_cast<T*>(l.out)[result] = from_float<T>(value);
}

template <typename T>
void launch_norm_gemv(const NormGemvParams& p, bool gated, DLDevice device) {
  const int packs = (p.linear.width + Pack<T>::size - 1) / Pack<T>::size;
  const int most = p.linear.outputs < kNormGemvManyRows ? kNormGemvThreads : kNormGemvThreads / 2;
  const int threads = std::clamp((packs / kNormGemvPacks + 31) / 32 * 32, 32, most);
  const int results = gated ? p.linear.outputs / 2 : p.linear.outputs;
  const int of_cta = gated ? kNormGemvRows / 2 : kNormGemvRows;
  const auto kernel = gated ? rms_norm_gemv_kernel<T, true> : rms_norm_gemv_kernel<T, false>;
  launch_pdl(kernel, dim3((results + of_cta - 1) / of_cta), dim3(threads), device, p);
}

void rms_norm_gemv(TensorView out, TensorView x, TensorView norm_weight, TensorView weight, OptionalTensor bias,
                   double eps, double weight_bias, AnyView activation) {
  const Checks check("rms_norm_gemv");
  check_rows(check, x);
  check.dtype("norm_weight", norm_weight, {kBFloat16, kFloat16, kFloat32});
  check.last_contiguous("norm_weight", norm_weight);
  const int64_t width = x.size(1);
  check.shape("norm_weight", norm_weight, &width, 1);
  check.same_dtype("norm_weight", norm_weight, "x", x);
  check_operands(check, x, "weight", weight, "bias", bias, width);
  check.at_least("eps", eps, 0);
  check.number("weight_bias", weight_bias);
  const std::string name = check.choice("activation", activation, {"none", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"});
  const bool gated = name != "none";
  if (gated && weight.size(0) % 2) check.fail("weight", "an even number of rows", std::to_string(weight.size(0)));
  check_result(check, "out", out, x.dtype(), x.size(0), gated ? weight.size(0) / 2 : weight.size(0));
  check_overlaps(check, {{"x", x}, {"norm_weight", norm_weight}, {"weight", weight}, {"bias", bias}, {"out", out, true}});
  check_devices(check, "x", x, {{"norm_weight", norm_weight}, {"weight", weight}, {"bias", bias}, {"out", out}});
  if (x.size(0) == 0 || weight.size(0) == 0) return;
  if (x.size(0) > 1) unsupported("more than one token");
  NormGemvParams p;
  p.linear = linear_params(out, x, weight, bias, OptionalTensor());
  p.norm_weight = address(norm_weight);
  if (!aligned16(p.norm_weight)) unsupported("a norm's weight that is not aligned to 16 bytes");
  p.eps = static_cast<float>(eps);
  p.weight_bias = static_cast<float>(weight_bias);
  p.activation = name == "gelu_and_mul"        ? Activation::gelu
                 : name == "gelu_tanh_and_mul" ? Activation::gelu_tanh
                                               : Activation::silu;
  const DeviceGuard guard(x.device().device_id);
  dispatch_float(x, [&](auto value) { launch_norm_gemv<decltype(value)>(p, gated, x.device()); });
}

KESTREL_EXPORT(rms_norm_gemv, rms_norm_gemv);

}  // namespace kestrel::moe
