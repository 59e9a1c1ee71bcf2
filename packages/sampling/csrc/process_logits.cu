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

#include "history_arguments.h"

namespace kestrel::sampling {

constexpr int kProcessThreads = 256;
constexpr int kMaxHashParts = 4;      // blocks of a row that share a history
constexpr int kPacks = 4;             // that a thread loads together,
constexpr int kIds = 4;               // and ids of the history
constexpr int kPart = 16384;          // tokens of a block, where there are more ids
constexpr int kMaskWords = 2;         // of the bitmask that a lane loads together
constexpr int64_t kMaxBiases = 4096;  // of a row: equal ids are found by comparing

struct ProcessParams : HistoryParams {
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
  IdRows bias;
  const char* bias_values = nullptr;
  int64_t bias_values_row_bytes = 0;
  Bitmask bitmask;
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
        mask(p.bitmask.row(row)),
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
  part.clear(num_slots);
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  const LogitRow<In, Out> row(p, row_idx);
  HistoryTokens<In, kIds, kProcessThreads> tokens;
  if (p.history.ids) tokens.count(p, row_idx, part, row);
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
      if (row.allows(token)) row.write(token, tokens.penalties.apply(biased, slot));
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
          row.write(begin + at, tokens.penalties.apply(to_float(logits[n]), part.slots[at]));
      }
    }
    return;
  }
  if (p.history.ids) tokens.write(p, row_idx, part, row);
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
  p.tiles = p.in_place && !p.bitmask.words ? 0 : (p.width + tile - 1) / tile;
  size_t bytes = 0;
  if (ids > 0) {
    p.parts = (p.width + kPart - 1) / kPart;
    if (ids <= kMaxHashed) {
      // More blocks per row only where they all run at once.
      while (2 << p.part_bits <= kMaxHashParts && rows << (p.part_bits + 1) <= 2 * num_sms(device)) ++p.part_bits;
      p.parts = 1 << p.part_bits;
      p.hash_bits = hash_bits_for(std::min(ids, p.width));
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

void process_logits(TensorView out, TensorView logits, OptionalTensor token_ids, OptionalTensor lengths,
                    OptionalTensor prompt_lengths, OptionalTensor repetition_penalty, double repetition_penalty_value,
                    OptionalTensor presence_penalty, double presence_penalty_value, OptionalTensor frequency_penalty,
                    double frequency_penalty_value, OptionalTensor bias_ids, OptionalTensor bias_values,
                    OptionalTensor bitmask) {
  const Checks check("process_logits");
  ProcessParams p;
  check_rows(check, "logits", logits);
  set_history(check, p, logits,
              {token_ids, lengths, prompt_lengths, repetition_penalty, repetition_penalty_value, presence_penalty,
               presence_penalty_value, frequency_penalty, frequency_penalty_value});
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
  p.bitmask = bitmask_rows(check, bitmask, logits);
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
  if (logits.size(1) > (1 << 30)) unsupported("rows of more than 2^30 entries");
  if (p.history.length > static_cast<int>(kCount)) unsupported("a history of 2^28 tokens or more");
  if (p.bias.length > kMaxBiases) unsupported("more than 4096 biases in a row");
  drop_neutral_history(p);
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
