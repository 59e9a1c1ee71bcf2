// reshape_and_cache: keys and values of T tokens into the slots of a paged cache, unchanged or as FP8.
//
// A thread copies one pack of 16 bytes of a key and the same pack of the value: one slot, one head. Blocks have up to
// 256 threads. Heads that are contiguous in all tensors form one row (write_rows); all others go through write_heads.
// Nothing is constant, so everything is read after the PDL wait; small calls prefetch rows and slots into L2 before it.
// The first read of kernel parameters misses the constant cache, so those of write_rows are packed into 96 bytes.

#include <kestrel/export.h>
#include <kestrel/pdl.cuh>

#include <limits>

#include "host.h"
#include "work_split.cuh"

namespace kestrel::kvcache {

struct WriteParams {
  Rows key, value;
  Cache key_cache, value_cache;
  SlotMapping slots;
  Scale k_scale, v_scale;
  int size = 0;  // elements of a head
  unsigned heads = 0;
  FastDiv packs_per_head;
  WorkSplit work;         // over tokens and the packs of their rows
  bool prefetch = false;  // prefetch rows before the wait
  bool streamed = false;  // L2 evicts the written lines first
};

// Contiguous rows of packs, and slots at equal distances.
struct RowParams {
  const char *key, *value;
  unsigned key_token, value_token;  // strides of tokens in 16 bytes
  char *key_cache, *value_cache;
  unsigned key_slot, value_slot;  // strides of slots in 4 bytes
  const char* slots;
  const float *k_scale, *v_scale;
  unsigned slot_count;
  unsigned tokens;
  unsigned packs;  // per row
  uint16_t threads_per_token, tokens_per_block;
  bool slots_are_int64;
  bool prefetch, streamed;
};
static_assert(sizeof(RowParams) <= 96);

constexpr int kThreads = 256;

// With FP8 conversion in hardware the kernels fit into 32 registers: full occupancy of 2048 threads per SM.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ / 10 == 90 || __CUDA_ARCH__ / 10 == 100)
constexpr int kBlocksPerSM = 2048 / kThreads;
#else
constexpr int kBlocksPerSM = 1;
#endif

// Writes a pack of a key and of a value to the heads that find(slot) returns, unless the slot is padding. All loads are
// issued together.
template <typename F, Access ACCESS, typename Find>
__device__ __forceinline__ void write_packs(const char* key, const char* value, int first, int n, const float* k_scale,
                                            const float* v_scale, const char* slot_address, bool is_int64,
                                            bool streamed, Find find) {
  using T = typename F::T;
  const Pack<T> key_pack = load_pack<ACCESS, T>(key, first, n);
  const Pack<T> value_pack = load_pack<ACCESS, T>(value, first, n);
  float key_divisor = 1.f, value_divisor = 1.f;
  if constexpr (F::scaled) {
    if (k_scale) key_divisor = load_float(k_scale);
    if (v_scale) value_divisor = load_float(v_scale);
  }
  const int64_t slot = load_index(slot_address, is_int64);
  issue_loads();
  char *key_head, *value_head;
  if (!find(slot, key_head, value_head)) return;
  F::template store<ACCESS>(key_head, first, n, key_pack, key_divisor, streamed);
  F::template store<ACCESS>(value_head, first, n, value_pack, value_divisor, streamed);
}

template <typename F>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM) write_rows(const __grid_constant__ RowParams p) {
  constexpr int size = Pack<typename F::T>::size;
  const unsigned token = blockIdx.x * p.tokens_per_block + threadIdx.y,
                 unit = blockIdx.y * p.threads_per_token + threadIdx.x;
  if (token >= p.tokens || unit >= p.packs) return;
  const char* key = p.key + (uint64_t{token} * p.key_token + unit) * 16;
  const char* value = p.value + (uint64_t{token} * p.value_token + unit) * 16;
  const char* slot_address = p.slots + uint64_t{token} * (p.slots_are_int64 ? 8 : 4);
  if (p.prefetch && unit % 8 == 0) {
    prefetch_l2(key);
    prefetch_l2(value);
    if (unit == 0) prefetch_l2(slot_address);
  }
  pin(key);
  pin(value);
  pin(slot_address);
  pdl_wait();
  pdl_trigger();
  write_packs<F, Access::packs>(key, value, 0, size, p.k_scale, p.v_scale, slot_address, p.slots_are_int64, p.streamed,
                                [&](int64_t slot, char*& key_head, char*& value_head) {
                                  const unsigned index = static_cast<unsigned>(slot),
                                                 offset = unit * size * sizeof(typename F::Code);
                                  key_head = p.key_cache + uint64_t{index} * p.key_slot * 4 + offset;
                                  value_head = p.value_cache + uint64_t{index} * p.value_slot * 4 + offset;
                                  return static_cast<uint64_t>(slot) < p.slot_count;
                                });
}

// Heads and slots with any strides.
template <typename F, Access ACCESS>
__global__ void __launch_bounds__(kThreads, ACCESS == Access::packs ? kBlocksPerSM : 1)
    write_heads(const __grid_constant__ WriteParams p) {
  using T = typename F::T;
  const auto [token, unit] = p.work.token_unit();
  if (token >= p.work.tokens || unit >= p.work.units) return;
  const int head = p.packs_per_head.divide(unit);
  const int first = (unit - head * p.packs_per_head.divisor) * Pack<T>::size;
  const char *key = p.key.at(token, head), *value = p.value.at(token, head),
             *slot_address = p.slots.slots.address(token);
  if (ACCESS == Access::packs && p.prefetch && first % (128 / sizeof(T)) == 0) {
    prefetch_l2(key + int64_t{first} * sizeof(T));
    prefetch_l2(value + int64_t{first} * sizeof(T));
    if (first == 0) prefetch_l2(slot_address);
  }
  pdl_wait();
  pdl_trigger();
  write_packs<F, ACCESS>(key, value, first, p.size, p.k_scale.address(head), p.v_scale.address(head), slot_address,
                         p.slots.slots.is_int64, p.streamed, [&](int64_t slot, char*& key_head, char*& value_head) {
                           if (!p.slots.contains(slot)) return false;
                           const CachePosition position = p.slots.locate(slot);
                           key_head = p.key_cache.at(position, head);
                           value_head = p.value_cache.at(position, head);
                           return true;
                         });
}

// Whether all rows are aligned to the loads and stores of a pack.
bool whole_packs(const WriteParams& p, int element, int code) {
  const int pack = 16 / element;
  return p.size % pack == 0 && aligned(p.key, 16) && aligned(p.value, 16) && aligned(p.key_cache, pack * code) &&
         aligned(p.value_cache, pack * code);
}

// Fills RowParams; false where they cannot express the call.
bool as_rows(const WriteParams& p, RowParams* rows) {
  constexpr int64_t limit = std::numeric_limits<unsigned>::max();
  const auto fits = [](int64_t stride, int unit) { return stride % unit == 0 && stride / unit <= limit; };
  if (p.heads > 1 || p.slots.page.divisor != 1 || p.slots.count > limit || !fits(p.key.token, 16) ||
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
  rows->slots = p.slots.slots.base;
  rows->k_scale = p.k_scale.base;
  rows->v_scale = p.v_scale.base;
  rows->slot_count = static_cast<unsigned>(p.slots.count);
  rows->tokens = p.work.tokens;
  rows->packs = p.work.units;
  rows->threads_per_token = static_cast<uint16_t>(p.work.threads_per_token);
  rows->tokens_per_block = static_cast<uint16_t>(p.work.tokens_per_block);
  rows->slots_are_int64 = p.slots.slots.is_int64;
  rows->prefetch = p.prefetch;
  rows->streamed = p.streamed;
  return true;
}

// Calls of at least this many threads per SM, of 2048 that are resident, fill the GPU: the next kernel cannot start
// early, so a prefetch is useless, and stores are streamed.
constexpr int64_t kLargeCall = 1792;

template <typename F>
void launch(WriteParams p, DLDevice device) {
  using T = typename F::T;
  constexpr unsigned size = Pack<T>::size;
  p.packs_per_head = FastDiv((p.size + size - 1) / size);
  p.work = WorkSplit(p.work.tokens, p.heads * p.packs_per_head.divisor, kThreads);
  p.streamed = int64_t{p.work.tokens} * p.work.units >=
               kLargeCall * device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
  p.prefetch = !p.streamed;
  const bool packs = whole_packs(p, sizeof(T), sizeof(typename F::Code));
  RowParams rows;
  if (packs && as_rows(p, &rows)) {
    launch_pdl(write_rows<F>, p.work.grid(), dim3(p.work.threads_per_token, p.work.tokens_per_block), device, rows);
  } else {
    launch_pdl(packs ? write_heads<F, Access::packs> : write_heads<F, Access::elements>, p.work.grid(), p.work.block(),
               device, p);
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
  check_memory(check, {{"key", key},
                       {"value", value},
                       {"key_cache", key_cache, kWritten},
                       {"value_cache", value_cache, kWritten},
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
  p.work.tokens = static_cast<int>(tokens);
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

KESTREL_EXPORT(reshape_and_cache, reshape_and_cache);

}  // namespace kestrel::kvcache
