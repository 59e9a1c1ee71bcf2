// The host side of the cache ops: checks, in the order and with the messages of checks.py, and kernel parameters.
#pragma once

#include <kestrel/check.h>
#include <kestrel/launch.h>
#include <kestrel/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>

#include "cache.cuh"

namespace kestrel::kvcache {

constexpr bool kWritten = true;  // Named::written

// -- checks -----------------------------------------------------------------------------------------------------------

inline void check_indices(const Checks& check, const char* name, const TensorView& t) {
  check.dtype(name, t, {kInt32, kInt64});
  check.rank(name, t, 1, 1);
  check.last_contiguous(name, t);
}

inline void check_slots(const Checks& check, const TensorView& slot_mapping, int64_t rows) {
  check_indices(check, "slot_mapping", slot_mapping);
  if (slot_mapping.size(0) > rows) {
    check.fail("slot_mapping", "at most " + std::to_string(rows) + " slots, one per row of key",
               std::to_string(slot_mapping.size(0)));
  }
}

inline void check_rows(const Checks& check, const TensorView& key, const TensorView& value,
                       const TensorView& slot_mapping) {
  for (const auto& [name, t] : {std::pair("key", &key), std::pair("value", &value)}) {
    check.dtype(name, *t, {kBFloat16, kFloat16, kFloat32});
    check.rank(name, *t, 3, 3);
    check.last_contiguous(name, *t);
  }
  check.same_shape("value", value, key);
  check.same_dtype("value", value, "key", key);
  check_slots(check, slot_mapping, key.size(0));
}

inline void check_pair(const Checks& check, const TensorView& key_cache, const TensorView& value_cache,
                       std::initializer_list<DLDataType> dtypes, int64_t heads = kAny, int64_t width = kAny) {
  for (const auto& [name, t] : {std::pair("key_cache", &key_cache), std::pair("value_cache", &value_cache)}) {
    check.dtype(name, *t, dtypes);
    check.rank(name, *t, 4, 4);
    check.last_contiguous(name, *t);
  }
  const int64_t expected[4] = {kAny, kAny, heads, width};
  check.shape("key_cache", key_cache, expected, 4);
  if (key_cache.size(1) < 1) check.fail("key_cache", "a page size >= 1", std::to_string(key_cache.size(1)));
  check.same_shape("value_cache", value_cache, key_cache);
  check.same_dtype("value_cache", value_cache, "key_cache", key_cache);
}

inline void check_written(const Checks& check, std::initializer_list<Named> tensors) {
  for (const Named& one : tensors) check.disjoint(one.name, *one.tensor);
}

// A tensor that is optional in Python.
inline void check_given(const Checks& check, const char* name, const OptionalTensor& t) {
  if (!t.has_value()) check.fail(name, "a tensor", "NoneType", "TypeError");
}

// Scales or zeros of integer caches, [blocks, P, heads] or [blocks, heads, D].
inline void check_scales(const Checks& check, DLDataType dtype, const int64_t (&shape)[3],
                         std::initializer_list<Named> tensors) {
  for (const Named& one : tensors) {
    check_given(check, one.name, one.tensor);
    check.dtype(one.name, *one.tensor, {dtype});
    check.rank(one.name, *one.tensor, 3, 3);
    check.last_contiguous(one.name, *one.tensor);
    check.shape(one.name, *one.tensor, shape, 3);
  }
}

// Scales, zeros and tail (of one of these dtypes) of an INT4 cache [blocks, P, heads, D/2].
inline void check_int4(const Checks& check, const TensorView& cache, std::initializer_list<DLDataType> dtypes,
                       const OptionalTensor& k_scale, const OptionalTensor& k_zero, const OptionalTensor& v_scale,
                       const OptionalTensor& v_zero, const OptionalTensor& k_tail) {
  const int64_t blocks = cache.size(0), page = cache.size(1), heads = cache.size(2), size = 2 * cache.size(3);
  check_scales(check, kFloat16, {blocks, heads, size}, {{"k_scale", k_scale}, {"k_zero", k_zero}});
  check_scales(check, kFloat16, {blocks, page, heads}, {{"v_scale", v_scale}, {"v_zero", v_zero}});
  check_given(check, "k_tail", k_tail);
  check.dtype("k_tail", *k_tail, dtypes);
  check.rank("k_tail", *k_tail, 4, 4);
  check.last_contiguous("k_tail", *k_tail);
  const int64_t expected[4] = {kAny, page, heads, size};
  check.shape("k_tail", *k_tail, expected, 4);
}

inline void require_int4_page(const TensorView& cache) {
  if (cache.size(1) != 64) {
    unsupported("INT4 caches have pages of 64 slots, this one has " + std::to_string(cache.size(1)));
  }
}

inline void check_scale(const Checks& check, const char* name, const OptionalTensor& scale, int64_t heads) {
  if (!scale.has_value()) return;
  check.dtype(name, *scale, {kFloat32});
  check.rank(name, *scale, 1, 1);
  check.last_contiguous(name, *scale);
  const int64_t count = (*scale).size(0);
  if (count != 1 && count != heads) {
    check.fail(name, "shape (1,) or (" + std::to_string(heads) + ",)", "(" + std::to_string(count) + ",)");
  }
}

enum class Format { copy, e4m3, e5m2 };

// Caches, to be written, of the format that kv_cache_dtype names, for rows of this dtype.
inline Format check_store(const Checks& check, DLDataType dtype, int64_t heads, int64_t size,
                          const TensorView& key_cache, const TensorView& value_cache, const AnyView& kv_cache_dtype,
                          const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  const std::string name = check.choice("kv_cache_dtype", kv_cache_dtype, {"auto", "fp8", "fp8_e4m3", "fp8_e5m2"});
  const Format format = name == "auto" ? Format::copy : name == "fp8_e5m2" ? Format::e5m2 : Format::e4m3;
  if (format == Format::copy) {
    check_pair(check, key_cache, value_cache, {dtype}, heads, size);
  } else {
    check_pair(check, key_cache, value_cache, {kUInt8, format == Format::e5m2 ? kFloat8E5M2 : kFloat8E4M3}, heads,
               size);
  }
  check_written(check, {{"key_cache", key_cache}, {"value_cache", value_cache}});
  check_scale(check, "k_scale", k_scale, heads);
  check_scale(check, "v_scale", v_scale, heads);
  return format;
}

// -- addresses --------------------------------------------------------------------------------------------------------

// The stride of a dimension of size 1 is arbitrary.
inline int64_t byte_stride(const TensorView& t, int dim) {
  return t.size(dim) > 1 ? t.stride(dim) * element_bytes(t) : 0;
}

inline Rows rows_of(const TensorView& t) { return {address(t), byte_stride(t, 0), byte_stride(t, 1)}; }

// Of a cache [blocks, P, heads, D], or of scales [blocks, P, heads].
inline Cache cache_of(const TensorView& t) {
  return {address(t), byte_stride(t, 0), byte_stride(t, 1), byte_stride(t, 2)};
}

inline Scale scale_of(const OptionalTensor& scale) {
  if (!scale.has_value()) return {};
  return {reinterpret_cast<const float*>(address(*scale)), (*scale).size(0) > 1};
}

inline IndexArray index_array(const TensorView& indices) {
  return {address(indices), same_dtype(indices.dtype(), kInt64)};
}

inline bool aligned(const Rows& rows, int bytes) {
  return reinterpret_cast<uintptr_t>(rows.base) % bytes == 0 && rows.token % bytes == 0 && rows.head % bytes == 0;
}

inline bool aligned(const Cache& cache, int bytes) {
  return reinterpret_cast<uintptr_t>(cache.base) % bytes == 0 && cache.block % bytes == 0 &&
         cache.offset % bytes == 0 && cache.head % bytes == 0;
}

// The limits of 32-bit counters and of a grid.
inline void require_sizes(int64_t tokens, int64_t heads, int64_t size, int64_t page) {
  constexpr int64_t max_count = std::numeric_limits<int>::max() / 2, max_row = 1 << 22;
  if (tokens > max_count || page > max_count) unsupported("more than 2^30 tokens, or pages of more than 2^30 slots");
  if (size > max_row || (size > 0 && heads > max_row / size)) unsupported("rows of more than 2^22 elements");
}

// The slots of [blocks, P, ...]. Where all slots of all caches have equal distances, pages count as one slot, and
// addresses need no division.
inline SlotMapping slots_of(const TensorView& slot_mapping, const TensorView& key_cache,
                            std::initializer_list<Cache*> caches) {
  SlotMapping slots;
  const int64_t blocks = key_cache.size(0), page = key_cache.size(1);
  slots.slots = index_array(slot_mapping);
  slots.count = blocks * page;
  bool flat = true;
  for (const Cache* cache : caches) flat = flat && (page == 1 || blocks <= 1 || cache->block == page * cache->offset);
  if (flat) {
    for (Cache* cache : caches) {
      if (page > 1) cache->block = cache->offset;
    }
    return slots;
  }
  slots.page = FastDiv(static_cast<unsigned>(page));
  return slots;
}

}  // namespace kestrel::kvcache
