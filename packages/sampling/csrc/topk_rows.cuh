// topk_fwd for rows of a vocabulary and k up to 1024: the k largest of each row, sorted.
//
// A cluster processes a row, as in threshold_rows.cuh. The threshold search of top-k sampling finds the k-th largest;
// the k elements that reach it are gathered in the first block and sorted there.
#pragma once

#include "threshold_search.cuh"

namespace kestrel::sampling {

constexpr int kMaxK = 1024;
constexpr int kSortThreads = 512;

struct TopKParams {
  const char* rows = nullptr;
  int64_t row_bytes = 0;
  int dtype = kRowFloat32;
  int length = 0;
  int cluster_size = 1;
  int elements_per_warp = 0;
  int list_capacity = 0;
  int k = 0;
  bool softmax = false;
  char* values = nullptr;
  int* indices = nullptr;
};

// The measure that locate() sums to find the last NaN to keep: the number of NaN.
struct NotANumber {
  int end;  // of the slice; the padding after it is NaN too and must not count
  u32 count = 0;
  __device__ __forceinline__ void add(float4 v, int i) {
    u64 one[4];
    each(v, i, one);
    count += static_cast<u32>(one[0] + one[1] + one[2] + one[3]);
  }
  __device__ __forceinline__ u64 value() const { return count; }
  __device__ __forceinline__ void each(float4 four, int i, u64 (&one)[4]) const {
    const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) one[e] = i + e < end && isnan(v[e]);
  }
};

// Orders larger values first, then lower indices; NaN, whose upper half is 0, last.
__device__ __forceinline__ u64 sort_key(float v, int i) {
  const u32 value = isnan(v) ? 0u : static_cast<u32>(order_key(v)) ^ 0x80000000u;
  return (static_cast<u64>(value) << 32) | (0xffffffffu - static_cast<u32>(i));
}

// Sorts `size` keys, a power of two, in descending order, by all threads of a block.
__device__ __forceinline__ void sort_descending(u64* keys, int size) {
  for (int run = 2; run <= size; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
        const int low = 2 * pair - (pair & (distance - 1)), high = low + distance;
        const u64 a = keys[low], b = keys[high];
        if ((a < b) == ((low & run) == 0)) keys[low] = b, keys[high] = a;
      }
    }
  }
  __syncthreads();
}

template <Storage storage>
__device__ __forceinline__ void write_sorted(const TopKParams& p, int64_t row_idx, const Float32Slice<storage>& slice,
                                             const u64* keys, SearchScratch* scratch) {
  float total = 1.f, top = 0.f;
  if (p.softmax) {
    top = slice.element(static_cast<int>(0xffffffffu - static_cast<u32>(keys[0])));
    if (threadIdx.x < 32) {
      float sum = 0.f;
      for (int j = threadIdx.x; j < p.k; j += 32) {
        sum += expf(slice.element(static_cast<int>(0xffffffffu - static_cast<u32>(keys[j]))) - top);
      }
#pragma unroll
      for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(kAllLanes, sum, other);
      if (threadIdx.x == 0) scratch->warp_sums[0] = __float_as_uint(sum);
    }
    __syncthreads();
    total = __int_as_float(static_cast<int>(scratch->warp_sums[0]));
  }
  for (int j = threadIdx.x; j < p.k; j += blockDim.x) {
    const int index = static_cast<int>(0xffffffffu - static_cast<u32>(keys[j]));
    const int64_t to = row_idx * p.k + j;
    p.indices[to] = index;
    const float share = p.softmax ? expf(slice.element(index) - top) / total : 0.f;
    if (p.dtype == kRowFloat32) {
      reinterpret_cast<float*>(p.values)[to] = p.softmax ? share : reinterpret_cast<const float*>(slice.row)[index];
    } else if (!p.softmax) {
      reinterpret_cast<uint16_t*>(p.values)[to] = reinterpret_cast<const uint16_t*>(slice.row)[index];
    } else if (p.dtype == kRowFloat16) {
      reinterpret_cast<__half*>(p.values)[to] = __float2half_rn(share);
    } else {
      reinterpret_cast<__nv_bfloat16*>(p.values)[to] = __float2bfloat16_rn(share);
    }
  }
}

template <Storage storage>
__global__ void __launch_bounds__(kSortThreads, 1) topk_rows(const __grid_constant__ TopKParams p) {
  const Cluster cluster(p.cluster_size);
  cluster.arrive();
  const int64_t row_idx = cluster.row_idx();
  char* memory = dynamic_shared_memory();
  SearchScratch* scratch = reinterpret_cast<SearchScratch*>(memory);
  ClusterExchange exchange = {reinterpret_cast<u64*>(memory + sizeof(SearchScratch)), 0};
  float* candidates =
      reinterpret_cast<float*>(memory + sizeof(SearchScratch) + ClusterExchange::bytes(cluster.num_warps));
  Float32Slice<storage> slice(p.rows + row_idx * p.row_bytes, p.dtype, p.length, p.elements_per_warp, cluster,
                              candidates + p.list_capacity);
  for (int b = threadIdx.x; b < kBins; b += blockDim.x) scratch->bins[b] = 0;
  if (threadIdx.x < 2) scratch->num_candidates[threadIdx.x] = 0;
  pdl_wait();
  pdl_trigger();

  float most = -INFINITY;
  u32 numbers = 0;
  slice.read(cluster.lane, [&](const auto& v) {
    constexpr int size = sizeof(v) / sizeof(float);
#pragma unroll
    for (int e = 0; e < size; ++e) most = fmaxf(most, v[e]), numbers += !isnan(v[e]);
  });
  cluster.wait();
  exchange.broadcast(cluster, 0, static_cast<u32>(__reduce_max_sync(kAllLanes, order_key(most))));
  exchange.broadcast(cluster, 1, __reduce_add_sync(kAllLanes, numbers));
  exchange.sync(cluster);
  WeightFn<Kind::scores> weight_fn;
  weight_fn.top = from_order_key(exchange.max(cluster, 0));
  const int all_numbers = static_cast<int>(exchange.sum(cluster, 1));

  // What is kept: numbers, and if there are fewer than k, NaN up to an index.
  ThresholdSearch<Kind::scores, storage> search = {cluster, slice,      weight_fn,      exchange,
                                                   scratch, candidates, p.list_capacity};
  KeptSet kept;
  int last_nan = -1;
  if (p.k < all_numbers) {
    search.template histogram_row<SumMass::no>(/*histogram=*/true);
    if (cluster.block_rank == 0) {
      search.pivot_estimate().estimate_count_pivots(p.k, kCandidatesPerThread * blockDim.x);
    }
    cluster.sync();
    bool then_done;
    const Range range = {order_key(-INFINITY), order_key(weight_fn.top) + 1, 0};
    kept = search.resolve(search.template search<Measure::count>(range, p.k, scratch->pivots[0][0],
                                                                 scratch->pivots[0][1], u64{1} << 32, &then_done));
  } else if (p.k > all_numbers) {
    last_nan = search.locate_for_all(NotANumber{min(p.length, slice.end)}, p.k - all_numbers - 1);
  }

  // The kept elements go to the first block, in the order of the warps, and are sorted there.
  const auto is_kept = [&](float v, int i) { return kept.has(v, i) || (isnan(v) && i <= last_nan); };
  u32 mine = 0;
  slice.for_each_tile(cluster.lane, [&](float4 four, int i) {
    const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) mine += i + e < p.length && i < slice.end && is_kept(v[e], i + e);
  });
  u32 place = mine;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u32 below = __shfl_up_sync(kAllLanes, place, distance);
    if (cluster.lane >= distance) place += below;
  }
  exchange.broadcast(cluster, 0, __shfl_sync(kAllLanes, place, 31));
  exchange.sync(cluster);
  place += static_cast<u32>(exchange.sum_range(cluster, 0, 0, cluster.warp)) - mine;
  u64* keys = reinterpret_cast<u64*>(cluster.map_shared(candidates, 0));  // overwrites the candidates
  int size = 2;
  while (size < p.k) size *= 2;
  slice.for_each_tile(cluster.lane, [&](float4 four, int i) {
    const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (i + e < p.length && i < slice.end && is_kept(v[e], i + e)) keys[place++] = sort_key(v[e], i + e);
    }
  });
  if (cluster.block_rank == 0) {
    for (int j = p.k + threadIdx.x; j < size; j += blockDim.x) keys[j] = 0;
  }
  cluster.sync();
  if (cluster.block_rank != 0) return;
  sort_descending(keys, size);
  write_sorted(p, row_idx, slice, keys, scratch);
}

}  // namespace kestrel::sampling
