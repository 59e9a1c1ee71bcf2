// A dense layer by the vendor's product: cublasLt, whose epilogue adds the bias, GELU (tanh) and the residual.
//
// torch has loaded the library into the process, and this binary is not linked with it. So the few functions and
// constants that it needs are declared here, as the library's documentation describes them; they are the same in its
// major versions 12 and 13.
#include <dlfcn.h>

#include <kestrel/launch.h>
#include <kestrel/tensor.h>

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>

#include "dense_launch.h"

namespace kestrel::moe {

namespace cublas_lt {

using Handle = void*;
using MatmulDesc = void*;
using Layout = void*;
using Preference = void*;
struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};
constexpr int kSuccess = 0;
constexpr int kFloat = 0, kHalf = 2, kBfloat = 14;  // cudaDataType_t
constexpr int kComputeFloat = 68;                   // CUBLAS_COMPUTE_32F
constexpr int32_t kTransposed = 1;
constexpr int32_t kDevicePointers = 1;                                         // CUBLASLT_POINTER_MODE_DEVICE
constexpr int kPointerMode = 2, kTransA = 3, kEpilogue = 7, kBiasPointer = 8;  // CUBLASLT_MATMUL_DESC_*
constexpr uint32_t kDefault = 1, kBias = 4, kGelu = 32;                        // CUBLASLT_EPILOGUE_*
constexpr int kWorkspaceBytes = 1;                                             // CUBLASLT_MATMUL_PREF_*
constexpr int kAlignments[] = {5, 6, 7, 8};                                    // of A, B, C and D

struct Library {
  int (*create)(Handle*);
  int (*describe)(MatmulDesc*, int compute, int scale);
  int (*set)(MatmulDesc, int, const void*, size_t);
  int (*destroy)(MatmulDesc);
  int (*create_layout)(Layout*, int, uint64_t rows, uint64_t columns, int64_t leading);
  int (*destroy_layout)(Layout);
  int (*create_preference)(Preference*);
  int (*set_preference)(Preference, int, const void*, size_t);
  int (*destroy_preference)(Preference);
  int (*choose)(Handle, MatmulDesc, Layout a, Layout b, Layout c, Layout d, Preference, int most, Heuristic*, int*);
  int (*multiply)(Handle, MatmulDesc, const void* alpha, const void* a, Layout, const void* b, Layout, const void* beta,
                  const void* c, Layout, void* d, Layout, const Algorithm*, void* workspace, size_t, cudaStream_t);

  // The functions, or nullptr where the process has no such library.
  static const Library* get() {
    static const Library library;
    return library.complete_ ? &library : nullptr;
  }

 private:
  Library() {
    void* loaded = nullptr;
    for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
      if (loaded == nullptr) loaded = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
    }
    const auto find = [&](auto& function, const char* name) {
      function = loaded ? reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(loaded, name)) : nullptr;
      complete_ = complete_ && function;
    };
    find(create, "cublasLtCreate");
    find(describe, "cublasLtMatmulDescCreate");
    find(set, "cublasLtMatmulDescSetAttribute");
    find(destroy, "cublasLtMatmulDescDestroy");
    find(create_layout, "cublasLtMatrixLayoutCreate");
    find(destroy_layout, "cublasLtMatrixLayoutDestroy");
    find(create_preference, "cublasLtMatmulPreferenceCreate");
    find(set_preference, "cublasLtMatmulPreferenceSetAttribute");
    find(destroy_preference, "cublasLtMatmulPreferenceDestroy");
    find(choose, "cublasLtMatmulAlgoGetHeuristic");
    find(multiply, "cublasLtMatmul");
  }
  bool complete_ = true;
};

// An object of the library, destroyed with this one.
struct Owned {
  void* object = nullptr;
  int (*destroy)(void*);

  explicit Owned(int (*destroy)(void*)) : destroy(destroy) {}
  ~Owned() {
    if (object) destroy(object);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
};

}  // namespace cublas_lt

namespace lt = cublas_lt;

// A product D = A B + C in the library's columns: A the weight, transposed, B is x', C the residual' and D the result'.
// Its descriptors fit all operands of these sizes and strides.
class VendorProduct {
 public:
  // one: 1 in the device's memory, or nullptr for factors in the host's.
  VendorProduct(const lt::Library& library, const LinearParams& p, int type, const float* one = nullptr)
      : library_(library),
        one_(one),
        description_(library.destroy),
        a_(library.destroy_layout),
        b_(library.destroy_layout),
        c_(library.destroy_layout),
        d_(library.destroy_layout) {
    check(library.describe(&description_.object, lt::kComputeFloat, lt::kFloat));
    set(lt::kTransA, lt::kTransposed);
    const uint32_t gelu = p.activation == LinearActivation::gelu_tanh ? lt::kGelu : 0, bias = p.bias ? lt::kBias : 0;
    set(lt::kEpilogue, gelu | bias ? gelu | bias : lt::kDefault);
    if (one) set(lt::kPointerMode, lt::kDevicePointers);
    const auto layout = [&](lt::Owned& of, int rows, int columns, int64_t bytes) {
      check(library.create_layout(&of.object, type, rows, columns, columns > 1 ? bytes / 2 : rows));
    };
    layout(a_, p.width, p.outputs, p.weight_stride);
    layout(b_, p.width, p.tokens, p.x_stride);
    layout(c_, p.outputs, p.tokens, p.residual ? p.residual_stride : p.out_stride);
    layout(d_, p.outputs, p.tokens, p.out_stride);
  }

  // The library's first choice without a workspace; false if it has none.
  bool choose(lt::Handle handle, lt::Algorithm* algorithm) const {
    lt::Owned preference(library_.destroy_preference);
    check(library_.create_preference(&preference.object));
    const uint64_t workspace = 0;
    const uint32_t alignment = 16;
    check(library_.set_preference(preference.object, lt::kWorkspaceBytes, &workspace, sizeof(workspace)));
    for (int of : lt::kAlignments) check(library_.set_preference(preference.object, of, &alignment, sizeof(alignment)));
    lt::Heuristic found;
    int count = 0;
    const int status = library_.choose(handle, description_.object, a_.object, b_.object, c_.object, d_.object,
                                       preference.object, 1, &found, &count);
    if (status != lt::kSuccess || count < 1 || found.status != lt::kSuccess) return false;
    *algorithm = found.algorithm;
    return true;
  }

  // False if the library refuses these operands.
  bool run(lt::Handle handle, const LinearParams& p, const lt::Algorithm& algorithm, cudaStream_t stream) {
    if (p.bias != bias_) {
      set(lt::kBiasPointer, p.bias);
      bias_ = p.bias;
    }
    const float one = 1.f, zero = 0.f;
    const float* const alpha = one_ ? one_ : &one;
    const float* const beta = p.residual ? alpha : &zero;
    const void* const c = p.residual ? p.residual : p.out;
    return library_.multiply(handle, description_.object, alpha, p.weight, a_.object, p.x, b_.object, beta, c,
                             c_.object, p.out, d_.object, &algorithm, nullptr, 0, stream) == lt::kSuccess;
  }

 private:
  static void check(int status) {
    if (status != lt::kSuccess) raise("RuntimeError", "cublasLt: status " + std::to_string(status));
  }
  template <typename Value>
  void set(int attribute, const Value& value) const {
    check(library_.set(description_.object, attribute, &value, sizeof(value)));
  }

  const lt::Library& library_;
  const float* one_;
  const char* bias_ = nullptr;  // what the description holds
  lt::Owned description_, a_, b_, c_, d_;
};

// Permits calls that capture forbids by default. They enqueue no work on the stream.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

constexpr size_t kMaxChoices = 4096, kMaxProducts = 512;
__device__ float device_one = 1.f;  // in each device's memory

// The library's handle and its choices of algorithms on one device, for all threads. Never freed: the library may end
// before this binary does.
struct VendorState {
  struct Choice {
    bool exists;
    lt::Algorithm algorithm;
  };
  std::mutex mutex;
  lt::Handle handle = nullptr;
  const float* one = nullptr;  // device_one's address
  bool failed = false;
  std::map<std::array<int, 5>, Choice> choices;  // by dtype, epilogue, T, N and K

  // False: there is no handle, or no algorithm.
  bool choose(const lt::Library& library, const LinearParams& p, int type, int epilogue, lt::Algorithm* algorithm) {
    const std::lock_guard lock(mutex);
    if (handle == nullptr && !failed) {
      const RelaxedCapture relaxed;
      void* address = nullptr;
      failed = library.create(&handle) != lt::kSuccess || cudaGetSymbolAddress(&address, device_one) != cudaSuccess;
      if (failed) cudaGetLastError();  // clears the error for the next caller
      one = static_cast<const float*>(address);
    }
    if (failed) return false;
    const std::array<int, 5> key{type, epilogue, p.tokens, p.outputs, p.width};
    auto known = choices.find(key);
    if (known == choices.end()) {
      LinearParams whole = p;  // rows without gaps, so that the choice, and the bits, do not depend on strides
      whole.x_stride = whole.weight_stride = int64_t{p.width} * 2;
      whole.residual_stride = whole.out_stride = int64_t{p.outputs} * 2;
      Choice choice{};
      choice.exists = VendorProduct(library, whole, type).choose(handle, &choice.algorithm);
      if (choices.size() >= kMaxChoices) choices.clear();
      known = choices.emplace(key, choice).first;
    }
    *algorithm = known->second.algorithm;
    return known->second.exists;
  }
};

// A product with the library's choice for it, of one thread: its description holds the bias of the last call.
struct ChosenProduct {
  lt::Handle handle;
  lt::Algorithm algorithm;
  VendorProduct product;
};

bool launch_vendor(const LinearParams& p, DLDataType dtype, DLDevice device) {
  static std::array<VendorState, kCachedDevices>& states = *new std::array<VendorState, kCachedDevices>;
  // Freed when the thread ends. By device, dtype, epilogue, T, N, K and strides; null: there is no algorithm.
  static thread_local std::map<std::array<int64_t, 10>, std::unique_ptr<ChosenProduct>> products;
  const lt::Library* const library = lt::Library::get();
  const bool bf16 = same_dtype(dtype, kBFloat16);
  if (library == nullptr || device.device_id >= kCachedDevices || !(bf16 || same_dtype(dtype, kFloat16))) return false;
  // Its GELU is that with tanh, and comes after the sum with C.
  if (p.activation == LinearActivation::gelu || (p.activation != LinearActivation::none && p.residual)) return false;
  if (p.width == 0 || !aligned16(p.bias)) return false;
  const auto aligned = [](const char* rows, int64_t stride, int count, int64_t bytes) {
    return aligned16(rows) && (count == 1 || (stride % 16 == 0 && stride >= bytes));
  };
  const int64_t in_bytes = int64_t{p.width} * 2, out_bytes = int64_t{p.outputs} * 2;
  if (out_bytes % 16 || !aligned(p.x, p.x_stride, p.tokens, in_bytes) ||
      !aligned(p.weight, p.weight_stride, p.outputs, in_bytes) || !aligned(p.out, p.out_stride, p.tokens, out_bytes) ||
      !aligned(p.residual, p.residual_stride, p.tokens, p.residual == nullptr ? 0 : out_bytes)) {
    return false;
  }

  const int type = bf16 ? lt::kBfloat : lt::kHalf;
  const int epilogue = (p.bias != nullptr) + 2 * (p.residual != nullptr) + 4 * static_cast<int>(p.activation);
  // Where it knows that C is D and beta is 1, the library rounds the product before it adds C.
  const bool in_place = p.residual == p.out;
  const std::array<int64_t, 10> key{
      device.device_id, type,       epilogue + 16 * in_place, p.tokens,          p.outputs,
      p.width,          p.x_stride, p.weight_stride,          p.residual_stride, p.out_stride};
  auto known = products.find(key);
  if (known == products.end()) {
    VendorState& state = states[device.device_id];
    std::unique_ptr<ChosenProduct> chosen;
    lt::Algorithm algorithm;
    if (state.choose(*library, p, type, epilogue, &algorithm)) {
      const float* const one = in_place ? state.one : nullptr;
      chosen.reset(new ChosenProduct{state.handle, algorithm, VendorProduct(*library, p, type, one)});
    }
    if (products.size() >= kMaxProducts) products.clear();
    known = products.emplace(key, std::move(chosen)).first;
  }
  ChosenProduct* const chosen = known->second.get();
  return chosen && chosen->product.run(chosen->handle, p, chosen->algorithm, current_stream(device));
}

}  // namespace kestrel::moe
