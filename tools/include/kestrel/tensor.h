// Helpers of entry points: addresses, devices, overlaps, dispatch by dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <kestrel/check.h>

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
  for (const Named* one = tensors.begin(); one != tensors.end(); ++one) {
    if (!one->written || !one->tensor.has_value()) continue;
    for (const Named* other = tensors.begin(); other != tensors.end(); ++other) {
      if (other == one || (other->written && other < one)) continue;
      check.no_overlap(one->name, *one->tensor, other->name, other->tensor);
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

// Both for all tensors, in the order of the op's parameters; the first one sets the device.
inline void check_memory(const Checks& check, std::initializer_list<Named> tensors) {
  check_overlaps(check, tensors);
  const Named& first = *tensors.begin();
  check_devices(check, first.name, *first.tensor, tensors);
}

// Calls with a value of the tensor's element type; the tensor is bf16, fp16 or float32.
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
