// Checks of a W4Weight, defined in w4a16.cu.
#pragma once

#include <kestrel/check.h>

#include "w4a16.cuh"

namespace kestrel::quant {

// Checks codes, scales and zeros of a W4Weight, and fills in the fields of p that follow from them.
void check_weight(const Checks& check, const TensorView& codes, const TensorView& scales, const OptionalTensor& zeros,
                  int64_t group, W4Params* p);

// Refuses what no kernel of a 4-bit weight takes.
void require_covered(const W4Params& p, const TensorView& scales);

}  // namespace kestrel::quant
