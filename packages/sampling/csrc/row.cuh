// A row of probabilities or logits as float32: read once and kept in shared memory, a piece per warp of the team; or,
// where no block can hold its piece, read again in every pass. And the exact weights of its elements.
#pragma once

#include <kestrel/pack.cuh>

#include "team.cuh"

namespace kestrel::sampling {

enum Dtype : int { kRowBFloat16, kRowFloat16, kRowFloat32 };

// Floats as integers of the same order.
__device__ __forceinline__ int ordered(float f) {
  const int bits = __float_as_int(f);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}
__device__ __forceinline__ float from_ordered(int key) { return __int_as_float(key ^ ((key >> 31) & 0x7fffffff)); }

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

// 2^x for x from -0.5 to 0.5 by its series, within one unit in the last place; the instruction is off by two.
__device__ __forceinline__ float fine_power_of_two(float x) {
  constexpr float terms[] = {1.52527338e-05f, 0.000154035304f, 0.00133335581f, 0.00961812911f,
                             0.0555041087f,   0.240226507f,    0.693147181f};
  float sum = terms[0];
#pragma unroll
  for (int n = 1; n < 7; ++n) sum = __fmaf_rn(sum, x, terms[n]);
  return __fmaf_rn(sum, x, 1.f);
}

constexpr int kTile = 128;  // elements that a warp looks at together, four a lane

// The piece of one warp: elements [begin, end), `end` rounded up to whole groups of four; what lies past the row is
// NaN, which no comparison keeps.
template <bool resident>
struct Piece {
  const char* row;  // in global memory
  float* held;      // this block's elements in shared memory
  int dtype;
  int begin, end;
  int length;  // of the row
  int first_held;
  float factor;  // what elements are multiplied with when they are read: 2^64 where the row is tiny

  __device__ __forceinline__ Piece(const void* row_, int dtype_, int length_, int per_warp, const Team& team,
                                   float* held_)
      : row(static_cast<const char*>(row_)), held(held_), dtype(dtype_), length(length_), factor(1.f) {
    begin = team.warp * per_warp;
    end = max(begin, min(begin + per_warp, (length + 3) & ~3));
    first_held = team.block * team.warps * per_warp;
  }

  // Adding 0 makes +0 of -0: equal numbers are then equal as integers.
  __device__ __forceinline__ float element(int i) const {
    if (dtype == kRowFloat32) return reinterpret_cast<const float*>(row)[i] + 0.f;
    if (dtype == kRowFloat16) return __half2float(reinterpret_cast<const __half*>(row)[i]) + 0.f;
    return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[i]) + 0.f;
  }

  // Four elements from i on, i < end.
  __device__ __forceinline__ float4 four(int i) const {
    if constexpr (resident) {
      return *reinterpret_cast<const float4*>(held + (i - first_held));
    } else {
      float v[4];
      if (dtype == kRowFloat32 && reinterpret_cast<uintptr_t>(row) % 16 == 0 && i + 4 <= length) {
        Pack<float> pack;
        pack.bits = load16_streamed(row + static_cast<int64_t>(i) * 4);
        pack.unpack(v);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = i + e < length ? element(i + e) : not_a_number();
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = (v[e] + 0.f) * factor;
      return make_float4(v[0], v[1], v[2], v[3]);
    }
  }

  // f(four values, the first one's index) for every tile, in order and with all lanes of the warp.
  template <typename F>
  __device__ __forceinline__ void each_tile(int lane, F f) const {
    for (int tile = begin; tile < end; tile += kTile) {
      const int i = tile + 4 * lane;
      const float none = not_a_number();
      f(i < end ? four(i) : make_float4(none, none, none, none), i);
    }
  }

  // Reads the piece once, 16 bytes a lane where the row is aligned: see(values).
  // A resident row is kept.
  template <typename F>
  __device__ __forceinline__ void read(int lane, F see) {
    int first = begin;
    if (reinterpret_cast<uintptr_t>(row) % 16 == 0) {
      if (dtype == kRowFloat32) first = read_packs<float>(lane, see);
      if (dtype == kRowFloat16) first = read_packs<__half>(lane, see);
      if (dtype == kRowBFloat16) first = read_packs<__nv_bfloat16>(lane, see);
    }
#pragma unroll 4
    for (int i = first + lane; i < end; i += 32) {
      const float v[1] = {i < length ? element(i) : not_a_number()};
      if (i < length) see(v);
      if constexpr (resident) held[i - first_held] = v[0];
    }
    __syncwarp();
  }

  template <typename T, typename F>
  __device__ __forceinline__ int read_packs(int lane, F see) {
    constexpr int size = Pack<T>::size, ahead = 8;
    const int whole = min(end, length / size * size);
    for (int base = begin; base < whole; base += ahead * 32 * size) {
      Pack<T> pack[ahead];
#pragma unroll
      for (int u = 0; u < ahead; ++u) {
        const int i = base + (u * 32 + lane) * size;
        if (i < whole) pack[u].bits = load16_streamed(row + static_cast<int64_t>(i) * sizeof(T));
      }
#pragma unroll
      for (int u = 0; u < ahead; ++u) {
        const int i = base + (u * 32 + lane) * size;
        if (i < whole) {
          float v[size];
          pack[u].unpack(v);
#pragma unroll
          for (int e = 0; e < size; ++e) v[e] += 0.f;
          see(v);
          if constexpr (resident) {
#pragma unroll
            for (int e = 0; e < size; e += 4) {
              *reinterpret_cast<float4*>(held + (i + e - first_held)) = make_float4(v[e], v[e + 1], v[e + 2], v[e + 3]);
            }
          }
        }
      }
    }
    return max(begin, whole);
  }

  // Multiplies the row by 2^64.
  __device__ __forceinline__ void enlarge(int lane) {
    factor = 0x1p64f;
    if constexpr (resident) {
      for (int i = begin + lane; i < end; i += 32) held[i - first_held] *= factor;
      __syncwarp();
    }
  }
};

// ---- masses ---------------------------------------------------------------------------------------------------------

// The mass of an element is its weight times a power of two, rounded to an integer below 2^43, and such that no sum
// over the row passes 2^60. Rows whose largest weight is 2^-17 to 1 share one power: their masses can be summed before
// the largest is known.
__device__ __forceinline__ int mass_bits(int length) { return 60 - max(17, 32 - __clz(length)); }

// What a row holds: probabilities, logits, or scores, which have an order and no weight.
enum class Kind { probs, logits, scores };

// From an element to its weight: the element itself, or the exponential of its distance to the largest.
template <Kind kind>
struct Weigher {
  static constexpr bool logits = kind == Kind::logits;
  float top;          // the largest element
  float slope;        // logits: log2(e) / temperature,
  float slope_rest;   // and what float32 leaves of it, not negative: both products have one sign
  float scale;        // weight * scale * 2^20 is the mass before rounding
  float least = 0.f;  // weights below it have no mass
  int anchor;         // probabilities: where the bins begin

  // NaN, which has no mass, where v is -inf or far below the largest.
  __device__ __forceinline__ float weight(float v) const {
    if constexpr (!logits) return v;
    const float below = v - top;
    return power_of_two(__fmaf_rn(below, slope, __fmul_rn(below, slope_rest)));
  }
  // What is written rather than drawn from: the exponent is not rounded, and what is negative counts as 0.
  __device__ __forceinline__ float fine_weight(float v) const {
    if constexpr (!logits) return fmaxf(v, 0.f);
    const float below = fmaxf(v - top, -3e38f);
    const float whole = fmaxf(rintf(__fmul_rn(below, slope)), -200.f);  // 2^-200 is 0, whatever the rest further down
    const float rest = fmaxf(__fmaf_rn(below, slope_rest, __fmaf_rn(below, slope, -whole)), -1.f);
    return fine_power_of_two(rest) * exp2f(whole);
  }
  __device__ __forceinline__ void set_temperature(float temperature) {
    const double exact = 1.4426950408889634 / static_cast<double>(temperature);
    const float down = __double2float_rd(exact);
    slope = fminf(fmaxf(down, 1e-36f), 3e38f);
    slope_rest = slope == down ? static_cast<float>(exact - static_cast<double>(slope)) : 0.f;
  }

  // mass / 2^20, not rounded; 0 for what has no mass, negative numbers and NaN.
  template <bool fine = false>
  __device__ __forceinline__ float scaled(float v) const {
    const float w = fine ? fine_weight(v) : weight(v);
    return w >= least ? w * scale : 0.f;
  }

  static __device__ __forceinline__ float scale_of(int length, int exponent) {
    return __int_as_float((mass_bits(length) - exponent - 20 + 127) << 23);
  }
  // The power for most rows; true if this row, whose `top` is known (and at least 2^-86), is one of them.
  __device__ __forceinline__ bool is_common() const { return logits || (top >= 0x1p-17f && top <= 1.f); }
  __device__ __forceinline__ void set_common(int length) {
    scale = scale_of(length, 1);
    anchor = __float_as_int(1.f);
  }
  __device__ __forceinline__ void set_scale(int length) {
    set_common(length);
    if (is_common()) return;
    scale = scale_of(length, (__float_as_int(top) >> 23) - 126);  // 2^exponent is above the largest weight
    anchor = __float_as_int(top);
  }

  // A value below which there is no mass.
  __device__ __forceinline__ float nothing_below() const {
    if constexpr (!logits) return top * 0x1p-45f;
    return slope < 1e37f ? top - __fdividef(45.f, slope) : -INFINITY;
  }

  // How far a value stands below the largest (or below 1) in 32nds of an octave of its weight, 0 to `last`.
  __device__ __forceinline__ int bin(float v, int last) const {
    if constexpr (logits) {
      const float steps = (top - v) * slope * 32.f;
      return steps < static_cast<float>(last) ? static_cast<int>(steps) : last;
    } else if constexpr (kind == Kind::scores) {
      return min((static_cast<u32>(ordered(top)) - static_cast<u32>(ordered(v))) >> 18, static_cast<u32>(last));
    } else {
      return v > 0.f ? max(0, min((anchor - __float_as_int(v)) >> 18, last)) : last;
    }
  }
  // About the lower end of a bin, and the weight of what is in it.
  __device__ __forceinline__ float bin_end(int bin) const {
    if constexpr (logits) return top - __fdividef(static_cast<float>(bin + 1) * 0.03125f, slope);
    if constexpr (kind == Kind::scores) {
      const int64_t end = int64_t{ordered(top)} - (int64_t{bin + 1} << 18) + 1;
      return from_ordered(static_cast<int>(max(end, int64_t{ordered(-INFINITY)})));
    }
    return __int_as_float(anchor - ((bin + 1) << 18) + 1);
  }
  __device__ __forceinline__ float bin_weight(int bin) const {
    if constexpr (logits) return power_of_two(-(static_cast<float>(bin) + 0.5f) * 0.03125f);
    return __int_as_float(anchor - (bin << 18) - (1 << 17));
  }
};

// Sums masses without converting one: adding 2^23 leaves an integer in the low bits of a float. The upper part, x
// rounded down, and the rest are summed apart; `add` takes mass / 2^20.
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
    if (count >= 240) flush();  // before a sum of 24-bit parts passes 32 bits
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

// floor(mass * parts / 2^32) for mass < 2^60 and parts <= 2^32.
__device__ __forceinline__ u64 fraction(u64 mass, u64 parts) {
  const u64 high = mass >> 30, low = mass & ((u64{1} << 30) - 1);
  return (parts * high + ((parts * low) >> 30)) >> 2;
}

}  // namespace kestrel::sampling
