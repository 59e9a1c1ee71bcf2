// The host side that the ops of this family share: arguments to Params, and the choice of a kernel.
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

// -- checks, in the order and with the words of the Python ones -------------------------------------------------------

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

// A result that the Python side has allocated: contiguous, of this dtype and shape.
inline void check_fresh(const Checks& check, const char* name, const TensorView& t, DLDataType dtype,
                        std::initializer_list<int64_t> shape) {
  check.dtype(name, t, {dtype});
  check.shape(name, t, shape.begin(), static_cast<int>(shape.size()));
  check.contiguous(name, t);
}

// Room for the maxima of the blocks of a quantisation per tensor.
inline void check_slots(const Checks& check, const OptionalTensor& slots) {
  if (!slots.has_value()) check.fail("slots", "a tensor", "None", "TypeError");
  check_fresh(check, "slots", *slots, kFloat32, {(*slots).numel()});
  if ((*slots).numel() == 0) check.fail("slots", "at least one element", "shape (0,)");
}

inline void check_out(const Checks& check, const TensorView& out, int64_t rows, int64_t n) {
  check.dtype("out", out, {kBFloat16, kFloat16, kFloat32});
  check.last_contiguous("out", out);
  const int64_t shape[2] = {rows, n};
  check.shape("out", out, shape, 2);
  check.disjoint("out", out);
}

// -- parameters -------------------------------------------------------------------------------------------------------

constexpr int64_t kMost = std::numeric_limits<int>::max();
constexpr int64_t kPastL2 = 64 << 20;  // bytes; more than any L2 keeps for the next kernel

// Rows of values and rows of codes.
inline Params rows_of(const TensorView& values, const TensorView& codes) {
  Params p;
  p.values = address(values);
  p.codes = address(codes);
  p.values_stride = values.stride(0) * element_bytes(values);
  p.codes_stride = codes.stride(0);
  p.n = values.size(1);
  p.rows = 1;
  if (p.n > kMost - (1 << 16)) unsupported("rows of about 2^31 elements");
  return p;
}

// Rows that follow each other without a gap become one, where no scale tells them apart.
inline void join_rows(Params* p, int64_t* rows, int element_bytes, int per_byte) {
  if (*rows > 1 && p->values_stride == p->n * element_bytes && p->codes_stride * per_byte == p->n) {
    p->n *= *rows;
    *rows = 1;
  }
}

// Segments of `length` elements; pieces of a row where the scale does not cut it.
inline void cut(Params* p, int64_t length) {
  p->length = static_cast<int>(std::min(length, p->n));
  p->per_row = static_cast<unsigned>((p->n + p->length - 1) / p->length);
  p->group = p->length;
}

// Whether every segment of every row is whole packs at aligned addresses, in values and in codes.
template <typename C, typename T>
bool whole_packs(const Params& p, int64_t rows) {
  constexpr int size = Pack<T>::size, bytes = kCodeBytes<C, T>;
  const bool one = rows == 1, uncut = p.per_row == 1;
  return aligned16(p.values) && reinterpret_cast<uintptr_t>(p.codes) % bytes == 0 &&
         (one || (p.values_stride % 16 == 0 && p.codes_stride % bytes == 0)) && p.n % size == 0 &&
         (uncut || p.length % size == 0);
}

inline int power_of_two(int64_t at_least) {
  int power = 1;
  while (power < at_least) power *= 2;
  return power;
}

// Calls launch(params of some rows) until all rows are covered: more than one call only where there are
// 2^31 segments and more.
template <typename Launch>
void in_parts(Params p, int64_t rows, Launch launch) {
  const int64_t most = std::max<int64_t>(1, (kMost - 1024) / p.per_row);
  const int padding = p.padding;
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t part = std::min(most, rows - first);
    p.rows = static_cast<unsigned>(part);
    p.segments = static_cast<unsigned>(part * p.per_row);
    p.padding = first + part == rows ? padding : 0;
    launch(p);
    p.values += part * p.values_stride;
    p.codes += part * p.codes_stride;
    p.scales += part * p.scale_row;
  }
}

// -- launch -----------------------------------------------------------------------------------------------------------

// Below: us per launch on an H200, cold L2, bf16, measured while the kernels were made.

// Before the wait, the blocks that run first prefetch: about 1024 threads per multiprocessor. FP8 rows 5920x1024: 5.4,
// with every block 5.9, with none 5.8 to 6.0.
inline unsigned first_threads(DLDevice device) {
  return std::min(0xffff * 32, 1024 * device_attribute(cudaDevAttrMultiProcessorCount, device.device_id));
}

inline void set_overlap(Params* p, int64_t read, int64_t written, DLDevice device) {
  p->prefetch = read <= kPastL2 ? first_threads(device) : 0;
  p->streamed = read + written > kPastL2;
}

// A team of `lanes` threads per segment, `teams` of them to a block.
inline void launch_blocks(void (*kernel)(Params), Params p, int lanes, int teams, DLDevice device) {
  p.prefetch /= lanes * teams;
  launch_pdl(kernel, dim3((p.segments + teams - 1) / teams), dim3(lanes, teams), device, p);
}

// The same for rows, one segment each.
inline void launch_rows(void (*kernel)(RowParams), const Params& p, int packs, int lanes, int teams, DLDevice device) {
  RowParams rows{p.values, p.codes, p.scales, p.bound};
  rows.stride = static_cast<unsigned>(p.values_stride / 16);
  rows.rows = p.segments;
  rows.packs = static_cast<uint16_t>(packs);
  rows.prefetch = static_cast<uint16_t>(p.prefetch / (lanes * teams));
  rows.warps = static_cast<uint8_t>(lanes / 32);
  rows.teams = static_cast<uint8_t>(teams);
  rows.streamed = p.streamed;
  launch_pdl(kernel, dim3((p.segments + teams - 1) / teams), dim3(lanes, teams), device, rows);
}

// A team of p.lanes lanes of a warp per segment.
inline void launch_teams(void (*kernel)(Params), Params p, int threads, DLDevice device) {
  const unsigned teams = threads / p.lanes;
  p.prefetch /= threads;
  launch_pdl(kernel, dim3((p.segments + teams - 1) / teams), dim3(threads), device, p);
}

// Lanes of a warp for segments of so many packs, each of them holding `most`.
inline int lanes_of(int packs, int most = kPacks) { return std::min(32, power_of_two((packs + most - 1) / most)); }

inline int whole_warps(int threads) { return (threads + 31) / 32 * 32; }

// Lanes of a warp for segments of so many elements, each of them holding kElements; whole warps of a block for more.
inline int lanes_of_elements(int elements) {
  const int lanes = (elements - 1) / kElements + 1;
  return lanes > 32 ? std::min(kElementThreads, whole_warps(lanes)) : power_of_two(lanes);
}

// Segments with a scale of their own, in whole packs.
template <typename C, typename T>
void quant_packs(Params p, DLDevice device) {
  const int packs = p.length / Pack<T>::size;
  const auto threads_of = [&](int packs_of_thread, int most) {
    return std::min(most, whole_warps((packs + packs_of_thread - 1) / packs_of_thread));
  };
  const auto teams_of = [](int lanes) { return std::max(1, 128 / lanes); };
  if (packs <= 32) {
    p.lanes = lanes_of(packs);
    launch_teams(quant_segments<C, T, false>, p, 128, device);
    return;
  }
  if constexpr (C::per_byte == 1) {
    const bool rows = p.per_row == 1 && (p.scale_row == 1 || p.segments == 1) && p.padding == 0;
    if (rows && packs <= kRowPacks * kRowThreads && p.values_stride >> 36 == 0) {
      const int lanes = threads_of(kRowPacks, kRowThreads);
      launch_rows(quant_rows<C, T>, p, packs, lanes, teams_of(lanes), device);
      return;
    }
  }
  const int lanes = threads_of(kPacks, 512);
  launch_blocks(quant_blocks<C, T>, p, lanes, teams_of(lanes), device);
}

// Segments with a scale of their own: rows, or groups of columns.
template <typename C, typename T>
void quant_each(Params p, int64_t rows, DLDevice device) {
  set_overlap(&p, rows * p.n * sizeof(T), rows * p.n / C::per_byte, device);
  if (whole_packs<C, T>(p, rows)) {
    in_parts(p, rows, [&](const Params& part) { quant_packs<C, T>(part, device); });
    return;
  }
  void (*kernel)(Params);
  if constexpr (C::per_byte == 2) {  // two groups to a segment
    kernel = quant_pairs<C, T>;
    p.lanes = p.length > 2048 ? kElementThreads : std::min(32, power_of_two(p.length / 2));
    p.length = static_cast<int>(std::min<int64_t>(2 * int64_t{p.length}, p.n));
    p.per_row = (p.per_row + 1) / 2;
    p.scale_segment *= 2;
  } else {
    kernel = quant_elements<C, T>;
    p.lanes = lanes_of_elements(p.length);
  }
  in_parts(p, rows, [&](const Params& part) {
    p.lanes > 32 ? launch_blocks(kernel, part, p.lanes, 1, device) : launch_teams(kernel, part, 256, device);
  });
}

// Rows whose scale is given, one for all or one each: cut into pieces of what a warp holds.
template <typename C, typename T>
void quant_given(Params p, int64_t rows, DLDevice device) {
  constexpr int size = Pack<T>::size, piece = 32 * kPacks * size;
  p.given = true;
  if (p.scale_row == 0) join_rows(&p, &rows, sizeof(T), C::per_byte);
  cut(&p, piece);
  set_overlap(&p, rows * p.n * sizeof(T), rows * p.n / C::per_byte, device);
  const bool packs = whole_packs<C, T>(p, rows);
  if (!packs) cut(&p, 32 * kElements);
  p.lanes = packs ? lanes_of(p.length / size) : lanes_of_elements(p.length);
  in_parts(p, rows, [&](const Params& part) {
    launch_teams(packs ? quant_segments<C, T, true> : quant_elements<C, T>, part, 256, device);
  });
}

constexpr int kKnownDevices = 64;  // of which something is remembered

// Blocks of a kernel that are resident at once on the whole GPU. The first call raises the kernel's limit of shared
// memory. known: blocks of a multiprocessor, by device.
template <typename Kernel>
int64_t resident_blocks(Kernel kernel, int threads, int shared_bytes, std::atomic<int> (&known)[kKnownDevices],
                        DLDevice device) {
  std::atomic<int> forgotten{0};
  std::atomic<int>& per_multiprocessor = device.device_id < kKnownDevices ? known[device.device_id] : forgotten;
  if (per_multiprocessor == 0) {
    int found = 0;
    if (shared_bytes > 0) {
      check_launch(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), device);
    }
    check_launch(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, kernel, threads, shared_bytes), device);
    per_multiprocessor = found;
  }
  return int64_t{per_multiprocessor} * device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
}

// Launches a grid with a barrier inside; false rather than start a grid whose blocks cannot all be resident, as in a
// context to which only a part of the multiprocessors belongs.
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
    cudaGetLastError();  // the next caller must not find this error
    return false;
  }
  check_launch(error, device);
  return true;
}

constexpr int kClusterBlocks = 8;  // what every GPU with clusters runs

// Rounds of pieces that fit into the shared memory of a block where two share a multiprocessor: 4 on an H200.
inline unsigned rounds_of_shared_memory(DLDevice device) {
  const int bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device.device_id) / 2 -
                    device_attribute(cudaDevAttrReservedSharedMemoryPerBlock, device.device_id) - 1024;
  return bytes / kRoundBytes;
}

// One scale for the whole tensor. Up to two segments per warp of a cluster stay in one: 8x2048 2.9, by a cooperative
// launch 3.7; 128x1024 3.6, 4.1; but 128x2048 5.5, 4.3.
template <typename C, typename T>
void quant_whole(Params p, int64_t rows, const TensorView& slots, DLDevice device) {
  constexpr int size = Pack<T>::size, piece = 32 * kTensorPacks * size, threads = kTensorWarps * 32;
  join_rows(&p, &rows, sizeof(T), C::per_byte);
  set_overlap(&p, rows * p.n * sizeof(T), rows * p.n / C::per_byte, device);
  const bool packs = (cut(&p, piece), whole_packs<C, T>(p, rows));
  if (packs && rows == 1 && p.n <= 512 * kPacks * size) {  // one segment of one block
    cut(&p, p.n);
    in_parts(p, rows, [&](const Params& part) { quant_packs<C, T>(part, device); });
    return;
  }
  const int64_t segments = rows * p.per_row,
                blocks = std::max<int64_t>(1, (segments + kTensorWarps - 1) / kTensorWarps);
  if (segments > kMost) unsupported("a tensor of 2^31 pieces");
  p.rows = static_cast<unsigned>(rows);
  p.segments = static_cast<unsigned>(segments);
  p.slots = reinterpret_cast<float*>(address(slots));
  const auto kernel = packs ? quant_tensor<C, T, true> : quant_tensor<C, T, false>;
  const bool clusters = device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id) >= 9;
  if (blocks == 1 || (clusters && blocks <= 2 * kClusterBlocks)) {
    const unsigned cluster = power_of_two(std::min<int64_t>(blocks, kClusterBlocks));
    p.cluster = cluster > 1;
    launch_pdl(kernel, dim3(cluster), dim3(threads), device, p, 0, cluster);
    return;
  }
  static std::atomic<int> known[3][kKnownDevices];  // by kernel and shared memory
  const auto launched_on = [&](int64_t fraction) {  // of the GPU: the whole, a half, a quarter ...
    const auto most = [&](int which, int shared_bytes) {
      const int64_t all = resident_blocks(kernel, threads, shared_bytes, known[which], device);
      return std::max<int64_t>(1, std::min(slots.size(0), all) / fraction);
    };
    int64_t resident = most(packs, 0);
    const int64_t rounds = packs ? (segments - 1) / (kTensorWarps * resident) + 1 : 0;  // of a piece for each warp
    if (rounds > kHeld) {
      const unsigned room = rounds_of_shared_memory(device);
      if (room > 0) resident = most(2, room * kRoundBytes);
      p.kept = static_cast<unsigned>(std::min<int64_t>(room, rounds - kHeld));
      p.prefetch = 0;  // 5920x2048 14.0, with a prefetch of what registers hold 14.6
    }
    const unsigned grid = static_cast<unsigned>(std::min(resident, blocks));
    return launch_cooperative(kernel, grid, threads, p.kept * kRoundBytes, device, p);
  };
  for (int64_t fraction = 1; !launched_on(fraction); fraction *= 2) {
    if (fraction > slots.size(0)) unsupported("a context that starts no grid with a barrier");
  }
}

// groups: of a row, or 1 where the scale does not cut it.
template <typename C, typename T>
void dequant(Params p, int64_t rows, int64_t group_size, DLDevice device) {
  constexpr int size = Pack<T>::size, piece = 32 * kPacks * size;
  const bool groups = p.scale_segment != 0 && p.n > group_size;
  if (p.scale_row == 0 && !groups) join_rows(&p, &rows, sizeof(T), C::per_byte);
  const bool by_group = groups && group_size <= piece && group_size % size == 0;
  cut(&p, by_group ? group_size : piece);
  const bool packs = (by_group || !groups) && whole_packs<C, T>(p, rows);
  if (!by_group && packs) p.scale_segment = 0;
  if (!packs) {
    cut(&p, 32 * kElements);
    p.group = groups ? static_cast<int>(group_size) : 0;
  }
  set_overlap(&p, rows * p.n / C::per_byte, rows * p.n * sizeof(T), device);
  p.lanes =
      packs ? lanes_of(p.length / size, 2 * C::per_byte) : std::min(32, power_of_two((p.length + 1) / C::per_byte));
  in_parts(p, rows, [&](const Params& part) {
    launch_teams(packs ? dequant_segments<C, T, kPacks> : dequant_elements<C, T>, part, 256, device);
  });
}

}  // namespace kestrel::quant
