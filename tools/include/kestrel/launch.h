// Launching a kernel: the tensor's device, the caller's stream, shared memory, programmatic dependent launch.
#pragma once

#include <cuda_runtime.h>
#include <kestrel/check.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <atomic>
#include <string>

namespace kestrel {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error for the next caller
  raise("RuntimeError", std::string(what) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

// Makes a device current for the lifetime of the object.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device_) check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int device_;
  int before_ = 0;
};

inline cudaStream_t current_stream(DLDevice device) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

// A device attribute; the CUDA runtime caches them.
inline int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

// Checks the result of a launch. On a GPU that the binary has no machine code for, the op runs its reference.
inline void check_launch(cudaError_t error, DLDevice device) {
  if (error == cudaErrorNoKernelImageForDevice) {
    cudaGetLastError();
    const int major = device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id);
    const int minor = device_attribute(cudaDevAttrComputeCapabilityMinor, device.device_id);
    unsupported("no machine code for a GPU of capability (" + std::to_string(major) + ", " + std::to_string(minor) +
                ")");
  }
  check_cuda(error, "kernel launch");
}

constexpr int kCachedDevices = 64;              // devices for which a function keeps what CUDA has answered
constexpr int kDefaultSharedBytes = 48 * 1024;  // dynamic shared memory that every kernel may be launched with

// Raises KERNEL's limit of dynamic shared memory, and returns it. device: the current one. The limit is BYTES or, by
// default, what the device has beside the kernel's static shared memory. CUDA is called once per device.
template <auto KERNEL, int BYTES = 0>
int raise_shared_limit(DLDevice device) {
  static_assert(BYTES == 0 || BYTES > kDefaultSharedBytes, "a launch may use that much without raising the limit");
  static std::atomic<int> limits[kCachedDevices];
  const int id = device.device_id;
  int limit = id < kCachedDevices ? limits[id].load(std::memory_order_relaxed) : 0;
  if (limit) return limit;
  limit = BYTES;
  if (!limit) {
    cudaFuncAttributes attributes{};
    check_launch(cudaFuncGetAttributes(&attributes, KERNEL), device);
    const int device_limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
    limit = device_limit - static_cast<int>(attributes.sharedSizeBytes);
  }
  check_launch(cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, limit), device);
  if (id < kCachedDevices) limits[id].store(limit, std::memory_order_relaxed);
  return limit;
}

// Launches kernel(params) with programmatic dependent launch: the kernel must call pdl_wait() (pdl.cuh) before it
// accesses anything that is not constant. GPUs before sm_90 get a plain launch. shared_bytes: dynamic shared memory;
// above kDefaultSharedBytes the caller must raise the kernel's limit first. cluster: blocks per cluster, used from
// sm_90 on. balanced: use the load-balancing scheduling policy for clusters. By default the blocks of a cluster may
// share an SM while other SMs are idle.
template <typename Params>
void launch_pdl(void (*kernel)(Params), dim3 grid, dim3 block, DLDevice device, const Params& params,
                size_t shared_bytes = 0, unsigned cluster = 1, bool balanced = false) {
  const int major = device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id);
  cudaLaunchAttribute attributes[3]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  attributes[2].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
  attributes[2].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicyLoadBalancing;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = current_stream(device);
  config.attrs = attributes;
  config.numAttrs = major < 9 ? 0 : cluster == 1 ? 1 : balanced ? 3 : 2;
  check_launch(cudaLaunchKernelEx(&config, kernel, params), device);
}

}  // namespace kestrel
