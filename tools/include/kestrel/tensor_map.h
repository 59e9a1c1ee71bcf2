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

// A map, by default in the 128-byte swizzle. Strides, in bytes, are those of all dimensions but the innermost. Loads
// fill what lies outside with zeros, stores skip it. The address and the strides are multiples of 16.
template <int RANK>
CUtensorMap encode_map(const void* address, CUtensorMapDataType type, const cuuint64_t (&sizes)[RANK],
                       const cuuint64_t (&strides)[RANK - 1], const cuuint32_t (&box)[RANK],
                       CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                       CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  static const EncodeTiled encode = find_encode_tiled();
  CUtensorMap map;
  cuuint32_t steps[RANK];
  for (cuuint32_t& step : steps) step = 1;
  const CUresult error = encode(&map, type, RANK, const_cast<void*>(address), sizes, strides, box, steps,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) {
    unsupported("the driver takes no tensor map: cuTensorMapEncodeTiled, error " +
                std::to_string(static_cast<int>(error)));
  }
  return map;
}

// The map of a row-major matrix of bf16 (else fp16) elements, copied in boxes of box_rows x 64.
inline CUtensorMap matrix_map(const void* address, bool bf16, int64_t rows, int64_t columns, int64_t row_stride,
                              int box_rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(rows > 1 ? row_stride : (columns * 2 + 15) / 16 * 16)};
  const cuuint32_t box[2] = {kMapColumns, static_cast<cuuint32_t>(box_rows)};
  return encode_map(address, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, sizes, strides,
                    box);
}

// The order of 16 rows in shared memory. `even_first`: in a wgmma operand a thread then holds two neighbouring rows.
enum class RowOrder { ascending, even_first };

// The map of matrices [outer, rows, columns], whose rows are grouped by 16. A box holds `groups` groups by 128 bytes of
// the columns.
inline CUtensorMap grouped_rows_map(const void* address, CUtensorMapDataType type, int element_bytes, int64_t outer,
                                    int64_t rows, int64_t columns, int64_t outer_stride, int64_t row_stride, int groups,
                                    RowOrder order,
                                    CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const bool even_first = order == RowOrder::even_first;
  const cuuint64_t sizes[5] = {size(columns), 8, 2, size(rows / 16), size(outer)};
  const cuuint64_t strides[4] = {size(even_first ? 2 * row_stride : row_stride),
                                 size(even_first ? row_stride : 8 * row_stride), size(16 * row_stride),
                                 size(outer > 1 ? outer_stride : 16 * row_stride)};
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(128 / element_bytes), 8, 2, static_cast<cuuint32_t>(groups), 1};
  return encode_map(address, type, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B, promotion);
}

}  // namespace kestrel
