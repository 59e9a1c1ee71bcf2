// int8_cache_write: keys and values as INT8 with a scale per token and head.
//
// clang-format off
// Computes:   scale = largest finite |x| of a head's D values / 127 (1 for 0), code = x / scale rounded half to even.
// Built for:  heads of 64 to 256 in bf16, from one token (latency) to some thousand.
// Must move:  per token and tensor 2 Hk D bytes in, Hk (D + 4) out; about 10 operations per element.
// Split:      a team of up to 32 lanes per token and head, for its key and its value; a lane holds one pack of 16 bytes of
//             each in registers, and reads those of heads of more than 32 packs a second time.
// PDL:        nothing is constant: rows and slots are prefetched into L2 before the wait, and everything is read after it.
// Measured:   predicted for 1024 tokens of 8 heads of 128: 6.4 MB and a launch, 2.5 us on an H200; 4.5, 56 % of that (results/h200.json).
// clang-format on

#include <tvm/ffi/function.h>
#include <kestrel/pdl.cuh>

#include "host.h"
#include "team.cuh"

namespace kestrel::kvcache {

struct Int8Params {
  Rows key, value;
  Cache key_cache, value_cache, k_scale, v_scale;
  Slots slots;
  int size = 0, packs = 0;  // of a head
  unsigned lanes = 1;       // of a team
  Spread spread;            // over tokens and the lanes of their teams
};

// The largest finite magnitude of a pack, as the bits of a float: NaN, whose bits are larger than all, is kept.
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

template <bool VECTORS, typename T>
__device__ __forceinline__ void store_int8(char* head, int first, int n, const Pack<T>& pack,
                                           const Quotient<T>& quotient) {
  constexpr int size = Pack<T>::size;
  float x[size];
  pack.unpack(x);
  quotient.of(x);
  uint32_t words[size / 4] = {};
#pragma unroll
  for (int i = 0; i < size; ++i) {
    const int code = max(-127, min(127, __float2int_rn(x[i])));  // NaN gives 0
    words[i / 4] |= static_cast<uint32_t>(code & 0xff) << (8 * (i % 4));
  }
  store_codes<VECTORS, size, uint8_t>(head + first, words, n - first);
}

// One head of one token: `pack` is the lane's first one, `largest` that of all of the lane's.
template <bool VECTORS, typename T>
__device__ __forceinline__ void write_head(const Int8Params& p, const Team& team, const char* row, const Pack<T>& pack,
                                           unsigned largest, Place place, const Cache& cache, const Cache& scales) {
  largest = team.all(largest, [](unsigned a, unsigned b) { return max(a, b); });
  const float scale = largest == 0 ? 1.f : __uint_as_float(largest) / 127.f;
  if (team.lane == 0) *reinterpret_cast<float*>(scales.at(place, team.head)) = scale;
  const Quotient<T> quotient(scale);
  char* const head = cache.at(place, team.head);
  constexpr int size = Pack<T>::size;
  if (static_cast<int>(team.lane) < p.packs) store_int8<VECTORS>(head, team.lane * size, p.size, pack, quotient);
  for (int c = team.lane + team.lanes; c < p.packs; c += team.lanes) {
    store_int8<VECTORS>(head, c * size, p.size, load_pack<VECTORS, T>(row, c * size, p.size), quotient);
  }
}

constexpr int kThreads = 128;

template <typename T, bool VECTORS>
__global__ void __launch_bounds__(kThreads) write_int8(const __grid_constant__ Int8Params p) {
  constexpr int size = Pack<T>::size;
  const Team team(p.spread, p.lanes);
  if (!team.active) return;
  const char* const key_row = p.key.at(team.token, team.head);
  const char* const value_row = p.value.at(team.token, team.head);
  const int first = team.lane * size;
  const bool mine = static_cast<int>(team.lane) < p.packs;
  if (VECTORS && mine && team.lane % 8 == 0) {
    prefetch_l2(key_row + int64_t{first} * sizeof(T));
    prefetch_l2(value_row + int64_t{first} * sizeof(T));
  }
  if (team.head == 0 && team.lane == 0) prefetch_l2(p.slots.address(team.token));
  pdl_wait();
  pdl_trigger();

  Pack<T> key{}, value{};
  if (mine) {
    key = load_pack<VECTORS, T>(key_row, first, p.size);
    value = load_pack<VECTORS, T>(value_row, first, p.size);
  }
  const int64_t slot = p.slots.read(team.token);
  issue_reads();
  if (!p.slots.exists(slot)) return;
  unsigned largest_key = largest_bits(key), largest_value = largest_bits(value);
  for (int c = team.lane + team.lanes; c < p.packs; c += team.lanes) {
    largest_key = max(largest_key, largest_bits(load_pack<VECTORS, T>(key_row, c * size, p.size)));
    largest_value = max(largest_value, largest_bits(load_pack<VECTORS, T>(value_row, c * size, p.size)));
  }
  const Place place = p.slots.locate(slot);
  write_head<VECTORS>(p, team, key_row, key, largest_key, place, p.key_cache, p.k_scale);
  write_head<VECTORS>(p, team, value_row, value, largest_value, place, p.value_cache, p.v_scale);
}

void int8_cache_write(TensorView key, TensorView value, TensorView key_cache, TensorView value_cache,
                      TensorView k_scale, TensorView v_scale, TensorView slot_mapping) {
  const Checks check("int8_cache_write");
  check_rows(check, key, value, slot_mapping);
  const int64_t tokens = slot_mapping.size(0), heads = key.size(1), size = key.size(2);
  check_pair(check, key_cache, value_cache, {kInt8}, heads, size);
  check_written(check, {{"key_cache", key_cache}, {"value_cache", value_cache}});
  const int64_t of_tokens[3] = {key_cache.size(0), key_cache.size(1), heads};
  check_scales(check, kFloat32, of_tokens, {{"k_scale", k_scale}, {"v_scale", v_scale}});
  check_written(check, {{"k_scale", k_scale}, {"v_scale", v_scale}});
  check_devices(check, "key", key,
                {{"value", value},
                 {"key_cache", key_cache},
                 {"value_cache", value_cache},
                 {"k_scale", k_scale},
                 {"v_scale", v_scale},
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
    p.lanes = Team::lanes_for(p.packs);
    p.spread = Spread(static_cast<int>(tokens), static_cast<unsigned>(heads) * p.lanes, kThreads);
    const bool vectors = size % pack == 0 && aligned(p.key, 16) && aligned(p.value, 16) && aligned(p.key_cache, pack) &&
                         aligned(p.value_cache, pack);
    launch_pdl(vectors ? write_int8<T, true> : write_int8<T, false>, p.spread.grid(), p.spread.block(), key.device(),
               p);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(int8_cache_write, int8_cache_write);

}  // namespace kestrel::kvcache
