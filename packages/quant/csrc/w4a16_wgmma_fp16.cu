// The wgmma kernels for fp16.
#include "w4a16_wgmma_launch.cuh"

namespace kestrel::quant::w4_wgmma {

template bool launch<__half, Zeros::any>(const W4Params&, int, int, DLDevice);

}  // namespace kestrel::quant::w4_wgmma
