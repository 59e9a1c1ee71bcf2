// Launching a grid with a barrier inside.
#pragma once

#include <kestrel/launch.h>

namespace kestrel::quant {

// Returns false where not all blocks can be resident, as in a context that owns a part of the SMs. PDL cannot deadlock
// the barrier: the previous kernel has started all its blocks when it triggers this one, and this one triggers the next
// when all its own blocks run.
template <typename Params>
bool launch_cooperative(void (*kernel)(Params), dim3 grid, dim3 block, int shared_bytes, DLDevice device,
                        const Params& p) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = current_stream(device);
  config.attrs = attributes;
  config.numAttrs = device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id) >= 9 ? 2 : 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, p);
  if (error == cudaErrorCooperativeLaunchTooLarge || error == cudaErrorNotSupported) {
    cudaGetLastError();  // clears the error for the next caller
    return false;
  }
  check_launch(error, device);
  return true;
}

}  // namespace kestrel::quant
