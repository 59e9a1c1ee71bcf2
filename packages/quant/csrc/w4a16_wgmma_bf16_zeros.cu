// The wgmma kernels for bf16 and weights with zero points.
#include "w4a16_wgmma_launch.cuh"

namespace kestrel::quant::w4_wgmma {

template bool launch<__nv_bfloat16, Zeros::any>(const W4Params&, int, int, DLDevice);

}  // namespace kestrel::quant::w4_wgmma
