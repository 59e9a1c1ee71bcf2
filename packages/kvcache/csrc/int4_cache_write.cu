// int4_cache_write: keys and values as INT4 after KIVI, values per token, keys per channel of a page of 64 tokens.
//
// clang-format off
// Computes:   scale = max((max - min) / 15, max |x| / 32768) in fp16 (1 for 0), zero = -min / scale in fp16, code = x / scale +
//             zero rounded half to even; over the D values of a head, or over the 64 keys of a channel once row 63 is there.
// Built for:  heads of 64 to 256 in bf16, one token of each of some sequences, or prompts of some thousand tokens.
// Must move:  per token 2 Hk D bytes of values in, Hk (D / 2 + 4) out; 2 Hk D of keys in, and out into the tail or, once per
//             64 tokens, Hk D / 2 + Hk D / 16 of codes, scales and zeros.
// Split:      two launches, because a page that is finished may begin in the tail, where rows of the next page go. The first
//             writes the finished pages: a block looks at 8 tokens for such that fill a row 63, finds the tokens of that page
//             (just before, if the tokens come in order, else among all of the call), and takes 256 channels, two to a thread,
//             read twice (range, then codes). The second writes values, a team of up to 32 lanes per token and head,
//             and those keys to the tail whose page is unfinished. Whether a page is finished is looked up where its last
//             token must stand if the tokens come in order, and else among all.
// PDL:        nothing is constant: values, slots and sequences are prefetched into L2 before the wait, and everything is read
//             after it.
// Measured:   predicted for a prompt of 1024 tokens of 8 heads of 128: 5.4 MB and two launches, 3.4 us on an H200; 24.8, 14 % of that
//             (results/h200.json; other ways to read a page: README.md).
// clang-format on

#include <tvm/ffi/function.h>
#include <kestrel/pdl.cuh>

#include "host.h"
#include "int4.cuh"
#include "team.cuh"

namespace kestrel::kvcache {

struct Int4Params {
  Rows key, value;
  Cache key_cache, value_cache;  // their `offset` is the stride of a row of a page
  Cache k_scale, k_zero;         // [blocks, heads, D]: head strides are in `offset`
  Cache v_scale, v_zero;         // [blocks, 64, heads]
  Cache tail;                    // [sequences, 64, heads, D]
  Slots slots;                   // of pages of 64
  const char* sequences = nullptr;
  bool wide_sequences = false;
  int64_t sequence_count = 0;
  int size = 0, packs = 0;  // of a head
  unsigned heads = 0;
  FastDivision pairs;  // D / 2
  unsigned lanes = 1;  // of a team
  Spread spread;       // over tokens and the lanes of their teams

  __device__ __forceinline__ int64_t sequence(int64_t token) const {
    return read_index(sequences, wide_sequences, token);
  }
  __device__ __forceinline__ void prefetch_indices(int64_t token) const {
    prefetch_l2(slots.address(token));
    prefetch_l2(sequences + token * (wide_sequences ? 8 : 4));
  }
  __device__ __forceinline__ bool in_sequence(int64_t token) const {
    return static_cast<uint64_t>(sequence(token)) < static_cast<uint64_t>(sequence_count);
  }
  // The slot of a token, or -1 for one that is padding.
  __device__ __forceinline__ int64_t slot(int64_t token) const {
    const int64_t slot = slots.read(token);
    return in_sequence(token) && slots.exists(slot) ? slot : -1;
  }

  // found(token, slot) for every slot of the call whose token may still be padding. The threads of a block share them.
  template <typename F>
  __device__ __forceinline__ void for_each_slot(F found) const {
    constexpr int kAtOnce = 8;  // reads under way
    for (int first = threadIdx.x; first < spread.tokens; first += kAtOnce * blockDim.x) {
      int64_t some[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int token = first + i * blockDim.x;
        some[i] = token < spread.tokens ? slots.read(token) : -1;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (slots.exists(some[i])) found(first + i * blockDim.x, some[i]);
      }
    }
  }
};

constexpr int kRow = kInt4Page - 1;  // slot & kRow is the row in the page, slot | kRow the page's last slot
constexpr int kThreads = 128;
constexpr int kTokensPerBlock = 8;

// -- finished pages of keys -------------------------------------------------------------------------------------------

template <typename T>
__global__ void __launch_bounds__(kThreads, 8) write_pages(const __grid_constant__ Int4Params p) {
  __shared__ int64_t slots[kTokensPerBlock];
  __shared__ int source[kInt4Page];  // the token that holds a row, or -1: it waits in the tail
  const unsigned pair = blockIdx.y * kThreads + threadIdx.x;
  const int head = p.pairs(pair), first = 2 * (pair - head * p.pairs.divisor);
  const bool mine = pair < p.heads * p.pairs.divisor;
  const int first_token = blockIdx.x * kTokensPerBlock;
  if (threadIdx.x == 0) p.prefetch_indices(first_token);
  pdl_wait();
  pdl_trigger();

  if (threadIdx.x < kTokensPerBlock) {
    const int token = first_token + threadIdx.x;
    slots[threadIdx.x] = token < p.spread.tokens ? p.slot(token) : -1;
  }
  __syncthreads();
  for (int i = 0; i < kTokensPerBlock; ++i) {
    const int64_t last = slots[i];
    if (last < 0 || (last & kRow) != kRow) continue;  // the same for the whole block
    const int64_t page = last / kInt4Page;
    __syncthreads();
    bool missing = false;
    if (threadIdx.x < kInt4Page) {
      const int row = threadIdx.x, likely = first_token + i - (kRow - row);  // if the tokens come in order
      missing = likely < 0 || p.slot(likely) != page * kInt4Page + row;
      source[row] = missing ? -1 : likely;
    }
    if (__syncthreads_or(missing)) {
      p.for_each_slot([&](int other, int64_t slot) {
        if (slot / kInt4Page == page && p.in_sequence(other)) source[slot & kRow] = other;
      });
      __syncthreads();
    }
    if (!mine) continue;

    const int64_t sequence = p.sequence(first_token + i);
    const auto read = [&](int row, float (&x)[2]) {
      const char* keys = source[row] >= 0 ? p.key.at(source[row], head) : p.tail.at({sequence, row}, head);
      const T* pair_of_keys = reinterpret_cast<const T*>(keys) + first;
      x[0] = to_float(pair_of_keys[0]);
      x[1] = to_float(pair_of_keys[1]);
    };
    Range range[2] = {empty_range(), empty_range()};
#pragma unroll 8
    for (int row = 0; row < kInt4Page; ++row) {
      float x[2];
      read(row, x);
      range[0].take(x[0]);
      range[1].take(x[1]);
    }
    const Int4Code<T> code[2] = {Int4Code<T>(range[0]), Int4Code<T>(range[1])};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      reinterpret_cast<__half*>(p.k_scale.at({page, head}))[first + c] = code[c].scale;
      reinterpret_cast<__half*>(p.k_zero.at({page, head}))[first + c] = code[c].zero;
    }
#pragma unroll 8
    for (int row = 0; row < kInt4Page; ++row) {
      float x[2];
      read(row, x);
      float low[1] = {x[0]}, high[1] = {x[1]};
      code[0].encode(low);
      code[1].encode(high);
      p.key_cache.at({page, row}, head)[first / 2] =
          static_cast<char>(static_cast<int>(low[0]) | static_cast<int>(high[0]) << 4);
    }
  }
}

// -- values, and keys of unfinished pages -----------------------------------------------------------------------------

// Whether a token's page is unfinished after this call. Every thread of the block calls this.
__device__ __forceinline__ bool unfinished(const Int4Params& p, const Team& team, int64_t slot) {
  __shared__ int64_t last_slot[kThreads];  // of the page of each of the block's tokens
  __shared__ bool finished[kThreads];
  const unsigned in_block = p.spread.in_block();
  bool search = false;
  if (threadIdx.x == in_block * p.spread.span) {
    const int64_t likely = int64_t{team.token} + (kRow - (slot & kRow));
    const bool found = slot < 0 || (likely < p.spread.tokens && p.slot(likely) == (slot | kRow));
    search = !found;
    last_slot[in_block] = slot | kRow;
    finished[in_block] = found;
  }
  if (__syncthreads_or(search)) {
    p.for_each_slot([&](int other, int64_t slot_of_other) {
      if ((slot_of_other & kRow) != kRow || !p.in_sequence(other)) return;
      for (unsigned i = 0; i < p.spread.tokens_per_block; ++i) {
        if (last_slot[i] == slot_of_other) finished[i] = true;
      }
    });
    __syncthreads();
  }
  return !finished[in_block];
}

template <typename T, bool VECTORS>
__global__ void __launch_bounds__(kThreads, 8) write_values(const __grid_constant__ Int4Params p) {
  constexpr int size = Pack<T>::size;
  const Team team(p.spread, p.lanes);
  if (VECTORS && team.active && team.lane % 8 == 0 && static_cast<int>(team.lane) < p.packs) {
    prefetch_l2(p.key.at(team.token, team.head) + 16 * team.lane);
    prefetch_l2(p.value.at(team.token, team.head) + 16 * team.lane);
  }
  if (threadIdx.x == 0 && team.token < p.spread.tokens) p.prefetch_indices(team.token);
  pdl_wait();
  pdl_trigger();

  const int64_t slot = team.token < p.spread.tokens ? p.slot(team.token) : -1;
  const bool to_tail = unfinished(p, team, slot);
  if (!team.active || slot < 0) return;
  const char* const key_row = p.key.at(team.token, team.head);
  const char* const value_row = p.value.at(team.token, team.head);
  if (to_tail) {
    char* const tail = p.tail.at({p.sequence(team.token), slot & kRow}, team.head);
    for (int c = team.lane; c < p.packs; c += team.lanes) {
      store_pack<VECTORS>(tail, c * size, p.size, load_pack<VECTORS, T>(key_row, c * size, p.size));
    }
  }
  Range range = empty_range();
  for (int c = team.lane; c < p.packs; c += team.lanes) {
    float x[size];
    load_pack<VECTORS, T>(value_row, c * size, p.size).unpack(x);
#pragma unroll
    for (int i = 0; i < size; ++i) {
      if (VECTORS || c * size + i < p.size) range.take(x[i]);
    }
  }
  range.low = team.all(range.low, [](float a, float b) { return least(a, b); });
  range.high = team.all(range.high, [](float a, float b) { return most(a, b); });
  const Int4Code<T> code(range);
  const Place place{slot / kInt4Page, slot & kRow};
  if (team.lane == 0) {
    *reinterpret_cast<__half*>(p.v_scale.at(place, team.head)) = code.scale;
    *reinterpret_cast<__half*>(p.v_zero.at(place, team.head)) = code.zero;
  }
  char* const codes = p.value_cache.at(place, team.head);
  for (int c = team.lane; c < p.packs; c += team.lanes) {
    float x[size];
    load_pack<VECTORS, T>(value_row, c * size, p.size).unpack(x);
    code.encode(x);
    uint32_t word[1] = {0};
#pragma unroll
    for (int i = 0; i < size; ++i) word[0] |= static_cast<uint32_t>(static_cast<int>(x[i])) << (4 * i);
    store_codes<VECTORS, size / 2, uint8_t>(codes + c * (size / 2), word, (p.size - c * size) / 2);
  }
}

void int4_cache_write(TensorView key, TensorView value, TensorView key_cache, TensorView value_cache,
                      TensorView k_scale, TensorView k_zero, TensorView v_scale, TensorView v_zero, TensorView k_tail,
                      TensorView slot_mapping, TensorView seq_ids) {
  const Checks check("int4_cache_write");
  check_rows(check, key, value, slot_mapping);
  const int64_t tokens = slot_mapping.size(0), heads = key.size(1), size = key.size(2);
  if (size % 2 != 0) check.fail("key", "an even head size", std::to_string(size));
  check_pair(check, key_cache, value_cache, {kUInt8}, heads, size / 2);
  check_written(check, {{"key_cache", key_cache}, {"value_cache", value_cache}});
  const OptionalTensor zeros[2] = {k_zero, v_zero};
  check_int4(check, key_cache, {key.dtype()}, k_scale, zeros[0], v_scale, zeros[1], k_tail);
  check_written(
      check, {{"k_scale", k_scale}, {"k_zero", k_zero}, {"v_scale", v_scale}, {"v_zero", v_zero}, {"k_tail", k_tail}});
  check_indices(check, "seq_ids", seq_ids);
  check.same_shape("seq_ids", seq_ids, slot_mapping);
  check_devices(check, "key", key,
                {{"value", value},
                 {"key_cache", key_cache},
                 {"value_cache", value_cache},
                 {"k_scale", k_scale},
                 {"k_zero", k_zero},
                 {"v_scale", v_scale},
                 {"v_zero", v_zero},
                 {"k_tail", k_tail},
                 {"slot_mapping", slot_mapping},
                 {"seq_ids", seq_ids}});
  require_int4_page(key_cache);
  if (tokens == 0 || heads == 0 || size == 0 || key_cache.size(0) == 0 || k_tail.size(0) == 0) return;
  require_sizes(tokens, heads, size, key_cache.size(1));

  Int4Params p;
  p.key = rows_of(key);
  p.value = rows_of(value);
  p.key_cache = cache_of(key_cache);
  p.value_cache = cache_of(value_cache);
  p.k_scale = cache_of(k_scale);
  p.k_zero = cache_of(k_zero);
  p.v_scale = cache_of(v_scale);
  p.v_zero = cache_of(v_zero);
  p.tail = cache_of(k_tail);
  p.slots.mapping = address(slot_mapping);
  p.slots.wide = wide(slot_mapping);
  p.slots.count = key_cache.size(0) * kInt4Page;
  p.sequences = address(seq_ids);
  p.wide_sequences = wide(seq_ids);
  p.sequence_count = k_tail.size(0);
  p.size = static_cast<int>(size);
  p.heads = static_cast<unsigned>(heads);
  p.pairs = FastDivision(static_cast<unsigned>(size / 2));
  const DeviceGuard guard(key.device().device_id);
  dispatch_float(key, [&](auto t) {
    using T = decltype(t);
    constexpr int pack = Pack<T>::size;
    p.packs = static_cast<int>((size + pack - 1) / pack);
    p.lanes = Team::lanes_for(p.packs);
    p.spread = Spread(static_cast<int>(tokens), p.heads * p.lanes, kThreads);
    const dim3 pages((p.spread.tokens - 1) / kTokensPerBlock + 1, (p.heads * p.pairs.divisor - 1) / kThreads + 1);
    launch_pdl(write_pages<T>, pages, dim3(kThreads), key.device(), p);
    const bool vectors = size % pack == 0 && aligned(p.key, 16) && aligned(p.value, 16) && aligned(p.tail, 16) &&
                         aligned(p.value_cache, pack / 2);
    launch_pdl(vectors ? write_values<T, true> : write_values<T, false>, p.spread.grid(), p.spread.block(),
               key.device(), p);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(int4_cache_write, int4_cache_write);

}  // namespace kestrel::kvcache
