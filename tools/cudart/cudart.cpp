// The functions of the CUDA runtime that nvcc's host code and the families call, made of the driver's.
//
// Each family links this file in place of NVIDIA's static runtime, which takes 0.7 MB in every library. libcuda is
// opened at the first call, so a library loads on machines without a GPU. Error codes of the runtime and the driver are
// the same numbers. A call leaves no error behind for the runtime that the caller uses.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fatbinary_section.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <unordered_map>

namespace {

constexpr int kDevices = 64;      // for which device attributes and contexts are kept
constexpr int kAttributes = 160;  // device attributes that are kept

cudaError_t error_of(CUresult result) { return static_cast<cudaError_t>(result); }

// -- driver -----------------------------------------------------------------------------------------------------------

// The functions of libcuda by name; null where the driver lacks one.
struct Driver {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

  template <typename Function>
  Function* find(const char* name) const {
    return library ? reinterpret_cast<Function*>(dlsym(library, name)) : nullptr;
  }

#define DRIVER_FUNCTION(name) decltype(::name)* name = find<decltype(::name)>(#name)
  DRIVER_FUNCTION(cuInit);
  DRIVER_FUNCTION(cuGetErrorName);
  DRIVER_FUNCTION(cuGetErrorString);
  DRIVER_FUNCTION(cuDeviceGetAttribute);
  DRIVER_FUNCTION(cuDevicePrimaryCtxRetain);
  DRIVER_FUNCTION(cuCtxSetCurrent);
  DRIVER_FUNCTION(cuCtxGetDevice);
  DRIVER_FUNCTION(cuCtxGetId);
  DRIVER_FUNCTION(cuLibraryLoadData);
  DRIVER_FUNCTION(cuLibraryGetKernel);
  DRIVER_FUNCTION(cuKernelGetAttribute);
  DRIVER_FUNCTION(cuKernelGetFunction);
  DRIVER_FUNCTION(cuKernelSetAttribute);
  DRIVER_FUNCTION(cuLaunchKernelEx);
  DRIVER_FUNCTION(cuMemsetD2D8Async);
  DRIVER_FUNCTION(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags);
  DRIVER_FUNCTION(cuOccupancyMaxActiveClusters);
#undef DRIVER_FUNCTION

  // cuLaunchKernelEx is the newest of them.
  const CUresult state = library && cuLaunchKernelEx ? cuInit(0) : CUDA_ERROR_STUB_LIBRARY;
};

const Driver& driver() {
  static const Driver found;
  return found;
}

// -- kernels ----------------------------------------------------------------------------------------------------------

// The machine code of one source file, for all architectures.
struct Image {
  const void* data;
  std::once_flag once;
  CUlibrary library = nullptr;
  CUresult state = CUDA_SUCCESS;

  explicit Image(const void* image) : data(image) {}

  CUresult load() {
    std::call_once(
        once, [this] { state = driver().cuLibraryLoadData(&library, data, nullptr, nullptr, 0, nullptr, nullptr, 0); });
    return state;
  }
};

struct Kernel {
  // Its function in one context. Contexts are known by numbers that are never given twice.
  struct Loaded {
    unsigned long long context;
    CUfunction function;
    const Loaded* next;
  };

  Image* image;
  const char* name;
  std::atomic<CUkernel> handle{nullptr};
  std::atomic<const Loaded*> loaded{nullptr};

  Kernel(Image* image, const char* name) : image(image), name(name) {}
};

// Kernels by the address of their host function. Filled when the library is loaded, only read from then on, and never
// freed: threads may launch while the process ends.
std::unordered_map<const void*, Kernel>& kernels() {
  static auto& registered = *new std::unordered_map<const void*, Kernel>;
  return registered;
}

cudaError_t find_kernel(const void* function, Kernel** kernel, CUkernel* handle) {
  if (driver().state != CUDA_SUCCESS) return error_of(driver().state);
  const auto found = kernels().find(function);
  if (found == kernels().end()) return cudaErrorInvalidDeviceFunction;
  *kernel = &found->second;
  *handle = (*kernel)->handle.load(std::memory_order_acquire);
  if (*handle) return cudaSuccess;
  CUresult state = (*kernel)->image->load();
  if (state == CUDA_SUCCESS) state = driver().cuLibraryGetKernel(handle, (*kernel)->image->library, (*kernel)->name);
  if (state == CUDA_SUCCESS) (*kernel)->handle.store(*handle, std::memory_order_release);
  return error_of(state);
}

// The kernel of a host function. It belongs to no context; functions of the driver take it in place of a CUfunction.
cudaError_t find_kernel(const void* function, CUkernel* handle) {
  Kernel* kernel;
  return find_kernel(function, &kernel, handle);
}

// The function of a host function in the current context, which launches faster than the kernel does.
cudaError_t find_function(const void* function, CUfunction* in_context) {
  Kernel* kernel;
  CUkernel handle;
  const cudaError_t error = find_kernel(function, &kernel, &handle);
  if (error != cudaSuccess) return error;
  unsigned long long context;
  CUresult state = driver().cuCtxGetId(nullptr, &context);
  if (state != CUDA_SUCCESS) return error_of(state);
  const Kernel::Loaded* first = kernel->loaded.load(std::memory_order_acquire);
  for (const Kernel::Loaded* each = first; each; each = each->next) {
    if (each->context == context) {
      *in_context = each->function;
      return cudaSuccess;
    }
  }
  state = driver().cuKernelGetFunction(in_context, handle);
  if (state != CUDA_SUCCESS) return error_of(state);
  const auto* added = new Kernel::Loaded{context, *in_context, first};  // for good, as contexts are few
  if (!kernel->loaded.compare_exchange_strong(first, added, std::memory_order_release))
    delete added;  // by the next call
  return cudaSuccess;
}

CUfunction as_function(CUkernel kernel) { return reinterpret_cast<CUfunction>(kernel); }

static_assert(sizeof(cudaLaunchAttribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(cudaLaunchAttribute, val) == offsetof(CUlaunchAttribute, value));
static_assert(int{cudaLaunchAttributeCooperative} == int{CU_LAUNCH_ATTRIBUTE_COOPERATIVE});
static_assert(int{cudaLaunchAttributeClusterDimension} == int{CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION});
static_assert(int{cudaFuncAttributeMaxDynamicSharedMemorySize} == int{CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES});

CUlaunchConfig driver_config(const cudaLaunchConfig_t& config) {
  CUlaunchConfig same{};
  same.gridDimX = config.gridDim.x;
  same.gridDimY = config.gridDim.y;
  same.gridDimZ = config.gridDim.z;
  same.blockDimX = config.blockDim.x;
  same.blockDimY = config.blockDim.y;
  same.blockDimZ = config.blockDim.z;
  same.sharedMemBytes = static_cast<unsigned>(config.dynamicSmemBytes);
  same.hStream = config.stream;
  same.attrs = reinterpret_cast<CUlaunchAttribute*>(config.attrs);
  same.numAttrs = config.numAttrs;
  return same;
}

}  // namespace

extern "C" {

// -- called by nvcc's host code when the library is loaded, and once it is closed -------------------------------------

void** __cudaRegisterFatBinary(void* wrapper) {
  return reinterpret_cast<void**>(new Image(static_cast<const __fatBinC_Wrapper_t*>(wrapper)->data));
}

void __cudaRegisterFunction(void** image, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  kernels().try_emplace(function, reinterpret_cast<Image*>(image), name);
}

void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}  // at exit, when the driver may be gone
char __cudaInitModule(void**) { return 0; }

// -- named in the host functions of kernels, for launches by <<<>>>, which do not link: cudaLaunchKernelEx launches ---

cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { return cudaErrorNotSupported; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return cudaErrorNotSupported; }

// -- called by the families -------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() { return cudaSuccess; }

const char* cudaGetErrorName(cudaError_t error) {
  const char* name = "an error without a name";
  if (driver().cuGetErrorName) driver().cuGetErrorName(static_cast<CUresult>(error), &name);
  return name ? name : "an unknown error";
}

const char* cudaGetErrorString(cudaError_t error) {
  const char* text = "no description";
  if (driver().cuGetErrorString) driver().cuGetErrorString(static_cast<CUresult>(error), &text);
  return text ? text : "no description";
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  static std::atomic<int> kept[kDevices][kAttributes];  // one more than the value; 0: not asked yet
  const int index = static_cast<int>(attribute);
  const bool keeps = device >= 0 && device < kDevices && index < kAttributes;
  if (keeps) {
    *value = kept[device][index].load(std::memory_order_relaxed) - 1;
    if (*value >= 0) return cudaSuccess;
  }
  if (driver().state != CUDA_SUCCESS) return error_of(driver().state);
  const CUresult state = driver().cuDeviceGetAttribute(value, static_cast<CUdevice_attribute>(attribute), device);
  if (state == CUDA_SUCCESS && keeps) kept[device][index].store(*value + 1, std::memory_order_relaxed);
  return error_of(state);
}

cudaError_t cudaSetDevice(int device) {
  static std::atomic<CUcontext> primary[kDevices];  // retained for the lifetime of the process
  if (driver().state != CUDA_SUCCESS) return error_of(driver().state);
  if (device < 0 || device >= kDevices) return cudaErrorInvalidDevice;
  CUcontext context = primary[device].load(std::memory_order_acquire);
  if (context == nullptr) {
    const CUresult state = driver().cuDevicePrimaryCtxRetain(&context, device);
    if (state != CUDA_SUCCESS) return error_of(state);
    primary[device].store(context, std::memory_order_release);
  }
  return error_of(driver().cuCtxSetCurrent(context));
}

// The device of the current context. A thread without one gets the context of device 0, as in NVIDIA's runtime.
cudaError_t cudaGetDevice(int* device) {
  if (driver().state != CUDA_SUCCESS) return error_of(driver().state);
  CUresult state = driver().cuCtxGetDevice(device);
  if (state != CUDA_ERROR_INVALID_CONTEXT) return error_of(state);
  *device = 0;
  return cudaSetDevice(0);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  CUfunction in_context;
  const cudaError_t error = find_function(function, &in_context);
  if (error != cudaSuccess) return error;
  const CUlaunchConfig same = driver_config(*config);
  return error_of(driver().cuLaunchKernelEx(&same, in_context, arguments, nullptr));
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  CUkernel kernel;
  int device;
  cudaError_t error = find_kernel(function, &kernel);
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const auto same = static_cast<CUfunction_attribute>(attribute);
  return error_of(driver().cuKernelSetAttribute(same, value, kernel, device));
}

// Fills the numbers of bytes, registers and threads; the other members are 0.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  CUkernel kernel;
  int device, shared = 0, local = 0, constant = 0;
  cudaError_t error = find_kernel(function, &kernel);
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  *attributes = {};
  const auto get = [&](int* value, CUfunction_attribute attribute) {
    if (error == cudaSuccess) error = error_of(driver().cuKernelGetAttribute(value, attribute, kernel, device));
  };
  get(&shared, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
  get(&local, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
  get(&constant, CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES);
  get(&attributes->numRegs, CU_FUNC_ATTRIBUTE_NUM_REGS);
  get(&attributes->maxThreadsPerBlock, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
  if (error != cudaSuccess) return error;
  attributes->sharedSizeBytes = shared;
  attributes->localSizeBytes = local;
  attributes->constSizeBytes = constant;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int threads,
                                                                   size_t shared_bytes, unsigned flags) {
  CUkernel kernel;
  const cudaError_t error = find_kernel(function, &kernel);
  if (error != cudaSuccess) return error;
  return error_of(driver().cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, as_function(kernel), threads,
                                                                                shared_bytes, flags));
}

cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* function, const cudaLaunchConfig_t* config) {
  CUkernel kernel;
  const cudaError_t error = find_kernel(function, &kernel);
  if (error != cudaSuccess) return error;
  const CUlaunchConfig same = driver_config(*config);
  return error_of(driver().cuOccupancyMaxActiveClusters(clusters, as_function(kernel), &same));
}

cudaError_t cudaMemset2DAsync(void* address, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream) {
  if (driver().state != CUDA_SUCCESS) return error_of(driver().state);
  const auto start = reinterpret_cast<CUdeviceptr>(address);
  const auto byte = static_cast<unsigned char>(value);
  return error_of(driver().cuMemsetD2D8Async(start, pitch, byte, width, height, stream));
}

// Any driver that this library runs with has the functions of CUDA 13.0, so the version asked for is of no account.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = driver().find<void>(name);
  *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return error_of(driver().state);
}

}  // extern "C"
