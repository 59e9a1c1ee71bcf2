// int4_cache_write: keys and values as INT4 after KIVI: values per token, keys per channel of a page of 64 tokens.
//
// Two launches, because a page that this call finishes may begin in the tail, which the second launch overwrites. The
// first quantises finished pages of keys. A block searches 32 tokens for those that fill row 63, finds the other tokens
// of each page (adjacent if tokens are in order, else by a search), holds 16 packs of each of its 64 rows in registers,
// and reduces the ranges of channels through shared memory. The second writes values, with up to 32 lanes per token and
// head, and the keys of unfinished pages to the tail. Nothing is constant: inputs are prefetched into L2 before the PDL
// wait and read after it.

#include <kestrel/export.h>
#include <kestrel/pdl.cuh>

#include "head_lanes.cuh"
#include "host.h"
#include "int4.cuh"

namespace kestrel::kvcache {

struct Int4Params {
  Rows key, value;
  Cache key_cache, value_cache;  // their `offset` is the stride of a row of a page
  Cache k_scale, k_zero;         // [blocks, heads, D]: head strides are in `offset`
  Cache v_scale, v_zero;         // [blocks, 64, heads]
  Cache tail;                    // [sequences, 64, heads, D]
  SlotMapping slots;             // of pages of 64
  IndexArray sequences;
  int64_t sequence_count = 0;
  int size = 0, packs = 0;  // of a head
  unsigned heads = 0;
  FastDiv packs_per_head;
  unsigned lanes = 1;  // per head
  WorkSplit work;      // over tokens and the lanes of their heads

  __device__ __forceinline__ int64_t sequence(int64_t token) const { return sequences.load(token); }
  __device__ __forceinline__ void prefetch_indices(int64_t token) const {
    prefetch_l2(slots.slots.address(token));
    prefetch_l2(sequences.address(token));
  }
  __device__ __forceinline__ bool in_sequence(int64_t token) const {
    return static_cast<uint64_t>(sequence(token)) < static_cast<uint64_t>(sequence_count);
  }
  // The slot of a token, or -1 for padding.
  __device__ __forceinline__ int64_t slot(int64_t token) const {
    const int64_t slot = slots.slots.load(token);
    return in_sequence(token) && slots.contains(slot) ? slot : -1;
  }

  // Calls found(token, slot) for every slot of the call; the threads of a block share them. The token may be padding.
  template <typename F>
  __device__ __forceinline__ void for_each_slot(F found) const {
    constexpr int kLoads = 8;  // in flight per thread
    for (int first = threadIdx.x; first < work.tokens; first += kLoads * blockDim.x) {
      int64_t loaded[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int token = first + i * blockDim.x;
        loaded[i] = token < work.tokens ? slots.slots.load(token) : -1;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (slots.contains(loaded[i])) found(first + i * blockDim.x, loaded[i]);
      }
    }
  }
};

// slot & kPageMask: the row in its page; slot | kPageMask: the last slot of the page.
constexpr int kPageMask = kInt4Page - 1;
constexpr int kThreads = 128;  // per block of write_values

// -- finished pages of keys -------------------------------------------------------------------------------------------

constexpr int kPagePacks = 16;       // of each row, per block
constexpr int kPageThreads = 512;    // a thread has one pack of two rows, half a page apart
constexpr int kTokensPerBlock = 32;  // searched for the ends of pages, one per lane of a warp
static_assert(kPageThreads * 2 == kPagePacks * kInt4Page);

template <typename T, Access ACCESS>
__global__ void __launch_bounds__(kPageThreads, 2) write_pages(const __grid_constant__ Int4Params p) {
  constexpr int size = Pack<T>::size, warps = kPageThreads / 32, channels = size * kPagePacks;
  __shared__ int64_t slots[kTokensPerBlock], sequences[kTokensPerBlock];
  __shared__ unsigned page_ends;     // a bit per token of the block that fills row 63
  __shared__ int source[kInt4Page];  // the token of each row, or -1 if the row is in the tail
  __shared__ MinMax ranges[warps][channels];
  __shared__ __half2 codes[channels];  // scale and zero of channel [element of a pack][pack]
  const unsigned column = threadIdx.x % kPagePacks, row = threadIdx.x / kPagePacks;
  const unsigned unit = blockIdx.y * kPagePacks + column, head = p.packs_per_head.divide(unit);
  const int first = (unit - head * p.packs) * size;  // element of the head
  const bool has_pack = head < p.heads;
  const int first_token = blockIdx.x * kTokensPerBlock;
  if (first_token + static_cast<int>(row) < p.work.tokens && column % 8 == 0) {
    if (column == 0) p.prefetch_indices(first_token + row);
    if (ACCESS == Access::packs && has_pack) prefetch_l2(p.key.at(first_token + row, head) + first * sizeof(T));
  }
  pdl_wait();
  pdl_trigger();

  // The tokens of this block that fill the last row of a page.
  if (threadIdx.x < kTokensPerBlock) {
    const int token = first_token + threadIdx.x;
    const int64_t slot = token < p.work.tokens ? p.slot(token) : -1;
    slots[threadIdx.x] = slot;
    if (slot >= 0) sequences[threadIdx.x] = p.sequence(token);
    const unsigned found = __ballot_sync(~0u, slot >= 0 && (slot & kPageMask) == kPageMask);
    if (threadIdx.x == 0) page_ends = found;
  }
  __syncthreads();
  for (unsigned remaining = page_ends; remaining != 0; remaining &= remaining - 1) {  // uniform in the block
    const int last = __ffs(remaining) - 1;
    const int64_t page = slots[last] / kInt4Page;
    // Where each row of the page is: the tokens before the last one, if they come in order; else all tokens are
    // searched.
    bool missing = false;
    if (threadIdx.x < kInt4Page) {
      const int expected = first_token + last - (kPageMask - static_cast<int>(threadIdx.x));
      missing = expected < 0 || p.slot(expected) != page * kInt4Page + threadIdx.x;
      source[threadIdx.x] = missing ? -1 : expected;
    }
    if (__syncthreads_or(missing)) {
      p.for_each_slot([&](int other, int64_t slot) {
        if (slot / kInt4Page == page && p.in_sequence(other)) source[slot & kPageMask] = other;
      });
      __syncthreads();
    }

    // Two rows of keys per thread, and the range of each channel.
    Pack<T> keys[2] = {};
    if (has_pack) {
      const auto address = [&](int of_row) {
        return source[of_row] >= 0 ? p.key.at(source[of_row], head) : p.tail.at({sequences[last], of_row}, head);
      };
      const char* const rows[2] = {address(row), address(row + kInt4Page / 2)};
#pragma unroll
      for (int r = 0; r < 2; ++r) keys[r] = load_pack<ACCESS, T>(rows[r], first, p.size);
    }
    float x[2][size];
#pragma unroll
    for (int r = 0; r < 2; ++r) keys[r].unpack(x[r]);
#pragma unroll
    for (int i = 0; i < size; ++i) {  // over this thread's two rows, then over the two of the other half warp
      MinMax range = MinMax::empty();
      range.include(x[0][i]);
      range.include(x[1][i]);
      range = MinMax::merge(
          range, {__shfl_xor_sync(~0u, range.low, kPagePacks), __shfl_xor_sync(~0u, range.high, kPagePacks)});
      if (threadIdx.x % 32 < kPagePacks) ranges[threadIdx.x / 32][i * kPagePacks + column] = range;
    }
    __syncthreads();
    // Scale and zero of each channel, a thread each; kPageThreads is a multiple of kPagePacks, so `column` applies.
    if (threadIdx.x < channels) {
      MinMax range = ranges[0][threadIdx.x];
#pragma unroll
      for (int w = 1; w < warps; ++w) range = MinMax::merge(range, ranges[w][threadIdx.x]);
      const Int4Code<T> code(range);
      codes[threadIdx.x] = __halves2half2(code.scale, code.zero);
      const int channel = first + threadIdx.x / kPagePacks;
      if (has_pack && channel < p.size) {
        reinterpret_cast<__half*>(p.k_scale.at({page, head}))[channel] = code.scale;
        reinterpret_cast<__half*>(p.k_zero.at({page, head}))[channel] = code.zero;
      }
    }
    __syncthreads();
    // The codes.
    uint32_t words[2][1] = {};
#pragma unroll
    for (int i = 0; i < size; ++i) {
      const __half2 both = codes[i * kPagePacks + column];
      float pair[2] = {x[0][i], x[1][i]};
      Int4Code<T>(__low2half(both), __high2half(both)).encode(pair);
#pragma unroll
      for (int r = 0; r < 2; ++r) words[r][0] |= static_cast<uint32_t>(static_cast<int>(pair[r])) << (4 * i);
    }
    if (!has_pack) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      char* const to = p.key_cache.at({page, row + r * kInt4Page / 2}, head) + first / 2;
      store_codes<ACCESS, size / 2, uint8_t>(to, words[r], (p.size - first) / 2);
    }
  }
}

// -- values, and keys of unfinished pages -----------------------------------------------------------------------------

// Whether a token's page stays unfinished after this call. found: the page's last token is known to be in this call, or
// the token is padding. Every thread of the block calls this.
__device__ __forceinline__ bool unfinished(const Int4Params& p, int64_t slot, bool found) {
  __shared__ int64_t last_slot[kThreads];  // of the page of each of the block's tokens
  __shared__ bool finished[kThreads];
  const unsigned in_block = p.work.token_in_block();
  bool search = false;
  if (threadIdx.x == in_block * p.work.threads_per_token) {
    search = !found;
    last_slot[in_block] = slot | kPageMask;
    finished[in_block] = found;
  }
  if (__syncthreads_or(search)) {
    p.for_each_slot([&](int other, int64_t slot_of_other) {
      if ((slot_of_other & kPageMask) != kPageMask || !p.in_sequence(other)) return;
#pragma unroll 1
      for (unsigned i = 0; i < p.work.tokens_per_block; ++i) {
        if (last_slot[i] == slot_of_other) finished[i] = true;
      }
    });
    __syncthreads();
  }
  return !finished[in_block];
}

template <typename T, Access ACCESS>
__global__ void __launch_bounds__(kThreads, 8) write_values(const __grid_constant__ Int4Params p) {
  constexpr int size = Pack<T>::size;
  const HeadLanes work(p.work, p.lanes);
  const int lane = static_cast<int>(work.lane), lanes = static_cast<int>(work.lanes);
  const char* const key_row = p.key.at(work.token, work.head);
  const char* const value_row = p.value.at(work.token, work.head);
  const bool has_pack = work.active && lane < p.packs;
  if (ACCESS == Access::packs && has_pack && lane % 8 == 0) {
    prefetch_l2(key_row + 16 * lane);
    prefetch_l2(value_row + 16 * lane);
  }
  if (threadIdx.x == 0 && work.token < p.work.tokens) p.prefetch_indices(work.token);
  pdl_wait();
  pdl_trigger();

  // The first pack of each lane and the slots are loaded together; the other packs of a longer head follow.
  Pack<T> key_pack = {}, value_pack = {};
  if (has_pack) {
    value_pack = load_pack<ACCESS, T>(value_row, lane * size, p.size);
    key_pack = load_pack<ACCESS, T>(key_row, lane * size, p.size);
  }
  const auto value_at = [&](int c, float (&x)[size]) {
    (c == lane ? value_pack : load_pack<ACCESS, T>(value_row, c * size, p.size)).unpack(x);
  };
  const int64_t slot = work.token < p.work.tokens ? p.slot(work.token) : -1;
  const int64_t ahead =
      int64_t{work.token} + (kPageMask - (slot & kPageMask));  // the page's last token, if tokens come in order
  const int64_t slot_ahead = slot >= 0 && ahead < p.work.tokens ? p.slot(ahead) : -1;

  if (work.active && slot >= 0) {
    MinMax range = MinMax::empty();
    for (int c = lane; c < p.packs; c += lanes) {
      float x[size];
      value_at(c, x);
#pragma unroll
      for (int i = 0; i < size; ++i) {
        if (ACCESS == Access::packs || c * size + i < p.size) range.include(x[i]);
      }
    }
    range.low = work.reduce(range.low, [](float a, float b) { return ptx::min_nan(a, b); });
    range.high = work.reduce(range.high, [](float a, float b) { return ptx::max_nan(a, b); });
    const Int4Code<T> code(range);
    const CachePosition position{slot / kInt4Page, slot & kPageMask};
    if (lane == 0) {
      *reinterpret_cast<__half*>(p.v_scale.at(position, work.head)) = code.scale;
      *reinterpret_cast<__half*>(p.v_zero.at(position, work.head)) = code.zero;
    }
    char* const codes = p.value_cache.at(position, work.head);
    for (int c = lane; c < p.packs; c += lanes) {
      float x[size];
      value_at(c, x);
      code.encode(x);
      uint32_t word[1] = {0};
#pragma unroll
      for (int i = 0; i < size; ++i) word[0] |= static_cast<uint32_t>(static_cast<int>(x[i])) << (4 * i);
      store_codes<ACCESS, size / 2, uint8_t>(codes + c * (size / 2), word, (p.size - c * size) / 2);
    }
  }
  if (!unfinished(p, slot, slot < 0 || slot_ahead == (slot | kPageMask)) || !work.active) return;
  char* const tail = p.tail.at({p.sequence(work.token), slot & kPageMask}, work.head);
  for (int c = lane; c < p.packs; c += lanes) {
    const Pack<T> pack = c == lane ? key_pack : load_pack<ACCESS, T>(key_row, c * size, p.size);
    store_pack<ACCESS>(tail, c * size, p.size, pack);
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
  check_memory(check, {{"key", key},
                       {"value", value},
                       {"key_cache", key_cache, kWritten},
                       {"value_cache", value_cache, kWritten},
                       {"k_scale", k_scale, kWritten},
                       {"k_zero", k_zero, kWritten},
                       {"v_scale", v_scale, kWritten},
                       {"v_zero", v_zero, kWritten},
                       {"k_tail", k_tail, kWritten},
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
  p.slots.slots = index_array(slot_mapping);
  p.slots.count = key_cache.size(0) * kInt4Page;
  p.sequences = index_array(seq_ids);
  p.sequence_count = k_tail.size(0);
  p.size = static_cast<int>(size);
  p.heads = static_cast<unsigned>(heads);
  const DeviceGuard guard(key.device().device_id);
  dispatch_float(key, [&](auto t) {
    using T = decltype(t);
    constexpr int pack = Pack<T>::size;
    p.packs = static_cast<int>((size + pack - 1) / pack);
    // Large calls are instruction-bound: a lane with four packs computes its addresses once.
    const bool many = tokens * heads * p.packs > 1 << 18;
    p.lanes = HeadLanes::lanes_for(many ? (p.packs + 3) / 4 : p.packs);
    p.packs_per_head = FastDiv(static_cast<unsigned>(p.packs));
    p.work = WorkSplit(static_cast<int>(tokens), p.heads * p.lanes, kThreads);
    const bool packs = size % pack == 0 && aligned(p.key, 16) && aligned(p.value, 16) && aligned(p.tail, 16) &&
                       aligned(p.key_cache, pack / 2) && aligned(p.value_cache, pack / 2);
    const dim3 pages((p.work.tokens - 1) / kTokensPerBlock + 1, (p.heads * p.packs - 1) / kPagePacks + 1);
    if (pages.y > 65535) unsupported("rows of more than 65535 x 16 packs of 16 bytes");
    launch_pdl(packs ? write_pages<T, Access::packs> : write_pages<T, Access::elements>, pages, dim3(kPageThreads),
               key.device(), p);
    launch_pdl(packs ? write_values<T, Access::packs> : write_values<T, Access::elements>, p.work.grid(),
               p.work.block(), key.device(), p);
  });
}

KESTREL_EXPORT(int4_cache_write, int4_cache_write);

}  // namespace kestrel::kvcache
