// router_gemm: x [T, K] times weight [N, K] transposed, with a float32 result: the logits of a router.
//
// For gates of 8 to 1024 experts, K of 2048 to 7168, few tokens. Latency- and memory-bound: the weight is spread over
// all SMs, and each CTA loads its first k tiles before the PDL wait (the weight is constant).
//
// Work: a cluster of up to 8 CTAs has an output tile of 16 or 32 experts and 8 to 32 tokens. The k tiles are split over
// the warps of the cluster; each warp has a cp.async pipeline of its own and mma.m16n8k16 with the weight as operand A.
// Partial sums are added in order of warp and of CTA rank, through distributed shared memory. The split depends on K
// alone, so a token's result does not depend on T or on its tile. Before sm_90 a cluster is one CTA. Float32 inputs,
// which tensor cores would round, take the kernel of gemv.
#include <kestrel/export.h>
#include <kestrel/pdl.cuh>
#include <kestrel/ptx/cp_async.cuh>
#include <kestrel/ptx/mma.cuh>

#include <algorithm>

#include "exchange.cuh"
#include "gemv.cuh"
#include "linear.h"

namespace kestrel::moe {

constexpr int kWarps = 4;
constexpr int kTileK = 64;
constexpr int kLineBytes = 128;  // of a row of a k tile
constexpr int kMaxClusterLog2 = 3;
constexpr int64_t kMaxSmallTileCtas = 256;  // CTAs with tiles of 16 by 16; larger grids use tiles of 32 by 32

struct RouterGemmParams : LinearParams {
  int k_tiles = 0;
  int cluster_log2 = 0;
};

// The output tile of a cluster, and the shared memory of its CTAs.
template <int EXPERTS, int TOKENS>
struct Tile {
  static constexpr int rows = EXPERTS + TOKENS;  // of a k tile
  static constexpr int num_stages = EXPERTS == 16 ? 4 : 2;
  static constexpr int pitch = EXPERTS + 4;             // floats; avoids bank conflicts of the epilogue
  static constexpr int vectors = TOKENS * EXPERTS / 4;  // of four experts of a token
  static constexpr int pipeline_bytes = num_stages * rows * kLineBytes;  // of a warp
  static constexpr int bytes = kWarps * pipeline_bytes + vectors * 16;   // the last part receives partial sums
  static_assert(pitch * TOKENS * 4 <= pipeline_bytes, "the sums of a warp reuse its pipeline");
};

template <typename T, int EXPERTS, int TOKENS>
__global__ void __launch_bounds__(kWarps * 32, 2) router_gemm_kernel(const __grid_constant__ RouterGemmParams p) {
  using Shape = Tile<EXPERTS, TOKENS>;
  constexpr int M = EXPERTS / 16, N = TOKENS / 8;  // MMA instructions across the tile
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t barrier;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quad = lane & 3;
  const int cluster_size = 1 << p.cluster_log2, cta_rank = blockIdx.x & (cluster_size - 1);
  const int first_expert = (blockIdx.x >> p.cluster_log2) * EXPERTS, first_token = blockIdx.y * TOKENS;
  const int experts = min(p.outputs - first_expert, EXPERTS), tokens = min(p.tokens - first_token, TOKENS);

  // The tile's vectors of sums are divided over the CTAs: up to `share` each, `own` of which are this CTA's.
  const int share = Shape::vectors >> p.cluster_log2;
  const int own = min(max(tokens * (EXPERTS / 4) - cta_rank * share, 0), share);
  float4* const partials = reinterpret_cast<float4*>(shared + kWarps * Shape::pipeline_bytes);  // [cluster_size][share]

  // -- loads --
  //
  // This warp's k tiles. A lane copies 16 bytes of every fourth row; the halves of odd rows are swapped, so that the
  // eight lanes that read two rows below hit different banks.
  const int k_slice = cta_rank * kWarps + warp, k_slices_log2 = p.cluster_log2 + 2;
  const int begin = k_slice * p.k_tiles >> k_slices_log2;
  const int k_tiles = ((k_slice + 1) * p.k_tiles >> k_slices_log2) - begin;
  const int row = lane >> 3, k = begin * kTileK + (lane & 7) * 8;
  const uint32_t pipeline = ptx::shared_address(shared) + warp * Shape::pipeline_bytes;
  const uint32_t to = pipeline + row * kLineBytes + ((lane & 7) ^ (row & 1) * 4) * 16;
  const char* const weight = p.weight + (first_expert + row) * p.weight_stride + int64_t{k} * sizeof(T);
  const char* const x = p.x + (first_token + row) * p.x_stride + int64_t{k} * sizeof(T);
  const auto load_weight = [&](int stage, int k_tile) {
#pragma unroll
    for (int r = 0; r < EXPERTS; r += 4) {
      const bool valid = row + r < experts && k + k_tile * kTileK < p.width;
      ptx::cp_async16_or_zero(to + (stage * Shape::rows + r) * kLineBytes,
                              valid ? weight + r * p.weight_stride + k_tile * kLineBytes : p.weight, valid);
    }
  };
  const auto load_x = [&](int stage, int k_tile) {
#pragma unroll
    for (int r = 0; r < TOKENS; r += 4) {
      const bool valid = row + r < tokens && k + k_tile * kTileK < p.width;
      ptx::cp_async16_or_zero(to + (stage * Shape::rows + EXPERTS + r) * kLineBytes,
                              valid ? x + r * p.x_stride + k_tile * kLineBytes : p.x, valid);
    }
  };
#pragma unroll
  for (int i = 0; i < Shape::num_stages; ++i) {
    if (i < k_tiles) load_weight(i, i);
  }
  if (cluster_size > 1) exchange_begin(&barrier, cluster_size * own * 16);
  pdl_wait();
  pdl_trigger();
#pragma unroll
  for (int i = 0; i < Shape::num_stages; ++i) {
    if (i < k_tiles) load_x(i, i);
    ptx::cp_async_commit();
  }

  // -- main loop --
  //
  // Lane 4 * group + quad holds sums of experts group and group + 8, tokens 2 * quad and the next one. The order of k
  // within an instruction does not matter to the sum as long as both operands agree, so the 16 bytes of a lane feed two
  // instructions.
  float sum[M][N][4] = {};
  for (int k_tile = 0, stage = 0; k_tile < k_tiles; ++k_tile) {
    ptx::cp_async_wait<Shape::num_stages - 1>();
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t from =
          pipeline + (stage * Shape::rows + group) * kLineBytes + (quad + ((half ^ group) & 1) * 4) * 16;
      uint4 w[2 * M], v[N];
#pragma unroll
      for (int m = 0; m < 2 * M; ++m) w[m] = ptx::load_shared_uint4(from + m * 8 * kLineBytes);
#pragma unroll
      for (int n = 0; n < N; ++n) v[n] = ptx::load_shared_uint4(from + (EXPERTS + n * 8) * kLineBytes);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const uint4 low = w[2 * m], high = w[2 * m + 1];  // rows `group` and `group` + 8
        const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int n = 0; n < N; ++n) ptx::mma_16x8x16(sum[m][n], first, v[n].x, v[n].y, T());
#pragma unroll
        for (int n = 0; n < N; ++n) ptx::mma_16x8x16(sum[m][n], second, v[n].z, v[n].w, T());
      }
    }
    __syncwarp();
    if (k_tile + Shape::num_stages < k_tiles) {
      load_weight(stage, k_tile + Shape::num_stages);
      load_x(stage, k_tile + Shape::num_stages);
    }
    ptx::cp_async_commit();
    stage = stage + 1 < Shape::num_stages ? stage + 1 : 0;
  }

  // -- epilogue --
  //
  // The warps' sums replace their pipelines: [TOKENS][pitch]. Each CTA sends the sum over its warps to the CTA that
  // owns the vector, which adds those of all CTAs in order of rank.
  float* const warp_sums = reinterpret_cast<float*>(shared + warp * Shape::pipeline_bytes);
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        warp_sums[(8 * n + 2 * quad + i % 2) * Shape::pitch + 16 * m + group + 8 * (i / 2)] = sum[m][n][i];
      }
    }
  }
  __syncthreads();
  if (cluster_size > 1) exchange_ready();
  const int share_log2 = 31 - __clz(share);
  for (int i = threadIdx.x; i < tokens * (EXPERTS / 4); i += kWarps * 32) {
    const int at = i / (EXPERTS / 4) * Shape::pitch + i % (EXPERTS / 4) * 4;
    float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 f = reinterpret_cast<const float4*>(shared + w * Shape::pipeline_bytes)[at / 4];
      total.x += f.x, total.y += f.y, total.z += f.z, total.w += f.w;
    }
    if (cluster_size > 1) {
      exchange_send(i >> share_log2, &partials[cta_rank * share + (i & (share - 1))], total, &barrier);
    } else {
      partials[i] = total;
    }
  }
  if (cluster_size > 1) {
    exchange_wait(&barrier);
  } else {
    __syncthreads();
  }
  for (int i = threadIdx.x; i < own * 4; i += kWarps * 32) {
    const int at = cta_rank * share * 4 + i, expert = at % EXPERTS, token = at / EXPERTS;
    if (expert >= experts) continue;
    float sums[1 << kMaxClusterLog2], total = 0;
#pragma unroll
    for (int r = 0; r < 1 << kMaxClusterLog2; ++r) {
      sums[r] = r < cluster_size ? reinterpret_cast<const float*>(partials + r * share)[i] : 0;
    }
#pragma unroll
    for (int r = 0; r < 1 << kMaxClusterLog2; ++r) total += sums[r];
    reinterpret_cast<float*>(p.out + (first_token + token) * p.out_stride)[first_expert + expert] = total;
  }
}

int64_t num_tiles(int count, int tile) { return (int64_t{count} + tile - 1) / tile; }

template <typename T, int EXPERTS, int TOKENS>
void launch_tiles(const RouterGemmParams& p, DLDevice device) {
  constexpr auto kernel = router_gemm_kernel<T, EXPERTS, TOKENS>;
  constexpr int bytes = Tile<EXPERTS, TOKENS>::bytes;
  raise_shared_limit<kernel, bytes>(device);
  const auto across = static_cast<unsigned>(num_tiles(p.outputs, EXPERTS) << p.cluster_log2);
  launch_pdl(kernel, dim3(across, static_cast<unsigned>(num_tiles(p.tokens, TOKENS))), dim3(kWarps * 32), device, p,
             bytes, 1u << p.cluster_log2);
}

// The table: dtype, tokens and CTAs -> kernel. linear.py chooses the cluster's size, and leaves larger products to the
// vendor's GEMM.
template <typename T>
void launch_router(const RouterGemmParams& p, DLDevice device) {
  const int64_t ctas = num_tiles(p.outputs, 16) * num_tiles(p.tokens, 16) << p.cluster_log2;
  if constexpr (sizeof(T) == 4) {
    launch_gemv<float>(p, device);
  } else if (p.tokens <= 8) {
    launch_tiles<T, 16, 8>(p, device);
  } else if (p.tokens <= 16 || ctas <= kMaxSmallTileCtas) {
    launch_tiles<T, 16, 16>(p, device);
  } else {
    launch_tiles<T, 32, 32>(p, device);
  }
}

// cluster: the CTAs that split K, a power of two up to 8; one before sm_90.
void router_gemm(TensorView out, TensorView x, TensorView weight, int64_t cluster) {
  RouterGemmParams p;
  if (!prepare_linear(Checks("router_gemm"), out, kFloat32, x, weight, /*bias=*/{}, &p)) return;
  const DLDevice device = x.device();
  const DeviceGuard guard(device.device_id);
  p.k_tiles = (p.width + kTileK - 1) / kTileK;
  while (p.cluster_log2 < kMaxClusterLog2 && int64_t{1} << p.cluster_log2 < cluster) ++p.cluster_log2;
  if (int64_t{1} << p.cluster_log2 != cluster) unsupported("clusters of " + std::to_string(cluster));
  if (device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id) < 9) p.cluster_log2 = 0;
  dispatch_float(x, [&](auto t) { launch_router<decltype(t)>(p, device); });
}

KESTREL_EXPORT(router_gemm, router_gemm);

}  // namespace kestrel::moe
