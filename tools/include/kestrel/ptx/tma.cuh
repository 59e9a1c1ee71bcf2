// Bulk tensor copies (TMA, sm_90) of boxes of a matrix between global and shared memory. Tensor maps come from
// kestrel/tensor_map.h and are kernel parameters (__grid_constant__). Before sm_90 every function is empty.
#pragma once

#include <cuda.h>
#include <kestrel/ptx/shared.cuh>

#include <cstdint>

namespace kestrel::ptx {

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

// Loads the box at (column, row). The mbarrier counts its bytes, including those of the part outside the matrix.
__device__ __forceinline__ void tma_load(uint32_t shared, const CUtensorMap& map, int column, int row,
                                         uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
#endif
}

// The same into every CTA of the cluster whose rank is in `ranks`, at the same addresses, with the same mbarrier there.
__device__ __forceinline__ void tma_load_multicast(uint32_t shared, const CUtensorMap& map, int column, int row,
                                                   uint64_t* barrier, uint16_t ranks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, "
      "%3}], [%4], %5;" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(ranks)
      : "memory");
#endif
}

// Loads the box at coordinates (k, 0, 0, group, outer) of a map of five dimensions; see kestrel/tensor_map.h. policy:
// of kestrel/ptx/cache.cuh, or 0.
__device__ __forceinline__ void tma_load_grouped(uint32_t shared, const CUtensorMap& map, int k, int group, int outer,
                                                 uint64_t* barrier, uint64_t policy) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (policy == 0) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %5, %5, %3, %4}], "
        "[%6];" ::"r"(shared),
        "l"(&map), "r"(k), "r"(group), "r"(outer), "r"(0), "r"(shared_address(barrier))
        : "memory");
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %5, "
      "%5, %3, %4}], [%6], %7;" ::"r"(shared),
      "l"(&map), "r"(k), "r"(group), "r"(outer), "r"(0), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
#endif
}

__device__ __forceinline__ void tma_load_grouped_multicast(uint32_t shared, const CUtensorMap& map, int k, int group,
                                                           int outer, uint64_t* barrier, uint16_t ranks,
                                                           uint64_t policy) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (policy == 0) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
        "{%2, %5, %5, %3, %4}], [%6], %7;" ::"r"(shared),
        "l"(&map), "r"(k), "r"(group), "r"(outer), "r"(0), "r"(shared_address(barrier)), "h"(ranks)
        : "memory");
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%2, %5, %5, %3, %4}], [%6], %7, %8;" ::"r"(shared),
      "l"(&map), "r"(k), "r"(group), "r"(outer), "r"(0), "r"(shared_address(barrier)), "h"(ranks), "l"(policy)
      : "memory");
#endif
}

// Stores the box at (column, row) as part of this thread's current bulk group.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, int column, int row, uint32_t shared) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column),
               "r"(row), "r"(shared)
               : "memory");
#endif
}

// Copies of contiguous bytes, without a map: addresses and sizes are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}

// The store is part of this thread's current bulk group.
__device__ __forceinline__ void bulk_store(void* global, uint32_t shared, uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
#endif
}

__device__ __forceinline__ void bulk_commit() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Waits until at most `pending` of this thread's last bulk groups still have to read shared memory.
template <int pending>
__device__ __forceinline__ void bulk_wait_read() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
#endif
}

// One arrival on an mbarrier at a DSMEM address (map_shared). It releases at the scope of the CTA: enough to free a
// pipeline stage that only wgmma has read. At the scope of the cluster it would be a fence of the whole GPU.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

}  // namespace kestrel::ptx
