// The epilogue of a tile of experts_tma.cuh: results leave through shared memory, as rows, or as the hidden layer in
// the form of pipeline stages.
#pragma once

#include <kestrel/fp8.cuh>
#include <kestrel/ptx/matrix.cuh>
#include <kestrel/ptx/named_barrier.cuh>
#include <kestrel/ptx/shared.cuh>
#include <kestrel/ptx/tma.cuh>

#include "experts_tma_tiles.cuh"

namespace kestrel::moe {

// Where a thread stands in the consumer warpgroups.
struct ConsumerThread {
  int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;      // uniform to the compiler
  int warpgroup = warp / 4 - 1, slab = warp % 4 * 16, group = lane / 4, quad = lane % 4;  // slab: rows of this warp
  bool copies = threadIdx.x % 128 == 0;  // one thread of a warpgroup issues its copies

  __device__ __forceinline__ ConsumerThread() {}
};

template <typename W, typename R, Projection PROJECTION, typename Tile>
struct TmaEpilogue : ConsumerThread {
  static constexpr bool up = PROJECTION == Projection::up, fp8 = std::is_same_v<W, __nv_fp8_e4m3>;
  static constexpr bool gates = up && (!fp8 || Tile::tokens <= 64);  // experts_fp8.cuh gates FP8 tiles of 128
  using Entry = typename TmaShared<W, Tile>::Entry;
  // Of a thread: [block][4 * j + 2 * r + c], of row group + 8 * r of the warp's 16, token 8 * j + 2 * quad + c.
  using Sums = float[2][Tile::tokens / 2];

  const TmaParams& params;
  const ExpertsParams& p;
  Entry& at;
  const int used;
  const int (&channel)[2];  // the first one of the warp in each block
  Sums& acc;
  const uint32_t results;
  int& buffer;
  int& unsignalled;
  float scale[2][2] = {{1.f, 1.f}, {1.f, 1.f}};  // of [block][channel of this thread]

  __device__ __forceinline__ TmaEpilogue(const ConsumerThread& thread, const TmaParams& params, const ExpertsParams& p,
                                         Entry& at, int used, const int (&channel)[2], Sums& acc, uint32_t results,
                                         int& buffer, int& unsignalled)
      : ConsumerThread(thread),
        params(params),
        p(p),
        at(at),
        used(used),
        channel(channel),
        acc(acc),
        results(results),
        buffer(buffer),
        unsignalled(unsignalled) {
    if (fp8 && p.scale_rank < 3) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = warpgroup * (up ? 64 : 128) + b * (up ? Tile::half_rows : 64) + slab +
                          (params.even_first ? 2 * group + r : group + 8 * r);
          scale[b][r] = at.scale[fp8 ? row : 0];
        }
      }
    }
  }

  __device__ __forceinline__ void store() {
    if (gates && p.gate == Gate::silu_and_mul) {
      store_gated<Gate::silu_and_mul>();
    } else if (gates && p.gate == Gate::gelu_and_mul) {
      store_gated<Gate::gelu_and_mul>();
    } else if (gates && p.gate == Gate::gelu_residual) {
      store_gated<Gate::gelu_residual>();
    } else if (!up && std::is_same_v<R, __half> && p.partial) {
      // They may exceed fp16 where their sum does not.
#pragma unroll
      for (int b = 0; b < 2; ++b) store_terms(b);
    } else {
      store_rows();
    }
  }

 private:
  __device__ __forceinline__ uint32_t free_buffer() const {
    return results + warpgroup * Tile::result_bytes + buffer * Tile::pass * Tile::result_row;
  }

  __device__ __forceinline__ float scaled(int b, int i, float factor) const {
    return fp8 || !up ? acc[b][i] * scale[b][i % 4 / 2] * factor : acc[b][i];
  }

  template <Gate GATE>
  __device__ __forceinline__ float gated(int i, float factor) const {
    if constexpr (!fp8) return gated_value(acc[0][i], acc[1][i], GATE);
    return gated_codes<GATE>(acc[0][i] * scale[0][i % 4 / 2], acc[1][i] * scale[1][i % 4 / 2], factor);
  }

  template <Gate GATE>
  __device__ __forceinline__ void store_gated() {
    if constexpr (fp8) {
      store_codes<GATE>();
    } else {
      store_line<GATE>();
    }
  }

  // Rows of 16-bit results: 64 channels of each block; down: these are 128 in sequence.
  __device__ __forceinline__ void store_rows() {
    const int pack = threadIdx.x % 16, first_row = threadIdx.x % 128 / 16;  // that this thread copies
    const int first_channel = channel[0] - slab + (up ? pack % 8 : pack) * 8;
    const bool inside = first_channel < p.outputs;
    char* const out = p.out + (first_channel + (up && pack >= 8 ? p.outputs : 0)) * int64_t{2};
#pragma unroll
    for (int first = 0; first < Tile::tokens; first += Tile::pass) {
      if (first >= used) break;
      const uint32_t rows = free_buffer();
#pragma unroll
      for (int j = first / 8; j < (first + Tile::pass) / 8; ++j) {
        const float2 factor = *reinterpret_cast<const float2*>(&at.factor[8 * j + 2 * quad]);
        unsigned matrices[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int i = 4 * j + m % 2 * 2;
          matrices[m] = ptx::pack_pair<R>(make_float2(scaled(m / 2, i, factor.x), scaled(m / 2, i + 1, factor.y)));
        }
        ptx::store_matrices_transposed(
            rows + (8 * j - first + lane % 8) * Tile::result_row + lane / 16 * 128 + (slab + lane / 8 % 2 * 8) * 2,
            matrices);
      }
      ptx::named_barrier(kBarrierOfWarpgroup + warpgroup, 128);
#pragma unroll
      for (int row = 0; row < Tile::pass; row += 8) {
        const int pair = at.pair[first + row + first_row];
        if (pair >= 0 && inside) {
          *reinterpret_cast<uint4*>(out + pair * p.out_stride) =
              ptx::load_shared_uint4(rows + (row + first_row) * Tile::result_row + pack * 16);
        }
      }
      buffer ^= 1;
    }
  }

  // The gated results of 64 channels of 16 bits, 128 bytes of K of the hidden layer.
  template <Gate GATE>
  __device__ __forceinline__ void store_line() {
    const int line = at.slice * 2 + warpgroup, lines = (p.outputs * 2 + kLineBytes - 1) / kLineBytes;
    if (line >= lines) return;
    char* const out = p.out + (int64_t{at.tile} * lines + line) * Tile::x_bytes;
    const unsigned mask = channel[0] < p.outputs ? ~0u : 0u;  // the K tail is 0, where inf * 0 would be NaN
    constexpr int pass = 2 * Tile::pass;
#pragma unroll
    for (int first = 0; first < Tile::tokens; first += pass) {
      if (first >= used) break;
      const uint32_t rows = free_buffer();
#pragma unroll
      for (int j = first / 8; j < (first + pass) / 8; j += 2) {
        unsigned matrices[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int i = 4 * (j + m / 2) + m % 2 * 2;
          matrices[m] = mask & ptx::pack_pair<R>(make_float2(gated<GATE>(i, 1.f), gated<GATE>(i + 1, 1.f)));
        }
        const int n = 8 * (j + lane / 16) - first + lane % 8;
        ptx::store_matrices_transposed(rows + n * kLineBytes + ((slab / 8 + lane / 8 % 2) ^ n % 8) * 16, matrices);
      }
      ptx::fence_proxy_async();
      if (copies) {
        signal_tile(p, unsignalled);
        ptx::bulk_wait_read<0>();  // of the other buffer
      }
      ptx::named_barrier(kBarrierOfWarpgroup + warpgroup, 128);
      if (copies) {
        ptx::bulk_store(out + first * kLineBytes, rows, pass * kLineBytes);
        ptx::bulk_commit();
      }
      buffer ^= 1;
    }
  }

  // The gated results of 128 channels as FP8 codes, 128 bytes of K of the hidden layer, with a scale for each token.
  template <Gate GATE>
  __device__ __forceinline__ void store_codes() {
    if (used == 0) return;
    constexpr int tokens = Tile::tokens;
    float (&v)[tokens / 2] = acc[0];
    float largest[tokens / 4];
    gate_tile<GATE>(v, largest);
    raise_largest(largest);
    if (copies && warpgroup == 0) {
      signal_tile(p, unsignalled);
      ptx::bulk_wait_read<0>();
    }
    ptx::named_barrier(kBarrierOfLargest, Tile::consumers);
    const int lines = (p.outputs + kLineBytes - 1) / kLineBytes;
    const int64_t line = int64_t{at.tile} * lines + at.slice;
    const int thread = threadIdx.x - Tile::producers;
    if (thread < tokens) p.out_scale[line * tokens + thread] = fp8_scale(__uint_as_float(at.largest[thread]));
    stage_codes(v);
    ptx::fence_proxy_async();
    if (thread < 32) {
      ptx::named_barrier(kBarrierOfCodes, Tile::consumers);
    } else {
      ptx::named_barrier_arrive(kBarrierOfCodes, Tile::consumers);
    }
    if (copies && warpgroup == 0) {
      ptx::bulk_store(p.out + line * Tile::x_bytes, results, Tile::x_bytes);
      ptx::bulk_commit();
    }
  }

  // v: the gated results. largest: of the two channels of token 8 * (i / 2) + 2 * quad + i % 2.
  template <Gate GATE>
  __device__ __forceinline__ void gate_tile(float (&v)[Tile::tokens / 2], float (&largest)[Tile::tokens / 4]) const {
    float top = 0.f;
#pragma unroll
    for (int j = 0; j < Tile::tokens / 8; ++j) {
      const float2 factor = *reinterpret_cast<const float2*>(&at.factor[8 * j + 2 * quad]);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int i = 4 * j + c;
        const float low = gated<GATE>(i, c ? factor.y : factor.x), high = gated<GATE>(i + 2, c ? factor.y : factor.x);
        v[i] = low;
        v[i + 2] = high;
        largest[2 * j + c] = fmaxf(fabsf(low), fabsf(high));
        top = fmaxf(top, largest[2 * j + c]);
      }
    }
    if (__any_sync(0xffffffffu, top > FLT_MAX)) {
#pragma unroll
      for (int i = 0; i < Tile::tokens / 4; ++i) {
        const int at_v = i / 2 * 4 + i % 2;
        largest[i] = fmaxf(finite_magnitude(v[at_v]), finite_magnitude(v[at_v + 2]));
      }
    }
  }

  // Raises the tile's largest magnitudes. The lanes of a quad's tokens exchange halves of their maxima, until each has
  // the maxima of tokens / 32 of them.
  __device__ __forceinline__ void raise_largest(float (&largest)[Tile::tokens / 4]) const {
    constexpr int tokens = Tile::tokens;
    const auto exchange = [&](auto half_tag, int mask) {
      constexpr int half = decltype(half_tag)::value;
      const bool upper = lane & mask;
#pragma unroll
      for (int i = 0; i < half; ++i) {
        const float mine = upper ? largest[i + half] : largest[i], other = upper ? largest[i] : largest[i + half];
        largest[i] = fmaxf(mine, __shfl_xor_sync(0xffffffffu, other, mask));
      }
    };
    exchange(std::integral_constant<int, tokens / 8>(), 16);
    exchange(std::integral_constant<int, tokens / 16>(), 8);
    exchange(std::integral_constant<int, tokens / 32>(), 4);
#pragma unroll
    for (int i = 0; i < tokens / 32; ++i) {
      const int of = group * (tokens / 32) + i;
      atomicMax(&at.largest[scale_position(of / 2 * 8 + 2 * quad + of % 2)], __float_as_uint(largest[i]));
    }
  }

  // Writes the codes of the tile to shared memory.
  __device__ __forceinline__ void stage_codes(const float (&v)[Tile::tokens / 2]) const {
#pragma unroll
    for (int j = 0; j < Tile::tokens / 8; j += 4) {
      unsigned matrices[4];
#pragma unroll
      for (int m = 0; m < 4; m += 2) {
        const float4 top4 = *reinterpret_cast<const float4*>(&at.largest[(j + m) * 8 + 4 * quad]);
        const float tops[4] = {top4.x, top4.y, top4.z, top4.w};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          unsigned codes[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float inverse = ptx::rcp_approx(fmaxf(tops[2 * h + c], 1e-12f) * (1.f / kLargestE4M3));
            const int i = 4 * (j + m + h) + c;
            codes[c] = to_fp8x2(v[i] * inverse, v[i + 2] * inverse);
          }
          matrices[m + h] = codes[0] | codes[1] << 16;
        }
      }
      const int n = 8 * (j + lane / 8) + lane % 8;
      ptx::store_matrices_transposed(results + n * kLineBytes + ((warpgroup * 4 + slab / 16) ^ n % 8) * 16, matrices);
    }
  }

  // Terms of the sum over choices in float32: 8 bytes from registers.
  __device__ __forceinline__ void store_terms(int b) const {
    const int64_t at_channel = channel[b] + 2 * group, stride = p.outputs;
#pragma unroll
    for (int first = 0; first < Tile::tokens; first += 32) {
      if (first >= used) break;
#pragma unroll
      for (int j = first / 8; j < first / 8 + 4; ++j) {
        const int2 pairs = *reinterpret_cast<const int2*>(&at.pair[8 * j + 2 * quad]);
        const float2 factors = *reinterpret_cast<const float2*>(&at.factor[8 * j + 2 * quad]);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int pair = c ? pairs.y : pairs.x;
          const float factor = c ? factors.y : factors.x;
          store_if(pair >= 0 && channel[b] < p.outputs, p.partial + pair * stride + at_channel,
                   make_float2(scaled(b, 4 * j + c, factor), scaled(b, 4 * j + 2 + c, factor)));
        }
      }
    }
  }
};

}  // namespace kestrel::moe
