// Products of 16 weight rows with 8 tokens over 128 bytes of K, by mma.sync.
//
// K is permuted alike in both operands, so that the 16 bytes that a lane loads of a row feed two instructions (FP8:
// four, converted exactly to fp16).
#pragma once

#include <cuda_fp8.h>
#include <kestrel/ptx/mma.cuh>

namespace kestrel::moe {

// c += 16 bytes of K per lane of two weight rows, eight apart, times 16 bytes of a token.
template <typename T>
__device__ __forceinline__ void multiply_line(float (&c)[4], uint4 low, uint4 high, uint4 b) {
  const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
  ptx::mma_16x8x16(c, first, b.x, b.y, T());
  ptx::mma_16x8x16(c, second, b.z, b.w, T());
}

// Sixteen e4m3 codes, converted exactly to fp16.
struct HalfCodes {
  unsigned pairs[8];

  HalfCodes() = default;

  __device__ __forceinline__ explicit HalfCodes(uint4 codes) {
    const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto codes_of_pair = static_cast<uint16_t>(words[i] >> (16 * h));
#if __CUDA_ARCH__ >= 890
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pairs[2 * i + h]) : "h"(codes_of_pair));
#else
        const __half2_raw raw = __nv_cvt_fp8x2_to_halfraw2(codes_of_pair, __NV_E4M3);
        pairs[2 * i + h] = raw.x | static_cast<unsigned>(raw.y) << 16;
#endif
      }
    }
  }
};

__device__ __forceinline__ void multiply_line(float (&c)[4], const HalfCodes& low, const HalfCodes& high,
                                              const HalfCodes& b) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t a[4] = {low.pairs[2 * i], high.pairs[2 * i], low.pairs[2 * i + 1], high.pairs[2 * i + 1]};
    ptx::mma_16x8x16(c, a, b.pairs[2 * i], b.pairs[2 * i + 1], __half());
  }
}

}  // namespace kestrel::moe
