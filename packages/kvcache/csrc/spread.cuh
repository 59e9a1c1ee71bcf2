// How the units of work of some tokens are spread over blocks: short rows share a block, long ones take several.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kestrel::kvcache {

struct Spread {
  int tokens = 0;
  unsigned units = 1;                       // of a token
  unsigned span = 1, tokens_per_block = 1;  // threads of one token in a block, and how many tokens a block has

  Spread() = default;
  Spread(int tokens_, unsigned units_, unsigned threads) : tokens(tokens_), units(units_) {
    span = std::min(threads, units);
    tokens_per_block = threads / span;
  }

  dim3 grid() const { return dim3((tokens - 1) / tokens_per_block + 1, (units - 1) / span + 1); }
  dim3 block() const { return dim3(span * tokens_per_block); }

  // A thread's token and unit. Both may be past the end.
  struct Mine {
    int token;
    unsigned unit;
  };
  // Which of the block's tokens that is.
  __device__ __forceinline__ unsigned in_block() const { return tokens_per_block == 1 ? 0 : threadIdx.x / span; }
  __device__ __forceinline__ Mine mine() const {
    const unsigned token = in_block();
    return {static_cast<int>(blockIdx.x * tokens_per_block + token), blockIdx.y * span + threadIdx.x - token * span};
  }
};

}  // namespace kestrel::kvcache
