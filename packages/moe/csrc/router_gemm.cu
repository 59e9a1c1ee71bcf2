// router_gemm: a linear layer for router logits in float32, x [T, K] times weight [N, K], transposed.
//
// Built for 64 experts of 2048 and 1 to 740 tokens. It must read x once: 3 MB for 740 tokens, 0.7 us at 4.3 TB/s;
// 2TNK operations, 194 million, which tensor cores do in 0.3 us. So one trip to memory, the launch and the chain of
// products over K count.
//
// Split: a block of 16 warps computes 16 outputs for 8 * TILES tokens. The warps take the pieces of 32 k in turn; per
// piece a lane loads 16 bytes of two weight rows and of one token row. Weights are the 16 rows of mma.m16n8k16, tokens
// its 8 columns; which k stands where in the instruction does not matter to a sum as long as both operands agree, so
// each lane's 8 consecutive k fill two instructions without a shuffle. The warps' parts are added in shared memory in
// order. Pieces and order depend on K alone: a token's result is the same for every T.
// PDL: the first weights (constant) are read before the wait.
//
// Measured: 2.0 us for one token, 5.3 for 740, whose limits are 1.1 and 1.9 (results/h200.json, README.md).
#include <tvm/ffi/function.h>
#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>

#include "linear.h"

namespace kestrel::moe {

constexpr int kWarps = 16;
constexpr int kOutputs = 16;  // of a block
constexpr int kPiece = 32;    // k of one piece
constexpr int kAhead = 4;     // pieces of weight under way

template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

template <typename T, int TILES>
__global__ void __launch_bounds__(kWarps * 32) router_gemm_kernel(const __grid_constant__ LinearParams p) {
  __shared__ float parts[kWarps][kOutputs][8 * TILES + 1];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane >> 2, quad = lane & 3;
  const int first_output = blockIdx.x * kOutputs, first_token = blockIdx.y * 8 * TILES;
  const uint4 zero = make_uint4(0, 0, 0, 0);

  // Element k of this lane's first piece; the next piece of this warp is kWarps pieces further.
  const int first_k = warp * kPiece + quad * 8;
  constexpr int step = kWarps * kPiece;
  const char* weight = p.weight + (first_output + group) * p.weight_stride + int64_t{first_k} * sizeof(T);
  const int64_t eight_rows = 8 * p.weight_stride;
  const int rows = p.outputs - first_output - group;  // of the weight, from this lane's on

  uint4 upper[kAhead], lower[kAhead];
  const auto load_weights = [&](int slot, int k) {
    const char* at = weight + int64_t{k - first_k} * sizeof(T);
    upper[slot] = rows > 0 && k < p.width ? load16_constant(at) : zero;
    lower[slot] = rows > 8 && k < p.width ? load16_constant(at + eight_rows) : zero;
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load_weights(i, first_k + i * step);
  pdl_wait();
  pdl_trigger();

  float sum[TILES][4] = {};
  for (int k0 = first_k; k0 - quad * 8 < p.width; k0 += kAhead * step) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k = k0 + i * step;
      uint4 x[TILES];
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        const int token = first_token + 8 * t + group;
        x[t] = zero;
        if (token < p.tokens && k < p.width) {
          x[t] = *reinterpret_cast<const uint4*>(p.x + token * p.x_stride + int64_t{k} * sizeof(T));
        }
      }
      const unsigned first[4] = {upper[i].x, lower[i].x, upper[i].y, lower[i].y};
      const unsigned second[4] = {upper[i].z, lower[i].z, upper[i].w, lower[i].w};
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        multiply<T>(sum[t], first, x[t].x, x[t].y);
        multiply<T>(sum[t], second, x[t].z, x[t].w);
      }
      load_weights(i, k + kAhead * step);
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) parts[warp][group + 8 * (i / 2)][8 * t + 2 * quad + i % 2] = sum[t][i];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kOutputs * 8 * TILES; i += kWarps * 32) {
    const int output = first_output + i % kOutputs, token = first_token + i / kOutputs;
    if (output >= p.outputs || token >= p.tokens) continue;
    float total = parts[0][i % kOutputs][i / kOutputs];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) total += parts[w][i % kOutputs][i / kOutputs];
    reinterpret_cast<float*>(p.out + token * p.out_stride)[output] = total;
  }
}

// TILES: 8 tokens each, of a block.
template <typename T, int TILES>
void launch_tiles(const LinearParams& p, DLDevice device) {
  const auto blocks = [](int count, int of) { return static_cast<unsigned>((count + of - 1) / of); };
  launch_pdl(router_gemm_kernel<T, TILES>, dim3(blocks(p.outputs, kOutputs), blocks(p.tokens, 8 * TILES)),
             dim3(kWarps * 32), device, p);
}

template <typename T>
void launch_router(const LinearParams& p, DLDevice device) {
  if (p.tokens <= 8) return launch_tiles<T, 1>(p, device);
  if (p.tokens <= 16) return launch_tiles<T, 2>(p, device);
  launch_tiles<T, 4>(p, device);
}

void router_gemm(TensorView out, TensorView x, TensorView weight) {
  LinearParams p;
  if (!prepare_linear(Checks("router_gemm"), out, kFloat32, x, weight, {}, &p)) return;
  const DeviceGuard guard(x.device().device_id);
  if (same_dtype(x.dtype(), kBFloat16)) {
    launch_router<__nv_bfloat16>(p, x.device());
  } else {
    launch_router<__half>(p, x.device());
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(router_gemm, router_gemm);

}  // namespace kestrel::moe
