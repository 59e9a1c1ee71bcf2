// The lanes of a warp that share one head of one token, and with it a scale.
#pragma once

#include <cstdint>

#include "work_split.cuh"

namespace kestrel::kvcache {

// `lanes` is a power of two, so a head never crosses a warp. The units of the split are the lanes of a token's heads.
struct HeadLanes {
  int token;
  unsigned head, lane, lanes, mask;
  bool active;

  static unsigned lanes_for(int packs_per_head) {
    unsigned lanes = 1;
    while (lanes < 32 && lanes < static_cast<unsigned>(packs_per_head)) lanes *= 2;
    return lanes;
  }

  __device__ __forceinline__ HeadLanes(const WorkSplit& split, unsigned lanes_) : lanes(lanes_) {
    const WorkSplit::TokenUnit work = split.token_unit();
    const unsigned unit = work.unit;
    token = work.token;
    head = unit / lanes;
    lane = unit & (lanes - 1);
    mask = (lanes == 32 ? ~0u : (1u << lanes) - 1) << (threadIdx.x & 31 & ~(lanes - 1));
    active = token < split.tokens && unit < split.units;
  }

  // combine(...) over the values of all lanes, for each of them. All lanes of an active head call this.
  template <typename V, typename F>
  __device__ __forceinline__ V reduce(V value, F combine) const {
    for (unsigned other = lanes / 2; other > 0; other >>= 1) {
      value = combine(value, __shfl_xor_sync(mask, value, other));
    }
    return value;
  }
};

}  // namespace kestrel::kvcache
