// What the entry points of the norm ops share: the checks of their arguments, and Params from those arguments.
#pragma once

#include <kestrel/check.h>
#include <kestrel/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <limits>

#include "params.cuh"

namespace kestrel::norm {

// The leading dimensions of all row tensors of a call. Adjacent dimensions that are contiguous in every tensor merge
// into one, so nearly every call ends with a single stride per tensor.
class RowShape {
 public:
  explicit RowShape(const TensorView& first) : first_(&first) {}

  void add(const TensorView& t, Rows* rows, int pack_bytes = 16) { tensors_[count_++] = {&t, rows, pack_bytes}; }

  void fill(Params* p) const {
    int kept[3];  // dimensions, innermost first; each includes the outer ones that merged into it
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
      // One dimension uses stride[0], two use stride[0] and stride[2], three use all.
      const int place[3][3] = {{0, 0, 0}, {2, 0, 0}, {2, 1, 0}};
      for (int i = 0; i < count; ++i) {
        entry.rows->stride[place[count - 1][i]] = entry.tensor->stride(kept[i]) * element_bytes(*entry.tensor);
      }
    }
    p->single_stride = count <= 1;
    p->inner_sizes[0] = count == 3 ? static_cast<unsigned>(sizes[1]) : 1;
    p->inner_sizes[1] = count >= 2 ? static_cast<unsigned>(sizes[0]) : 1;
  }

  // Whether every row starts at a multiple of `pack_part` bytes, 8 or 16 of the 16 of a pack. The codes of a pack take
  // fewer bytes; their rows are aligned to the same part of these.
  bool aligned(int pack_part) const {
    for (int t = 0; t < count_; ++t) {
      const int bytes = tensors_[t].pack_bytes * pack_part / 16;
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

  // Whether dimension d is contiguous, in every tensor, with the `size` rows of dimension `inner`.
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

// -- checks: order and wording of the Python ones ---------------------------------------------------------------------

constexpr bool written = true;  // in the argument lists of check_memory and check_overlaps

inline void check_rows(const Checks& check, const TensorView& x) {
  check.dtype("x", x, {kBFloat16, kFloat16, kFloat32});
  check.rank("x", x, 2, 4);
  check.last_contiguous("x", x);
}

// A tensor of x's shape and dtype that is written.
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

// Weight, eps and weight_bias of the RMS norms; the weight may be float32 where x is not.
inline void check_scaling(const Checks& check, const OptionalTensor& weight, const TensorView& x, double eps,
                          double weight_bias) {
  check_vector(check, "weight", weight, x, {x.dtype(), kFloat32});
  check.at_least("eps", eps, 0);
  check.number("weight_bias", weight_bias);
}

// -- parameters -------------------------------------------------------------------------------------------------------

// Fills the parameters; false when there is nothing to do.
inline bool prepare(const RowShape& shape, const TensorView& x, const OptionalTensor& weight,
                    const OptionalTensor& bias, double eps, double weight_bias, Params* p) {
  const int64_t rows = row_count(x), n = x.size(-1);
  if (rows == 0 || n == 0) return false;
  // Indices of rows in the last block, and of elements one stride past the end, still fit into an int.
  constexpr int64_t most = std::numeric_limits<int>::max();
  if (rows > most - 8 || n > most - (1 << 16)) unsupported("more than 2^31 rows, or rows of about 2^31 elements");
  shape.fill(p);
  if (weight.has_value()) {
    p->weight = address(*weight);
    p->weight_bias = static_cast<float>(weight_bias);
    p->float_weight = !same_dtype((*weight).dtype(), x.dtype());
  }
  if (bias.has_value()) p->bias = address(*bias);
  p->rows = static_cast<int>(rows);
  p->n = static_cast<int>(n);
  p->eps = static_cast<float>(eps);
  p->inv_n = static_cast<float>(1.0 / static_cast<double>(n));
  return true;
}

}  // namespace kestrel::norm
