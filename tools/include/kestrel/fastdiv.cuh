// Division of integers by a divisor that the host knows: a multiplication, an addition and a shift.
//
// With 2^(s-1) < d <= 2^s and m = floor(2^32 (2^s - d) / d) + 1 (32 bits), floor(n / d) = (umulhi(n, m) + n) >> s for
// every n < 2^31: m + 2^32 exceeds 2^(32+s) / d by at most 1, which adds less than n / 2^(32+s) < 1 / (2 d) to the
// quotient, and the sum stays below 2^32.
#pragma once

#include <cstdint>

namespace kestrel {

// Valid for divisors 1 to 2^31 and dividends below 2^31.
struct FastDiv {
  unsigned divisor = 1, multiplier = 1, shift = 0;

  FastDiv() = default;
  explicit FastDiv(unsigned divisor_) : divisor(divisor_) {
    while ((1u << shift) < divisor) ++shift;
    multiplier = static_cast<unsigned>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
  }

  __device__ __forceinline__ unsigned divide(unsigned n) const { return (__umulhi(n, multiplier) + n) >> shift; }

  struct Result {
    unsigned quotient, remainder;
  };
  __device__ __forceinline__ Result divmod(unsigned n) const {
    const unsigned quotient = divide(n);
    return {quotient, n - quotient * divisor};
  }
};

}  // namespace kestrel
