// The tiles of experts_fp8.cuh, and the epilogue of one of its warps: codes of the hidden layer, terms of the sum over
// choices, or rows.
#pragma once

#include <kestrel/fp8.cuh>
#include <kestrel/ptx/matrix.cuh>
#include <kestrel/ptx/shared.cuh>
#include <kestrel/ptx/tma.cuh>

#include "experts_tma_tiles.cuh"

namespace kestrel::moe {

template <int CLUSTER_>
struct Fp8Tile {
  static constexpr int tokens = 128, cluster = CLUSTER_, my_tokens = 64;                               // of a warpgroup
  static constexpr int rows = 256, half_rows = 128, half_groups = half_rows / 16, blocks = rows / 64;  // of weights
  static constexpr int weight_bytes = rows * kLineBytes, stage_bytes = (rows + tokens) * kLineBytes;
  static constexpr int my_x_bytes = my_tokens * kLineBytes, x_bytes = tokens * kLineBytes;
  static constexpr bool gathers = false;
  static constexpr int stages = 4, entries = 3;
  // Results of a warp on their way to memory: 8 tokens of 128 channels of 16 bits, in rows that are padded against bank
  // conflicts, or the codes of its 16 tokens.
  static constexpr int result_row = 256 + 16, result_bytes = 8 * result_row;
  static_assert(result_bytes >= 16 * kLineBytes, "the codes fit");
  static constexpr int alignment = 1024;
  static constexpr int shared_bytes = stages * stage_bytes + 8 * result_bytes + alignment;
  static constexpr int producers = 128, consumers = 256, threads = producers + consumers;
};

// What the roles of a CTA share.
template <typename Tile>
struct Fp8Shared {
  using Entry = TileEntry<TileTokens<Tile::tokens>, Tile::rows>;
  Entry entries[Tile::entries];
  TmaBarriers<Tile> barriers;
  alignas(16) float stage_scales[Tile::stages][Tile::tokens];     // of x, with p.x_blocks
  alignas(16) float block_scales[Tile::stages][Tile::rows / 16];  // of 16 weight rows each, with p.scale_rank 3
};

template <typename R, Projection PROJECTION, typename Tile>
struct Fp8Epilogue {
  static constexpr bool up = PROJECTION == Projection::up;
  static constexpr int U = Tile::my_tokens, B = Tile::blocks;
  static constexpr int channels = up ? Tile::half_rows : Tile::rows;  // of the result, for a tile
  using Entry = typename Fp8Shared<Tile>::Entry;
  // Of a thread: [b][4 * j + 2 * r + c], of token group + 8 * r of this warp's and weight row 64 * b + 8 * j + 2 * quad
  // + c.
  using Sums = float[B][U / 2];

  const ExpertsParams& p;
  const Entry& at;
  Sums& acc;
  const int lane, first_token;
  const uint32_t my_results;
  int& unsignalled;
  const int group = lane / 4, quad = lane % 4;
  float factor[2];
  int pair[2];

  __device__ __forceinline__ void store() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factor[r] = at.factor[first_token + group + 8 * r];
      pair[r] = at.pair[first_token + group + 8 * r];
    }
    if constexpr (!up) {
      if (std::is_same_v<R, __half> && p.partial) {
        store_terms();
      } else {
        store_rows();
      }
    } else if (p.gate == Gate::silu_and_mul) {
      store_codes<Gate::silu_and_mul>();
    } else if (p.gate == Gate::gelu_and_mul) {
      store_codes<Gate::gelu_and_mul>();
    } else {
      store_codes<Gate::gelu_residual>();
    }
  }

 private:
  // Of the two weight rows of this thread.
  __device__ __forceinline__ float2 scale_of(int b, int j) const {
    if (p.scale_rank == 3) return make_float2(1.f, 1.f);
    return *reinterpret_cast<const float2*>(&at.scale[64 * b + 8 * j + 2 * quad]);
  }

  // The gated results of 128 channels as FP8 codes, 128 bytes of K of the hidden layer, with a scale for each token.
  template <Gate GATE>
  __device__ __forceinline__ void store_codes() {
    float largest[2] = {0.f, 0.f};
    gate_tile<GATE>(largest);
    if (lane == 0) {  // the codes of the tile before have been copied
      signal_tile(p, unsignalled);
      ptx::bulk_wait_read<0>();
    }
    __syncwarp();
    const int lines = (p.outputs + kLineBytes - 1) / kLineBytes;
    const int64_t line = int64_t{at.tile} * lines + at.slice;
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      inverse[r] = ptx::rcp_approx(fmaxf(largest[r], 1e-12f) * (1.f / kLargestE4M3));
      if (quad == 0) {
        p.out_scale[line * Tile::tokens + first_token + group + 8 * r] = fp8_scale(largest[r]);
      }
    }
    stage_codes(inverse);
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      ptx::bulk_store(p.out + line * Tile::x_bytes + first_token * kLineBytes, my_results, 16 * kLineBytes);
      ptx::bulk_commit();
    }
  }

  // acc[0] and acc[1]: the gated results. largest: their magnitudes, of tokens group and group + 8.
  template <Gate GATE>
  __device__ __forceinline__ void gate_tile(float (&largest)[2]) const {
#pragma unroll
    for (int b = 0; b < B / 2; ++b) {
#pragma unroll
      for (int j = 0; j < U / 8; ++j) {
        const float2 low = scale_of(b, j), high = scale_of(b + B / 2, j);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          acc[b][4 * j + i] = gated_codes<GATE>(acc[b][4 * j + i] * (i % 2 ? low.y : low.x),
                                                acc[b + B / 2][4 * j + i] * (i % 2 ? high.y : high.x), factor[i / 2]);
          largest[i / 2] = fmaxf(largest[i / 2], fabsf(acc[b][4 * j + i]));
        }
      }
    }
    if (__any_sync(0xffffffffu, fmaxf(largest[0], largest[1]) > FLT_MAX)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        largest[r] = 0.f;
#pragma unroll
        for (int i = 2 * r; i < U / 2; i += i % 2 ? 3 : 1) {
          largest[r] = fmaxf(largest[r], fmaxf(finite_magnitude(acc[0][i]), finite_magnitude(acc[1][i])));
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 1));
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 2));
    }
  }

  // Writes the codes to shared memory. Neighbouring lanes exchange pairs of codes: the even one has four of group j,
  // the odd one of group j + 1.
  __device__ __forceinline__ void stage_codes(const float (&inverse)[2]) const {
    const uint32_t mine = my_results + group * kLineBytes + quad / 2 * 4 + quad % 2 * 8;
#pragma unroll
    for (int b = 0; b < B / 2; ++b) {
#pragma unroll
      for (int j = 0; j < U / 8; j += 2) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* const v = &acc[b][4 * j + 2 * r];
          const unsigned codes =
              to_fp8x2(v[0] * inverse[r], v[1] * inverse[r]) | to_fp8x2(v[4] * inverse[r], v[5] * inverse[r]) << 16;
          const unsigned other = __shfl_xor_sync(0xffffffffu, codes, 1);
          const unsigned word = quad % 2 ? __byte_perm(other, codes, 0x7632) : __byte_perm(codes, other, 0x5410);
          ptx::store_shared(mine + 8 * r * kLineBytes + ((b * 4 + j / 2) ^ group) * 16, __uint_as_float(word));
        }
      }
    }
  }

  // Terms of the sum over choices in float32: they may exceed fp16 where their sum does not.
  __device__ __forceinline__ void store_terms() const {
#pragma unroll
    for (int b = 0; b < B; ++b) {
      const int first_channel = at.slice * channels + 64 * b + 2 * quad;
#pragma unroll
      for (int j = 0; j < U / 8; ++j) {
        const float2 scale = scale_of(b, j);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* const v = &acc[b][4 * j + 2 * r];
          store_if(pair[r] >= 0 && first_channel + 8 * j < p.outputs,
                   p.partial + pair[r] * int64_t{p.outputs} + first_channel + 8 * j,
                   make_float2(v[0] * scale.x * factor[r], v[1] * scale.y * factor[r]));
        }
      }
    }
  }

  // Rows of 16-bit results through shared memory, 8 tokens and 128 channels at a time.
  __device__ __forceinline__ void store_rows() const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int first_channel = at.slice * channels + h * 128 + lane % 16 * 8;
      const bool inside = first_channel < p.outputs;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
          unsigned matrices[4];
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const int b = 2 * h + (j + m) / 8, jj = (j + m) % 8;
            const float2 scale = scale_of(b, jj);
            const float* const v = &acc[b][4 * jj + 2 * r];
            matrices[m] = ptx::pack_pair<R>(make_float2(v[0] * scale.x * factor[r], v[1] * scale.y * factor[r]));
          }
          ptx::store_matrices(my_results + lane % 8 * Tile::result_row + (j + lane / 8) * 16, matrices);
        }
        __syncwarp();
#pragma unroll
        for (int row = 0; row < 8; row += 2) {
          const int of_row = at.pair[first_token + 8 * r + row + lane / 16];
          if (of_row >= 0 && inside) {
            *reinterpret_cast<uint4*>(p.out + first_channel * int64_t{2} + of_row * p.out_stride) =
                ptx::load_shared_uint4(my_results + (row + lane / 16) * Tile::result_row + lane % 16 * 16);
          }
        }
        __syncwarp();
      }
    }
  }
};

}  // namespace kestrel::moe
