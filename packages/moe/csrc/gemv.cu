// gemv: a linear layer for one to four tokens, x [T, K] times weight [N, K] transposed, plus a bias.
//
// For weights of 4096x4096 and larger. Memory-bound by one read of the weight: whole cache lines, and enough of them in
// flight (gemv.cuh).
#include <kestrel/export.h>
#include <kestrel/tensor.h>

#include "dense_launch.h"
#include "gemv.cuh"

namespace kestrel::moe {

void launch_few_tokens(const LinearParams& p, DLDataType dtype, DLDevice device) {
  if (p.tokens > kGemvTokens) unsupported("more than 4 tokens");
  if (same_dtype(dtype, kBFloat16)) {
    launch_gemv<__nv_bfloat16>(p, device);
  } else if (same_dtype(dtype, kFloat16)) {
    launch_gemv<__half>(p, device);
  } else {
    launch_gemv<float>(p, device);
  }
}

void gemv(TensorView out, TensorView x, TensorView weight, OptionalTensor bias) {
  LinearParams p;
  if (!prepare_linear(Checks("gemv"), out, x.dtype(), x, weight, bias, &p)) return;
  const DeviceGuard guard(x.device().device_id);
  launch_few_tokens(p, x.dtype(), x.device());
}

KESTREL_EXPORT(gemv, gemv);

}  // namespace kestrel::moe
