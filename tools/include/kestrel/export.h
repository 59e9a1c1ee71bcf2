// Exporting an entry point, as TVM_FFI_DLL_EXPORT_TYPED_FUNC does. That macro puts the conversion of every argument,
// with its message, into every entry point: 20 KB each. Here the entry points of a library share them.
#pragma once

#include <kestrel/check.h>
#include <tvm/ffi/function.h>

#include <string>
#include <type_traits>
#include <utility>

// Exports a function as the tvm-ffi symbol __tvm_ffi_<name>.
#define KESTREL_EXPORT(name, function)                                                                                 \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* arguments, int32_t count,                 \
                                                     TVMFFIAny* result) {                                              \
    return ::kestrel::call_entry_point(#name, function, reinterpret_cast<const ::kestrel::AnyView*>(arguments), count, \
                                       reinterpret_cast<::tvm::ffi::Any*>(result));                                    \
  }                                                                                                                    \
  static_assert(true)

namespace kestrel {

[[noreturn, gnu::cold, gnu::noinline]] inline void refuse_argument(const char* function, int index,
                                                                   const std::string& expected, const AnyView& given) {
  raise("TypeError", "Mismatched type on argument #" + std::to_string(index) + " when calling: `" + function +
                         "`. Expected `" + expected + "` but got `" + given.GetTypeKey() + "`");
}

[[noreturn, gnu::cold, gnu::noinline]] inline void refuse_count(const char* function, size_t expected, int given) {
  raise("TypeError", std::string("Mismatched number of arguments when calling: `") + function + "`. Expected " +
                         std::to_string(expected) + " but got " + std::to_string(given) + " arguments");
}

// An argument of an entry point as the type that it takes.
template <typename T>
[[gnu::noinline]] T argument(const char* function, int index, const AnyView* arguments) {
  if constexpr (std::is_same_v<T, AnyView>) {
    return arguments[index];
  } else {
    auto value = arguments[index].try_cast<T>();
    if (!value.has_value()) refuse_argument(function, index, tvm::ffi::TypeTraits<T>::TypeStr(), arguments[index]);
    return *std::move(value);
  }
}

// Hands the exception that is being handled to the caller in Python.
[[gnu::cold, gnu::noinline]] inline int hand_over_exception() {
  try {
    throw;
  } catch (const tvm::ffi::Error& error) {
    tvm::ffi::detail::SetSafeCallRaised(error);
  } catch (const std::exception& error) {
    tvm::ffi::detail::SetSafeCallRaised(tvm::ffi::Error("InternalError", error.what(), ""));
  }
  return -1;
}

template <typename Result, typename... T, size_t... INDEX>
int call_entry_point(const char* name, Result (*function)(T...), const AnyView* arguments, int count,
                     tvm::ffi::Any* result, std::index_sequence<INDEX...>) {
  try {
    if (count != sizeof...(T)) refuse_count(name, sizeof...(T), count);
    if constexpr (std::is_void_v<Result>) {
      function(argument<std::decay_t<T>>(name, INDEX, arguments)...);
    } else {
      *result = function(argument<std::decay_t<T>>(name, INDEX, arguments)...);
    }
    return 0;
  } catch (...) {
    return hand_over_exception();
  }
}

template <typename Result, typename... T>
int call_entry_point(const char* name, Result (*function)(T...), const AnyView* arguments, int count,
                     tvm::ffi::Any* result) {
  return call_entry_point(name, function, arguments, count, result, std::index_sequence_for<T...>());
}

}  // namespace kestrel
