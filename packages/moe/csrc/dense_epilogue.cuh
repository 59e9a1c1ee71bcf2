// The epilogue of dense_wgmma_kernel: activation(sums + bias) + residual for a warp's rows of a tile.
//
// A pass takes 16 rows by 64 columns: their sums go through the warp's shared memory, after which a lane has eight
// neighbouring columns of a row. All passes run the same instructions, so that the first tile does not wait for long
// straight code to arrive.
#pragma once

#include <kestrel/pack.cuh>
#include <kestrel/ptx/math.cuh>
#include <kestrel/ptx/shared.cuh>

#include "activation.cuh"
#include "dense_params.cuh"

namespace kestrel::moe {

constexpr int kPassRows = 16, kPassColumns = 64;
constexpr int kPassBytes = kPassRows * kPassColumns * 4;

// Where 16 bytes of a row are stored, `unit` of 16: free of bank conflicts for accumulators and for eight lanes of a row.
// The address of another unit of the row is this one exclusive-or unit_bits().
__device__ __forceinline__ constexpr uint32_t unit_bits(int unit) { return (unit ^ (unit >> 3 & 1)) * 16; }

__device__ __forceinline__ uint32_t pass_unit(uint32_t buffer, int row, int unit) {
  return buffer + row * (kPassColumns * 4) + (unit_bits(unit) ^ (row & 3) << 5);
}

// sums[block] are those of rows [row + 64 block, + 16). bias: of the tile, in shared memory.
template <typename T, int N, int BLOCKS>
__device__ __forceinline__ void finish_rows(const DenseParams& p, const float (&sums)[BLOCKS][N / 2], int row,
                                            int column, uint32_t bias, uint32_t buffer, int lane) {
  constexpr int passes_of_block = (N + kPassColumns - 1) / kPassColumns;
  constexpr int iterations = kPassRows * kPassColumns / 8 / 32;
  constexpr bool few_registers = BLOCKS * N > 256;  // for more of the residual
#pragma unroll 1
  for (int pass = 0; pass < BLOCKS * passes_of_block; ++pass) {
    const int block = pass / passes_of_block, part = pass - block * passes_of_block;
    const int chunks = min(kPassColumns, N - part * kPassColumns) / 8;  // of eight columns
    const int shift = chunks > 4 ? 3 : chunks > 2 ? 2 : 1;              // lanes of a row
    const int chunk = lane & ((1 << shift) - 1), lane_row = lane >> shift, rows_of_iteration = 32 >> shift;
    const int first_row = row + block * 64, first_column = column + part * kPassColumns + chunk * 8;
    const int64_t offset = int64_t{first_column} * sizeof(T);
    const int rows_left = chunk < chunks && first_column < p.outputs ? min(p.tokens - first_row, kPassRows) : 0;
    const auto load_residual = [&](int i) {
      const int r = i * rows_of_iteration + lane_row;
      uint4 bits = make_uint4(0, 0, 0, 0);
      if (p.residual && r < rows_left) bits = load16(p.residual + (first_row + r) * p.residual_stride + offset);
      return bits;
    };
    uint4 residual[iterations];
    if constexpr (!few_registers) {
#pragma unroll
      for (int i = 0; i < iterations; ++i) residual[i] = load_residual(i);
    }
    uint32_t store_at = pass_unit(buffer, lane / 4, lane % 4 / 2) + lane % 2 * 8;
    asm volatile("" : "+r"(store_at));  // its addresses are computed where they are used, not kept
    __syncwarp();                       // the previous pass has been read
#pragma unroll
    for (int q = 0; q < BLOCKS * passes_of_block; ++q) {
      if (q == pass) {
        constexpr int groups = kPassColumns / 8;
        const int first = q % passes_of_block * groups;
#pragma unroll
        for (int j = 0; j < groups && first + j < N / 8; ++j) {
          const float* const of = sums[q / passes_of_block] + (first + j) * 4;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t to = (store_at ^ unit_bits(2 * j)) + half * (8 * kPassColumns * 4);
            ptx::store_shared(to, make_float2(of[2 * half], of[2 * half + 1]));
          }
        }
      }
    }
    __syncwarp();
    const uint32_t bias_at = bias + (part * kPassColumns + chunk * 8) * sizeof(T);
    Pack<T> bias_of;
    if constexpr (!few_registers) bias_of.bits = ptx::load_shared_uint4(bias_at);
    const auto finish = [&](auto activation) {
      constexpr int unrolled = few_registers ? 1 : iterations;
#pragma unroll unrolled
      for (int i = 0; i < iterations; ++i) {
        const int r = i * rows_of_iteration + lane_row;
        if (i * rows_of_iteration >= kPassRows) break;
        const float4 low = ptx::load_shared_float4(pass_unit(buffer, r, 2 * chunk));
        const float4 high = ptx::load_shared_float4(pass_unit(buffer, r, 2 * chunk + 1));
        float h[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}, more[8];
        if constexpr (few_registers) bias_of.bits = ptx::load_shared_uint4(bias_at);
        bias_of.unpack(more);
#pragma unroll
        for (int k = 0; k < 8; ++k) h[k] += more[k];
        activation(h);
        if (p.residual) {
          Pack<T>{few_registers ? load_residual(i) : residual[i]}.unpack(more);
#pragma unroll
          for (int k = 0; k < 8; ++k) h[k] += more[k];
        }
        Pack<T> pack;
        pack.pack(h);
        if (r < rows_left) store16(p.out + (first_row + r) * p.out_stride + offset, pack.bits);
      }
    };
    if (p.activation == LinearActivation::none) {
      finish([](float (&)[8]) {});
    } else if (p.activation == LinearActivation::gelu_tanh) {
      finish([](float (&h)[8]) {
#pragma unroll
        for (int k = 0; k < 8; k += 2) gelu_tanh(h[k], h[k + 1]);
      });
    } else {
      finish([](float (&h)[8]) {
#pragma unroll
        for (int k = 0; k < 8; ++k) h[k] = activate<Activation::gelu, T>(h[k]);
      });
    }
  }
}

}  // namespace kestrel::moe
