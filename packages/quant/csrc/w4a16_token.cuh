// One token x [K] times a weight [N, K] of 4-bit codes, with what stands around the product in a decode step: RMSNorm of
// x before it; a gated activation of its two halves, or a residual, behind it. A launch has one such product, or
// several, each of the one before it, with a barrier of the grid between them.
//
// Memory-bound by one read of the codes. A CTA stays and takes every so many steps of two tiles of 16 rows (a gated
// layer: one of each half). Eight warps have slices of K of a tile, in units of 128; eight blocks of codes of each warp
// are in flight in registers, across steps and across products, and the first of them before the PDL wait. x lies in
// shared memory in the order of the fragments of mma.sync, whose eight columns all hold it. Products are of 16 + code;
// what that adds is taken away by sums of x. Sums depend on N, K alone.
#pragma once

#include <cooperative_groups.h>
#include <kestrel/pack.cuh>
#include <kestrel/reduce.cuh>

#include "w4a16.cuh"

namespace kestrel::quant {

constexpr int kTokenThreads = 512, kTokenWarps = kTokenThreads / 32;
constexpr int kTokenSlices = kTokenWarps / 2;  // of K: 8
constexpr int kTokenPairs = 4;                 // of blocks, in flight: 128 k each
constexpr int kTokenPacks = 4;                 // of x, a thread, at a time
constexpr int kTokenNormPacks = 2;             // of x, a thread, where it is normalised
constexpr int kTokenProducts = 3;              // of a launch, at most

enum class TokenActivation { none, silu, gelu, gelu_tanh };

struct W4TokenParams {
  const char *x = nullptr, *codes = nullptr, *scales = nullptr, *zeros = nullptr;
  const char *bias = nullptr, *residual = nullptr, *norm = nullptr;
  char* out = nullptr;
  int rows = 0, results = 0, width = 0;  // N; N, or N / 2 of a gated layer; K
  int tiles = 0, steps = 0;              // of 16 rows; of two tiles
  int blocks = 0, pairs = 0;
  unsigned inverse_pairs_of_group = 0;  // 2^31 / that, rounded up
  float eps = 0.f, weight_bias = 0.f;
  TokenActivation activation = TokenActivation::none;
};

struct W4TokenChain {
  W4TokenParams products[kTokenProducts + 1];  // the one behind the last has no steps
  int count = 0;
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
      if (index < p.blocks * 8) store_fragments(shared_x, index, x[j].bits);
      if (lane % 16 == 0 && index < p.pairs * 16) sums_of_x[index / 16] = sum;
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kTokenThreads, 1) w4a16_token_kernel(const __grid_constant__ W4TokenChain chain) {
  extern __shared__ __align__(128) char shared_x[];
  __shared__ float warp_sums[2][kTokenWarps][16], warp_squares[kTokenWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int half = warp / kTokenSlices, slice = warp % kTokenSlices;

  // -- weights: codes of four pairs of blocks; a lane's scales and zero points of two rows of one of the pairs --
  struct Cursor {
    int product, step, pair;
  };
  const auto first_pair = [&](int product) { return chain.products[product].pairs * slice >> 3; };
  const auto last_pair = [&](int product) { return chain.products[product].pairs * (slice + 1) >> 3; };
  const auto start = [&](int product) { return Cursor{product, static_cast<int>(blockIdx.x), first_pair(product)}; };
  uint4 codes[2 * kTokenPairs];
  uint32_t scales = 0, zeros = 0;
  // Where a warp reads from the cursor on; pairs: how many of the slice are left, none without a tile.
  struct Source {
    const char* codes;
    int pairs, blocks;
  };
  const auto source_of = [&](Cursor at) {
    const W4TokenParams& p = chain.products[at.product];
    const int tile = p.activation == TokenActivation::none ? 2 * at.step + half : at.step + half * p.steps;
    const bool has_tile = at.step < p.steps && tile < p.tiles;
    scales = 0;
    if (has_tile) {
      const unsigned pair = min(at.pair + lane / 8, p.pairs - 1);
      const int64_t of = int64_t{2} * p.rows * __umulhi(2 * pair, p.inverse_pairs_of_group) + tile * 32 + lane % 8 * 4;
      scales = *reinterpret_cast<const uint32_t*>(p.scales + of);
      if (p.zeros) zeros = *reinterpret_cast<const uint32_t*>(p.zeros + of);
    }
    return Source{p.codes + int64_t{tile} * (p.blocks * kBlockBytes) + at.pair * (2 * kBlockBytes) + lane * 16,
                  has_tile ? last_pair(at.product) - at.pair : 0, p.blocks - at.pair * 2};
  };
  const auto load_pair = [&](const Source& from, int i) {
    if (i >= from.pairs) return;
    codes[2 * i] = load16_streamed(from.codes + 2 * i * kBlockBytes);
    if (2 * i + 1 < from.blocks) codes[2 * i + 1] = load16_streamed(from.codes + (2 * i + 1) * kBlockBytes);
  };
  const auto load_first = [&](Cursor at) {
    const Source from = source_of(at);
#pragma unroll
    for (int i = 0; i < kTokenPairs; ++i) load_pair(from, i);
  };
  Pack<T> norm[kTokenNormPacks];
  const auto load_norm = [&](const W4TokenParams& p) {
#pragma unroll
    for (int j = 0; j < kTokenNormPacks; ++j) {
      const int index = threadIdx.x + j * kTokenThreads;
      if (p.norm && index < p.width / 8) norm[j].bits = load16_constant(p.norm + int64_t{index} * 16);
    }
  };
#pragma unroll
  for (int i = 0; i < 2 * kTokenPairs; ++i) codes[i] = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int j = 0; j < kTokenNormPacks; ++j) norm[j].bits = make_uint4(0, 0, 0, 0);
  Cursor at = start(0);
  load_first(at);
  load_norm(chain.products[0]);
  pdl_wait();
  pdl_trigger();

#pragma unroll 1
  for (int product = 0; product < chain.count; ++product) {
    const W4TokenParams& p = chain.products[product];
    float* const sums_of_x = reinterpret_cast<float*>(shared_x + p.blocks * 128);  // of each pair of blocks
    load_token<T>(p, norm, shared_x, sums_of_x, warp_squares);
    __syncthreads();

    // -- steps: all columns of a fragment are equal, so a lane has the sums of rows `group` and `group` + 8 --
    const char* const own_x = shared_x + quad * 32;
    const bool gated = p.activation != TokenActivation::none;
    const int last = last_pair(product);
    if (blockIdx.x >= p.steps) load_first(at = start(product + 1));
    for (int parity = 0; at.product == product; parity ^= 1) {
      const int step = at.step, result = gated ? step * 16 + lane : step * 32 + lane;
      const bool finishes = warp == 0 && lane < (gated ? 16 : 32) && result < p.results;
      T residual{}, bias[2] = {};  // in flight during the products
      if (finishes && p.residual) residual = reinterpret_cast<const T*>(p.residual)[result];
      if (finishes && p.bias) {
        bias[0] = reinterpret_cast<const T*>(p.bias)[result];
        if (gated) bias[1] = reinterpret_cast<const T*>(p.bias)[result + p.results];
      }
      float sum[2] = {};
      do {
        const int pairs = last - at.pair, blocks = p.blocks - at.pair * 2;
        Cursor next{product, at.step, at.pair + kTokenPairs};
        if (next.pair >= last) {
          next.step += gridDim.x;
          next = next.step < p.steps ? Cursor{product, next.step, first_pair(product)} : start(product + 1);
        }
        const uint32_t now_scales = scales, now_zeros = zeros;
        const Source source = source_of(next);
#pragma unroll
        for (int i = 0; i < kTokenPairs; ++i) {
          if (i < pairs) {
            float sums[2][4] = {};
#pragma unroll
            for (int b = 0; b < 2; ++b) {
              if (b == 1 && 2 * i + 1 >= blocks) continue;
              const uint4* const x = reinterpret_cast<const uint4*>(own_x + ((at.pair + i) * 2 + b) * 128);
              const uint4 low = x[0], high = x[1], w = codes[2 * i + b];
              const uint32_t words[4] = {w.x, w.y, w.z, w.w};
              const uint32_t of_x[4][2] = {{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
#pragma unroll
              for (int m = 0; m < 4; ++m) {
                uint32_t a[4];
                Decoder<T>::decode(words[m], a);
                ptx::mma_16x8x16(sums[b], a, of_x[m][0], of_x[m][1], T());
              }
            }
            const float of_x = sums_of_x[at.pair + i];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const int from = i * 8 + r * 4 + group / 2, shift = group % 2 * 16;
              const float scale = widen<T>(__shfl_sync(~0u, now_scales, from) >> shift & 0xffffu);
              const float zero =
                  p.zeros ? static_cast<float>(__shfl_sync(~0u, now_zeros, from) >> shift & 0xffffu) : 8.f;
              sum[r] = fmaf(fmaf(-(16.f + zero), of_x, sums[0][2 * r] + sums[1][2 * r]), scale, sum[r]);
            }
          }
          load_pair(source, i);
        }
        at = next;
      } while (at.product == product && at.step == step);

      if (quad == 0) {
        warp_sums[parity][warp][group] = sum[0];
        warp_sums[parity][warp][group + 8] = sum[1];
      }
      __syncthreads();
      if (finishes) {
        const auto output = [&](int first_warp, T bias) {
          float total = warp_sums[parity][first_warp][lane % 16];
#pragma unroll
          for (int w = 1; w < kTokenSlices; ++w) total += warp_sums[parity][first_warp + w][lane % 16];
          return total + to_float(bias);
        };
        float value = output(gated ? 0 : lane / 16 * kTokenSlices, bias[0]);
        if (gated) value = token_activation(value, p.activation) * output(kTokenSlices, bias[1]);
        reinterpret_cast<T*>(p.out)[result] = from_float<T>(value + to_float(residual));
      }
    }
    if (product + 1 == chain.count) return;
    load_norm(chain.products[product + 1]);
    cooperative_groups::this_grid().sync();
  }
}

}  // namespace kestrel::quant
