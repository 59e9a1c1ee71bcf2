// Helpers of entry points: addresses, devices, overlaps, dispatch by dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <kestrel/check.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

namespace kestrel {

inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

inline int element_bytes(const TensorView& t) { return t.dtype().bits / 8; }

inline char* address(const TensorView& t) { return static_cast<char*>(t.data_ptr()) + t.byte_offset(); }

inline const char* address(const OptionalTensor& t) { return t.has_value() ? address(*t) : nullptr; }

struct Named {
  const char* name;
  OptionalTensor tensor;
  bool written = false;
};

// No written tensor shares memory with another one. The order is that of the op's parameters.
inline void check_overlaps(const Checks& check, std::initializer_list<Named> tensors) {
  constexpr size_t kMaxTensors = 16;
  const Named* named = tensors.begin();
  const size_t count = std::min(tensors.size(), kMaxTensors);
  std::pair<int64_t, int64_t> ranges[kMaxTensors];  // of addresses; disjoint ranges need no exact check
  for (size_t i = 0; i < count; ++i) {
    ranges[i] = named[i].tensor.has_value() ? address_range(*named[i].tensor) : std::pair<int64_t, int64_t>(0, 0);
  }
  for (size_t i = 0; i < count; ++i) {
    if (!named[i].written) continue;
    for (size_t j = 0; j < count; ++j) {
      if (j == i || (named[j].written && j < i)) continue;
      if (ranges[i].second <= ranges[j].first || ranges[j].second <= ranges[i].first) continue;
      check.no_overlap(named[i].name, *named[i].tensor, named[j].name, named[j].tensor);
    }
  }
}

// Every tensor is on the device of the first one, and that is a GPU. The last check of an entry point.
inline void check_devices(const Checks& check, const char* first_name, const TensorView& first,
                          std::initializer_list<Named> others) {
  for (const Named& other : others) {
    if (other.tensor.has_value()) check.same_device(other.name, *other.tensor, first_name, first);
  }
  check.cuda(first_name, first);
}

// check_overlaps and check_devices, for tensors in the order of the op's parameters. The first one sets the device.
inline void check_memory(const Checks& check, std::initializer_list<Named> tensors) {
  check_overlaps(check, tensors);
  const Named& first = *tensors.begin();
  check_devices(check, first.name, *first.tensor, tensors);
}

// Calls call(T()), where T is the element type of a bf16, fp16 or float32 tensor.
template <typename F>
void dispatch_float(const TensorView& t, F call) {
  if (same_dtype(t.dtype(), kBFloat16)) {
    call(__nv_bfloat16());
  } else if (same_dtype(t.dtype(), kFloat16)) {
    call(__half());
  } else {
    call(float());
  }
}

}  // namespace kestrel
