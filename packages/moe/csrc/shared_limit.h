// The limit of dynamic shared memory of a kernel, raised once per device instead of at every launch.
#pragma once

#include <kestrel/launch.h>

#include <atomic>

namespace kestrel::moe {

constexpr int64_t kDefaultSharedBytes = 48 * 1024;

// Raises the limit of KERNEL to BYTES on the current device, which is `device`.
template <auto KERNEL, int BYTES>
void raise_shared_limit(DLDevice device) {
  static_assert(BYTES > kDefaultSharedBytes, "a launch may use that much without raising the limit");
  static std::atomic<bool> raised[64];
  const int id = device.device_id;
  if (id < 64 && raised[id].load(std::memory_order_relaxed)) return;
  check_launch(cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES), device);
  if (id < 64) raised[id].store(true, std::memory_order_relaxed);
}

}  // namespace kestrel::moe
