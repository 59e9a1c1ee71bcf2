// Checks of the arguments of the rotary ops, with the messages of kestrel_runtime.rotary.
#pragma once

#include <kestrel/check.h>

#include <cstdint>
#include <string>

namespace kestrel {

constexpr int kMostRowDims = 2;  // rows are [T] or [B, S]

// x is [..., H*D] or [..., H, D], where the rows are the first `count` dimensions.
inline void check_heads(const Checks& check, const char* name, const TensorView& x, const int64_t* rows, int count,
                        int64_t head_size) {
  check.dtype(name, x, {kBFloat16, kFloat16, kFloat32});
  check.rank(name, x, count + 1, count + 2);
  check.last_contiguous(name, x);
  int64_t expected[kMostRowDims + 2];
  for (int i = 0; i < x.ndim(); ++i) expected[i] = i < count ? rows[i] : kAny;
  check.shape(name, x, expected, x.ndim());
  if (x.ndim() == count + 2) {
    expected[count + 1] = head_size;
    check.shape(name, x, expected, x.ndim());
  } else if (x.size(-1) % head_size != 0) {
    check.fail(name, "a last dimension that is a multiple of head_size " + std::to_string(head_size),
               std::to_string(x.size(-1)));
  }
}

// Checks query and the optional key, which are written; returns the head size.
inline int64_t check_rotary_rows(const Checks& check, const int64_t* rows, int count, const TensorView& query,
                                 const OptionalTensor& key, const AnyView& head_size) {
  const int64_t size = check.integer("head_size", head_size, 1);
  check_heads(check, "query", query, rows, count, size);
  check.disjoint("query", query);
  if (key.has_value()) {
    check_heads(check, "key", *key, rows, count, size);
    check.disjoint("key", *key);
    check.same_dtype("key", *key, "query", query);
  }
  return size;
}

// Checks cos_sin_cache [max_pos, R], float32 or the query's dtype: R dimensions fit into a head after the offset.
// Returns the offset.
inline int64_t check_rotary_table(const Checks& check, const TensorView& table, const TensorView& query,
                                  int64_t head_size, const AnyView& rope_dim_offset) {
  const char* name = "cos_sin_cache";
  check.dtype(name, table, {kBFloat16, kFloat16, kFloat32});
  check.rank(name, table, 2, 2);
  check.last_contiguous(name, table);
  if (!same_dtype(table.dtype(), kFloat32)) check.same_dtype(name, table, "query", query);
  const int64_t rotary_dim = table.size(1);
  if (rotary_dim < 2 || rotary_dim % 2) check.fail(name, "an even number of columns >= 2", std::to_string(rotary_dim));
  const int64_t offset = check.integer("rope_dim_offset", rope_dim_offset, 0);
  if (rotary_dim > head_size - offset) {
    const std::string head = std::to_string(head_size), from = std::to_string(offset);
    check.fail(name,
               "at most " + std::to_string(head_size - offset) + " columns (head_size " + head + ", rope_dim_offset " +
                   from + ")",
               std::to_string(rotary_dim));
  }
  return offset;
}

}  // namespace kestrel
