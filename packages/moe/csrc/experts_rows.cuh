// Row kernels around the grouped GEMMs of routed experts: quantisation to FP8, and the sum over choices.
#pragma once

#include <kestrel/fp8.cuh>
#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>
#include <kestrel/reduce.cuh>

#include "experts_params.cuh"
#include "signals.cuh"

namespace kestrel::moe {

// Quantises rows to FP8 with one scale per row, or per row and 128 columns, with the codes of fp8_quant.
struct ExpertsQuantParams {
  const char* x = nullptr;
  char* codes = nullptr;
  float* scale = nullptr;  // [rows, scales of a row]
  int64_t x_stride = 0;    // bytes
  int64_t rows = 0;
  int width = 0;                  // a multiple of 16
  int row_warps = 1;              // warps of a row: 1, 2, 4 or 8
  bool early = false;             // the launch just before is the alignment, which waits before it triggers
  const char* fetched = nullptr;  // weights that are fetched into L2
  int64_t fetched_bytes = 0;
};

// By one thread of each CTA: fetches this CTA's part of the memory into L2.
__device__ __forceinline__ void fetch_part(const char* from, int64_t bytes) {
  constexpr int piece = 8192;
  for (int64_t at = int64_t{blockIdx.x} * piece; at + piece <= bytes; at += int64_t{gridDim.x} * piece) {
    ptx::bulk_prefetch(from + at, piece);
  }
}

constexpr int kQuantThreads = 256, kQuantWarps = kQuantThreads / 32;
constexpr int kQuantPacks = 8;  // of a row that a thread keeps in registers; longer rows are read twice

// Eight or four codes of a pack.
template <typename T>
struct PackCodes {
  static constexpr int size = Pack<T>::size;
  uint32_t words[size / 4];

  __device__ __forceinline__ PackCodes(Pack<T> pack, float scale, float inverse) {
    float v[size];
    pack.unpack(v);
#pragma unroll
    for (int i = 0; i < size; ++i) v[i] = fp8_quotient(v[i], scale, inverse);
#pragma unroll
    for (int i = 0; i < size; i += 4) words[i / 4] = to_fp8x4(v[i], v[i + 1], v[i + 2], v[i + 3]);
  }
};

template <typename T>
__device__ __forceinline__ float largest_magnitude(Pack<T> pack) {
  float values[Pack<T>::size], largest = 0.f;
  pack.unpack(values);
#pragma unroll
  for (int i = 0; i < Pack<T>::size; ++i) largest = fmaxf(largest, finite_magnitude(values[i]));
  return largest;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kQuantBlocksPerSm = 3;  // ptxas spills with the registers of four
#else
constexpr int kQuantBlocksPerSm = 4;
#endif

template <typename T, bool BLOCKS>
__global__ void __launch_bounds__(kQuantThreads, kQuantBlocksPerSm)
    experts_quant_kernel(const __grid_constant__ ExpertsQuantParams p) {
  constexpr int size = Pack<T>::size;
  __shared__ float memory[kQuantWarps];
  const int warp = threadIdx.x / 32, first_warp = warp / p.row_warps * p.row_warps, lane = threadIdx.x % 32;
  const int64_t row = int64_t{blockIdx.x} * (kQuantWarps / p.row_warps) + warp / p.row_warps;
  const int width = row < p.rows ? p.width : 0;
  const char* const x = p.x + row * p.x_stride;
  uint32_t* const codes = reinterpret_cast<uint32_t*>(p.codes + row * p.width);
  const int warp_start = (warp - first_warp) * 32 * size, stride = p.row_warps * 32 * size;
  Pack<T> kept[kQuantPacks];
  const auto wait = [&]() {
    pdl_wait();
    pdl_trigger();
  };
  if (threadIdx.x == 0) fetch_part(p.fetched, p.fetched_bytes);
  if (!p.early) wait();
#pragma unroll
  for (int i = 0; i < kQuantPacks; ++i) {
    const int k = warp_start + i * stride + lane * size;
    if (k < width) kept[i].bits = load16(x + int64_t{k} * sizeof(T));
  }
  // Calls use(k, pack) for this thread's packs, in all lanes of a warp alike, also past the end of the row.
  const auto each_pack = [&](const auto& use) {
#pragma unroll
    for (int i = 0; i < kQuantPacks; ++i) {
      const int start = warp_start + i * stride;
      if (start < width) use(start + lane * size, kept[i]);
    }
    for (int start = warp_start + kQuantPacks * stride; start < width; start += stride) {
      const int k = start + lane * size;
      Pack<T> pack;
      if (k < width) pack.bits = load16(x + int64_t{k} * sizeof(T));
      use(k, pack);
    }
  };
  const auto store = [&](int k, Pack<T> pack, float scale) {
    const PackCodes<T> encoded(pack, scale, __frcp_rn(scale));
#pragma unroll
    for (int i = 0; i < size / 4; ++i) codes[k / 4 + i] = encoded.words[i];
  };
  if constexpr (BLOCKS) {
    if (p.early) wait();
    const int blocks = (p.width + kScaleBlock - 1) / kScaleBlock;
    each_pack([&](int k, Pack<T> pack) {
      const float scale = fp8_scale(warp_max<kScaleBlock / size>(k < width ? largest_magnitude(pack) : 0.f));
      if (k < width) store(k, pack, scale);
      if (k % kScaleBlock == 0 && k < width) p.scale[row * blocks + k / kScaleBlock] = scale;
    });
  } else {
    float largest = 0.f;
    each_pack([&](int k, Pack<T> pack) {
      if (k < width) largest = fmaxf(largest, largest_magnitude(pack));
    });
    largest = warp_max(largest);
    if (p.row_warps > 1) {
      if (lane == 0) memory[warp] = largest;
      __syncthreads();
      for (int i = 0; i < p.row_warps; ++i) largest = fmaxf(largest, memory[first_warp + i]);
    }
    const float scale = fp8_scale(largest);
    if (p.early) wait();
    if (warp == first_warp && lane == 0 && width) p.scale[row] = scale;
    each_pack([&](int k, Pack<T> pack) {
      if (k < width) store(k, pack, scale);
    });
  }
}

// Sums the choices of each token in order. Rows of S [T * choices, N] are weighted already; with `positions` they are
// sorted by expert and weighted here. Rows of experts that are not on this device are skipped.
struct ExpertsSumParams {
  const char* rows = nullptr;
  char* out = nullptr;
  const int* topk_ids = nullptr;
  const int* expert_map = nullptr;
  const int* positions = nullptr;  // of each pair in `rows`, -1: none
  const float* topk_weights = nullptr;
  int64_t out_stride = 0, ids_stride = 0, topk_weights_stride = 0;
  int choices = 0, experts = 0, mapped_experts = 0, outputs = 0, ctas_per_token = 0;
};

constexpr int kSumThreads = 128;

template <typename T, typename S>
__global__ void __launch_bounds__(kSumThreads) experts_sum_kernel(const __grid_constant__ ExpertsSumParams p) {
  constexpr int size = Pack<S>::size;
  const int token = blockIdx.x / p.ctas_per_token;
  const int first = ((blockIdx.x - token * p.ctas_per_token) * kSumThreads + threadIdx.x) * size;
  pdl_wait();
  pdl_trigger();
  const bool inside = first < p.outputs;
  float total[size] = {};
  constexpr int batch = 8;  // choices whose rows are loaded at once; lane j % 8 of a warp looks up choice j
  for (int first_choice = 0; first_choice < p.choices; first_choice += batch) {
    const int choice = first_choice + threadIdx.x % batch;
    int my_row = -1;
    float my_weight = 1.f;
    if (choice < p.choices) {
      if (p.positions) {
        my_row = p.positions[token * p.choices + choice];
        my_weight = p.topk_weights[token * p.topk_weights_stride + choice];
      } else {
        int id = p.topk_ids[token * p.ids_stride + choice];
        if (p.expert_map) id = id >= 0 && id < p.mapped_experts ? p.expert_map[id] : -1;
        my_row = id >= 0 && id < p.experts ? token * p.choices + choice : -1;
      }
    }
    int row[batch];
    float weight[batch];
    Pack<S> packs[batch];
#pragma unroll
    for (int j = 0; j < batch; ++j) {
      row[j] = __shfl_sync(0xffffffffu, my_row, j);
      weight[j] = __shfl_sync(0xffffffffu, my_weight, j);
      if (inside && row[j] >= 0) {
        packs[j].bits = load16_streamed(p.rows + (int64_t{row[j]} * p.outputs + first) * static_cast<int>(sizeof(S)));
      }
    }
#pragma unroll
    for (int j = 0; j < batch; ++j) {
      float values[size];
      packs[j].unpack(values);
      if (row[j] < 0) continue;
#pragma unroll
      for (int i = 0; i < size; ++i) total[i] += p.positions ? weight[j] * values[i] : values[i];
    }
  }
  if (!inside) return;
  T* const out = reinterpret_cast<T*>(p.out + token * p.out_stride) + first;
  struct alignas(size * sizeof(T)) Result {
    T elements[size];
  };
  Result result;
#pragma unroll
  for (int i = 0; i < size; ++i) result.elements[i] = from_float<T>(total[i]);
  if (reinterpret_cast<uintptr_t>(out) % sizeof(Result) == 0) {
    *reinterpret_cast<Result*>(out) = result;
  } else {  // rows of `out` have any stride
#pragma unroll
    for (int i = 0; i < size; ++i) out[i] = result.elements[i];
  }
}

}  // namespace kestrel::moe
