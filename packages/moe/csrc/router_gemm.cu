// router_gemm: a linear layer for router logits in float32, x [T, K] times weight [N, K], transposed.
//
// Built for the gates of 8 to 512 experts, K of 2048 to 7168, and few tokens. It must read the weight once: 3.7 MB for
// 256 experts of 7168, 0.9 us at 4.3 TB/s, about what one launch and one trip to memory cost. 2TNK operations, 0.2
// billion for 64 tokens, are nothing to tensor cores. So the weight is spread over all SMs, and each asks for its part
// at once, before the wait (PDL), for the weight is constant.
//
// Split: a cluster of up to 8 blocks has a tile of 16 or 32 outputs and 8 to 32 tokens. K is cut into pieces of 64, a
// line of each row, dealt out evenly to its blocks and their 4 warps, each with a ring of pieces of its own in shared
// memory. Weights are the 16 rows of mma.m16n8k16, tokens its 8 columns; which k stands where in the instruction does
// not matter to a sum as long as both operands agree, so 16 bytes of a lane fill two instructions. The warps' sums are
// added in order, then the blocks', sent through distributed shared memory. Who has which pieces depends on K alone: a
// token's result is the same in every tile, for every T. Before sm_90 a tile is one block's.
//
// Predicted for 256 experts of 7168: 2.4 us for one token, 3.3 for 64, 5.0 for 256. Measured: the first, half as long
// again for the second; and the third, whose tiles do not all fit at once, is left to the vendor's product (README.md).
#include <tvm/ffi/function.h>
#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>

#include <algorithm>

#include "cluster.cuh"
#include "linear.h"

namespace kestrel::moe {

constexpr int kWarps = 4;       // of a block
constexpr int kPiece = 64;      // k of one piece
constexpr int kLine = 128;      // its bytes, of a row
constexpr int kMostPieces = 3;  // of a warp, unless the cluster is as wide as it can be
constexpr int kMostDoublings = 3;
constexpr int64_t kMostBlocks = 256;  // of 16 outputs and 16 tokens; beyond, tiles four times as large read less

struct RouterParams : LinearParams {
  int pieces = 0;     // of K
  int doublings = 0;  // the cluster has 2^doublings blocks
};

// What a block computes: OUTPUTS x TOKENS, over its part of K.
template <int OUTPUTS, int TOKENS>
struct Tile {
  static constexpr int rows = OUTPUTS + TOKENS;               // of a piece
  static constexpr int stages = OUTPUTS == 16 ? 4 : 2;        // pieces under way
  static constexpr int pitch = OUTPUTS + 4;                   // floats; no two lanes that store a sum meet in a bank
  static constexpr int vectors = TOKENS * OUTPUTS / 4;        // of four outputs of a token
  static constexpr int ring = stages * rows * kLine;          // bytes of a warp
  static constexpr int bytes = kWarps * ring + vectors * 16;  // the last are what the cluster sends
  static_assert(pitch * TOKENS * 4 <= ring, "a warp's sums take the place of its ring");
};

// Asks for 16 bytes in shared memory; zeros where there is nothing.
__device__ __forceinline__ void copy16(uint32_t to, const char* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Returns when all but the last LEFT groups of this thread have arrived.
template <int LEFT>
__device__ __forceinline__ void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ uint4 load16_shared(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                         unsigned b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

template <typename T, int OUTPUTS, int TOKENS>
__global__ void __launch_bounds__(kWarps * 32, 2) router_gemm_kernel(const __grid_constant__ RouterParams p) {
  using Shape = Tile<OUTPUTS, TOKENS>;
  constexpr int M = OUTPUTS / 16, N = TOKENS / 8;  // instructions across the tile
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t box;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quad = lane & 3;
  const int ranks = 1 << p.doublings, rank = blockIdx.x & (ranks - 1);
  const int first_output = (blockIdx.x >> p.doublings) * OUTPUTS, first_token = blockIdx.y * TOKENS;
  const int outputs = min(p.outputs - first_output, OUTPUTS), tokens = min(p.tokens - first_token, TOKENS);

  // In the end this block adds the cluster's sums of `own` vectors, of the `share` that fall to it.
  const int share = Shape::vectors >> p.doublings;
  const int own = min(max(tokens * (OUTPUTS / 4) - rank * share, 0), share);
  float4* const inbox = reinterpret_cast<float4*>(shared + kWarps * Shape::ring);  // [ranks][share]

  // This warp's pieces. Copying them, a lane has 16 bytes of every fourth row; the halves of odd rows change places, so
  // that eight lanes that read two rows below meet in no bank.
  const int slot = rank * kWarps + warp, slots_log2 = p.doublings + 2;
  const int begin = slot * p.pieces >> slots_log2, pieces = ((slot + 1) * p.pieces >> slots_log2) - begin;
  const int row = lane >> 3, k = begin * kPiece + (lane & 7) * 8;
  const uint32_t ring = shared_address(shared) + warp * Shape::ring;
  const uint32_t to = ring + row * kLine + ((lane & 7) ^ (row & 1) * 4) * 16;
  const char* const weight = p.weight + (first_output + row) * p.weight_stride + int64_t{k} * sizeof(T);
  const char* const x = p.x + (first_token + row) * p.x_stride + int64_t{k} * sizeof(T);
  const auto ask_weight = [&](int stage, int piece) {
#pragma unroll
    for (int r = 0; r < OUTPUTS; r += 4) {
      const bool there = row + r < outputs && k + piece * kPiece < p.width;
      copy16(to + (stage * Shape::rows + r) * kLine, there ? weight + r * p.weight_stride + piece * kLine : p.weight,
             there);
    }
  };
  const auto ask_x = [&](int stage, int piece) {
#pragma unroll
    for (int r = 0; r < TOKENS; r += 4) {
      const bool there = row + r < tokens && k + piece * kPiece < p.width;
      copy16(to + (stage * Shape::rows + OUTPUTS + r) * kLine, there ? x + r * p.x_stride + piece * kLine : p.x, there);
    }
  };
#pragma unroll
  for (int i = 0; i < Shape::stages; ++i) {
    if (i < pieces) ask_weight(i, i);
  }
  if (ranks > 1) open_box(&box, ranks * own * 16);
  pdl_wait();
  pdl_trigger();
#pragma unroll
  for (int i = 0; i < Shape::stages; ++i) {
    if (i < pieces) ask_x(i, i);
    close_group();
  }

  float sum[M][N][4] = {};
  for (int piece = 0, stage = 0; piece < pieces; ++piece) {
    wait_for_groups<Shape::stages - 1>();
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t from = ring + (stage * Shape::rows + group) * kLine + (quad + ((half ^ group) & 1) * 4) * 16;
      uint4 w[2 * M], v[N];
#pragma unroll
      for (int m = 0; m < 2 * M; ++m) w[m] = load16_shared(from + m * 8 * kLine);
#pragma unroll
      for (int n = 0; n < N; ++n) v[n] = load16_shared(from + (OUTPUTS + n * 8) * kLine);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const uint4 upper = w[2 * m], lower = w[2 * m + 1];
#pragma unroll
        for (int n = 0; n < N; ++n) multiply<T>(sum[m][n], upper.x, lower.x, upper.y, lower.y, v[n].x, v[n].y);
#pragma unroll
        for (int n = 0; n < N; ++n) multiply<T>(sum[m][n], upper.z, lower.z, upper.w, lower.w, v[n].z, v[n].w);
      }
    }
    __syncwarp();
    if (piece + Shape::stages < pieces) {
      ask_weight(stage, piece + Shape::stages);
      ask_x(stage, piece + Shape::stages);
    }
    close_group();
    stage = stage + 1 < Shape::stages ? stage + 1 : 0;
  }

  // The warps' sums, where their rings were: [TOKENS][pitch].
  float* const part = reinterpret_cast<float*>(shared + warp * Shape::ring);
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        part[(8 * n + 2 * quad + i % 2) * Shape::pitch + 16 * m + group + 8 * (i / 2)] = sum[m][n][i];
      }
    }
  }
  __syncthreads();
  if (ranks > 1) cluster_ready();
  const int share_log2 = 31 - __clz(share);
  for (int i = threadIdx.x; i < tokens * (OUTPUTS / 4); i += kWarps * 32) {
    const int at = i / (OUTPUTS / 4) * Shape::pitch + i % (OUTPUTS / 4) * 4;
    float4 total = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 f = reinterpret_cast<const float4*>(shared + w * Shape::ring)[at / 4];
      total.x += f.x, total.y += f.y, total.z += f.z, total.w += f.w;
    }
    if (ranks > 1) {
      send(i >> share_log2, &inbox[rank * share + (i & (share - 1))], total, &box);
    } else {
      inbox[i] = total;
    }
  }
  if (ranks > 1) {
    receive(&box);
  } else {
    __syncthreads();
  }
  for (int i = threadIdx.x; i < own * 4; i += kWarps * 32) {
    const int at = rank * share * 4 + i, output = at % OUTPUTS, token = at / OUTPUTS;
    if (output >= outputs) continue;
    float sums[1 << kMostDoublings], total = 0;
#pragma unroll
    for (int r = 0; r < 1 << kMostDoublings; ++r) {
      sums[r] = r < ranks ? reinterpret_cast<const float*>(inbox + r * share)[i] : 0;
    }
#pragma unroll
    for (int r = 0; r < 1 << kMostDoublings; ++r) total += sums[r];
    reinterpret_cast<float*>(p.out + (first_token + token) * p.out_stride)[first_output + output] = total;
  }
}

int64_t tiles(int count, int of) { return (int64_t{count} + of - 1) / of; }

template <typename T, int OUTPUTS, int TOKENS>
void launch_tiles(const RouterParams& p, DLDevice device) {
  constexpr auto kernel = router_gemm_kernel<T, OUTPUTS, TOKENS>;
  constexpr int bytes = Tile<OUTPUTS, TOKENS>::bytes;
  check_launch(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), device);
  const auto across = static_cast<unsigned>(tiles(p.outputs, OUTPUTS) << p.doublings);
  launch_pdl(kernel, dim3(across, static_cast<unsigned>(tiles(p.tokens, TOKENS))), dim3(kWarps * 32), device, p, bytes,
             1u << p.doublings);
}

template <typename T>
void launch_router(const RouterParams& p, DLDevice device) {
  if (p.tokens <= 8) return launch_tiles<T, 16, 8>(p, device);
  const int64_t blocks = tiles(p.outputs, 16) * tiles(p.tokens, 16) << p.doublings;
  if (p.tokens <= 16 || blocks <= kMostBlocks) return launch_tiles<T, 16, 16>(p, device);
  launch_tiles<T, 32, 32>(p, device);
}

void router_gemm(TensorView out, TensorView x, TensorView weight) {
  RouterParams p;
  if (!prepare_linear(Checks("router_gemm"), out, kFloat32, x, weight, {}, &p)) return;
  const DLDevice device = x.device();
  const DeviceGuard guard(device.device_id);
  p.pieces = (p.width + kPiece - 1) / kPiece;
  if (device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id) >= 9) {
    while (p.doublings < kMostDoublings && p.pieces > (kMostPieces * kWarps) << p.doublings) ++p.doublings;
  }
  same_dtype(x.dtype(), kBFloat16) ? launch_router<__nv_bfloat16>(p, device) : launch_router<__half>(p, device);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(router_gemm, router_gemm);

}  // namespace kestrel::moe
