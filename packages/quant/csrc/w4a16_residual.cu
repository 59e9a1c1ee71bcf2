// w4a16_kernel with a residual, for each tile of w4a16.cu.
#include "w4a16_launch.h"

namespace kestrel::quant::w4_mma {

template <typename T, typename Tile, typename Largest>
void launch_residual_tile(const W4Params& p, DLDevice device, int most_splits) {
  launch_tile<T, 128, Tile, Largest, Residual::added>(p, device, most_splits);
}

#define KESTREL_RESIDUAL_TILE(TILE, LARGEST)                                                        \
  template void launch_residual_tile<__nv_bfloat16, TILE, LARGEST>(const W4Params&, DLDevice, int); \
  template void launch_residual_tile<__half, TILE, LARGEST>(const W4Params&, DLDevice, int)

KESTREL_RESIDUAL_TILE(Tile8Half, Tile16Half);
KESTREL_RESIDUAL_TILE(Tile16Half, Tile16Half);
KESTREL_RESIDUAL_TILE(Tile8Rows32, Tile16Rows32);
KESTREL_RESIDUAL_TILE(Tile16Rows32, Tile16Rows32);
KESTREL_RESIDUAL_TILE(Tile8LongRows128, Tile16LongRows128);
KESTREL_RESIDUAL_TILE(Tile16LongRows128, Tile16LongRows128);
KESTREL_RESIDUAL_TILE(Tile8Rows64, Tile16Rows64);
KESTREL_RESIDUAL_TILE(Tile8Rows128, Tile16Rows128);
KESTREL_RESIDUAL_TILE(Tile16Rows64, Tile16Rows64);
KESTREL_RESIDUAL_TILE(Tile16Rows128, Tile16Rows128);
KESTREL_RESIDUAL_TILE(Tile32, Tile64);
KESTREL_RESIDUAL_TILE(Tile64, Tile64);

}  // namespace kestrel::quant::w4_mma
