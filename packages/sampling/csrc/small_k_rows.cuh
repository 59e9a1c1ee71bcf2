// One id per row for top-k with k up to 128, optionally followed by top-p, in rows of more than 4096 elements.
//
// A cluster processes a row. Every block reads the same sample of 4096 elements and takes a pivot that about 4 k
// elements of the row should reach. While the blocks read the row, they collect the elements that reach it as
// candidates. The first block gathers and ranks the candidates and draws. A row with too few or too many candidates is
// deferred to threshold_rows.cuh: its id is -1 until then.
#pragma once

#include "params.cuh"
#include "row_slice.cuh"

namespace kestrel::sampling {

constexpr int kSmallKThreads = 256;
constexpr int kMaxCandidates = 1024;
constexpr int kSampleTiles = 4;  // per warp

// Shared by a block, beside the exchange.
struct alignas(16) SmallKScratch {
  u64 candidates[kMaxCandidates];  // in the first block: of all blocks, in no order
  u64 finalists[kMaxCandidates];   // k of them or a few more, the largest
  float thread_max[kSmallKThreads];
  u64 top_k[kMaxSmallK];  // by rank
  u64 mass[kMaxSmallK];
  u32 num_candidates;
  u32 num_finalists;
  u32 random_word;
};

// Orders larger values first, then lower indices.
__device__ __forceinline__ u64 rank_key(float v, int i) {
  return (static_cast<u64>(static_cast<u32>(order_key(v + 0.f)) ^ 0x80000000u) << 32) | ~static_cast<u32>(i);
}
__device__ __forceinline__ float value_of(u64 key) {
  return from_order_key(static_cast<int>(static_cast<u32>(key >> 32) ^ 0x80000000u));
}
__device__ __forceinline__ u32 index_of(u64 key) { return ~static_cast<u32>(key); }

// A pivot that at least n of the threads' values reach, and few more: by bisection, in every warp.
__device__ __forceinline__ float select_pivot(SmallKScratch* scratch, float of_thread, int n) {
  constexpr int kPerLane = kSmallKThreads / 32, kSteps = 16;
  scratch->thread_max[threadIdx.x] = of_thread;
  __syncthreads();
  int key[kPerLane];
  int top = INT32_MIN, low = INT32_MAX;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    key[j] = order_key(scratch->thread_max[threadIdx.x % 32 + 32 * j]);
    top = max(top, key[j]), low = min(low, key[j]);
  }
  u32 width =
      static_cast<u32>(__reduce_max_sync(kAllLanes, top)) - static_cast<u32>(low = __reduce_min_sync(kAllLanes, low));
#pragma unroll 1
  for (int step = 0; step < kSteps && width > 0; ++step) {
    const u32 half = width - width / 2;
    const int middle = static_cast<int>(static_cast<u32>(low) + half);
    int count = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) count += key[j] >= middle;
    const bool reached = __reduce_add_sync(kAllLanes, count) >= n;
    low = reached ? middle : low;
    width = reached ? width - half : half - 1;
  }
  return from_order_key(low);
}

template <Kind kind>
__global__ void __launch_bounds__(kSmallKThreads, 4) small_k_rows(const __grid_constant__ Params p) {
  constexpr bool logits = kind == Kind::logits;
  using Slice = RowSlice<kind, 4>;
  const Cluster cluster(p.cluster_size);
  cluster.arrive();
  const int64_t row_idx = cluster.row_idx();
  SmallKScratch* scratch = reinterpret_cast<SmallKScratch*>(dynamic_shared_memory());
  ClusterExchange exchange = {reinterpret_cast<u64*>(scratch + 1), 0};
  const char* const elements = p.rows + row_idx * p.row_bytes;
  const Slice row(elements, p.dtype, p.length, p.elements_per_warp, cluster);
  if (threadIdx.x == 0) scratch->num_candidates = scratch->num_finalists = 0;
  pdl_wait();
  pdl_trigger();
  const float temperature = logits ? p.temperature.at(row_idx) : 1.f;
  const int64_t wanted = p.top_k.at(row_idx);
  if (wanted <= 0 || wanted > kMaxSmallK || wanted >= p.length) return cluster.wait();  // another kernel draws this row
  int k = logits && temperature <= 0.f ? 1 : static_cast<int>(wanted);
  const float min_p = p.min_p.at(row_idx), top_p = p.top_p.at(row_idx);
  const bool is_rng_thread = threadIdx.x == kSmallKThreads - 32;
  const u64 seed = is_rng_thread ? p.seed.at(row_idx) : 0, offset = is_rng_thread ? p.offset.at(row_idx) : 0;

  // A pivot that about 4 k elements of the row should reach.
  constexpr int kSampleSize = kSmallKThreads / 32 * kSampleTiles * kTile;
  float sample_max = -INFINITY;
  {
    const int tiles = (p.length + kTile - 1) / kTile;
    typename Slice::template Raw<1> raw[kSampleTiles];
#pragma unroll
    for (int u = 0; u < kSampleTiles; ++u) {
      const int sample = u * (kSmallKThreads / 32) + (threadIdx.x >> 5);
      raw[u] = row.template load<1>(sample * (tiles / (kSampleSize / kTile)) * kTile);
    }
#pragma unroll
    for (int u = 0; u < kSampleTiles; ++u) {
      float v[4];
      row.template unpack<1>(raw[u], v);
      sample_max = fmaxf(sample_max, fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3])));
    }
  }
  const int pivot_rank = 6 + static_cast<int>(4.f * static_cast<float>(k) * kSampleSize / static_cast<float>(p.length));
  // Elements without mass are no candidates. If all elements with mass are candidates, fewer than k suffice.
  const float least = logits ? -3.4028235e38f : 1e-45f;
  const float pivot = select_pivot(scratch, sample_max + 0.f, min(pivot_rank, kSmallKThreads)),
              threshold = fmaxf(pivot, least);

  // Read the row.
  WeightFn<kind> weight_fn;
  weight_fn.set_common(p.length);
  float most = -INFINITY;
  u64 mass = 0;
  u32 num_mine = 0;
  row.template for_each_chunk<4>([&](const float (&v)[Slice::size], int base) {
    MassSum sum;
#pragma unroll
    for (int u = 0; u < Slice::size; u += 4) {
      float largest = v[u];
#pragma unroll
      for (int e = 1; e < 4; ++e) largest = ptx::max_nan(largest, v[u + e]);
      most = ptx::max_nan(most, largest);
      // Once the list overflows, as in a row of equal elements, nothing is appended: the atomics would serialise.
      if (largest >= threshold && *static_cast<volatile u32*>(&scratch->num_candidates) <= kMaxCandidates) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (v[u + e] >= threshold && row.index(base, u + e) < p.length) {
            const u32 place = atomicAdd(&scratch->num_candidates, 1u);
            if (place < kMaxCandidates) scratch->candidates[place] = rank_key(v[u + e], row.index(base, u + e));
            ++num_mine;
          }
        }
      }
    }
    if (!logits && p.joint) {
#pragma unroll
      for (int e = 0; e < Slice::size; ++e) sum.add(fminf(fmaxf(v[e], 0.f), 1.f) * weight_fn.scale);
      mass += sum.value();
    }
  });
  if (is_rng_thread) scratch->random_word = random_word(seed, offset);
  const int largest = __reduce_max_sync(kAllLanes, isnan(most) ? INT32_MAX : order_key(most + 0.f));
  cluster.wait();
  exchange.broadcast(cluster, 0, static_cast<u32>(largest));
  exchange.broadcast(cluster, 1, __reduce_add_sync(kAllLanes, num_mine));
  if (p.joint) exchange.broadcast(cluster, 2, warp_sum(mass));
  exchange.sync(cluster);
  weight_fn.top = from_order_key(exchange.max(cluster, 0));
  const bool first_thread = cluster.block_rank == 0 && threadIdx.x == 0;
  if (!(weight_fn.top > (logits ? -INFINITY : 0.f) && weight_fn.top < INFINITY) || isnan(temperature)) {
    if (first_thread) p.ids[row_idx] = 0, p.valid[row_idx] = false;
    return;
  }
  const int count = static_cast<int>(min(exchange.sum(cluster, 1), u64{kMaxCandidates + 1}));
  const u64 q32 = top_p_q32(top_p);
  const bool of_row = p.joint && q32 < kQ32One;
  if (pivot <= least) k = min(k, count);
  if (count < k || count > kMaxCandidates || (of_row && (logits || min_p > 0.f || !weight_fn.is_common()))) {
    if (first_thread) p.ids[row_idx] = -1;
    return;
  }
  const u64 all = of_row ? exchange.sum(cluster, 2) : 0;
  if (cluster.size > 1) {
    const u32 before =
        static_cast<u32>(exchange.sum_range(cluster, 1, 0, cluster.block_rank * cluster.warps_per_block));
    u64* gathered = cluster.map_shared(scratch, 0)->candidates + before;
    if (cluster.block_rank > 0) {
      for (u32 j = threadIdx.x; j < scratch->num_candidates; j += kSmallKThreads) gathered[j] = scratch->candidates[j];
    }
    cluster.sync();
    if (cluster.block_rank > 0) return;
  }

  // The first block: the ranks, the masses by rank, what top-p keeps, and the id.
  const float factor = !logits && weight_fn.top < 0x1p-60f ? 0x1p64f : 1.f;
  if (logits) weight_fn.set_temperature(temperature <= 0.f ? 1.f : temperature);
  weight_fn.least = logits ? clamp_min_p(min_p) : __fmul_rn(clamp_min_p(min_p), weight_fn.top) * factor;
  weight_fn.top *= factor;
  weight_fn.set_scale(p.length);
  // A pivot that k threads' largest candidates reach leaves few more than k candidates.
  float largest_candidate = -INFINITY;
  for (int j = threadIdx.x; j < count; j += kSmallKThreads)
    largest_candidate = fmaxf(largest_candidate, value_of(scratch->candidates[j]));
  const float final_pivot = select_pivot(scratch, largest_candidate, k);
  for (int j = threadIdx.x; j < count; j += kSmallKThreads) {
    const u64 key = scratch->candidates[j];
    if (value_of(key) >= final_pivot) scratch->finalists[atomicAdd(&scratch->num_finalists, 1u)] = key;
  }
  __syncthreads();
  const int num_finalists = static_cast<int>(scratch->num_finalists);
  for (int j = threadIdx.x; j < num_finalists; j += kSmallKThreads) {
    const u64 key = scratch->finalists[j];
    int above = 0;
#pragma unroll 4
    for (int other = 0; other < num_finalists; ++other) above += scratch->finalists[other] > key;
    if (above < k) {
      scratch->top_k[above] = key;
      scratch->mass[above] = mass_of(weight_fn.scaled(value_of(key) * factor));
    }
  }
  __syncthreads();
  const int rank = threadIdx.x;
  u64 before = 0, kept_mass = 0;
#pragma unroll 2
  for (int other = 0; other < k; ++other) {
    const u64 m = scratch->mass[other];
    before += other < rank ? m : 0;
    kept_mass += m;
  }
  const u64 goal = scale_q32(of_row ? all : kept_mass, q32);
  const int kept = __syncthreads_count(rank < k && (rank == 0 || before < goal));
  if (rank >= kept) return;
  const u32 id = index_of(scratch->top_k[rank]);
  before = kept_mass = 0;
#pragma unroll 2
  for (int other = 0; other < kept; ++other) {
    const u64 m = scratch->mass[other];
    before += index_of(scratch->top_k[other]) < id ? m : 0;
    kept_mass += m;
  }
  const u64 point = scale_q32(kept_mass, scratch->random_word);
  if (point >= before && point - before < scratch->mass[rank]) {
    p.ids[row_idx] = static_cast<int>(id);
    p.valid[row_idx] = true;
  }
}

}  // namespace kestrel::sampling
