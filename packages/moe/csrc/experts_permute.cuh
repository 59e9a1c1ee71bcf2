// Rows of x of routed experts, quantised to FP8 into tiles of pipeline stages.
//
// experts_fp8_kernel then loads x by bulk copies, as it does the hidden layer. Each row is read and quantised once and
// written to the position of each of its pairs: [token tile][128 bytes of K][token][128 bytes, swizzled]. Scales are
// one for each row of x, or one for each token and 128 columns of a tile: [token tile][128 columns][token]. Positions
// that pad a tile are not written.
#pragma once

#include <kestrel/ptx/wgmma.cuh>

#include "experts_rows.cuh"

namespace kestrel::moe {

struct ExpertsPermuteParams {
  ExpertsQuantParams rows;  // codes and, with BLOCKS, scales: of the tiles
  const int* positions = nullptr;
  const int* topk_ids = nullptr;
  const int* expert_map = nullptr;
  int64_t ids_stride = 0;
  int choices = 0, experts = 0, mapped_experts = 0;
  int tile = 0;   // tokens
  int lines = 0;  // of 128 bytes of a row
};

template <typename T, bool BLOCKS>
__global__ void __launch_bounds__(kQuantThreads, BLOCKS ? 2 : 3)
    experts_permute_kernel(const __grid_constant__ ExpertsPermuteParams params) {
#ifdef KESTREL_HAS_WGMMA
  constexpr int size = Pack<T>::size;
  static_assert(size == 8, "rows of 16 bits");
  const ExpertsQuantParams& p = params.rows;
  __shared__ float memory[kQuantWarps];
  const int warp = threadIdx.x / 32, first_warp = warp / p.row_warps * p.row_warps, lane = threadIdx.x % 32;
  const int64_t row = int64_t{blockIdx.x} * (kQuantWarps / p.row_warps) + warp / p.row_warps;
  const bool mine = row < p.rows;
  const int end = mine ? params.lines * kLineBytes : 0;  // rows are filled up to whole lines with zeros
  const char* const x = p.x + row * p.x_stride;
  const int warp_start = (warp - first_warp) * 32 * size, stride = p.row_warps * 32 * size;
  Pack<T> kept[kQuantPacks];
  if (!p.early) pdl_wait();
  const auto load = [&](int k) {
    Pack<T> pack;
    pack.bits = make_uint4(0, 0, 0, 0);
    if (k < p.width) pack.bits = load16(x + int64_t{k} * sizeof(T));
    return pack;
  };
#pragma unroll
  for (int i = 0; i < kQuantPacks; ++i) {
    if (warp_start + i * stride < end) kept[i] = load(warp_start + i * stride + lane * size);
  }
  // Calls use(k, pack) for this thread's packs, in all lanes of a warp alike, also past the end of the row.
  const auto each_pack = [&](const auto& use) {
#pragma unroll
    for (int i = 0; i < kQuantPacks; ++i) {
      const int start = warp_start + i * stride;
      if (start < end) use(start + lane * size, kept[i]);
    }
    for (int start = warp_start + kQuantPacks * stride; start < end; start += stride) {
      const int k = start + lane * size;
      use(k, load(k));
    }
  };
  // The first line of the pair of choice `choice` in units of lines, -1: the pair has no position.
  const auto line_of = [&](int choice) {
    if (!mine || choice >= params.choices) return -1;
    int id = params.topk_ids[row * params.ids_stride + choice];
    const int position = params.positions[row * params.choices + choice];  // loaded beside the id
    if (params.expert_map) id = id >= 0 && id < params.mapped_experts ? params.expert_map[id] : -1;
    if (id < 0 || id >= params.experts) return -1;
    const int tile = position / params.tile;
    return tile * params.lines * params.tile + position - tile * params.tile;
  };
  float scale = 1.f, inverse = 1.f;
  if constexpr (!BLOCKS) {
    float largest = 0.f;
    each_pack([&](int, Pack<T> pack) { largest = fmaxf(largest, largest_magnitude(pack)); });
    largest = warp_max(largest);
    if (p.row_warps > 1) {
      if (lane == 0) memory[warp] = largest;
      __syncthreads();
      for (int i = 0; i < p.row_warps; ++i) largest = fmaxf(largest, memory[first_warp + i]);
    }
    scale = fp8_scale(largest);
    inverse = __frcp_rn(scale);
  }
  // Codes of a pack, and, of the first lane of each 128 columns, their scale.
  const auto encode = [&](Pack<T> pack) {
    if constexpr (BLOCKS) {
      scale = fp8_scale(warp_max<kScaleBlock / size>(largest_magnitude(pack)));
      inverse = __frcp_rn(scale);
    }
    const PackCodes<T> encoded(pack, scale, inverse);
    return make_uint2(encoded.words[0], encoded.words[1]);
  };
  // A warp's packs start at whole lines, so that a lane has the same bytes of a line in all of them.
  const int chunk = lane % 16 / 2, half = lane % 2 * 8;
  const auto store = [&](int start, int first, uint2 codes, float of_line) {
    if (first < 0 || start + lane * size >= end) return;
    const int64_t at = first + int64_t{(start / kLineBytes + lane / 16)} * params.tile;
    *reinterpret_cast<uint2*>(p.codes + at * kLineBytes + (chunk ^ first % 8) * 16 + half) = codes;
    if (BLOCKS && lane % 16 == 0) p.scale[at] = of_line;
  };
  uint2 codes[kQuantPacks];
  float scales[BLOCKS ? kQuantPacks : 1];
#pragma unroll
  for (int i = 0; i < kQuantPacks; ++i) {
    if (warp_start + i * stride < end) {
      codes[i] = encode(kept[i]);
      pin(codes[i].x);
      pin(codes[i].y);
    }
    if (BLOCKS) scales[BLOCKS ? i : 0] = scale;
  }
  if (p.early) pdl_wait();
  pdl_trigger();
  if (!BLOCKS && warp == first_warp && lane == 0 && mine) p.scale[row] = scale;
  const int first_line = line_of(lane);
  const auto each_choice = [&](const auto& use) {  // use(first line of the pair)
    for (int base = 0; base < params.choices; base += 32) {
      const int from = base ? line_of(base + lane) : first_line;
      for (int j = 0; j < min(32, params.choices - base); ++j) use(__shfl_sync(0xffffffffu, from, j));
    }
  };
  each_choice([&](int first) {
#pragma unroll
    for (int i = 0; i < kQuantPacks; ++i) store(warp_start + i * stride, first, codes[i], scales[BLOCKS ? i : 0]);
  });
  for (int start = warp_start + kQuantPacks * stride; start < end; start += stride) {
    const uint2 more = encode(load(start + lane * size));
    each_choice([&](int first) { store(start, first, more, scale); });
  }
#endif
}

}  // namespace kestrel::moe
