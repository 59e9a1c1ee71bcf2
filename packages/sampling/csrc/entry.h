// What the entry points of the sampling ops share: checks in the order and with the words of the Python ones, and
// questions about the device.
#pragma once

#include <kestrel/check.h>
#include <kestrel/launch.h>
#include <kestrel/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <string>

#include "params.cuh"

namespace kestrel::sampling {

constexpr DLDataType kBool{kDLBool, 8, 1};

inline int row_dtype(const TensorView& rows) {
  if (same_dtype(rows.dtype(), kFloat32)) return kRowFloat32;
  return same_dtype(rows.dtype(), kFloat16) ? kRowFloat16 : kRowBFloat16;
}

inline bool has_clusters(DLDevice device) {
  return device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id) >= 9;
}

inline int64_t num_sms(DLDevice device) { return device_attribute(cudaDevAttrMultiProcessorCount, device.device_id); }

inline size_t max_smem_bytes(DLDevice device) {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device.device_id);
}

// ---- checks, in the order and with the words of the Python ones -----------------------------------------------------

inline void check_rows(const Checks& check, const char* name, const TensorView& rows) {
  check.dtype(name, rows, {kBFloat16, kFloat16, kFloat32});
  check.rank(name, rows, 2, 2);
  check.last_contiguous(name, rows);
  if (rows.size(1) == 0) check.fail(name, "at least one entry per row", "shape " + shape_text(rows.shape().data(), 2));
}

template <typename N>
PerRow<N> per_row(const Checks& check, const char* name, const OptionalTensor& values, N value, const char* rows_name,
                  const TensorView& rows, std::initializer_list<DLDataType> dtypes) {
  PerRow<N> parameter;
  parameter.value = value;
  if (!values.has_value()) return parameter;
  const TensorView t = *values;
  check.dtype(name, t, dtypes);
  check.rank(name, t, 1, 1);
  check.last_contiguous(name, t);
  const int64_t wanted = t.size(0) == 1 ? 1 : rows.size(0);
  check.shape(name, t, &wanted, 1);
  check.same_device(name, t, rows_name, rows);
  parameter.values = address(t);
  parameter.stride = t.size(0) == 1 ? 0 : 1;
  return parameter;
}

inline CountPerRow count_per_row(const Checks& check, const char* name, const OptionalTensor& counts, int64_t value,
                                 const char* rows_name, const TensorView& rows) {
  CountPerRow parameter;
  static_cast<PerRow<int64_t>&>(parameter) = per_row(check, name, counts, value, rows_name, rows, {kInt32, kInt64});
  parameter.is_int64 = !counts.has_value() || (*counts).dtype().bits == 64;
  return parameter;
}

inline OffsetPerRow offset_per_row(const Checks& check, const OptionalTensor& offset, int64_t value, int64_t stride,
                                   const char* rows_name, const TensorView& rows) {
  OffsetPerRow parameter;
  static_cast<PerRow<int64_t>&>(parameter) = per_row(check, "offset", offset, value, rows_name, rows, {kInt64});
  if (stride != 0 && stride != 1) check.fail("offset_stride", "0 or 1", std::to_string(stride));
  if (!offset.has_value()) parameter.stride = static_cast<int>(stride);
  return parameter;
}

inline void check_result(const Checks& check, const char* name, const TensorView& t, const TensorView& rows,
                         DLDataType dtype) {
  check.dtype(name, t, {dtype});
  const int64_t count = rows.size(0);
  check.shape(name, t, &count, 1);
  check.last_contiguous(name, t);
}

}  // namespace kestrel::sampling
