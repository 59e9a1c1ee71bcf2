// RMS normalisation for rows that exceed the registers of one thread block: a cluster of CTAs per row (sm_90 on).
//
// Computes what norm_single_pass computes. A CTA holds its slice of the row in registers, V packs per thread, so global
// memory is read once. Each warp sends its sum of squares, and for a quantised output its largest magnitudes, to all
// CTAs through DSMEM. Every CTA combines them in the same order, so a row's result depends on neither the batch, the
// alignment nor the dtype of the weight. A CTA leaves after it has received all messages: nothing is sent to a CTA that
// has left.
//
// PDL: as norm_single_pass; a float32 weight of 16-bit rows is loaded where it is used, since it exceeds the registers.
#pragma once

#include <kestrel/pdl.cuh>
#include <kestrel/ptx/cluster.cuh>
#include <kestrel/ptx/mbarrier.cuh>

#include "epilogue.cuh"
#include "statistics.cuh"

namespace kestrel::norm {

constexpr int kRowCtas = 8;  // per cluster: the most that every GPU with clusters has
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kAlignedWarpsPerSm = 16;  // ptxas spills 64 registers here
#else
constexpr int kAlignedWarpsPerSm = 32;
#endif

// One message of every warp of the cluster, in each of its CTAs. COUNT: floats of a message.
template <int COUNT, int MAX_WARPS>
struct Exchange {
  using Message = std::conditional_t<COUNT == 1, uint32_t, uint64_t>;
  static_assert(COUNT == 1 || COUNT == 2);

  uint64_t received;
  float values[kRowCtas * MAX_WARPS][COUNT];

  // One thread of each CTA, before a barrier of the cluster.
  __device__ __forceinline__ void init(int warps) {
    ptx::mbarrier_init(&received, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(&received, kRowCtas * warps * sizeof(Message));
  }

  // The message of the cluster's warp `index`, the same in all lanes.
  __device__ __forceinline__ void send(const float (&value)[COUNT], int index, int lane) {
    Message message;
    memcpy(&message, value, sizeof(message));
    if (lane < kRowCtas) {
      ptx::store_async(ptx::map_shared(ptx::shared_address(values[index]), lane), message,
                       ptx::map_shared(ptx::shared_address(&received), lane));
    }
  }

  // Waits for all messages; call(value) with those of every 32nd warp from `lane` on.
  template <typename F>
  __device__ __forceinline__ void receive(int warps, int lane, F call) const {
    ptx::mbarrier_wait_cluster(&received, 0);
#pragma unroll
    for (int i = 0; i < kRowCtas * MAX_WARPS; i += 32) {
      if (i + lane < kRowCtas * warps) call(values[i + lane]);
    }
  }
};

template <typename T>
__device__ __forceinline__ Pack<T> rounded_sum(const float (&x)[Pack<T>::size], const Pack<T>& residual) {
  float sum[Pack<T>::size];
  residual.unpack(sum);
#pragma unroll
  for (int i = 0; i < Pack<T>::size; ++i) sum[i] += x[i];
  Pack<T> rounded;
  rounded.pack(sum);
  return rounded;
}

// N <= V * MAX_WARPS * 32 * kRowCtas packs. Access::unaligned takes any row, and a float32 weight.
template <typename S, int V, int MAX_WARPS, Access A>
__global__ void __launch_bounds__(MAX_WARPS * 32, A == Access::aligned16 ? kAlignedWarpsPerSm / MAX_WARPS : 1)
    norm_cluster(const __grid_constant__ Params p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  using T = typename S::T;
  using Output = typename S::Output;
  constexpr int size = Pack<T>::size;
  static_assert(!S::layer);
  __shared__ Exchange<1, MAX_WARPS> sums;
  __shared__ Exchange<2, Output::quantised ? MAX_WARPS : 1> maxima;  // of all magnitudes, and of the finite ones

  const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  const int cta = blockIdx.x % kRowCtas, row_index = blockIdx.x / kRowCtas;
  const int warp = cta * warps + (threadIdx.x >> 5);  // of the cluster
  if (threadIdx.x == 0) {
    sums.init(warps);
    if constexpr (Output::quantised) maxima.init(warps);
  }
  __syncwarp();
  ptx::cluster_arrive_relaxed();  // init() has fenced the mbarriers

  RowPointers row(p, row_index);
  int first[V];  // elements this thread holds: `size` from each on
#pragma unroll
  for (int v = 0; v < V; ++v) first[v] = ((cta * V + v) * static_cast<int>(blockDim.x) + threadIdx.x) * size;

  if (p.prefetch && threadIdx.x % 8 == 0) {  // a line of 128 bytes is 8 packs
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (first[v] < p.n) {
        prefetch_l2(row.x + static_cast<int64_t>(first[v]) * sizeof(T));
        if constexpr (S::add) prefetch_l2(row.residual + static_cast<int64_t>(first[v]) * sizeof(T));
      }
    }
  }
  WeightPack<T, T> weight[V];
  const auto load_weight = [&] {
#pragma unroll
    for (int v = 0; v < V; ++v) weight[v].template load<A>(p, first[v]);
  };
  constexpr bool float_weight = A == Access::unaligned;    // there may be one
  constexpr bool weight_first = !S::add && !float_weight;  // registers suffice for x and the weight
  if constexpr (weight_first) load_weight();
  pin(row.x);
  if constexpr (S::add) pin(row.residual);
  pdl_wait();
  pdl_trigger();

  Pack<T> loaded[V], residual[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    loaded[v] = load_pack<A, T>(row.x, first[v], p.n);
    if constexpr (S::add) residual[v] = load_pack<A, T>(row.residual, first[v], p.n);
  }
  const float bound = Output::quantised ? scale_bound(p) : 0.f;
  ptx::cluster_wait();  // all CTAs of the cluster have started

  float sum_sq[1] = {0.f};
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float x[size];
    loaded[v].unpack(x);
    if constexpr (S::add) {
      loaded[v] = rounded_sum(x, residual[v]);
      store_pack<A>(row.residual, first[v], p.n, loaded[v]);
      loaded[v].unpack(x);
    }
    sum_sq[0] += sum_of_squares<T>(x);
    uint4& bits = loaded[v].bits;  // the pack stays live, not its floats
    pin(bits.x), pin(bits.y), pin(bits.z), pin(bits.w);
  }
  sum_sq[0] = warp_sum(sum_sq[0]);
  sums.send(sum_sq, warp, lane);
  if constexpr (!weight_first && !float_weight) load_weight();
  sum_sq[0] = 0.f;
  sums.receive(warps, lane, [&](const float (&value)[1]) { sum_sq[0] += value[0]; });
  const float rstd = rsqrtf(fmaf(warp_sum(sum_sq[0]), p.inv_n, p.eps));

  float y[V][size];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    float w[size];
    loaded[v].unpack(y[v]);
    if (float_weight && size > 4 && p.float_weight) {
      WeightPack<T, float> floats;
      floats.template load<A>(p, first[v]);
      floats.unpack(w);
    } else {
      if constexpr (float_weight) weight[v].template load<A>(p, first[v]);
      weight[v].unpack(w);
    }
    normalise<S>(y[v], 0.f, rstd, w, Pack<T>(), p.weight_bias);
    if constexpr (!Output::quantised) store_rounded<S, A>(y[v], p, row.out, first[v]);
  }
  if constexpr (Output::quantised) {
    float largest[2] = {0.f, 0.f};
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int i = 0; i < size; ++i) largest[0] = fmaxf(largest[0], fabsf(y[v][i]));
    }
    largest[0] = largest[1] = warp_max(largest[0]);
    if (largest[0] > FLT_MAX) {  // rare
      largest[1] = 0.f;
#pragma unroll
      for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int i = 0; i < size; ++i) largest[1] = fmaxf(largest[1], finite_magnitude(y[v][i]));
      }
      largest[1] = warp_max(largest[1]);
    }
    maxima.send(largest, warp, lane);
    largest[0] = largest[1] = 0.f;
    maxima.receive(warps, lane, [&](const float (&value)[2]) {
      largest[0] = fmaxf(largest[0], value[0]);
      largest[1] = fmaxf(largest[1], value[1]);
    });
    const float scale = Output::scale(warp_max(largest[1]), bound), inverse = __frcp_rn(scale);
    if (!(warp_max(largest[0]) <= 0x1p60f * scale)) {  // as row_scale: beyond what divide() takes, codes saturate
      const float most = fminf(Output::saturated * scale, FLT_MAX);
#pragma unroll
      for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int i = 0; i < size; ++i) {
          if (fabsf(y[v][i]) > most) y[v][i] = copysignf(most, y[v][i]);
        }
      }
    }
    if (warp == 0 && lane == 0) p.scale[row_index] = scale;
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int i = 0; i < size; ++i) y[v][i] = divide(y[v][i], scale, inverse);
      store_quantised<Output, A>(y[v], p, row.out, first[v]);
    }
  }
#endif
}

}  // namespace kestrel::norm
