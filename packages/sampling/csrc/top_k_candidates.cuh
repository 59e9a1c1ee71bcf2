// The k largest elements of a row, exactly and in one pass over it, whatever its values.
//
// A cluster reads the row in chunks of 1024 elements, of more in rows longer than a vocabulary. A lane keeps the
// largest of its elements of a chunk, a group of 32. The k largest elements of the row lie in the k groups with the
// largest maxima, if groups with equal maxima come in the order of their chunks and the last chunk is taken whole: each
// of these groups holds an element that precedes all elements of the other groups. The first block selects these groups
// among all maxima, reads them once more and collects the elements that reach the smallest of their maxima.
#pragma once

#include "async_exchange.cuh"
#include "select.cuh"

namespace kestrel::sampling {

constexpr int kMaxK = 1024;
constexpr int kMaxRankedK = 128;  // up to it candidates are ranked by comparing all pairs, above it they are sorted
constexpr int kGroup = 32;        // elements that a lane loads together
constexpr int kTileOfGroups = 32 * kGroup;
constexpr int kMaxRanked = 256;  // candidates that are ranked
constexpr int kMaxSorted = 2048;

// Architectures other than sm_90 would spill with as few registers as two blocks leave.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
constexpr int kTopKBlocksPerSm = 2;
#else
constexpr int kTopKBlocksPerSm = 1;
#endif

// How the shared memory of a block is divided, for any k up to max_k.
struct TopKLayout {
  int chunk_bits;  // elements of a chunk, as a power of two; there are at most 256 chunks
  int num_chunks, max_candidates, max_groups;
  __host__ __device__ TopKLayout(int length, int max_k)
      : chunk_bits(10),
        max_candidates(max_k <= kMaxRankedK ? kMaxRanked : kMaxSorted),
        max_groups(max_k + max_k / 8 + 32) {
    while ((length - 1) >> chunk_bits >= 256) ++chunk_bits;
    num_chunks = ((length - 1) >> chunk_bits) + 1;
  }
  // Candidates, the k of them, their masses; the selected groups; the largest element of each group.
  __host__ __device__ size_t ranked() const { return sizeof(u64) * max_candidates; }
  __host__ __device__ size_t masses() const { return ranked() + sizeof(u64) * (max_candidates / 2); }
  __host__ __device__ size_t groups() const { return masses() + sizeof(u64) * (max_candidates / 2); }
  __host__ __device__ size_t maxima() const { return groups() + sizeof(u32) * ((max_groups + 3) / 4 * 4); }
  __host__ __device__ size_t bytes() const { return maxima() + sizeof(u32) * 32 * num_chunks; }
};

constexpr int kMaxTopKWarps = 8 * kMaxSelectThreads / 32;  // of a cluster

struct alignas(16) TopKScratch {
  SelectScratch select;
  u64 received;               // mbarrier of the first block
  u64 ranges[kMaxTopKWarps];  // a TopKRange of each warp of the cluster
  u32 largest;                // element of the row
  u32 num_groups, num_candidates, num_larger;
  u32 random_word;
  int num_kept;
  u64 point;
  u64 row_mass;
  float softmax_sum;
};

// Keys of values: a lower bound of the k-th largest maximum of a group, and the largest element.
struct TopKRange {
  u32 least, largest;
};

// What a row holds decides what NaN means: an invalid row, or (scores) the smallest of all elements.
template <Kind kind>
struct TopKRow {
  static constexpr bool scores = kind == Kind::scores;
  static constexpr u32 kNan = scores ? 0u : 0xffffffffu;
  // Keys below it are those of elements without mass, which are not selected.
  static constexpr u32 kLeastKey = scores ? 0u : kind == Kind::logits ? 0x00800000u : 0x80000001u;

  const char* row;
  int dtype, length;
  int chunk_bits;
  int pack_bits;  // log2 of the neighbours that a lane loads together

  __device__ __forceinline__ TopKRow(const char* row_, int dtype_, int length_, int chunk_bits_)
      : row(row_), dtype(dtype_), length(length_), chunk_bits(chunk_bits_) {
    pack_bits = reinterpret_cast<uintptr_t>(row) % 16 != 0 ? 0 : dtype == kRowFloat32 ? 2 : 3;
  }

  static __device__ __forceinline__ u32 key(float v) {
    return isnan(v) ? kNan : static_cast<u32>(order_key(v + 0.f)) ^ 0x80000000u;
  }
  // Keys of elements order larger values first, then lower indices.
  __device__ __forceinline__ u64 key(u32 of_value, int index) const {
    return static_cast<u64>(of_value) << 32 | static_cast<u32>(length - 1 - index);
  }
  static __device__ __forceinline__ float value(u64 key) {
    return from_order_key(static_cast<int>(static_cast<u32>(key >> 32) ^ 0x80000000u));
  }
  __device__ __forceinline__ int index(u64 key) const { return length - 1 - static_cast<int>(static_cast<u32>(key)); }
  static __device__ __forceinline__ float larger(float a, float b) { return scores ? fmaxf(a, b) : ptx::max_nan(a, b); }
  static __device__ __forceinline__ float padding() { return scores ? not_a_number() : -INFINITY; }

  __device__ __forceinline__ float element(int i) const {
    if (dtype == kRowFloat32) return reinterpret_cast<const float*>(row)[i];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[i];
    return dtype == kRowFloat16 ? __half2float(__ushort_as_half(bits)) : __uint_as_float(static_cast<u32>(bits) << 16);
  }

  // 2^pack_bits neighbours from i on.
  __device__ __forceinline__ void load(int i, float (&v)[8]) const {
    const int size = 1 << pack_bits;
    if (pack_bits != 0 && i + size <= length) {
      const uint4 bits = load16(row + int64_t{i} * (dtype == kRowFloat32 ? 4 : 2));
      if (dtype == kRowFloat32) {
        unpack<float>(bits, v);
      } else if (dtype == kRowFloat16) {
        unpack<__half>(bits, v);
      } else {
        unpack<__nv_bfloat16>(bits, v);
      }
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) v[e] = e < size && i + e < length ? element(i + e) : padding();
    }
  }
  template <typename T>
  static __device__ __forceinline__ void unpack(uint4 bits, float (&v)[8]) {
    float own[Pack<T>::size];
    Pack<T>{bits}.unpack(own);
#pragma unroll
    for (int e = 0; e < Pack<T>::size; ++e) v[e] = own[e];
  }

  // The key of the largest element of this lane's group.
  __device__ __forceinline__ u32 group_max(int chunk, int lane) const {
    float most = padding();
    const int end = min((chunk + 1) << chunk_bits, length);
#pragma unroll 1
    for (int begin = chunk << chunk_bits; begin < end; begin += kTileOfGroups) {
      if (pack_bits == 0) {
#pragma unroll 16
        for (int e = 0; e < kGroup; ++e) {
          const int i = begin + 32 * e + lane;
          most = larger(most, i < length ? element(i) : padding());
        }
      } else if (dtype == kRowFloat32) {
        most = larger(most, max_of_packs<float>(begin, lane));
      } else if (dtype == kRowFloat16) {
        most = larger(most, max_of_packs<__half>(begin, lane));
      } else {
        most = larger(most, max_of_packs<__nv_bfloat16>(begin, lane));
      }
    }
    return key(most);
  }
  template <typename T>
  __device__ __forceinline__ float max_of_packs(int begin, int lane) const {
    constexpr int size = Pack<T>::size, loads = kGroup / size;
    Pack<T> pack[loads];
    float most = padding();
    if (begin + kTileOfGroups <= length) {
#pragma unroll
      for (int u = 0; u < loads; ++u)
        pack[u].bits = load16_streamed(row + int64_t{begin + (u * 32 + lane) * size} * sizeof(T));
#pragma unroll
      for (int u = 0; u < loads; ++u) most = larger(most, max_of(pack[u]));
      return most;
    }
#pragma unroll 1
    for (int i = begin + lane * size; i < length; i += 32 * size) {
      if (i + size <= length) {
        pack[0].bits = load16_streamed(row + int64_t{i} * sizeof(T));
        most = larger(most, max_of(pack[0]));
      } else {
        for (int e = i; e < length; ++e) most = larger(most, element(e));
      }
    }
    return most;
  }
  template <typename T>
  static __device__ __forceinline__ float max_of(const Pack<T>& pack) {
    float v[Pack<T>::size];
    pack.unpack(v);
    float most = v[0];
#pragma unroll
    for (int e = 1; e < Pack<T>::size; ++e) most = larger(most, v[e]);
    return most;
  }

  // f(keys of neighbours, index of the first, how many) for the elements of the listed groups, with all lanes of a warp
  // together.
  template <typename F>
  __device__ __forceinline__ void for_each_pack(const u32* groups, int num_groups, F f) const {
    const int packs_per_group = chunk_bits - 5 - pack_bits;  // as a power of two
    const int all = num_groups << packs_per_group;
    constexpr int kPacks = scores ? 2 : 1;  // loaded together
#pragma unroll 1
    for (int base = threadIdx.x; base - static_cast<int>(threadIdx.x) < all; base += kPacks * blockDim.x) {
      int i[kPacks];
      float v[kPacks][8];
#pragma unroll
      for (int n = 0; n < kPacks; ++n) {
        const int own = base + n * blockDim.x;
        i[n] = length;
        if (own < all) {
          const u32 group = groups[own >> packs_per_group];
          const int pack = own & ((1 << packs_per_group) - 1);
          i[n] = (static_cast<int>(group >> 5) << chunk_bits) + (pack << (5 + pack_bits)) +
                 (static_cast<int>(group & 31) << pack_bits);
        }
        load(i[n], v[n]);
      }
#pragma unroll
      for (int n = 0; n < kPacks; ++n) {
        if (n > 0 && base - static_cast<int>(threadIdx.x) + n * static_cast<int>(blockDim.x) >= all) break;
        u32 keys[8];
        const int size = 1 << pack_bits;
#pragma unroll
        for (int e = 0; e < 8; ++e) keys[e] = e < size ? key(v[n][e]) : 0;
        f(keys, i[n], min(size, length - i[n]));
      }
    }
  }
};

template <Kind kind>
struct TopKSelector {
  using Row = TopKRow<kind>;
  const Cluster& cluster;
  const Row& row;
  TopKScratch* scratch;
  char* memory;
  TopKLayout layout;

  __device__ __forceinline__ u64* candidates() const { return reinterpret_cast<u64*>(memory); }
  __device__ __forceinline__ u64* ranked() const { return reinterpret_cast<u64*>(memory + layout.ranked()); }
  __device__ __forceinline__ u64* masses() const { return reinterpret_cast<u64*>(memory + layout.masses()); }
  __device__ __forceinline__ u32* groups() const { return reinterpret_cast<u32*>(memory + layout.groups()); }
  __device__ __forceinline__ u32* maxima() const { return reinterpret_cast<u32*>(memory + layout.maxima()); }

  // By every block, before the cluster's arrive().
  __device__ __forceinline__ void init() const {
    if (cluster.block_rank != 0) return;
    scratch->select.init();
    if (threadIdx.x == 0) {
      scratch->num_groups = scratch->num_candidates = scratch->num_larger = 0;
      scratch->row_mass = 0;
      ptx::mbarrier_init(&scratch->received, 1);
      ptx::fence_mbarrier_init();
    }
  }

  // The pass over the row, by the cluster. The first block receives the largest element of every group, and of each
  // warp the largest of all and the smallest maximum of segments that cover k groups. Includes the cluster's wait().
  __device__ __forceinline__ void read_row(int k) const {
    const int full_chunks = row.length >> row.chunk_bits;
    // k lanes or more are in different segments, if there are enough.
    int segment = 32;
    while (segment > 1 && full_chunks * (32 / segment) < k) segment /= 2;
    const u32 to = ptx::map_shared(ptx::shared_address(maxima()), 0),
              range_to = ptx::map_shared(ptx::shared_address(&scratch->ranges[cluster.warp]), 0),
              received = ptx::map_shared(ptx::shared_address(&scratch->received), 0);
    u32 least = full_chunks * (32 / segment) < k ? 0 : 0xffffffffu, most = 0;
    bool first = true;
#pragma unroll 1
    for (int chunk = cluster.warp; first || chunk < layout.num_chunks; chunk += cluster.num_warps) {
      const u32 own = chunk < layout.num_chunks ? row.group_max(chunk, cluster.lane) : 0;
      if (first) cluster.wait();
      first = false;
      if (chunk >= layout.num_chunks) break;
      const int group = chunk * 32 + cluster.lane;
      if (cluster.size > 1) {
        ptx::store_async(to + 4 * group, own, received);
      } else {
        maxima()[group] = own;
      }
      most = max(most, own);
      u32 of_segment = own;
#pragma unroll 1
      for (int distance = 1; distance < segment; distance *= 2)
        of_segment = max(of_segment, __shfl_xor_sync(kAllLanes, of_segment, distance));
      if (chunk < full_chunks) least = min(least, of_segment);
    }
    least = __reduce_min_sync(kAllLanes, least), most = __reduce_max_sync(kAllLanes, most);
    const u64 range = static_cast<u64>(most) << 32 | least;
    if (cluster.lane != 0) return;
    if (cluster.size > 1) {
      ptx::store_async(range_to, range, received);
    } else {
      scratch->ranges[cluster.warp] = range;
    }
  }

  // The rest is by the first block. Waits for what read_row() sends.
  __device__ __forceinline__ TopKRange receive() const {
    if (cluster.size > 1) {
      if (threadIdx.x == 0)
        ptx::mbarrier_arrive_expect_tx(&scratch->received, 128 * layout.num_chunks + 8 * cluster.num_warps);
      ptx::mbarrier_wait_cluster(&scratch->received, 0);
    } else {
      __syncthreads();
    }
    TopKRange range = {0xffffffffu, 0};
#pragma unroll 1
    for (int warp = cluster.lane; warp < cluster.num_warps; warp += 32) {
      range.least = min(range.least, static_cast<u32>(scratch->ranges[warp]));
      range.largest = max(range.largest, static_cast<u32>(scratch->ranges[warp] >> 32));
    }
    return {__reduce_min_sync(kAllLanes, range.least), __reduce_max_sync(kAllLanes, range.largest)};
  }

  // Collects the k largest elements (or all with mass, if these are fewer) and perhaps
  // some more, and returns their number. The caller synchronises.
  __device__ __forceinline__ int collect(int k, const TopKRange& range) const {
    const int max_groups = k + k / 8 + 32;
    const u32 num_maxima = 32 * layout.num_chunks;
    const u32* const of_group = maxima();
    const auto for_each_max = [&](auto visit) {
#pragma unroll 2
      for (u32 i = 4 * threadIdx.x; i < num_maxima; i += 4 * blockDim.x) {
        const uint4 four = *reinterpret_cast<const uint4*>(of_group + i);
        const u32 rest = static_cast<u32>(layout.num_chunks - 1) - (i >> 5);
        visit(static_cast<u64>(four.x) << 32 | rest), visit(static_cast<u64>(four.y) << 32 | rest);
        visit(static_cast<u64>(four.z) << 32 | rest), visit(static_cast<u64>(four.w) << 32 | rest);
      }
    };
    u64 low = static_cast<u64>(max(range.least, Row::kLeastKey)) << 32;
    if (static_cast<int>(num_maxima) > max_groups) {
      const u64 high = static_cast<u64>(range.largest) << 32 | static_cast<u32>(layout.num_chunks - 1);
      low = select(&scratch->select, low, high, layout.num_chunks - 1, 0, k, max_groups, for_each_max);
      if (static_cast<u32>(low) >= static_cast<u32>(layout.num_chunks)) low = ((low >> 32) + 1) << 32;  // no such chunk
    }
#pragma unroll 1
    for (u32 base = 0; base < num_maxima; base += 4 * blockDim.x) {
      const u32 i = base + 4 * threadIdx.x;
      u32 chosen = 0;
      if (i < num_maxima) {
        const uint4 four = *reinterpret_cast<const uint4*>(of_group + i);
        const u32 least =
            static_cast<u32>(low >> 32) + (static_cast<u32>(layout.num_chunks - 1) - (i >> 5) < static_cast<u32>(low));
        chosen = (four.x >= least) | (four.y >= least) << 1 | (four.z >= least) << 2 | (four.w >= least) << 3;
      }
      u32 place = append_place(&scratch->num_groups, __popc(chosen), cluster.lane);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (chosen >> e & 1) groups()[place++] = i + e;
      }
    }
    __syncthreads();
    const int num_groups = static_cast<int>(scratch->num_groups);
    // Of the elements equal to the smallest of these maxima, those up to the last chunk of an equal maximum suffice.
    const int last_chunk = layout.num_chunks - 1 - static_cast<int>(static_cast<u32>(low));
    low = low >> 32 << 32 | static_cast<u32>(max(0, row.length - ((last_chunk + 1) << layout.chunk_bits)));
    // A second time if too many elements are equal or nearly equal.
#pragma unroll 1
    for (;;) {
      const int count = append(low, num_groups);
      if (count <= layout.max_candidates) return count;
      const u32 num_larger = scratch->num_larger, last = static_cast<u32>(row.length - 1);
      const bool equal = num_larger < k;
      const u64 high = static_cast<u64>(equal ? static_cast<u32>(low >> 32) : range.largest) << 32 | last;
      const auto for_each_element = [&](auto visit) {
        row.for_each_pack(groups(), num_groups, [&](const u32(&keys)[8], int i, int size) {
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            if (e < size) visit(row.key(keys[e], i + e));
          }
        });
      };
      low =
          select(&scratch->select, low, high, last, equal ? num_larger : 0, k, layout.max_candidates, for_each_element);
      if (threadIdx.x == 0) scratch->num_candidates = 0;
      __syncthreads();
    }
  }

  // Lists the elements of the groups that reach `low`, as far as there is space. Returns their number.
  __device__ __forceinline__ int append(u64 low, int num_groups) const {
    u32 num_larger = 0;
    row.for_each_pack(groups(), num_groups, [&](const u32(&keys)[8], int i, int size) {
      u32 chosen = 0;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        chosen |= static_cast<u32>(e < size && row.key(keys[e], i + e) >= low) << e;
        num_larger += e < size && keys[e] > static_cast<u32>(low >> 32);
      }
      u32 place = append_place(&scratch->num_candidates, __popc(chosen), cluster.lane);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (chosen >> e & 1) {
          if (place < layout.max_candidates) candidates()[place] = row.key(keys[e], i + e);
          ++place;
        }
      }
    });
    num_larger = __reduce_add_sync(kAllLanes, num_larger);
    if (cluster.lane == 0 && num_larger > 0) atomicAdd(&scratch->num_larger, num_larger);
    __syncthreads();
    return static_cast<int>(scratch->num_candidates);
  }

  // The k largest in descending order. write(place, key) is called for each.
  template <typename Write>
  __device__ __forceinline__ const u64* order(int count, int k, Write write) const {
    u64* to = candidates();
    if (layout.max_candidates == kMaxRanked) {
      to = ranked();
      rank_keys(candidates(), count, k, [&](int place, u64 key) { to[place] = key, write(place, key); });
    } else {
      sort_descending(to, count);
      __syncthreads();
      for (int place = threadIdx.x; place < k; place += blockDim.x) write(place, to[place]);
    }
    __syncthreads();
    return to;
  }
};

}  // namespace kestrel::sampling
