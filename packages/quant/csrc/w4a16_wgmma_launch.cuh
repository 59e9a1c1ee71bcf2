// Launches of w4a16_wgmma_kernel, w4a16_pair_kernel and w4a16_stream_kernel. Each dtype is a source of its own, so that
// they are compiled side by side.
#pragma once

#include <kestrel/tensor_map.h>

#include <algorithm>
#include <limits>

#include "w4a16_launch.h"
#include "w4a16_pairs.cuh"
#include "w4a16_stream.cuh"
#include "w4a16_wgmma.cuh"

namespace kestrel::quant::w4_wgmma {

// The tensor maps of what a stage of Tile holds.
template <typename Tile>
void set_maps(WgmmaParams* p) {
  const auto map = [](const char* address, CUtensorMapDataType type, int64_t rows, int64_t columns, int64_t stride,
                      cuuint32_t box_rows, cuuint32_t box_columns) {
    const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride)};
    const cuuint32_t box[2] = {box_columns, box_rows};
    return encode_map(address, type, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE);
  };
  const auto rows_map = [&](const char* address) {
    return map(address, CU_TENSOR_MAP_DATA_TYPE_UINT16, p->groups, p->outputs, int64_t{p->outputs} * 2,
               Tile::groups_of_part, Tile::box_rows);
  };
  constexpr int kWords = kBlockBytes / 8;  // of a block
  const auto x_map = [&](int box_rows) { return matrix_map(p->x, true, p->tokens, p->width, p->x_stride, box_rows); };
  const int of_last = p->tokens % Tile::tokens;
  p->x_map = x_map(p->tokens < Tile::tokens ? of_last : Tile::tokens);
  p->x_last_map = of_last > 0 && p->tokens > Tile::tokens ? x_map(of_last) : p->x_map;
  p->code_map = map(p->codes, CU_TENSOR_MAP_DATA_TYPE_UINT64, (p->outputs + 15) / 16, int64_t{p->blocks} * kWords,
                    int64_t{p->blocks} * kBlockBytes, Tile::rows / 16, kStep / kBlock * kWords);
  p->scale_map = rows_map(p->scales);
  p->zero_map = p->zeros ? rows_map(p->zeros) : p->scale_map;
}

// The shared memory that a CTA of Tile takes.
struct SharedBytes {
  int least, most;
};

// of_one: what a CTA alone on its SM may have, beside its static shared memory. Two CTAs fit an SM if twice their
// dynamic and static shared memory and 1 KB are at most of_one, static and 1 KB. 512: half of static, which is below 1
// KB.
template <typename Tile>
SharedBytes shared_bytes(int of_one, int ctas, DLDevice device) {
  if (Tile::occupancy == 1) return {0, of_one};
  const int least = least_shared_bytes(of_one, ctas, device);
  return {least, least > 0 ? of_one : (of_one + 1024) / 2 - 1024 - 512};
}

// p.splits: slices of K. They are a cluster, unless p.partial has memory for their sums.
template <typename T, Zeros ZEROS, typename Tile, Residual RESIDUAL>
void launch_tiles(const W4Params& params, DLDevice device) {
  WgmmaParams p;
  static_cast<W4Params&>(p) = params;
  p.scale_of_sums = WeightsOf<T, ZEROS, Tile>::scale_of_sums;
  constexpr auto kernel = w4a16_wgmma_kernel<T, ZEROS, Tile, RESIDUAL>;
  const int tiles = (p.tokens + Tile::tokens - 1) / Tile::tokens;
  p.row_tiles = (p.outputs + Tile::rows - 1) / Tile::rows;
  p.steps = (p.width + Tile::step - 1) / Tile::step;
  p.splits = std::min(p.splits, p.steps);
  if (p.splits == 1) p.partial = nullptr;
  p.cluster = p.partial ? 1 : p.splits;
  if (p.partial && p.partial_floats < int64_t{p.splits} * tiles * Tile::tokens * p.row_tiles * Tile::rows) {
    unsupported("too little scratch memory");
  }
  const int epilogue_bytes = p.partial ? 0 : Tile::epilogue_bytes(p.cluster);
  const SharedBytes shared =
      shared_bytes<Tile>(raise_shared_limit<kernel>(device), p.row_tiles * tiles * p.splits, device);
  if (epilogue_bytes + Tile::alignment > shared.most) unsupported("a cluster whose sums exceed shared memory");
  const int steps = (p.steps + p.splits - 1) / p.splits;
  p.stages = std::min({(shared.most - Tile::alignment) / Tile::bytes, Tile::max_stages, steps});
  set_maps<Tile>(&p);
  const int bytes = std::max(std::max(p.stages * Tile::bytes, epilogue_bytes) + Tile::alignment, shared.least);
  launch_pdl(kernel, dim3(p.row_tiles * p.splits, tiles), dim3(Tile::threads), device, p, bytes, p.cluster);
  if (!p.partial) return;
  // A CTA for each 8 tokens that exist: CTAs that leave at once would let the next launch put two of its CTAs on an SM.
  launch_pdl(w4a16_wgmma_sum_kernel<T, ZEROS, Tile, RESIDUAL>, dim3(p.row_tiles * Tile::warpgroups, (p.tokens + 7) / 8),
             dim3(128), device, p);
}

// A cluster of two CTAs for each tile.
template <typename T, Zeros ZEROS, typename Tile, Residual RESIDUAL>
void launch_pairs(const W4Params& params, DLDevice device) {
  WgmmaParams p;
  static_cast<W4Params&>(p) = params;
  p.scale_of_sums = WeightsOf<T, ZEROS, Tile>::scale_of_sums;
  constexpr auto kernel = w4a16_pair_kernel<T, ZEROS, Tile, RESIDUAL>;
  const int row_tiles = (p.outputs + Tile::rows - 1) / Tile::rows, tiles = (p.tokens + Tile::tokens - 1) / Tile::tokens;
  const SharedBytes shared = shared_bytes<Tile>(raise_shared_limit<kernel>(device), 2 * row_tiles * tiles, device);
  p.steps = (p.width + Tile::step - 1) / Tile::step;
  if (p.steps < 2) unsupported("pairs of CTAs for a single step of K");
  p.stages = std::min((shared.most - Tile::alignment) / Tile::bytes, Tile::max_stages);
  if (p.stages < 2) unsupported("a ring of a single stage");
  p.aligned_out = p.out_aligned_to(16);
  set_maps<Tile>(&p);
  launch_pdl(kernel, dim3(2 * row_tiles, tiles), dim3(Tile::threads), device, p,
             std::max(p.stages * Tile::bytes + Tile::alignment, shared.least), 2);
}

// ctas: persistent CTAs, of which each SM must have room for one. p.partial has memory for a flag of each and its sums.
template <typename T, Zeros ZEROS, typename Tile>
void launch_stream(const W4Params& params, int ctas, DLDevice device) {
  using Stream = StreamTile<Tile>;
  if (params.splits != 1) unsupported("slices of K with persistent CTAs");
  StreamParams p;
  static_cast<W4Params&>(p) = params;
  p.scale_of_sums = WeightsOf<T, ZEROS, Tile>::scale_of_sums;
  constexpr auto kernel = w4a16_stream_kernel<T, ZEROS, Tile>;
  const int limit = raise_shared_limit<kernel>(device);
  const int sms = device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
  p.token_tiles = (p.tokens + Tile::tokens - 1) / Tile::tokens;
  p.row_tiles = (p.outputs + Tile::rows - 1) / Tile::rows;
  p.steps = (p.width + Tile::step - 1) / Tile::step;
  const int64_t steps = int64_t{p.row_tiles} * p.steps;
  if (steps > std::numeric_limits<int>::max()) unsupported("a weight of more than 2^31 steps");
  p.row_ctas = static_cast<int>(std::min<int64_t>(std::min({ctas, sms, kMaxStreamCtas}) / p.token_tiles, steps));
  if (p.row_ctas < 1) unsupported("more tiles of tokens than CTAs");
  p.share = static_cast<int>(steps / p.row_ctas);
  p.rest = static_cast<int>(steps % p.row_ctas);
  ctas = p.row_ctas * p.token_tiles;
  p.stages = std::min((limit - Tile::alignment) / Tile::bytes, Tile::max_stages);
  p.aligned_out = p.out_aligned_to(16);
  set_maps<Tile>(&p);
  if (p.row_tiles % p.row_ctas != 0) {  // some tiles belong to several CTAs
    if (p.partial_floats < kMaxStreamCtas + int64_t{ctas} * (Stream::slot_bytes / 4)) {
      unsupported("too little scratch memory");
    }
    p.flags = reinterpret_cast<uint32_t*>(p.partial);
    p.partial += kMaxStreamCtas;
    launch_pdl(w4a16_stream_flags_kernel<T, ZEROS>, dim3(1), dim3(kMaxStreamCtas), device, p);
  }
  launch_pdl(kernel, dim3(ctas), dim3(Tile::threads), device, p, p.stages * Tile::bytes + Tile::alignment);
}

constexpr int kMostResidualTokens = 64;  // tiles of more have no kernels that add a residual

// Tokens of a CTA, then blocks of 64 rows of a warpgroup, warpgroups, k of a stage, products of 32 k started together,
// CTAs per SM, batches in flight. False: no kernel adds the residual, and nothing was launched. The number of a tile is
// its place in TILES of src/kestrel_quant/_w4_plan.py.
template <typename T, Zeros ZEROS, int GROUP>
bool launch_group(const W4Params& p, int tile, DLDevice device) {
  const auto launch = [&](auto of) {
    using Tile = decltype(of);
    if constexpr (GROUP == 128 && Tile::tokens <= kMostResidualTokens) {
      if (p.residual) launch_tiles<T, ZEROS, Tile, Residual::added>(p, device);
    } else if (p.residual) {
      return false;
    }
    if (!p.residual) launch_tiles<T, ZEROS, Tile, Residual::none>(p, device);
    return true;
  };
  switch (tile) {
    case 0:
      return launch(WgmmaTile<16, GROUP, 1, 2, 256, 1, 2, 2>());
    case 1:
      return launch(WgmmaTile<32, GROUP, 1, 2, 128, 1, 2, 2>());
    case 2:
      return launch(WgmmaTile<32, GROUP, 1, 4, 256, 2, 1, 2>());
    case 3:
      return launch(WgmmaTile<64, GROUP, 1, 2, 128, 1, 2, 2>());
    case 4:
      return launch(WgmmaTile<64, GROUP, 1, 4, 256, 2, 1, 2>());
    case 5:
      return launch(WgmmaTile<96, GROUP, 1, 2, 128, 1, 1, 2>());
  }
  unsupported("a tile of this number");
  return false;
}

// The same for w4a16_pair_kernel, in the order of PAIR_TILES.
template <typename T, Zeros ZEROS, int GROUP>
bool launch_group_pairs(const W4Params& p, int tile, DLDevice device) {
  const auto launch = [&](auto of) {
    using Tile = decltype(of);
    if constexpr (GROUP == 128 && Tile::tokens <= kMostResidualTokens) {
      if (p.residual) launch_pairs<T, ZEROS, Tile, Residual::added>(p, device);
    } else if (p.residual) {
      return false;
    }
    if (!p.residual) launch_pairs<T, ZEROS, Tile, Residual::none>(p, device);
    return true;
  };
  switch (tile) {
    case 0:
      return launch(WgmmaTile<16, GROUP, 1, 2, 128, 1, 2, 2>());
    case 1:
      return launch(WgmmaTile<16, GROUP, 1, 2, 256, 1, 2, 2>());
    case 2:
      return launch(WgmmaTile<32, GROUP, 1, 2, 128, 1, 2, 2>());
    case 3:
      return launch(WgmmaTile<32, GROUP, 1, 2, 256, 1, 2, 2>());
    case 4:
      return launch(WgmmaTile<64, GROUP, 1, 2, 128, 1, 2, 2>());
    case 5:
      return launch(WgmmaTile<80, GROUP, 1, 2, 128, 1, 2, 2>());
    case 6:
      return launch(WgmmaTile<96, GROUP, 1, 2, 128, 1, 2, 2>());
    case 7:
      return launch(WgmmaTile<112, GROUP, 1, 2, 128, 1, 1, 4>());
    case 8:
      return launch(WgmmaTile<128, GROUP, 1, 2, 128, 1, 1, 4>());
    case 9:
      return launch(WgmmaTile<128, GROUP, 1, 3, 128, 1, 1, 4>());
    case 10:
      return launch(WgmmaTile<160, GROUP, 1, 2, 128, 1, 1, 4>());
    case 11:
      return launch(WgmmaTile<160, GROUP, 1, 3, 128, 1, 1, 4>());
    case 12:
      return launch(WgmmaTile<192, GROUP, 1, 2, 128, 1, 1, 4>());
    case 13:
      return launch(WgmmaTile<192, GROUP, 1, 3, 128, 1, 1, 2>());
    case 14:
      return launch(WgmmaTile<224, GROUP, 1, 2, 128, 1, 1, 4>());
    case 15:
      return launch(WgmmaTile<256, GROUP, 1, 2, 128, 1, 1, 4>());
  }
  unsupported("a tile of this number");
  return false;
}

// The same for w4a16_stream_kernel, in the order of STREAM_TILES.
template <typename T, Zeros ZEROS, int GROUP>
bool launch_group_stream(const W4Params& p, int tile, int ctas, DLDevice device) {
  if (p.residual) return false;
  const auto launch = [&](auto of) {
    launch_stream<T, ZEROS, decltype(of)>(p, ctas, device);
    return true;
  };
  switch (tile) {
    case 0:
      return launch(WgmmaTile<96, GROUP, 1, 3, 128, 1, 1, 4>());
    case 1:
      return launch(WgmmaTile<128, GROUP, 1, 2, 128, 1, 1, 4>());
    case 2:
      return launch(WgmmaTile<128, GROUP, 1, 3, 128, 1, 1, 4>());
    case 3:
      return launch(WgmmaTile<160, GROUP, 1, 2, 128, 1, 1, 4>());
    case 4:
      return launch(WgmmaTile<160, GROUP, 1, 3, 128, 1, 1, 4>());
    case 5:
      return launch(WgmmaTile<192, GROUP, 1, 2, 128, 1, 1, 4>());
    case 6:
      return launch(WgmmaTile<192, GROUP, 1, 3, 128, 1, 1, 2>());
    case 7:
      return launch(WgmmaTile<256, GROUP, 1, 2, 128, 1, 1, 4>());
    case 8:
      return launch(WgmmaTile<224, GROUP, 1, 2, 128, 1, 1, 4>());
  }
  unsupported("a tile of this number");
  return false;
}

template <typename T, Zeros ZEROS>
bool launch(const W4Params& p, int tile, int ctas, DLDevice device) {
  const auto launch_for = [&](auto group) {
    constexpr int GROUP = decltype(group)::value;
    if (ctas > 0 && p.splits == 2) return launch_group_pairs<T, ZEROS, GROUP>(p, tile, device);
    if (ctas > 0) return launch_group_stream<T, ZEROS, GROUP>(p, tile, ctas, device);
    return launch_group<T, ZEROS, GROUP>(p, tile, device);
  };
  if (p.group == 32) return launch_for(std::integral_constant<int, 32>());
  if (p.group == 64) return launch_for(std::integral_constant<int, 64>());
  return launch_for(std::integral_constant<int, 128>());
}

}  // namespace kestrel::quant::w4_wgmma
