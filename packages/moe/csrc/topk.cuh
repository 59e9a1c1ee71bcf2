// Choosing experts: one row of router logits to its k weights and ids, in the registers of a team of lanes.
//
// Keys order the experts of a row: the logit (or probability + bias) as an ordered integer, then the complement of the
// id, so that a larger key means a larger value or, among equals, the lower id. All keys differ. A key of 32 bits holds
// both when the value gives up its last 6 to 9 bits, and a warp finds the largest of them with one instruction. Where
// that could have decided a choice, which shows in two neighbours that differ in their id alone, the row is selected
// again by keys of 64 bits.
#pragma once

#include <kestrel/pack.cuh>
#include <kestrel/reduce.cuh>

#include <cmath>
#include <cstdint>

namespace kestrel::moe {

constexpr unsigned FULL = 0xffffffffu;

enum class Float : int { f32, f16, bf16 };

__device__ __forceinline__ float load_float(const char* p, Float dtype, int64_t i) {
  if (dtype == Float::f32) return reinterpret_cast<const float*>(p)[i];
  if (dtype == Float::f16) return __half2float(reinterpret_cast<const __half*>(p)[i]);
  return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(p)[i]);
}

struct Router {
  const char* logits = nullptr;
  const char* bias = nullptr;  // added to the probabilities, for the selection only
  const int* num_tokens = nullptr;
  float* weights = nullptr;  // [tokens, k]
  int* ids = nullptr;        // [tokens, k]
  int64_t stride = 0;        // of a row of logits, in bytes
  int tokens = 0;
  int experts = 0;
  int k = 0;
  Float dtype = Float::f32;
  Float bias_dtype = Float::f32;
  bool vectors = false;  // rows start at multiples of 16 bytes and fill whole lanes
  bool renormalize = false;
};

__device__ __forceinline__ float nan_is_least(float x) { return fmaxf(x, -INFINITY); }

// An unsigned integer in the order of the floats; both zeros are one. 0 is below them all.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x + 0.f);
  return bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float from_ordered(unsigned key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

using Key = unsigned long long;

template <typename K>
__device__ __forceinline__ void descend(K& a, K& b) {
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
    if (first && i / (2 * RUN) == (i + DISTANCE) / (2 * RUN)) descend(key[i], key[i + DISTANCE]);
  }
  if constexpr (DISTANCE > 1) {
    sort_descending<RUN, DISTANCE / 2>(key);
  } else if constexpr (2 * RUN < N) {
    sort_descending<2 * RUN, 2 * RUN>(key);
  }
}

// One warp has a row, each lane PER_LANE experts that follow one another.

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

// Experts past the end, and NaN, are -inf.
template <int PER_LANE>
__device__ __forceinline__ void load_row(float (&x)[PER_LANE], const Router& r, const char* row, int first) {
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) x[i] = -INFINITY;
  if (!r.vectors) {
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
  for (int i = 0; i < PER_LANE; ++i) x[i] = nan_is_least(x[i]);
}

// What lane i knows about the i-th choice of the warp's row.
struct Choice {
  int id;
  float weight;
};

// The k largest by keys of 64 bits: lane i gets the id of the i-th. `value(i)` is this lane's i-th, -inf at least.
template <int PER_LANE, typename F>
__device__ __forceinline__ int select_exactly(F value, int experts, int k) {
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
    const unsigned best = __reduce_max_sync(FULL, head);
    // Equal values: the first lane has the lower ids.
    const int owner = __ffs(__ballot_sync(FULL, head == best)) - 1;
    const int its = static_cast<int>(~__shfl_sync(FULL, static_cast<unsigned>(key[0]), owner));
    if (lane == i) id = its;
    if (lane == owner) {
#pragma unroll
      for (int j = 0; j + 1 < PER_LANE; ++j) key[j] = key[j + 1];
      key[PER_LANE - 1] = 0;
    }
  }
  return id;
}

// Routes one row, the warp's, whose logits are at `logits`.
template <int PER_LANE>
__device__ __forceinline__ Choice route_row(const Router& r, const char* logits) {
  constexpr unsigned IDS = 32 * PER_LANE - 1;  // the bits of an id
  const int lane = threadIdx.x % 32, first = lane * PER_LANE;
  float x[PER_LANE];
  load_row(x, r, logits, first);

  float largest = x[0];
#pragma unroll
  for (int i = 1; i < PER_LANE; ++i) largest = fmaxf(largest, x[i]);
  largest = from_ordered(__reduce_max_sync(FULL, ordered(largest)));
  // Infinite, it counts as e^0 all the same.
  const bool finite = fabsf(largest) < INFINITY;

  // Short keys: the value without its last bits, in their place the complement of the id.
  unsigned key[PER_LANE];
  float shares = 0.f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    key[i] = (ordered(x[i]) & ~IDS) | (IDS - first - i);
    x[i] = finite ? expf(x[i] - largest) : x[i] == largest ? 1.f : 0.f;
    if (first + i >= r.experts) key[i] = 0, x[i] = 0.f;
    shares += x[i];
  }
  shares = warp_sum(shares);
  const auto score = [&](int i) { return nan_is_least(x[i] / shares + load_float(r.bias, r.bias_dtype, first + i)); };
  if (r.bias) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      if (first + i < r.experts) key[i] = (ordered(score(i)) & ~IDS) | (IDS - first - i);
    }
  }

  // k times the largest of the lanes' first keys leaves its list; once more for what comes after the last choice.
  sort_descending(key);
  unsigned mine = 0, last = 0;
#pragma unroll 1
  for (int i = 0; i <= r.k; ++i) {
    const unsigned best = __reduce_max_sync(FULL, key[0]);
    if (lane == i) mine = best;
    last = best;
    if (key[0] == best) {
#pragma unroll
      for (int j = 0; j + 1 < PER_LANE; ++j) key[j] = key[j + 1];
      key[PER_LANE - 1] = 0;
    }
  }
  int id = static_cast<int>(IDS - (mine & IDS));

  // Short keys are exact unless neighbours differ in the id alone and a value has bits that it lost to the id.
  unsigned next = __shfl_down_sync(FULL, mine, 1);
  if (lane == r.k - 1) next = last;
  if (__any_sync(FULL, lane < r.k && (mine ^ next) <= IDS) && (r.dtype == Float::f32 || r.bias)) {
    float y[PER_LANE];
    load_row(y, r, logits, first);
    bool lost = r.bias != nullptr;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      if (r.bias) {
        y[i] = first + i < r.experts ? score(i) : 0.f;
      } else {
        lost = lost || (__float_as_uint(y[i]) & IDS) != 0;
      }
    }
    if (__any_sync(FULL, lost)) {
      id = select_exactly<PER_LANE>([&](int i) { return y[i]; }, r.experts, r.k);
    }
  }

  Choice choice{id, 0.f};
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const float theirs = __shfl_sync(FULL, x[i], id / PER_LANE);
    if (id % PER_LANE == i) choice.weight = theirs;
  }
  choice.weight = lane < r.k ? choice.weight / shares : 0.f;
  if (r.renormalize) {
    const float total = warp_sum(choice.weight);
    choice.weight = choice.weight / (total > 0.f ? total : 1.f);
  }
  return choice;
}

}  // namespace kestrel::moe
