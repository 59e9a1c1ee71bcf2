// reshape_and_cache: keys and values of T tokens into the slots of a paged cache, as they are or as FP8.
//
// clang-format off
// Computes:   cache[slot / P, slot % P, head, :] = row (auto), or = fp8(row / scale), for K and V of every token.
// Built for:  32 heads of 64 in bf16 (rows of 4 KB), from one token (latency) to 4096 (bandwidth).
// Must move:  per token and tensor 2 Hk D bytes in, 2 Hk D (auto) or Hk D (FP8) out; FP8 takes 4 operations per element.
// Split:      a thread takes one pack of 16 bytes of a key and the pack beside it of the value: one slot, one head. Blocks of
//             up to 256 threads; short rows share a block, long ones take several. Heads that lie side by side everywhere
//             are one row and have a kernel of their own.
// PDL:        nothing is constant. Rows and slots of small calls are prefetched into L2 before the wait (that returns no data),
//             addresses are computed there, and everything is read after it, all at once. Parameters arrive cold: those of rows
//             are packed, which takes 70 to 100 ns off a short call.
// Measured:   results/; what was predicted and tried on the way, in README.md.
// clang-format on

#include <tvm/ffi/function.h>
#include <kestrel/pdl.cuh>

#include <limits>

#include "host.h"
#include "spread.cuh"

namespace kestrel::kvcache {

struct WriteParams {
  Rows key, value;
  Cache key_cache, value_cache;
  Slots slots;
  Scale k_scale, v_scale;
  int size = 0;  // elements of a head
  unsigned heads = 0;
  FastDivision per_head;  // packs of a head
  Spread spread;          // over tokens and the packs of their rows
  bool prefetch = false;  // rows, before the wait
  bool streamed = false;  // what is written leaves L2 first
};

// Rows without gaps between their heads, in packs, and slots at equal distances.
struct RowParams {
  const char *key, *value;
  unsigned key_token, value_token;  // from token to token, in 16 bytes
  char *key_cache, *value_cache;
  unsigned key_slot, value_slot;  // from slot to slot, in 4 bytes
  const char* slots;
  const float *k_scale, *v_scale;
  unsigned count;  // slots
  unsigned tokens;
  unsigned packs;        // of a row
  uint16_t span, teams;  // threads of one token in a block, and how many tokens a block has
  bool wide;             // slots are int64, not int32
  bool prefetch, streamed;
};
static_assert(sizeof(RowParams) <= 96);

constexpr int kThreads = 256;

// Rows in packs fit into 32 registers where FP8 is converted by the hardware; then all 2048 threads of a multiprocessor
// have room.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ / 10 == 90 || __CUDA_ARCH__ / 10 == 100)
constexpr int kBlocksPerSM = 2048 / kThreads;
#else
constexpr int kBlocksPerSM = 1;
#endif

// A pack of a key and of a value, to the places that find(slot) names, if there are any. Everything is asked for at
// once.
template <typename F, bool VECTORS, typename Find>
__device__ __forceinline__ void write_packs(const char* key, const char* value, int first, int n, const float* k_scale,
                                            const float* v_scale, const char* slot, bool wide, bool streamed,
                                            Find find) {
  using T = typename F::T;
  const Pack<T> key_pack = load_pack<VECTORS, T>(key, first, n);
  const Pack<T> value_pack = load_pack<VECTORS, T>(value, first, n);
  float by_k = 1.f, by_v = 1.f;
  if constexpr (F::scaled) {
    if (k_scale) by_k = read_float(k_scale);
    if (v_scale) by_v = read_float(v_scale);
  }
  const int64_t index = read_index(slot, wide, 0);
  issue_reads();
  char *key_head, *value_head;
  if (!find(index, key_head, value_head)) return;
  F::template store<VECTORS>(key_head, first, n, key_pack, by_k, streamed);
  F::template store<VECTORS>(value_head, first, n, value_pack, by_v, streamed);
}

template <typename F>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM) write_rows(const __grid_constant__ RowParams p) {
  constexpr int size = Pack<typename F::T>::size;
  const unsigned token = blockIdx.x * p.teams + threadIdx.y, unit = blockIdx.y * p.span + threadIdx.x;
  if (token >= p.tokens || unit >= p.packs) return;
  const char* key = p.key + (uint64_t{token} * p.key_token + unit) * 16;
  const char* value = p.value + (uint64_t{token} * p.value_token + unit) * 16;
  const char* slot = p.slots + uint64_t{token} * (p.wide ? 8 : 4);
  if (p.prefetch && unit % 8 == 0) {
    prefetch_l2(key);
    prefetch_l2(value);
    if (unit == 0) prefetch_l2(slot);
  }
  pin(key);
  pin(value);
  pin(slot);
  pdl_wait();
  pdl_trigger();
  write_packs<F, true>(key, value, 0, size, p.k_scale, p.v_scale, slot, p.wide, p.streamed,
                       [&](int64_t index, char*& key_head, char*& value_head) {
                         const unsigned at = static_cast<unsigned>(index),
                                        within = unit * size * sizeof(typename F::Code);
                         key_head = p.key_cache + uint64_t{at} * p.key_slot * 4 + within;
                         value_head = p.value_cache + uint64_t{at} * p.value_slot * 4 + within;
                         return static_cast<uint64_t>(index) < p.count;
                       });
}

// Heads and slots anywhere. Not VECTORS: element by element.
template <typename F, bool VECTORS>
__global__ void __launch_bounds__(kThreads, VECTORS ? kBlocksPerSM : 1)
    write_heads(const __grid_constant__ WriteParams p) {
  using T = typename F::T;
  const auto [token, unit] = p.spread.mine();
  if (token >= p.spread.tokens || unit >= p.spread.units) return;
  const int head = p.per_head(unit), first = (unit - head * p.per_head.divisor) * Pack<T>::size;
  const char *key = p.key.at(token, head), *value = p.value.at(token, head), *slot = p.slots.address(token);
  if (VECTORS && p.prefetch && first % (128 / sizeof(T)) == 0) {
    prefetch_l2(key + int64_t{first} * sizeof(T));
    prefetch_l2(value + int64_t{first} * sizeof(T));
    if (first == 0) prefetch_l2(slot);
  }
  pdl_wait();
  pdl_trigger();
  write_packs<F, VECTORS>(key, value, first, p.size, p.k_scale.address(head), p.v_scale.address(head), slot,
                          p.slots.wide, p.streamed, [&](int64_t index, char*& key_head, char*& value_head) {
                            if (!p.slots.exists(index)) return false;
                            const Place place = p.slots.locate(index);
                            key_head = p.key_cache.at(place, head);
                            value_head = p.value_cache.at(place, head);
                            return true;
                          });
}

// Every row begins at a multiple of what one thread reads and of what it writes.
bool whole_packs(const WriteParams& p, int element, int code) {
  const int pack = 16 / element;
  return p.size % pack == 0 && aligned(p.key, 16) && aligned(p.value, 16) && aligned(p.key_cache, pack * code) &&
         aligned(p.value_cache, pack * code);
}

// As RowParams has it; false where it has no room.
bool as_rows(const WriteParams& p, RowParams* rows) {
  constexpr int64_t most = std::numeric_limits<unsigned>::max();
  const auto fits = [](int64_t stride, int unit) { return stride % unit == 0 && stride / unit <= most; };
  if (p.heads > 1 || p.slots.page.divisor != 1 || p.slots.count > most || !fits(p.key.token, 16) ||
      !fits(p.value.token, 16) || !fits(p.key_cache.block, 4) || !fits(p.value_cache.block, 4)) {
    return false;
  }
  *rows = {p.key.base, p.value.base};
  rows->key_token = static_cast<unsigned>(p.key.token / 16);
  rows->value_token = static_cast<unsigned>(p.value.token / 16);
  rows->key_cache = p.key_cache.base;
  rows->value_cache = p.value_cache.base;
  rows->key_slot = static_cast<unsigned>(p.key_cache.block / 4);
  rows->value_slot = static_cast<unsigned>(p.value_cache.block / 4);
  rows->slots = p.slots.mapping;
  rows->k_scale = p.k_scale.base;
  rows->v_scale = p.v_scale.base;
  rows->count = static_cast<unsigned>(p.slots.count);
  rows->tokens = p.spread.tokens;
  rows->packs = p.spread.units;
  rows->span = static_cast<uint16_t>(p.spread.span);
  rows->teams = static_cast<uint16_t>(p.spread.tokens_per_block);
  rows->wide = p.slots.wide;
  rows->prefetch = p.prefetch;
  rows->streamed = p.streamed;
  return true;
}

// Threads for each multiprocessor from which on a call is large: the next kernel finds no room for its blocks before
// this one's end, so that there is nothing to prefetch for. us on an H200, with a prefetch and plain stores, without
// and streamed: FP8 512 tokens 2.60, 2.88; 1024 4.42, 4.35; 4096 13.9, 13.4; bf16 512 3.06, 3.25; 1024 5.57, 5.17; 4096
// 18.3, 18.0.
constexpr int64_t kLarge = 1792;

template <typename F>
void launch(WriteParams p, DLDevice device) {
  using T = typename F::T;
  constexpr unsigned size = Pack<T>::size;
  p.per_head = FastDivision((p.size + size - 1) / size);
  p.spread = Spread(p.spread.tokens, p.heads * p.per_head.divisor, kThreads);
  p.streamed = int64_t{p.spread.tokens} * p.spread.units >=
               kLarge * device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
  p.prefetch = !p.streamed;
  const bool packs = whole_packs(p, sizeof(T), sizeof(typename F::Code));
  RowParams rows;
  if (packs && as_rows(p, &rows)) {
    launch_pdl(write_rows<F>, p.spread.grid(), dim3(p.spread.span, p.spread.tokens_per_block), device, rows);
  } else {
    launch_pdl(packs ? write_heads<F, true> : write_heads<F, false>, p.spread.grid(), p.spread.block(), device, p);
  }
}

void reshape_and_cache(TensorView key, TensorView value, TensorView key_cache, TensorView value_cache,
                       TensorView slot_mapping, AnyView kv_cache_dtype, OptionalTensor k_scale,
                       OptionalTensor v_scale) {
  const Checks check("reshape_and_cache");
  check_rows(check, key, value, slot_mapping);
  const int64_t tokens = slot_mapping.size(0), heads = key.size(1), size = key.size(2);
  const Format format =
      check_store(check, key.dtype(), heads, size, key_cache, value_cache, kv_cache_dtype, k_scale, v_scale);
  check_devices(check, "key", key,
                {{"value", value},
                 {"key_cache", key_cache},
                 {"value_cache", value_cache},
                 {"slot_mapping", slot_mapping},
                 {"k_scale", k_scale},
                 {"v_scale", v_scale}});
  if (tokens == 0 || heads == 0 || size == 0 || key_cache.size(0) == 0) return;
  require_sizes(tokens, heads, size, key_cache.size(1));

  WriteParams p;
  p.key = rows_of(key);
  p.value = rows_of(value);
  p.key_cache = cache_of(key_cache);
  p.value_cache = cache_of(value_cache);
  p.slots = slots_of(slot_mapping, key_cache, {&p.key_cache, &p.value_cache});
  p.spread.tokens = static_cast<int>(tokens);
  p.size = static_cast<int>(size);
  p.heads = static_cast<unsigned>(heads);
  if (format != Format::copy) {
    p.k_scale = scale_of(k_scale);
    p.v_scale = scale_of(v_scale);
  }
  const int64_t row = size * element_bytes(key), code_row = size * element_bytes(key_cache);
  if (heads > 1 && p.key.head == row && p.value.head == row && p.key_cache.head == code_row &&
      p.value_cache.head == code_row && !p.k_scale.per_head && !p.v_scale.per_head) {
    p.size *= p.heads;
    p.heads = 1;
    p.key.head = p.value.head = p.key_cache.head = p.value_cache.head = 0;
  }
  const DeviceGuard guard(key.device().device_id);
  if (format != Format::copy) {
    dispatch_float(key, [&](auto t) {
      using T = decltype(t);
      format == Format::e4m3 ? launch<Fp8<T, __NV_E4M3>>(p, key.device()) : launch<Fp8<T, __NV_E5M2>>(p, key.device());
    });
  } else if (element_bytes(key) == 2) {
    launch<Copy<uint16_t>>(p, key.device());
  } else {
    launch<Copy<uint32_t>>(p, key.device());
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(reshape_and_cache, reshape_and_cache);

}  // namespace kestrel::kvcache
