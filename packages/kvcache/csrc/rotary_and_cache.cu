// rotary_and_cache: rotates queries and keys by their positions in place, and writes keys and values into a paged
// cache. With weights of a norm, each head of a query and key is normalised first.
//
// A thread processes one item of a token: two packs of 16 bytes of a query or key that rotate into each other, a pack
// of a key that does not rotate, or a pack of a value. For unaligned rows it is a pair or an element instead. Blocks
// have up to 128 threads; short rows share a block. Only the table and the norms are constant, but the address in the
// table depends on positions: nothing is read before the PDL wait. Rows, positions and slots are prefetched into L2
// before it. A norm needs heads that rotate as a whole: adjacent lanes then hold a head, and add up its squares.

#include <kestrel/export.h>
#include <kestrel/rotary.h>
#include <kestrel/pdl.cuh>
#include <kestrel/rotary.cuh>

#include "host.h"
#include "work_split.cuh"

namespace kestrel::kvcache {

struct RotaryParams {
  Rows query, key, value;
  Cache key_cache, value_cache;
  SlotMapping slots;
  Scale k_scale, v_scale;
  Format format = Format::copy;
  IndexArray positions;
  bool float32_table = false;  // where the rows are not float32
  const char* table = nullptr;
  int64_t table_row = 0;  // bytes
  int64_t table_rows = 0;
  int slot_count = 0;                  // length of slot_mapping
  int size = 0, half = 0, offset = 0;  // D, R/2, first dimension that rotates
  // Per head: items that rotate, items of a key that do not, items of a value.
  unsigned rotating = 0, unrotated = 0, value_items_per_head = 0;
  unsigned query_items = 0, key_items = 0;                // per token
  WorkSplit work;                                         // over tokens and all their items
  const char *query_norm = nullptr, *key_norm = nullptr;  // [D], of the rows' type; null: no norm
  float eps = 0.f, weight_bias = 0.f;
};

// What a thread works on. first, second: the first elements of its packs; second is -1 if there is none.
struct Item {
  enum { query, key, value } tensor;
  int head, first, second, frequency;

  template <typename T, bool NEOX, Access ACCESS>
  static __device__ __forceinline__ Item of(const RotaryParams& p, unsigned unit) {
    constexpr int step = ACCESS == Access::packs ? Pack<T>::size : 1;
    Item item;
    unsigned index;  // within the head
    if (unit < p.query_items) {
      item.tensor = query;
      item.head = unit / p.rotating;
      index = unit - item.head * p.rotating;
    } else if (unit < p.query_items + p.key_items) {
      unit -= p.query_items;
      item.tensor = key;
      item.head = unit / (p.rotating + p.unrotated);
      index = unit - item.head * (p.rotating + p.unrotated);
    } else {
      unit -= p.query_items + p.key_items;
      item.tensor = value;
      item.head = unit / p.value_items_per_head;
      index = unit - item.head * p.value_items_per_head;
    }
    item.second = -1;
    if (item.tensor == value) {
      item.first = index * step;
    } else if (index < p.rotating) {
      item.frequency = index * step;
      if constexpr (ACCESS == Access::packs) {
        item.first = p.offset + first_pack<NEOX, T>(item.frequency);
        item.second = p.offset + second_pack<NEOX, T>(item.frequency, p.half);
      } else {
        item.first = p.offset + (NEOX ? item.frequency : 2 * item.frequency);
        item.second = NEOX ? item.first + p.half : item.first + 1;
      }
    } else {  // before or after the dimensions that rotate
      item.first = (index - p.rotating) * step;
      if (item.first >= p.offset) item.first += 2 * p.half;
    }
    return item;
  }
};

template <Access ACCESS, typename T>
__device__ __forceinline__ void store_as(Format format, char* head, int first, int n, const Pack<T>& pack,
                                         float scale) {
  if (format == Format::copy) {
    store_pack<ACCESS>(head, first, n, pack);
  } else if (format == Format::e4m3) {
    Fp8<T, __NV_E4M3>::template store<ACCESS>(head, first, n, pack, scale);
  } else {
    Fp8<T, __NV_E5M2>::template store<ACCESS>(head, first, n, pack, scale);
  }
}

// Rotates two packs, or the pair of their first elements.
template <typename T, bool NEOX, Access ACCESS>
__device__ __forceinline__ void rotate(const RotaryParams& p, const char* row, int frequency, Pack<T>& a, Pack<T>& b) {
  constexpr int size = Pack<T>::size;
  if constexpr (ACCESS == Access::packs) {
    Angles<size> angles;
    p.float32_table ? angles.template load_packs<float>(row, frequency, p.half)
                    : angles.template load_packs<T>(row, frequency, p.half);
    rotate_packs<NEOX>(a, b, angles);
  } else {
    Angles<1> angle;
    p.float32_table ? angle.template load<float>(row, frequency, p.half)
                    : angle.template load<T>(row, frequency, p.half);
    float x[size], y[size];
    a.unpack(x);
    b.unpack(y);
    rotate_pair(x[0], y[0], angle.cos[0], angle.sin[0]);
    a.pack(x);
    b.pack(y);
  }
}

// Normalises the head whose packs `p.rotating` adjacent lanes hold, two each. All of these lanes call this.
template <typename T>
__device__ __forceinline__ void normalise(const RotaryParams& p, const char* weight, const Item& item, Pack<T>& a,
                                          Pack<T>& b) {
  constexpr int size = Pack<T>::size;
  float x[2][size], w[2][size];
  a.unpack(x[0]);
  b.unpack(x[1]);
  load_constants<size>(w[0], reinterpret_cast<const T*>(weight) + item.first);
  load_constants<size>(w[1], reinterpret_cast<const T*>(weight) + item.second);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < size; ++j) sum = fmaf(x[i][j], x[i][j], sum);
  }
  const unsigned lanes = p.rotating, first_lane = threadIdx.x & 31 & ~(lanes - 1);
  const unsigned mask = (lanes == 32 ? ~0u : (1u << lanes) - 1) << first_lane;
  for (unsigned other = lanes / 2; other > 0; other >>= 1) sum += __shfl_xor_sync(mask, sum, other);
  const float scale = rsqrtf(sum / static_cast<float>(p.size) + p.eps);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < size; ++j) x[i][j] = x[i][j] * scale * (w[i][j] + p.weight_bias);
  }
  a.pack(x[0]);
  b.pack(x[1]);
}

constexpr bool kNeox = true, kGptJ = false;
constexpr int kThreads = 128;

template <typename T, bool NEOX, Access ACCESS, bool NORM>
__global__ void __launch_bounds__(kThreads) rotate_and_write(const __grid_constant__ RotaryParams p) {
  const auto [token, unit] = p.work.token_unit();
  if (token >= p.work.tokens || unit >= p.work.units) return;
  const Item item = Item::of<T, NEOX, ACCESS>(p, unit);
  const Rows& rows = item.tensor == Item::query ? p.query : item.tensor == Item::key ? p.key : p.value;
  char* const head = rows.at(token, item.head);
  const bool has_second = item.second >= 0;
  if (ACCESS == Access::packs) {
    prefetch_l2(head + int64_t{item.first} * sizeof(T));
    if (has_second) prefetch_l2(head + int64_t{item.second} * sizeof(T));
  }
  if (unit == 0) {
    prefetch_l2(p.positions.address(token));
    if (token < p.slot_count) prefetch_l2(p.slots.slots.address(token));
  }
  pdl_wait();
  pdl_trigger();

  // With Access::elements a pack holds one element, so the end is the element after it.
  const int end = ACCESS == Access::packs ? p.size : item.first + 1,
            second_end = ACCESS == Access::packs ? p.size : item.second + 1;
  Pack<T> a = load_pack<ACCESS, T>(head, item.first, end), b;
  if (has_second) b = load_pack<ACCESS, T>(head, item.second, second_end);
  float scale = 1.f;
  if (item.tensor != Item::query) scale = (item.tensor == Item::key ? p.k_scale : p.v_scale).load(item.head);
  const int64_t slot = item.tensor != Item::query && token < p.slot_count ? p.slots.slots.load(token) : -1;
  const int64_t position = p.positions.load(token);
  issue_loads();

  const bool is_normed = NORM && item.tensor != Item::value;
  if constexpr (NORM) {
    if (is_normed) normalise(p, item.tensor == Item::query ? p.query_norm : p.key_norm, item, a, b);
  }
  const bool rotates = has_second && static_cast<uint64_t>(position) < static_cast<uint64_t>(p.table_rows);
  if (rotates) rotate<T, NEOX, ACCESS>(p, p.table + position * p.table_row, item.frequency, a, b);
  if (rotates || is_normed) {
    store_pack<ACCESS>(head, item.first, end, a);
    store_pack<ACCESS>(head, item.second, second_end, b);
  }
  if (!p.slots.contains(slot)) return;
  const Cache& cache = item.tensor == Item::key ? p.key_cache : p.value_cache;
  char* const target = cache.at(p.slots.locate(slot), item.head);
  store_as<ACCESS>(p.format, target, item.first, end, a, scale);
  if (has_second) store_as<ACCESS>(p.format, target, item.second, second_end, b, scale);
}

template <typename T, bool NEOX, Access ACCESS, bool NORM = false>
void launch(RotaryParams p, int64_t heads, int64_t kv_heads, DLDevice device) {
  const int step = ACCESS == Access::packs ? Pack<T>::size : 1;
  p.rotating = p.half / step;
  p.unrotated = (p.size - 2 * p.half) / step;
  p.value_items_per_head = p.size / step;
  p.query_items = heads * p.rotating;
  p.key_items = kv_heads * (p.rotating + p.unrotated);
  const int64_t items = p.query_items + p.key_items + kv_heads * p.value_items_per_head;
  if (items == 0) return;
  p.work = WorkSplit(p.work.tokens, static_cast<unsigned>(items), kThreads);
  launch_pdl(rotate_and_write<T, NEOX, ACCESS, NORM>, p.work.grid(), p.work.block(), device, p);
}

// Whether all packs are aligned to their loads and stores.
template <typename T>
bool whole_packs(const RotaryParams& p, int code_bytes) {
  constexpr int size = Pack<T>::size;
  const int table_element = p.float32_table ? 4 : sizeof(T);
  return p.half % size == 0 && p.offset % size == 0 && p.size % size == 0 && aligned(p.query, 16) &&
         aligned(p.key, 16) && aligned(p.value, 16) && aligned(p.key_cache, size * code_bytes) &&
         aligned(p.value_cache, size * code_bytes) && aligned16(p.table) && p.table_row % 16 == 0 &&
         p.half * table_element % 16 == 0;
}

Rows rows_of_heads(const TensorView& x, int64_t head_size) {
  if (x.ndim() == 3) return rows_of(x);
  return {address(x), byte_stride(x, 0), head_size * element_bytes(x)};
}

int64_t heads_of(const TensorView& x, int64_t head_size) { return x.ndim() == 3 ? x.size(1) : x.size(1) / head_size; }

// Whether the lanes of a head are adjacent in a warp, and its packs are all packs of the head.
template <typename T>
bool fits_norm(const RotaryParams& p) {
  const int lanes = p.half / Pack<T>::size;
  return 2 * p.half == p.size && lanes >= 1 && lanes <= 32 && (lanes & (lanes - 1)) == 0 && aligned16(p.query_norm) &&
         aligned16(p.key_norm);
}

void check_norm(const Checks& check, const char* name, const OptionalTensor& norm, const char* other_name,
                const OptionalTensor& other, const TensorView& query, int64_t size) {
  if (!norm.has_value()) return;
  if (!other.has_value()) check.fail(name, std::string("None, as ") + other_name + " is", "a tensor", "TypeError");
  check.dtype(name, *norm, {kBFloat16, kFloat16, kFloat32});
  check.last_contiguous(name, *norm);
  check.shape(name, *norm, &size, 1);
  check.same_dtype(name, *norm, "query", query);
}

void rotary_and_cache(TensorView positions, TensorView query, TensorView key, TensorView value, AnyView head_size,
                      TensorView cos_sin_cache, TensorView key_cache, TensorView value_cache, TensorView slot_mapping,
                      AnyView is_neox, AnyView kv_cache_dtype, OptionalTensor k_scale, OptionalTensor v_scale,
                      AnyView rope_dim_offset, OptionalTensor query_norm, OptionalTensor key_norm, double norm_eps,
                      double norm_weight_bias) {
  const Checks check("rotary_and_cache");
  check_indices(check, "positions", positions);
  const int64_t tokens = positions.size(0);
  const int64_t size = check_rotary_rows(check, &tokens, 1, query, key, head_size);
  check_heads(check, "value", value, &tokens, 1, size);
  check.same_dtype("value", value, "query", query);
  const int64_t heads = heads_of(query, size), kv_heads = heads_of(key, size);
  if (heads_of(value, size) != kv_heads) {
    check.fail("value", std::to_string(kv_heads) + " heads, as key has", std::to_string(heads_of(value, size)));
  }
  const bool neox = check.flag("is_neox", is_neox);
  const int64_t offset = check_rotary_table(check, cos_sin_cache, query, size, rope_dim_offset);
  check_slots(check, slot_mapping, tokens);
  const Format format =
      check_store(check, key.dtype(), kv_heads, size, key_cache, value_cache, kv_cache_dtype, k_scale, v_scale);
  check_norm(check, "query_norm", query_norm, "key_norm", key_norm, query, size);
  check_norm(check, "key_norm", key_norm, "query_norm", query_norm, query, size);
  check.at_least("norm_eps", norm_eps, 0);
  check.number("norm_weight_bias", norm_weight_bias);
  check_memory(check, {{"positions", positions},
                       {"query", query, kWritten},
                       {"key", key, kWritten},
                       {"value", value},
                       {"cos_sin_cache", cos_sin_cache},
                       {"key_cache", key_cache, kWritten},
                       {"value_cache", value_cache, kWritten},
                       {"slot_mapping", slot_mapping},
                       {"k_scale", k_scale},
                       {"v_scale", v_scale},
                       {"query_norm", query_norm},
                       {"key_norm", key_norm}});
  if (tokens == 0) return;
  require_sizes(tokens, heads + 2 * kv_heads, size, key_cache.size(1));

  RotaryParams p;
  p.query = rows_of_heads(query, size);
  p.key = rows_of_heads(key, size);
  p.value = rows_of_heads(value, size);
  p.key_cache = cache_of(key_cache);
  p.value_cache = cache_of(value_cache);
  p.slots = slots_of(slot_mapping, key_cache, {&p.key_cache, &p.value_cache});
  p.format = format;
  if (format != Format::copy) {
    p.k_scale = scale_of(k_scale);
    p.v_scale = scale_of(v_scale);
  }
  p.positions = index_array(positions);
  p.float32_table = element_bytes(cos_sin_cache) != element_bytes(query);
  p.table = address(cos_sin_cache);
  p.table_row = byte_stride(cos_sin_cache, 0);
  p.table_rows = cos_sin_cache.size(0);
  p.work.tokens = static_cast<int>(tokens);
  p.slot_count = static_cast<int>(slot_mapping.size(0));
  p.size = static_cast<int>(size);
  p.half = static_cast<int>(cos_sin_cache.size(1) / 2);
  p.offset = static_cast<int>(offset);
  p.query_norm = address(query_norm);
  p.key_norm = address(key_norm);
  p.eps = static_cast<float>(norm_eps);
  p.weight_bias = static_cast<float>(norm_weight_bias);
  const DeviceGuard guard(positions.device().device_id);
  dispatch_float(query, [&](auto t) {
    using T = decltype(t);
    const DLDevice device = positions.device();
    const bool by_packs = whole_packs<T>(p, element_bytes(key_cache));
    if (query_norm.has_value()) {
      if (!neox || !by_packs || !fits_norm<T>(p)) unsupported("a norm of heads that do not rotate whole, in packs");
      launch<T, kNeox, Access::packs, true>(p, heads, kv_heads, device);
    } else if (by_packs) {
      neox ? launch<T, kNeox, Access::packs>(p, heads, kv_heads, device)
           : launch<T, kGptJ, Access::packs>(p, heads, kv_heads, device);
    } else {
      neox ? launch<T, kNeox, Access::elements>(p, heads, kv_heads, device)
           : launch<T, kGptJ, Access::elements>(p, heads, kv_heads, device);
    }
  });
}

KESTREL_EXPORT(rotary_and_cache, rotary_and_cache);

}  // namespace kestrel::kvcache
