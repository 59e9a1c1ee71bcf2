// logprob_rows where a TileRing brings the rows, for sm_90.

#include "logprob_ring.h"

namespace kestrel::sampling {

void launch_ring_rows(const LogprobParams& p, bool draws, Split split, DLDevice device) {
  split.smem_bytes += RingMemory::bytes(split.threads / 32, 0);
  if (draws) {
    launch_split<logprob_rows</*draws=*/true, /*processes=*/false, /*rings=*/true>>(p, p.num_rows, split, device,
                                                                                    /*balanced=*/true);
  } else {
    launch_split<logprob_rows</*draws=*/false, /*processes=*/false, /*rings=*/true>>(p, p.num_rows, split, device,
                                                                                     /*balanced=*/true);
  }
}

void launch_ring_step(const StepParams& p, Split split, DLDevice device) {
  split.smem_bytes += RingMemory::bytes(split.threads / 32, mask_bytes(p.length));
  launch_split<logprob_rows</*draws=*/true, /*processes=*/true, /*rings=*/true>>(p, p.num_rows, split, device,
                                                                                 /*balanced=*/true);
}

}  // namespace kestrel::sampling
