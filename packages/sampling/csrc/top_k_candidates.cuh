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
#include "top_k_row.cuh"

namespace kestrel::sampling {

constexpr int kMaxK = 1024;
constexpr int kMaxRankedK = 128;  // up to it candidates are ranked by comparing all pairs, above it they are sorted
constexpr int kMaxRanked = 256;   // candidates that are ranked
constexpr int kMaxSorted = 2048, kMaxChunks = 256;

// Architectures other than sm_90 would spill with as few registers as two blocks leave.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
constexpr int kTopKBlocksPerSm = 2;
#else
constexpr int kTopKBlocksPerSm = 1;
#endif

// How the shared memory of a block is divided, for any k up to max_k.
struct TopKLayout {
  int chunk_bits;  // elements of a chunk, as a power of two
  int num_chunks = 0, max_candidates, max_groups;
  constexpr __host__ __device__ TopKLayout(int length, int max_k)
      : chunk_bits(10),
        max_candidates(max_k <= kMaxRankedK ? kMaxRanked : kMaxSorted),
        max_groups(max_k + max_k / 8 + 32) {
    while ((length - 1) >> chunk_bits >= kMaxChunks) ++chunk_bits;
    num_chunks = ((length - 1) >> chunk_bits) + 1;
  }
  // Byte offsets: candidates at 0, their masses, the ranked candidates and their masses, the selected groups, the
  // largest element of each group.
  constexpr __host__ __device__ size_t masses() const { return sizeof(u64) * max_candidates; }
  constexpr __host__ __device__ size_t ranked() const { return 2 * masses(); }
  constexpr __host__ __device__ size_t ranked_masses() const { return ranked() + sizeof(u64) * kMaxRanked; }
  constexpr __host__ __device__ size_t groups() const { return ranked_masses() + sizeof(u64) * kMaxRanked; }
  constexpr __host__ __device__ size_t maxima() const { return groups() + sizeof(u32) * ((max_groups + 3) / 4 * 4); }
  constexpr __host__ __device__ size_t bytes() const { return maxima() + sizeof(u32) * 32 * num_chunks; }
};

// A mass, and a place in other bits: masses are smaller than 2^52, and so is the sum of those that are ranked.
struct PlacedMass {
  static constexpr int kShift = 52;
  static __device__ __forceinline__ u64 pack(u64 mass, int place) { return mass | static_cast<u64>(place) << kShift; }
  static __device__ __forceinline__ u64 mass(u64 v) { return v & ((u64{1} << kShift) - 1); }
  static __device__ __forceinline__ int place(u64 v) { return static_cast<int>(v >> kShift); }
};

constexpr int kMaxTopKWarps = 8 * kMaxSelectThreads / 32;  // of a cluster

struct alignas(16) TopKScratch {
  SelectScratch select;
  u64 received;               // mbarrier of the first block
  u64 ranges[kMaxTopKWarps];  // a TopKRange of each warp of the cluster
  u32 largest;                // element of the row
  u32 num_groups, num_larger_groups, num_candidates, num_larger;
  u32 least_maximum, num_above_least;  // see narrow()
  int last_chunk;
  u32 random_word;
  int num_kept;
  u64 point, row_mass;
  float softmax_sum;
  int drawn;  // the place of the drawn element in descending order
};

// Keys of values: the smallest maximum of a segment, of those that reach kLeastValue, and the largest element.
struct TopKRange {
  u32 least, largest;
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
  __device__ __forceinline__ bool ranks() const { return layout.max_candidates == kMaxRanked; }
  __device__ __forceinline__ u64* ranked() const { return reinterpret_cast<u64*>(memory + layout.ranked()); }
  __device__ __forceinline__ u64* ranked_masses() const {
    return reinterpret_cast<u64*>(memory + layout.ranked_masses());
  }
  __device__ __forceinline__ u64* masses() const { return reinterpret_cast<u64*>(memory + layout.masses()); }
  __device__ __forceinline__ u32* groups() const { return reinterpret_cast<u32*>(memory + layout.groups()); }
  __device__ __forceinline__ u32* maxima() const { return reinterpret_cast<u32*>(memory + layout.maxima()); }

  // Candidates that are ranked are followed by zeros.
  __device__ __forceinline__ void clear_candidates() const {
    if (ranks() && threadIdx.x < kMaxRanked / 2)
      reinterpret_cast<ulonglong2*>(candidates())[threadIdx.x] = make_ulonglong2(0, 0);
  }

  // By every block, before the cluster's arrive().
  __device__ __forceinline__ void init() const {
    if (cluster.block_rank != 0) return;
    scratch->select.init();
    clear_candidates();
    if (threadIdx.x == 0) {
      scratch->num_groups = scratch->num_larger_groups = scratch->num_candidates = scratch->num_larger = 0;
      scratch->row_mass = 0;
      scratch->least_maximum = ~0u, scratch->num_above_least = 0;
      ptx::mbarrier_init(&scratch->received, 1);
      ptx::fence_mbarrier_init();
    }
  }

  // The pass over the row, by the cluster. The first block receives the largest element of every group, and from each
  // warp a TopKRange. Includes the cluster's wait().
  __device__ __forceinline__ void read_row(int k) const {
    GroupMaxReader<kind> reader = {{row, {}}};
    if (cluster.warp < layout.num_chunks) reader.loader.load(cluster.warp << layout.chunk_bits, cluster.lane);
    read_row(
        cluster.warp, k, [&](int chunk) { return reader.read(chunk, chunk + cluster.num_warps, cluster.lane); },
        [](int) {});
  }
  // The same. read(chunk) returns the key of the largest element of this lane's group, send(chunk) may send more of it.
  template <typename Read, typename Send>
  __device__ __forceinline__ void read_row(int first_chunk, int k, Read read, Send send) const {
    const int full_chunks = row.length >> row.chunk_bits;
    // Lanes per segment, so few that there are at least k segments.
    int segment_bits = 5;
    while (segment_bits > 0 && full_chunks << (5 - segment_bits) < k) --segment_bits;
    const u32 to = ptx::map_shared(ptx::shared_address(maxima()), 0),
              range_to = ptx::map_shared(ptx::shared_address(&scratch->ranges[cluster.warp]), 0),
              received = ptx::map_shared(ptx::shared_address(&scratch->received), 0);
    u32 least = 0xffffffffu, most = 0;
    bool first = true;
#pragma unroll 1
    for (int chunk = first_chunk; first || chunk < layout.num_chunks; chunk += cluster.num_warps) {
      const u32 own = chunk < layout.num_chunks ? read(chunk) : 0;
      if (first) cluster.wait();
      first = false;
      if (chunk >= layout.num_chunks) break;
      const int group = chunk * 32 + cluster.lane;
      if (cluster.size > 1) {
        ptx::store_async(to + 4 * group, own, received);
      } else {
        maxima()[group] = own;
      }
      send(chunk);
      const u32 of_chunk = __reduce_max_sync(kAllLanes, own);
      most = max(most, of_chunk);
      u32 of_segment = of_chunk;
      if (segment_bits < 5) {
        of_segment = own;
#pragma unroll 1
        for (int distance = 1; distance < 1 << segment_bits; distance *= 2)
          of_segment = max(of_segment, __shfl_xor_sync(kAllLanes, of_segment, distance));
        of_segment = __reduce_min_sync(kAllLanes, of_segment >= Row::kLeastValue ? of_segment : 0xffffffffu);
      }
      if (of_segment >= Row::kLeastValue) least = min(least, of_segment);
    }
    const u64 range = static_cast<u64>(most) << 32 | least;
    if (cluster.lane != 0) return;
    if (cluster.size > 1) {
      ptx::store_async(range_to, range, received);
    } else {
      scratch->ranges[cluster.warp] = range;
    }
  }

  // The rest is by the first block. Waits for what read_row() sends, and for `more_bytes`.
  __device__ __forceinline__ TopKRange receive(int more_bytes = 0) const {
    if (cluster.size > 1) {
      if (threadIdx.x == 0)
        ptx::mbarrier_arrive_expect_tx(&scratch->received,
                                       128 * layout.num_chunks + 8 * cluster.num_warps + more_bytes);
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

  // Collects the k largest elements (all elements with mass, if fewer) and possibly more, up to max_candidates. Calls
  // write(place, key) for each and returns their number. Few elements are loaded by the last warp, which therefore has
  // time for other_work(), called by all threads.
  template <typename Write>
  __device__ __forceinline__ int collect(int k, const TopKRange& range, Write write) const {
    return collect(k, range, write, [] {});
  }
  template <typename Write, typename OtherWork>
  __device__ __forceinline__ int collect(int k, const TopKRange& range, Write write, OtherWork other_work) const {
    const u32 few_groups = k + k / 8 + 32, max_groups = layout.max_groups;
    const u32 num_maxima = 32 * layout.num_chunks, last = static_cast<u32>(layout.num_chunks - 1);
    u64 low = static_cast<u64>(Row::kLeastKey) << 32;
    if (num_maxima > few_groups) low = static_cast<u64>(find_bound(k, range)) << 32;
    choose_groups(low, max_groups);
    const u32 num_chosen = scratch->num_groups;
    // Many groups have equal or nearly equal maxima. As many as the threads load at once need not be narrowed.
    if (num_chosen > min(max(few_groups, row.groups_at_once()), max_groups)) {
      const u64 narrowed = narrow(k, low);
      if (narrowed != low || num_chosen > max_groups) {
        low = narrowed != low ? narrowed : select_groups(k, max_groups, static_cast<u32>(low >> 32), range);
        if (static_cast<u32>(low) > last) low = ((low >> 32) + 1) << 32;  // no such chunk
        if (threadIdx.x == 0) scratch->num_groups = 0;
        __syncthreads();
        choose_groups(low, max_groups);
      }
    }
    other_work();
    const int num_groups = static_cast<int>(scratch->num_groups);
    // Of the elements equal to the smallest of these maxima, those up to the last chunk of an equal maximum suffice.
    const int last_chunk = layout.num_chunks - 1 - static_cast<int>(static_cast<u32>(low));
    low = low >> 32 << 32 | static_cast<u32>(max(0, row.length - ((last_chunk + 1) << layout.chunk_bits)));
    // The second iteration is rare: it runs if too many elements are equal or nearly equal.
#pragma unroll 1
    for (;;) {
      const int count = append(low, num_groups, write);
      if (count <= layout.max_candidates) return count;
      const u32 num_larger = scratch->num_larger, last = static_cast<u32>(row.length - 1);
      const bool equal = num_larger < k;
      const u64 high = static_cast<u64>(equal ? static_cast<u32>(low >> 32) : range.largest) << 32 | last;
      const auto for_each_element = [&](auto visit) {
        row.for_each_four(groups(), num_groups, [&](const u32(&keys)[4], const int (&indices)[4]) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (indices[e] < row.length) visit(row.key(keys[e], indices[e]));
          }
        });
      };
      low =
          select(&scratch->select, low, high, last, equal ? num_larger : 0, k, layout.max_candidates, for_each_element);
      if (threadIdx.x == 0) scratch->num_candidates = 0;
      clear_candidates();
      __syncthreads();
    }
  }

  // The collected candidates in descending order: ranked or sorted. places_masses: those that are ranked put their
  // masses, with their places in the order of ids, into ranked_masses().
  template <bool places_masses>
  __device__ __forceinline__ u64* ordered(int count) const {
    u64* const keys = candidates();
    if (!ranks()) {
      sort_descending(keys, count);
      return keys;
    }
    u64* const to = ranked();
    rank_keys(keys, count, [&](int n, int place, int id_place) {
      to[place] = keys[n];
      if (places_masses) ranked_masses()[place] = PlacedMass::pack(masses()[n], id_place);
    });
    __syncthreads();
    return to;
  }

  // A lower bound of the k-th largest maximum of a group, which few more than k groups reach if values differ: that of
  // the maxima of eight groups, or of those of groups if there are too few.
  __device__ __forceinline__ u32 find_bound(int k, const TopKRange& range) const {
    const u32* const of_group = maxima();
    const int num_eights = 4 * layout.num_chunks;
    const bool by_eights = num_eights >= 3 * k;
    // `least` is above `largest` where no segment has a value.
    const u32 low = range.least <= range.largest ? max(range.least, Row::kLeastKey) : Row::kLeastKey;
    const ValueRange values = select_values(&scratch->select, low, range.largest, k, [&](auto visit) {
#pragma unroll 2
      for (int i = threadIdx.x; i < num_eights; i += blockDim.x) {
        const uint4 a = reinterpret_cast<const uint4*>(of_group)[2 * i],
                    b = reinterpret_cast<const uint4*>(of_group)[2 * i + 1];
        if (by_eights) {
          visit(max(max(max(a.x, a.y), max(a.z, a.w)), max(max(b.x, b.y), max(b.z, b.w))));
        } else {
          visit(a.x), visit(a.y), visit(a.z), visit(a.w), visit(b.x), visit(b.y), visit(b.z), visit(b.w);
        }
      }
    });
    return values.reach >= k ? values.low : Row::kLeastKey;
  }

  // Lists the groups whose maxima reach `low`, as far as they fit. The lower half of `low` orders equal maxima by
  // chunk.
  __device__ __forceinline__ void choose_groups(u64 low, u32 max_groups) const {
    const u32 num_maxima = 32 * layout.num_chunks, last = static_cast<u32>(layout.num_chunks - 1);
    u32 chosen = 0;  // four bits for each load, up to eight loads
    int shift = 0;
#pragma unroll 2
    for (u32 i = 4 * threadIdx.x; i < num_maxima; i += 4 * blockDim.x, shift += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(maxima() + i);
      const u32 least = static_cast<u32>(low >> 32) + (last - (i >> 5) < static_cast<u32>(low));
      chosen |= ((four.x >= least) | (four.y >= least) << 1 | (four.z >= least) << 2 | (four.w >= least) << 3) << shift;
    }
    u32 place = append_place<6>(&scratch->num_groups, __popc(chosen), cluster.lane);
    for (; chosen != 0; chosen &= chosen - 1, ++place) {
      const int bit = __ffs(chosen) - 1;
      if (place < max_groups) groups()[place] = 4 * (threadIdx.x + bit / 4 * blockDim.x) + bit % 4;
    }
    __syncthreads();
  }

  // Where many groups reach `low` because their maxima are equal, the key of a maximum and a chunk that fewer reach,
  // but at least k: of the groups with the smallest of these maxima, those of the first chunks suffice. Otherwise
  // `low`.
  __device__ __forceinline__ u64 narrow(int k, u64 low) const {
    const u32 num_maxima = 32 * layout.num_chunks, least_value = static_cast<u32>(low >> 32);
    const auto for_each_maximum = [&](auto visit) {
#pragma unroll 1
      for (u32 i = 4 * threadIdx.x; i < num_maxima; i += 4 * blockDim.x) {
        const uint4 four = *reinterpret_cast<const uint4*>(maxima() + i);
        const u32 own[4] = {four.x, four.y, four.z, four.w};
        visit(own, i >> 5);
      }
    };
    u32 least = ~0u;
    for_each_maximum([&](const u32(&own)[4], u32) {
#pragma unroll
      for (int e = 0; e < 4; ++e) least = min(least, own[e] >= least_value ? own[e] : ~0u);
    });
    least = __reduce_min_sync(kAllLanes, least);
    if (cluster.lane == 0) atomicMin(&scratch->least_maximum, least);
    __syncthreads();
    least = scratch->least_maximum;
    u32* const of_chunk = scratch->select.bins;  // groups with this maximum
    u32 above = 0;
    for_each_maximum([&](const u32(&own)[4], u32 chunk) {
      u32 equal = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) above += own[e] > least, equal += own[e] == least;
      if (equal > 0) atomicAdd(&of_chunk[chunk], equal);
    });
    above = __reduce_add_sync(kAllLanes, above);
    if (cluster.lane == 0 && above > 0) atomicAdd(&scratch->num_above_least, above);
    __syncthreads();
    above = scratch->num_above_least;
    if (threadIdx.x < 32) {
      constexpr int kOwn = kMaxChunks / 32;
      u32 sum = 0;
#pragma unroll
      for (int c = 0; c < kOwn; ++c) sum += of_chunk[kOwn * cluster.lane + c];
      u32 up_to = sum;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const u32 before = __shfl_up_sync(kAllLanes, up_to, distance);
        if (cluster.lane >= distance) up_to += before;
      }
      u32 running = above + up_to - sum;
#pragma unroll
      for (int c = 0; c < kOwn; ++c) {
        const u32 next = running + of_chunk[kOwn * cluster.lane + c];
        if (running < k && next >= k) scratch->last_chunk = kOwn * cluster.lane + c;
        running = next, of_chunk[kOwn * cluster.lane + c] = 0;
      }
    }
    __syncthreads();
    if (above >= k) return low;
    return static_cast<u64>(least) << 32 | static_cast<u32>(layout.num_chunks - 1 - scratch->last_chunk);
  }

  // The key of a maximum and a chunk that at least k and at most max_groups groups reach, after choose_groups(low <<
  // 32). Of equal maxima, those of the first chunks have the largest keys.
  __device__ __forceinline__ u64 select_groups(int k, u32 max_groups, u32 low, const TopKRange& range) const {
    const u32 num_maxima = 32 * layout.num_chunks, last = static_cast<u32>(layout.num_chunks - 1);
    const u32* const of_group = maxima();
    const auto count_above = [&](u32 value) {
      int above = 0;
#pragma unroll 2
      for (u32 i = 4 * threadIdx.x; i < num_maxima; i += 4 * blockDim.x) {
        const uint4 four = *reinterpret_cast<const uint4*>(of_group + i);
        above += (four.x > value) + (four.y > value) + (four.z > value) + (four.w > value);
      }
      above = __reduce_add_sync(kAllLanes, above);
      if (cluster.lane == 0 && above > 0) atomicAdd(&scratch->num_larger_groups, above);
      __syncthreads();
      return scratch->num_larger_groups;
    };
    ValueRange values = {low, low, count_above(low), ~0u};
    if (values.above >= k) {  // not only equal ones are too many
      values = select_values(&scratch->select, low, range.largest, k, [&](auto visit) {
#pragma unroll 2
        for (u32 i = 4 * threadIdx.x; i < num_maxima; i += 4 * blockDim.x) {
          const uint4 four = *reinterpret_cast<const uint4*>(of_group + i);
          visit(four.x), visit(four.y), visit(four.z), visit(four.w);
        }
      });
    }
    const u64 first = static_cast<u64>(values.low) << 32;
    if (values.reach <= max_groups) return first;
    return select(&scratch->select, first, static_cast<u64>(values.high) << 32 | last, last, values.above, k,
                  max_groups, [&](auto visit) {
#pragma unroll 2
                    for (u32 i = 4 * threadIdx.x; i < num_maxima; i += 4 * blockDim.x) {
                      const uint4 four = *reinterpret_cast<const uint4*>(of_group + i);
                      const u32 rest = last - (i >> 5);
                      visit(static_cast<u64>(four.x) << 32 | rest), visit(static_cast<u64>(four.y) << 32 | rest);
                      visit(static_cast<u64>(four.z) << 32 | rest), visit(static_cast<u64>(four.w) << 32 | rest);
                    }
                  });
  }

  // Appends the elements of the groups that reach `low` to the candidates, as far as they fit. Returns their number.
  template <typename Write>
  __device__ __forceinline__ int append(u64 low, int num_groups, Write write) const {
    u32 num_larger = 0;
    row.for_each_four(groups(), num_groups, [&](const u32(&keys)[4], const int (&indices)[4]) {
      u32 chosen = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool is_element = indices[e] < row.length;
        chosen |= static_cast<u32>(is_element && row.key(keys[e], indices[e]) >= low) << e;
        num_larger += is_element && keys[e] > static_cast<u32>(low >> 32);
      }
      u32 place = append_place<3>(&scratch->num_candidates, __popc(chosen), cluster.lane);
      // One loop for all elements: most lanes have none or one, and code that runs once is bound by its fetches.
#pragma unroll 1
      for (; chosen != 0; chosen &= chosen - 1, ++place) {
        const int e = __ffs(chosen) - 1;
        const u32 of_value = e < 2 ? (e == 0 ? keys[0] : keys[1]) : (e == 2 ? keys[2] : keys[3]);
        const int index = indices[0] + e * row.stride();
        if (place < layout.max_candidates) {
          const u64 key = row.key(of_value, index);
          candidates()[place] = key;
          write(place, key);
        }
      }
    });
    num_larger = __reduce_add_sync(kAllLanes, num_larger);
    if (cluster.lane == 0 && num_larger > 0) atomicAdd(&scratch->num_larger, num_larger);
    __syncthreads();
    return static_cast<int>(scratch->num_candidates);
  }
};

}  // namespace kestrel::sampling
