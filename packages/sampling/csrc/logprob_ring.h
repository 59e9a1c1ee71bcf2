// Which rows of log-probabilities come through a TileRing, and their launch.
#pragma once

#include "logprob_rows.cuh"
#include "split.h"

namespace kestrel::sampling {

// Bulk copies need addresses and bytes that are multiples of 16.
inline bool copies_in_bulk(const char* rows, int64_t num_rows, int64_t row_bytes, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(rows) % 16 == 0 && bytes % 16 == 0 && (num_rows == 1 || row_bytes % 16 == 0);
}

// What a choice depends on besides the call.
struct Gpu {
  int64_t num_sms;
  int capability;  // 90 for sm_90
  size_t max_smem_bytes;
};

inline Gpu gpu_of(DLDevice device) {
  const int major = device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id);
  const int minor = device_attribute(cudaDevAttrComputeCapabilityMinor, device.device_id);
  return {num_sms(device), 10 * major + minor, max_smem_bytes(device)};
}

// Where bulk copies gain, as measured on an H200. Many float32 rows lose at some lengths outside these limits, such as
// 128256 and 202048.
inline bool ring_gains(const LogprobParams& p, int64_t num_sms) {
  const bool few = 16 * int64_t{p.num_rows} <= 5 * num_sms;
  return few || p.dtype != kRowFloat32 || p.length <= 102400 || (p.length >= 131072 && p.length <= 163840);
}

// of_mask: bytes of a row of the bitmask, which is copied too. A block alone has no second one to add its sums.
inline bool has_ring(const LogprobParams& p, const Split& split, const Gpu& gpu, int of_mask = 0) {
  return gpu.capability == 90 && split.cluster_size > 1 && ring_gains(p, gpu.num_sms) &&
         copies_in_bulk(p.rows, p.num_rows, p.row_bytes, int64_t{p.length} * (p.dtype == kRowFloat32 ? 4 : 2)) &&
         split.smem_bytes + RingMemory::bytes(split.threads / 32, of_mask) <= gpu.max_smem_bytes;
}

// Of a step. Loads of a history would wait for the copies.
inline bool has_ring(const StepParams& p, const Split& split, const Gpu& gpu) {
  const int of_mask = mask_bytes(p.length);
  return !p.history.ids && copies_in_bulk(p.bitmask.words, p.num_rows, p.bitmask.row_bytes, of_mask) &&
         has_ring(p, split, gpu, of_mask);
}

// In logprob_ring.cu; has_ring() holds.
void launch_ring_rows(const LogprobParams& p, bool draws, Split split, DLDevice device);
void launch_ring_step(const StepParams& p, Split split, DLDevice device);

}  // namespace kestrel::sampling
