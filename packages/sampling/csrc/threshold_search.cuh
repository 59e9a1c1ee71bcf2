// The threshold of a filter: the largest value for which the elements >= it reach a goal, a count (top-k) or a mass
// (top-p).
//
// A histogram of a sample of the row gives two pivots. A pass over the row proves that the threshold lies between them
// and collects the elements in between as candidates; the first block of the cluster finds the threshold among these.
// Where the estimate fails, or too many elements are equal, bisection takes over with one pass a step.
#pragma once

#include "candidate_list.cuh"
#include "pivot_estimate.cuh"

namespace kestrel::sampling {

// A measure that locate() sums: the number of elements equal to a value.
struct EqualTo {
  float t;
  u32 count = 0;
  __device__ __forceinline__ void add(float4 v, int) { count += (v.x == t) + (v.y == t) + (v.z == t) + (v.w == t); }
  __device__ __forceinline__ u64 value() const { return count; }
  __device__ __forceinline__ void each(float4 v, int, u64 (&one)[4]) const {
    one[0] = v.x == t, one[1] = v.y == t, one[2] = v.z == t, one[3] = v.w == t;
  }
};

// A measure that locate() sums: the masses of the kept elements.
template <Kind kind, Precision precision>
struct KeptMass {
  const WeightFn<kind>& weight_fn;
  KeptSet kept;
  MassSum sum = {};
  __device__ __forceinline__ void scaled(float4 four, int i, float (&x)[4]) const {
    const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = kept.has(v[e], i + e) ? weight_fn.template scaled<precision>(v[e]) : 0.f;
  }
  __device__ __forceinline__ void add(float4 v, int i) {
    // After a filter most tiles have no kept element.
    if (!__any_sync(kAllLanes, v.x >= kept.above || v.y >= kept.above || v.z >= kept.above || v.w >= kept.above))
      return;
    float x[4];
    scaled(v, i, x);
    sum.add(x);
  }
  __device__ __forceinline__ u64 value() { return sum.value(); }
  __device__ __forceinline__ void each(float4 v, int i, u64 (&mass)[4]) const {
    float x[4];
    scaled(v, i, x);
#pragma unroll
    for (int e = 0; e < 4; ++e) mass[e] = mass_of(x[e]);
  }
};

template <Kind kind, Storage storage>
struct ThresholdSearch {
  const Cluster& cluster;
  const Float32Slice<storage>& slice;
  const WeightFn<kind>& weight_fn;
  ClusterExchange& exchange;
  SearchScratch* scratch;
  float* candidates;
  int list_capacity;  // of one block
  int passes = 0;

  __device__ __forceinline__ PivotEstimate<kind> pivot_estimate() const {
    return {cluster, weight_fn, scratch, slice.length};
  }
  __device__ __forceinline__ CandidateList<kind> candidate_list() const { return {cluster, weight_fn, scratch}; }

  // Whether the registers of one block hold all elements: then neither a histogram nor a list is needed.
  __device__ __forceinline__ bool fits_in_registers() const {
    return storage == Storage::shared && cluster.size == 1 &&
           slice.length <= kCandidatesPerThread * static_cast<int>(blockDim.x);
  }

  // ---- passes over the row, by the whole cluster --------------------------------------------------------------------

  // The mass of this warp's slice, if `sum` asks for it, and a histogram of a sample of its tiles.
  template <SumMass sum_mass>
  __device__ __forceinline__ u64 histogram_slice(bool histogram) {
    const int stride = histogram_stride(slice.length);
    MassSum sum;
    int tile = 0;
    slice.for_each_tile(cluster.lane, [&](float4 four, int i) {
      const float v[4] = {four.x, four.y, four.z, four.w};
      if constexpr (sum_mass == SumMass::yes) {
        // No weight of a common row exceeds 1. For other rows the result is discarded.
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = fminf(weight_fn.scaled(v[e]), 0x1p23f - 1.f);
        sum.add(x);
      }
      if (histogram && tile == 0) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (i + e < slice.length && i < slice.end && !isnan(v[e])) {
            atomicAdd(&scratch->bins[weight_fn.bin(v[e], kBins - 1)], 1u);
          }
        }
      }
      tile = (tile + 1) & (stride - 1);
    });
    return warp_sum(sum.value());
  }

  // The same of the row.
  template <SumMass sum_mass>
  __device__ __forceinline__ u64 histogram_row(bool histogram) {
    const u64 of_warp = histogram_slice<sum_mass>(histogram);
    if (sum_mass == SumMass::yes) exchange.broadcast(cluster, 0, of_warp);
    exchange.sync(cluster);
    return sum_mass == SumMass::yes ? exchange.sum(cluster, 0) : 0;
  }

  // The measures of the elements >= low and >= high, and how many elements lie in between. These are the candidates.
  struct RangeMeasure {
    u64 from_low, from_high;
    u32 between;
    bool complete;  // the lists of the blocks hold all candidates
  };

  template <Measure measure>
  __device__ __forceinline__ RangeMeasure measure_range(float low, float high) {
    constexpr bool mass = measure == Measure::mass;
    constexpr u64 kOverflow = u64{1} << 32;
    u32* num_candidates = &scratch->num_candidates[passes & 1];
    if (threadIdx.x == 0) scratch->num_candidates[(passes & 1) ^ 1] = 0;
    ++passes;
    const auto is_between = [&](float v) { return v >= low && !(v >= high); };  // high may be the key after infinity
    MassSum sum;
    u32 count = 0, between = 0;
    slice.for_each_tile(cluster.lane, [&](float4 four, int) {
      const float v[4] = {four.x, four.y, four.z, four.w};
      float x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        between += is_between(v[e]);
        count += v[e] >= low;
        if constexpr (mass) x[e] = v[e] >= low ? weight_fn.scaled(v[e]) : 0.f;
      }
      if constexpr (mass) sum.add(x);
    });
    // The place of every lane's candidates in the list of the block.
    const u32 up_to = static_cast<u32>(warp_inclusive_sum(between, cluster.lane));
    const u32 of_warp = __shfl_sync(kAllLanes, up_to, 31);
    u32 place = 0;
    if (cluster.lane == 0 && of_warp > 0) place = atomicAdd(num_candidates, of_warp);
    place = __shfl_sync(kAllLanes, place, 0);
    const bool full = place + of_warp > list_capacity;
    place += up_to - between;
    u64 between_mass = 0;
    if (of_warp > 0) {
      slice.for_each_tile(cluster.lane, [&](float4 four, int) {
        const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (is_between(v[e])) {
            if (!full) candidates[place++] = v[e];
            if constexpr (mass) between_mass += mass_of(weight_fn.scaled(v[e]));
          }
        }
      });
    }
    exchange.broadcast(cluster, 0, warp_sum(mass ? sum.value() : u64{count}));
    exchange.broadcast(cluster, 1, of_warp + (full ? kOverflow : 0));
    if (mass) exchange.broadcast(cluster, 2, warp_sum(between_mass));
    exchange.sync(cluster);
    const u64 from_low = exchange.sum(cluster, 0), n = exchange.sum(cluster, 1);
    const u64 from_high = from_low - (mass ? exchange.sum(cluster, 2) : static_cast<u32>(n));
    return {from_low, from_high, static_cast<u32>(n), n < kOverflow};
  }

  // ---- the search, by the whole cluster -----------------------------------------------------------------------------

  // Top-k (count) or top-p (mass). `range` contains the threshold; the pivots are estimates. With then_q32 < 2^32 a
  // search for top-k is followed by one for top-p among its result, if the lists hold the candidates; *then_done says
  // whether that was possible.
  template <Measure measure>
  __device__ __forceinline__ Threshold search(Range range, u64 goal, int pivot_low, int pivot_high, u64 then_q32,
                                              bool* then_done) {
    constexpr bool mass = measure == Measure::mass;
    const int top = range.high;
    const u32 max_candidates = kCandidatesPerThread * blockDim.x;
    int low = max(range.low, min(pivot_low, range.high - 1)), high = max(low + 1, min(pivot_high, range.high));
    // Three estimates, then bisection of 32 bits: the bound is never reached.
    for (int tries = 0; tries < 64; ++tries) {
      const RangeMeasure measured = measure_range<measure>(from_order_key(low), from_order_key(high));
      const bool reached = measured.from_low >= goal, before = measured.from_high < goal;
      if (reached && before) {
        range = {low, high, measured.from_high};
        if (measured.complete && measured.between <= max_candidates) break;
      } else if (reached) {
        range.low = high;
      } else {
        range.high = low;
        range.above = measured.from_low;
      }
      if (range.width() == 1) {
        *then_done = false;
        return {range.low, candidate_list().template needed<measure>(range, goal), UINT32_MAX};
      }
      // First the elements equal to the largest; then interpolation, as if the candidates were uniform, so that the
      // list is filled to 70 %; then the middle.
      const float width = static_cast<float>(range.width());
      high = range.high;
      low = static_cast<int>(static_cast<u32>(range.low) + (range.width() >> 1));
      if (tries == 0 && range.high == top) {
        low = top - 1;
      } else if (tries < 2 && reached && before) {
        const float depth = __fdividef(static_cast<float>(goal - range.above),
                                       static_cast<float>(measured.from_low - measured.from_high));
        const float half = 0.35f * __fdividef(static_cast<float>(max_candidates), static_cast<float>(measured.between));
        const u32 upper = static_cast<u32>(fmaxf(depth - half, 0.f) * width);
        const u32 lower = static_cast<u32>(fminf(depth + half, 0.999f) * width);
        high = static_cast<int>(static_cast<u32>(range.high) - min(upper, range.width() - 1));
        low = static_cast<int>(static_cast<u32>(range.high) - min(max(lower, upper + 1), range.width()));
      }
    }
    *then_done = !mass && range.high == top && then_q32 <= 0xffffffffu;
    if (cluster.block_rank == 0) {
      // Candidate q of all lists: lane b holds the end of the list of block b.
      const u32 of_block =
          cluster.lane < cluster.size ? cluster.map_shared(scratch, cluster.lane)->num_candidates[(passes - 1) & 1] : 0;
      const u32 up_to = static_cast<u32>(warp_inclusive_sum(of_block, cluster.lane));
      const u32 count = __shfl_sync(kAllLanes, up_to, 31);
      int key[kCandidatesPerThread];
#pragma unroll
      for (int j = 0; j < kCandidatesPerThread; ++j) {
        key[j] = INT32_MIN;
        if (j * blockDim.x >= count) continue;
        const u32 q = threadIdx.x + j * blockDim.x;
        u32 rank = 0, first = 0;
        for (int b = 0; b < cluster.size - 1; ++b) {
          const u32 end = __shfl_sync(kAllLanes, up_to, b);
          if (q >= end) rank = b + 1, first = end;
        }
        if (q < count) key[j] = order_key(cluster.map_shared(candidates, rank)[q - first]);
      }
      finish<measure>(key, range, goal, count, then_q32, *then_done);
    }
    cluster.sync();
    return scratch->threshold;
  }

  // The first block ends the search and sends the threshold to the others. A cluster barrier must follow.
  template <Measure measure>
  __device__ __forceinline__ void finish(const int (&key)[kCandidatesPerThread], Range range, u64 goal, u32 count,
                                         u64 then_q32, bool then) {
    Threshold threshold = candidate_list().template find_threshold<measure>(key, range, goal, count);
    if (measure == Measure::count && then) {
      const u64 kept = candidate_list().kept_mass(key, threshold);
      const Range rest = {threshold.key, range.high, 0};
      threshold = candidate_list().template find_threshold<Measure::mass>(
          key, rest, max(u64{1}, scale_q32(kept, then_q32)), count);
    }
    if (threadIdx.x < cluster.size) cluster.map_shared(scratch, threadIdx.x)->threshold = threshold;
  }

  // The same for a row that the registers of one block hold.
  template <Measure measure>
  __device__ __forceinline__ Threshold search_in_registers(Range range, u64 goal, u64 then_q32, bool* then_done) {
    *then_done = measure == Measure::count && then_q32 <= 0xffffffffu;
    __syncthreads();  // the slices of all warps are in shared memory
    int key[kCandidatesPerThread];
#pragma unroll
    for (int j = 0; j < kCandidatesPerThread; ++j) {
      const int q = threadIdx.x + j * blockDim.x;
      key[j] = q < slice.length ? order_key(slice.smem[q]) : INT32_MIN;
    }
    finish<measure>(key, range, goal, slice.length, then_q32, *then_done);
    cluster.sync();
    return scratch->threshold;
  }

  // ---- prefix sums in vocabulary order ------------------------------------------------------------------------------

  // The index at which the prefix sum of the measure `of` exceeds point_of(total); true in the warp whose slice has it.
  template <typename Of, typename Point>
  __device__ __forceinline__ bool locate(Of of, Point point_of, int* index) {
    slice.for_each_tile(cluster.lane, [&](float4 four, int i) { of.add(four, i); });
    exchange.broadcast(cluster, 0, warp_sum(of.value()));
    exchange.sync(cluster);
    return locate_exchanged(of, 0, point_of, index);
  }

  // The same if the sums of the warps are already exchanged.
  template <typename Of, typename Point>
  __device__ __forceinline__ bool locate_exchanged(const Of& of, int which, Point point_of, int* index) {
    const u64 point = point_of(exchange.sum(cluster, which));
    const u64 of_warp = exchange.values(cluster, which)[cluster.warp];
    u64 running = exchange.sum_range(cluster, which, 0, cluster.warp);
    if (point < running || point >= running + of_warp) return false;
    constexpr int kTiles = 4;  // loaded together
    const float none = not_a_number();
    for (int first = slice.begin; first < slice.end; first += kTiles * kTile) {
      float4 four[kTiles];
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        const int i = first + u * kTile + 4 * cluster.lane;
        four[u] = i < slice.end ? slice.four(i) : make_float4(none, none, none, none);
      }
      // The tile in which the sum exceeds the point, if it is one of these.
      bool passed = false;
      int tile = first;
      float4 hit = four[0];
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        u64 each[4];
        of.each(four[u], first + u * kTile + 4 * cluster.lane, each);
        const u64 whole = warp_sum(each[0] + each[1] + each[2] + each[3]);
        if (!passed) {
          hit = four[u];
          tile = first + u * kTile;
          passed = running + whole > point;
          if (!passed) running += whole;
        }
      }
      if (!passed) continue;
      int found = tile + 4 * cluster.lane;
      u64 each[4];
      of.each(hit, found, each);
      const u64 sum = each[0] + each[1] + each[2] + each[3];
      const u64 up_to = running + warp_inclusive_sum(sum, cluster.lane);
      u64 before = up_to - sum;
#pragma unroll
      for (int e = 0; e < 3; ++e) {
        before += each[e];
        found += before <= point;
      }
      *index = __shfl_sync(kAllLanes, found, __ffs(__ballot_sync(kAllLanes, up_to > point)) - 1);
      return true;
    }
    return false;
  }

  // The index at which the prefix sum of `of` exceeds `point`, in every warp of the cluster.
  template <typename Of>
  __device__ __forceinline__ int locate_for_all(const Of& of, u64 point) {
    int index;
    if (locate(of, [&](u64) { return point; }, &index)) {
      for (int rank = cluster.lane; rank < cluster.size; rank += 32) cluster.map_shared(scratch, rank)->located = index;
    }
    cluster.sync();
    return scratch->located;
  }

  // The kept set of a threshold.
  __device__ __forceinline__ KeptSet resolve(const Threshold& threshold) {
    const float t = from_order_key(threshold.key);
    if (threshold.needed >= threshold.equal) return {t, INT32_MAX};
    return {t, locate_for_all(EqualTo{t}, u64{threshold.needed} - 1)};
  }

  // The sum of the measure `of` over the row.
  template <typename Of>
  __device__ __forceinline__ u64 total(Of& of) {
    slice.for_each_tile(cluster.lane, [&](float4 four, int i) { of.add(four, i); });
    exchange.broadcast(cluster, 0, warp_sum(of.value()));
    exchange.sync(cluster);
    return exchange.sum(cluster, 0);
  }

  template <Precision precision = Precision::fast>
  __device__ __forceinline__ KeptMass<kind, precision> mass_of_kept(const KeptSet& kept) const {
    return {weight_fn, kept};
  }
};

}  // namespace kestrel::sampling
