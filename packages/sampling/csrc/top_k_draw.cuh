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

// Few candidates: what top-p keeps of the k largest, and write(place) for the one at whose mass the prefix sum in the
// order of ids exceeds the point that is drawn. `masses` are those in descending order of values, with the places in
// the order of ids. `by_id` has space for kMaxRanked. By the first warp, without loops, which would be slow in one
// warp.
template <int kOwn, int kOwnIds, typename Write>
__device__ __forceinline__ void draw_ranked(TopKScratch* scratch, const u64* masses, u64* by_id, int k, u64 row_mass,
                                            u64 q32, Write write) {
  const int lane = threadIdx.x, first = kOwn * lane;
  u64 own[kOwn], sum = 0;
#pragma unroll
  for (int e = 0; e < kOwn; e += 2) {
    const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(masses + first + e);
    own[e] = first + e < k ? two.x : 0, own[e + 1] = first + e + 1 < k ? two.y : 0;
    sum += PlacedMass::mass(own[e]) + PlacedMass::mass(own[e + 1]);
  }
#pragma unroll
  for (int e = 0; e < kOwnIds; e += 2)
    *reinterpret_cast<ulonglong2*>(by_id + kOwnIds * lane + e) = make_ulonglong2(0, 0);
  const u64 up_to = warp_inclusive_sum(sum, lane);
  const u64 goal = max(u64{1}, scale_q32(row_mass ? row_mass : __shfl_sync(kAllLanes, up_to, 31), q32));
  __syncwarp();
  u64 before = up_to - sum, kept_mass = 0;
  u32 kept = 0;
#pragma unroll
  for (int e = 0; e < kOwn; ++e) {
    const u64 mass = PlacedMass::mass(own[e]);
    if (before < goal && first + e < k) {
      ++kept, kept_mass += mass;
      by_id[PlacedMass::place(own[e])] = PlacedMass::pack(mass, first + e);
    }
    before += mass;
  }
  kept = __reduce_add_sync(kAllLanes, kept);
  if (lane == 0) scratch->num_kept = static_cast<int>(kept);
  const u64 point = scale_q32(warp_sum(kept_mass), scratch->random_word);
  __syncwarp();
  u64 of_id[kOwnIds];
  sum = 0;
#pragma unroll
  for (int e = 0; e < kOwnIds; e += 2) {
    const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(by_id + kOwnIds * lane + e);
    of_id[e] = two.x, of_id[e + 1] = two.y;
    sum += PlacedMass::mass(two.x) + PlacedMass::mass(two.y);
  }
  before = warp_inclusive_sum(sum, lane) - sum;
  int place = -1;
#pragma unroll
  for (int e = 0; e < kOwnIds; ++e) {
    const u64 mass = PlacedMass::mass(of_id[e]);
    if (point >= before && point - before < mass) place = PlacedMass::place(of_id[e]);
    before += mass;
  }
  if (place >= 0) write(place);
}

template <typename Write>
__device__ __forceinline__ void draw_ranked(TopKScratch* scratch, const u64* masses, u64* by_id, int k, int count,
                                            u64 row_mass, u64 q32, Write write) {
  if (k <= 64 && count <= 128) {
    draw_ranked<2, 4>(scratch, masses, by_id, k, row_mass, q32, write);
  } else {
    draw_ranked<kMaxRankedK / 32, kMaxRanked / 32>(scratch, masses, by_id, k, row_mass, q32, write);
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
  selector.read_row(k);
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
  u64* const masses = selector.masses();
  const auto set_mass = [&](u32 n, u64 key) { masses[n] = mass_of(weight_fn.scaled(row.value(key) * factor)); };
  const auto write = [&](u64 key) { p.ids[row_idx] = row.index(key), p.valid[row_idx] = true; };
  const int count = selector.collect(k, range, set_mass, [&] {
    if (threadIdx.x == blockDim.x - 32) scratch->random_word = random_word(p.seed.at(row_idx), p.offset.at(row_idx));
  });
  u64* const keys = selector.template ordered</*places_masses=*/true>(count);
  const u64 row_mass = joint ? scratch->row_mass : 0;
  k = min(k, count);
  if (selector.ranks()) {
    if (threadIdx.x >= 32) return;
    draw_ranked(scratch, selector.ranked_masses(), masses, k, count, row_mass, q32,
                [&](int place) { write(keys[place]); });
    return;
  }
  for (int n = threadIdx.x; n < k; n += blockDim.x) set_mass(n, keys[n]);
  __syncthreads();
  if (threadIdx.x < 32) keep_top_p(scratch, masses, k, row_mass, q32);
  __syncthreads();
  draw_by_sort(keys, masses, scratch->num_kept, scratch->point, write);
}

}  // namespace kestrel::sampling
