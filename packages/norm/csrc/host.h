// The host side that the norm ops share: arguments to Params, and the choice of a kernel.
#pragma once

#include <kestrel/check.h>
#include <kestrel/launch.h>
#include <kestrel/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <vector>

#include "norm_rows.cuh"

namespace kestrel::norm {

// Collects the leading dimensions of all row tensors at once: neighbours that are one run of rows in every tensor
// become one dimension, so nearly every call ends with a single stride per tensor.
class RowShape {
 public:
  explicit RowShape(const TensorView& first) : first_(&first) {}

  void add(const TensorView& t, Rows* rows) { tensors_.push_back({&t, rows}); }

  void fill(Params* p) const {
    std::vector<int> kept;  // dimensions, innermost first; each stands for those outside it that merged into it
    std::vector<int64_t> sizes;
    for (int d = first_->ndim() - 2; d >= 0; --d) {
      const int64_t size = first_->size(d);
      if (size == 1) continue;
      if (!kept.empty() && merges(d, kept.back(), sizes.back())) {
        sizes.back() *= size;
      } else {
        kept.push_back(d);
        sizes.push_back(size);
      }
    }
    const int count = static_cast<int>(kept.size());
    for (const Entry& entry : tensors_) {
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

  bool aligned() const {
    for (const Entry& entry : tensors_) {
      if (!aligned16(entry.rows->base)) return false;
      for (int64_t stride : entry.rows->stride) {
        if (stride % 16 != 0) return false;
      }
    }
    return true;
  }

 private:
  struct Entry {
    const TensorView* tensor;
    Rows* rows;
  };

  // Whether dimension d continues, in every tensor, the run of `size` rows that starts at dimension `inner`.
  bool merges(int d, int inner, int64_t size) const {
    for (const Entry& entry : tensors_) {
      if (entry.tensor->stride(d) != entry.tensor->stride(inner) * size) return false;
    }
    return true;
  }

  const TensorView* first_;
  std::vector<Entry> tensors_;
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
  }
  if (bias.has_value()) p->bias = address(*bias);
  p->rows = static_cast<int>(rows);
  p->n = static_cast<int>(n);
  p->eps = static_cast<float>(eps);
  p->inv_n = static_cast<float>(1.0 / static_cast<double>(n));
  return true;
}

// Teams are chosen by N and the dtype alone, so that a row's sums are added in one order whatever stands around it.
template <typename O, bool VECTORS>
void launch(const Params& p, DLDevice device) {
  constexpr bool layer = O::norm == Norm::layer;
  constexpr int size = Pack<typename O::T>::size;
  constexpr int rows_per_block = 4;      // of a warp each
  constexpr int widest = layer ? 5 : 4;  // packs per lane of a warp that has a row to itself
  const int packs = (p.n + size - 1) / size;
  const auto per_block = [&](auto* kernel, int v) {
    const int warps = (packs + 32 * v - 1) / (32 * v);
    launch_pdl(kernel, dim3(p.rows), dim3(32 * warps), device, p);
  };
  if (packs <= widest * 32) {
    launch_pdl(norm_rows<O, widest, 1, VECTORS>, dim3((p.rows + rows_per_block - 1) / rows_per_block),
               dim3(32 * rows_per_block), device, p);
  } else if (layer && packs <= 2 * 4 * 32) {
    per_block(norm_rows < O, 2, layer ? 4 : 8, VECTORS >, 2);
  } else if (packs <= 2 * 8 * 32) {
    per_block(norm_rows<O, 2, 8, VECTORS>, 2);
  } else if (packs <= 4 * 8 * 32) {
    per_block(norm_rows<O, 4, 8, VECTORS>, 4);
  } else {
    launch_pdl(norm_long_rows<O, VECTORS>, dim3(p.rows), dim3(32 * LONG_WARPS), device, p);
  }
}

// How a launch meets its neighbours and L2; the values never change a result. They were chosen by timing one op alone
// on an H200 while the kernels were made (us per launch, cold L2, with and without; README.md says what is on record):
// - prefetch: rms_norm 16x4096 1.12, 1.46; 65536x8192 533, 515 (streamed). With a residual, where lines are written
//   back in place: 2048x896 4.4, 4.7; 2048x2048 9.5, 8.9; 65536x8192 1031, 1074.
// - early, against a trigger behind the loads: rms_norm 740x2048 2.13, 2.48; layer_norm 729x1152 2.4, 1.93. It stood
//   before the wait then.
// - streamed: rms_norm 16384x4096 64.7, 68.1; 65536x8192 515, 544; with a residual no difference.
template <typename O>
void set_overlap(Params* p) {
  const int64_t read = int64_t{p->rows} * p->n * sizeof(typename O::T) * (O::add ? 2 : 1);
  const bool past_l2 = read > (64 << 20);
  p->prefetch = O::add ? read < (10 << 20) || past_l2 : !past_l2;
  p->streamed = !O::add && past_l2;
  p->early = O::norm == Norm::rms || p->n > 160 * Pack<typename O::T>::size || p->rows >= 1024;
}

template <typename O>
void launch(Params p, const RowShape& shape, DLDevice device) {
  constexpr int size = Pack<typename O::T>::size;
  const bool vectors = shape.aligned() && p.n % size == 0 && aligned16(p.weight) && aligned16(p.bias);
  set_overlap<O>(&p);
  vectors ? launch<O, true>(p, device) : launch<O, false>(p, device);
}

}  // namespace kestrel::norm
