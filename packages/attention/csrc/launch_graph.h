// The kernels of a call as one CUDA graph, whose parameters are set anew for each launch.
//
// A launch of a graph takes the host less time than that of one kernel, and setting a kernel's parameters a tenth of
// it. The parameters come from the entry points themselves: while a graph records, their launches go to it.
#pragma once

#include <cuda.h>
#include <dlfcn.h>
#include <driver_types.h>
#include <tvm/ffi/error.h>

#include <cstddef>
#include <type_traits>
#include <vector>

namespace kestrel::attention {

// Functions of the driver. The library is linked with no CUDA runtime of its own.
struct Driver {
  decltype(&::cuCtxGetDevice) context_device;
  decltype(&::cuStreamIsCapturing) stream_is_capturing;
  decltype(&::cuThreadExchangeStreamCaptureMode) exchange_capture_mode;
  decltype(&::cuGraphCreate) create;
  decltype(&::cuGraphAddKernelNode) add_kernel;
  decltype(&::cuGraphAddDependencies) add_dependencies;
  decltype(&::cuGraphInstantiate) instantiate;
  decltype(&::cuGraphExecKernelNodeSetParams) set_parameters;
  decltype(&::cuGraphLaunch) launch;
  decltype(&::cuGraphExecDestroy) destroy_instance;
  decltype(&::cuGraphDestroy) destroy;

  // Whether a graph may be launched: the device is current in this thread, and its stream is not captured.
  bool allows_graphs(int device, CUstream stream) const {
    CUdevice current;
    CUstreamCaptureStatus status;
    return context_device(&current) == CUDA_SUCCESS && current == device &&
           stream_is_capturing(stream, &status) == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_NONE;
  }

  // The functions, or nullptr where a driver lacks one of them.
  static const Driver* get() {
    static const Driver driver;
    return driver.complete_ ? &driver : nullptr;
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    const auto find = [&](auto& function, const char* name) {
      function = library ? reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name)) : nullptr;
      complete_ = complete_ && function;
    };
    find(context_device, "cuCtxGetDevice");
    find(stream_is_capturing, "cuStreamIsCapturing");
    find(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
    find(create, "cuGraphCreate");
    find(add_kernel, "cuGraphAddKernelNode_v2");
    find(add_dependencies, "cuGraphAddDependencies_v2");
    find(instantiate, "cuGraphInstantiateWithFlags");
    find(set_parameters, "cuGraphExecKernelNodeSetParams_v2");
    find(launch, "cuGraphLaunch");
    find(destroy_instance, "cuGraphExecDestroy");
    find(destroy, "cuGraphDestroy");
  }
  bool complete_ = true;
};

class LaunchGraph {
 public:
  explicit LaunchGraph(const Driver& driver) : driver_(driver) {}
  ~LaunchGraph() {
    const RelaxedCapture relaxed(&driver_);
    if (instance_) driver_.destroy_instance(instance_);  // a launch in flight completes
    if (graph_) driver_.destroy(graph_);
  }
  LaunchGraph(const LaunchGraph&) = delete;
  LaunchGraph& operator=(const LaunchGraph&) = delete;

  // The graph that records the launches of this thread, or nullptr.
  static LaunchGraph*& recording() {
    static thread_local LaunchGraph* graph = nullptr;
    return graph;
  }

  // Launches as one graph what `launch_all` launches: the same kernels in every call. False: nothing was launched, here
  // and in all further calls.
  template <typename F>
  bool run(CUstream stream, const F& launch_all) {
    if (failed_) return false;
    const RelaxedCapture relaxed(instance_ ? nullptr : &driver_);
    failed_ = !(record(launch_all) && (instance_ || driver_.instantiate(&instance_, graph_, 0) == CUDA_SUCCESS) &&
                driver_.launch(instance_, stream) == CUDA_SUCCESS);
    return !failed_;
  }

  // Takes the next kernel. Returns an error of CUDA, or 0.
  int take(const cudaLaunchConfig_t& config, const void* kernel, void** parameters) {
    CUDA_KERNEL_NODE_PARAMS node{};
    node.kern = static_cast<CUkernel>(const_cast<void*>(kernel));
    node.gridDimX = config.gridDim.x;
    node.gridDimY = config.gridDim.y;
    node.gridDimZ = config.gridDim.z;
    node.blockDimX = config.blockDim.x;
    node.blockDimY = config.blockDim.y;
    node.blockDimZ = config.blockDim.z;
    node.sharedMemBytes = static_cast<unsigned>(config.dynamicSmemBytes);
    node.kernelParams = parameters;
    if (!instance_) return append(node, config);
    if (next_ == nodes_.size()) return CUDA_ERROR_INVALID_VALUE;
    return driver_.set_parameters(instance_, nodes_[next_++], &node);
  }

 private:
  struct Recording {
    explicit Recording(LaunchGraph* graph) { recording() = graph; }
    ~Recording() { recording() = nullptr; }
  };

  // Lets this thread create a graph while another one captures a stream. driver: nullptr for nothing.
  struct RelaxedCapture {
    explicit RelaxedCapture(const Driver* driver) : driver(driver) {
      if (driver) driver->exchange_capture_mode(&mode);
    }
    ~RelaxedCapture() {
      if (driver) driver->exchange_capture_mode(&mode);
    }
    const Driver* driver;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  };

  // Whether every node was added or set.
  template <typename F>
  bool record(const F& launch_all) {
    if (!graph_ && driver_.create(&graph_, 0) != CUDA_SUCCESS) return false;
    next_ = 0;
    try {
      const Recording recording(this);
      launch_all();
    } catch (const tvm::ffi::Error&) {  // an entry point whose kernel was not taken
      return false;
    }
    return next_ == nodes_.size();
  }

  // Adds a node behind the last one, which it waits for as it would in a stream.
  CUresult append(const CUDA_KERNEL_NODE_PARAMS& params, const cudaLaunchConfig_t& config) {
    CUgraphNode node;
    CUresult error = driver_.add_kernel(&node, graph_, nullptr, 0, &params);
    if (error == CUDA_SUCCESS && !nodes_.empty()) {
      CUgraphEdgeData edge{};
      if (launches_early(config)) {
        edge.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
        edge.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
      }
      error = driver_.add_dependencies(graph_, &nodes_.back(), &node, &edge, 1);
    }
    if (error != CUDA_SUCCESS) return error;
    nodes_.push_back(node);
    ++next_;
    return CUDA_SUCCESS;
  }

  static bool launches_early(const cudaLaunchConfig_t& config) {
    for (unsigned i = 0; i < config.numAttrs; ++i) {
      const auto& attribute = config.attrs[i];
      if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
        return attribute.val.programmaticStreamSerializationAllowed;
      }
    }
    return false;
  }

  const Driver& driver_;
  CUgraph graph_ = nullptr;
  CUgraphExec instance_ = nullptr;
  std::vector<CUgraphNode> nodes_;
  size_t next_ = 0;      // node to be set
  bool failed_ = false;  // once, and so never again
};

}  // namespace kestrel::attention
