// How the work of each token, a number of units, is split over thread blocks: tokens with few units share a block, a
// token with many units has several blocks.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kestrel::kvcache {

struct WorkSplit {
  int tokens = 0;
  unsigned units = 1;                                    // per token
  unsigned threads_per_token = 1, tokens_per_block = 1;  // within one block

  WorkSplit() = default;
  WorkSplit(int tokens_, unsigned units_, unsigned max_threads) : tokens(tokens_), units(units_) {
    threads_per_token = std::min(max_threads, units);
    tokens_per_block = max_threads / threads_per_token;
  }

  dim3 grid() const { return dim3((tokens - 1) / tokens_per_block + 1, (units - 1) / threads_per_token + 1); }
  dim3 block() const { return dim3(threads_per_token * tokens_per_block); }

  // A thread's token and unit. Both may be past the end.
  struct TokenUnit {
    int token;
    unsigned unit;
  };
  __device__ __forceinline__ unsigned token_in_block() const {
    return tokens_per_block == 1 ? 0 : threadIdx.x / threads_per_token;
  }
  __device__ __forceinline__ TokenUnit token_unit() const {
    const unsigned token = token_in_block();
    return {static_cast<int>(blockIdx.x * tokens_per_block + token),
            blockIdx.y * threads_per_token + threadIdx.x - token * threads_per_token};
  }
};

}  // namespace kestrel::kvcache
