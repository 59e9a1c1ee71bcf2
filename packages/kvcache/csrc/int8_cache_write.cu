// int8_cache_write: keys and values as INT8 with a scale per token and head.
//
// scale = largest finite |x| of a head / 127 (1 for 0), code = x / scale rounded half to even. Up to 32 lanes of a warp
// share the key head and the value head of a token. A lane holds one pack of 16 bytes of each in registers; packs
// beyond the 32nd of a head are read twice. Nothing is constant: rows and slots are prefetched into L2 before the PDL
// wait, and everything is read after it.

#include <kestrel/export.h>
#include <kestrel/pdl.cuh>

#include "head_lanes.cuh"
#include "host.h"

namespace kestrel::kvcache {

struct Int8Params {
  Rows key, value;
  Cache key_cache, value_cache, k_scale, v_scale;
  SlotMapping slots;
  int size = 0, packs = 0;  // of a head
  unsigned lanes = 1;       // per head
  WorkSplit work;           // over tokens and the lanes of their heads
};

// The bits of the largest finite magnitude of a pack, or of a NaN, whose bits exceed all others.
template <typename T>
__device__ __forceinline__ unsigned largest_bits(const Pack<T>& pack) {
  float x[Pack<T>::size];
  pack.unpack(x);
  unsigned largest = 0;
#pragma unroll
  for (int i = 0; i < Pack<T>::size; ++i) {
    const unsigned magnitude = __float_as_uint(x[i]) & 0x7fffffffu;
    if (magnitude != 0x7f800000u) largest = max(largest, magnitude);
  }
  return largest;
}

template <Access ACCESS, typename T>
__device__ __forceinline__ void store_int8(char* head, int first, int n, const Pack<T>& pack,
                                           const ScaleQuotient<T>& quotient) {
  constexpr int size = Pack<T>::size;
  float x[size];
  pack.unpack(x);
  quotient.apply(x);
  uint32_t words[size / 4] = {};
#pragma unroll
  for (int i = 0; i < size; ++i) {
    const int code = max(-127, min(127, __float2int_rn(x[i])));  // NaN gives 0
    words[i / 4] |= static_cast<uint32_t>(code & 0xff) << (8 * (i % 4));
  }
  store_codes<ACCESS, size, uint8_t>(head + first, words, n - first);
}

// Quantises one head of one token. pack: this lane's first one; largest: over all packs of this lane.
template <Access ACCESS, typename T>
__device__ __forceinline__ void write_head(const Int8Params& p, const HeadLanes& work, const char* row,
                                           const Pack<T>& pack, unsigned largest, CachePosition position,
                                           const Cache& cache, const Cache& scales) {
  largest = work.reduce(largest, [](unsigned a, unsigned b) { return max(a, b); });
  const float scale = largest == 0 ? 1.f : __uint_as_float(largest) / 127.f;
  if (work.lane == 0) *reinterpret_cast<float*>(scales.at(position, work.head)) = scale;
  const ScaleQuotient<T> quotient(scale);
  char* const head = cache.at(position, work.head);
  constexpr int size = Pack<T>::size;
  if (static_cast<int>(work.lane) < p.packs) store_int8<ACCESS>(head, work.lane * size, p.size, pack, quotient);
  for (int c = work.lane + work.lanes; c < p.packs; c += work.lanes) {
    store_int8<ACCESS>(head, c * size, p.size, load_pack<ACCESS, T>(row, c * size, p.size), quotient);
  }
}

constexpr int kThreads = 128;

template <typename T, Access ACCESS>
__global__ void __launch_bounds__(kThreads) write_int8(const __grid_constant__ Int8Params p) {
  constexpr int size = Pack<T>::size;
  const HeadLanes work(p.work, p.lanes);
  if (!work.active) return;
  const char* const key_row = p.key.at(work.token, work.head);
  const char* const value_row = p.value.at(work.token, work.head);
  const int first = work.lane * size;
  const bool has_pack = static_cast<int>(work.lane) < p.packs;
  if (ACCESS == Access::packs && has_pack && work.lane % 8 == 0) {
    prefetch_l2(key_row + int64_t{first} * sizeof(T));
    prefetch_l2(value_row + int64_t{first} * sizeof(T));
  }
  if (work.head == 0 && work.lane == 0) prefetch_l2(p.slots.slots.address(work.token));
  pdl_wait();
  pdl_trigger();

  Pack<T> key{}, value{};
  if (has_pack) {
    key = load_pack<ACCESS, T>(key_row, first, p.size);
    value = load_pack<ACCESS, T>(value_row, first, p.size);
  }
  const int64_t slot = p.slots.slots.load(work.token);
  issue_loads();
  if (!p.slots.contains(slot)) return;
  unsigned largest_key = largest_bits(key), largest_value = largest_bits(value);
  for (int c = work.lane + work.lanes; c < p.packs; c += work.lanes) {
    largest_key = max(largest_key, largest_bits(load_pack<ACCESS, T>(key_row, c * size, p.size)));
    largest_value = max(largest_value, largest_bits(load_pack<ACCESS, T>(value_row, c * size, p.size)));
  }
  const CachePosition position = p.slots.locate(slot);
  write_head<ACCESS>(p, work, key_row, key, largest_key, position, p.key_cache, p.k_scale);
  write_head<ACCESS>(p, work, value_row, value, largest_value, position, p.value_cache, p.v_scale);
}

void int8_cache_write(TensorView key, TensorView value, TensorView key_cache, TensorView value_cache,
                      TensorView k_scale, TensorView v_scale, TensorView slot_mapping) {
  const Checks check("int8_cache_write");
  check_rows(check, key, value, slot_mapping);
  const int64_t tokens = slot_mapping.size(0), heads = key.size(1), size = key.size(2);
  check_pair(check, key_cache, value_cache, {kInt8}, heads, size);
  check_written(check, {{"key_cache", key_cache}, {"value_cache", value_cache}});
  const int64_t scale_shape[3] = {key_cache.size(0), key_cache.size(1), heads};
  check_scales(check, kFloat32, scale_shape, {{"k_scale", k_scale}, {"v_scale", v_scale}});
  check_written(check, {{"k_scale", k_scale}, {"v_scale", v_scale}});
  check_memory(check, {{"key", key},
                       {"value", value},
                       {"key_cache", key_cache, kWritten},
                       {"value_cache", value_cache, kWritten},
                       {"k_scale", k_scale, kWritten},
                       {"v_scale", v_scale, kWritten},
                       {"slot_mapping", slot_mapping}});
  if (tokens == 0 || heads == 0 || size == 0 || key_cache.size(0) == 0) return;
  require_sizes(tokens, heads, size, key_cache.size(1));

  const DeviceGuard guard(key.device().device_id);
  dispatch_float(key, [&](auto t) {
    using T = decltype(t);
    constexpr int pack = Pack<T>::size;
    Int8Params p;
    p.key = rows_of(key);
    p.value = rows_of(value);
    p.key_cache = cache_of(key_cache);
    p.value_cache = cache_of(value_cache);
    p.k_scale = cache_of(k_scale);
    p.v_scale = cache_of(v_scale);
    p.slots = slots_of(slot_mapping, key_cache, {&p.key_cache, &p.value_cache, &p.k_scale, &p.v_scale});
    p.size = static_cast<int>(size);
    p.packs = static_cast<int>((size + pack - 1) / pack);
    p.lanes = HeadLanes::lanes_for(p.packs);
    p.work = WorkSplit(static_cast<int>(tokens), static_cast<unsigned>(heads) * p.lanes, kThreads);
    const bool packs = size % pack == 0 && aligned(p.key, 16) && aligned(p.value, 16) && aligned(p.key_cache, pack) &&
                       aligned(p.value_cache, pack);
    launch_pdl(packs ? write_int8<T, Access::packs> : write_int8<T, Access::elements>, p.work.grid(), p.work.block(),
               key.device(), p);
  });
}

KESTREL_EXPORT(int8_cache_write, int8_cache_write);

}  // namespace kestrel::kvcache
