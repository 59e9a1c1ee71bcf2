// gemv: a linear layer for one to four tokens, x [T, K] times weight [N, K] transposed, plus a bias.
//
// For weights of 4096x4096 and larger. Memory-bound by one read of the weight: whole cache lines, and enough of them in
// flight (gemv.cuh).
#include <kestrel/tensor.h>
#include <tvm/ffi/function.h>

#include "gemv.cuh"

namespace kestrel::moe {

void gemv(TensorView out, TensorView x, TensorView weight, OptionalTensor bias) {
  LinearParams p;
  if (!prepare_linear(Checks("gemv"), out, x.dtype(), x, weight, bias, &p)) return;
  if (p.tokens > kGemvTokens) unsupported("more than 4 tokens");
  const DeviceGuard guard(x.device().device_id);
  dispatch_float(x, [&](auto t) { launch_gemv<decltype(t)>(p, x.device()); });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gemv, gemv);

}  // namespace kestrel::moe
