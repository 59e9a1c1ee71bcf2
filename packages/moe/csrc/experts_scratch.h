// The scratch memory of fused_experts, and whether weights are read once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "experts_params.cuh"

namespace kestrel::moe {

inline int64_t scale_blocks(int64_t columns) { return (columns + kScaleBlock - 1) / kScaleBlock; }

// Byte offsets of the parts of the scratch memory of fused_experts. positions: of the aligned pairs, if wgmma kernels
// keep the hidden layer, and with `permutes` x, in tiles of them; else 0. Their projections may run in one launch;
// other kernels write `partial` after the last use of x, so the codes of x lie there, too.
struct ExpertsScratch {
  int64_t activated = 0, partial = 0, arrivals = 0, x_codes = 0, x_scale = 0, codes = 0, scale = 0, bytes = 0;

  ExpertsScratch(int64_t tokens, int64_t pairs, int64_t positions, int64_t inner, int64_t width, bool fp8,
                 bool permutes) {
    const auto take = [&](int64_t size) {
      const int64_t at = bytes;
      bytes += (size + 255) / 256 * 256;
      return at;
    };
    const int64_t lines = (inner * (fp8 ? 1 : 2) + kLineBytes - 1) / kLineBytes;
    activated = take(positions ? positions * lines * kLineBytes : pairs * inner * (fp8 ? 4 : 2));
    const int64_t codes_of_x = permutes ? positions * scale_blocks(width) * kLineBytes : tokens * width;
    partial = x_codes = take(std::max(pairs * width * 4, fp8 && !positions ? codes_of_x : 0));
    if (fp8 && positions) x_codes = take(codes_of_x);
    arrivals = take(width / 16 * 4);
    if (!fp8) return;
    x_scale = take((permutes ? std::max(positions, tokens) : tokens) * scale_blocks(width) * 4);
    codes = take(positions ? 0 : pairs * inner);
    scale = take(std::max(positions, pairs) * scale_blocks(inner) * 4);
  }
};

// Pairs for each expert up to which most experts have one token tile: of up to 128 tokens with FP8 weights, of up to 64
// with weights of 16 bits.
constexpr int64_t kPairsReadOnceFp8 = 96, kPairsReadOnce = 48;

// Whether the weights of most experts are read once. They then leave L2 first, and do not evict instructions and rows
// of tokens.
inline bool are_read_once(int64_t pairs, int64_t experts, bool fp8 = true) {
  return pairs <= (fp8 ? kPairsReadOnceFp8 : kPairsReadOnce) * experts;
}

}  // namespace kestrel::moe
