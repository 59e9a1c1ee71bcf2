// rotary_and_cache: turns queries and keys by their positions, and writes keys and values into a paged cache, in one
// pass.
//
// clang-format off
// Computes:   pairs of R of the D dims of every query and key head, turned by the table's row at the token's position, in place;
//             cache[slot / P, slot % P, head, :] = turned key, and value, as they are or as FP8.
// Built for:  32 heads of 64 in bf16, from one token (latency) to some thousand.
// Must move:  per token 4 H D bytes of queries (read and written), and per KV head D * (4 + 2) bytes of keys, 2 D of values
//             and 4 D (auto) or 2 D (FP8) of cache lines; 3 operations per turned element, 7 per FP8 code.
// Split:      a thread takes one item of a token: a piece (two packs of 16 bytes that turn into one another) of a query or
//             a key, a pack of a key that does not turn, or a pack of a value. Where packs cannot be used, an item is a
//             pair or an element. Up to 256 threads a block; short rows share a block, long ones take several.
// PDL:        only the table is constant, and which row of it is needed stands in positions: nothing is read before the
//             wait. Rows, positions and slots are prefetched into L2 there, which returns no data.
// Measured:   predicted for 1024 tokens of 32 and 8 heads of 128 into FP8: 25 MB and a launch, 7.0 us on an H200; 8.0, 87 % of that
//             (as they are 8.3, 89 % of 7.4; results/h200.json).
// clang-format on

#include <kestrel/rotary.h>
#include <tvm/ffi/function.h>
#include <kestrel/pdl.cuh>
#include <kestrel/rotary.cuh>

#include "host.h"
#include "spread.cuh"

namespace kestrel::kvcache {

struct RotaryParams {
  Rows query, key, value;
  Cache key_cache, value_cache;
  Slots slots;
  Scale k_scale, v_scale;
  Format format = Format::copy;
  const char* positions = nullptr;
  bool wide_positions = false;
  bool wide_table = false;  // float32 where the rows are not
  const char* table = nullptr;
  int64_t table_row = 0;                     // bytes
  int64_t table_rows = 0;                    // positions in the table
  int slotted = 0;                           // tokens that have a slot
  int size = 0, half = 0, offset = 0;        // D, R/2, first dim that turns
  unsigned pieces = 0, rest = 0, packs = 0;  // of a head: of what turns, of what does not, of a value
  unsigned query_items = 0, key_items = 0;   // of a token
  Spread spread;                             // over tokens and all their items
};

// The first element of an item, and of its second pack (-1: there is none).
struct Item {
  enum { query, key, value } row;
  int head, first, second, frequency;

  template <typename T, bool NEOX, bool VECTORS>
  static __device__ __forceinline__ Item of(const RotaryParams& p, unsigned unit) {
    constexpr int step = VECTORS ? Pack<T>::size : 1;
    Item item;
    unsigned piece;
    if (unit < p.query_items) {
      item.row = query;
      item.head = unit / p.pieces;
      piece = unit - item.head * p.pieces;
    } else if (unit < p.query_items + p.key_items) {
      unit -= p.query_items;
      item.row = key;
      item.head = unit / (p.pieces + p.rest);
      piece = unit - item.head * (p.pieces + p.rest);
    } else {
      unit -= p.query_items + p.key_items;
      item.row = value;
      item.head = unit / p.packs;
      piece = unit - item.head * p.packs;
    }
    item.second = -1;
    if (item.row == value) {
      item.first = piece * step;
    } else if (piece < p.pieces) {
      item.frequency = piece * step;
      if constexpr (VECTORS) {
        item.first = p.offset + first_pack<NEOX, T>(item.frequency);
        item.second = p.offset + second_pack<NEOX, T>(item.frequency, p.half);
      } else {
        item.first = p.offset + (NEOX ? item.frequency : 2 * item.frequency);
        item.second = NEOX ? item.first + p.half : item.first + 1;
      }
    } else {  // a dim before or behind those that turn
      item.first = (piece - p.pieces) * step;
      if (item.first >= p.offset) item.first += 2 * p.half;
    }
    return item;
  }
};

template <bool VECTORS, typename T>
__device__ __forceinline__ void store_as(Format format, char* head, int first, int n, const Pack<T>& pack,
                                         float scale) {
  if (format == Format::copy) {
    store_pack<VECTORS>(head, first, n, pack);
  } else if (format == Format::e4m3) {
    Fp8<T, __NV_E4M3>::template store<VECTORS>(head, first, n, pack, scale);
  } else {
    Fp8<T, __NV_E5M2>::template store<VECTORS>(head, first, n, pack, scale);
  }
}

// Turns the two packs of a piece, or the pair that their first elements are.
template <typename T, bool NEOX, bool VECTORS>
__device__ __forceinline__ void turn(const RotaryParams& p, const char* row, int frequency, Pack<T>& a, Pack<T>& b) {
  constexpr int size = Pack<T>::size;
  if constexpr (VECTORS) {
    Angles<size> angles;
    p.wide_table ? angles.template load_packs<float>(row, frequency, p.half)
                 : angles.template load_packs<T>(row, frequency, p.half);
    rotate_piece<NEOX>(a, b, angles);
  } else {
    Angles<1> angle;
    p.wide_table ? angle.template load<float>(row, frequency, p.half) : angle.template load<T>(row, frequency, p.half);
    float x[size], y[size];
    a.unpack(x);
    b.unpack(y);
    rotate_pair(x[0], y[0], angle.cos[0], angle.sin[0]);
    a.pack(x);
    b.pack(y);
  }
}

constexpr int kThreads = 128;

template <typename T, bool NEOX, bool VECTORS>
__global__ void __launch_bounds__(kThreads) rotate_and_write(const __grid_constant__ RotaryParams p) {
  const auto [token, unit] = p.spread.mine();
  if (token >= p.spread.tokens || unit >= p.spread.units) return;
  const Item item = Item::of<T, NEOX, VECTORS>(p, unit);
  const Rows& rows = item.row == Item::query ? p.query : item.row == Item::key ? p.key : p.value;
  char* const head = rows.at(token, item.head);
  const bool has_second = item.second >= 0;
  if (VECTORS) {
    prefetch_l2(head + int64_t{item.first} * sizeof(T));
    if (has_second) prefetch_l2(head + int64_t{item.second} * sizeof(T));
  }
  if (unit == 0) {
    prefetch_l2(p.positions + int64_t{token} * (p.wide_positions ? 8 : 4));
    if (token < p.slotted) prefetch_l2(p.slots.address(token));
  }
  pdl_wait();
  pdl_trigger();

  // One element where packs cannot be used: a row then ends behind it.
  const int end = VECTORS ? p.size : item.first + 1, second_end = VECTORS ? p.size : item.second + 1;
  Pack<T> a = load_pack<VECTORS, T>(head, item.first, end), b;
  if (has_second) b = load_pack<VECTORS, T>(head, item.second, second_end);
  float scale = 1.f;
  if (item.row != Item::query) scale = (item.row == Item::key ? p.k_scale : p.v_scale).of(item.head);
  const int64_t slot = item.row != Item::query && token < p.slotted ? p.slots.read(token) : -1;
  const int64_t position = read_index(p.positions, p.wide_positions, token);
  issue_reads();

  if (has_second && static_cast<uint64_t>(position) < static_cast<uint64_t>(p.table_rows)) {
    turn<T, NEOX, VECTORS>(p, p.table + position * p.table_row, item.frequency, a, b);
    store_pack<VECTORS>(head, item.first, end, a);
    store_pack<VECTORS>(head, item.second, second_end, b);
  }
  if (!p.slots.exists(slot)) return;
  const Cache& cache = item.row == Item::key ? p.key_cache : p.value_cache;
  char* const target = cache.at(p.slots.locate(slot), item.head);
  store_as<VECTORS>(p.format, target, item.first, end, a, scale);
  if (has_second) store_as<VECTORS>(p.format, target, item.second, second_end, b, scale);
}

template <typename T, bool NEOX, bool VECTORS>
void launch(RotaryParams p, int64_t heads, int64_t kv_heads, DLDevice device) {
  const int step = VECTORS ? Pack<T>::size : 1;
  p.pieces = p.half / step;
  p.rest = (p.size - 2 * p.half) / step;
  p.packs = p.size / step;
  p.query_items = heads * p.pieces;
  p.key_items = kv_heads * (p.pieces + p.rest);
  const int64_t items = p.query_items + p.key_items + kv_heads * p.packs;
  if (items == 0) return;
  p.spread = Spread(p.spread.tokens, static_cast<unsigned>(items), kThreads);
  launch_pdl(rotate_and_write<T, NEOX, VECTORS>, p.spread.grid(), p.spread.block(), device, p);
}

// Whether every piece and pack begins at a multiple of what is read and written at once.
template <typename T>
bool whole_packs(const RotaryParams& p, int code_bytes) {
  constexpr int size = Pack<T>::size;
  const int table_element = p.wide_table ? 4 : sizeof(T);
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

void rotary_and_cache(TensorView positions, TensorView query, TensorView key, TensorView value, AnyView head_size,
                      TensorView cos_sin_cache, TensorView key_cache, TensorView value_cache, TensorView slot_mapping,
                      AnyView is_neox, AnyView kv_cache_dtype, OptionalTensor k_scale, OptionalTensor v_scale,
                      AnyView rope_dim_offset) {
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
  check_devices(check, "positions", positions,
                {{"query", query},
                 {"key", key},
                 {"value", value},
                 {"cos_sin_cache", cos_sin_cache},
                 {"key_cache", key_cache},
                 {"value_cache", value_cache},
                 {"slot_mapping", slot_mapping},
                 {"k_scale", k_scale},
                 {"v_scale", v_scale}});
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
  p.positions = address(positions);
  p.wide_positions = wide(positions);
  p.wide_table = element_bytes(cos_sin_cache) != element_bytes(query);
  p.table = address(cos_sin_cache);
  p.table_row = byte_stride(cos_sin_cache, 0);
  p.table_rows = cos_sin_cache.size(0);
  p.spread.tokens = static_cast<int>(tokens);
  p.slotted = static_cast<int>(slot_mapping.size(0));
  p.size = static_cast<int>(size);
  p.half = static_cast<int>(cos_sin_cache.size(1) / 2);
  p.offset = static_cast<int>(offset);
  const DeviceGuard guard(positions.device().device_id);
  dispatch_float(query, [&](auto t) {
    using T = decltype(t);
    const DLDevice device = positions.device();
    if (whole_packs<T>(p, element_bytes(key_cache))) {
      neox ? launch<T, true, true>(p, heads, kv_heads, device) : launch<T, false, true>(p, heads, kv_heads, device);
    } else {
      neox ? launch<T, true, false>(p, heads, kv_heads, device) : launch<T, false, false>(p, heads, kv_heads, device);
    }
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rotary_and_cache, rotary_and_cache);

}  // namespace kestrel::kvcache
