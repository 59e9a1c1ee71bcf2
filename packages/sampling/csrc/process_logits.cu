// Bias, penalties and an allowed-token bitmask on rows of logits: [B, V] in one launch.
//
// A block processes a tile of a row's vocabulary. It counts in shared memory how often the history names each token of
// the tile, with integer atomics, so that the result does not depend on their order. It then writes the tokens that
// history and bias name one by one, and the others in packs of 16 bytes. In place, of the others only packs with a
// masked token are read and written.

#include <tvm/ffi/function.h>

#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>
#include <type_traits>

#include "entry.h"

namespace kestrel::sampling {

constexpr int kProcessThreads = 512;
constexpr int kMinTile = 2048, kMaxTile = 32768;  // tokens; a multiple of 32, so that no mask word is shared
constexpr int64_t kMaxBiases = 4096;              // of a row: equal ids are found by comparing

// What shared memory holds of a token, not 0 if history or bias names it: flags, and how often it is in the output.
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
  int width = 0, tile = 0, tiles = 0;  // of a row
  bool in_place = false;               // out is logits: what does not change is not written
  IdRows history, bias;
  CountPerRow lengths, prompt_lengths;
  PerRow<float> repetition, presence, frequency;
  const char* bias_values = nullptr;
  int64_t bias_values_row_bytes = 0;
  const char* bitmask = nullptr;
  int64_t bitmask_row_bytes = 0;
};

// The tile of a block: its first token, and their number.
struct Tile {
  int64_t row;
  int begin, size;
};

// The position in the tile of a token, or of none (at least `size`).
__device__ __forceinline__ u32 place_in_tile(const char* ids, bool is_int64, int i, const Tile& tile) {
  const u32 begin = static_cast<u32>(tile.begin);
  if (!is_int64) return reinterpret_cast<const u32*>(ids)[i] - begin;
  return static_cast<u32>(min(reinterpret_cast<const u64*>(ids)[i] - begin, u64{~0u}));
}

struct Penalties {
  float repetition, presence, frequency;
  // Every step is rounded to float32. A token of the output is one of the history.
  __device__ __forceinline__ float apply(float v, u32 token) const {
    if (token & (kInPrompt | kCount)) v = v > 0.f ? __fdiv_rn(v, repetition) : __fmul_rn(v, repetition);
    const u32 count = token & kCount;
    if (count > 0) v = __fsub_rn(__fsub_rn(v, __fmul_rn(frequency, __uint2float_rn(count))), presence);
    return v;
  }
};

// visit(place) for each token of the first `length` ids, by all threads.
template <typename Visit>
__device__ __forceinline__ void for_each_id(const IdRows& rows, int length, const Tile& tile, Visit visit) {
  const char* const ids = rows.ids + tile.row * rows.row_bytes;
#pragma unroll 4
  for (int i = threadIdx.x; i < length; i += blockDim.x) {
    const u32 place = place_in_tile(ids, rows.is_int64, i, tile);
    if (place < static_cast<u32>(tile.size)) visit(i, place);
  }
}

// The logits of a tile, where they go, and the words of its bitmask.
template <typename In, typename Out>
struct TileRows {
  const In* logits;
  Out* out;
  const u32* mask;  // or null

  __device__ __forceinline__ TileRows(const ProcessParams& p, const Tile& tile)
      : logits(reinterpret_cast<const In*>(p.logits + tile.row * p.logits_row_bytes) + tile.begin),
        out(reinterpret_cast<Out*>(p.out + tile.row * p.out_row_bytes) + tile.begin),
        mask(p.bitmask ? reinterpret_cast<const u32*>(p.bitmask + tile.row * p.bitmask_row_bytes) + tile.begin / 32
                       : nullptr) {}

  __device__ __forceinline__ void write(u32 place, float v) const {
    const bool allowed = !mask || (mask[place / 32] >> (place % 32) & 1);
    out[place] = from_float<Out>(allowed ? v : -INFINITY);
  }

  // The tokens that neither history nor bias names: converted and masked, a pack of 16 bytes of logits at a time. If
  // only changes count, packs without a masked token are skipped. tokens: null where there are no such names.
  __device__ __forceinline__ void convert(const u32* tokens, int size, bool only_changes) const {
    constexpr int kPack = Pack<In>::size, kPacks = 4;  // loaded together
    constexpr u32 kAll = (1u << kPack) - 1;
    const bool vectorized = (reinterpret_cast<uintptr_t>(logits) | reinterpret_cast<uintptr_t>(out)) % 16 == 0;
#pragma unroll 1
    for (int base = static_cast<int>(threadIdx.x) * kPack; base < size; base += kPacks * kProcessThreads * kPack) {
      u32 allowed[kPacks];
      Pack<In> pack[kPacks];
#pragma unroll
      for (int n = 0; n < kPacks; ++n) {
        const int i = base + n * kProcessThreads * kPack;
        allowed[n] = kAll;
        pack[n].bits = make_uint4(0, 0, 0, 0);
        if (mask && i < size) allowed[n] = mask[i / 32] >> (i % 32) & kAll;
        if (vectorized && i + kPack <= size && allowed[n] != 0 && !(only_changes && allowed[n] == kAll))
          pack[n].bits = load16(logits + i);
      }
#pragma unroll
      for (int n = 0; n < kPacks; ++n) {
        const int i = base + n * kProcessThreads * kPack;
        if (i >= size || (only_changes && allowed[n] == kAll)) continue;
        u32 unnamed = i + kPack <= size ? kAll : (1u << (size - i)) - 1;
        if (tokens) {
#pragma unroll
          for (int e = 0; e < kPack; ++e) unnamed &= ~(static_cast<u32>(tokens[i + e] != 0) << e);
        }
        if (!vectorized || unnamed != kAll) {
#pragma unroll 1
          for (int e = 0; e < kPack; ++e) {
            if (unnamed >> e & 1)
              out[i + e] = from_float<Out>(allowed[n] >> e & 1 ? to_float(logits[i + e]) : -INFINITY);
          }
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
  }
};

template <typename In, typename Out>
__global__ void __launch_bounds__(kProcessThreads) process_logits_kernel(const __grid_constant__ ProcessParams p) {
  u32* const tokens = reinterpret_cast<u32*>(dynamic_shared_memory());
  const int tile_idx = blockIdx.x % p.tiles;
  const Tile tile = {blockIdx.x / p.tiles, tile_idx * p.tile, min(p.tile, p.width - tile_idx * p.tile)};
  const TileRows<In, Out> rows(p, tile);
  const bool has_history = p.history.ids != nullptr, has_bias = p.bias.ids != nullptr, names = has_history || has_bias;
  if (names) {
    // Past the end of the tile too: packs are read whole.
    for (int i = threadIdx.x; i < (tile.size + 7) / 8 * 2; i += kProcessThreads)
      reinterpret_cast<uint4*>(tokens)[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
  }
  pdl_wait();
  pdl_trigger();
  Penalties penalties = {1.f, 0.f, 0.f};
  int length = 0;
  if (has_history) {
    penalties = {p.repetition.at(tile.row), p.presence.at(tile.row), p.frequency.at(tile.row)};
    length = static_cast<int>(max(int64_t{0}, min(p.lengths.at(tile.row), int64_t{p.history.length})));
    const int64_t prompt = p.prompt_lengths.at(tile.row);
    for_each_id(p.history, length, tile, [&](int i, u32 place) {
      if (i < prompt) {
        atomicOr(tokens + place, kInPrompt);
      } else {
        atomicAdd(tokens + place, 1u);
      }
    });
  }
  if (has_bias) {
    for_each_id(p.bias, p.bias.length, tile, [&](int, u32 place) {
      if (atomicOr(tokens + place, kBiased) & kBiased) atomicOr(tokens + place, kRepeated);
    });
  }
  if (names) __syncthreads();
  if (has_bias) {
    const char* const ids = p.bias.ids + tile.row * p.bias.row_bytes;
    const float* const values = reinterpret_cast<const float*>(p.bias_values + tile.row * p.bias_values_row_bytes);
    for_each_id(p.bias, p.bias.length, tile, [&](int i, u32 place) {
      const u32 token = tokens[place];
      double sum = values[i];
      if (token & kRepeated) {  // the first entry of a token adds the others, in their order
        for (int j = 0; j < i; ++j) {
          if (place_in_tile(ids, p.bias.is_int64, j, tile) == place) return;
        }
        for (int j = i + 1; j < p.bias.length; ++j) {
          if (place_in_tile(ids, p.bias.is_int64, j, tile) == place) sum += static_cast<double>(values[j]);
        }
      }
      const float biased = static_cast<float>(static_cast<double>(to_float(rows.logits[place])) + sum);
      rows.write(place, penalties.apply(biased, token));
    });
  }
  // The first thread that finds a token writes it. kDone leaves the counts as they are.
  for_each_id(p.history, length, tile, [&](int, u32 place) {
    const u32 token = atomicOr(tokens + place, kDone);
    if (!(token & (kDone | kBiased))) rows.write(place, penalties.apply(to_float(rows.logits[place]), token));
  });
  if (!p.in_place || p.bitmask) rows.convert(names ? tokens : nullptr, tile.size, p.in_place);
}

// ---- the host -------------------------------------------------------------------------------------------------------

// The tokens of a block: few where the rows are few, many where the history is long, as each block reads all of it.
int tile_of(int64_t rows, int width, int history_bytes, int64_t sms) {
  const auto blocks = [&](int tile) { return rows * ((width + tile - 1) / tile); };
  int tile = 8192;
  while (tile > kMinTile && blocks(tile) < 2 * sms) tile /= 2;
  while (tile < kMaxTile && history_bytes > 4 * tile && blocks(2 * tile) >= sms) tile *= 2;
  return tile;
}

template <typename In, typename Out>
void launch(ProcessParams p, int64_t rows, DLDevice device) {
  const bool counts = p.history.ids || p.bias.ids;
  p.tile = tile_of(rows, p.width, p.history.ids ? p.history.length * (p.history.is_int64 ? 8 : 4) : 0, num_sms(device));
  p.tiles = (p.width + p.tile - 1) / p.tile;
  const size_t bytes = counts ? p.tile * sizeof(u32) : 0;
  if (rows * p.tiles >= int64_t{1} << 31) unsupported("more than 2^31 tiles of rows");
  if (bytes > kDefaultSharedBytes) raise_shared_limit<process_logits_kernel<In, Out>>(device);
  launch_pdl(process_logits_kernel<In, Out>, dim3(static_cast<unsigned>(rows * p.tiles)), dim3(kProcessThreads), device,
             p, bytes);
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

TVM_FFI_DLL_EXPORT_TYPED_FUNC(process_logits, process_logits);

}  // namespace kestrel::sampling
