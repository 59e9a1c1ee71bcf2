// The host side of the ops: checks, parameters, and the choice of a kernel.
#pragma once

#include <kestrel/check.h>
#include <kestrel/launch.h>
#include <kestrel/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

#include "dequant.cuh"
#include "quant_rows.cuh"
#include "quant_segments.cuh"
#include "quant_tensor.cuh"

namespace kestrel::quant {

constexpr bool kWritten = true;  // Named::written

// -- checks, in the order and with the messages of the Python ones ----------------------------------------------------

inline void check_input(const Checks& check, const TensorView& x) {
  check.dtype("x", x, {kBFloat16, kFloat16, kFloat32});
  check.rank("x", x, 2, 2);
  check.last_contiguous("x", x);
  if (x.size(1) == 0) check.fail("x", "at least one column", "shape " + shape_text(x.shape().data(), 2));
}

inline void check_codes(const Checks& check, const TensorView& q, DLDataType dtype) {
  check.dtype("q", q, {dtype});
  check.rank("q", q, 2, 2);
  check.last_contiguous("q", q);
}

// [1] or [T, 1]; [T, groups] where groups is more than 1.
inline void check_scale(const Checks& check, const TensorView& scale, int64_t rows, int64_t groups = 1) {
  check.dtype("scale", scale, {kFloat32});
  check.rank("scale", scale, 1, 2);
  const int64_t shape[2] = {rows, scale.ndim() == 2 && scale.size(1) == 1 ? 1 : groups}, one = 1;
  scale.ndim() == 1 ? check.shape("scale", scale, &one, 1) : check.shape("scale", scale, shape, 2);
}

// A result that the Python side allocates: contiguous, of this dtype and shape.
inline void check_fresh(const Checks& check, const char* name, const TensorView& t, DLDataType dtype,
                        std::initializer_list<int64_t> shape) {
  check.dtype(name, t, {dtype});
  check.shape(name, t, shape.begin(), static_cast<int>(shape.size()));
  check.contiguous(name, t);
}

// Scratch memory of a quantisation per tensor: one maximum per block.
inline void check_partial_amax(const Checks& check, const OptionalTensor& partial_amax) {
  if (!partial_amax.has_value()) check.fail("partial_amax", "a tensor", "None", "TypeError");
  check_fresh(check, "partial_amax", *partial_amax, kFloat32, {(*partial_amax).numel()});
  if ((*partial_amax).numel() == 0) check.fail("partial_amax", "at least one element", "shape (0,)");
}

inline void check_out(const Checks& check, const TensorView& out, int64_t rows, int64_t n) {
  check.dtype("out", out, {kBFloat16, kFloat16, kFloat32});
  check.last_contiguous("out", out);
  const int64_t shape[2] = {rows, n};
  check.shape("out", out, shape, 2);
  check.disjoint("out", out);
}

// -- parameters -------------------------------------------------------------------------------------------------------

constexpr int64_t kMaxInt = std::numeric_limits<int>::max();
constexpr int64_t kLargerThanL2 = 64 << 20;  // bytes; more than any L2 keeps for the next kernel

// Rows of values and rows of codes.
inline Params rows_of(const TensorView& values, const TensorView& codes) {
  Params p;
  p.values = address(values);
  p.codes = address(codes);
  p.values_stride = values.stride(0) * element_bytes(values);
  p.codes_stride = codes.stride(0);
  p.n = values.size(1);
  p.rows = 1;
  if (p.n > kMaxInt - (1 << 16)) unsupported("rows of about 2^31 elements");
  return p;
}

// Makes one row of contiguous rows that share a scale.
inline void flatten_rows(Params* p, int64_t* rows, int element_bytes, int per_byte) {
  if (*rows > 1 && p->values_stride == p->n * element_bytes && p->codes_stride * per_byte == p->n) {
    p->n *= *rows;
    *rows = 1;
  }
}

// Segments of `length` elements.
inline void split_rows(Params* p, int64_t length) {
  p->length = static_cast<int>(std::min(length, p->n));
  p->segments_per_row = static_cast<unsigned>((p->n + p->length - 1) / p->length);
  p->group = p->length;
}

// Whether every segment of every row is whole packs at aligned addresses, in values and in codes.
template <typename C, typename T>
bool whole_packs(const Params& p, int64_t rows) {
  constexpr int size = Pack<T>::size, bytes = kCodeBytes<C, T>;
  const bool one = rows == 1, uncut = p.segments_per_row == 1;
  return aligned16(p.values) && reinterpret_cast<uintptr_t>(p.codes) % bytes == 0 &&
         (one || (p.values_stride % 16 == 0 && p.codes_stride % bytes == 0)) && p.n % size == 0 &&
         (uncut || p.length % size == 0);
}

inline int next_power_of_two(int64_t at_least) {
  int power = 1;
  while (power < at_least) power *= 2;
  return power;
}

// Calls launch(params of a range of rows) until all rows are covered; once below 2^31 segments.
template <typename Launch>
void for_row_ranges(Params p, int64_t rows, Launch launch) {
  const int64_t max_rows = std::max<int64_t>(1, (kMaxInt - 1024) / p.segments_per_row);
  const int padding = p.padding;
  for (int64_t first = 0; first < rows; first += max_rows) {
    const int64_t part = std::min(max_rows, rows - first);
    p.rows = static_cast<unsigned>(part);
    p.segments = static_cast<unsigned>(part * p.segments_per_row);
    p.padding = first + part == rows ? padding : 0;
    launch(p);
    p.values += part * p.values_stride;
    p.codes += part * p.codes_stride;
    p.scales += part * p.scale_row;
  }
}

// -- launch -----------------------------------------------------------------------------------------------------------

// How many threads prefetch before the wait: those of the blocks that start first, 1024 per SM.
inline unsigned prefetching_threads(DLDevice device) {
  return std::min(0xffff * 32, 1024 * device_attribute(cudaDevAttrMultiProcessorCount, device.device_id));
}

inline void set_memory_hints(Params* p, int64_t read, int64_t written, DLDevice device) {
  p->prefetch = read <= kLargerThanL2 ? prefetching_threads(device) : 0;
  p->streamed = read + written > kLargerThanL2;
}

// `lanes` threads per segment, a multiple of 32.
inline void launch_multi_warp(void (*kernel)(Params), Params p, int lanes, int segments_per_block, DLDevice device) {
  p.prefetch /= lanes * segments_per_block;
  launch_pdl(kernel, dim3((p.segments + segments_per_block - 1) / segments_per_block), dim3(lanes, segments_per_block),
             device, p);
}

// The same for quant_rows.
inline void launch_rows(void (*kernel)(RowParams), const Params& p, int packs, int lanes, int segments_per_block,
                        DLDevice device) {
  RowParams rows{p.values, p.codes, p.scales, p.scale_ub};
  rows.stride = static_cast<unsigned>(p.values_stride / 16);
  rows.rows = p.segments;
  rows.packs = static_cast<uint16_t>(packs);
  rows.prefetch = static_cast<uint16_t>(p.prefetch / (lanes * segments_per_block));
  rows.warps_per_row = static_cast<uint8_t>(lanes / 32);
  rows.rows_per_block = static_cast<uint8_t>(segments_per_block);
  rows.streamed = p.streamed;
  launch_pdl(kernel, dim3((p.segments + segments_per_block - 1) / segments_per_block), dim3(lanes, segments_per_block),
             device, rows);
}

// p.lanes lanes of a warp per segment.
inline void launch_sub_warp(void (*kernel)(Params), Params p, int threads, DLDevice device) {
  const unsigned segments_per_block = threads / p.lanes;
  p.prefetch /= threads;
  launch_pdl(kernel, dim3((p.segments + segments_per_block - 1) / segments_per_block), dim3(threads), device, p);
}

// Lanes of a warp for segments of this many packs, with packs_per_lane each.
inline int lanes_for_packs(int packs, int packs_per_lane = kPacks) {
  return std::min(32, next_power_of_two((packs + packs_per_lane - 1) / packs_per_lane));
}

inline int whole_warps(int threads) { return (threads + 31) / 32 * 32; }

// Threads for segments of this many elements, with kElements each: lanes of a warp, or whole warps of a block.
inline int lanes_for_elements(int elements) {
  const int lanes = (elements - 1) / kElements + 1;
  return lanes > 32 ? std::min(kElementThreads, whole_warps(lanes)) : next_power_of_two(lanes);
}

// Computed scales, aligned packs.
template <typename C, typename T>
void quant_vectorised(Params p, DLDevice device) {
  const int packs = p.length / Pack<T>::size;
  const auto threads_for = [&](int packs_per_thread, int limit) {
    return std::min(limit, whole_warps((packs + packs_per_thread - 1) / packs_per_thread));
  };
  const auto segments_per_block_for = [](int lanes) { return std::max(1, 128 / lanes); };
  if (packs <= 32) {
    p.lanes = lanes_for_packs(packs);
    launch_sub_warp(quant_segments<C, T, Scales::computed>, p, 128, device);
    return;
  }
  if constexpr (C::per_byte == 1) {
    const bool rows = p.segments_per_row == 1 && (p.scale_row == 1 || p.segments == 1) && p.padding == 0;
    if (rows && packs <= kRowPacks * kRowThreads && p.values_stride >> 36 == 0) {
      const int lanes = threads_for(kRowPacks, kRowThreads);
      launch_rows(quant_rows<C, T>, p, packs, lanes, segments_per_block_for(lanes), device);
      return;
    }
  }
  const int lanes = threads_for(kPacks, 512);
  launch_multi_warp(quant_long_segments<C, T>, p, lanes, segments_per_block_for(lanes), device);
}

// A computed scale per segment: a row or a group of columns.
template <typename C, typename T>
void quant_per_segment(Params p, int64_t rows, DLDevice device) {
  set_memory_hints(&p, rows * p.n * sizeof(T), rows * p.n / C::per_byte, device);
  if (whole_packs<C, T>(p, rows)) {
    for_row_ranges(p, rows, [&](const Params& part) { quant_vectorised<C, T>(part, device); });
    return;
  }
  void (*kernel)(Params);
  if constexpr (C::per_byte == 2) {  // a segment is two groups
    kernel = quant_int4_elements<C, T>;
    p.lanes = p.length > 2048 ? kElementThreads : std::min(32, next_power_of_two(p.length / 2));
    p.length = static_cast<int>(std::min<int64_t>(2 * int64_t{p.length}, p.n));
    p.segments_per_row = (p.segments_per_row + 1) / 2;
    p.scale_segment *= 2;
  } else {
    kernel = quant_elements<C, T>;
    p.lanes = lanes_for_elements(p.length);
  }
  for_row_ranges(p, rows, [&](const Params& part) {
    p.lanes > 32 ? launch_multi_warp(kernel, part, p.lanes, 1, device) : launch_sub_warp(kernel, part, 256, device);
  });
}

// Given scales, one for all rows or one per row: a segment is what a warp holds.
template <typename C, typename T>
void quant_static(Params p, int64_t rows, DLDevice device) {
  constexpr int size = Pack<T>::size, tile_elements = 32 * kPacks * size;
  p.given = true;
  if (p.scale_row == 0) flatten_rows(&p, &rows, sizeof(T), C::per_byte);
  split_rows(&p, tile_elements);
  set_memory_hints(&p, rows * p.n * sizeof(T), rows * p.n / C::per_byte, device);
  const bool packs = whole_packs<C, T>(p, rows);
  if (!packs) split_rows(&p, 32 * kElements);
  p.lanes = packs ? lanes_for_packs(p.length / size) : lanes_for_elements(p.length);
  for_row_ranges(p, rows, [&](const Params& part) {
    launch_sub_warp(packs ? quant_segments<C, T, Scales::given> : quant_elements<C, T>, part, 256, device);
  });
}

// How many blocks of a kernel are resident at once on the whole GPU. The first call also raises the kernel's limit of
// shared memory. cache: blocks per SM, by device.
template <typename Kernel>
int64_t resident_blocks(Kernel kernel, int threads, int shared_bytes, std::atomic<int> (&cache)[kCachedDevices],
                        DLDevice device) {
  std::atomic<int> uncached{0};
  std::atomic<int>& blocks_per_sm = device.device_id < kCachedDevices ? cache[device.device_id] : uncached;
  if (blocks_per_sm == 0) {
    int found = 0;
    if (shared_bytes > 0) {
      check_launch(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), device);
    }
    check_launch(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, kernel, threads, shared_bytes), device);
    blocks_per_sm = found;
  }
  return int64_t{blocks_per_sm} * device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
}

// Launches a grid with a barrier inside. Returns false where not all blocks can be resident, as in a context that owns
// a part of the SMs.
inline bool launch_cooperative(void (*kernel)(Params), unsigned blocks, unsigned threads, int shared_bytes,
                               DLDevice device, const Params& p) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
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

constexpr int kClusterBlocks = 8;  // the largest cluster size that every GPU with clusters supports

// How many tiles of each warp fit into shared memory with two blocks per SM.
inline unsigned staged_tiles_per_warp(DLDevice device) {
  const int bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device.device_id) / 2 -
                    device_attribute(cudaDevAttrReservedSharedMemoryPerBlock, device.device_id) - 1024;
  return bytes / kStageBytes;
}

// One computed scale for the whole tensor. A cluster takes up to two tiles per warp; more take a cooperative launch,
// which starts more slowly but uses the whole GPU.
template <typename C, typename T>
void quant_per_tensor(Params p, int64_t rows, const TensorView& partial_amax, DLDevice device) {
  constexpr int size = Pack<T>::size, tile_elements = 32 * kTilePacks * size, threads = kTensorWarps * 32;
  flatten_rows(&p, &rows, sizeof(T), C::per_byte);
  set_memory_hints(&p, rows * p.n * sizeof(T), rows * p.n / C::per_byte, device);
  const bool packs = (split_rows(&p, tile_elements), whole_packs<C, T>(p, rows));
  if (packs && rows == 1 && p.n <= 512 * kPacks * size) {  // the tensor is one segment of one block
    split_rows(&p, p.n);
    for_row_ranges(p, rows, [&](const Params& part) { quant_vectorised<C, T>(part, device); });
    return;
  }
  const int64_t segments = rows * p.segments_per_row,
                blocks = std::max<int64_t>(1, (segments + kTensorWarps - 1) / kTensorWarps);
  if (segments > kMaxInt) unsupported("a tensor of 2^31 tiles or more");
  p.rows = static_cast<unsigned>(rows);
  p.segments = static_cast<unsigned>(segments);
  p.partial_amax = reinterpret_cast<float*>(address(partial_amax));
  const auto kernel = packs ? quant_tensor<C, T, Access::packs> : quant_tensor<C, T, Access::elements>;
  const bool clusters = device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id) >= 9;
  if (blocks == 1 || (clusters && blocks <= 2 * kClusterBlocks)) {
    const unsigned cluster = next_power_of_two(std::min<int64_t>(blocks, kClusterBlocks));
    p.cluster = cluster > 1;
    launch_pdl(kernel, dim3(cluster), dim3(threads), device, p, 0, cluster);
    return;
  }
  enum Variant { elements, packs_in_registers, packs_in_shared_memory };
  static std::atomic<int> occupancy[3][kCachedDevices];
  const auto launch_on = [&](int64_t divisor) {  // a grid for 1 / divisor of the GPU
    const auto max_blocks = [&](Variant variant, int shared_bytes) {
      const int64_t all = resident_blocks(kernel, threads, shared_bytes, occupancy[variant], device);
      return std::max<int64_t>(1, std::min(partial_amax.size(0), all) / divisor);
    };
    int64_t resident = max_blocks(packs ? packs_in_registers : elements, 0);
    const int64_t tiles_per_warp = packs ? (segments - 1) / (kTensorWarps * resident) + 1 : 0;
    if (tiles_per_warp > kRegisterTiles) {
      const unsigned staged = staged_tiles_per_warp(device);
      if (staged > 0) resident = max_blocks(packs_in_shared_memory, staged * kStageBytes);
      p.staged = static_cast<unsigned>(std::min<int64_t>(staged, tiles_per_warp - kRegisterTiles));
      p.prefetch = 0;  // it delays the copies to shared memory
    }
    const unsigned grid = static_cast<unsigned>(std::min(resident, blocks));
    return launch_cooperative(kernel, grid, threads, p.staged * kStageBytes, device, p);
  };
  for (int64_t divisor = 1; !launch_on(divisor); divisor *= 2) {
    if (divisor > partial_amax.size(0)) unsupported("a context that refuses cooperative launches");
  }
}

template <typename C, typename T>
void dequant(Params p, int64_t rows, int64_t group_size, DLDevice device) {
  constexpr int size = Pack<T>::size, tile_elements = 32 * kPacks * size;
  const bool groups = p.scale_segment != 0 && p.n > group_size;
  if (p.scale_row == 0 && !groups) flatten_rows(&p, &rows, sizeof(T), C::per_byte);
  const bool by_group = groups && group_size <= tile_elements && group_size % size == 0;
  split_rows(&p, by_group ? group_size : tile_elements);
  const bool packs = (by_group || !groups) && whole_packs<C, T>(p, rows);
  if (!by_group && packs) p.scale_segment = 0;
  if (!packs) {
    split_rows(&p, 32 * kElements);
    p.group = groups ? static_cast<int>(group_size) : 0;
  }
  set_memory_hints(&p, rows * p.n / C::per_byte, rows * p.n * sizeof(T), device);
  p.lanes = packs ? lanes_for_packs(p.length / size, 2 * C::per_byte)
                  : std::min(32, next_power_of_two((p.length + 1) / C::per_byte));
  for_row_ranges(p, rows, [&](const Params& part) {
    launch_sub_warp(packs ? dequant_segments<C, T, kPacks> : dequant_elements<C, T>, part, 256, device);
  });
}

}  // namespace kestrel::quant
