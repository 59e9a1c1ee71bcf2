// Tensor maps: the descriptors of matrices in global memory for bulk tensor copies (TMA, sm_90).
//
// The driver function that encodes them is looked up at the first call, so no library needs libcuda to load.
#pragma once

#include <cuda.h>
#include <kestrel/launch.h>

#include <cstdint>
#include <string>

namespace kestrel {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

inline EncodeTiled find_encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result),
             "cudaGetDriverEntryPointByVersion");
  if (result != cudaDriverEntryPointSuccess || function == nullptr) unsupported("a driver without tensor maps");
  return reinterpret_cast<EncodeTiled>(function);
}

constexpr int kMapColumns = 64;  // of a box: 128 bytes, the span of the swizzle

// The map of a row-major matrix of bf16 (else fp16) elements, copied in boxes of box_rows x 64 in the 128-byte swizzle.
// Loads fill what lies outside with zeros, stores skip it. The address and, of several rows, the stride in bytes are
// multiples of 16.
inline CUtensorMap matrix_map(const void* address, bool bf16, int64_t rows, int64_t columns, int64_t row_stride,
                              int box_rows) {
  static const EncodeTiled encode = find_encode_tiled();
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(rows > 1 ? row_stride : (columns * 2 + 15) / 16 * 16)};
  const cuuint32_t box[2] = {kMapColumns, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  const CUresult error =
      encode(&map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
             const_cast<void*>(address), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) {
    raise("RuntimeError", "cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(error)));
  }
  return map;
}

}  // namespace kestrel
