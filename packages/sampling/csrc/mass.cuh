// Elements of a row as ordered integers, as weights and as exact integer masses, whose sums do not depend on the order.
// reference_sampling.py defines them.
#pragma once

#include <kestrel/pack.cuh>

#include "cluster.cuh"

namespace kestrel::sampling {

enum Dtype : int { kRowBFloat16, kRowFloat16, kRowFloat32 };

// Floats as integers in the same order.
__device__ __forceinline__ int order_key(float f) {
  const int bits = __float_as_int(f);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
__device__ __forceinline__ float from_order_key(int key) { return __int_as_float(key ^ ((key >> 31) & 0x7fffffff)); }

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

// 2^x for -0.5 <= x <= 0.5 by its Taylor series, within 1 ulp; ex2.approx is within 2.
__device__ __forceinline__ float exp2_poly(float x) {
  constexpr float terms[] = {1.52527338e-05f, 0.000154035304f, 0.00133335581f, 0.00961812911f,
                             0.0555041087f,   0.240226507f,    0.693147181f};
  float sum = terms[0];
#pragma unroll
  for (int n = 1; n < 7; ++n) sum = __fmaf_rn(sum, x, terms[n]);
  return __fmaf_rn(sum, x, 1.f);
}

constexpr int kTile = 128;  // elements that a warp processes together, four a lane

// A histogram has 32 bins for each octave of weights: for probabilities the upper 5 of the 23 mantissa bits.
constexpr int kLog2BinsPerOctave = 5, kBinShift = 23 - kLog2BinsPerOctave;
constexpr float kBinsPerOctave = 1 << kLog2BinsPerOctave, kOctavesPerBin = 1.f / kBinsPerOctave;

// The mass of an element is its weight times a power of two, rounded to an integer below 2^43. No sum over a row
// reaches 2^60. Rows whose largest weight lies in [2^-length_bits, 1], that is all distributions, use one common power,
// so that their masses can be summed before the largest weight is known.
__device__ __forceinline__ int length_bits(int length) { return max(17, 32 - __clz(length)); }
__device__ __forceinline__ int mass_bits(int length) { return 60 - length_bits(length); }

// What a row holds. Scores are only ordered; they have no weight. Masked ones count as -inf where a bitmask says so.
enum class Kind { probs, logits, scores, masked_scores };

// accurate: for probabilities that are written; fast: for masses that are drawn from.
enum class Precision { fast, accurate };

// Maps an element to its weight: a probability to itself, a logit to the exponential of its distance to the largest.
template <Kind kind>
struct WeightFn {
  static constexpr bool logits = kind == Kind::logits;
  float top;          // the largest element
  float slope;        // logits: log2(e) / temperature,
  float slope_rest;   // and its float32 rounding remainder, not negative, so that both products have one sign
  float scale;        // weight * scale * 2^20 is the mass before rounding
  float least = 0.f;  // weights below it have no mass
  int anchor;         // probabilities: bits of the value at which the histogram bins begin

  // NaN, which has no mass, for -inf and for v far below the largest.
  __device__ __forceinline__ float weight(float v) const {
    if constexpr (!logits) return v;
    const float below = v - top;
    return ptx::ex2_approx_ftz(__fmaf_rn(below, slope, __fmul_rn(below, slope_rest)));
  }
  // The exponent is not rounded, and negative probabilities count as 0.
  __device__ __forceinline__ float accurate_weight(float v) const {
    if constexpr (!logits) return fmaxf(v, 0.f);
    const float below = fmaxf(v - top, -3e38f);
    const float whole = fmaxf(rintf(__fmul_rn(below, slope)), -200.f);  // 2^-200 is 0 in float32
    const float rest = fmaxf(__fmaf_rn(below, slope_rest, __fmaf_rn(below, slope, -whole)), -1.f);
    return exp2_poly(rest) * exp2f(whole);
  }
  __device__ __forceinline__ void set_temperature(float temperature) {
    const double exact = 1.4426950408889634 / static_cast<double>(temperature);
    const float down = __double2float_rd(exact);
    slope = fminf(fmaxf(down, 1e-36f), 3e38f);
    slope_rest = slope == down ? static_cast<float>(exact - static_cast<double>(slope)) : 0.f;
  }

  // mass / 2^20, not rounded; 0 for elements without mass, negative numbers and NaN.
  // The fast weight decides what has mass, as in the draw.
  template <Precision precision = Precision::fast>
  __device__ __forceinline__ float scaled(float v) const {
    if constexpr (precision == Precision::accurate) {
      return least > 0.f && !(weight(v) >= least) ? 0.f : accurate_weight(v) * scale;
    } else {
      const float w = weight(v);
      return w >= least ? w * scale : 0.f;
    }
  }

  static __device__ __forceinline__ float scale_of(int length, int exponent) {
    return __int_as_float((mass_bits(length) - exponent - 20 + 127) << 23);
  }
  // Whether the common power applies to this row, whose `top` is known and at least 2^-86.
  __device__ __forceinline__ bool is_common(int length) const {
    return logits || (top >= __int_as_float((127 - length_bits(length)) << 23) && top <= 1.f);
  }
  __device__ __forceinline__ void set_common(int length) {
    scale = scale_of(length, 1);
    anchor = __float_as_int(1.f);
  }
  __device__ __forceinline__ void set_scale(int length) {
    set_common(length);
    if (is_common(length)) return;
    scale = scale_of(length, (__float_as_int(top) >> 23) - 126);  // 2^exponent is above the largest weight
    anchor = __float_as_int(top);
  }

  // No element below this value has mass: masses are below 2^43, so that one 45 octaves below the largest is below 1/4.
  static constexpr int kOctavesOfMass = 45;
  __device__ __forceinline__ float zero_mass_below() const {
    if constexpr (!logits) return top * (1.f / (u64{1} << kOctavesOfMass));
    return slope < 1e37f ? top - __fdividef(static_cast<float>(kOctavesOfMass), slope) : -INFINITY;
  }

  // The histogram bin of a value, 0 to `last`: its distance below the largest, or below 1.
  __device__ __forceinline__ int bin(float v, int last) const {
    if constexpr (logits) {
      const float steps = (top - v) * slope * kBinsPerOctave;
      return steps < static_cast<float>(last) ? static_cast<int>(steps) : last;
    } else {
      return v > 0.f ? max(0, min((anchor - __float_as_int(v)) >> kBinShift, last)) : last;
    }
  }
  // The approximate lower end of a bin, and the weight of an element in it.
  __device__ __forceinline__ float bin_end(int bin) const {
    if constexpr (logits) return top - __fdividef(static_cast<float>(bin + 1) * kOctavesPerBin, slope);
    return __int_as_float(anchor - ((bin + 1) << kBinShift) + 1);
  }
  __device__ __forceinline__ float bin_weight(int bin) const {
    if constexpr (logits) return ptx::ex2_approx_ftz(-(static_cast<float>(bin) + 0.5f) * kOctavesPerBin);
    return __int_as_float(anchor - (bin << kBinShift) - (1 << (kBinShift - 1)));
  }
};

// Sums masses without a float-to-integer conversion: adding 2^23 leaves an integer in the low bits of a float. The
// upper part, x rounded down, and the remainder have separate sums. `add` takes mass / 2^20.
struct MassSum {
  static constexpr u32 kBias = 0x4b000000u;  // the bits of 2^23
  u64 total = 0;
  u32 high = 0, low = 0, count = 0;

  __device__ __forceinline__ void add(float x) {
    const float upper = __fadd_rz(x, 0x1p23f);
    const float rest = __fadd_rn(x, -__fadd_rn(upper, -0x1p23f));
    high += __float_as_uint(upper);
    low += __float_as_uint(__fmaf_rn(rest, 0x1p20f, 0x1p23f));
    count += 1;
  }
  template <int size>
  __device__ __forceinline__ void add(const float (&x)[size]) {
#pragma unroll
    for (int e = 0; e < size; ++e) add(x[e]);
    if (count >= 240) flush();  // before a sum of 24-bit parts exceeds 32 bits
  }
  __device__ __forceinline__ void flush() {
    total += (static_cast<u64>(high - count * kBias) << 20) + (low - count * kBias);
    high = low = count = 0;
  }
  __device__ __forceinline__ u64 value() {
    flush();
    return total;
  }
};

__device__ __forceinline__ u64 mass_of(float x) {
  MassSum sum;
  sum.add(x);
  return sum.value();
}

// floor(mass * q32 / 2^32) for mass < 2^60 and q32 <= 2^32.
__device__ __forceinline__ u64 scale_q32(u64 mass, u64 q32) {
  const u64 high = mass >> 30, low = mass & ((u64{1} << 30) - 1);
  return (q32 * high + ((q32 * low) >> 30)) >> 2;
}

}  // namespace kestrel::sampling
