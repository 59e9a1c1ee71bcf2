// w4a16_token: one token x [K] times a weight [N, K] of 4-bit codes, with what stands around the product in a decode
// step: RMSNorm of x before it; a gated activation of its two halves, or a residual, behind it.
//
// Memory-bound by one read of the codes. CTAs are persistent, one for each SM: CTA i computes steps i, i + gridDim.x,
// ... A step is two tiles of 16 rows (a gated layer: one of each half), or one tile in a last, partial wave. The warps
// of a tile have slices of K. Eight blocks of codes of each warp are in flight in registers, across steps, and the
// first of them before the PDL wait; no barrier separates steps. x lies in shared memory in the order of the fragments
// of mma.sync, whose eight columns all hold it. Products are of 16 + code: (16 + zero) * sum(x) is subtracted. Sums
// depend on N, K and the number of SMs alone.
#include <kestrel/export.h>
#include <kestrel/launch.h>
#include <kestrel/tensor.h>
#include <kestrel/pack.cuh>
#include <kestrel/reduce.cuh>

#include <algorithm>

#include "w4a16_checks.h"

namespace kestrel::quant {

constexpr int kTokenThreads = 512, kTokenWarps = kTokenThreads / 32;
constexpr int kTokenPairs = 4;      // pairs of blocks of codes in flight in a warp's registers, of 128 k each
constexpr int kTokenPacks = 4;      // packs of x that a thread loads at a time
constexpr int kTokenNormPacks = 2;  // packs of x and of the norm's weight that a thread holds: rows of up to 8192
constexpr int kTokenSteps = 16;     // steps whose sums are kept in shared memory; then all results are written

enum class TokenActivation { none, silu, gelu, gelu_tanh };

struct W4TokenParams {
  const char *x = nullptr, *codes = nullptr, *scales = nullptr, *zeros = nullptr;
  const char *bias = nullptr, *residual = nullptr, *norm = nullptr;
  char* out = nullptr;
  int rows = 0, results = 0, width = 0;  // N; N, or N / 2 of a gated layer; K
  int tiles = 0, steps = 0;              // of 16 rows; of one or two tiles
  int pair_steps = 0;                    // the first ones, of two tiles
  int blocks = 0, pairs = 0;             // of 64 k; of two blocks
  unsigned inverse_pairs_of_group = 0;   // 2^31 / that, rounded up
  float eps = 0.f, weight_bias = 0.f;
  TokenActivation activation = TokenActivation::none;
};

__device__ __forceinline__ float token_activation(float h, TokenActivation activation) {
  if (activation == TokenActivation::silu) return __fdividef(h, 1.f + __expf(-h));
  if (activation == TokenActivation::gelu) return 0.5f * h * erfcf(h * -0.70710678f);
  constexpr float kFactor = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  return __fdividef(h, 1.f + __expf(-kFactor * (h + 0.044715f * h * h * h)));
}

// The words of a pack of x at k = 8 * index, into the order of the fragments: of a block of 64 k, lane quad q of a
// group reads 32 bytes, its words of the four products.
__device__ __forceinline__ void store_fragments(char* shared_x, int index, const uint4& bits) {
  char* const to = shared_x + index / 8 * 128 + index % 8 * 4;
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int q = 0; q < 4; ++q) *reinterpret_cast<uint32_t*>(to + q * 32) = words[q];
}

// x, normalised by `norm` if there is one, into shared memory, and the sums of its pairs of blocks.
template <typename T>
__device__ __forceinline__ void load_token(const W4TokenParams& p, const Pack<T> (&norm)[kTokenNormPacks],
                                           char* shared_x, float* sums_of_x, float* warp_squares) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, packs = p.width / 8;
  for (int first = 0; first < p.pairs * 16; first += kTokenPacks * kTokenThreads) {
    Pack<T> x[kTokenPacks];
#pragma unroll
    for (int j = 0; j < kTokenPacks; ++j) {
      const int index = first + threadIdx.x + j * kTokenThreads;
      x[j].bits = make_uint4(0, 0, 0, 0);
      if (index < packs) x[j].bits = load16(p.x + int64_t{index} * 16);
    }
    if (p.norm) {
      float squares = 0.f;
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
        const int index = first + threadIdx.x + j * kTokenThreads;
        float v[8], w[8];
        x[j].unpack(v);
        norm[j].unpack(w);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = index < packs ? v[i] * factor * (w[i] + p.weight_bias) : 0.f;
        x[j].pack(v);
      }
    }
#pragma unroll
    for (int j = 0; j < kTokenPacks; ++j) {
      const int index = first + threadIdx.x + j * kTokenThreads;
      if (index - lane >= p.pairs * 16) break;  // of a whole warp
      float v[8], sum = 0.f;
      x[j].unpack(v);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += v[i];
#pragma unroll
      for (int other = 8; other > 0; other /= 2) sum += __shfl_xor_sync(~0u, sum, other);
      if (index >= p.pairs * 16) continue;  // of half a warp
      store_fragments(shared_x, index, x[j].bits);
      if (lane % 16 == 0) sums_of_x[index / 16] = sum;
    }
  }
}

template <typename T, bool ZEROS>
__global__ void __launch_bounds__(kTokenThreads, 1) w4a16_token_kernel(const __grid_constant__ W4TokenParams p) {
  extern __shared__ __align__(128) char shared_x[];
  __shared__ float warp_sums[kTokenSteps][kTokenWarps][16], warp_squares[kTokenWarps];
  float* const sums_of_x = reinterpret_cast<float*>(shared_x + p.pairs * 256);  // of each pair of blocks
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int half = warp / (kTokenWarps / 2);
  const bool gated = p.activation != TokenActivation::none;

  // -- weights: codes of four pairs of blocks; a lane's scales and zero points of two rows of one of the pairs --
  struct Cursor {
    int step, pair;
  };
  // A warp's slice of K begins here; `warps` further on it ends where that of the next warp begins.
  const auto slice = [&](int step, int next) {
    const unsigned pairs = p.pairs, of = step < p.pair_steps ? warp % (kTokenWarps / 2) + next : warp + next;
    return static_cast<int>(step < p.pair_steps ? pairs * of / (kTokenWarps / 2) : pairs * of / kTokenWarps);
  };
  uint4 codes[2 * kTokenPairs];
  uint32_t scales = 0, zeros = 0;
  // Where a warp reads from the cursor on. pairs: how many of the slice are left, none without a tile.
  struct Source {
    const char* codes;
    int pairs, blocks;
  };
  const auto source_of = [&](Cursor at) {
    const int tile = gated                    ? at.step + half * p.steps
                     : at.step < p.pair_steps ? 2 * at.step + half
                                              : at.step + p.pair_steps;
    const bool has_tile = at.step < p.steps && tile < p.tiles;
    scales = 0;
    if (has_tile) {
      const unsigned pair = min(at.pair + lane / 8, p.pairs - 1);
      const int64_t of = int64_t{2} * p.rows * __umulhi(2 * pair, p.inverse_pairs_of_group) + tile * 32 + lane % 8 * 4;
      scales = *reinterpret_cast<const uint32_t*>(p.scales + of);
      if constexpr (ZEROS) zeros = *reinterpret_cast<const uint32_t*>(p.zeros + of);
    }
    return Source{p.codes + int64_t{tile} * (p.blocks * kBlockBytes) + at.pair * (2 * kBlockBytes) + lane * 16,
                  has_tile ? slice(at.step, 1) - at.pair : 0, p.blocks - at.pair * 2};
  };
  const auto load_pair = [&](const Source& from, int i) {
    if (i >= from.pairs) return;
    codes[2 * i] = load16_streamed(from.codes + 2 * i * kBlockBytes);
    if (2 * i + 1 < from.blocks) codes[2 * i + 1] = load16_streamed(from.codes + (2 * i + 1) * kBlockBytes);
  };
#pragma unroll
  for (int i = 0; i < 2 * kTokenPairs; ++i) codes[i] = make_uint4(0, 0, 0, 0);
  Cursor at{static_cast<int>(blockIdx.x), slice(blockIdx.x, 0)};
  {
    const Source from = source_of(at);
#pragma unroll
    for (int i = 0; i < kTokenPairs; ++i) load_pair(from, i);
  }
  Pack<T> norm[kTokenNormPacks];
#pragma unroll
  for (int j = 0; j < kTokenNormPacks; ++j) {
    const int index = threadIdx.x + j * kTokenThreads;
    norm[j].bits = make_uint4(0, 0, 0, 0);
    if (p.norm && index < p.width / 8) norm[j].bits = load16_constant(p.norm + int64_t{index} * 16);
  }
  pdl_wait();
  pdl_trigger();
  load_token<T>(p, norm, shared_x, sums_of_x, warp_squares);
  __syncthreads();

  // -- steps: all columns of a fragment are equal, so a lane has the sums of rows `group` and `group` + 8 --
  const char* const own_x = shared_x + quad * 32;
  const int results = gated ? 16 : 32;  // of a step
  while (at.step < p.steps) {
    // A thread finishes one result of the next steps. What is added to it is in flight during the products.
    const int own_step = at.step + static_cast<int>(threadIdx.x) / results * gridDim.x;
    const bool pair_step = own_step < p.pair_steps;
    int result = own_step * results + threadIdx.x % results;
    if (!pair_step) result = threadIdx.x % 32 < 16 ? (own_step + p.pair_steps) * 16 + threadIdx.x % 32 : p.results;
    T residual{}, bias[2] = {};
    if (result < p.results) {
      if (p.residual) residual = reinterpret_cast<const T*>(p.residual)[result];
      if (p.bias) {
        bias[0] = reinterpret_cast<const T*>(p.bias)[result];
        if (gated) bias[1] = reinterpret_cast<const T*>(p.bias)[result + p.results];
      }
    }
    int steps = 0;
    do {
      const int step = at.step, last = slice(step, 1);
      float sum[2] = {};
      do {
        const int pairs = last - at.pair;
        const char* const x_of_pairs = own_x + at.pair * 256;
        const float* const sums_of_pairs = sums_of_x + at.pair;
        at.pair += kTokenPairs;
        if (at.pair >= last) at = {step + static_cast<int>(gridDim.x), slice(step + gridDim.x, 0)};
        const uint32_t now_scales = scales, now_zeros = zeros;
        const Source source = source_of(at);
#pragma unroll
        for (int i = 0; i < kTokenPairs; ++i) {
          float sums[2][4] = {};
          if (i < pairs) {
            const uint4* const x = reinterpret_cast<const uint4*>(x_of_pairs + i * 256);
#pragma unroll
            for (int m = 0; m < 4; ++m) {
#pragma unroll
              for (int b = 0; b < 2; ++b) {
                const uint4 of_x = x[8 * b + m / 2], w = codes[2 * i + b];
                uint32_t a[4];
                Decoder<T>::decode(m == 0 ? w.x : m == 1 ? w.y : m == 2 ? w.z : w.w, a);
                ptx::mma_16x8x16(sums[b], a, m % 2 ? of_x.z : of_x.x, m % 2 ? of_x.w : of_x.y, T());
              }
            }
          }
          load_pair(source, i);
          if (i < pairs) {
            const float of_x = sums_of_pairs[i];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const int from = i * 8 + r * 4 + group / 2, shift = group % 2 * 16;
              const float scale = widen<T>(__shfl_sync(~0u, now_scales, from) >> shift & 0xffffu);
              const float zero = ZEROS ? static_cast<float>(__shfl_sync(~0u, now_zeros, from) >> shift & 0xffffu) : 8.f;
              sum[r] = fmaf(fmaf(-(16.f + zero), of_x, sums[0][2 * r] + sums[1][2 * r]), scale, sum[r]);
            }
          }
        }
      } while (at.step == step);
      if (quad == 0) {
        warp_sums[steps][warp][group] = sum[0];
        warp_sums[steps][warp][group + 8] = sum[1];
      }
    } while (++steps < kTokenSteps && at.step < p.steps);
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < steps * results && result < p.results) {
      const auto output = [&](int first_warp, int warps, T bias) {
        const auto* const of = warp_sums[threadIdx.x / results] + first_warp;
        float total = of[0][threadIdx.x % 16];
        for (int w = 1; w < warps; ++w) total += of[w][threadIdx.x % 16];
        return total + to_float(bias);
      };
      constexpr int warps = kTokenWarps / 2;
      float value = pair_step ? output(gated ? 0 : threadIdx.x % 32 / 16 * warps, warps, bias[0])
                              : output(0, kTokenWarps, bias[0]);
      if (gated) value = token_activation(value, p.activation) * output(warps, warps, bias[1]);
      reinterpret_cast<T*>(p.out)[result] = from_float<T>(value + to_float(residual));
    }
    if (at.step < p.steps) __syncthreads();  // the sums are read
  }
}

template <typename T, bool ZEROS>
void launch_token(W4TokenParams p, DLDevice device) {
  constexpr auto kernel = w4a16_token_kernel<T, ZEROS>;
  const int bytes = p.pairs * (256 + 4);
  if (bytes > raise_shared_limit<kernel>(device)) unsupported("an x that does not fit into shared memory");
  const int sms = device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
  p.tiles = p.rows / 16;
  p.steps = p.pair_steps = (p.tiles + 1) / 2;
  const int full_waves = p.steps / sms * sms, rest = p.tiles - 2 * full_waves;  // -1: the last step has one tile
  if (p.activation == TokenActivation::none && rest > 0 && rest <= sms) {
    p.pair_steps = full_waves;  // the last wave has a tile for each CTA instead of two for some
    p.steps = full_waves + rest;
  }
  launch_pdl(kernel, dim3(std::min(p.steps, sms)), dim3(kTokenThreads), device, p, bytes);
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
  require_covered(weight, scales);  // what follows is said of a weight by w4a16_token_covers in w4a16_token.py, too
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
  p.inverse_pairs_of_group = ((1u << 31) + weight.steps_per_group - 1) / weight.steps_per_group;
  p.eps = static_cast<float>(norm_eps);
  p.weight_bias = static_cast<float>(norm_weight_bias);
  p.activation = !gated                   ? TokenActivation::none
                 : name == "silu_and_mul" ? TokenActivation::silu
                 : name == "gelu_and_mul" ? TokenActivation::gelu
                                          : TokenActivation::gelu_tanh;
  if (!aligned16(p.x) || !aligned16(p.norm)) unsupported("an x or norm that is not aligned to 16 bytes");
  const DLDevice device = x.device();
  const DeviceGuard guard(device.device_id);
  const auto launch = [&](auto t) {
    using T = decltype(t);
    p.zeros ? launch_token<T, true>(p, device) : launch_token<T, false>(p, device);
  };
  same_dtype(x.dtype(), kBFloat16) ? launch(__nv_bfloat16()) : launch(__half());
}

KESTREL_EXPORT(w4a16_token, w4a16_token);

}  // namespace kestrel::quant
