// w4a16_token: one token x [K] times a weight [N, K] of 4-bit codes, with what stands around the product in a decode
// step: RMSNorm of x before it; a gated activation of its two halves, or a residual, behind it.
//
// Memory-bound by one read of the codes. A CTA has 16 rows (a gated layer: 16 of each half); its warps have slices of K
// in units of 128, eight blocks of codes in flight in registers, the first before the PDL wait. x lies in shared memory
// in the order of the fragments of mma.sync, whose eight columns all hold it. Sums depend on N and K alone.
#include <kestrel/export.h>
#include <kestrel/launch.h>
#include <kestrel/pack.cuh>
#include <kestrel/reduce.cuh>
#include <kestrel/tensor.h>

#include <algorithm>

#include "w4a16_checks.h"

namespace kestrel::quant {

constexpr int kTokenThreads = 256, kTokenWarps = kTokenThreads / 32;
constexpr int kTokenPairs = 4;      // of blocks, in flight: 128 k each
constexpr int kTokenNormPacks = 4;  // of x, a thread, with a norm

enum class TokenActivation { none, silu, gelu, gelu_tanh };

struct W4TokenParams {
  const char *x = nullptr, *codes = nullptr, *scales = nullptr, *zeros = nullptr;
  const char *bias = nullptr, *residual = nullptr, *norm = nullptr;
  char* out = nullptr;
  int rows = 0, results = 0, width = 0;  // N; N, or N / 2 of a gated layer; K
  int blocks = 0, pairs = 0, pairs_of_group = 1;
  float eps = 0.f, weight_bias = 0.f;
  TokenActivation activation = TokenActivation::none;
};

__device__ __forceinline__ float token_activation(float h, TokenActivation activation) {
  if (activation == TokenActivation::silu) return __fdividef(h, 1.f + __expf(-h));
  if (activation == TokenActivation::gelu) return 0.5f * h * erfcf(h * -0.70710678f);
  return __fdividef(h, 1.f + __expf(-1.5957691216057308f * (h + 0.044715f * h * h * h)));
}

// The words of a pack of x at k = 8 * index, into the order of the fragments: of a block of 64 k, lane quad q of a group
// reads 32 bytes, its words of the four products.
__device__ __forceinline__ void store_fragments(char* shared_x, int index, const uint4& bits) {
  char* const to = shared_x + index / 8 * 128 + index % 8 * 4;
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int q = 0; q < 4; ++q) *reinterpret_cast<uint32_t*>(to + q * 32) = words[q];
}

template <typename T, bool NORM, bool GATED>
__global__ void __launch_bounds__(kTokenThreads, 2) w4a16_token_kernel(const __grid_constant__ W4TokenParams p) {
  constexpr int warps = GATED ? kTokenWarps / 2 : kTokenWarps;  // of a tile of 16 rows
  extern __shared__ __align__(128) char shared_x[];
  __shared__ float warp_sums[kTokenWarps][16], warp_squares[kTokenWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int half = GATED ? warp / warps : 0, slice = warp % warps;
  const int tile = blockIdx.x + half * (p.results / 16), first_row = tile * 16;
  const int first_pair = static_cast<int>(int64_t{p.pairs} * slice / warps);
  const int last_pair = static_cast<int>(int64_t{p.pairs} * (slice + 1) / warps);

  // -- weights: codes of a chunk of four pairs, and the scales and zero points of a lane's pair, two rows of them --
  const char* const codes_of_tile = p.codes + int64_t{tile} * p.blocks * kBlockBytes + lane * 16;
  uint4 codes[2 * kTokenPairs];
  const auto load_block = [&](int pair, int i) {
    const int block = pair * 2 + i;
    return pair < last_pair && block < p.blocks ? load16_streamed(codes_of_tile + int64_t{block} * kBlockBytes)
                                                : make_uint4(0, 0, 0, 0);
  };
  const int scale_row = first_row + lane % 8 * 2;
  const auto load_pair = [&](const char* from, int chunk, uint32_t otherwise) {
    const int pair = chunk + lane / 8;
    if (pair >= last_pair || scale_row >= p.rows) return otherwise;
    return *reinterpret_cast<const uint32_t*>(from + (int64_t{pair / p.pairs_of_group} * p.rows + scale_row) * 2);
  };
#pragma unroll
  for (int i = 0; i < 2 * kTokenPairs; ++i) codes[i] = load_block(first_pair + i / 2, i % 2);
  uint32_t scales = load_pair(p.scales, first_pair, 0);
  uint32_t zeros = p.zeros ? load_pair(p.zeros, first_pair, 0x00080008u) : 0x00080008u;
  Pack<T> norm[kTokenNormPacks];
  const int packs = p.width / 8;
  if constexpr (NORM) {
#pragma unroll
    for (int j = 0; j < kTokenNormPacks; ++j) {
      const int index = threadIdx.x + j * kTokenThreads;
      if (index < packs) norm[j].bits = load16_constant(p.norm + int64_t{index} * 16);
    }
  }
  pdl_wait();
  pdl_trigger();

  // -- x --
  if constexpr (NORM) {
    Pack<T> x[kTokenNormPacks];
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < kTokenNormPacks; ++j) {
      const int index = threadIdx.x + j * kTokenThreads;
      x[j].bits = make_uint4(0, 0, 0, 0);
      if (index < packs) x[j].bits = load16(p.x + int64_t{index} * 16);
    }
#pragma unroll
    for (int j = 0; j < kTokenNormPacks; ++j) {
      float v[8];
      x[j].unpack(v);
#pragma unroll
      for (int i = 0; i < 8; ++i) squares = fmaf(v[i], v[i], squares);
    }
    squares = warp_sum(squares);
    if (lane == 0) warp_squares[warp] = squares;
    __syncthreads();
    float total = warp_squares[0];
#pragma unroll
    for (int w = 1; w < kTokenWarps; ++w) total += warp_squares[w];
    const float factor = rsqrtf(total / static_cast<float>(p.width) + p.eps);
#pragma unroll
    for (int j = 0; j < kTokenNormPacks; ++j) {
      const int index = threadIdx.x + j * kTokenThreads;
      if (index >= p.blocks * 8) continue;
      float v[8], w[8];
      x[j].unpack(v);
      norm[j].unpack(w);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = index < packs ? v[i] * factor * (w[i] + p.weight_bias) : 0.f;
      Pack<T> y;
      y.pack(v);
      store_fragments(shared_x, index, y.bits);
    }
  } else {
    for (int index = threadIdx.x; index < p.blocks * 8; index += kTokenThreads) {
      store_fragments(shared_x, index, index < packs ? load16(p.x + int64_t{index} * 16) : make_uint4(0, 0, 0, 0));
    }
  }
  __syncthreads();

  // -- products: all columns of a fragment are equal, so a lane has the sums of rows `group` and `group` + 8 --
  float sum[2] = {};
  for (int chunk = first_pair; chunk < last_pair; chunk += kTokenPairs) {
    const uint32_t now_scales = scales, now_zeros = zeros;
    scales = load_pair(p.scales, chunk + kTokenPairs, 0);
    if (p.zeros) zeros = load_pair(p.zeros, chunk + kTokenPairs, 0x00080008u);
#pragma unroll
    for (int i = 0; i < kTokenPairs; ++i) {
      uint32_t scale[2], minus_offset[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int from = i * 8 + r * 4 + group / 2, shift = group % 2 * 16;
        scale[r] = __shfl_sync(~0u, now_scales, from) >> shift & 0xffffu;
        minus_offset[r] = Decoder<T>::minus_offset(__shfl_sync(~0u, now_zeros, from) >> shift & 0xffffu);
      }
      if (chunk + i >= last_pair) continue;
      float product[4] = {};
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const int block = (chunk + i) * 2 + b;
        if (block < p.blocks) {
          const uint4* const x = reinterpret_cast<const uint4*>(shared_x + block * 128 + quad * 32);
          const uint4 low = x[0], high = x[1], w = codes[2 * i + b];
          const uint32_t words[4] = {w.x, w.y, w.z, w.w};
          const uint32_t of_x[4][2] = {{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            uint32_t a[4];
            Decoder<T>::decode(words[m], a);
#pragma unroll
            for (int j = 0; j < 4; ++j) a[j] = Decoder<T>::centred(a[j], minus_offset[j % 2]);
            ptx::mma_16x8x16(product, a, of_x[m][0], of_x[m][1], T());
          }
        }
        codes[2 * i + b] = load_block(chunk + kTokenPairs + i, b);
      }
      sum[0] = fmaf(product[0], widen<T>(scale[0]), sum[0]);
      sum[1] = fmaf(product[2], widen<T>(scale[1]), sum[1]);
    }
  }

  // -- epilogue --
  if (quad == 0) {
    warp_sums[warp][group] = sum[0];
    warp_sums[warp][group + 8] = sum[1];
  }
  __syncthreads();
  const int result = blockIdx.x * 16 + threadIdx.x;
  if (threadIdx.x >= 16 || result >= p.results) return;
  const auto output = [&](int first_warp, int row) {
    float total = warp_sums[first_warp][threadIdx.x];
#pragma unroll
    for (int w = 1; w < warps; ++w) total += warp_sums[first_warp + w][threadIdx.x];
    return p.bias ? total + to_float(reinterpret_cast<const T*>(p.bias)[row]) : total;
  };
  float value = output(0, result);
  if constexpr (GATED) value = token_activation(value, p.activation) * output(warps, result + p.results);
  if (p.residual) value += to_float(reinterpret_cast<const T*>(p.residual)[result]);
  reinterpret_cast<T*>(p.out)[result] = from_float<T>(value);
}

template <typename T>
void launch_token(const W4TokenParams& p, DLDevice device) {
  const bool gated = p.activation != TokenActivation::none;
  const int bytes = p.blocks * 128;
  const auto launch = [&](auto kernel, int limit) {
    if (bytes > limit) unsupported("an x that does not fit into shared memory");
    launch_pdl(kernel, dim3((p.results + 15) / 16), dim3(kTokenThreads), device, p, bytes);
  };
  if (p.norm && gated) return launch(w4a16_token_kernel<T, true, true>, 48 << 10);
  if (p.norm) return launch(w4a16_token_kernel<T, true, false>, 48 << 10);
  if (gated) return launch(w4a16_token_kernel<T, false, true>, raise_shared_limit<w4a16_token_kernel<T, false, true>>(device));
  launch(w4a16_token_kernel<T, false, false>, raise_shared_limit<w4a16_token_kernel<T, false, false>>(device));
}

// activation: "none", or one that halves the result: act(first half) * second half. residual: of the result's shape.
void w4a16_token(TensorView out, TensorView x, TensorView codes, TensorView scales, OptionalTensor zeros,
                 int64_t group_size, OptionalTensor bias, OptionalTensor norm_weight, double norm_eps,
                 double norm_weight_bias, AnyView activation, OptionalTensor residual) {
  const Checks check("w4a16_token");
  check.dtype("x", x, {kBFloat16, kFloat16, kFloat32});
  check.rank("x", x, 2, 2);
  check.last_contiguous("x", x);
  W4Params weight;
  check_weight(check, codes, scales, zeros, group_size, &weight);
  const int64_t tokens = x.size(0), rows = weight.outputs, width = weight.width, x_shape[2] = {tokens, width};
  check.shape("x", x, x_shape, 2);
  check.same_dtype("w", scales, "x", x);
  const auto check_vector = [&](const char* name, const OptionalTensor& vector, int64_t size) {
    if (!vector.has_value()) return;
    check.dtype(name, *vector, {x.dtype()});
    check.shape(name, *vector, &size, 1);
    check.last_contiguous(name, *vector);
  };
  check_vector("bias", bias, rows);
  check_vector("norm_weight", norm_weight, width);
  check.at_least("norm_eps", norm_eps, 0);
  check.number("norm_weight_bias", norm_weight_bias);
  const std::string name =
      check.choice("activation", activation, {"none", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"});
  const bool gated = name != "none";
  if (gated && rows % 2) check.fail("w", "an even number of rows", std::to_string(rows));
  const int64_t results = gated ? rows / 2 : rows, out_shape[2] = {tokens, results};
  if (residual.has_value()) {
    check.dtype("residual", *residual, {x.dtype()});
    check.shape("residual", *residual, out_shape, 2);
    check.last_contiguous("residual", *residual);
  }
  check.dtype("out", out, {x.dtype()});
  check.shape("out", out, out_shape, 2);
  check.last_contiguous("out", out);
  check_memory(check, {{"x", x},
                       {"w", codes},
                       {"w", scales},
                       {"w", zeros},
                       {"bias", bias},
                       {"norm_weight", norm_weight},
                       {"out", out, /*written=*/true}});
  if (tokens == 0 || results == 0) return;
  require_covered(weight, scales);
  if (tokens > 1) unsupported("more than one token");
  if (weight.group % kStep && weight.groups > 1) unsupported("groups that are no multiples of 128 and not whole rows");
  if (results % 16) unsupported("a number of results that is not a multiple of 16");
  if (norm_weight.has_value() && width > kTokenNormPacks * kTokenThreads * 8) unsupported("a norm of that many columns");
  W4TokenParams p;
  p.x = address(x);
  p.codes = weight.codes;
  p.scales = weight.scales;
  p.zeros = weight.zeros;
  p.bias = address(bias);
  p.residual = address(residual);
  p.norm = address(norm_weight);
  p.out = address(out);
  p.rows = weight.outputs;
  p.results = static_cast<int>(results);
  p.width = weight.width;
  p.blocks = weight.blocks;
  p.pairs = weight.steps;
  p.pairs_of_group = weight.steps_per_group;
  p.eps = static_cast<float>(norm_eps);
  p.weight_bias = static_cast<float>(norm_weight_bias);
  p.activation = !gated                        ? TokenActivation::none
                 : name == "silu_and_mul"      ? TokenActivation::silu
                 : name == "gelu_and_mul"      ? TokenActivation::gelu
                                               : TokenActivation::gelu_tanh;
  if (!aligned16(p.x) || !aligned16(p.norm)) unsupported("an x or norm that is not aligned to 16 bytes");
  const DLDevice device = x.device();
  const DeviceGuard guard(device.device_id);
  same_dtype(x.dtype(), kBFloat16) ? launch_token<__nv_bfloat16>(p, device) : launch_token<__half>(p, device);
}

KESTREL_EXPORT(w4a16_token, w4a16_token);

}  // namespace kestrel::quant
