// Checks of op arguments in the C++ entry points, with the messages of kestrel_runtime.check:
//   op: argument 'name': expected ..., got ...
// An entry point makes them in the order of its Python check function, the device last, so that all but the device can
// be tested with CPU tensors. ValueError and TypeError arrive in Python as such.
#pragma once

#include <kestrel/memory.h>
#include <tvm/ffi/any.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/optional.h>

#include <charconv>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace kestrel {

using tvm::ffi::AnyView;
using tvm::ffi::TensorView;
using OptionalTensor = tvm::ffi::Optional<TensorView>;

[[noreturn]] inline void raise(const char* kind, const std::string& message) {
  throw tvm::ffi::Error(kind, message, std::string());
}

// A valid call that no kernel here covers: the op runs its reference instead.
[[noreturn]] inline void unsupported(const std::string& message) { raise("UnsupportedError", message); }

constexpr DLDataType kBFloat16{kDLBfloat, 16, 1};
constexpr DLDataType kFloat16{kDLFloat, 16, 1};
constexpr DLDataType kFloat32{kDLFloat, 32, 1};
constexpr DLDataType kFloat8E4M3{kDLFloat8_e4m3fn, 8, 1};
constexpr DLDataType kFloat8E5M2{kDLFloat8_e5m2, 8, 1};
constexpr DLDataType kInt32{kDLInt, 32, 1};
constexpr DLDataType kInt64{kDLInt, 64, 1};
constexpr DLDataType kInt8{kDLInt, 8, 1};
constexpr DLDataType kUInt8{kDLUInt, 8, 1};

inline bool same_dtype(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

inline std::string dtype_name(DLDataType dtype) {
  const std::string bits = std::to_string(dtype.bits);
  switch (dtype.code) {
    case kDLFloat:
      return "float" + bits;
    case kDLBfloat:
      return "bfloat" + bits;
    case kDLInt:
      return "int" + bits;
    case kDLUInt:
      return "uint" + bits;
    case kDLBool:
      return "bool";
    case kDLComplex:
      return "complex" + bits;
    case kDLFloat8_e4m3fn:
      return "float8_e4m3fn";
    case kDLFloat8_e5m2:
      return "float8_e5m2";
    default:
      return "a dtype of " + bits + " bits";
  }
}

inline std::string device_name(DLDevice device) {
  if (device.device_type == kDLCPU) return "cpu";
  if (device.device_type == kDLCUDA) return "cuda:" + std::to_string(device.device_id);
  return "device type " + std::to_string(static_cast<int>(device.device_type));
}

constexpr int64_t kAny = -1;  // in an expected shape: any size

inline std::string shape_text(const int64_t* sizes, int ndim) {
  std::string text = "(";
  for (int i = 0; i < ndim; ++i) text += (i ? ", " : "") + (sizes[i] == kAny ? "any" : std::to_string(sizes[i]));
  return text + (ndim == 1 ? ",)" : ")");
}

// As Python prints a float: the fewest digits that read back the same, and never without a point or an exponent.
inline std::string number_text(double value) {
  char digits[32];
  std::string text(digits, std::to_chars(digits, digits + sizeof(digits), value).ptr);
  if (std::isfinite(value) && text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

// A number or a flag as Python prints its type and its value.
inline std::string value_text(const AnyView& value, bool with_value) {
  switch (value.type_index()) {
    case tvm::ffi::TypeIndex::kTVMFFINone:
      return with_value ? "NoneType None" : "NoneType";
    case tvm::ffi::TypeIndex::kTVMFFIBool:
      return !with_value ? "bool" : value.cast<bool>() ? "bool True" : "bool False";
    case tvm::ffi::TypeIndex::kTVMFFIInt:
      return with_value ? "int " + std::to_string(value.cast<int64_t>()) : "int";
    case tvm::ffi::TypeIndex::kTVMFFIFloat:
      return with_value ? "float " + number_text(value.cast<double>()) : "float";
    default: {
      const auto text = value.try_cast<std::string>();
      if (!text.has_value()) return "an object";
      return with_value ? "str '" + *text + "'" : "str";
    }
  }
}

// The checks of one op.
class Checks {
 public:
  explicit Checks(const char* op) : op_(op) {}

  [[noreturn]] void fail(const char* name, const std::string& expected, const std::string& got,
                         const char* kind = "ValueError") const {
    raise(kind, std::string(op_) + ": argument '" + name + "': expected " + expected + ", got " + got);
  }

  void dtype(const char* name, const TensorView& t, std::initializer_list<DLDataType> allowed) const {
    for (DLDataType want : allowed) {
      if (kestrel::same_dtype(t.dtype(), want)) return;
    }
    std::string names, last;
    for (DLDataType want : allowed) {
      const std::string one = dtype_name(want);
      if (one != last) names += (names.empty() ? "" : " or ") + one;
      last = one;
    }
    fail(name, "dtype " + names, dtype_name(t.dtype()), "TypeError");
  }

  void rank(const char* name, const TensorView& t, int low, int high) const {
    if (t.ndim() >= low && t.ndim() <= high) return;
    std::string wanted;
    for (int rank = low; rank <= high; ++rank) wanted += (rank > low ? " or " : "") + std::to_string(rank) + "-D";
    fail(name, "a " + wanted + " tensor",
         std::to_string(t.ndim()) + "-D of shape " + shape_text(t.shape().data(), t.ndim()));
  }

  void last_contiguous(const char* name, const TensorView& t) const {
    if (t.ndim() > 0 && t.size(-1) > 1 && t.stride(-1) != 1) {
      fail(name, "a contiguous last dimension (stride 1)", "stride " + std::to_string(t.stride(-1)));
    }
  }

  // Row-major without gaps, as the Python side allocates results.
  void contiguous(const char* name, const TensorView& t) const {
    int64_t stride = 1;
    for (int d = t.ndim() - 1; d >= 0; stride *= t.size(d--)) {
      if (stride > 0 && t.size(d) > 1 && t.stride(d) != stride) {
        fail(name, "a contiguous tensor", "strides " + shape_text(t.strides().data(), t.ndim()));
      }
    }
  }

  void shape(const char* name, const TensorView& t, const int64_t* expected, int ndim) const {
    bool fits = t.ndim() == ndim;
    for (int i = 0; fits && i < ndim; ++i) fits = t.size(i) == expected[i] || expected[i] == kAny;
    if (!fits) fail(name, "shape " + shape_text(expected, ndim), shape_text(t.shape().data(), t.ndim()));
  }

  // No two elements of a tensor that is written share memory.
  void disjoint(const char* name, const TensorView& t) const {
    if (shares_memory_within(t)) {
      fail(name, "a tensor to write whose elements do not share memory",
           "strides " + shape_text(t.strides().data(), t.ndim()));
    }
  }

  // A tensor that is written shares no memory with another one; or it is the same view, where the op allows that.
  void no_overlap(const char* name, const TensorView& written, const char* other_name, const OptionalTensor& other,
                  bool may_be_same = false) const {
    if (!other.has_value() || !share_memory(written, *other) || (may_be_same && same_view(written, *other))) return;
    fail(name, std::string("a tensor to write that shares no memory with '") + other_name + "'",
         "tensors that overlap");
  }

  void same_shape(const char* name, const TensorView& t, const TensorView& as) const {
    shape(name, t, as.shape().data(), as.ndim());
  }

  void same_dtype(const char* name, const TensorView& t, const char* first_name, const TensorView& first) const {
    if (kestrel::same_dtype(t.dtype(), first.dtype())) return;
    fail(name, "dtype " + dtype_name(first.dtype()) + " as " + first_name + " has", dtype_name(t.dtype()), "TypeError");
  }

  // An argument that must be an integer; a bool is refused.
  int64_t integer(const char* name, const AnyView& value, int64_t minimum) const {
    if (value.type_index() != tvm::ffi::TypeIndex::kTVMFFIInt) {
      fail(name, "an integer", value_text(value, /*with_value=*/true), "TypeError");
    }
    const int64_t number = value.cast<int64_t>();
    if (number < minimum) fail(name, "an integer >= " + std::to_string(minimum), std::to_string(number));
    return number;
  }

  // An argument that must be True or False; a number is refused.
  bool flag(const char* name, const AnyView& value) const {
    if (value.type_index() != tvm::ffi::TypeIndex::kTVMFFIBool) {
      fail(name, "True or False", value_text(value, /*with_value=*/false), "TypeError");
    }
    return value.cast<bool>();
  }

  // An argument that must be one of these texts.
  std::string choice(const char* name, const AnyView& value, std::initializer_list<const char*> allowed) const {
    const auto text = value.try_cast<std::string>();
    std::string names;
    for (const char* want : allowed) {
      if (text.has_value() && *text == want) return *text;
      names += std::string(names.empty() ? "'" : ", '") + want + "'";
    }
    fail(name, "one of " + names, text.has_value() ? "'" + *text + "'" : value_text(value, /*with_value=*/false));
  }

  void number(const char* name, double value) const {
    if (std::isnan(value)) fail(name, "a number", "nan");
  }

  void at_least(const char* name, double value, int minimum) const {
    number(name, value);
    if (value < minimum) fail(name, "a number >= " + std::to_string(minimum), number_text(value));
  }

  void same_device(const char* name, const TensorView& t, const char* first_name, const TensorView& first) const {
    if (t.device().device_type == first.device().device_type && t.device().device_id == first.device().device_id)
      return;
    fail(name, "device " + device_name(first.device()) + " as " + first_name + " has", device_name(t.device()));
  }

  void cuda(const char* name, const TensorView& t) const {
    if (t.device().device_type != kDLCUDA) fail(name, "a CUDA tensor", device_name(t.device()));
  }

 private:
  const char* op_;
};

}  // namespace kestrel
