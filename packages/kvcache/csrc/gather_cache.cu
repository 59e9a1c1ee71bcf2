// gather_cache: the keys and values of one sequence from a paged cache of any format.
//
// out[i, head, :] = code * scale or (code - zero) * scale, of slot i % P of page block_table[i / P]; 0 where there is
// no such page. A thread reads 8 elements of a key and of the value; rows share or split blocks of 128 threads. Nothing
// is constant: the table is prefetched into L2 before the PDL wait, and everything is read after it.

#include <kestrel/export.h>
#include <kestrel/pdl.cuh>

#include "host.h"
#include "int4.cuh"
#include "work_split.cuh"

namespace kestrel::kvcache {

enum class Storage { bf16, fp16, float32, e4m3, e5m2, int8, int4 };

constexpr int kChunk = 8;  // elements per thread

struct Source {
  Cache cache;
  Storage stored = Storage::bf16;
  Scale fp8;
  Cache scales, zeros;  // INT8: float32 per token and head. INT4: fp16, per token and head or, for keys, per channel
  bool per_channel = false;
  Cache tail;  // of INT4 keys
  Storage tail_stored = Storage::bf16;
};

struct GatherParams {
  Source key, value;
  char *key_out = nullptr, *value_out = nullptr;
  const int* table = nullptr;
  const int* sequence = nullptr;  // INT4: the row of the tail
  int64_t sequence_count = 0, blocks = 0;
  int pages = 0;  // entries of the table
  FastDiv page;   // P
  FastDiv chunks_per_head;
  int size = 0;
  int tail_start = 0;  // INT4: keys from this one on are in the tail
  WorkSplit work;      // over tokens and the chunks of their heads
};

template <Access ACCESS, int bytes>
__device__ __forceinline__ void load_bytes(uint32_t (&words)[bytes / 4], const char* p, int count) {
  if constexpr (ACCESS == Access::elements) {
    uint8_t raw[bytes] = {};
#pragma unroll
    for (int i = 0; i < bytes; ++i) {
      if (i < count) raw[i] = static_cast<uint8_t>(p[i]);
    }
    memcpy(words, raw, bytes);
  } else if constexpr (bytes == 4) {
    words[0] = *reinterpret_cast<const uint32_t*>(p);
  } else if constexpr (bytes == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    words[0] = v.x, words[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < bytes / 16; ++i) {
      const uint4 v = load16_streamed(p + 16 * i);
      words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
  }
}

// Elements `first` to `first` + 8 of a head, of those below n.
template <Access ACCESS, typename T>
__device__ __forceinline__ void load_values(float (&x)[kChunk], const char* head, int first, int n) {
  constexpr int packs = kChunk / Pack<T>::size;
#pragma unroll
  for (int i = 0; i < packs; ++i) {
    float part[Pack<T>::size];
    load_pack<ACCESS, T>(head, first + i * Pack<T>::size, n).unpack(part);
#pragma unroll
    for (int j = 0; j < Pack<T>::size; ++j) x[i * Pack<T>::size + j] = part[j];
  }
}

template <Access ACCESS>
__device__ __forceinline__ void load_floats(Storage stored, float (&x)[kChunk], const char* head, int first, int n) {
  if (stored == Storage::bf16) return load_values<ACCESS, __nv_bfloat16>(x, head, first, n);
  if (stored == Storage::fp16) return load_values<ACCESS, __half>(x, head, first, n);
  load_values<ACCESS, float>(x, head, first, n);
}

// The codes of a chunk as floats.
template <Access ACCESS>
__device__ __forceinline__ void load_codes(Storage stored, float (&x)[kChunk], const char* head, int first, int n) {
  if (stored == Storage::int4) {
    uint32_t word[1];
    load_bytes<ACCESS, 4>(word, head + first / 2, (n - first) / 2);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) x[i] = static_cast<float>(word[0] >> (4 * i) & 0xf);
    return;
  }
  uint32_t words[2];
  load_bytes<ACCESS, 8>(words, head + first, n - first);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const uint8_t code = words[i / 4] >> (8 * (i % 4));
    x[i] = stored == Storage::int8   ? static_cast<float>(static_cast<int8_t>(code))
           : stored == Storage::e4m3 ? from_fp8(code, __NV_E4M3)
                                     : from_fp8(code, __NV_E5M2);
  }
}

template <Access ACCESS>
__device__ __forceinline__ void read_chunk(const Source& source, float (&x)[kChunk], CachePosition position, int head,
                                           int first, int n) {
  const char* const codes = source.cache.at(position, head);
  if (source.stored <= Storage::float32) return load_floats<ACCESS>(source.stored, x, codes, first, n);
  load_codes<ACCESS>(source.stored, x, codes, first, n);
  if (source.stored == Storage::int4) {
    // Per channel: [blocks, heads, D]; the stride of heads is in `offset`.
    const CachePosition at = source.per_channel ? CachePosition{position.block, head} : position;
    const char* const scales = source.scales.at(at, source.per_channel ? first : head);
    const char* const zeros = source.zeros.at(at, source.per_channel ? first : head);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (first + i >= n) break;
      const int channel = source.per_channel ? i : 0;
      const float zero = __half2float(reinterpret_cast<const __half*>(zeros)[channel]);
      x[i] = (x[i] - zero) * __half2float(reinterpret_cast<const __half*>(scales)[channel]);
    }
    return;
  }
  float scale = source.fp8.load(head);
  if (source.stored == Storage::int8) scale = *reinterpret_cast<const float*>(source.scales.at(position, head));
#pragma unroll
  for (int i = 0; i < kChunk; ++i) x[i] *= scale;
}

template <Access ACCESS, typename Out>
__device__ __forceinline__ void write_chunk(char* row, const float (&x)[kChunk], int first, int n) {
  constexpr int size = Pack<Out>::size;
#pragma unroll
  for (int i = 0; i < kChunk / size; ++i) {
    float part[size];
#pragma unroll
    for (int j = 0; j < size; ++j) part[j] = x[i * size + j];
    Pack<Out> pack;
    pack.pack(part);
    store_pack<ACCESS>(row, first + i * size, n, pack);
  }
}

template <typename Out, Access ACCESS>
__global__ void __launch_bounds__(128) gather(const __grid_constant__ GatherParams p) {
  const auto [token, unit] = p.work.token_unit();
  if (token >= p.work.tokens || unit >= p.work.units) return;
  const auto [head, chunk] = p.chunks_per_head.divmod(unit);
  const int heads = p.work.units / p.chunks_per_head.divisor, first = chunk * kChunk;
  const auto [entry, offset] = p.page.divmod(token);
  const int64_t row = (int64_t{token} * heads + head) * p.size * static_cast<int>(sizeof(Out));
  if (unit == 0 && entry < p.pages) prefetch_l2(p.table + entry);
  if (unit == 0 && p.sequence) prefetch_l2(p.sequence);
  pdl_wait();
  pdl_trigger();

  int64_t sequence = 0;
  bool present = entry < p.pages;
  if (p.sequence) {
    sequence = *p.sequence;
    present = present && sequence >= 0 && sequence < p.sequence_count;
  }
  const int64_t block = present ? p.table[entry] : -1;
  float key[kChunk] = {}, value[kChunk] = {};
  if (block >= 0 && block < p.blocks) {
    const CachePosition position{block, offset};
    if (p.sequence && token >= p.tail_start) {
      load_floats<ACCESS>(p.key.tail_stored, key, p.key.tail.at({sequence, offset}, head), first, p.size);
    } else {
      read_chunk<ACCESS>(p.key, key, position, head, first, p.size);
    }
    read_chunk<ACCESS>(p.value, value, position, head, first, p.size);
  }
  write_chunk<ACCESS, Out>(p.key_out + row, key, first, p.size);
  write_chunk<ACCESS, Out>(p.value_out + row, value, first, p.size);
}

Storage storage_of(const TensorView& t) {
  const DLDataType dtype = t.dtype();
  if (same_dtype(dtype, kBFloat16)) return Storage::bf16;
  if (same_dtype(dtype, kFloat16)) return Storage::fp16;
  if (same_dtype(dtype, kFloat32)) return Storage::float32;
  if (same_dtype(dtype, kFloat8E5M2)) return Storage::e5m2;
  return same_dtype(dtype, kInt8) ? Storage::int8 : Storage::e4m3;
}

// The alignment that accesses to a chunk need.
int access_bytes(Storage stored) {
  return stored <= Storage::float32 ? 16 : stored == Storage::int4 ? kChunk / 2 : kChunk;
}

void gather_cache(TensorView key_out, TensorView value_out, TensorView key_cache, TensorView value_cache,
                  TensorView block_table, AnyView length, OptionalTensor k_scale, OptionalTensor v_scale,
                  OptionalTensor k_zero, OptionalTensor v_zero, OptionalTensor k_tail, OptionalTensor seq_ids) {
  const Checks check("gather_cache");
  const bool int4 = k_zero.has_value() || v_zero.has_value() || k_tail.has_value() || seq_ids.has_value();
  const bool int8 = !int4 && same_dtype(key_cache.dtype(), kInt8);
  if (int4) {
    check_pair(check, key_cache, value_cache, {kUInt8});
    check_int4(check, key_cache, {kBFloat16, kFloat16, kFloat32}, k_scale, k_zero, v_scale, v_zero, k_tail);
    const int64_t one = 1;
    check_given(check, "seq_ids", seq_ids);
    check.dtype("seq_ids", *seq_ids, {kInt32});
    check.rank("seq_ids", *seq_ids, 1, 1);
    check.shape("seq_ids", *seq_ids, &one, 1);
  } else if (int8) {
    check_pair(check, key_cache, value_cache, {kInt8});
    const int64_t of_tokens[3] = {key_cache.size(0), key_cache.size(1), key_cache.size(2)};
    check_scales(check, kFloat32, of_tokens, {{"k_scale", k_scale}, {"v_scale", v_scale}});
  } else {
    check_pair(check, key_cache, value_cache, {kBFloat16, kFloat16, kFloat32, kFloat8E4M3, kFloat8E5M2, kUInt8});
    for (const Named& one : {Named{"k_scale", k_scale}, Named{"v_scale", v_scale}}) {
      if (one.tensor.has_value() && element_bytes(key_cache) != 1) {
        check.fail(one.name, "None with a cache of values (nothing to scale)", "a tensor");
      }
      check_scale(check, one.name, one.tensor, key_cache.size(2));
    }
  }
  check.dtype("block_table", block_table, {kInt32});
  check.rank("block_table", block_table, 1, 1);
  check.last_contiguous("block_table", block_table);
  const int64_t tokens = check.integer("length", length, 0);
  const int64_t heads = key_cache.size(2), size = key_cache.size(3) * (int4 ? 2 : 1), result[3] = {tokens, heads, size};
  for (const auto& [name, t] : {std::pair("key_out", &key_out), std::pair("value_out", &value_out)}) {
    check.dtype(name, *t, {kBFloat16, kFloat16, kFloat32});
    check.shape(name, *t, result, 3);
    check.contiguous(name, *t);
  }
  check.same_dtype("value_out", value_out, "key_out", key_out);
  check_devices(check, "key_cache", key_cache,
                {{"value_cache", value_cache},
                 {"block_table", block_table},
                 {"k_scale", k_scale},
                 {"v_scale", v_scale},
                 {"k_zero", k_zero},
                 {"v_zero", v_zero},
                 {"k_tail", k_tail},
                 {"seq_ids", seq_ids},
                 {"key_out", key_out},
                 {"value_out", value_out}});
  if (int4) require_int4_page(key_cache);
  if (tokens == 0 || heads == 0 || size == 0) return;
  require_sizes(std::max(tokens, block_table.size(0)), heads, size, key_cache.size(1));

  GatherParams p;
  p.key.cache = cache_of(key_cache);
  p.value.cache = cache_of(value_cache);
  p.key.stored = p.value.stored = int4 ? Storage::int4 : storage_of(key_cache);
  if (int4 || int8) {
    p.key.scales = cache_of(*k_scale);
    p.value.scales = cache_of(*v_scale);
  } else {
    p.key.fp8 = scale_of(k_scale);
    p.value.fp8 = scale_of(v_scale);
  }
  if (int4) {
    p.key.per_channel = true;
    p.key.zeros = cache_of(*k_zero);
    p.value.zeros = cache_of(*v_zero);
    p.key.tail = cache_of(*k_tail);
    p.key.tail_stored = storage_of(*k_tail);
    p.sequence = reinterpret_cast<const int*>(address(seq_ids));
    p.sequence_count = (*k_tail).size(0);
    p.tail_start = static_cast<int>(tokens / kInt4Page * kInt4Page);
  }
  p.key_out = address(key_out);
  p.value_out = address(value_out);
  p.table = reinterpret_cast<const int*>(address(block_table));
  p.blocks = key_cache.size(0);
  p.pages = static_cast<int>(block_table.size(0));
  p.page = FastDiv(static_cast<unsigned>(key_cache.size(1)));
  p.chunks_per_head = FastDiv(static_cast<unsigned>((size + kChunk - 1) / kChunk));
  p.size = static_cast<int>(size);
  p.work = WorkSplit(static_cast<int>(tokens), static_cast<unsigned>(heads) * p.chunks_per_head.divisor, 128);
  const int bytes = access_bytes(p.key.stored);
  const bool packs = size % kChunk == 0 && aligned(p.key.cache, bytes) && aligned(p.value.cache, bytes) &&
                     (!int4 || aligned(p.key.tail, 16)) && aligned16(p.key_out) && aligned16(p.value_out);
  const DeviceGuard guard(key_cache.device().device_id);
  dispatch_float(key_out, [&](auto t) {
    using Out = decltype(t);
    launch_pdl(packs ? gather<Out, Access::packs> : gather<Out, Access::elements>, p.work.grid(), p.work.block(),
               key_cache.device(), p);
  });
}

KESTREL_EXPORT(gather_cache, gather_cache);

}  // namespace kestrel::kvcache
