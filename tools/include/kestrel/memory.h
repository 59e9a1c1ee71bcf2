// Which elements of strided tensors share memory, exactly, as kestrel_runtime.check decides it.
#pragma once

#include <tvm/ffi/container/tensor.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace kestrel {

using tvm::ffi::TensorView;

// step * x for 0 <= x < count
struct StrideTerm {
  int64_t step, count;
};

constexpr int kMaxStrideTerms = 32;
constexpr int kMaxCandidates = 10000;  // of has_solution(): bounds the host time, as in kestrel_runtime.check

// Whether low <= sum(step * x) <= high for some x. Steps are positive, in descending order. Strides of tensors usually
// nest, which leaves one or two candidates per term. When `budget` candidates have been tried, the answer is false.
inline bool has_solution(const StrideTerm* terms, int count, int64_t low, int64_t high, int* budget) {
  if (--*budget < 0 || high < 0) return false;
  int64_t reach = 0;  // of all terms
  for (int i = 0; i < count; ++i) reach += terms[i].step * (terms[i].count - 1);
  if (low > reach) return false;
  if (count == 0) return true;
  const auto [step, size] = terms[0];
  const int64_t missing = low - (reach - step * (size - 1));  // what this term must contribute at least
  const int64_t first = missing <= 0 ? 0 : (missing + step - 1) / step, last = std::min(size - 1, high / step);
  for (int64_t x = first; x <= last && *budget > 0; ++x) {
    if (has_solution(terms + 1, count - 1, low - step * x, high - step * x, budget)) return true;
  }
  return false;
}

inline bool is_empty(const TensorView& t) {
  for (int i = 0; i < t.ndim(); ++i) {
    if (t.size(i) == 0) return true;
  }
  return false;
}

// Whether two elements of a tensor are the same memory.
inline bool shares_memory_within(const TensorView& t) {
  StrideTerm dims[kMaxStrideTerms];  // by descending stride
  int count = 0;
  for (int i = 0; i < t.ndim() && count < kMaxStrideTerms; ++i) {
    if (t.size(i) <= 1) continue;
    int at = count++;
    for (; at > 0 && dims[at - 1].step < t.stride(i); --at) dims[at] = dims[at - 1];
    dims[at] = {t.stride(i), t.size(i)};
  }
  if (count == 0 || is_empty(t)) return false;
  if (dims[count - 1].step == 0) return true;
  int64_t reach = 0;
  bool nested = true;
  for (int i = count - 1; i >= 0; --i) {
    nested = nested && dims[i].step > reach;
    reach += dims[i].step * (dims[i].count - 1);
  }
  if (nested) return false;
  // Two different indices with one address differ by d with sum(d * stride) == 0. The loop goes over the first
  // dimension i with d != 0; by symmetry d > 0 there.
  for (int i = 0; i < count; ++i) {
    StrideTerm terms[kMaxStrideTerms] = {{dims[i].step, dims[i].count - 1}};
    int64_t target = -dims[i].step;
    for (int j = i + 1; j < count; ++j) {
      terms[j - i] = {dims[j].step, 2 * dims[j].count - 1};
      target += dims[j].step * (dims[j].count - 1);
    }
    int budget = kMaxCandidates;
    if (has_solution(terms, count - i, target, target, &budget)) return true;
  }
  return false;
}

// Addresses in bytes: the first one, and one past the last. Those of different devices may coincide.
inline std::pair<int64_t, int64_t> address_range(const TensorView& t) {
  const int64_t width = t.dtype().bits * t.dtype().lanes / 8;
  const int64_t first = reinterpret_cast<int64_t>(t.data_ptr()) + static_cast<int64_t>(t.byte_offset());
  int64_t reach = width;
  for (int i = 0; i < t.ndim(); ++i) reach += width * t.stride(i) * std::max<int64_t>(t.size(i) - 1, 0);
  return {first, first + reach};
}

// Whether an element of one tensor shares memory with an element of the other.
inline bool share_memory(const TensorView& a, const TensorView& b) {
  const auto [a_first, a_end] = address_range(a);
  const auto [b_first, b_end] = address_range(b);
  if (a_end <= b_first || b_end <= a_first) return false;
  if (a.device().device_type != b.device().device_type || a.device().device_id != b.device().device_id) return false;
  if (is_empty(a) || is_empty(b)) return false;
  StrideTerm terms[kMaxStrideTerms];  // by descending step, in bytes; equal steps are added
  int count = 0;
  for (const TensorView* t : {&a, &b}) {
    const int64_t width = t->dtype().bits * t->dtype().lanes / 8;
    for (int i = 0; i < t->ndim() && count < kMaxStrideTerms; ++i) {
      const int64_t step = width * t->stride(i);
      if (t->size(i) <= 1 || step <= 0) continue;
      int at = count;
      for (; at > 0 && terms[at - 1].step < step; --at) {
      }
      if (at > 0 && terms[at - 1].step == step) {
        terms[at - 1].count += t->size(i) - 1;
        continue;
      }
      for (int j = count++; j > at; --j) terms[j] = terms[j - 1];
      terms[at] = {step, t->size(i)};
    }
  }
  // sum(step * x) + base runs over all differences of an address in a and an address in b.
  const int64_t a_width = a.dtype().bits * a.dtype().lanes / 8, b_width = b.dtype().bits * b.dtype().lanes / 8;
  const int64_t base = a_first - (b_end - b_width);
  int budget = kMaxCandidates;
  return has_solution(terms, count, 1 - a_width - base, b_width - 1 - base, &budget);
}

inline bool same_view(const TensorView& a, const TensorView& b) {
  bool same = a.ndim() == b.ndim() && a.dtype().code == b.dtype().code && a.dtype().bits == b.dtype().bits &&
              address_range(a).first == address_range(b).first;
  for (int i = 0; same && i < a.ndim(); ++i) same = a.size(i) == b.size(i) && a.stride(i) == b.stride(i);
  return same;
}

}  // namespace kestrel
