// The host side that the norm ops share: arguments to Params, and the choice of a kernel.
#pragma once

#include <kestrel/check.h>
#include <kestrel/launch.h>
#include <kestrel/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <type_traits>

#include "norm_any_rows.cuh"
#include "norm_rows.cuh"

namespace kestrel::norm {

// Collects the leading dimensions of all row tensors at once: neighbours that are one run of rows in every tensor
// become one dimension, so nearly every call ends with a single stride per tensor.
class RowShape {
 public:
  explicit RowShape(const TensorView& first) : first_(&first) {}

  void add(const TensorView& t, Rows* rows, int pack_bytes = 16) { tensors_[count_++] = {&t, rows, pack_bytes}; }

  void fill(Params* p) const {
    int kept[3];  // dimensions, innermost first; each stands for those outside it that merged into it
    int64_t sizes[3];
    int count = 0;
    for (int d = first_->ndim() - 2; d >= 0; --d) {
      const int64_t size = first_->size(d);
      if (size == 1) continue;
      if (count > 0 && merges(d, kept[count - 1], sizes[count - 1])) {
        sizes[count - 1] *= size;
      } else {
        kept[count] = d;
        sizes[count++] = size;
      }
    }
    for (int t = 0; t < count_; ++t) {
      const Entry& entry = tensors_[t];
      entry.rows->base = address(*entry.tensor);
      // A single dimension is stride[0]; two are stride[0] and stride[2]; three fill all.
      const int slot[3][3] = {{0, 0, 0}, {2, 0, 0}, {2, 1, 0}};
      for (int i = 0; i < count; ++i) {
        entry.rows->stride[slot[count - 1][i]] = entry.tensor->stride(kept[i]) * element_bytes(*entry.tensor);
      }
    }
    p->flat = count <= 1;
    p->sizes[0] = count == 3 ? static_cast<unsigned>(sizes[1]) : 1;
    p->sizes[1] = count >= 2 ? static_cast<unsigned>(sizes[0]) : 1;
  }

  // Whether every row starts at a multiple of a pack, or of a half or a quarter of one.
  bool aligned(int parts) const {
    for (int t = 0; t < count_; ++t) {
      const int bytes = tensors_[t].pack_bytes / parts;
      if (reinterpret_cast<uintptr_t>(tensors_[t].rows->base) % bytes != 0) return false;
      for (int64_t stride : tensors_[t].rows->stride) {
        if (stride % bytes != 0) return false;
      }
    }
    return true;
  }

 private:
  struct Entry {
    const TensorView* tensor;
    Rows* rows;
    int pack_bytes;
  };

  // Whether dimension d continues, in every tensor, the run of `size` rows that starts at dimension `inner`.
  bool merges(int d, int inner, int64_t size) const {
    for (int t = 0; t < count_; ++t) {
      const TensorView& tensor = *tensors_[t].tensor;
      if (tensor.stride(d) != tensor.stride(inner) * size) return false;
    }
    return true;
  }

  const TensorView* first_;
  Entry tensors_[3];  // no op has more
  int count_ = 0;
};

inline int64_t row_count(const TensorView& x) {
  int64_t rows = 1;
  for (int d = 0; d + 1 < x.ndim(); ++d) rows *= x.size(d);
  return rows;
}

// -- checks, in the order and with the words of the Python ones -------------------------------------------------------

inline void check_rows(const Checks& check, const TensorView& x) {
  check.dtype("x", x, {kBFloat16, kFloat16, kFloat32});
  check.rank("x", x, 2, 4);
  check.last_contiguous("x", x);
}

// A tensor like x that is written.
inline void check_written(const Checks& check, const char* name, const TensorView& t, const TensorView& x) {
  check.dtype(name, t, {x.dtype()});
  check.last_contiguous(name, t);
  check.same_shape(name, t, x);
  check.disjoint(name, t);
}

inline void check_vector(const Checks& check, const char* name, const OptionalTensor& vector, const TensorView& x,
                         std::initializer_list<DLDataType> dtypes) {
  if (!vector.has_value()) return;
  const TensorView t = *vector;
  const int64_t n = x.size(-1);
  check.dtype(name, t, dtypes);
  check.last_contiguous(name, t);
  check.shape(name, t, &n, 1);
}

// Weight and numbers of the RMS norms; the weight may be float32 where x is not.
inline void check_scaling(const Checks& check, const OptionalTensor& weight, const TensorView& x, double eps,
                          double weight_bias) {
  check_vector(check, "weight", weight, x, {x.dtype(), kFloat32});
  check.at_least("eps", eps, 0);
  check.number("weight_bias", weight_bias);
}

// -- launch -----------------------------------------------------------------------------------------------------------

// Fills the parameters; false when there is nothing to do.
inline bool prepare(const RowShape& shape, const TensorView& x, const OptionalTensor& weight,
                    const OptionalTensor& bias, double eps, double weight_bias, Params* p) {
  const int64_t rows = row_count(x), n = x.size(-1);
  if (rows == 0 || n == 0) return false;
  constexpr int64_t most = std::numeric_limits<int>::max();
  if (rows > most - 8 || n > most - (1 << 16)) unsupported("more than 2^31 rows, or rows of about 2^31 elements");
  shape.fill(p);
  if (weight.has_value()) {
    p->weight = address(*weight);
    p->weight_bias = static_cast<float>(weight_bias);
    p->wide = !same_dtype((*weight).dtype(), x.dtype());
  }
  if (bias.has_value()) p->bias = address(*bias);
  p->rows = static_cast<int>(rows);
  p->n = static_cast<int>(n);
  p->eps = static_cast<float>(eps);
  p->inv_n = static_cast<float>(1.0 / static_cast<double>(n));
  return true;
}

// How a row is split: `packs` per lane of `warps` warps, in the kernel whose teams have up to `most`; 0 packs: any
// number. It is a function of N and the dtype alone, so that a row's sums are added in one order whatever stands around
// it. Four packs a lane, and two, in us on an H200 (results/h200_designs.json):
// - with a residual: 2048x2048 9.06, 9.54; 2048x4096 17.9, 18.3; 16384x4096 131.2, 132.4; but 16x4096 1.28, 1.25
// - rms_norm: 2048x2048 5.17, 5.39; but 2048x1536 4.21, 4.11; 16384x4096 66.0, 65.3
// - FP8: half the threads share what a row costs besides its elements.
struct TeamSize {
  int packs, most, warps;
};

template <typename O>
TeamSize team_size(int n) {
  constexpr bool layer = O::norm == Norm::layer;
  constexpr int size = Pack<typename O::T>::size;
  constexpr int widest = layer ? 5 : 4;  // packs per lane of a warp that has a row to itself
  const int packs = (n + size - 1) / size;
  const auto warps = [&](int each) { return (packs + 32 * each - 1) / (32 * each); };
  if (packs <= widest * 32) return {widest, 1, 1};
  if (packs > 4 * 8 * 32) return {0, MOST_WARPS, MOST_WARPS};
  if (layer && packs <= 2 * 4 * 32) return {2, 4, warps(2)};
  const bool four = packs > 2 * 8 * 32 || (!layer && (O::add || O::fp8 || packs == 2 * 4 * 32));
  return four ? TeamSize{4, 8, warps(4)} : TeamSize{2, 8, warps(2)};
}

constexpr int rows_per_block = 4;  // of a warp each

inline dim3 blocks(int rows, int each) { return dim3((rows + each - 1) / each); }

template <typename O, Access A>
void launch_any_rows(Params p, const TeamSize& team, DLDevice device) {
  const int each = team.warps == 1 ? rows_per_block : 1;
  const int64_t row = (int64_t{p.n} * sizeof(typename O::T) + 15) / 16 * 16 + 16;  // at any address
  const int64_t shared = row * each * (O::add ? 2 : 1);
  if (A == Access::across && shared <= 47 * 1024) p.staged = static_cast<int>(row);
  launch_pdl(norm_any_rows<O, A>, blocks(p.rows, each), dim3(32 * team.warps, each), device, p,
             p.staged > 0 ? shared : 0);
}

template <typename O>
void launch_rows(const Params& p, DLDevice device) {
  constexpr bool layer = O::norm == Norm::layer;
  const TeamSize team = team_size<O>(p.n);
  const auto per_row = [&](auto* kernel) { launch_pdl(kernel, dim3(p.rows), dim3(32 * team.warps), device, p); };
  if (team.most == 1) {
    constexpr int packs = layer ? 5 : 4;
    return launch_pdl(norm_rows<O, packs, 1>, blocks(p.rows, rows_per_block), dim3(32 * rows_per_block), device, p);
  }
  if constexpr (layer) {
    if (team.most == 4) return per_row(norm_rows<O, 2, 4>);
  }
  if constexpr (layer || (!O::add && !O::fp8)) {
    if (team.packs == 2) return per_row(norm_rows<O, 2, 8>);
  }
  if constexpr (!layer && !O::add && !O::fp8 && std::is_same_v<typename O::T, typename O::W>) {
    // Two rows a block and one, us of an H200: 65536x8192 531.6, 538.5; but 16384x4096 68.7, 67.4 (h200_designs.json).
    if (p.streamed && team.packs == 4 && team.warps > 4) {
      return launch_pdl(norm_rows<O, 4, 8, Access::whole, 2>, blocks(p.rows, 2), dim3(32 * team.warps), device, p);
    }
  }
  if (team.packs == 4) return per_row(norm_rows<O, 4, 8>);
  launch_any_rows<Op<O::norm, O::add, O::fp8, typename O::T>, Access::whole>(p, team, device);
}

// Rows that move 8 bytes at a time; false where no kernel of their own takes them.
template <typename O>
bool launch_halves(const Params& p, DLDevice device) {
  constexpr bool layer = O::norm == Norm::layer;
  constexpr Access halves = Access::halves;
  const TeamSize team = team_size<O>(p.n);
  if (p.wide || team.packs == 0) return false;
  if (team.most == 1) {
    constexpr int packs = layer ? 5 : 4;
    const dim3 block(32 * rows_per_block);
    launch_pdl(norm_rows<O, packs, 1, halves>, blocks(p.rows, rows_per_block), block, device, p);
    return true;
  }
  const dim3 grid(p.rows), block(32 * team.warps);  // warps that a team does not have add zeros
  if (team.packs == 4) {
    launch_pdl(norm_rows<O, 4, 8, halves>, grid, block, device, p);
  } else if constexpr (layer || !O::add) {
    launch_pdl(norm_rows<O, 2, 8, halves>, grid, block, device, p);
  }
  return true;
}

// How a launch meets L2; the values never change a result. Times in us, of one H200 and cold L2, are in
// results/h200_designs.json:
// - prefetch, with and without: rms_norm 16x4096 1.12, 1.42; 2048x1536 4.11, 4.29; 2048x2048 5.59, 5.17; 2048x4096
//   9.76, 9.52. With a residual, where lines are written back in place: 16x4096 1.28, 1.70; 2048x896 4.70, 4.64;
//   2048x2048 11.1, 9.06; 16384x4096 131.4, 136.5. layer_norm 9477x1152 12.1, 12.6.
// - streamed, in a design with two rows a block: rms_norm 16384x4096 65.7, 69.6; 65536x8192 511, 534.
template <typename O>
void set_overlap(Params* p) {
  constexpr int64_t mega = 1 << 20;
  const int64_t read = int64_t{p->rows} * p->n * sizeof(typename O::T) * (O::add ? 2 : 1);
  const bool past_l2 = read > 64 * mega;
  if constexpr (O::norm == Norm::layer && !O::add) {
    p->prefetch = !past_l2;
  } else {
    p->prefetch = read < 8 * mega || (O::add && past_l2);
  }
  p->streamed = !O::add && past_l2;
}

template <typename O>
void launch(Params p, const RowShape& shape, DLDevice device) {
  constexpr int size = Pack<typename O::T>::size;
  set_overlap<O>(&p);
  const auto in = [&](int parts) {
    const auto aligned = [&](const void* vector) { return reinterpret_cast<uintptr_t>(vector) % (16 / parts) == 0; };
    return shape.aligned(parts) && p.n % (size / parts) == 0 && aligned(p.weight) && aligned(p.bias);
  };
  if (in(1)) {
    if constexpr (O::norm == Norm::rms && size > 4) {
      if (p.wide) return launch_rows<Op<O::norm, O::add, O::fp8, typename O::T, float>>(p, device);
    }
    return launch_rows<O>(p, device);
  }
  if constexpr (!O::fp8 && size > 4) {
    if (in(2) && launch_halves<O>(p, device)) return;
  }
  launch_any_rows<O, Access::across>(p, team_size<O>(p.n), device);
}

}  // namespace kestrel::norm
