// From the length, alignment and number of rows to a kernel: the tile tables and the launch.
#pragma once

#include <kestrel/launch.h>

#include <iterator>
#include <type_traits>

#include "host.h"
#include "norm_cluster.cuh"
#include "norm_multi_pass.cuh"
#include "norm_single_pass.cuh"

namespace kestrel::norm {

// The kernel of a call:
//
//   bases, strides and N are                                  row's tile       kernel
//   multiples of 16 bytes                                     one CTA          norm_single_pass, aligned16
//   multiples of 8 bytes, 16-bit x and weight, not quantised  one CTA          norm_single_pass, aligned8
//   multiples of 16 bytes, no float32 weight of 16-bit x      cluster          norm_cluster, aligned16
//   anything                                                  cluster          norm_cluster, unaligned
//   multiples of 16 bytes                                     none             norm_multi_pass, aligned16
//   multiples of 16 bytes, float32 weight, > 1024 packs       one CTA          norm_multi_pass, aligned16
//   anything else                                             one CTA or none  norm_multi_pass, unaligned
//
// A GPU without clusters has no tile of a cluster. norm_multi_pass has the warps of the row's tile (32 without one), so
// the kernels of a row length sum a row in the same order.

constexpr int kWarpRowsPerBlock = 4;  // rows of a thread block whose rows have one warp each

// How a row is split. It depends on N and the dtypes alone, so a row's result does not depend on the rows around it.
struct Tile {
  int max_packs;  // the longest row, in packs of 16 bytes
  int packs_per_lane;
  int max_warps;                   // 1: a warp per row; otherwise a thread block per row
  int rows_per_block_past_l2 = 1;  // in calls whose rows exceed L2: more loads in flight per thread block
  int ctas = 1;                    // per row; more than one are a cluster, on GPUs that have them

  constexpr int warps(int packs) const {
    const int packs_per_warp = 32 * packs_per_lane * ctas;
    return max_warps == 1 ? 1 : (packs + packs_per_warp - 1) / packs_per_warp;
  }
};

// The first line with packs <= max_packs applies.
// clang-format off
inline constexpr Tile kLayerNormTiles[] = {
    // max_packs, packs_per_lane, max_warps, rows_per_block_past_l2, ctas
    {160, 5, 1},
    {256, 2, 4},
    {512, 2, 8},
    {1024, 4, 8},
};
inline constexpr Tile kRmsNormTiles[] = {
    {128, 4, 1},
    {255, 2, 8},
    {256, 4, 8},
    {512, 2, 8},
    {1024, 4, 8, 2},
    {4096, 4, 32},
    {16384, 4, 16, 1, kRowCtas},
};
inline constexpr Tile kRmsNormFusedTiles[] = {  // with a residual or a quantised output
    {128, 4, 1},
    {1024, 4, 8},
    {4096, 4, 32},
    {16384, 4, 16, 1, kRowCtas},
};
// clang-format on

template <typename S>
constexpr const auto& tiles_of() {
  if constexpr (S::layer) {
    return kLayerNormTiles;
  } else if constexpr (S::add || S::Output::quantised) {
    return kRmsNormFusedTiles;
  } else {
    return kRmsNormTiles;
  }
}

// call(line) with the index of the line that applies, as a constant; false if the row is longer than every line.
template <typename S, int line = 0, typename F>
bool with_tile(int packs, F call) {
  if constexpr (line == std::size(tiles_of<S>())) {
    return false;
  } else {
    if (packs > tiles_of<S>()[line].max_packs) return with_tile<S, line + 1>(packs, call);
    return call(std::integral_constant<int, line>());
  }
}

inline dim3 blocks(int rows, int rows_per_block) { return dim3((rows + rows_per_block - 1) / rows_per_block); }

// Prefetch and store hints by the bytes that a call reads; they never change a result.
template <typename S>
void set_cache_hints(Params* p) {
  constexpr int64_t small = 8 << 20;  // above it, loads of RMSNorm rows wait for their own prefetches
  constexpr int64_t l2 = 64 << 20;    // L2 evicts the output of a larger call before the next kernel reads it
  const int64_t read = int64_t{p->rows} * p->n * sizeof(typename S::T) * (S::add ? 2 : 1);
  if constexpr (S::layer && !S::add) {
    p->prefetch = read <= l2;
  } else {
    p->prefetch = read < small || (S::add && read > l2);
  }
  p->evict_first = !S::add && read > l2;
}

// Every line holds its longest row.
template <int count>
constexpr bool tiles_suffice(const Tile (&tiles)[count]) {
  for (const Tile& tile : tiles) {
    if (tile.warps(tile.max_packs) > tile.max_warps) return false;
    if (tile.max_warps == 1 && tile.max_packs > 32 * tile.packs_per_lane) return false;
  }
  return true;
}
static_assert(tiles_suffice(kLayerNormTiles) && tiles_suffice(kRmsNormTiles) && tiles_suffice(kRmsNormFusedTiles));

// False on a GPU without clusters.
template <typename S, int line>
bool launch_cluster(const Params& p, int packs, Access access, DLDevice device) {
  constexpr Tile tile = tiles_of<S>()[line];
  if (device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id) < 9) return false;
  const bool aligned = access == Access::aligned16 && !p.float_weight;
  const auto kernel = aligned ? norm_cluster<S, tile.packs_per_lane, tile.max_warps, Access::aligned16>
                              : norm_cluster<S, tile.packs_per_lane, tile.max_warps, Access::unaligned>;
  launch_pdl(kernel, dim3(p.rows * tile.ctas), dim3(32 * tile.warps(packs)), device, p, 0, tile.ctas,
             /*balanced=*/true);
  return true;
}

template <typename S, typename W, Access A, int line>
bool launch_tile(const Params& p, int packs, DLDevice device) {
  constexpr Tile tile = tiles_of<S>()[line];
  constexpr bool same_weight = std::is_same_v<W, typename S::T>;
  // Four-warp tiles of aligned8 rows use the kernel of eight: partial sums of absent warps are zero.
  constexpr int max_warps = A == Access::aligned8 && tile.max_warps == 4 ? 8 : tile.max_warps;
  if constexpr (tile.ctas > 1) {
    return launch_cluster<S, line>(p, packs, A, device);
  } else if constexpr (A == Access::unaligned) {
    return false;
  } else if constexpr (max_warps > 8 && !same_weight) {
    return false;  // the packs of a float32 weight exceed the registers of a thread
  } else if constexpr (max_warps == 1) {
    const auto kernel = norm_single_pass<S, W, tile.packs_per_lane, max_warps, A>;
    launch_pdl(kernel, blocks(p.rows, kWarpRowsPerBlock), dim3(32 * kWarpRowsPerBlock), device, p);
    return true;
  } else {
    const dim3 block(32 * tile.warps(packs));
    if constexpr (tile.rows_per_block_past_l2 > 1 && A == Access::aligned16 && same_weight) {
      constexpr int rows = tile.rows_per_block_past_l2;
      if (p.evict_first) {
        launch_pdl(norm_single_pass<S, W, tile.packs_per_lane, max_warps, A, rows>, blocks(p.rows, rows), block, device,
                   p);
        return true;
      }
    }
    launch_pdl(norm_single_pass<S, W, tile.packs_per_lane, max_warps, A>, dim3(p.rows), block, device, p);
    return true;
  }
}

// False if norm_multi_pass has to compute the rows.
template <typename S, typename W, Access A>
bool launch_in_registers(const Params& p, int packs, DLDevice device) {
  return with_tile<S>(packs, [&](auto line) { return launch_tile<S, W, A, line>(p, packs, device); });
}

template <typename S, Access A>
void launch_multi_pass(Params p, int packs, DLDevice device) {
  constexpr int64_t most_smem = 47 * 1024;  // with the static part below 48 KB, which needs no attribute
  int warps = kMultiPassMaxWarps;
  with_tile<S>(packs, [&](auto line) {
    constexpr Tile tile = tiles_of<S>()[line];
    if (tile.ctas == 1) warps = tile.warps(packs);
    return true;
  });
  const int rows_per_block = warps == 1 ? kWarpRowsPerBlock : 1;
  const int64_t row = (int64_t{p.n} * sizeof(typename S::T) + 15) / 16 * 16 + 16;  // the aligned words of any row
  const int64_t smem = row * rows_per_block * (S::add ? 2 : 1);
  if (A == Access::unaligned && smem <= most_smem) p.row_smem_bytes = static_cast<int>(row);
  launch_pdl(norm_multi_pass<S, A>, blocks(p.rows, rows_per_block), dim3(32 * warps, rows_per_block), device, p,
             p.row_smem_bytes > 0 ? smem : 0);
}

template <typename S>
void launch(Params p, const RowShape& shape, DLDevice device) {
  using T = typename S::T;
  constexpr int size = Pack<T>::size;
  const int packs = (p.n + size - 1) / size;
  set_cache_hints<S>(&p);
  const auto aligned = [&](int bytes) {
    const auto address = [](const void* vector) { return reinterpret_cast<uintptr_t>(vector); };
    return shape.aligned(bytes) && p.n % (bytes / sizeof(T)) == 0 && (address(p.weight) | address(p.bias)) % bytes == 0;
  };
  if (aligned(16)) {
    if constexpr (!S::layer && sizeof(T) == 2) {
      if (p.float_weight) {
        if (launch_in_registers<S, float, Access::aligned16>(p, packs, device)) return;
        return launch_multi_pass<S, Access::aligned16>(p, packs, device);
      }
    }
    if (launch_in_registers<S, T, Access::aligned16>(p, packs, device)) return;
    return launch_multi_pass<S, Access::aligned16>(p, packs, device);
  }
  if constexpr (!S::Output::quantised && sizeof(T) == 2) {
    if (aligned(8) && !p.float_weight && launch_in_registers<S, T, Access::aligned8>(p, packs, device)) return;
  }
  if (launch_in_registers<S, T, Access::unaligned>(p, packs, device)) return;
  launch_multi_pass<S, Access::unaligned>(p, packs, device);
}

// Launches the kernel for the dtype of x.
template <Norm norm, Residual residual, typename Output>
void launch(const Params& p, const RowShape& shape, const TensorView& x) {
  const DeviceGuard guard(x.device().device_id);
  dispatch_float(x, [&](auto t) { launch<Spec<norm, residual, Output, decltype(t)>>(p, shape, x.device()); });
}

}  // namespace kestrel::norm
