// What the entry points of the rotary ops share: Params from the arguments, the choice of a tile, the launch.
#pragma once

#include <kestrel/launch.h>
#include <kestrel/rotary.h>
#include <kestrel/tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "rotate_heads.cuh"

namespace kestrel::rope {

constexpr int64_t kMostHeads = 1 << 28;  // also the limit of frequencies; rows: 2^31

// Row strides of a tensor whose dimensions first .. first + count - 1 are the rows. The stride of a dimension of size 1
// is arbitrary and taken as 0.
inline void set_row_strides(const TensorView& t, int first, int count, int64_t (&stride)[2]) {
  const int bytes = element_bytes(t);
  const auto stride_of = [&](int d) { return t.size(d) == 1 ? 0 : t.stride(d) * bytes; };
  stride[0] = count == 2 ? stride_of(first) : 0;
  stride[1] = stride_of(first + count - 1);
  if (count == 2 && t.size(first + 1) == 1) stride[1] = stride[0];  // then all rows are one stride apart
}

inline void set_heads(const TensorView& t, int row_dims, int64_t head_size, int64_t offset, Heads* heads) {
  const bool flat = t.ndim() == row_dims + 1;
  heads->base = address(t) + offset * element_bytes(t);
  set_row_strides(t, 0, row_dims, heads->row_stride);
  const int64_t count = flat ? t.size(-1) / head_size : t.size(-2);
  if (count > kMostHeads) unsupported("more than 2^28 heads");
  heads->count = static_cast<int>(count);
  heads->head_stride = (flat ? head_size : count == 1 ? 0 : t.stride(-2)) * element_bytes(t);
}

inline bool aligned(const Heads& heads) {
  return aligned16(heads.base) && (heads.row_stride[0] | heads.row_stride[1] | heads.head_stride) % 16 == 0;
}

struct Call {
  Params p;
  Pairs pairs = Pairs::neox;
  Access access = Access::elements;  // packs: bases and strides of heads (and of the table, with one position) allow it
};

// Fills the parameters from arguments that have passed the checks; false when there is nothing to rotate. `axes`:
// leading dimensions of positions that are not rows.
inline bool prepare(const TensorView& positions, int axes, const TensorView& query, const OptionalTensor& key,
                    int64_t head_size, int64_t offset, const TensorView& table, Call* call) {
  Params& p = call->p;
  const int row_dims = positions.ndim() - axes;
  const int64_t outer = row_dims == 2 ? positions.size(-2) : 1, inner = positions.size(-1);
  if (outer == 0 || inner == 0 || table.size(0) == 0) return false;
  constexpr int64_t most_rows = std::numeric_limits<int>::max() - 1024;
  if (outer > most_rows / inner || table.size(1) / 2 > kMostHeads)
    unsupported("more than 2^31 rows, or 2^28 frequencies");

  set_heads(query, row_dims, head_size, offset, &p.query);
  if (key.has_value()) set_heads(*key, row_dims, head_size, offset, &p.key);
  p.positions = address(positions);
  set_row_strides(positions, axes, row_dims, p.position_stride);
  p.axis_stride = axes > 0 ? positions.stride(0) * element_bytes(positions) : 0;
  p.int64_positions = element_bytes(positions) == 8;
  p.rows = static_cast<int>(outer * inner);
  const auto one_stride = [&](const int64_t (&stride)[2]) { return stride[0] == stride[1] * inner; };
  const bool flat = outer == 1 || (one_stride(p.position_stride) && one_stride(p.query.row_stride) &&
                                   (!key.has_value() || one_stride(p.key.row_stride)));
  p.inner_rows = flat ? 0 : static_cast<unsigned>(inner);
  p.half = static_cast<int>(table.size(1) / 2);
  p.table = address(table);
  p.table_rows = table.size(0);
  p.table_stride = table.size(0) == 1 ? 0 : table.stride(0) * element_bytes(table);
  const int pack = 16 / element_bytes(query);
  const bool packs = aligned(p.query) && (!key.has_value() || aligned(p.key)) && p.half % pack == 0 &&
                     (axes > 0 || (aligned16(p.table) && p.table_stride % 16 == 0));
  call->access = packs ? Access::packs : Access::elements;
  return p.query.count + p.key.count > 0;
}

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// A thread block of at most `threads` threads, each with `heads_per_thread` heads.
struct Tile {
  int heads_per_thread, threads;
};

// Grid and block of a tile; `slices`: threads that share a head.
struct LaunchShape {
  LaunchShape(const Params& p, int slices, Tile tile) {
    const int heads = p.query.count + p.key.count;
    const int x = std::min(slices, tile.threads);
    const int groups = ceil_div(heads, int64_t{tile.heads_per_thread} * (tile.threads / x));
    const int y = ceil_div(heads, int64_t{tile.heads_per_thread} * groups);
    const int z = std::min(tile.threads / (x * y), 64);
    block = dim3(x, y, z);
    grid = dim3(ceil_div(p.rows, z), groups, ceil_div(slices, x));
  }
  int64_t blocks() const { return int64_t{grid.x} * grid.y * grid.z; }

  dim3 grid, block;
};

// Thread blocks that an SM holds at once, from the registers per thread of the kernels on Hopper, in multiples of 8.
template <typename S>
int blocks_per_sm(const LaunchShape& shape, int heads_per_thread) {
  constexpr bool float_x = sizeof(typename S::T) == 4, float_table = sizeof(typename S::W) == 4;
  constexpr int with_two = float_x ? 40 : float_table ? 72 : 64, with_four = float_x ? 64 : float_table ? 128 : 96;
  const int warps = ceil_div(shape.block.x * shape.block.y * shape.block.z, 32);
  return std::min(65536 / ((heads_per_thread == 2 ? with_two : with_four) * 32 * warps), 64 / warps);
}

// The tile of a call that moves packs, and the cache hints; neither changes a result. In the order of the conditions:
//   at most 200 pairs of packs per SM (latency-bound) -> 1 head per thread, blocks of 64: many small blocks
//   a tile whose grid fills at most half of the GPU   -> the first such tile: two launches are resident together
//   otherwise                                         -> the tile whose grid fills one wave best, above 80 %
// Under PDL, blocks of the next launch may occupy SMs before the last blocks of this launch have started. Those last
// blocks then share the few SMs that become free first. The second and third choice avoid that. Rows are prefetched
// up to 2048 pairs of packs per SM, as many as it has threads, unless a thread has four heads.
template <typename S>
Tile choose_tile(Params* p, DLDevice device) {
  const int slices = ceil_div(p->half, S::frequencies);
  const int64_t sms = device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
  const int64_t pack_pairs = int64_t{p->rows} * (p->query.count + p->key.count) * slices;
  p->evict_first = pack_pairs * 32 > device_attribute(cudaDevAttrL2CacheSize, device.device_id) / 2;
  p->prefetch = pack_pairs <= 2048 * sms;
  if (pack_pairs <= 200 * sms) return {1, 64};

  Tile best{2, 128};
  float best_fill = 0.8f;
  for (Tile tile : {Tile{2, 256}, Tile{4, 128}, Tile{4, 256}, Tile{2, 128}}) {
    const LaunchShape shape(*p, slices, tile);
    const int per_sm = blocks_per_sm<S>(shape, tile.heads_per_thread);
    if (2 * ceil_div(shape.blocks(), sms) <= per_sm) return tile;
    const float fill = static_cast<float>(shape.blocks()) / static_cast<float>(per_sm * sms);
    if (fill > best_fill && fill <= 1.f) best_fill = fill, best = tile;
  }
  p->prefetch = p->prefetch && best.heads_per_thread == 2;
  return best;
}

template <typename S, int HEADS_PER_THREAD>
void launch_tile(const Params& p, int threads, DLDevice device) {
  const LaunchShape shape(p, ceil_div(p.half, S::frequencies), {HEADS_PER_THREAD, threads});
  if (shape.grid.y > 65535 || shape.grid.z > 65535) unsupported("more than a million heads or frequencies");
  launch_pdl(rotate_heads<S, HEADS_PER_THREAD>, shape.grid, shape.block, device, p);
}

template <typename T, typename W, Pairs pairs, Positions positions>
void launch(const Call& call, DLDevice device) {
  if (call.access == Access::elements) {
    return launch_tile<Spec<T, W, pairs, Access::elements, positions>, 4>(call.p, 128, device);
  }
  using S = Spec<T, W, pairs, Access::packs, positions>;
  Params p = call.p;
  const Tile tile = choose_tile<S>(&p, device);
  if (S::multimodal || tile.heads_per_thread == 2) {
    launch_tile<S, 2>(p, tile.threads, device);
  } else if constexpr (!S::multimodal) {
    tile.heads_per_thread == 1 ? launch_tile<S, 1>(p, tile.threads, device)
                               : launch_tile<S, 4>(p, tile.threads, device);
  }
}

// Launches the kernel for the dtypes of query and table and the order of the pairs.
template <Positions positions>
void launch(const Call& call, const TensorView& query, const TensorView& table) {
  const DeviceGuard guard(query.device().device_id);
  dispatch_float(query, [&](auto element) {
    using T = decltype(element);
    const auto with_table = [&](auto angle) {
      using W = decltype(angle);
      call.pairs == Pairs::neox ? launch<T, W, Pairs::neox, positions>(call, query.device())
                                : launch<T, W, Pairs::gptj, positions>(call, query.device());
    };
    same_dtype(table.dtype(), kFloat32) ? with_table(float()) : with_table(element);
  });
}

}  // namespace kestrel::rope
