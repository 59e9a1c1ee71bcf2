// Quantisation of the rows of x inside the kernel that multiplies them.
#pragma once

#include <kestrel/ptx/shared.cuh>

#include "experts_rows.cuh"

namespace kestrel::moe {

// Quantises the rows of a tile, with the codes of fp8_quant: into [128 columns][token][128 bytes], and one scale per
// token, or [token][128 columns] with p.x_blocks. All threads of the CTA take part; the first packs of a row wait in
// registers between load() and store().
template <typename Tile, int ELEMENT_BYTES>
struct RowQuantiser {
  static constexpr int size = 16 / ELEMENT_BYTES, kept = 2;
  uint4 first_packs[kept];
  const char* row;  // of this thread's token
  int token, warps, start, stride;
  bool mine;  // whether there is such a token

  // row_of: the row of a token of the tile.
  template <typename F>
  __device__ __forceinline__ void load(const ExpertsParams& p, int count, const F& row_of) {
    warps = Tile::warps;  // of each token
    while (warps > 1 && warps * count > Tile::warps) warps /= 2;
    const int warp = threadIdx.x / 32;
    token = warp / warps;
    mine = token < count;
    row = p.x + (mine ? row_of(token) : 0) * p.x_stride;
    start = (threadIdx.x - token * warps * 32) * size;
    stride = warps * 32 * size;
#pragma unroll
    for (int i = 0; i < kept; ++i) {
      if (mine && start + i * stride < p.width)
        first_packs[i] = load16(row + int64_t{start + i * stride} * ELEMENT_BYTES);
    }
  }

  // Calls use(k, pack) for this thread's packs, the same number in all lanes of a warp, past the end of the row too.
  template <typename T, typename F>
  __device__ __forceinline__ void each_pack(const ExpertsParams& p, const F& use) {
    const int lane_offset = threadIdx.x % 32 * size, end = (p.width + kScaleBlock - 1) / kScaleBlock * kScaleBlock;
    Pack<T> pack;
#pragma unroll
    for (int i = 0; i < kept; ++i) {
      const int k = start + i * stride;
      pack.bits = first_packs[i];
      if (k - lane_offset < end) use(k, pack);
    }
#pragma unroll 2
    for (int k = start + kept * stride; k - lane_offset < end; k += stride) {
      if (k < p.width) pack.bits = load16(row + int64_t{k} * ELEMENT_BYTES);
      use(k, pack);
    }
  }

  // Barriers must precede and follow.
  template <typename T>
  __device__ __forceinline__ void store(const ExpertsParams& p, uint32_t codes, float* scales, bool wgmma) {
    __shared__ float largest_of_warp[Tile::warps];
    const int end = (p.width + kScaleBlock - 1) / kScaleBlock * kScaleBlock;
    const auto store_pack = [&](int k, Pack<T> pack, float scale) {  // zeros past the end of a row
      if (k >= end) return;
      const uint32_t to = codes + k / kScaleBlock * Tile::x_bytes + token * kLineBytes +
                          (k % kScaleBlock / 16 ^ (wgmma ? token % 8 : token % 2 * 4)) * 16 + k % 16;
      const PackCodes<T> encoded(pack, scale, __frcp_rn(scale));
#pragma unroll
      for (int i = 0; i < size / 4; ++i) {
        ptx::store_shared(to + 4 * i, __uint_as_float(k < p.width ? encoded.words[i] : 0u));
      }
    };
    if (p.x_blocks) {
      if (!mine) return;
      each_pack<T>(p, [&](int k, Pack<T> pack) {
        const float scale = fp8_scale(warp_max<kScaleBlock / size>(k < p.width ? largest_magnitude(pack) : 0.f));
        store_pack(k, pack, scale);
        if (k < end && k % kScaleBlock == 0) scales[token * (kWidthQuantised / kScaleBlock) + k / kScaleBlock] = scale;
      });
      return;
    }
    float largest = 0.f;
    if (mine) {
      each_pack<T>(p, [&](int k, Pack<T> pack) {
        if (k < p.width) largest = fmaxf(largest, largest_magnitude(pack));
      });
    }
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) largest_of_warp[threadIdx.x / 32] = largest;
    __syncthreads();
    if (!mine) return;
    largest = 0.f;
    for (int i = 0; i < warps; ++i) largest = fmaxf(largest, largest_of_warp[token * warps + i]);
    const float scale = fp8_scale(largest);
    if (start == 0) scales[token] = scale;
    each_pack<T>(p, [&](int k, Pack<T> pack) { store_pack(k, pack, scale); });
  }
};

}  // namespace kestrel::moe
