// The host side that the rotary ops share: arguments to Params, and the launch.
#pragma once

#include <kestrel/launch.h>
#include <kestrel/rotary.h>
#include <kestrel/tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "rotate_heads.cuh"

namespace kestrel::rope {

constexpr int64_t kMost = 1 << 28;  // heads, or frequencies; rows are 2^31

// Of a tensor whose `count` dimensions from `first` on are the rows; a dimension of size 1 has no stride of its own.
inline void set_row_strides(const TensorView& t, int first, int count, int64_t (&stride)[2]) {
  const int bytes = element_bytes(t);
  const auto of = [&](int d) { return t.size(d) == 1 ? 0 : t.stride(d) * bytes; };
  stride[0] = count == 2 ? of(first) : 0;
  stride[1] = of(first + count - 1);
  if (count == 2 && t.size(first + 1) == 1) stride[1] = stride[0];
}

inline void set_heads(const TensorView& t, int row_dims, int64_t head_size, int64_t offset, Heads* heads) {
  const bool flat = t.ndim() == row_dims + 1;
  heads->base = address(t) + offset * element_bytes(t);
  set_row_strides(t, 0, row_dims, heads->row_stride);
  const int64_t count = flat ? t.size(-1) / head_size : t.size(-2);
  if (count > kMost) unsupported("more than 2^28 heads");
  heads->count = static_cast<int>(count);
  heads->head_stride = (flat ? head_size : count == 1 ? 0 : t.stride(-2)) * element_bytes(t);
}

inline bool aligned(const Heads& heads) {
  return aligned16(heads.base) && (heads.row_stride[0] | heads.row_stride[1] | heads.head_stride) % 16 == 0;
}

struct Call {
  Params p;
  bool neox = true;
  bool vectors = false;  // heads may be read and written in packs; the table too, unless it is read by axes
};

// Fills the parameters from arguments that have passed the checks; false when there is nothing to turn. The rows begin
// at dimension `axes` of positions.
inline bool prepare(const TensorView& positions, int axes, const TensorView& query, const OptionalTensor& key,
                    int64_t head_size, int64_t offset, const TensorView& table, Call* call) {
  Params& p = call->p;
  const int row_dims = positions.ndim() - axes;
  const int64_t outer = row_dims == 2 ? positions.size(-2) : 1, inner = positions.size(-1);
  if (outer == 0 || inner == 0 || table.size(0) == 0) return false;
  constexpr int64_t most_rows = std::numeric_limits<int>::max() - 1024;
  if (outer > most_rows / inner || table.size(1) / 2 > kMost) unsupported("more than 2^31 rows, or 2^28 frequencies");

  set_heads(query, row_dims, head_size, offset, &p.query);
  if (key.has_value()) set_heads(*key, row_dims, head_size, offset, &p.key);
  p.positions = address(positions);
  set_row_strides(positions, axes, row_dims, p.position_stride);
  p.axis_stride = axes > 0 ? positions.stride(0) * element_bytes(positions) : 0;
  p.wide = element_bytes(positions) == 8;
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
  call->vectors = aligned(p.query) && (!key.has_value() || aligned(p.key)) && p.half % pack == 0 &&
                  (axes > 0 || (aligned16(p.table) && p.table_stride % 16 == 0));
  return p.query.count + p.key.count > 0;
}

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// How the pieces of a call are laid out over blocks of at most `threads`, `heads` heads to a thread.
struct Layout {
  Layout(const Params& p, int pieces, int heads, int threads) {
    const int all = p.query.count + p.key.count;
    const int x = std::min(pieces, threads);
    const int groups = ceil_div(all, int64_t{heads} * (threads / x));
    const int y = ceil_div(all, int64_t{heads} * groups);
    const int z = std::min(threads / (x * y), 64);
    block = dim3(x, y, z);
    grid = dim3(ceil_div(p.rows, z), groups, ceil_div(pieces, x));
  }
  int64_t blocks() const { return int64_t{grid.x} * grid.y * grid.z; }

  dim3 grid, block;
};

// How many heads a thread takes, in blocks of at most how many threads.
struct Shape {
  int heads, threads;
};

// For rows of packs; sets what becomes of L2 too. None of it changes a result.
//
// Blocks of the next launch come in early, as dependent launches may, and take places in which this launch's last
// blocks would have stood; those then pile up where places come free first. So either both launches fit on the GPU side
// by side, or the places are just enough for one. results/h200_designs.json has what each shape took.
template <typename O>
Shape choose_shape(Params* p, DLDevice device) {
  const int pieces = ceil_div(p->half, O::frequencies);
  const int64_t sms = device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
  const int64_t all = int64_t{p->rows} * (p->query.count + p->key.count) * pieces;
  p->streamed = all * 32 > device_attribute(cudaDevAttrL2CacheSize, device.device_id) / 2;
  p->prefetch = all <= 2048 * sms;
  if (all <= 200 * sms) return {1, 64};  // latency: many small blocks

  // Registers of the kernels on Hopper, in eights, say how many blocks an SM has places for.
  constexpr bool wide = sizeof(typename O::T) == 4, wide_table = sizeof(typename O::W) == 4;
  constexpr int of_two = wide ? 40 : wide_table ? 72 : 64, of_four = wide ? 64 : wide_table ? 128 : 96;
  const auto places = [&](const Layout& layout, int heads) {
    const int warps = ceil_div(layout.block.x * layout.block.y * layout.block.z, 32);
    return std::min(65536 / ((heads == 2 ? of_two : of_four) * 32 * warps), 64 / warps);
  };
  Shape best{2, 128};
  float most = 0.8f;  // of the places of the whole GPU
  for (Shape shape : {Shape{2, 256}, Shape{4, 128}, Shape{4, 256}, Shape{2, 128}}) {
    const Layout layout(*p, pieces, shape.heads, shape.threads);
    const int per_sm = places(layout, shape.heads);
    if (2 * ceil_div(layout.blocks(), sms) <= per_sm) return shape;
    const float taken = static_cast<float>(layout.blocks()) / static_cast<float>(per_sm * sms);
    if (taken > most && taken <= 1.f) most = taken, best = shape;
  }
  p->prefetch = p->prefetch && best.heads == 2;
  return best;
}

template <typename O, int U>
void launch(const Params& p, int threads, DLDevice device) {
  const Layout layout(p, ceil_div(p.half, O::frequencies), U, threads);
  if (layout.grid.y > 65535 || layout.grid.z > 65535) unsupported("more than a million heads or frequencies");
  launch_pdl(rotate_heads<O, U>, layout.grid, layout.block, device, p);
}

template <typename T, typename W, bool neox, bool multimodal>
void launch(const Call& call, DLDevice device) {
  if (!call.vectors) return launch<Op<T, W, neox, false, multimodal>, 4>(call.p, 128, device);
  using O = Op<T, W, neox, true, multimodal>;
  Params p = call.p;
  const Shape shape = choose_shape<O>(&p, device);
  if (multimodal || shape.heads == 2) {
    launch<O, 2>(p, shape.threads, device);
  } else if constexpr (!multimodal) {
    shape.heads == 1 ? launch<O, 1>(p, shape.threads, device) : launch<O, 4>(p, shape.threads, device);
  }
}

template <bool multimodal>
void launch(const Call& call, const TensorView& query, const TensorView& table) {
  const DeviceGuard guard(query.device().device_id);
  dispatch_float(query, [&](auto element) {
    using T = decltype(element);
    const auto with_table = [&](auto angle) {
      using W = decltype(angle);
      call.neox ? launch<T, W, true, multimodal>(call, query.device())
                : launch<T, W, false, multimodal>(call, query.device());
    };
    same_dtype(table.dtype(), kFloat32) ? with_table(float()) : with_table(element);
  });
}

}  // namespace kestrel::rope
