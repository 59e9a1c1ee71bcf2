// The history of a row: how often it names each token, and what penalties make of the logits of these tokens.
//
// A block counts in a hash table in shared memory, or in an array with a slot for each token of a part of the
// vocabulary. Counts are integer atomics, so the result does not depend on their order.
#pragma once

#include "params.cuh"

namespace kestrel::sampling {

constexpr u32 kNoToken = ~u32{0};  // of an empty slot, and an id outside the vocabulary
constexpr int kMaxHashed = 4096;   // ids of a row that are counted in a hash table

// log2 of the slots of a hash table for `ids` ids: at most half of them are taken.
inline int hash_bits_for(int ids) {
  int bits = 6;
  while (1 << bits < 2 * ids) ++bits;
  return bits;
}

// What a slot holds: flags, and how often the token is in the output.
constexpr u32 kInPrompt = 1u << 31;
constexpr u32 kBiased = 1u << 30;    // in bias_ids,
constexpr u32 kRepeated = 1u << 29;  // more than once
constexpr u32 kDone = 1u << 28;      // written by a thread that found it in the history
constexpr u32 kCount = kDone - 1;

// Token ids of each row, int32 or int64.
struct IdRows {
  const char* ids = nullptr;
  int64_t row_bytes = 0;
  int length = 0;
  bool is_int64 = false;
};

// The allowed tokens of each row, a bit for each.
struct Bitmask {
  const char* words = nullptr;  // or null: all tokens
  int64_t row_bytes = 0;
  __device__ __forceinline__ const u32* row(int64_t row) const {
    return words ? reinterpret_cast<const u32*>(words + row * row_bytes) : nullptr;
  }
};

// The history and its penalties, each a number or one per row.
struct HistoryParams {
  IdRows history;
  CountPerRow lengths, prompt_lengths;
  PerRow<float> repetition, presence, frequency;
};

struct Penalties {
  float repetition, presence, frequency;
  // Every step is rounded to float32. A token of the output is one of the history.
  __device__ __forceinline__ float apply(float v, u32 slot) const {
    if (slot & (kInPrompt | kCount)) v = v > 0.f ? __fdiv_rn(v, repetition) : __fmul_rn(v, repetition);
    const u32 count = slot & kCount;
    if (count > 0) v = __fsub_rn(__fsub_rn(v, __fmul_rn(frequency, __uint2float_rn(count))), presence);
    return v;
  }
};

// The slots of the tokens that a block writes.
struct Slots {
  u32* slots;   // flags and counts
  u32* tokens;  // of each slot; null: a slot for each token of the part
  int hash_bits, part_bits;
  u32 part_idx;
  u32 begin, size;  // of the part; with hash tables all tokens

  static __device__ __forceinline__ u32 hash(u32 place) { return place * 0x9e3779b1u; }
  // The place of an id in the part, or kNoToken.
  __device__ __forceinline__ u32 place(u32 id) const {
    const u32 place = id - begin;
    // The highest bits of the hash are the part.
    const bool in_part = !tokens || static_cast<u32>(u64{hash(place)} >> (32 - part_bits)) == part_idx;
    return place < size && in_part ? place : kNoToken;
  }
  template <bool inserts>
  __device__ __forceinline__ u32* slot(u32 place) const {
    if (!tokens) return slots + place;
    u32 at = hash(place) << part_bits >> (32 - hash_bits);
    // At most half of the slots are taken.
    for (;; at = (at + 1) & ((1u << hash_bits) - 1)) {
      const u32 there = inserts ? atomicCAS(tokens + at, kNoToken, place) : tokens[at];
      if (there == place || (inserts && there == kNoToken)) return slots + at;
    }
  }

  // By all threads, before the barrier that precedes slot().
  __device__ __forceinline__ void clear(u32 num_slots) const {
    for (u32 i = threadIdx.x; i < num_slots / 4; i += blockDim.x) {
      reinterpret_cast<uint4*>(slots)[i] = make_uint4(0, 0, 0, 0);
      if (tokens) reinterpret_cast<uint4*>(tokens)[i] = make_uint4(kNoToken, kNoToken, kNoToken, kNoToken);
    }
  }
  // Whether the history alone names the token of a slot, which is in the part.
  __device__ __forceinline__ bool is_named(u32 at) const {
    return at < size && slots[at] != 0 && !(slots[at] & kBiased);
  }
};

// An id of 64 bits; no vocabulary is as large as kNoToken, or as a negative id.
__device__ __forceinline__ u32 narrow_id(u64 id) { return static_cast<u32>(min(id, u64{kNoToken})); }
__device__ __forceinline__ u32 load_id(const char* ids, bool is_int64, int i) {
  return is_int64 ? narrow_id(reinterpret_cast<const u64*>(ids)[i]) : reinterpret_cast<const u32*>(ids)[i];
}

// A count that is being loaded: the value is not used before value().
struct LoadedCount {
  int64_t wide;
  int narrow = 0;
  bool is_wide;
  __device__ __forceinline__ LoadedCount(const CountPerRow& counts, int64_t row)
      : wide(counts.value), is_wide(!counts.values || counts.is_int64) {
    if (!counts.values) return;
    if (counts.is_int64) {
      wide = static_cast<const int64_t*>(counts.values)[row * counts.stride];
    } else {
      narrow = static_cast<const int*>(counts.values)[row * counts.stride];
    }
  }
  __device__ __forceinline__ int64_t value() const {
    int converted = narrow;
    pin(converted);
    return is_wide ? wide : converted;
  }
};

// `kIds` ids of the history per thread, `kThreads` (0: the block's threads) apart, from `base` on. Each named logit is
// loaded once. A Part gives place(), slot() and its first index.
template <typename In, int kIds, int kThreads>
struct HistoryBatch {
  static __device__ __forceinline__ int threads() { return kThreads ? kThreads : static_cast<int>(blockDim.x); }
  static __device__ __forceinline__ int size() { return kIds * threads(); }
  u32 ids[kIds];
  u32 places[kIds];  // of them, kNoToken where there is nothing to write
  u32* slots[kIds];
  In logits[kIds];
  u32 mask_words[kIds];

  // The ids, also those past the length of the row, which need not be known yet.
  __device__ __forceinline__ void load(const IdRows& rows, int64_t row, int base) {
    const char* const from = rows.ids + row * rows.row_bytes;
    if (rows.is_int64) {
      u64 wide[kIds];
#pragma unroll
      for (int n = 0; n < kIds; ++n) {
        const int i = base + n * threads();
        wide[n] = i < rows.length ? reinterpret_cast<const u64*>(from)[i] : kNoToken;
      }
#pragma unroll
      for (int n = 0; n < kIds; ++n) ids[n] = narrow_id(wide[n]);
    } else {
#pragma unroll
      for (int n = 0; n < kIds; ++n) {
        const int i = base + n * threads();
        ids[n] = i < rows.length ? reinterpret_cast<const u32*>(from)[i] : kNoToken;
      }
    }
#pragma unroll
    for (int n = 0; n < kIds; ++n) places[n] = kNoToken;
  }
  template <typename Part>
  __device__ __forceinline__ void set_places(const Part& part) {
#pragma unroll
    for (int n = 0; n < kIds; ++n) places[n] = part.place(ids[n]);
  }
  template <typename Part, typename Row>
  __device__ __forceinline__ void load_logits(const Part& part, const Row& row) {
#pragma unroll
    for (int n = 0; n < kIds; ++n) {
      mask_words[n] = ~0u;
      if (places[n] == kNoToken) continue;
      const u32 token = part.begin + places[n];
      logits[n] = row.logits[token];
      if (row.mask) mask_words[n] = row.mask[token / 32];
    }
  }
  template <bool inserts, typename Part>
  __device__ __forceinline__ void find(const Part& part, int base, int length) {
#pragma unroll
    for (int n = 0; n < kIds; ++n) {
      if (base + n * threads() >= length) places[n] = kNoToken;
      if (places[n] != kNoToken) slots[n] = part.template slot<inserts>(places[n]);
    }
  }
  __device__ __forceinline__ void count(int base, int64_t prompt) const {
#pragma unroll
    for (int n = 0; n < kIds; ++n) {
      if (places[n] == kNoToken) continue;
      if (base + n * threads() < prompt) {
        atomicOr(slots[n], kInPrompt);
      } else {
        atomicAdd(slots[n], 1u);
      }
    }
  }
  // The first thread that finds a token writes it. kDone leaves the counts as they are.
  template <typename Part, typename Row>
  __device__ __forceinline__ void write(const Part& part, const Row& row, const Penalties& penalties) const {
    u32 found[kIds];
#pragma unroll
    for (int n = 0; n < kIds; ++n) found[n] = places[n] != kNoToken ? atomicOr(slots[n], kDone) : kDone;
#pragma unroll
    for (int n = 0; n < kIds; ++n) {
      const u32 token = part.begin + places[n];
      if (!(found[n] & (kDone | kBiased)) && (mask_words[n] >> (token % 32) & 1))
        row.write(token, penalties.apply(to_float(logits[n]), found[n]));
    }
  }
};

// The tokens of a row's history that are in a part, by a block: first count(), then, after a barrier, write().
template <typename In, int kIds, int kThreads>
struct HistoryTokens {
  using Batch = HistoryBatch<In, kIds, kThreads>;
  Batch first;  // stays in registers; its ids are loaded together with the parameters of the row
  Penalties penalties = {1.f, 0.f, 0.f};
  int length = 0;

  template <typename Part, typename Row>
  __device__ __forceinline__ void count(const HistoryParams& p, int64_t row_idx, const Part& part, const Row& row) {
    const LoadedCount length_of_row(p.lengths, row_idx), prompt_of_row(p.prompt_lengths, row_idx);
    first.load(p.history, row_idx, threadIdx.x);
    penalties = {p.repetition.at(row_idx), p.presence.at(row_idx), p.frequency.at(row_idx)};
    first.set_places(part);
    first.load_logits(part, row);
    length = static_cast<int>(max(int64_t{0}, min(length_of_row.value(), int64_t{p.history.length})));
    const int64_t prompt = prompt_of_row.value();
    first.template find<true>(part, threadIdx.x, length);
    first.count(threadIdx.x, prompt);
#pragma unroll 1
    for (int base = Batch::size() + threadIdx.x; base < length; base += Batch::size()) {
      Batch batch;
      batch.load(p.history, row_idx, base);
      batch.set_places(part);
      batch.template find<true>(part, base, length);
      batch.count(base, prompt);
    }
  }
  template <typename Part, typename Row>
  __device__ __forceinline__ void write(const HistoryParams& p, int64_t row_idx, const Part& part,
                                        const Row& row) const {
    first.write(part, row, penalties);
#pragma unroll 1
    for (int base = Batch::size() + threadIdx.x; base < length; base += Batch::size()) {
      Batch batch;
      batch.load(p.history, row_idx, base);
      batch.set_places(part);
      batch.load_logits(part, row);
      batch.template find<false>(part, base, length);
      batch.write(part, row, penalties);
    }
  }
};

}  // namespace kestrel::sampling
