// reshape_and_cache: keys and values of T tokens into the slots of a paged cache, as they are or as FP8.
//
// clang-format off
// Computes:   cache[slot / P, slot % P, head, :] = row (auto), or = fp8(row / scale), for K and V of every token.
// Built for:  32 heads of 64 in bf16 (rows of 4 KB), from one token (latency) to 4096 (bandwidth).
// Must move:  per token and tensor 2 Hk D bytes in, 2 Hk D (auto) or Hk D (FP8) out; FP8 takes 4 operations per element.
// Split:      a thread takes one pack of 16 bytes of a key and the pack beside it of the value: one slot, one head. Blocks of
//             up to 128 threads; short rows share a block, long ones take several. Heads that lie side by side everywhere
//             are one long head.
// PDL:        nothing is constant. Rows and slots are prefetched into L2 before the wait (that returns no data), addresses are
//             computed there, and everything is read after it, all at once.
// Measured:   on an H200 92 % (auto) and 95 % (FP8) of one launch and the bytes at 4.3 TB/s for 4096 tokens; what was predicted
//             and tried on the way, and the shapes of record, in README.md.
// clang-format on

#include <tvm/ffi/function.h>
#include <kestrel/pdl.cuh>

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
  bool large = false;     // rows are not prefetched, and what is written leaves L2 first
};

// How a row is taken: as one run of packs, head by head in packs, or head by head in elements.
enum class Access { row, heads, elements };

constexpr int kThreads = 128;

// Rows in packs fit into 32 registers where FP8 is converted by the hardware; then all 2048 threads of a multiprocessor
// have room.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ / 10 == 90 || __CUDA_ARCH__ / 10 == 100)
constexpr int kBlocksPerSM = 2048 / kThreads;
#else
constexpr int kBlocksPerSM = 1;
#endif

// Bytes in and out from which on a call is `large`. us on an H200, prefetched and plain / large: FP8 1024 tokens 4.57,
// 4.69; 2048 7.68, 7.58; 4096 14.1, 13.5; 16384 51.8, 49.0; auto 1024 5.26, 5.24; 2048 10.0, 9.76; 4096 18.6, 18.2.
constexpr int64_t kLarge = 20 << 20;

template <typename F, Access access>
__global__ void __launch_bounds__(kThreads, access == Access::elements ? 1 : kBlocksPerSM)
    write_rows(const __grid_constant__ WriteParams p) {
  using T = typename F::T;
  constexpr int size = Pack<T>::size;
  constexpr bool VECTORS = access != Access::elements;
  const auto [token, unit] = p.spread.mine();
  if (token >= p.spread.tokens || unit >= p.spread.units) return;
  const int head = access == Access::row ? 0 : p.per_head(unit);
  const int first = (access == Access::row ? unit : unit - head * p.per_head.divisor) * size;
  const char *key_row, *value_row;
  if constexpr (access == Access::row) {
    key_row = p.key.at(token);
    value_row = p.value.at(token);
  } else {
    key_row = p.key.at(token, head);
    value_row = p.value.at(token, head);
  }
  if (VECTORS && !p.large && first % (128 / sizeof(T)) == 0) {
    prefetch_l2(key_row + int64_t{first} * sizeof(T));
    prefetch_l2(value_row + int64_t{first} * sizeof(T));
    if (first == 0) prefetch_l2(p.slots.address(token));
  }
  pdl_wait();
  pdl_trigger();

  const Pack<T> key = load_pack<VECTORS, T>(key_row, first, p.size);
  const Pack<T> value = load_pack<VECTORS, T>(value_row, first, p.size);
  float k_scale = 1.f, v_scale = 1.f;
  if constexpr (F::scaled) {
    k_scale = p.k_scale.of(head);
    v_scale = p.v_scale.of(head);
  }
  const int64_t slot = p.slots.read(token);
  issue_reads();
  if (!p.slots.exists(slot)) return;
  const Place place = p.slots.locate(slot);
  F::template store<VECTORS>(p.key_cache.at(place, head), first, p.size, key, k_scale, p.large);
  F::template store<VECTORS>(p.value_cache.at(place, head), first, p.size, value, v_scale, p.large);
}

template <typename F, Access access>
void launch(WriteParams p, DLDevice device) {
  constexpr unsigned size = Pack<typename F::T>::size;
  p.per_head = FastDivision((p.size + size - 1) / size);
  p.spread = Spread(p.spread.tokens, p.heads * p.per_head.divisor, kThreads);
  const int64_t bytes =
      int64_t{2} * p.spread.tokens * p.spread.units * size * (sizeof(typename F::T) + sizeof(typename F::Code));
  p.large = bytes >= kLarge;
  launch_pdl(write_rows<F, access>, p.spread.grid(), p.spread.block(), device, p);
}

// Every row begins at a multiple of what one thread reads and of what it writes.
bool whole_packs(const WriteParams& p, int element, int code) {
  const int pack = 16 / element;
  return p.size % pack == 0 && aligned(p.key, 16) && aligned(p.value, 16) && aligned(p.key_cache, pack * code) &&
         aligned(p.value_cache, pack * code);
}

template <typename F>
void launch(const WriteParams& p, DLDevice device) {
  if (!whole_packs(p, sizeof(typename F::T), sizeof(typename F::Code))) {
    launch<F, Access::elements>(p, device);
  } else if (p.heads > 1) {
    launch<F, Access::heads>(p, device);
  } else {
    launch<F, Access::row>(p, device);
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
