// moe_sum: adds up the K results of each token, in order of k.
//
// Built for 1 to 1024 tokens of 8 results of 2048. It must read 2KN bytes per token and write 2N: 740x8x2048 moves
// 27 MB, 6.3 us at 4.3 TB/s; one addition per element. Up to 16 tokens one trip to memory and the launch decide.
//
// Split: a thread per pack of 16 bytes of the result, which asks for eight of its K packs before it adds the first, in
// order, so a row's sum does not depend on the batch. K = 8 has code of its own. Nothing is read before the wait: a
// prefetch of all rows costs 1.2 us at 740 tokens and wins nothing at one.
//
// Predicted 8 us for 740x8x2048, whose limit is 7.4; measured 7.4 (results/h200.json, README.md).
#include <kestrel/launch.h>
#include <kestrel/tensor.h>
#include <tvm/ffi/function.h>
#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>

#include <algorithm>

namespace kestrel::moe {

struct SumParams {
  const char* x = nullptr;
  char* out = nullptr;
  int64_t token_stride = 0, choice_stride = 0, out_stride = 0;  // in bytes
  int choices = 0;                                              // K
  int width = 0;                                                // N
  int chunks = 0;                                               // blocks per token
};

constexpr int kWidest = 256;  // threads of a block
constexpr int kAtOnce = 8;

// CHOICES: K where it is known, else 0.
template <typename T, bool VECTORS, int CHOICES>
__global__ void __launch_bounds__(kWidest, 1) moe_sum_kernel(const __grid_constant__ SumParams p) {
  constexpr int size = VECTORS ? Pack<T>::size : 1;
  const int token = blockIdx.x / p.chunks;
  const int first = ((blockIdx.x - token * p.chunks) * blockDim.x + threadIdx.x) * size;
  if (first >= p.width) return;
  const char* x = p.x + token * p.token_stride + static_cast<int64_t>(first) * sizeof(T);
  char* out = p.out + token * p.out_stride + static_cast<int64_t>(first) * sizeof(T);
  pdl_wait();
  pdl_trigger();
  float sum[size];
#pragma unroll
  for (int i = 0; i < size; ++i) sum[i] = 0.f;
  if constexpr (VECTORS) {
    const int choices = CHOICES ? CHOICES : p.choices;
#pragma unroll(CHOICES ? (CHOICES + kAtOnce - 1) / kAtOnce : 1)
    for (int k0 = 0; k0 < choices; k0 += kAtOnce) {
      Pack<T> packs[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (k0 + k < choices) packs[k].bits = load16_streamed(x);
        x += p.choice_stride;
        pin(x);  // one address in registers, not eight
      }
      __syncwarp();  // all are asked for before the first is added: ptxas would save registers
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (k0 + k < choices) {
          float f[size];
          packs[k].unpack(f);
#pragma unroll
          for (int i = 0; i < size; ++i) sum[i] += f[i];
        }
      }
    }
    Pack<T> y;
    y.pack(sum);
    store16(out, y.bits);
  } else {
    for (int k = 0; k < p.choices; ++k) sum[0] += to_float(*reinterpret_cast<const T*>(x + k * p.choice_stride));
    *reinterpret_cast<T*>(out) = from_float<T>(sum[0]);
  }
}

void moe_sum(TensorView out, TensorView x) {
  const Checks check("moe_sum");
  check.dtype("x", x, {kBFloat16, kFloat16, kFloat32});
  check.rank("x", x, 3, 3);
  check.last_contiguous("x", x);
  const int64_t tokens = x.size(0), width = x.size(2), shape[2] = {tokens, width};
  check.dtype("out", out, {x.dtype()});
  check.last_contiguous("out", out);
  check.shape("out", out, shape, 2);
  check.disjoint("out", out);
  check_devices(check, "x", x, {{"out", out}});
  if (tokens == 0 || width == 0) return;
  constexpr int64_t most = int64_t{1} << 30;
  if (tokens > most || width > most || x.size(1) > most) unsupported("a dimension of more than 2^30");

  SumParams p;
  p.x = address(x);
  p.out = address(out);
  p.token_stride = x.stride(0) * element_bytes(x);
  p.choice_stride = x.stride(1) * element_bytes(x);
  p.out_stride = out.stride(0) * element_bytes(x);
  p.choices = static_cast<int>(x.size(1));
  p.width = static_cast<int>(width);
  const DeviceGuard guard(x.device().device_id);
  dispatch_float(x, [&](auto t) {
    using T = decltype(t);
    const bool vectors = width % Pack<T>::size == 0 && aligned16(p.x) && aligned16(p.out) && p.token_stride % 16 == 0 &&
                         p.choice_stride % 16 == 0 && p.out_stride % 16 == 0;
    const int packs = p.width / (vectors ? Pack<T>::size : 1);
    const int widest = tokens * packs < 64 * 1024 ? 64 : kWidest;  // few packs: spread them over more SMs
    const int threads = std::min(widest, (packs + 31) / 32 * 32);
    p.chunks = (packs + threads - 1) / threads;
    if (tokens * p.chunks > (int64_t{1} << 31) - 1) unsupported("more than 2^31 blocks");
    const auto kernel = !vectors               ? moe_sum_kernel<T, false, 0>
                        : p.choices == kAtOnce ? moe_sum_kernel<T, true, kAtOnce>
                                               : moe_sum_kernel<T, true, 0>;
    launch_pdl(kernel, dim3(static_cast<unsigned>(tokens * p.chunks)), dim3(threads), x.device(), p);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_sum, moe_sum);

}  // namespace kestrel::moe
