// The codes of whole heads, which share a scale: a team of neighbouring lanes per token and head.
#pragma once

#include <cstdint>

#include "spread.cuh"

namespace kestrel::kvcache {

// Which head of which token a thread works on, with which others. A team is a power of two of lanes, so it never
// crosses a warp.
struct Team {
  int token;
  unsigned head, lane, lanes, mask;
  bool active;

  // How teams share heads of so many packs.
  static unsigned lanes_for(int packs) {
    unsigned lanes = 1;
    while (lanes < 32 && lanes < static_cast<unsigned>(packs)) lanes *= 2;
    return lanes;
  }

  // Units of the spread are the lanes of a token's teams.
  __device__ __forceinline__ Team(const Spread& spread, unsigned lanes_) : lanes(lanes_) {
    const Spread::Mine mine = spread.mine();
    const unsigned unit = mine.unit;
    token = mine.token;
    head = unit / lanes;
    lane = unit & (lanes - 1);
    mask = (lanes == 32 ? ~0u : (1u << lanes) - 1) << (threadIdx.x & 31 & ~(lanes - 1));
    active = token < spread.tokens && unit < spread.units;
  }

  // combine(...) of a value of every lane, the same for all of them. Only active teams call this.
  template <typename V, typename F>
  __device__ __forceinline__ V all(V value, F combine) const {
    for (unsigned other = lanes / 2; other > 0; other >>= 1) {
      value = combine(value, __shfl_xor_sync(mask, value, other));
    }
    return value;
  }
};

}  // namespace kestrel::kvcache
