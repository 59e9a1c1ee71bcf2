// Several kernels launched by one call, which gives only the addresses of their tensors.
//
// Everything else of the arguments is bound once, for all calls with tensors of the same forms. It takes the host less
// time to fill addresses into prepared arguments than to convert tensors and numbers of Python for every kernel.
#include "launch_graph.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kestrel::attention {

using tvm::ffi::Any;
using tvm::ffi::AnyView;
using tvm::ffi::Function;

constexpr int kMaxArguments = 64;     // of a kernel
constexpr int kMaxTensors = 24;       // among them
constexpr int kCallsBeforeGraph = 4;  // a graph takes the time of several calls to make
constexpr int kMaxGraphs = 256;       // of the process: a graph keeps memory of the driver

std::atomic<int> graphs_made{0};
thread_local int64_t launches_seen = 0;  // of this library, in this thread

// An argument that is a tensor, but for its address.
struct TensorForm {
  DLTensor tensor;  // without shape and strides, which are:
  std::vector<int64_t> shape, strides;
  int argument;     // its index
  int64_t address;  // the index of its address

  TensorForm(const DLTensor& like, int argument, int64_t address)
      : tensor(like),
        shape(like.shape, like.shape + like.ndim),
        strides(like.strides, like.strides + like.ndim),
        argument(argument),
        address(address) {
    tensor.byte_offset = 0;
  }
};

// Arguments of bind_launches, read one after the other.
class Reader {
 public:
  Reader(const AnyView* given, int32_t count) : at_(given), end_(given + count) {}

  bool has_more() const { return at_ < end_; }

  const AnyView& next() {
    if (!has_more()) TVM_FFI_THROW(TypeError) << "bind_launches: too few arguments";
    return *at_++;
  }

  template <typename T>
  T next() {
    return next().cast<T>();
  }

  std::vector<int64_t> numbers(int64_t count) {
    std::vector<int64_t> found;
    for (int64_t i = 0; i < count; ++i) found.push_back(next<int64_t>());
    return found;
  }

 private:
  const AnyView *at_, *end_;
};

// A kernel's entry point and its arguments.
class BoundKernel {
 public:
  // From the entry point, the number of arguments, and of each one the index of its address, or -1 where it is the
  // same in every call, and the argument.
  explicit BoundKernel(Reader& given) : kernel_(given.next<Function>()), constants_(given.next<int64_t>()) {
    for (size_t i = 0; i < constants_.size(); ++i) {
      const auto address = given.next<int64_t>();
      if (address < 0) {
        constants_[i] = given.next();
      } else {
        forms_.emplace_back(*given.next<DLTensor*>(), static_cast<int>(i), address);
      }
    }
    if (constants_.size() > kMaxArguments || forms_.size() > kMaxTensors) {
      TVM_FFI_THROW(ValueError) << "bind_launches: a kernel has too many arguments";
    }
  }

  void launch(const AnyView* addresses) const {
    AnyView arguments[kMaxArguments];
    DLTensor tensors[kMaxTensors];
    std::copy(constants_.begin(), constants_.end(), arguments);
    for (size_t i = 0; i < forms_.size(); ++i) {
      const TensorForm& form = forms_[i];
      tensors[i] = form.tensor;
      tensors[i].shape = const_cast<int64_t*>(form.shape.data());
      tensors[i].strides = const_cast<int64_t*>(form.strides.data());
      tensors[i].data = reinterpret_cast<void*>(address_of(addresses, form.address));
      arguments[form.argument] = &tensors[i];
    }
    Any result;
    kernel_.CallPacked(arguments, static_cast<int32_t>(constants_.size()), &result);
  }

  static int64_t address_of(const AnyView* addresses, int64_t index) {
    return reinterpret_cast<const TVMFFIAny*>(addresses)[index].v_int64;
  }

 private:
  Function kernel_;
  std::vector<Any> constants_;  // None in the place of a form
  std::vector<TensorForm> forms_;
};

// What the addresses of a call must fulfil; a call that does not needs copies, or an exact check of what it writes.
struct Rules {
  int64_t written;                  // the index of a tensor that must lie apart from all others, or -1
  int64_t appended[2];              // indices of two tensors that must start at different addresses, or -1
  std::vector<int64_t> alignments;  // powers of two, one for each address
  std::vector<int64_t> spans;       // bytes from the first to the last element

  bool allow(const AnyView* addresses) const {
    const auto at = [&](int64_t index) { return BoundKernel::address_of(addresses, index); };
    for (size_t i = 0; i < alignments.size(); ++i) {
      if (at(i) & (alignments[i] - 1)) return false;
      if (written >= 0 && static_cast<int64_t>(i) != written) {
        const int64_t distance = at(i) - at(written);
        if (-spans[i] < distance && distance < spans[written]) return false;
      }
    }
    return appended[0] < 0 || at(appended[0]) != at(appended[1]);
  }
};

// Makes a stream the current one of tvm-ffi, from which the kernels' entry points take theirs.
class CurrentStream {
 public:
  CurrentStream(DLDevice device, int64_t stream) : device_(device) {
    if (device_.device_type != kDLCPU) {
      TVMFFIEnvSetStream(device_.device_type, device_.device_id, reinterpret_cast<void*>(stream), &before_);
    }
  }
  ~CurrentStream() {
    if (device_.device_type != kDLCPU) {
      TVMFFIEnvSetStream(device_.device_type, device_.device_id, before_, nullptr);
    }
  }
  CurrentStream(const CurrentStream&) = delete;
  CurrentStream& operator=(const CurrentStream&) = delete;

 private:
  DLDevice device_;
  void* before_ = nullptr;
};

class BoundLaunches {
 public:
  BoundLaunches(DLDevice device, Rules rules, std::vector<BoundKernel> kernels)
      : device_(device), rules_(std::move(rules)), kernels_(std::move(kernels)) {}
  ~BoundLaunches() { graphs_made -= static_cast<int>(graphs_.size()); }
  BoundLaunches(const BoundLaunches&) = delete;
  BoundLaunches& operator=(const BoundLaunches&) = delete;

  // given: whether only a graph may be launched, the stream, and the addresses. Returns whether the kernels were
  // launched, or None where no later call will launch a graph either.
  Any operator()(const AnyView* given, int32_t count) const {
    const AnyView* addresses = given + 2;
    bool fit = count == static_cast<int32_t>(rules_.alignments.size()) + 2;
    for (int32_t i = 1; fit && i < count; ++i) fit = given[i].type_index() == tvm::ffi::TypeIndex::kTVMFFIInt;
    if (!fit) TVM_FFI_THROW(TypeError) << "bind_launches: expected a flag, a stream, and one address per alignment";
    if (!rules_.allow(addresses)) return false;
    const int64_t stream = BoundKernel::address_of(given, 1);
    const CurrentStream current(device_, stream);
    if (given[0].cast<bool>()) return launch_graph(reinterpret_cast<CUstream>(stream), addresses);
    const int64_t before = launches_seen;
    launch_all(addresses);
    calls_.fetch_add(launches_seen - before == static_cast<int64_t>(kernels_.size()), std::memory_order_relaxed);
    return true;
  }

 private:
  void launch_all(const AnyView* addresses) const {
    for (const BoundKernel& kernel : kernels_) kernel.launch(addresses);
  }

  Any launch_graph(CUstream stream, const AnyView* addresses) const {
    const Driver* driver = Driver::get();
    if (!driver) return nullptr;
    if (calls_.load(std::memory_order_relaxed) < kCallsBeforeGraph) return false;
    if (!driver->allows_graphs(device_.device_id, stream)) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    auto found = graphs_.find(stream);
    if (found == graphs_.end()) {
      if (graphs_made >= kMaxGraphs) return graphs_.empty() ? Any(nullptr) : Any(false);
      found = graphs_.emplace(stream, std::make_unique<LaunchGraph>(*driver)).first;
      ++graphs_made;
    }
    const bool launched = found->second->run(stream, [&] { launch_all(addresses); });
    return launched ? Any(true) : Any(nullptr);
  }

  DLDevice device_;
  Rules rules_;
  std::vector<BoundKernel> kernels_;
  mutable std::atomic<int64_t> calls_{0};  // all of whose launches a graph could have recorded
  mutable std::mutex mutex_;
  mutable std::unordered_map<CUstream, std::unique_ptr<LaunchGraph>> graphs_;
};

// Type and index of the device; written, appended[2], the number of addresses, alignments and spans, as in Rules; then
// the kernels, as BoundKernel has them.
Function bind_launches(Reader given) {
  const DLDevice device{static_cast<DLDeviceType>(given.next<int64_t>()), static_cast<int32_t>(given.next<int64_t>())};
  const auto leading = given.numbers(3);
  const auto addresses = given.next<int64_t>();
  Rules rules{leading[0], {leading[1], leading[2]}, given.numbers(addresses), given.numbers(addresses)};
  std::vector<BoundKernel> kernels;
  while (given.has_more()) kernels.emplace_back(given);
  auto launches = std::make_shared<const BoundLaunches>(device, std::move(rules), std::move(kernels));
  return Function::FromPacked([launches = std::move(launches)](const AnyView* given, int32_t count, Any* result) {
    *result = (*launches)(given, count);
  });
}

}  // namespace kestrel::attention

// The entry points of this library's kernels launch by this function of NVIDIA's library; here they find ours first.
// Returns an error of CUDA, or 0.
extern "C" __attribute__((visibility("hidden"))) int _cudaLaunchKernelEx(const cudaLaunchConfig_t* config,
                                                                         const void* kernel, void** parameters) {
  using Launch = int (*)(const cudaLaunchConfig_t*, const void*, void**);
  static const auto launch = [] {
    void* library = dlopen("libcute_dsl_runtime.so", RTLD_NOW | RTLD_NOLOAD);
    return library ? reinterpret_cast<Launch>(dlsym(library, "_cudaLaunchKernelEx")) : nullptr;
  }();
  if (!launch) return cudaErrorSharedObjectSymbolNotFound;
  ++kestrel::attention::launches_seen;
  auto* graph = kestrel::attention::LaunchGraph::recording();
  return graph ? graph->take(*config, kernel, parameters) : launch(config, kernel, parameters);
}

extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_bind_launches(void*, const TVMFFIAny* given, int32_t count,
                                                          TVMFFIAny* result) {
  TVM_FFI_SAFE_CALL_BEGIN();
  const kestrel::attention::Reader reader(reinterpret_cast<const tvm::ffi::AnyView*>(given), count);
  *reinterpret_cast<tvm::ffi::Any*>(result) = kestrel::attention::bind_launches(reader);
  TVM_FFI_SAFE_CALL_END();
}
