// What entry points ask of a tensor argument besides its checks.
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
};

// Every tensor stands where the first one does, and that is a GPU. The last check of an entry point.
inline void check_devices(const Checks& check, const char* first_name, const TensorView& first,
                          std::initializer_list<Named> others) {
  for (const Named& other : others) {
    if (other.tensor.has_value()) check.same_device(other.name, *other.tensor, first_name, first);
  }
  check.cuda(first_name, first);
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
