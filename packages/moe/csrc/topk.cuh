// Choosing experts: one row of router logits to its k weights and ids, in the registers of a team of lanes.
//
// Keys of 64 bits order the experts of a row: the logit (or probability + bias) as an ordered integer, then the
// complement of the id, so that a larger key means a larger value or, among equals, the lower id. All keys differ.
#pragma once

#include <kestrel/pack.cuh>

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
  bool vectors = false;  // rows start at multiples of 16 bytes and their length is a multiple of 8
  bool renormalize = false;
};

__device__ __forceinline__ float nan_is_least(float x) { return x == x ? x : -INFINITY; }

// An unsigned integer in the order of the floats; both zeros are one. 0 is below them all.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x + 0.f);
  return bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float from_ordered(unsigned key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

using Key = unsigned long long;

__device__ __forceinline__ void descend(Key& a, Key& b) {
  const Key larger = a > b ? a : b;
  b = a > b ? b : a;
  a = larger;
}

// Batcher's odd-even merge sort: 19 comparators for eight keys, 63 for sixteen.
template <int RUN = 1, int DISTANCE = 1, int N>
__device__ __forceinline__ void sort_descending(Key (&key)[N]) {
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

// A team of LANES neighbouring lanes has a row, each PER_LANE experts that follow one another.
template <int LANES_, int PER_LANE_>
struct Team {
  static constexpr int LANES = LANES_;
  static constexpr int PER_LANE = PER_LANE_;
  static constexpr int EXPERTS = LANES * PER_LANE;       // at most
  static constexpr int K = LANES == 32 ? 32 : PER_LANE;  // at most

  static __device__ __forceinline__ float max(float v) {
#pragma unroll
    for (int other = LANES / 2; other > 0; other /= 2) v = fmaxf(v, __shfl_xor_sync(FULL, v, other));
    return v;
  }

  static __device__ __forceinline__ float sum(float v) {
#pragma unroll
    for (int other = LANES / 2; other > 0; other /= 2) v += __shfl_xor_sync(FULL, v, other);
    return v;
  }

  static __device__ __forceinline__ void load(float (&x)[PER_LANE], const Router& r, const char* row, int first) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) x[i] = -INFINITY;
    if (!r.vectors) {
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        if (first + i < r.experts) x[i] = nan_is_least(load_float(row, r.dtype, first + i));
      }
      return;
    }
    if (first >= r.experts) return;
    if (r.dtype == Float::f32) {
      unpack<float>(x, row, first, r.experts);
    } else if (r.dtype == Float::f16) {
      unpack<__half>(x, row, first, r.experts);
    } else {
      unpack<__nv_bfloat16>(x, row, first, r.experts);
    }
  }

  // The k largest keys of the team, sorted: lane i gets the i-th. `key` is each lane's own, descending.
  static __device__ __forceinline__ Key select(Key (&key)[PER_LANE], int k) {
    const int lane = threadIdx.x % LANES;
    Key mine = 0;
    if constexpr (LANES == 32) {
      // k times the largest of the lanes' first keys leaves its list. Equal values: the first lane has the lower ids.
      for (int i = 0; i < k; ++i) {
        const unsigned head = static_cast<unsigned>(key[0] >> 32);
        const unsigned best = __reduce_max_sync(FULL, head);
        const int owner = __ffs(__ballot_sync(FULL, head == best)) - 1;
        const unsigned low = __shfl_sync(FULL, static_cast<unsigned>(key[0]), owner);
        if (lane == i) mine = static_cast<Key>(best) << 32 | low;
        if (lane == owner) {
#pragma unroll
          for (int j = 0; j + 1 < PER_LANE; ++j) key[j] = key[j + 1];
          key[PER_LANE - 1] = 0;
        }
      }
    } else {
      // The larger of first and last, second and last but one, ...: the best of two lists, in bitonic order.
#pragma unroll
      for (int other = 1; other < LANES; other *= 2) {
        Key theirs[PER_LANE];
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) theirs[i] = __shfl_xor_sync(FULL, key[i], other);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
          if (theirs[PER_LANE - 1 - i] > key[i]) key[i] = theirs[PER_LANE - 1 - i];
        }
#pragma unroll
        for (int d = PER_LANE / 2; d >= 1; d /= 2) {
#pragma unroll
          for (int i = 0; i < PER_LANE; ++i) {
            if (i % (2 * d) < d) descend(key[i], key[i + d]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        if (lane == i) mine = key[i];
      }
    }
    return mine;
  }

 private:
  template <typename T>
  static __device__ __forceinline__ void unpack(float (&x)[PER_LANE], const char* row, int first, int experts) {
    constexpr int size = Pack<T>::size;
#pragma unroll
    for (int i = 0; i < PER_LANE; i += size) {
      if (first + i < experts) {
        Pack<T> pack;
        pack.bits = load16_streamed(row + static_cast<int64_t>(first + i) * sizeof(T));
        float values[size];
        pack.unpack(values);
#pragma unroll
        for (int j = 0; j < size; ++j) x[i + j] = nan_is_least(values[j]);
      }
    }
  }
};

// What lane i of a team knows about the i-th choice of its row.
struct Choice {
  int id;
  float weight;
};

// Routes one row; all lanes of the warp take part. Lanes k and up get nothing of use.
template <typename T>
__device__ __forceinline__ Choice route_row(const Router& r, int64_t row) {
  constexpr int N = T::PER_LANE;
  const int lane = threadIdx.x % T::LANES, first = lane * N;
  const char* logits = r.logits + row * r.stride;
  float x[N];
  T::load(x, r, logits, first);

  float largest = x[0];
#pragma unroll
  for (int i = 1; i < N; ++i) largest = fmaxf(largest, x[i]);
  largest = T::max(largest);

  Key key[N];
  float shares = 0.f;
  // The largest logit counts as e^0 even where it is infinite.
  const auto share = [&](float logit) { return logit == largest ? 1.f : expf(logit - largest); };
  if (!r.bias) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool real = first + i < r.experts;
      key[i] = real ? static_cast<Key>(ordered(x[i])) << 32 | static_cast<unsigned>(~(first + i)) : 0;
      shares += real ? share(x[i]) : 0.f;
    }
    shares = T::sum(shares);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[i] = first + i < r.experts ? share(x[i]) : 0.f;
      shares += x[i];
    }
    shares = T::sum(shares);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      key[i] = 0;
      if (first + i < r.experts) {
        const float score = nan_is_least(x[i] / shares + load_float(r.bias, r.bias_dtype, first + i));
        key[i] = static_cast<Key>(ordered(score)) << 32 | static_cast<unsigned>(~(first + i));
      }
    }
  }
  sort_descending(key);
  const Key mine = T::select(key, r.k);

  Choice choice{static_cast<int>(~static_cast<unsigned>(mine)), 0.f};
  if (lane < r.k) {
    const float logit =
        r.bias ? nan_is_least(load_float(logits, r.dtype, choice.id)) : from_ordered(static_cast<unsigned>(mine >> 32));
    choice.weight = share(logit) / shares;
  }
  if (r.renormalize) {
    const float total = T::sum(choice.weight);
    choice.weight = choice.weight / (total > 0.f ? total : 1.f);
  }
  return choice;
}

}  // namespace kestrel::moe
