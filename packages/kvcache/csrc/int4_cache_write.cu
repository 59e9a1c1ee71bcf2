// int4_cache_write: keys and values as INT4 after KIVI, values per token, keys per channel of a page of 64 tokens.
//
// clang-format off
// Computes:   scale = max((max - min) / 15, max |x| / 32768) in fp16 (1 for 0), zero = -min / scale in fp16, code = x / scale +
//             zero rounded half to even; over the D values of a head, or over the 64 keys of a channel once row 63 is there.
// Built for:  heads of 64 to 256 in bf16, one token of each of some sequences, or prompts of some thousand tokens.
// Must move:  per token 2 Hk D bytes of values in, Hk (D / 2 + 4) out; 2 Hk D of keys in, and out into the tail or, once per
//             64 tokens, Hk D / 2 + Hk D / 16 of codes, scales and zeros.
// Split:      two launches, because a page that is finished may begin in the tail, where rows of the next page go. The first
//             writes the finished pages: a block looks at 32 tokens for such that fill a row 63, finds the tokens of that page
//             (just before, if the tokens come in order, else among all of the call), and takes 16 packs of its 64 rows, two rows
//             to a thread, which holds them: one trip to memory, and the ranges of channels meet in shared memory. The second
//             writes values, a team of up to 32 lanes per token and head, and those keys to the tail whose page is unfinished.
//             Whether a page is finished is looked up where its last token must stand if the tokens come in order, and else
//             among all.
// PDL:        nothing is constant: values, slots and sequences are prefetched into L2 before the wait, and everything is read
//             after it.
// Measured:   predicted for a prompt of 1024 tokens of 8 heads of 128: 5.4 MB and two launches, 3.4 us on an H200; 10.5, a third of
//             that: 5.6 for pages and 5.2 for values, apart (results/h200_designs.json; other ways to read a page: README.md).
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
  FastDivision packs_of_head;
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
constexpr int kThreads = 128;        // of a block that writes values

// -- finished pages of keys -------------------------------------------------------------------------------------------

constexpr int kPagePacks = 16;       // of a row: what a block takes of a page
constexpr int kPageThreads = 512;    // one to a pack of two rows, half a page apart
constexpr int kTokensPerBlock = 32;  // in which a block looks for the ends of pages: one for each lane of a warp
static_assert(kPageThreads * 2 == kPagePacks * kInt4Page);

template <typename T, bool VECTORS>
__global__ void __launch_bounds__(kPageThreads, 2) write_pages(const __grid_constant__ Int4Params p) {
  constexpr int size = Pack<T>::size, warps = kPageThreads / 32, channels = size * kPagePacks;
  __shared__ int64_t slots[kTokensPerBlock], sequences[kTokensPerBlock];
  __shared__ unsigned ends;          // of pages, among the block's tokens: a bit each
  __shared__ int source[kInt4Page];  // the token that holds a row, or -1: it waits in the tail
  __shared__ Range ranges[warps][channels];
  __shared__ __half2 codes[channels];  // scale and zero; channels in the order element of a pack, pack
  const unsigned column = threadIdx.x % kPagePacks, row = threadIdx.x / kPagePacks;
  const unsigned unit = blockIdx.y * kPagePacks + column, head = p.packs_of_head(unit);
  const int first = (unit - head * p.packs) * size;  // element of the head
  const bool mine = head < p.heads;
  const int first_token = blockIdx.x * kTokensPerBlock;
  if (first_token + static_cast<int>(row) < p.spread.tokens && column % 8 == 0) {
    if (column == 0) p.prefetch_indices(first_token + row);
    if (VECTORS && mine) prefetch_l2(p.key.at(first_token + row, head) + first * sizeof(T));
  }
  pdl_wait();
  pdl_trigger();

  if (threadIdx.x < kTokensPerBlock) {
    const int token = first_token + threadIdx.x;
    const int64_t slot = token < p.spread.tokens ? p.slot(token) : -1;
    slots[threadIdx.x] = slot;
    if (slot >= 0) sequences[threadIdx.x] = p.sequence(token);
    const unsigned found = __ballot_sync(~0u, slot >= 0 && (slot & kRow) == kRow);
    if (threadIdx.x == 0) ends = found;
  }
  __syncthreads();
  for (unsigned left = ends; left != 0; left &= left - 1) {  // the same for the whole block
    const int last = __ffs(left) - 1;
    const int64_t page = slots[last] / kInt4Page;
    bool missing = false;
    if (threadIdx.x < kInt4Page) {
      const int likely = first_token + last - (kRow - static_cast<int>(threadIdx.x));  // if the tokens come in order
      missing = likely < 0 || p.slot(likely) != page * kInt4Page + threadIdx.x;
      source[threadIdx.x] = missing ? -1 : likely;
    }
    if (__syncthreads_or(missing)) {
      p.for_each_slot([&](int other, int64_t slot) {
        if (slot / kInt4Page == page && p.in_sequence(other)) source[slot & kRow] = other;
      });
      __syncthreads();
    }

    Pack<T> keys[2] = {};
    if (mine) {
      const auto address = [&](int of_row) {
        return source[of_row] >= 0 ? p.key.at(source[of_row], head) : p.tail.at({sequences[last], of_row}, head);
      };
      const char* const rows[2] = {address(row), address(row + kInt4Page / 2)};
#pragma unroll
      for (int r = 0; r < 2; ++r) keys[r] = load_pack<VECTORS, T>(rows[r], first, p.size);
    }
    float x[2][size];
#pragma unroll
    for (int r = 0; r < 2; ++r) keys[r].unpack(x[r]);
#pragma unroll
    for (int i = 0; i < size; ++i) {  // over the two rows, then over the warp's other two
      Range range = empty_range();
      range.take(x[0][i]);
      range.take(x[1][i]);
      range = Range::join(range,
                          {__shfl_xor_sync(~0u, range.low, kPagePacks), __shfl_xor_sync(~0u, range.high, kPagePacks)});
      if (threadIdx.x % 32 < kPagePacks) ranges[threadIdx.x / 32][i * kPagePacks + column] = range;
    }
    __syncthreads();
    if (threadIdx.x < channels) {  // one channel each; kPageThreads is a multiple of kPagePacks, so `column` holds
      Range range = ranges[0][threadIdx.x];
#pragma unroll
      for (int w = 1; w < warps; ++w) range = Range::join(range, ranges[w][threadIdx.x]);
      const Int4Code<T> code(range);
      codes[threadIdx.x] = __halves2half2(code.scale, code.zero);
      const int channel = first + threadIdx.x / kPagePacks;
      if (mine && channel < p.size) {
        reinterpret_cast<__half*>(p.k_scale.at({page, head}))[channel] = code.scale;
        reinterpret_cast<__half*>(p.k_zero.at({page, head}))[channel] = code.zero;
      }
    }
    __syncthreads();
    uint32_t words[2][1] = {};
#pragma unroll
    for (int i = 0; i < size; ++i) {
      const __half2 both = codes[i * kPagePacks + column];
      float pair[2] = {x[0][i], x[1][i]};
      Int4Code<T>(__low2half(both), __high2half(both)).encode(pair);
#pragma unroll
      for (int r = 0; r < 2; ++r) words[r][0] |= static_cast<uint32_t>(static_cast<int>(pair[r])) << (4 * i);
    }
    if (!mine) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      char* const to = p.key_cache.at({page, row + r * kInt4Page / 2}, head) + first / 2;
      store_codes<VECTORS, size / 2, uint8_t>(to, words[r], (p.size - first) / 2);
    }
  }
}

// -- values, and keys of unfinished pages -----------------------------------------------------------------------------

// Whether a token's page is unfinished after this call. found: its last token was, without a search, or there is no
// page. Every thread of the block calls this.
__device__ __forceinline__ bool unfinished(const Int4Params& p, int64_t slot, bool found) {
  __shared__ int64_t last_slot[kThreads];  // of the page of each of the block's tokens
  __shared__ bool finished[kThreads];
  const unsigned in_block = p.spread.in_block();
  bool search = false;
  if (threadIdx.x == in_block * p.spread.span) {
    search = !found;
    last_slot[in_block] = slot | kRow;
    finished[in_block] = found;
  }
  if (__syncthreads_or(search)) {
    p.for_each_slot([&](int other, int64_t slot_of_other) {
      if ((slot_of_other & kRow) != kRow || !p.in_sequence(other)) return;
#pragma unroll 1
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
  const int lane = static_cast<int>(team.lane), lanes = static_cast<int>(team.lanes);
  const char* const key_row = p.key.at(team.token, team.head);
  const char* const value_row = p.value.at(team.token, team.head);
  const bool any = team.active && lane < p.packs;
  if (VECTORS && any && lane % 8 == 0) {
    prefetch_l2(key_row + 16 * lane);
    prefetch_l2(value_row + 16 * lane);
  }
  if (threadIdx.x == 0 && team.token < p.spread.tokens) p.prefetch_indices(team.token);
  pdl_wait();
  pdl_trigger();

  // What a lane reads first, and the slots, are under way together; a longer head's other packs follow.
  Pack<T> key_pack = {}, value_pack = {};
  if (any) {
    value_pack = load_pack<VECTORS, T>(value_row, lane * size, p.size);
    key_pack = load_pack<VECTORS, T>(key_row, lane * size, p.size);
  }
  const auto value_at = [&](int c, float (&x)[size]) {
    (c == lane ? value_pack : load_pack<VECTORS, T>(value_row, c * size, p.size)).unpack(x);
  };
  const int64_t slot = team.token < p.spread.tokens ? p.slot(team.token) : -1;
  const int64_t ahead = int64_t{team.token} + (kRow - (slot & kRow));  // the page's last token, if they come in order
  const int64_t slot_ahead = slot >= 0 && ahead < p.spread.tokens ? p.slot(ahead) : -1;

  if (team.active && slot >= 0) {
    Range range = empty_range();
    for (int c = lane; c < p.packs; c += lanes) {
      float x[size];
      value_at(c, x);
#pragma unroll
      for (int i = 0; i < size; ++i) {
        if (VECTORS || c * size + i < p.size) range.take(x[i]);
      }
    }
    range.low = team.all(range.low, [](float a, float b) { return least(a, b); });
    range.high = team.all(range.high, [](float a, float b) { return most(a, b); });
    const Int4Code<T> code(range);
    const Place place{slot / kInt4Page, slot & kRow};
    if (lane == 0) {
      *reinterpret_cast<__half*>(p.v_scale.at(place, team.head)) = code.scale;
      *reinterpret_cast<__half*>(p.v_zero.at(place, team.head)) = code.zero;
    }
    char* const codes = p.value_cache.at(place, team.head);
    for (int c = lane; c < p.packs; c += lanes) {
      float x[size];
      value_at(c, x);
      code.encode(x);
      uint32_t word[1] = {0};
#pragma unroll
      for (int i = 0; i < size; ++i) word[0] |= static_cast<uint32_t>(static_cast<int>(x[i])) << (4 * i);
      store_codes<VECTORS, size / 2, uint8_t>(codes + c * (size / 2), word, (p.size - c * size) / 2);
    }
  }
  if (!unfinished(p, slot, slot < 0 || slot_ahead == (slot | kRow)) || !team.active) return;
  char* const tail = p.tail.at({p.sequence(team.token), slot & kRow}, team.head);
  for (int c = lane; c < p.packs; c += lanes) {
    const Pack<T> pack = c == lane ? key_pack : load_pack<VECTORS, T>(key_row, c * size, p.size);
    store_pack<VECTORS>(tail, c * size, p.size, pack);
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
  const DeviceGuard guard(key.device().device_id);
  dispatch_float(key, [&](auto t) {
    using T = decltype(t);
    constexpr int pack = Pack<T>::size;
    p.packs = static_cast<int>((size + pack - 1) / pack);
    // Of many tokens instructions set the pace, and a lane with four packs finds their places once: 8192 tokens of 8
    // heads of 128 42.5 us, with one pack 49.2 (results/h200_designs.json).
    const bool many = tokens * heads * p.packs > 1 << 18;
    p.lanes = Team::lanes_for(many ? (p.packs + 3) / 4 : p.packs);
    p.packs_of_head = FastDivision(static_cast<unsigned>(p.packs));
    p.spread = Spread(static_cast<int>(tokens), p.heads * p.lanes, kThreads);
    const bool vectors = size % pack == 0 && aligned(p.key, 16) && aligned(p.value, 16) && aligned(p.tail, 16) &&
                         aligned(p.key_cache, pack / 2) && aligned(p.value_cache, pack / 2);
    const dim3 pages((p.spread.tokens - 1) / kTokensPerBlock + 1, (p.heads * p.packs - 1) / kPagePacks + 1);
    if (pages.y > 65535) unsupported("rows of more than 65535 x 16 packs of 16 bytes");
    launch_pdl(vectors ? write_pages<T, true> : write_pages<T, false>, pages, dim3(kPageThreads), key.device(), p);
    launch_pdl(vectors ? write_values<T, true> : write_values<T, false>, p.spread.grid(), p.spread.block(),
               key.device(), p);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(int4_cache_write, int4_cache_write);

}  // namespace kestrel::kvcache
