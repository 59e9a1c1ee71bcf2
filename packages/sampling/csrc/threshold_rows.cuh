// Ids or probabilities by a threshold search: larger k than the other kernels cover, softmax and renormalisation.
//
// A cluster processes a row and holds it as float32 in shared memory where that is large enough.
#pragma once

#include "params.cuh"
#include "threshold_search.cuh"

namespace kestrel::sampling {

// The filters of one row.
struct Filters {
  int64_t top_k;
  u64 top_p;  // in parts of 2^32
  bool joint;
};

template <Kind kind, Storage storage>
__device__ __forceinline__ KeptSet filter(ThresholdSearch<kind, storage>& search, const Filters& filters,
                                          bool has_histogram, u64 all) {
  const Cluster& cluster = search.cluster;
  SearchScratch* scratch = search.scratch;
  const int length = search.slice.length, top = order_key(search.weight_fn.top);
  const bool has_top_k = filters.top_k > 0 && filters.top_k < length, has_top_p = filters.top_p < kQ32One;
  KeptSet kept;
  if (!has_top_k && !has_top_p) return kept;
  if (has_top_k && filters.top_k == 1) return search.resolve({top, 1, UINT32_MAX});

  const bool of_row = has_top_p && (filters.joint || !has_top_k);  // top-p of the row, not of what top-k keeps
  const bool in_registers = search.fits_in_registers();
  if (!has_histogram && of_row) {
    all = search.template histogram_row<SumMass::yes>(/*histogram=*/!in_registers);
  } else if (!has_histogram && !in_registers) {
    search.template histogram_row<SumMass::no>(/*histogram=*/true);
  }
  const u64 goal = max(u64{1}, scale_q32(all, filters.top_p));
  if (!in_registers) {
    if (cluster.block_rank == 0) {
      if (has_top_k) search.pivot_estimate().estimate_count_pivots(filters.top_k, kCandidatesPerThread * blockDim.x);
      if (of_row) search.pivot_estimate().estimate_mass_pivots(all, goal);
    }
    cluster.sync();
  }
  bool then_done = false;
  if (has_top_k) {
    const Range range = {order_key(-INFINITY), top + 1, 0};
    const u64 then_q32 = has_top_p && !filters.joint ? filters.top_p : kQ32One;
    const Threshold threshold =
        in_registers ? search.template search_in_registers<Measure::count>(range, filters.top_k, then_q32, &then_done)
                     : search.template search<Measure::count>(range, filters.top_k, scratch->pivots[0][0],
                                                              scratch->pivots[0][1], then_q32, &then_done);
    kept = search.resolve(threshold);
    if (has_top_p && !filters.joint && !then_done) {
      auto mass = search.mass_of_kept(kept);
      const u64 kept_mass = search.total(mass);
      const Range rest = {threshold.key, top + 1, 0};
      const Threshold nested = search.template search<Measure::mass>(
          rest, max(u64{1}, scale_q32(kept_mass, filters.top_p)), threshold.key, top + 1, kQ32One, &then_done);
      kept = kept.intersect(search.resolve(nested));
    }
  }
  if (of_row) {
    const Range range = {order_key(search.weight_fn.zero_mass_below()), top + 1, 0};
    const Threshold threshold =
        in_registers ? search.template search_in_registers<Measure::mass>(range, goal, kQ32One, &then_done)
                     : search.template search<Measure::mass>(range, goal, scratch->pivots[1][0], scratch->pivots[1][1],
                                                             kQ32One, &then_done);
    kept = kept.intersect(search.resolve(threshold));
  }
  return kept;
}

// Writes the probabilities of a row: the kept weights divided by their sum.
template <Kind kind, Storage storage>
__device__ __forceinline__ void write_probabilities(ThresholdSearch<kind, storage>& search, const KeptSet& kept,
                                                    float* out) {
  auto mass = search.template mass_of_kept<Precision::accurate>(kept);
  const WeightFn<kind>& weight_fn = search.weight_fn;
  const double share = 1048576. / static_cast<double>(search.total(mass)) * static_cast<double>(weight_fn.scale);
  search.slice.for_each_tile(search.cluster.lane, [&](float4 four, int i) {
    const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (i + e >= search.slice.length || i >= search.slice.end) continue;
      const double weight = weight_fn.accurate_weight(v[e]);
      out[i + e] = kept.has(v[e], i + e) ? static_cast<float>(weight * share) : 0.f;
    }
  });
}

// More threads would leave too few registers.
constexpr int kSearchThreads = 512;

template <Kind kind, Storage storage>
__global__ void __launch_bounds__(kSearchThreads, 1) threshold_rows(const __grid_constant__ Params p) {
  constexpr bool logits = kind == Kind::logits;
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
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  // Parameters are loaded before the row, so that their latency overlaps with the loads of the row.
  const float temperature = logits ? p.temperature.at(row_idx) : 1.f;
  const float min_p = p.min_p.at(row_idx), top_p = p.top_p.at(row_idx);
  const int64_t top_k = p.top_k.at(row_idx);
  if (p.largest_other_k > 0 && (top_k <= p.largest_other_k || top_k >= p.length)) return cluster.wait();
  const bool draws = p.ids && threadIdx.x == blockDim.x - 32;
  const u64 seed = draws ? p.seed.at(row_idx) : 0, offset = draws ? p.offset.at(row_idx) : 0;

  // Read the row. For probabilities also sum the mass and build the histogram, assuming the common power of two.
  WeightFn<kind> weight_fn;
  weight_fn.set_common(p.length);
  ThresholdSearch<kind, storage> search = {cluster, slice, weight_fn, exchange, scratch, candidates, p.list_capacity};
  const bool early = !logits && !(min_p > 0.f);
  float most = -INFINITY;
  u64 mass = 0;
  slice.read(cluster.lane, [&](const auto& v) {
#pragma unroll
    for (int e = 0; e < static_cast<int>(sizeof(v) / sizeof(float)); ++e) most = ptx::max_nan(most, v[e]);
  });
  if (early) mass = search.template histogram_slice<SumMass::yes>(!search.fits_in_registers());
  if (draws) scratch->random_word = random_word(seed, offset);
  const int largest = __reduce_max_sync(kAllLanes, isnan(most) ? INT32_MAX : order_key(most));
  cluster.wait();
  exchange.broadcast(cluster, 0, static_cast<u32>(largest));
  if (early) exchange.broadcast(cluster, 1, mass);
  exchange.sync(cluster);
  weight_fn.top = from_order_key(exchange.max(cluster, 0));

  const bool valid = weight_fn.top > (logits ? -INFINITY : 0.f) && weight_fn.top < INFINITY && !isnan(temperature);
  if (!valid) {
    if (p.ids && cluster.warp == 0 && cluster.lane == 0) p.ids[row_idx] = 0, p.valid[row_idx] = false;
    if (p.out) {
      const float all = !logits && weight_fn.top <= 0.f ? 0.f : not_a_number();
      for (int i = slice.begin + cluster.lane; i < min(slice.end, p.length); i += 32)
        p.out[row_idx * p.out_stride + i] = all;
    }
    return;
  }
  const Filters filters = {logits && temperature <= 0.f ? 1 : top_k, top_p_q32(top_p), p.joint};
  if constexpr (logits) {
    weight_fn.set_temperature(temperature <= 0.f ? 1.f : temperature);
    weight_fn.least = clamp_min_p(min_p);
  } else {
    weight_fn.least = __fmul_rn(clamp_min_p(min_p), weight_fn.top);
    if (weight_fn.top < 0x1p-60f) {
      slice.rescale(cluster.lane);
      weight_fn.top *= slice.factor;
      weight_fn.least *= slice.factor;
    }
  }
  weight_fn.set_scale(p.length);
  const bool has_histogram = early && weight_fn.is_common(p.length);
  if (early && !has_histogram) {  // the histogram is discarded
    for (int b = threadIdx.x; b < kBins; b += blockDim.x) scratch->bins[b] = 0;
    __syncthreads();
  }
  const KeptSet kept = filter(search, filters, has_histogram, has_histogram ? exchange.sum(cluster, 1) : 0);
  if (p.out) {
    write_probabilities(search, kept, p.out + row_idx * p.out_stride);
    return;
  }
  const u64 word = scratch->random_word;
  int id;
  if (search.locate(
          search.mass_of_kept(kept), [&](u64 all) { return scale_q32(all, word); }, &id) &&
      cluster.lane == 0) {
    p.ids[row_idx] = id;
    p.valid[row_idx] = true;
  }
}

}  // namespace kestrel::sampling
