// What rejection_rows.cuh does with a row: the passes over it, the search for a proposal, and its comparison with the
// goal of top-p.
//
// A warp has a contiguous slice and keeps the masses of up to 32 groups of its tiles, so that only the group that holds
// an id is read again. Proposals are checked by float sums with an error bound, and by exact masses where the bound
// does not decide. FirstPass lists the ways to make passes over a row cheaper.
#pragma once

#include "async_exchange.cuh"
#include "params.cuh"
#include "row_slice.cuh"
#include "threshold_window.cuh"

namespace kestrel::sampling {

constexpr int kChunkTiles = 4;                                               // tiles that a warp loads together
constexpr int kAsyncTiles = 2;                                               // with kStages in flight
constexpr int kPlainThreads = 640, kMaxRejectionWarps = kPlainThreads / 32;  // of a block

// Architectures other than sm_90 would spill with more.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
constexpr int kPlainSumTiles = kChunkTiles;
constexpr int kFloatSumLoads = 2;  // of probabilities, in sums for another block
#else
constexpr int kPlainSumTiles = 2;
constexpr int kFloatSumLoads = 1;
#endif

// plain: the first pass copies the row to shared memory if it fits. Further passes over the row read the copy, or L2.
//
// windowed: for rows that L2 does not hold, where another pass is slow. The first pass also sums the elements above a
// window of values around the estimated threshold, and those inside it in bins. These sums decide nearly all proposals.
// Where many elements have one value, these and those of another value are counted. Logits have their window in the
// pass after the largest is known.
//
// only: without top-p. The first proposal is accepted.
enum class FirstPass { plain, windowed, only };

enum Decision : int { kUndecided, kAccepted, kRejected };

struct alignas(16) Proposal {
  int index;
  float value;
  int decision, unused;
  __device__ __forceinline__ bool is_before(const Proposal& other) const {
    return value > other.value || (value == other.value && index < other.index);
  }
};

// An element, its mass, and the mass of the elements before it in the order of ids.
struct Located {
  Proposal proposal;
  u64 mass = 0, before = 0;
  __device__ __forceinline__ bool has(u64 point) const { return point >= before && point - before < mass; }
};

// The masses of what remains: in the row, in the slices before that of a warp, in its slice.
struct RemainingMasses {
  u64 all, before, own;
};

// The key of a row's random numbers in shared memory.
struct RandomKey {
  u64 seed, offset;

  // By one thread, which then waits for its copies. They pass no registers.
  __device__ __forceinline__ void load(const Params& p, int64_t row) {
    load(&seed, p.seed, row);
    load(&offset, p.offset, row);
  }
  template <typename Parameter>
  static __device__ __forceinline__ void load(u64* to, const Parameter& parameter, int64_t row) {
    if (!parameter.values) {
      *to = parameter.at(row);
      return;
    }
    const int64_t* const from = static_cast<const int64_t*>(parameter.values) + row * parameter.stride;
    for (int half = 0; half < 2; ++half)
      ptx::cp_async4_or_zero(ptx::shared_address(to) + 4 * half, reinterpret_cast<const int*>(from) + half, true);
  }
};

// Shared by a block, beside the exchange.
struct alignas(16) RejectionScratch {
  Proposal proposals[2][kProposals];  // of two rounds that alternate
  u32 words[2][4];
  RandomKey key;
  RemainingMasses masses[kMaxRejectionWarps];  // of each warp
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
  static constexpr bool windowed = first_pass == FirstPass::windowed;
  static constexpr int tiles = kChunkTiles;
  using Slice = RowSlice<kind, tiles, !windowed>;
  // Loaded together in the pass that sums floats. With more, weights of logits spill where rows have windows.
  static constexpr int kSumTiles = !windowed ? kPlainSumTiles : kind == Kind::logits ? 2 : tiles;
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
  WindowList* list = nullptr;  // of windows with few elements; the stages of sum_before() follow

  // From here on, only the elements before this one in descending order remain.
  __device__ __forceinline__ void restrict_to_before(float value, int index) {
    bound = value;
    bound_idx = index;
  }
  __device__ __forceinline__ void remove_bound() { restrict_to_before(-INFINITY, INT32_MAX); }
  __device__ __forceinline__ bool remains(float v, int i) const { return i < bound_idx ? v >= bound : v > bound; }
  __device__ __forceinline__ float scaled(float v, int i) const {
    return remains(v, i) ? weight_fn.scaled(v * factor) : 0.f;
  }

  // ---- passes over the row ------------------------------------------------------------------------------------------

  // Of this warp's slice: the largest element of a lane and of the warp, and with windows the approximate sum of
  // this lane's weights relative to the latter.
  struct Largest {
    float of_lane = -INFINITY, of_warp = -INFINITY, sum = 0.f;
  };
  __device__ __forceinline__ Largest largest() const {
    Largest found;
    row.template for_each_chunk<tiles>([&](const float (&v)[Slice::size], int) {
#pragma unroll
      for (int e = 0; e < Slice::size; ++e) found.of_lane = ptx::max_nan(found.of_lane, v[e]);
      if constexpr (windowed) {
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
    const bool by_tiles = !windowed && row.groups_are_tiles();
    GroupMasses groups(cluster.lane, by_tiles ? 1 : row.chunks_per_group());
    row.template for_each_chunk<tiles>([&](const float (&v)[Slice::size], int base) {
      if (by_tiles) {
#pragma unroll
        for (int u = 0; u < tiles; ++u) {
          u32 upper = 0, lower = 0;
#pragma unroll
          for (int e = 4 * u; e < 4 * u + 4; ++e) {
            first.most = ptx::max_nan(first.most, v[e]);
            const float w = fmaxf(weight_fn.weight(v[e]), 0.f);
            const float whole = __fmaf_rz(w, weight_fn.scale, 0x1p23f);
            const float rest = __fmaf_rn(w, weight_fn.scale, -__fadd_rn(whole, -0x1p23f));
            upper += __float_as_uint(whole);
            lower += __float_as_uint(__fmaf_rn(rest, 0x1p20f, 0x1p23f));
          }
          upper = __reduce_add_sync(kAllLanes, upper - 4 * MassSum::kBias);
          lower = __reduce_add_sync(kAllLanes, lower - 4 * MassSum::kBias);
          groups.add(group_mass, (static_cast<u64>(upper) << 20) + lower);
        }
        return;
      }
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

  // The masses of what remains. An element adds up to 2^23 to `upper` and up to 2^20 to `lower`, a warp 512 elements at
  // most: a sum of `lower` fits into 32 bits, one of `upper` does not and is added in halves. read() need not do so:
  // weights of at most 1 add up to 2^22.
  __device__ __forceinline__ void sum_masses() {
    constexpr int mass_tiles = windowed ? tiles : 1, size = 4 * mass_tiles;
    group_mass = 0;
    GroupMasses groups(cluster.lane, row.tiles_per_group() / mass_tiles);
    row.template for_each_chunk<mass_tiles>([&](const float (&v)[size], int base) {
      u32 upper = 0, lower = 0;
#pragma unroll
      for (int e = 0; e < size; ++e) {
        const float x = scaled(v[e], row.index(base, e));
        const float whole = __fadd_rz(x, 0x1p23f);
        const float rest = __fadd_rn(x, -__fadd_rn(whole, -0x1p23f));
        upper += __float_as_uint(whole);
        lower += __float_as_uint(__fmaf_rn(rest, 0x1p20f, 0x1p23f));
      }
      upper -= size * MassSum::kBias;
      lower = __reduce_add_sync(kAllLanes, lower - size * MassSum::kBias);
      const u32 part = __reduce_add_sync(kAllLanes, upper & 0xffffu), more = __reduce_add_sync(kAllLanes, upper >> 16);
      groups.add(group_mass, (static_cast<u64>(more) << 36) + (static_cast<u64>(part) << 20) + lower);
    });
  }

  // The approximate mass / 2^20 of the elements before each proposal. Proposals have mass, so that min-p drops nothing
  // before them.
  __device__ __forceinline__ void sum_before(const Proposal* proposals, float (&sums)[kProposals]) const {
    constexpr int chunk = kSumTiles * kTile;
#pragma unroll
    for (int n = 0; n < kProposals; ++n) sums[n] = 0.f;
    row.template for_each_chunk<kSumTiles>([&](const float (&v)[4 * kSumTiles], int base) {
      float w[4 * kSumTiles];
#pragma unroll
      for (int e = 0; e < 4 * kSumTiles; ++e) w[e] = kind == Kind::probs ? v[e] : weight_fn.scaled(v[e]);
#pragma unroll
      for (int n = 0; n < kProposals; ++n) {
        const int index = proposals[n].index;
        const float value = proposals[n].value;
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

  // The mass before one proposal that this warp's elements give, up to the error that compare_mass() allows. Many loads
  // are in flight: few blocks have a proposal that the window does not decide, and each of these reads its row.
  __device__ __forceinline__ u64 sum_before(const Proposal& proposal) const {
    constexpr int chunk = kAsyncTiles * kTile;
    const int index = proposal.index;
    const float value = proposal.value, next = from_order_key(order_key(value + 0.f) + 1);
    const auto weight = [&](float v) { return static_cast<double>(kind == Kind::probs ? v : weight_fn.scaled(v)); };
    double total = 0.;
    char* const stages = reinterpret_cast<char*>(list + 1) + (threadIdx.x >> 5) * kAsyncBytes<kAsyncTiles>;
    row.template for_each_chunk_async<kAsyncTiles>(stages, [&](const float (&v)[4 * kAsyncTiles], int base) {
      const float from = base + chunk <= index ? value : next;
#pragma unroll
      for (int e = 0; e < 4 * kAsyncTiles; ++e) {
        if (v[e] >= from) total += weight(v[e]);
      }
    });
    if (row.begin <= index && index < row.end)  // its own chunk has elements equal to it
      total += weight(value) * count_equal(index - (index - row.begin) % chunk, value, index);
    if (kind == Kind::probs) total = total * factor * weight_fn.scale;
    return warp_sum(__double2ull_rn(total * 0x1p20));
  }

  // Compares the sum of these with the goal. Float64 sums are exact up to 2^-36 for 2^17 additions of a lane, and up to
  // half of row.length beyond; masses are rounded to integers, as are the sums of the lanes.
  __device__ __forceinline__ Decision compare_mass(u64 sum, u64 goal) const {
    const u64 off = (sum >> 36) + row.length + 32 * cluster.num_warps;
    return sum + off < goal ? kAccepted : sum >= goal + off ? kRejected : kUndecided;
  }

  // Compares the mass before a proposal with the goal, from the float sum of that mass. The error of n floats, added in
  // any order, is at most n 2^-24 of their sum; masses are also rounded to integers. All warps get the same decision.
  __device__ __forceinline__ Decision compare(float sum, u64 goal) const {
    const int chunks = row.elements_per_warp / (kSumTiles * kTile) + 1;
    const int added = chunks + 8 * kSumTiles + 8 + cluster.num_warps + (windowed ? kMaxListed / 32 : 0);
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
    const int per_group = row.chunks_per_group() * Slice::chunk, group = (proposal.index - row.begin) / per_group;
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

  // Keeps the sums that the last wait() of the exchange brought.
  __device__ __forceinline__ void keep_window_sums(bool has_two_values) const {
    WindowSums sums;
    const float2 above = exchange.first_float_sums(cluster);
    sums.above = above.x, sums.above_lower = above.y;
    if (scratch->of_window.window.bits == kTopWindowBits)
      sums.mass = __ull2float_rn(scratch->masses[threadIdx.x >> 5].all) * (1.f / weight_fn.scale) * 0x1p-20f;
    if (has_two_values) {
      sums.counts = exchange.count_sums(cluster, cluster.num_warps);
      sums.counts_before = exchange.count_sums(cluster, cluster.warp);
    }
    if (cluster.lane == 0) scratch->of_window.sums[threadIdx.x >> 5] = sums;
    __syncwarp();
  }

  // Decides a proposal of this warp from the sums of the first pass, if they suffice.
  __device__ __forceinline__ Decision decide_by_window(const Proposal& proposal, u64 goal) const {
    const Window window = scratch->of_window.window;
    const float value = fmaxf(weight_fn.weight(proposal.value), 0.f);
    const WindowSums& sums = scratch->of_window.sums[threadIdx.x >> 5];
    const float above = sums.above, above_lower = sums.above_lower;
    // Weights of logits are not exactly in the order of the logits: those of elements before it are at least lower_end.
    constexpr float kSlack = kind == Kind::logits ? 0x1p-21f : 0.f;
    const float lower_end = value * (1.f - kSlack), upper_end = value * (1.f + kSlack);
    if (window.is_two_values()) {
      const auto compare_with = [&](float from, u32 count, float each) {
        return compare(__fmaf_rn(static_cast<float>(count), each, from) * weight_fn.scale, goal);
      };
      const bool is_upper = value == window.upper_value, is_lower = !is_upper && value == window.lower_value();
      const uint2 all = sums.counts, earlier = sums.counts_before;
      const u32* const of_groups = scratch->of_window.bins;
      if (is_upper) return compare_with(above, earlier.x + count_before(proposal, of_groups), value);
      if (is_lower)
        return compare_with(above_lower, earlier.y + count_before(proposal, of_groups + kWindowedThreads), value);
      if (value > window.upper_value) return compare_with(above, 0, 0.f) == kAccepted ? kAccepted : kUndecided;
      if (value < window.lower_value()) {
        return compare_with(above_lower, all.y, window.lower_value()) == kRejected ? kRejected : kUndecided;
      }
      if (compare_with(above, all.x, window.upper_value) == kRejected) return kRejected;
      return compare_with(above_lower, 0, 0.f) == kAccepted ? kAccepted : kUndecided;
    }
    if (window.lists && list->count <= kMaxListed) {
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
    if (window.bits == kTopWindowBits && sums.mass * window.unit > 0x1p31f) return kUndecided;
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
#pragma unroll 1
      for (int bin = cluster.lane; bin < kWindowBins; bin += 32) {
        const float weight = __uint2float_rn(bins[bin]);
        sum += bin > last_own ? weight : 0.f;
        same += bin >= own && bin <= last_own ? weight : 0.f;
        // An element of the bin has at least this weight.
        const float least = fmaxf(window.bin_begin(bin) * window.unit - 0.5f, 0.5f);
        off += bin >= own ? weight * __fdividef(0.5f, least) : 0.f;
      }
    }
    // 1 % and 2^-18 are for the rounding of these float sums.
    sum = warp_float_sum(sum), off = 1.01f * warp_float_sum(off) + 0x1p-18f * sum;
    same = sum + fmaxf(warp_float_sum(same) - value * window.unit, 0.f);
    const float unit = __fdividef(1.f, window.unit);
    if (compare((above + fmaxf(sum - off, 0.f) * unit) * weight_fn.scale, goal) == kRejected) return kRejected;
    return own >= 0 && compare((above + (same + off) * unit) * weight_fn.scale, goal) == kAccepted ? kAccepted
                                                                                                   : kUndecided;
  }

  // ---- a proposal ---------------------------------------------------------------------------------------------------

  // Decides a proposal from the masses and the largest elements of all slices, which the last wait() of the exchange
  // brought. That suffices in rows of few large elements.
  __device__ __forceinline__ Decision decide_by_slices(const Located& found, u64 goal) const {
    const int own = order_key(found.proposal.value + 0.f);
    u64 most = 0, least = 0;  // the mass before the proposal is between them
    exchange.for_each_pair(cluster, 0, cluster.num_warps, [&](int warp, u64 mass, u64 most_of_warp) {
      const int key = static_cast<int>(static_cast<u32>(most_of_warp));
      const bool is_before = key > own || (key == own && warp < cluster.warp);
      if (is_before || warp == cluster.warp) most += mass;
      if (is_before) least += mass_of(weight_fn.scaled(from_order_key(key)));
    });
    if (warp_sum(most) - found.mass < goal) return kAccepted;
    return warp_sum(least) >= goal ? kRejected : kUndecided;
  }

  // The element at which the prefix sum of masses exceeds the point, by the warp whose slice has it. before: the mass
  // of the slices before.
  __device__ __forceinline__ Located locate(u64 point, u64 before) const {
    u64 running = before;
    int base = row.begin;
    if (row.end - row.begin > row.tiles_per_group() * kTile) {
      const u64 up_to = before + warp_inclusive_sum(group_mass, cluster.lane);
      const int group = __ffs(__ballot_sync(kAllLanes, up_to > point)) - 1;
      running = __shfl_sync(kAllLanes, up_to - group_mass, group);
      base += group * row.tiles_per_group() * kTile;
    }
    auto raw = row.template load<1>(base);
    float v[4];
    u64 each[4], reached;
    // Bounded by the slice even if another kernel modifies the row meanwhile.
#pragma unroll 1
    for (;; base += kTile) {
      row.template unpack<1>(raw, v);
      const bool is_last = base + kTile >= row.end;
      if (!is_last) raw = row.template load<1>(base + kTile);
#pragma unroll
      for (int e = 0; e < 4; ++e) each[e] = mass_of(scaled(v[e], row.index(base, e)));
      reached = each[0] + each[1] + each[2] + each[3];
      if (first_pass == FirstPass::only && row.groups_are_tiles()) break;
      const u64 tile = warp_sum(reached);
      if (running + tile > point || is_last) break;
      running += tile;
    }
    const u64 sum = reached;
    reached = running + warp_inclusive_sum(sum, cluster.lane);
    const int lane = (__ffs(__ballot_sync(kAllLanes, reached > point)) - 1) & 31;
    reached -= sum;
    u64 before_found = reached;
    int found = 0;
#pragma unroll
    for (int e = 0; e < 3; ++e) {
      reached += each[e];
      if (reached <= point) found = e + 1, each[0] = each[e + 1], v[0] = v[e + 1], before_found = reached;
    }
    const int index = min(__shfl_sync(kAllLanes, row.index(base, found), lane), row.length - 1);
    return {{index, __shfl_sync(kAllLanes, v[0], lane), kUndecided, 0},
            __shfl_sync(kAllLanes, each[0], lane),
            __shfl_sync(kAllLanes, before_found, lane)};
  }
};

}  // namespace kestrel::sampling
