// w4a16_token: one token x [K] times a weight [N, K] of 4-bit codes, with what stands around the product in a decode
// step: RMSNorm of x before it; a gated activation of its two halves, or a residual, behind it.
//
// Memory-bound by one read of the codes. A CTA stays and takes every so many tiles of 16 rows (a gated layer: 16 of
// each half). Its warps have slices of K in units of 128; eight blocks of codes are in flight in registers, across
// tiles, and the first of them before the PDL wait. x lies in shared memory in the order of the fragments of mma.sync,
// whose eight columns all hold it. Products are of 16 + code; what that adds is taken away by sums of x. Sums depend on
// N, K alone.
#include <kestrel/export.h>
#include <kestrel/launch.h>
#include <kestrel/tensor.h>
#include <kestrel/pack.cuh>
#include <kestrel/reduce.cuh>

#include <algorithm>

#include "w4a16_checks.h"

namespace kestrel::quant {

constexpr int kTokenThreads = 256, kTokenWarps = kTokenThreads / 32;
constexpr int kTokenPairs = 4;      // of blocks, in flight: 128 k each
constexpr int kTokenNormPacks = 4;  // of x, a thread, at a time; with a norm, in all
constexpr int kTokenCtas = 2;       // for each SM

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

// The words of a pack of x at k = 8 * index, into the order of the fragments: of a block of 64 k, lane quad q of a
// group reads 32 bytes, its words of the four products.
__device__ __forceinline__ void store_fragments(char* shared_x, int index, const uint4& bits) {
  char* const to = shared_x + index / 8 * 128 + index % 8 * 4;
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int q = 0; q < 4; ++q) *reinterpret_cast<uint32_t*>(to + q * 32) = words[q];
}

template <typename T, bool NORM, bool GATED>
__global__ void __launch_bounds__(kTokenThreads, kTokenCtas)
    w4a16_token_kernel(const __grid_constant__ W4TokenParams p) {
  constexpr int warps = GATED ? kTokenWarps / 2 : kTokenWarps;  // of a tile of 16 rows
  extern __shared__ __align__(128) char shared_x[];
  __shared__ float warp_sums[2][kTokenWarps][16], warp_squares[kTokenWarps];
  float* const sums_of_x = reinterpret_cast<float*>(shared_x + p.blocks * 128);  // of each pair of blocks
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int half = GATED ? warp / warps : 0, slice = warp % warps, tiles = p.results / 16;
  const int first_pair = static_cast<int>(int64_t{p.pairs} * slice / warps);
  const int last_pair = static_cast<int>(int64_t{p.pairs} * (slice + 1) / warps);

  // -- weights: codes of four pairs of blocks; a lane's scales and zero points of two rows of one of the pairs --
  struct Cursor {
    int tile, pair;
  };
  const auto next_of = [&](Cursor at) {
    at.pair += kTokenPairs;
    if (at.pair >= last_pair) at = {at.tile + static_cast<int>(gridDim.x), first_pair};
    return at;
  };
  uint4 codes[2 * kTokenPairs];
  const auto codes_of = [&](Cursor at) {
    const int64_t tile = at.tile + half * tiles;
    return p.codes + (tile * p.blocks + at.pair * 2) * kBlockBytes + lane * 16;
  };
  const auto load_pair = [&](Cursor at, const char* from, int i) {
    if (at.tile >= tiles || at.pair + i >= last_pair) return;
    codes[2 * i] = load16_streamed(from + 2 * i * kBlockBytes);
    if ((at.pair + i) * 2 + 1 < p.blocks) codes[2 * i + 1] = load16_streamed(from + (2 * i + 1) * kBlockBytes);
  };
  const auto load_scales = [&](Cursor at, const char* from) {
    const int pair = min(at.pair + lane / 8, p.pairs - 1), tile = min(at.tile, tiles - 1) + half * tiles;
    const int64_t of = int64_t{pair / p.pairs_of_group} * p.rows + tile * 16 + lane % 8 * 2;
    return *reinterpret_cast<const uint32_t*>(from + of * 2);
  };
  Cursor at{static_cast<int>(blockIdx.x), first_pair};
#pragma unroll
  for (int i = 0; i < 2 * kTokenPairs; ++i) codes[i] = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < kTokenPairs; ++i) load_pair(at, codes_of(at), i);
  uint32_t scales = load_scales(at, p.scales), zeros = p.zeros ? load_scales(at, p.zeros) : 0x00080008u;
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

  // -- x, a batch of packs for each thread at a time --
  float factor = 1.f;
  for (int first = 0; first < p.pairs * 16; first += kTokenNormPacks * kTokenThreads) {
    Pack<T> x[kTokenNormPacks];
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < kTokenNormPacks; ++j) {
      const int index = first + threadIdx.x + j * kTokenThreads;
      x[j].bits = make_uint4(0, 0, 0, 0);
      if (index < packs) x[j].bits = load16(p.x + int64_t{index} * 16);
    }
    if constexpr (NORM) {
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
      factor = rsqrtf(total / static_cast<float>(p.width) + p.eps);
    }
#pragma unroll
    for (int j = 0; j < kTokenNormPacks; ++j) {
      const int index = first + threadIdx.x + j * kTokenThreads;
      if (index - lane >= p.pairs * 16) break;  // of a whole warp
      float v[8], sum = 0.f;
      if constexpr (NORM) {
        float w[8];
        x[j].unpack(v);
        norm[j].unpack(w);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = index < packs ? v[i] * factor * (w[i] + p.weight_bias) : 0.f;
        x[j].pack(v);
      }
      x[j].unpack(v);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += v[i];
#pragma unroll
      for (int other = 8; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
      if (index < p.blocks * 8) store_fragments(shared_x, index, x[j].bits);
      if (lane % 16 == 0 && index < p.pairs * 16) sums_of_x[index / 16] = sum;
    }
  }
  __syncthreads();

  // -- tiles: all columns of a fragment are equal, so a lane has the sums of rows `group` and `group` + 8 --
  const char* const own_x = shared_x + quad * 32;
  for (int parity = 0; at.tile < tiles; parity ^= 1) {
    const int tile = at.tile;
    float sum[2] = {};
    do {
      const Cursor next = next_of(at);
      const char* const next_codes = codes_of(next);
      const uint32_t now_scales = scales, now_zeros = zeros;
      scales = load_scales(next, p.scales);
      if (p.zeros) zeros = load_scales(next, p.zeros);
#pragma unroll
      for (int i = 0; i < kTokenPairs; ++i) {
        if (at.pair + i < last_pair) {
          float product[2][4] = {};
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            if (b == 1 && (at.pair + i) * 2 + 1 >= p.blocks) continue;
            const uint4* const x = reinterpret_cast<const uint4*>(own_x + ((at.pair + i) * 2 + b) * 128);
            const uint4 low = x[0], high = x[1], w = codes[2 * i + b];
            const uint32_t words[4] = {w.x, w.y, w.z, w.w};
            const uint32_t of_x[4][2] = {{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
#pragma unroll
            for (int m = 0; m < 4; ++m) {
              uint32_t a[4];
              Decoder<T>::decode(words[m], a);
              ptx::mma_16x8x16(product[b], a, of_x[m][0], of_x[m][1], T());
            }
          }
          const float of_x = sums_of_x[at.pair + i];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int from = i * 8 + r * 4 + group / 2, shift = group % 2 * 16;
            const float scale = widen<T>(__shfl_sync(~0u, now_scales, from) >> shift & 0xffffu);
            const float zero = p.zeros ? static_cast<float>(__shfl_sync(~0u, now_zeros, from) >> shift & 0xffffu) : 8.f;
            sum[r] = fmaf(fmaf(-(16.f + zero), of_x, product[0][2 * r] + product[1][2 * r]), scale, sum[r]);
          }
        }
        load_pair(next, next_codes, i);
      }
      at = next;
    } while (at.tile == tile);

    if (quad == 0) {
      warp_sums[parity][warp][group] = sum[0];
      warp_sums[parity][warp][group + 8] = sum[1];
    }
    __syncthreads();
    const int row = lane, result = tile * 16 + row;
    if (warp == 0 && row < 16) {
      const auto output = [&](int first_warp, int bias_row) {
        float total = warp_sums[parity][first_warp][row];
#pragma unroll
        for (int w = 1; w < warps; ++w) total += warp_sums[parity][first_warp + w][row];
        return p.bias ? total + to_float(reinterpret_cast<const T*>(p.bias)[bias_row]) : total;
      };
      float value = output(0, result);
      if constexpr (GATED) value = token_activation(value, p.activation) * output(warps, result + p.results);
      if (p.residual) value += to_float(reinterpret_cast<const T*>(p.residual)[result]);
      reinterpret_cast<T*>(p.out)[result] = from_float<T>(value);
    }
  }
}

template <typename T>
void launch_token(const W4TokenParams& p, DLDevice device) {
  const bool gated = p.activation != TokenActivation::none;
  const int bytes = p.blocks * 128 + p.pairs * 4;
  const int ctas = kTokenCtas * device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
  const auto launch = [&](auto kernel, int limit) {
    if (bytes > limit) unsupported("an x that does not fit into shared memory");
    launch_pdl(kernel, dim3(std::min(p.results / 16, ctas)), dim3(kTokenThreads), device, p, bytes);
  };
  if (p.norm && gated) return launch(w4a16_token_kernel<T, true, true>, 48 << 10);
  if (p.norm) return launch(w4a16_token_kernel<T, true, false>, 48 << 10);
  if (gated)
    return launch(w4a16_token_kernel<T, false, true>, raise_shared_limit<w4a16_token_kernel<T, false, true>>(device));
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
  check.no_overlap("out", out, "residual", residual, /*may_be_same=*/true);
  check_devices(check, "x", x, {{"residual", residual}});
  if (tokens == 0 || results == 0) return;
  require_covered(weight, scales);
  if (tokens > 1) unsupported("more than one token");
  if (weight.group % kStep && weight.groups > 1) unsupported("groups that are no multiples of 128 and not whole rows");
  if (results % 16) unsupported("a number of results that is not a multiple of 16");
  if (norm_weight.has_value() && width > kTokenNormPacks * kTokenThreads * 8)
    unsupported("a norm of that many columns");
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
  p.activation = !gated                   ? TokenActivation::none
                 : name == "silu_and_mul" ? TokenActivation::silu
                 : name == "gelu_and_mul" ? TokenActivation::gelu
                                          : TokenActivation::gelu_tanh;
  if (!aligned16(p.x) || !aligned16(p.norm)) unsupported("an x or norm that is not aligned to 16 bytes");
  const DLDevice device = x.device();
  const DeviceGuard guard(device.device_id);
  same_dtype(x.dtype(), kBFloat16) ? launch_token<__nv_bfloat16>(p, device) : launch_token<__half>(p, device);
}

KESTREL_EXPORT(w4a16_token, w4a16_token);

}  // namespace kestrel::quant
