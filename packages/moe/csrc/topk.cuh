// Choosing experts: from one row of router logits, held by a warp, to its k weights and ids.
//
// A key orders the experts of a row: the logit (or probability + bias) as an ordered integer, then the complement of
// the id, so that equal values rank by ascending id. The selection first uses 32-bit keys, in which the id replaces the
// last 6 to 9 bits of the value: one instruction finds the largest of a warp. If two neighbours among the k + 1 largest
// differ in the id alone, the replaced bits may matter, and the row is selected again with 64-bit keys.
#pragma once

#include <kestrel/pack.cuh>
#include <kestrel/reduce.cuh>

#include <cmath>
#include <cstdint>

namespace kestrel::moe {

constexpr unsigned kFullMask = 0xffffffffu;

enum class Float : int { f32, f16, bf16 };

__device__ __forceinline__ float load_float(const char* p, Float dtype, int64_t i) {
  if (dtype == Float::f32) return reinterpret_cast<const float*>(p)[i];
  if (dtype == Float::f16) return __half2float(reinterpret_cast<const __half*>(p)[i]);
  return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(p)[i]);
}

struct Router {
  const char* logits = nullptr;
  const char* bias = nullptr;  // added to the probabilities for the selection only
  const int* num_tokens = nullptr;
  float* weights = nullptr;  // [tokens, k]
  int* ids = nullptr;        // [tokens, k]
  int64_t stride = 0;        // of a row of logits, in bytes
  int tokens = 0;
  int experts = 0;
  int k = 0;
  Float dtype = Float::f32;
  Float bias_dtype = Float::f32;
  bool vectorized = false;  // rows start at multiples of 16 bytes and fill whole lanes
  bool renormalize = false;
};

// NaN becomes -inf.
__device__ __forceinline__ float nan_to_lowest(float x) { return fmaxf(x, -INFINITY); }

// Maps floats to unsigned integers in the same order; -0 and +0 map to the same one. Every key is above 0.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x + 0.f);
  return bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float from_ordered(unsigned key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

using Key = unsigned long long;

template <typename K>
__device__ __forceinline__ void compare_exchange(K& a, K& b) {
  const K larger = a > b ? a : b;
  b = a > b ? b : a;
  a = larger;
}

// Batcher's odd-even merge sort: 19 comparators for eight keys, 63 for sixteen.
template <int RUN = 1, int DISTANCE = 1, typename K, int N>
__device__ __forceinline__ void sort_descending(K (&key)[N]) {
#pragma unroll
  for (int i = DISTANCE % RUN; i + DISTANCE < N; ++i) {
    const bool first = (i - DISTANCE % RUN) % (2 * DISTANCE) < DISTANCE;
    if (first && i / (2 * RUN) == (i + DISTANCE) / (2 * RUN)) compare_exchange(key[i], key[i + DISTANCE]);
  }
  if constexpr (DISTANCE > 1) {
    sort_descending<RUN, DISTANCE / 2>(key);
  } else if constexpr (2 * RUN < N) {
    sort_descending<2 * RUN, 2 * RUN>(key);
  }
}

// In the functions below each lane of the warp holds PER_LANE consecutive experts of the row.

// 4, 8 or more bytes, in accesses of at most 16.
template <int WORDS>
__device__ __forceinline__ void load_words(uint32_t (&words)[WORDS], const char* p) {
  if constexpr (WORDS >= 4) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      const uint4 v = load16_streamed(p + 4 * i);
      words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
    }
  } else if constexpr (WORDS == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    words[0] = v.x, words[1] = v.y;
  } else {
    words[0] = *reinterpret_cast<const uint32_t*>(p);
  }
}

// The lane's logits; experts past the end and NaN are -inf.
template <int PER_LANE>
__device__ __forceinline__ void load_row(float (&x)[PER_LANE], const Router& r, const char* row, int first) {
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) x[i] = -INFINITY;
  if (!r.vectorized) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      if (first + i < r.experts) x[i] = load_float(row, r.dtype, first + i);
    }
  } else if (first < r.experts) {
    if (r.dtype == Float::f32) {
      uint32_t words[PER_LANE];
      load_words(words, row + 4 * first);
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) x[i] = __uint_as_float(words[i]);
    } else {
      uint32_t words[PER_LANE / 2];
      load_words(words, row + 2 * first);
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        const uint32_t word = words[i / 2];
        if (r.dtype == Float::bf16) {
          x[i] = __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
        } else {
          x[i] = __half2float(__ushort_as_half(static_cast<unsigned short>(i % 2 ? word >> 16 : word & 0xffff)));
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) x[i] = nan_to_lowest(x[i]);
}

// The i-th choice of the row, in lane i.
struct Choice {
  int id;
  float weight;
};

// The k largest by keys of 64 bits: returns the id of the i-th in lane i. `value(i)`: this lane's i-th value, no NaN.
template <int PER_LANE, typename F>
__device__ __forceinline__ int select_by_long_keys(F value, int experts, int k) {
  const int lane = threadIdx.x % 32, first = lane * PER_LANE;
  Key key[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    key[i] = first + i < experts ? static_cast<Key>(ordered(value(i))) << 32 | static_cast<unsigned>(~(first + i)) : 0;
  }
  sort_descending(key);
  int id = 0;
#pragma unroll 1
  for (int i = 0; i < k; ++i) {
    const unsigned head = static_cast<unsigned>(key[0] >> 32);
    const unsigned best = __reduce_max_sync(kFullMask, head);
    // Among equal values the first lane holds the lowest ids.
    const int owner = __ffs(__ballot_sync(kFullMask, head == best)) - 1;
    const int best_id = static_cast<int>(~__shfl_sync(kFullMask, static_cast<unsigned>(key[0]), owner));
    if (lane == i) id = best_id;
    if (lane == owner) {
#pragma unroll
      for (int j = 0; j + 1 < PER_LANE; ++j) key[j] = key[j + 1];
      key[PER_LANE - 1] = 0;
    }
  }
  return id;
}

// Routes one row, whose logits are at `logits`.
template <int PER_LANE>
__device__ __forceinline__ Choice route_row(const Router& r, const char* logits) {
  constexpr unsigned kIdMask = 32 * PER_LANE - 1;
  const int lane = threadIdx.x % 32, first = lane * PER_LANE;
  float x[PER_LANE];
  load_row(x, r, logits, first);

  float largest = x[0];
#pragma unroll
  for (int i = 1; i < PER_LANE; ++i) largest = fmaxf(largest, x[i]);
  largest = from_ordered(__reduce_max_sync(kFullMask, ordered(largest)));
  // The largest logit counts as e^0 even where it is infinite.
  const bool finite = fabsf(largest) < INFINITY;

  // Short keys: the complement of the id replaces the last bits of the value.
  unsigned key[PER_LANE];
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    key[i] = (ordered(x[i]) & ~kIdMask) | (kIdMask - first - i);
    x[i] = finite ? expf(x[i] - largest) : x[i] == largest ? 1.f : 0.f;
    if (first + i >= r.experts) key[i] = 0, x[i] = 0.f;
    sum += x[i];
  }
  sum = warp_sum(sum);
  const auto score = [&](int i) { return nan_to_lowest(x[i] / sum + load_float(r.bias, r.bias_dtype, first + i)); };
  if (r.bias) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      if (first + i < r.experts) key[i] = (ordered(score(i)) & ~kIdMask) | (kIdMask - first - i);
    }
  }

  // Each lane sorts its keys. Then the warp removes the largest head of all lanes k + 1 times; the last of them shows
  // whether choice k is decided.
  sort_descending(key);
  unsigned mine = 0, last = 0;  // lane i: the i-th largest key; all lanes: the last one
#pragma unroll 1
  for (int i = 0; i <= r.k; ++i) {
    const unsigned best = __reduce_max_sync(kFullMask, key[0]);
    if (lane == i) mine = best;
    last = best;
    if (key[0] == best) {
#pragma unroll
      for (int j = 0; j + 1 < PER_LANE; ++j) key[j] = key[j + 1];
      key[PER_LANE - 1] = 0;
    }
  }
  int id = static_cast<int>(kIdMask - (mine & kIdMask));

  // Short keys decide unless neighbours differ in the id alone and some value lost bits to its id.
  unsigned next = __shfl_down_sync(kFullMask, mine, 1);
  if (lane == r.k - 1) next = last;
  if (__any_sync(kFullMask, lane < r.k && (mine ^ next) <= kIdMask) && (r.dtype == Float::f32 || r.bias)) {
    float y[PER_LANE];
    load_row(y, r, logits, first);
    bool lost_bits = r.bias != nullptr;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      if (r.bias) {
        y[i] = first + i < r.experts ? score(i) : 0.f;
      } else {
        lost_bits = lost_bits || (__float_as_uint(y[i]) & kIdMask) != 0;
      }
    }
    if (__any_sync(kFullMask, lost_bits)) {
      id = select_by_long_keys<PER_LANE>([&](int i) { return y[i]; }, r.experts, r.k);
    }
  }

  Choice choice{id, 0.f};
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const float theirs = __shfl_sync(kFullMask, x[i], id / PER_LANE);
    if (id % PER_LANE == i) choice.weight = theirs;
  }
  choice.weight = lane < r.k ? choice.weight / sum : 0.f;
  if (r.renormalize) {
    const float total = warp_sum(choice.weight);
    choice.weight = choice.weight / (total > 0.f ? total : 1.f);
  }
  return choice;
}

}  // namespace kestrel::moe
