// Bias, penalties and an allowed-token bitmask on rows of logits: [B, V].
//
// Blocks have two roles. Some convert the row and write -inf where the bitmask says so; in place they write the masked
// tokens alone. The others write the allowed tokens that history and bias name. A few blocks per row share these tokens
// by their hashes and count in a hash table in shared memory; or, for a long history, each counts the tokens of a part
// of the vocabulary in an array. Counts are integer atomics, so the result does not depend on their order. In place no
// token belongs to both roles, and one launch has both; otherwise the second role follows in a launch of its own.

#include <kestrel/export.h>

#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>
#include <type_traits>

#include "entry.h"

namespace kestrel::sampling {

constexpr int kProcessThreads = 256;
constexpr int kMaxHashParts = 4;      // blocks of a row that share a history
constexpr int kPacks = 4;             // that a thread loads together,
constexpr int kIds = 4;               // and ids of the history
constexpr int kMaxHashed = 4096;      // ids of a row
constexpr int kPart = 16384;          // tokens of a block, where there are more ids
constexpr int kMaskWords = 2;         // of the bitmask that a lane loads together
constexpr int64_t kMaxBiases = 4096;  // of a row: equal ids are found by comparing
constexpr u32 kNoToken = ~u32{0};     // of an empty slot, and an id outside the vocabulary

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

struct ProcessParams {
  const char* logits = nullptr;
  char* out = nullptr;
  int64_t logits_row_bytes = 0, out_row_bytes = 0;
  int width = 0;
  bool in_place = false;      // out is logits
  int parts = 0;              // blocks of a row that write named tokens,
  int part_bits = 0;          // log2 of it, with hash tables
  int hash_bits = 0;          // log2 of the slots of a hash table; 0: a slot for each token of the part
  unsigned named_blocks = 0;  // all of them, the first of the grid
  int tiles = 0;              // blocks of a row that convert
  IdRows history, bias;
  CountPerRow lengths, prompt_lengths;
  PerRow<float> repetition, presence, frequency;
  const char* bias_values = nullptr;
  int64_t bias_values_row_bytes = 0;
  const char* bitmask = nullptr;
  int64_t bitmask_row_bytes = 0;
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

// The logits of a row, where they go, and its bitmask.
template <typename In, typename Out>
struct LogitRow {
  const In* logits;
  Out* out;
  const u32* mask;  // or null
  int width;

  __device__ __forceinline__ LogitRow(const ProcessParams& p, int64_t row)
      : logits(reinterpret_cast<const In*>(p.logits + row * p.logits_row_bytes)),
        out(reinterpret_cast<Out*>(p.out + row * p.out_row_bytes)),
        mask(p.bitmask ? reinterpret_cast<const u32*>(p.bitmask + row * p.bitmask_row_bytes) : nullptr),
        width(p.width) {}

  __device__ __forceinline__ bool allows(u32 token) const { return !mask || (mask[token / 32] >> (token % 32) & 1); }

  __device__ __forceinline__ void write(u32 token, float v) const { out[token] = from_float<Out>(v); }

  // A pack of 16 bytes of logits per thread and load: converted, and masked.
  __device__ __forceinline__ void convert(int tile) const {
    constexpr int kPack = Pack<In>::size;
    constexpr u32 kAll = (1u << kPack) - 1;
    const bool vectorized = (reinterpret_cast<uintptr_t>(logits) | reinterpret_cast<uintptr_t>(out)) % 16 == 0;
    const int first = (tile * kPacks * kProcessThreads + static_cast<int>(threadIdx.x)) * kPack;
    u32 allowed[kPacks];
    Pack<In> pack[kPacks];
#pragma unroll
    for (int n = 0; n < kPacks; ++n) {
      const int i = first + n * kProcessThreads * kPack;
      allowed[n] = kAll;
      if (mask && i < width) allowed[n] = mask[i / 32] >> (i % 32) & kAll;
      if (vectorized && i + kPack <= width) pack[n].bits = load16_streamed(logits + i);
    }
#pragma unroll
    for (int n = 0; n < kPacks; ++n) {
      const int i = first + n * kProcessThreads * kPack;
      if (i >= width) break;
      if (!vectorized || i + kPack > width) {
#pragma unroll 1
        for (int e = 0; e < min(kPack, width - i); ++e)
          out[i + e] = from_float<Out>(allowed[n] >> e & 1 ? to_float(logits[i + e]) : -INFINITY);
        continue;
      }
      float v[kPack];
      pack[n].unpack(v);
#pragma unroll
      for (int e = 0; e < kPack; ++e) v[e] = allowed[n] >> e & 1 ? v[e] : -INFINITY;
      if constexpr (sizeof(Out) == sizeof(In)) {
        Pack<Out> result;
        result.pack(v);
        store16(out + i, result.bits);
      } else {
#pragma unroll
        for (int e = 0; e < kPack; e += 4) {
          const float four[4] = {v[e], v[e + 1], v[e + 2], v[e + 3]};
          Pack<Out> result;
          result.pack(four);
          store16(out + i + e, result.bits);
        }
      }
    }
  }

  // -inf for masked tokens: a warp loads words of the bitmask, then writes 16 bytes per lane and step.
  __device__ __forceinline__ void write_masked(int tile) const {
    constexpr int kPack = Pack<Out>::size, kLanesPerWord = 32 / kPack;
    constexpr u32 kAll = (1u << kPack) - 1;
    const bool vectorized = reinterpret_cast<uintptr_t>(out) % 16 == 0;
    const int lane = threadIdx.x % 32, words = (width + 31) / 32;
    const int first = (tile * kProcessThreads + static_cast<int>(threadIdx.x)) / 32 * 32 * kMaskWords;
    u32 masked[kMaskWords];
#pragma unroll
    for (int n = 0; n < kMaskWords; ++n) {
      const int word = first + 32 * n + lane;
      masked[n] = word < words ? ~mask[word] : 0;
      if (word == words - 1 && width % 32 != 0) masked[n] &= (1u << width % 32) - 1;
    }
    float none[kPack];
    for (int e = 0; e < kPack; ++e) none[e] = -INFINITY;
    Pack<Out> pack;
    pack.pack(none);
#pragma unroll
    for (int n = 0; n < kMaskWords; ++n) {
      const u32 some = __ballot_sync(kAllLanes, masked[n] != 0);
#pragma unroll 1
      for (int step = 0; step < 32 && some >> step != 0; step += kPack) {
        const u32 bits =
            __shfl_sync(kAllLanes, masked[n], step + lane / kLanesPerWord) >> (lane % kLanesPerWord * kPack);
        Out* const to = out + (first + 32 * n + step) * 32 + lane * kPack;
        if (vectorized && (bits & kAll) == kAll) {
          store16(to, pack.bits);
        } else {
#pragma unroll
          for (int e = 0; e < kPack; ++e) {
            if (bits >> e & 1) to[e] = from_float<Out>(-INFINITY);
          }
        }
      }
    }
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

// kIds ids of the history per thread, kProcessThreads apart, from `base` on. What they name is loaded once.
template <typename In>
struct HistoryBatch {
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
        const int i = base + n * kProcessThreads;
        wide[n] = i < rows.length ? reinterpret_cast<const u64*>(from)[i] : kNoToken;
      }
#pragma unroll
      for (int n = 0; n < kIds; ++n) ids[n] = narrow_id(wide[n]);
    } else {
#pragma unroll
      for (int n = 0; n < kIds; ++n) {
        const int i = base + n * kProcessThreads;
        ids[n] = i < rows.length ? reinterpret_cast<const u32*>(from)[i] : kNoToken;
      }
    }
#pragma unroll
    for (int n = 0; n < kIds; ++n) places[n] = kNoToken;
  }
  __device__ __forceinline__ void set_places(const Slots& part) {
#pragma unroll
    for (int n = 0; n < kIds; ++n) places[n] = part.place(ids[n]);
  }
  template <typename Row>
  __device__ __forceinline__ void load_logits(const Slots& part, const Row& row) {
#pragma unroll
    for (int n = 0; n < kIds; ++n) {
      mask_words[n] = ~0u;
      if (places[n] == kNoToken) continue;
      const u32 token = part.begin + places[n];
      logits[n] = row.logits[token];
      if (row.mask) mask_words[n] = row.mask[token / 32];
    }
  }
  template <bool inserts>
  __device__ __forceinline__ void find(const Slots& part, int base, int length) {
#pragma unroll
    for (int n = 0; n < kIds; ++n) {
      if (base + n * kProcessThreads >= length) places[n] = kNoToken;
      if (places[n] != kNoToken) slots[n] = part.slot<inserts>(places[n]);
    }
  }
  __device__ __forceinline__ void count(int base, int64_t prompt) const {
#pragma unroll
    for (int n = 0; n < kIds; ++n) {
      if (places[n] == kNoToken) continue;
      if (base + n * kProcessThreads < prompt) {
        atomicOr(slots[n], kInPrompt);
      } else {
        atomicAdd(slots[n], 1u);
      }
    }
  }
  // The first thread that finds a token writes it. kDone leaves the counts as they are.
  template <typename Row>
  __device__ __forceinline__ void write(const Slots& part, const Row& row, const Penalties& penalties) const {
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

// Writes the tokens that history and bias name, if they are allowed.
template <typename In, typename Out>
__device__ __forceinline__ void write_named(const ProcessParams& p) {
  u32* const memory = reinterpret_cast<u32*>(dynamic_shared_memory());
  const int64_t row_idx = blockIdx.x / p.parts;
  const u32 part_idx = blockIdx.x % p.parts;
  const u32 begin = p.hash_bits ? 0 : part_idx * kPart;
  const u32 size = p.hash_bits ? p.width : min(u32{kPart}, p.width - part_idx * kPart);
  const u32 num_slots = p.hash_bits ? 1u << p.hash_bits : (size + 3) / 4 * 4;
  const Slots part = {memory, p.hash_bits ? memory + num_slots : nullptr, p.hash_bits, p.part_bits, part_idx, begin,
                      size};
  for (u32 i = threadIdx.x; i < num_slots / 4; i += kProcessThreads) {
    reinterpret_cast<uint4*>(memory)[i] = make_uint4(0, 0, 0, 0);
    if (part.tokens) reinterpret_cast<uint4*>(part.tokens)[i] = make_uint4(kNoToken, kNoToken, kNoToken, kNoToken);
  }
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  const LogitRow<In, Out> row(p, row_idx);
  constexpr int kBatch = kIds * kProcessThreads;
  // The first batch stays in registers. Its ids are loaded together with the parameters of the row.
  const LoadedCount length_of_row(p.lengths, row_idx), prompt_of_row(p.prompt_lengths, row_idx);
  HistoryBatch<In> first;
  first.load(p.history, row_idx, threadIdx.x);
  Penalties penalties = {1.f, 0.f, 0.f};
  int length = 0;
  if (p.history.ids) {
    penalties = {p.repetition.at(row_idx), p.presence.at(row_idx), p.frequency.at(row_idx)};
    first.set_places(part);
    first.load_logits(part, row);
    length = static_cast<int>(max(int64_t{0}, min(length_of_row.value(), int64_t{p.history.length})));
    const int64_t prompt = prompt_of_row.value();
    first.template find<true>(part, threadIdx.x, length);
    first.count(threadIdx.x, prompt);
#pragma unroll 1
    for (int base = kBatch + threadIdx.x; base < length; base += kBatch) {
      HistoryBatch<In> batch;
      batch.load(p.history, row_idx, base);
      batch.set_places(part);
      batch.template find<true>(part, base, length);
      batch.count(base, prompt);
    }
  }
  if (p.bias.ids) {
    const char* const ids = p.bias.ids + row_idx * p.bias.row_bytes;
    const float* const values = reinterpret_cast<const float*>(p.bias_values + row_idx * p.bias_values_row_bytes);
    for (int i = threadIdx.x; i < p.bias.length; i += kProcessThreads) {
      const u32 place = part.place(load_id(ids, p.bias.is_int64, i));
      if (place == kNoToken) continue;
      u32* const slot = part.slot<true>(place);
      if (atomicOr(slot, kBiased) & kBiased) atomicOr(slot, kRepeated);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < p.bias.length; i += kProcessThreads) {
      const u32 place = part.place(load_id(ids, p.bias.is_int64, i));
      if (place == kNoToken) continue;
      const u32 slot = *part.slot<false>(place);
      double sum = values[i];
      if (slot & kRepeated) {  // the first entry of a token adds the others, in their order
        int other = 0;
        while (other < i && part.place(load_id(ids, p.bias.is_int64, other)) != place) ++other;
        if (other < i) continue;
        for (other = i + 1; other < p.bias.length; ++other) {
          if (part.place(load_id(ids, p.bias.is_int64, other)) == place) sum += static_cast<double>(values[other]);
        }
      }
      const u32 token = begin + place;
      const float biased = static_cast<float>(static_cast<double>(to_float(row.logits[token])) + sum);
      if (row.allows(token)) row.write(token, penalties.apply(biased, slot));
    }
  }
  __syncthreads();
  if (!part.tokens) {
#pragma unroll 1
    for (u32 base = threadIdx.x; base < size; base += kIds * kProcessThreads) {
      In logits[kIds];
#pragma unroll
      for (int n = 0; n < kIds; ++n) {
        const u32 at = base + n * kProcessThreads;
        if (part.is_named(at)) logits[n] = row.logits[begin + at];
      }
#pragma unroll
      for (int n = 0; n < kIds; ++n) {
        const u32 at = base + n * kProcessThreads;
        if (part.is_named(at) && row.allows(begin + at))
          row.write(begin + at, penalties.apply(to_float(logits[n]), part.slots[at]));
      }
    }
    return;
  }
  first.write(part, row, penalties);
#pragma unroll 1
  for (int base = kBatch + threadIdx.x; base < length; base += kBatch) {
    HistoryBatch<In> batch;
    batch.load(p.history, row_idx, base);
    batch.set_places(part);
    batch.load_logits(part, row);
    batch.template find<false>(part, base, length);
    batch.write(part, row, penalties);
  }
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kProcessThreads, 4) process_logits_kernel(const __grid_constant__ ProcessParams p) {
  if (blockIdx.x < p.named_blocks) {
    write_named<In, Out>(p);
    return;
  }
  const unsigned block = blockIdx.x - p.named_blocks;
  pdl_wait();
  pdl_trigger();
  const LogitRow<In, Out> row(p, block / p.tiles);
  const int tile = static_cast<int>(block % p.tiles);
  if (p.in_place) {
    row.write_masked(tile);
  } else {
    row.convert(tile);
  }
}

// ---- the host -------------------------------------------------------------------------------------------------------

template <typename In, typename Out>
void launch(ProcessParams p, int64_t rows, DLDevice device) {
  constexpr auto kernel = process_logits_kernel<In, Out>;
  const int ids = p.history.length + p.bias.length;
  const int tile = p.in_place ? kProcessThreads * 32 * kMaskWords : kPacks * kProcessThreads * Pack<In>::size;
  p.tiles = p.in_place && !p.bitmask ? 0 : (p.width + tile - 1) / tile;
  size_t bytes = 0;
  if (ids > 0) {
    p.parts = (p.width + kPart - 1) / kPart;
    if (ids <= kMaxHashed) {
      // More blocks per row only where they all run at once.
      while (2 << p.part_bits <= kMaxHashParts && rows << (p.part_bits + 1) <= 2 * num_sms(device)) ++p.part_bits;
      p.parts = 1 << p.part_bits;
      p.hash_bits = 6;
      while (1 << p.hash_bits < 2 * std::min(ids, p.width)) ++p.hash_bits;
    }
    bytes = p.hash_bits ? size_t{8} << p.hash_bits : sizeof(u32) * kPart;
  }
  const int64_t named = rows * p.parts, others = rows * p.tiles;
  if (named + others >= int64_t{1} << 31) unsupported("more than 2^31 blocks");
  if (bytes > kDefaultSharedBytes) raise_shared_limit<kernel>(device);
  const auto launch_blocks = [&](int64_t first, int64_t second, size_t shared_bytes) {
    p.named_blocks = static_cast<unsigned>(first);
    if (first + second == 0) return;
    launch_pdl(kernel, dim3(static_cast<unsigned>(first + second)), dim3(kProcessThreads), device, p, shared_bytes);
  };
  if (p.in_place) {
    launch_blocks(named, others, bytes);
  } else {
    launch_blocks(0, others, 0);
    launch_blocks(named, 0, bytes);
  }
}

IdRows id_rows(const Checks& check, const char* name, const TensorView& ids, const TensorView& logits) {
  check.dtype(name, ids, {kInt32, kInt64});
  check.rank(name, ids, 2, 2);
  check.last_contiguous(name, ids);
  const int64_t shape[2] = {logits.size(0), kAny};
  check.shape(name, ids, shape, 2);
  check.same_device(name, ids, "logits", logits);
  return {address(ids), ids.stride(0) * element_bytes(ids), static_cast<int>(std::min(ids.size(1), int64_t{INT32_MAX})),
          ids.dtype().bits == 64};
}

void process_logits(TensorView out, TensorView logits, OptionalTensor token_ids, OptionalTensor lengths,
                    OptionalTensor prompt_lengths, OptionalTensor repetition_penalty, double repetition_penalty_value,
                    OptionalTensor presence_penalty, double presence_penalty_value, OptionalTensor frequency_penalty,
                    double frequency_penalty_value, OptionalTensor bias_ids, OptionalTensor bias_values,
                    OptionalTensor bitmask) {
  const Checks check("process_logits");
  ProcessParams p;
  check_rows(check, "logits", logits);
  if (token_ids.has_value()) p.history = id_rows(check, "token_ids", *token_ids, logits);
  const auto counts = [&](const char* name, const OptionalTensor& values, int64_t value) {
    if (values.has_value() && !token_ids.has_value()) check.fail(name, "None without token_ids", "a tensor");
    return count_per_row(check, name, values, value, "logits", logits);
  };
  p.lengths = counts("lengths", lengths, INT64_MAX);
  p.prompt_lengths = counts("prompt_lengths", prompt_lengths, 0);
  const auto penalty = [&](const char* name, const OptionalTensor& values, double value) {
    return per_row(check, name, values, static_cast<float>(value), "logits", logits, {kFloat32});
  };
  p.repetition = penalty("repetition_penalty", repetition_penalty, repetition_penalty_value);
  p.presence = penalty("presence_penalty", presence_penalty, presence_penalty_value);
  p.frequency = penalty("frequency_penalty", frequency_penalty, frequency_penalty_value);
  if (bias_ids.has_value() != bias_values.has_value()) {
    const bool no_ids = !bias_ids.has_value();
    check.fail(no_ids ? "bias_ids" : "bias_values",
               std::string("a tensor with ") + (no_ids ? "bias_values" : "bias_ids"), "None");
  }
  if (bias_ids.has_value()) {
    const TensorView values = *bias_values;
    p.bias = id_rows(check, "bias_ids", *bias_ids, logits);
    check.dtype("bias_values", values, {kFloat32});
    check.rank("bias_values", values, 2, 2);
    check.last_contiguous("bias_values", values);
    check.same_shape("bias_values", values, *bias_ids);
    check.same_device("bias_values", values, "logits", logits);
    p.bias_values = address(values);
    p.bias_values_row_bytes = values.stride(0) * element_bytes(values);
  }
  if (bitmask.has_value()) {
    const TensorView words = *bitmask;
    check.dtype("bitmask", words, {kInt32});
    check.rank("bitmask", words, 2, 2);
    check.last_contiguous("bitmask", words);
    const int64_t shape[2] = {logits.size(0), (logits.size(1) + 31) / 32};
    check.shape("bitmask", words, shape, 2);
    check.same_device("bitmask", words, "logits", logits);
    p.bitmask = address(words);
    p.bitmask_row_bytes = words.stride(0) * element_bytes(words);
  }
  if (same_dtype(logits.dtype(), kFloat32)) {
    check.dtype("out", out, {kFloat32});
  } else {
    check.dtype("out", out, {kFloat32, logits.dtype()});
  }
  check.last_contiguous("out", out);
  check.same_shape("out", out, logits);
  check.disjoint("out", out);
  check.same_device("out", out, "logits", logits);
  check.no_overlap("out", out, "logits", logits, /*may_be_same=*/true);
  for (const auto& [name, tensor] :
       std::initializer_list<std::pair<const char*, const OptionalTensor&>>{{"token_ids", token_ids},
                                                                            {"lengths", lengths},
                                                                            {"prompt_lengths", prompt_lengths},
                                                                            {"repetition_penalty", repetition_penalty},
                                                                            {"presence_penalty", presence_penalty},
                                                                            {"frequency_penalty", frequency_penalty},
                                                                            {"bias_ids", bias_ids},
                                                                            {"bias_values", bias_values},
                                                                            {"bitmask", bitmask}}) {
    check.no_overlap("out", out, name, tensor);
  }
  check.cuda("logits", logits);
  const int64_t rows = logits.size(0);
  if (rows == 0) return;
  if (logits.size(1) > (1 << 30)) unsupported("rows of more than 2^30");
  if (p.history.length > static_cast<int>(kCount)) unsupported("a history of 2^28 tokens or more");
  if (p.bias.length > kMaxBiases) unsupported("more than 4096 biases in a row");
  // Nothing to count where the penalties are the neutral numbers.
  const bool neutral = !repetition_penalty.has_value() && !presence_penalty.has_value() &&
                       !frequency_penalty.has_value() && p.repetition.value == 1.f && p.presence.value == 0.f &&
                       p.frequency.value == 0.f;
  if (neutral || p.history.length == 0) p.history = {};
  if (p.bias.length == 0) p.bias = {};
  p.logits = address(logits), p.out = address(out);
  p.logits_row_bytes = logits.stride(0) * element_bytes(logits);
  p.out_row_bytes = out.stride(0) * element_bytes(out);
  p.width = static_cast<int>(logits.size(1));
  p.in_place = p.logits == p.out;
  const DeviceGuard guard(logits.device().device_id);
  const bool rounds = !same_dtype(out.dtype(), kFloat32);
  dispatch_float(logits, [&](auto value) {
    using In = decltype(value);
    rounds ? launch<In, In>(p, rows, logits.device()) : launch<In, float>(p, rows, logits.device());
  });
}

KESTREL_EXPORT(process_logits, process_logits);

}  // namespace kestrel::sampling
