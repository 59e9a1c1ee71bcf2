// One id per row for top-k with k up to 1024, optionally followed by top-p, in rows of more than 4096 elements.
//
// A cluster reads the row and its first block selects the k largest elements (top_k_candidates.cuh), whose masses give
// what top-p keeps and the id. If top-p counts the mass of the whole row (joint), the cluster reads the row once more.
#pragma once

#include "params.cuh"
#include "top_k_candidates.cuh"

namespace kestrel::sampling {

// The mass of the row, by the cluster.
template <Kind kind, Kind weight_kind>
__device__ __forceinline__ void sum_row(const TopKSelector<kind>& selector, const WeightFn<weight_kind>& weight_fn,
                                        float factor) {
  const Cluster& cluster = selector.cluster;
  const TopKRow<kind>& row = selector.row;
  MassSum sum;
  const int first = row.stride() == 1 ? 4 * cluster.lane : cluster.lane;
#pragma unroll 4
  for (int tile = cluster.warp * kTile; tile < row.length; tile += cluster.num_warps * kTile) {
    float v[4];
    row.load_four(tile + first, v);
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = weight_fn.scaled(v[e] * factor);
    sum.add(v);
  }
  const u64 of_warp = warp_sum(sum.value());
  if (cluster.lane == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&cluster.map_shared(selector.scratch, 0)->row_mass), of_warp);
  }
  cluster.sync();
}

// What top-p keeps of the k largest, and the point of their mass that is drawn. By the first warp.
__device__ __forceinline__ void keep_top_p(TopKScratch* scratch, const u64* masses, int k, u64 row_mass, u64 q32) {
  const int lane = threadIdx.x, per_lane = (k + 31) / 32, end = min(k, (lane + 1) * per_lane);
  u64 sum = 0;
  for (int n = lane * per_lane; n < end; ++n) sum += masses[n];
  const u64 up_to = warp_inclusive_sum(sum, lane);
  const u64 all = row_mass ? row_mass : __shfl_sync(kAllLanes, up_to, 31);
  const u64 goal = max(u64{1}, scale_q32(all, q32));
  u64 before = up_to - sum, kept_mass = 0;
  u32 kept = 0;
  for (int n = lane * per_lane; n < end; ++n) {
    const u64 mass = masses[n];
    if (before < goal) ++kept, kept_mass += mass;
    before += mass;
  }
  kept = __reduce_add_sync(kAllLanes, kept), kept_mass = warp_sum(kept_mass);
  if (lane == 0)
    scratch->num_kept = static_cast<int>(kept), scratch->point = scale_q32(kept_mass, scratch->random_word);
}

// Few candidates, followed by zeros: each is compared with all others, first by value, for what the filters keep, then by
// id, for the one at whose mass the prefix sum exceeds the point. One thread calls visitor.rank(n, place, key) for
// candidate n, whose place is that in descending order; visitor.keep() if the filters keep it; visitor.draw(n, key) if
// it is drawn. row_mass: 0 unless top-p counts it. `before` has space for kMaxRanked sums.
template <typename Visitor>
__device__ __forceinline__ void draw_by_pairs(TopKScratch* scratch, const u64* keys, const u64* masses, u64* before,
                                              int count, int k, u64 row_mass, u64 q32, const Visitor& visitor) {
  constexpr int kLanes = 8;  // that share two candidates, and load two others each
  constexpr u64 kOne = u64{1} << 52;  // sums of masses are smaller
  const int lane = threadIdx.x % kLanes, pairs = blockDim.x / kLanes;
  const auto two = [](const u64* from, int n) { return *reinterpret_cast<const ulonglong2*>(from + n); };
  const auto sum_of_lanes = [](u64 v) {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) v += __shfl_xor_sync(kAllLanes, v, distance);
    return v;
  };
#pragma unroll 1
  for (int base = 0; base < count; base += 2 * pairs) {
    const int own = base + 2 * (static_cast<int>(threadIdx.x) / kLanes);
    const ulonglong2 key = two(keys, min(own, kMaxRanked - 2));
    u64 first = 0, second = 0;  // the larger candidates, times kOne, and their mass
#pragma unroll 2
    for (int other = 2 * lane; other < count; other += 2 * kLanes) {
      const ulonglong2 others = two(keys, other), mass = two(masses, other);
      first += (others.x > key.x ? mass.x + kOne : 0) + (others.y > key.x ? mass.y + kOne : 0);
      second += (others.x > key.y ? mass.x + kOne : 0) + (others.y > key.y ? mass.y + kOne : 0);
    }
    first = sum_of_lanes(first), second = sum_of_lanes(second);
    if (lane >= 2 || own >= kMaxRanked) continue;
    const int n = own + lane;
    const u64 sum = lane == 0 ? first : second, mass = sum % kOne;
    const int place = static_cast<int>(sum / kOne);
    before[n] = n < count && place < k ? mass : ~u64{0};
    if (n >= count) continue;
    if (place == k - 1) scratch->kept_mass = mass + masses[n];
    visitor.rank(n, place, lane == 0 ? key.x : key.y);
  }
  __syncthreads();
  const u64 goal = max(u64{1}, scale_q32(row_mass ? row_mass : scratch->kept_mass, q32));
#pragma unroll 1
  for (int base = 0; base < count; base += 2 * pairs) {
    const int own = base + 2 * (static_cast<int>(threadIdx.x) / kLanes);
    const ulonglong2 key = two(keys, min(own, kMaxRanked - 2));
    const u32 order[2] = {static_cast<u32>(key.x), static_cast<u32>(key.y)};  // larger for a lower id
    u64 all = 0, first = 0, second = 0;
#pragma unroll 2
    for (int other = 2 * lane; other < count; other += 2 * kLanes) {
      const ulonglong2 others = two(keys, other), before_other = two(before, other);
      ulonglong2 mass = two(masses, other);
      mass.x = before_other.x < goal ? mass.x : 0, mass.y = before_other.y < goal ? mass.y : 0;
      all += mass.x + mass.y;
      first += (static_cast<u32>(others.x) > order[0] ? mass.x : 0) + (static_cast<u32>(others.y) > order[0] ? mass.y : 0);
      second += (static_cast<u32>(others.x) > order[1] ? mass.x : 0) + (static_cast<u32>(others.y) > order[1] ? mass.y : 0);
    }
    all = sum_of_lanes(all), first = sum_of_lanes(first), second = sum_of_lanes(second);
    const int n = own + lane;
    if (lane >= 2 || n >= count || before[n] >= goal) continue;
    visitor.keep();
    const u64 point = scale_q32(all, scratch->random_word), mass = lane == 0 ? first : second;
    if (point >= mass && point - mass < masses[n]) visitor.draw(n, lane == 0 ? key.x : key.y);
  }
}

// Many candidates: sorted by id. `keys` is overwritten.
template <typename Write>
__device__ __forceinline__ void draw_by_sort(u64* keys, const u64* masses, int kept, u64 point, Write write) {
  for (int n = threadIdx.x; n < kept; n += blockDim.x)
    keys[n] = static_cast<u64>(static_cast<u32>(keys[n])) << 32 | static_cast<u32>(n);
  sort_descending(keys, kept);
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x, per_lane = (kept + 31) / 32, end = min(kept, (lane + 1) * per_lane);
  u64 sum = 0;
  for (int n = lane * per_lane; n < end; ++n) sum += masses[static_cast<u32>(keys[n])];
  u64 before = warp_inclusive_sum(sum, lane) - sum;
  for (int n = lane * per_lane; n < end; ++n) {
    const u64 mass = masses[static_cast<u32>(keys[n])];
    if (point >= before && point - before < mass) write(keys[n] >> 32);
    before += mass;
  }
}

// Writes what is drawn.
template <typename Row>
struct DrawnId {
  const Row& row;
  int* id;
  bool* valid;
  __device__ __forceinline__ void rank(int, int, u64) const {}
  __device__ __forceinline__ void keep() const {}
  __device__ __forceinline__ void draw(int, u64 key) const { *id = row.index(key), *valid = true; }
};

template <Kind kind>
__global__ void __launch_bounds__(kMaxSelectThreads, kTopKBlocksPerSm) top_k_draw(const __grid_constant__ Params p) {
  constexpr bool logits = kind == Kind::logits;
  const Cluster cluster(p.cluster_size);
  const int64_t row_idx = cluster.row_idx();
  TopKScratch* const scratch = reinterpret_cast<TopKScratch*>(dynamic_shared_memory());
  const TopKLayout layout(p.length, p.max_top_k);
  const TopKRow<kind> row(p.rows + row_idx * p.row_bytes, p.dtype, p.length, layout.chunk_bits);
  const TopKSelector<kind> selector = {cluster, row, scratch, reinterpret_cast<char*>(scratch + 1), layout};
  selector.init();
  cluster.arrive_release();
  pdl_wait();
  pdl_trigger();
  const float temperature = logits ? p.temperature.at(row_idx) : 1.f;
  const int64_t wanted = p.top_k.at(row_idx);
  if (wanted <= 0 || wanted > kMaxK || wanted >= p.length) return cluster.wait();  // another kernel draws this row
  int k = logits && temperature <= 0.f ? 1 : static_cast<int>(wanted);
  const bool is_rng_thread = cluster.block_rank == 0 && threadIdx.x == blockDim.x - 32;
  const u64 seed = is_rng_thread ? p.seed.at(row_idx) : 0, offset = is_rng_thread ? p.offset.at(row_idx) : 0;
  selector.read_row(k);
  if (is_rng_thread) scratch->random_word = random_word(seed, offset);
  const float min_p = p.min_p.at(row_idx);
  const u64 q32 = top_p_q32(p.top_p.at(row_idx));

  const bool joint = p.joint && q32 < kQ32One;
  TopKRange range = {};
  if (cluster.block_rank == 0) range = selector.receive();
  if (joint) {
    if (cluster.block_rank == 0) scratch->largest = range.largest;
    cluster.sync();
    range.largest = cluster.map_shared(scratch, 0)->largest;
  } else if (cluster.block_rank != 0) {
    return;
  }
  WeightFn<kind> weight_fn;
  weight_fn.top =
      range.largest == TopKRow<kind>::kNan ? not_a_number() : row.value(static_cast<u64>(range.largest) << 32);
  const bool valid = weight_fn.top > (logits ? -INFINITY : 0.f) && weight_fn.top < INFINITY && !isnan(temperature);
  const float factor = !logits && weight_fn.top < 0x1p-60f ? 0x1p64f : 1.f;
  if constexpr (logits) weight_fn.set_temperature(temperature <= 0.f ? 1.f : temperature);
  weight_fn.least = logits ? clamp_min_p(min_p) : __fmul_rn(clamp_min_p(min_p), weight_fn.top) * factor;
  weight_fn.top *= factor;
  weight_fn.set_scale(p.length);
  if (joint) sum_row(selector, weight_fn, factor);
  if (cluster.block_rank != 0) return;
  if (!valid) {
    if (threadIdx.x == 0) p.ids[row_idx] = 0, p.valid[row_idx] = false;
    return;
  }
  u64* const keys = selector.candidates();
  u64* const masses = selector.masses();
  const auto set_mass = [&](u32 n, u64 key) { masses[n] = mass_of(weight_fn.scaled(row.value(key) * factor)); };
  const DrawnId<TopKRow<kind>> drawn = {row, p.ids + row_idx, p.valid + row_idx};
  const int count = selector.collect(k, range, set_mass);
  const u64 row_mass = joint ? scratch->row_mass : 0;
  k = min(k, count);
  if (selector.ranks()) {
    draw_by_pairs(scratch, keys, masses, selector.ranked(), count, k, row_mass, q32, drawn);
    return;
  }
  sort_descending(keys, count);
  for (int n = threadIdx.x; n < k; n += blockDim.x) set_mass(n, keys[n]);
  __syncthreads();
  if (threadIdx.x < 32) keep_top_p(scratch, masses, k, row_mass, q32);
  __syncthreads();
  draw_by_sort(keys, masses, scratch->num_kept, scratch->point, [&](u64 key) { drawn.draw(0, key); });
}

}  // namespace kestrel::sampling
