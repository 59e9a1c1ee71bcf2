// One id per row from what min-p and top-p keep, by rejection sampling: neither a sort nor a threshold search.
//
// A round draws four proposals from the remaining mass. A proposal is accepted if the mass of the elements before it in
// descending order is below the goal of top-p. If all four are rejected, the next round draws from what precedes them.
// A cluster processes a row, a contiguous slice per warp. Each warp keeps the masses of up to 32 groups of chunks, so
// that only the group that holds an id is read again. Proposals are checked by float sums with an error bound, and by
// exact masses where the bound does not decide. FirstPass lists the ways to make passes over a row cheaper.
#pragma once

#include "async_exchange.cuh"
#include "params.cuh"
#include "row_slice.cuh"
#include "threshold_window.cuh"

namespace kestrel::sampling {

constexpr int kChunkTiles = 4;  // tiles that a warp loads together

// plain:    the first pass copies the row to shared memory if it fits; further passes over the row read the copy.
// windowed: for too many or too long rows for that. The first pass also sums the elements above a window of values
//           around the estimated threshold, and those inside it in bins. These sums decide nearly all proposals.
// adapted:  for rows that L2 does not hold either, where another pass is slow. The window of a row depends on how its
//           values are distributed. Where many elements have one value, these and those of another value are counted.
//           Logits have theirs in the pass after the largest is known.
enum class FirstPass { plain, windowed, adapted };

enum Decision : int { kUndecided, kAccepted, kRejected };

struct alignas(16) Proposal {
  int index;
  float value;
  int decision, unused;
  __device__ __forceinline__ bool is_before(const Proposal& other) const {
    return value > other.value || (value == other.value && index < other.index);
  }
};

// Shared by a block, beside the exchange.
struct alignas(16) RejectionScratch {
  Proposal proposals[kProposals];
  u32 words[4];
  u32 round;  // that the words belong to
  WindowScratch of_window;
};

// The sampling parameters of one row.
template <Kind kind>
struct RowParams {
  float temperature, min_p;
  u64 q32;      // top-p in parts of 2^32
  bool greedy;  // take the first of the largest elements
  __device__ __forceinline__ RowParams(const Params& p, int64_t row)
      : temperature(kind == Kind::logits ? p.temperature.at(row) : 1.f),
        min_p(p.min_p.at(row)),
        q32(top_p_q32(p.top_p.at(row))),
        greedy(q32 == 0 || (kind == Kind::logits && temperature <= 0.f)) {}
};

template <Kind kind, FirstPass first_pass>
struct RejectionSampler {
  static constexpr bool windowed = first_pass != FirstPass::plain, adapts = first_pass == FirstPass::adapted;
  static constexpr int tiles = kChunkTiles;
  using Slice = RowSlice<kind, tiles>;
  static constexpr int kSumTiles = windowed ? tiles : 2;  // tiles loaded together in the pass that sums floats
  const Cluster& cluster;
  Slice& row;
  WeightFn<kind>& weight_fn;
  AsyncExchange& exchange;
  RejectionScratch* scratch;
  float factor = 1.f;  // elements are multiplied by it: 2^64 for rows of tiny numbers, else 1
  // The elements that remain to draw from: those >= bound before index bound_idx, and those > bound from there on.
  float bound = -INFINITY;
  int bound_idx = INT32_MAX;
  u64 group_mass = 0;          // the mass of this lane's group of chunks
  WindowList* list = nullptr;  // of windows with few elements

  // From here on, only the elements before this one in descending order remain.
  __device__ __forceinline__ void restrict_to_before(float value, int index) {
    bound = value;
    bound_idx = index;
  }
  __device__ __forceinline__ bool remains(float v, int i) const { return i < bound_idx ? v >= bound : v > bound; }
  __device__ __forceinline__ float scaled(float v, int i) const {
    return remains(v, i) ? weight_fn.scaled(v * factor) : 0.f;
  }

  // ---- passes over the row ------------------------------------------------------------------------------------------

  // Of this warp's slice: the largest element of a lane and of the warp, and where windows adapt the approximate sum of
  // this lane's weights relative to the latter.
  struct Largest {
    float of_lane = -INFINITY, of_warp = -INFINITY, sum = 0.f;
  };
  __device__ __forceinline__ Largest largest() const {
    Largest found;
    row.template for_each_chunk<tiles>([&](const float (&v)[Slice::size], int) {
#pragma unroll
      for (int e = 0; e < Slice::size; ++e) found.of_lane = ptx::max_nan(found.of_lane, v[e]);
      if constexpr (adapts) {
        const float most = from_order_key(__reduce_max_sync(kAllLanes, order_key(found.of_lane)));
        if (!(most > -INFINITY)) return;
        found.sum *= ptx::ex2_approx_ftz((found.of_warp - most) * weight_fn.slope);
        found.of_warp = most;
#pragma unroll
        for (int e = 0; e < Slice::size; ++e) found.sum += ptx::ex2_approx_ftz((v[e] - most) * weight_fn.slope);
      }
    });
    return found;
  }

  // The same, and the masses under the common power of two, and the sums of what lies inside and above the window.
  struct FirstPassResult {
    float most = -INFINITY;
    float above = 0.f, above_lower = 0.f;  // above the window, or its upper value; above its lower value
    u32 upper = 0, lower = 0;              // elements of this lane's group that have these values
  };
  template <WindowMode mode>
  __device__ __forceinline__ FirstPassResult read(const Window& window) {
    FirstPassResult first;
    const u32 bins = ptx::shared_address(scratch->of_window.bins);
    const int bits = mode == WindowMode::usual ? kUsualWindowBits : window.bits;
    const u32 width = 1u << bits;
    const float lower_value = window.lower_value();
    GroupMasses groups(cluster.lane, row.chunks_per_group);
    row.template for_each_chunk<tiles>([&](const float (&v)[Slice::size], int base) {
      u32 upper = 0, lower = 0, equal = 0, listed = 0;
      float above = 0.f, above_lower = 0.f;  // sums of sums have smaller errors
#pragma unroll
      for (int e = 0; e < Slice::size; ++e) {
        first.most = ptx::max_nan(first.most, v[e]);
        const float w = fmaxf(weight_fn.weight(v[e]), 0.f);
        const float whole = __fmaf_rz(w, weight_fn.scale, 0x1p23f);
        const float rest = __fmaf_rn(w, weight_fn.scale, -__fadd_rn(whole, -0x1p23f));
        upper += __float_as_uint(whole);
        lower += __float_as_uint(__fmaf_rn(rest, 0x1p20f, 0x1p23f));
        if constexpr (mode == WindowMode::usual || mode == WindowMode::bins || mode == WindowMode::few) {
          const int position = window.position(w);
          if (position >= static_cast<int>(width)) above += w;
          const u32 weight = __float_as_uint(__fmaf_rn(w, window.unit, 0x1p23f)) - MassSum::kBias;
          shared_add_if(static_cast<u32>(position) < width,
                        bins + 4 * (static_cast<u32>(position) >> (bits - kBinBits)), weight);
          if (mode == WindowMode::few && static_cast<u32>(position) < width) listed |= 1u << e;
        } else if constexpr (mode == WindowMode::two_values) {
          if (w > window.upper_value) above += w;
          if (w > lower_value) above_lower += w;
          equal += w == window.upper_value ? 1 : 0, equal += w == lower_value ? 0x10000 : 0;
        }
      }
      first.above += above, first.above_lower += above_lower;
      if (mode == WindowMode::few && listed != 0) {
        u32 place = list->reserve(__popc(listed));
#pragma unroll
        for (int e = 0; e < Slice::size; ++e)
          if (listed >> e & 1) list->put(place++, v[e], row.index(base, e));
      }
      if constexpr (mode == WindowMode::two_values) {
        equal = __reduce_add_sync(kAllLanes, equal);
        if (groups.lane == 0) first.upper += equal & 0xffffu, first.lower += equal >> 16;
      }
      upper = __reduce_add_sync(kAllLanes, upper - Slice::size * MassSum::kBias);
      lower = __reduce_add_sync(kAllLanes, lower - Slice::size * MassSum::kBias);
      groups.add(group_mass, (static_cast<u64>(upper) << 20) + lower);
    });
    return first;
  }

  // The masses of what remains.
  __device__ __forceinline__ void sum_masses() {
    group_mass = 0;
    GroupMasses groups(cluster.lane, row.chunks_per_group * tiles);
    row.template for_each_chunk<1>([&](const float (&v)[4], int base) {
      u32 upper = 0, lower = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float x = scaled(v[e], row.index(base, e));
        const float whole = __fadd_rz(x, 0x1p23f);
        const float rest = __fadd_rn(x, -__fadd_rn(whole, -0x1p23f));
        upper += __float_as_uint(whole);
        lower += __float_as_uint(__fmaf_rn(rest, 0x1p20f, 0x1p23f));
      }
      upper -= 4 * MassSum::kBias;
      lower = __reduce_add_sync(kAllLanes, lower - 4 * MassSum::kBias);
      const u32 part = __reduce_add_sync(kAllLanes, upper & 0xffffu), more = __reduce_add_sync(kAllLanes, upper >> 16);
      groups.add(group_mass, (static_cast<u64>(more) << 36) + (static_cast<u64>(part) << 20) + lower);
    });
  }

  // The approximate mass / 2^20 of the elements before each proposal. Proposals have mass, so that min-p drops nothing
  // before them.
  __device__ __forceinline__ void sum_before(float (&sums)[kProposals]) const {
    constexpr int chunk = kSumTiles * kTile;
#pragma unroll
    for (int n = 0; n < kProposals; ++n) sums[n] = 0.f;
    row.template for_each_chunk<kSumTiles>([&](const float (&v)[4 * kSumTiles], int base) {
      float w[4 * kSumTiles];
#pragma unroll
      for (int e = 0; e < 4 * kSumTiles; ++e) w[e] = kind == Kind::probs ? v[e] : weight_fn.scaled(v[e]);
#pragma unroll
      for (int n = 0; n < kProposals; ++n) {
        const int index = scratch->proposals[n].index;
        const float value = scratch->proposals[n].value;
        const float from = base + chunk <= index ? value : from_order_key(order_key(value + 0.f) + 1);
        float sum = 0.f;  // sums of sums have smaller errors
#pragma unroll
        for (int e = 0; e < 4 * kSumTiles; ++e) {
          if (v[e] >= from) sum += w[e];
        }
        if (base <= index && index < base + chunk) {
#pragma unroll
          for (int e = 0; e < 4 * kSumTiles; ++e) sum += v[e] == value && row.index(base, e) < index ? w[e] : 0.f;
        }
        sums[n] += sum;
      }
    });
#pragma unroll
    for (int n = 0; n < kProposals; ++n) {
      sums[n] = warp_float_sum(kind == Kind::probs ? sums[n] * factor * weight_fn.scale : sums[n]);
    }
  }

  // Compares the mass before a proposal with the goal, from the float sum of that mass. The error of n floats, added in
  // any order, is at most n 2^-24 of their sum; masses are also rounded to integers. All warps get the same decision.
  __device__ __forceinline__ Decision compare(float sum, u64 goal) const {
    const int chunks = row.elements_per_warp / (kSumTiles * kTile) + 1;
    const int added = chunks + 8 * kSumTiles + 8 + cluster.num_warps + (adapts ? kMaxListed / 32 : 0);
    const float off = static_cast<float>(2 * added + 8) * 0x1p-24f, rounded = static_cast<float>(row.length) * 0x1p-20f;
    const float wanted = __ull2float_rn(goal) * 0x1p-20f;
    if (__fmaf_ru(sum, off, sum) + rounded < wanted * (1.f - 0x1p-22f)) return kAccepted;
    if (__fmaf_rd(sum, -off, sum) - rounded > wanted * (1.f + 0x1p-22f)) return kRejected;
    return kUndecided;
  }

  // ---- the window ---------------------------------------------------------------------------------------------------

  // The elements of this warp's slice before a proposal in it that has one of the window's values, of which
  // `of_groups` has the counts.
  __device__ __forceinline__ u32 count_before(const Proposal& proposal, const u32* of_groups) const {
    const int per_group = row.chunks_per_group * Slice::chunk, group = (proposal.index - row.begin) / per_group;
    const u32 earlier = cluster.lane < group ? of_groups[threadIdx.x] : 0;
    return __reduce_add_sync(kAllLanes,
                             earlier + count_equal(row.begin + group * per_group, proposal.value, proposal.index));
  }

  // This lane's elements equal to `value` from `base` up to `index`.
  __device__ __forceinline__ u32 count_equal(int base, float value, int index) const {
    u32 equal = 0;
#pragma unroll 1
    for (; base <= index; base += kTile) {
      float v[4];
      row.template unpack<1>(row.template load<1>(base), v);
#pragma unroll
      for (int e = 0; e < 4; ++e) equal += v[e] == value && row.index(base, e) < index;
    }
    return equal;
  }

  // Decides a proposal of this warp from the sums of the first pass, if they suffice. mass: of the row, over 2^20.
  __device__ __forceinline__ Decision decide_by_window(const Proposal& proposal, u64 goal, float mass) const {
    const Window window = scratch->of_window.window;
    const float value = fmaxf(weight_fn.weight(proposal.value), 0.f);
    const float2 sums = exchange.float_sums(cluster, 2);
    const float above = sums.x;
    // Weights of logits are not exactly in the order of the logits: those of elements before it are at least lower_end.
    constexpr float kSlack = kind == Kind::logits ? 0x1p-21f : 0.f;
    const float lower_end = value * (1.f - kSlack), upper_end = value * (1.f + kSlack);
    if (adapts && window.is_two_values()) {
      const auto compare_with = [&](float from, u32 count, float each) {
        return compare(__fmaf_rn(static_cast<float>(count), each, from) * weight_fn.scale, goal);
      };
      const bool is_upper = value == window.upper_value, is_lower = !is_upper && value == window.lower_value();
      const uint2 all = exchange.count_sums(cluster, 3, cluster.num_warps),
                  earlier = exchange.count_sums(cluster, 3, cluster.warp);
      const u32* const of_groups = scratch->of_window.bins;
      if (is_upper) return compare_with(above, earlier.x + count_before(proposal, of_groups), value);
      if (is_lower)
        return compare_with(sums.y, earlier.y + count_before(proposal, of_groups + kWindowedThreads), value);
      if (value > window.upper_value) return compare_with(above, 0, 0.f) == kAccepted ? kAccepted : kUndecided;
      if (value < window.lower_value()) {
        return compare_with(sums.y, all.y, window.lower_value()) == kRejected ? kRejected : kUndecided;
      }
      if (compare_with(above, all.x, window.upper_value) == kRejected) return kRejected;
      return compare_with(sums.y, 0, 0.f) == kAccepted ? kAccepted : kUndecided;
    }
    if (adapts && window.lists && list->count <= kMaxListed) {
      float before = 0.f;
      for (int n = cluster.lane; n < static_cast<int>(list->count); n += 32) {
        const ListedElement other = list->elements[n];
        const bool is_before = Proposal{other.index, other.value}.is_before(proposal);
        before += is_before ? fmaxf(weight_fn.weight(other.value), 0.f) : 0.f;
      }
      const Decision decision = compare((above + warp_float_sum(before)) * weight_fn.scale, goal);
      if (window.position(upper_end) >= 1 << window.bits) return decision == kAccepted ? kAccepted : kUndecided;
      return window.position(lower_end) >= 0 || decision == kRejected ? decision : kUndecided;
    }
    if (window.lower_value() * window.unit < 1.f) return kUndecided;
    if (window.bits == kTopWindowBits && mass * (1.f / weight_fn.scale) * window.unit > 0x1p31f) return kUndecided;
    if (window.position(upper_end) >= 1 << window.bits) {
      const bool is_above = window.position(lower_end) >= 1 << window.bits;
      return is_above && compare(above * weight_fn.scale, goal) == kAccepted ? kAccepted : kUndecided;
    }
    const auto bin_of = [&](float weight) { return max(-1, window.bin(window.position(weight))); };
    const int own = bin_of(lower_end), last_own = bin_of(upper_end);  // bins that may have elements equal to it
    float sum = 0.f, off = 0.5f, same = 0.f;                          // off: by rounding every weight to an integer
#pragma unroll 1
    for (int rank = 0; rank < cluster.size; ++rank) {
      const u32* bins = cluster.map_shared(scratch->of_window.bins, rank);
#pragma unroll(adapts ? 1 : 4)  // so that loads from other blocks overlap; adapted windows have no registers for it
      for (int bin = cluster.lane; bin < kWindowBins; bin += 32) {
        const float weight = __uint2float_rn(bins[bin]);
        sum += bin > last_own ? weight : 0.f;
        same += bin >= own && bin <= last_own ? weight : 0.f;
        // An element of the bin has at least this weight.
        const float least = fmaxf(window.bin_begin(bin) * window.unit - 0.5f, 0.5f);
        off += bin >= own ? weight * __fdividef(0.5f, least) : 0.f;
      }
    }
    sum = warp_float_sum(sum), off = 1.01f * warp_float_sum(off) + 0x1p-18f * sum;
    same = sum + fmaxf(warp_float_sum(same) - value * window.unit, 0.f);
    const float unit = __fdividef(1.f, window.unit);
    if (compare((above + fmaxf(sum - off, 0.f) * unit) * weight_fn.scale, goal) == kRejected) return kRejected;
    return own >= 0 && compare((above + (same + off) * unit) * weight_fn.scale, goal) == kAccepted ? kAccepted
                                                                                                   : kUndecided;
  }

  // ---- a proposal ---------------------------------------------------------------------------------------------------

  // The element at which the prefix sum of masses exceeds the point, by the warp whose slice has it. before: the mass
  // of the slices before. *mass: of the element.
  __device__ __forceinline__ Proposal locate(u64 point, u64 before, u64* mass) const {
    u64 running = before;
    int base = row.begin;
    if (row.end - row.begin > Slice::chunk) {
      const u64 up_to = before + warp_inclusive_sum(group_mass, cluster.lane);
      const int group = __ffs(__ballot_sync(kAllLanes, up_to > point)) - 1;
      running = __shfl_sync(kAllLanes, up_to - group_mass, group);
      base += group * row.chunks_per_group * Slice::chunk;
    }
    auto raw = row.template load<1>(base);
    // Bounded by the slice even if another kernel modifies the row meanwhile.
#pragma unroll 1
    for (;; base += kTile) {
      float v[4];
      row.template unpack<1>(raw, v);
      if (base + kTile < row.end) raw = row.template load<1>(base + kTile);
      u64 each[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) each[e] = mass_of(scaled(v[e], row.index(base, e)));
      const u64 sum = each[0] + each[1] + each[2] + each[3], tile = warp_sum(sum);
      if (running + tile <= point && base + kTile < row.end) {
        running += tile;
        continue;
      }
      u64 reached = running + warp_inclusive_sum(sum, cluster.lane);
      const int lane = (__ffs(__ballot_sync(kAllLanes, reached > point)) - 1) & 31;
      reached -= sum;
      int found = 0;
#pragma unroll
      for (int e = 0; e < 3; ++e) {
        reached += each[e];
        if (reached <= point) found = e + 1, each[0] = each[e + 1], v[0] = v[e + 1];
      }
      *mass = __shfl_sync(kAllLanes, each[0], lane);
      const int index = min(__shfl_sync(kAllLanes, row.index(base, found), lane), row.length - 1);
      return {index, __shfl_sync(kAllLanes, v[0], lane), kUndecided, 0};
    }
  }
};

// Threads of a block, at most, with one block per multiprocessor (plain) and with two (the others). Architectures other
// than sm_90 would spill with as few registers as two blocks leave, and adapted windows with more than 256 threads.
constexpr int kPlainThreads = 640, kAdaptedThreads = 256;
constexpr int max_threads(FirstPass first_pass) {
  return first_pass == FirstPass::plain      ? kPlainThreads
         : first_pass == FirstPass::windowed ? kWindowedThreads
                                             : kAdaptedThreads;
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
constexpr int kWindowedBlocksPerSm = 2;
#else
constexpr int kWindowedBlocksPerSm = 1;
#endif
template <Kind kind, FirstPass first_pass>
__global__ void __launch_bounds__(max_threads(first_pass), first_pass == FirstPass::plain ? 1 : kWindowedBlocksPerSm)
    rejection_rows(const __grid_constant__ Params p) {
  constexpr bool logits = kind == Kind::logits;
  constexpr bool windowed = first_pass != FirstPass::plain;
  using Sampler = RejectionSampler<kind, first_pass>;
  const Cluster cluster(p.cluster_size);
  const int64_t row_idx = cluster.row_idx();
  RejectionScratch* scratch = reinterpret_cast<RejectionScratch*>(dynamic_shared_memory());
  AsyncExchange exchange = {reinterpret_cast<u64*>(scratch + 1)};
  char* const memory = reinterpret_cast<char*>(scratch + 1) + AsyncExchange::bytes(cluster.num_warps);
  typename Sampler::Slice row(p.rows + row_idx * p.row_bytes, p.dtype, p.length, p.elements_per_warp, cluster,
                              !windowed && p.copy_to_smem ? memory : nullptr);
  const bool first_warp = cluster.warp == 0 && cluster.lane == 0, is_rng_thread = threadIdx.x == blockDim.x - 32;
  if (threadIdx.x == 0) {
    scratch->of_window.init();
    exchange.init(cluster);
  }
  if (is_rng_thread) scratch->round = 0;  // only this thread uses it
  cluster.arrive();
  if (windowed) {
    for (int bin = threadIdx.x; bin < kWindowBins; bin += blockDim.x) scratch->of_window.bins[bin] = 0;
    if (first_pass == FirstPass::adapted && threadIdx.x == 0) reinterpret_cast<WindowList*>(memory)->count = 0;
  }
  pdl_wait();
  pdl_trigger();
  if (p.top_k.values) {  // other kernels draw the rows with top-k
    const int64_t k = p.top_k.at(row_idx);
    if (k > 0 && k < p.length) return cluster.wait();
  }
  WeightFn<kind> weight_fn;
  weight_fn.set_common(p.length);
  Sampler sampler = {cluster, row, weight_fn, exchange, scratch};
  if constexpr (Sampler::adapts) sampler.list = reinterpret_cast<WindowList*>(memory);
  bool early, has_window, has_two_values = false;
  typename Sampler::FirstPassResult first;
  typename Sampler::Largest largest;
  const auto read_with_window = [&](u64 q32, float row_sum) {
    __syncthreads();
    Window window = estimate_window<Sampler::adapts>(cluster, row, &scratch->of_window, weight_fn,
                                                     static_cast<float>(q32) * 0x1p-32f, row_sum);
    if (logits && window.is_two_values()) window = Window();  // different logits may have one weight
    has_window = window.has_elements();
    if (threadIdx.x == 0) scratch->of_window.window = window;
    has_two_values = Sampler::adapts && window.is_two_values();
    if (!has_window) {
      first = sampler.template read<WindowMode::none>(window);
    } else if (!logits && has_two_values) {
      first = sampler.template read<WindowMode::two_values>(window);
      scratch->of_window.bins[threadIdx.x] = first.upper;
      scratch->of_window.bins[kWindowedThreads + threadIdx.x] = first.lower;
    } else if (!Sampler::adapts || window.bits == kUsualWindowBits) {
      first = sampler.template read<WindowMode::usual>(window);
    } else if (window.lists) {
      first = sampler.template read<WindowMode::few>(window);
    } else {
      first = sampler.template read<WindowMode::bins>(window);
    }
  };
  const auto broadcast_window = [&] {
    exchange.broadcast_floats(cluster, 2, warp_float_sum(first.above), warp_float_sum(first.above_lower));
    if (has_two_values) {
      exchange.broadcast(cluster, 3,
                         __reduce_add_sync(kAllLanes, first.upper) |
                             static_cast<u64>(__reduce_add_sync(kAllLanes, first.lower)) << 32);
    }
    if (cluster.size > 1) cluster.sync();  // the bins of all blocks are complete
  };
  {
    // Read the row. For probabilities also sum the mass, assuming the common power of two.
    const RowParams<kind> params(p, row_idx);
    early = !logits && !(params.min_p > 0.f) && !params.greedy;
    has_window = windowed && early && params.q32 < kQ32One;
    const u64 seed = is_rng_thread ? p.seed.at(row_idx) : 0, offset = is_rng_thread ? p.offset.at(row_idx) : 0;
    if constexpr (logits) {
      if (Sampler::adapts) weight_fn.set_temperature(params.temperature <= 0.f ? 1.f : params.temperature);
      largest = sampler.largest();
      first.most = largest.of_lane;
    } else if (windowed && has_window) {
      read_with_window(params.q32, /*row_sum=*/1.f);
    } else {
      first = sampler.template read<WindowMode::none>(Window());
    }
    if (is_rng_thread) random_words(seed, offset, 0, scratch->words);
  }
  if (!windowed) row.switch_to_smem();
  cluster.wait();
  exchange.broadcast(
      cluster, 1,
      static_cast<u32>(__reduce_max_sync(kAllLanes, isnan(first.most) ? INT32_MAX : order_key(first.most + 0.f))));
  if (early) exchange.broadcast(cluster, 0, warp_sum(sampler.group_mass));
  if (logits && Sampler::adapts) exchange.broadcast_floats(cluster, 2, largest.of_warp, warp_float_sum(largest.sum));
  if (has_window) broadcast_window();
  exchange.wait(cluster, is_rng_thread);
  weight_fn.top = from_order_key(exchange.max(cluster, 1));
  const auto [temperature, min_p, q32, greedy] = RowParams<kind>(p, row_idx);  // reloaded to save registers
  if (!(weight_fn.top > (logits ? -INFINITY : 0.f) && weight_fn.top < INFINITY) || isnan(temperature)) {
    if (first_warp) p.ids[row_idx] = 0, p.valid[row_idx] = false;
    return;
  }
  bool has_masses = early && weight_fn.is_common(p.length);  // of what remains
  has_window = has_window && has_masses;
  if (!has_masses) {
    const float least = clamp_min_p(min_p);
    if (greedy) sampler.bound = weight_fn.top;
    if constexpr (logits) {
      weight_fn.set_temperature(temperature <= 0.f ? 1.f : temperature);
      weight_fn.least = least;
    } else {
      weight_fn.least = __fmul_rn(least, weight_fn.top);
      if (weight_fn.top < 0x1p-60f) sampler.factor = 0x1p64f, weight_fn.top *= 0x1p64f, weight_fn.least *= 0x1p64f;
    }
    weight_fn.set_scale(p.length);
  }

  // The rounds. An iteration of the outer loop exchanges the masses of what remains. With n == kProposals it then draws
  // four proposals from them; with n < kProposals these masses are those of what precedes proposal n, which they
  // decide. The inner loop goes over the undecided proposals, and stops for exact masses where float sums do not
  // decide.
  const bool unfiltered = greedy || q32 == kQ32One;  // the first proposal is accepted
  if constexpr (logits && Sampler::adapts) {
    if (!unfiltered && !(weight_fn.least > 0.f)) {
      const float row_sum = exchange.sum_of_weights(cluster, 2, weight_fn);
      read_with_window(q32, row_sum);
      exchange.broadcast(cluster, 0, warp_sum(sampler.group_mass));
      if (has_window) broadcast_window();
      exchange.wait(cluster, is_rng_thread);
      has_masses = true;
    }
  }
  u64 goal = 0;
  int n = kProposals;           // the proposal that is checked
  int first_rejected = -1;      // in descending order
  int decisions = 0;            // two bits per proposal
  bool has_float_sums = false;  // decisions include those by float sums
#pragma unroll 1
  for (;;) {
    if (!has_masses) {
      sampler.sum_masses();
      exchange.broadcast(cluster, 0, warp_sum(sampler.group_mass));
      exchange.wait(cluster, is_rng_thread);
    }
    const u64 all = exchange.sum(cluster, 0, cluster.num_warps);
    if (goal == 0) goal = max(u64{1}, scale_q32(all, q32));
    if (n < kProposals) {  // the exact masses decide this proposal
      first_rejected = n++;
      if (all < goal) {
        if (first_warp) p.ids[row_idx] = scratch->proposals[first_rejected].index, p.valid[row_idx] = true;
        return;
      }
    } else {
      const u64 of_warp = exchange.values(cluster, 0)[cluster.warp], before = exchange.sum(cluster, 0, cluster.warp);
#pragma unroll 1
      for (n = 0; n < (unfiltered ? 1 : kProposals); ++n) {
        const u64 point = greedy ? 0 : scale_q32(all, scratch->words[n]);
        if (point < before || point - before >= of_warp) continue;
        u64 mass;
        Proposal proposal = sampler.locate(point, before, &mass);
        if (unfiltered) {
          if (cluster.lane == 0) p.ids[row_idx] = proposal.index, p.valid[row_idx] = true;
          return;
        }
        if (all - mass < goal) proposal.decision = kAccepted;
        if (windowed && has_window && proposal.decision == kUndecided) {
          proposal.decision = sampler.decide_by_window(proposal, goal, __ull2float_rn(all) * 0x1p-20f);
        }
        exchange.broadcast_int4(cluster, reinterpret_cast<int4*>(scratch->proposals + n),
                                {proposal.index, __float_as_int(proposal.value), proposal.decision, 0});
      }
      if (unfiltered) return;
      exchange.broadcast(cluster, 0, 0);  // after the wait all warps have finished reading the masses
      exchange.wait(cluster, is_rng_thread, kProposals);
      first_rejected = -1;
      n = 0;
      has_window = has_float_sums = false;
      decisions = 0;
#pragma unroll
      for (int m = 0; m < kProposals; ++m) decisions |= scratch->proposals[m].decision << (2 * m);
    }

    // The first accepted proposal. If there is none, the first rejected one in descending order bounds what remains.
    has_masses = false;
#pragma unroll 1
    for (; n < kProposals; ++n) {
      const Proposal proposal = scratch->proposals[n];
      if (first_rejected >= 0 && !proposal.is_before(scratch->proposals[first_rejected])) continue;
      int decision = decisions >> (2 * n) & 3;
      if (decision == kUndecided && !has_float_sums) {
        float sums[kProposals];
        sampler.sum_before(sums);
        exchange.broadcast_floats(cluster, 1, sums[0], sums[1]);
        exchange.broadcast_floats(cluster, 2, sums[2], sums[3]);
        exchange.wait(cluster, is_rng_thread);
        has_float_sums = true;
#pragma unroll
        for (int pair = 0; pair < kProposals / 2; ++pair) {
          const float2 both = exchange.float_sums(cluster, 1 + pair);
          decisions |= (sampler.compare(both.x, goal) | sampler.compare(both.y, goal) << 2) << (4 * pair);
        }
        decision = decisions >> (2 * n) & 3;
      }
      if (decision == kUndecided) {
        sampler.restrict_to_before(proposal.value, proposal.index);
        break;
      }
      if (decision == kAccepted) {
        if (first_warp) p.ids[row_idx] = proposal.index, p.valid[row_idx] = true;
        return;
      }
      first_rejected = n;
    }
    if (n == kProposals) {
      sampler.restrict_to_before(scratch->proposals[first_rejected].value, scratch->proposals[first_rejected].index);
      if (is_rng_thread) random_words(p.seed.at(row_idx), p.offset.at(row_idx), ++scratch->round, scratch->words);
    }
  }
}

}  // namespace kestrel::sampling
