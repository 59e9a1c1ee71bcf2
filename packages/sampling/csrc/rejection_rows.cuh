// One id per row from what min-p and top-p keep, by rejection sampling: neither a sort nor a threshold search.
//
// A cluster processes a row. A round draws four proposals, in the first rounds from the whole row, then from what
// precedes all rejected ones. A proposal is accepted if the mass of the elements before it in descending order is below
// the goal of top-p. A round from the whole row takes no pass over it where the sums of the first pass decide.
#pragma once

#include "rejection_sampler.cuh"

namespace kestrel::sampling {

// Threads of a block, at most: with one block per multiprocessor, or with two where rows have windows. Architectures
// other than sm_90 would spill with as few registers as two blocks leave.
constexpr int max_threads(FirstPass first_pass) {
  return first_pass != FirstPass::windowed ? kPlainThreads : kWindowedThreads;
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
constexpr int kWindowedBlocksPerSm = 2;
#else
constexpr int kWindowedBlocksPerSm = 1;
#endif

constexpr u32 kMostRounds = 1 << 12;  // for rows that another kernel modifies meanwhile; others end far before

template <Kind kind, FirstPass first_pass>
__global__ void __launch_bounds__(max_threads(first_pass), first_pass != FirstPass::windowed ? 1 : kWindowedBlocksPerSm)
    rejection_rows(const __grid_constant__ Params p) {
  constexpr bool logits = kind == Kind::logits;
  constexpr bool windowed = first_pass == FirstPass::windowed;
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
  cluster.arrive();
  if (windowed) {
    for (int bin = threadIdx.x; bin < kWindowBins; bin += blockDim.x) scratch->of_window.bins[bin] = 0;
    if (threadIdx.x == 0) reinterpret_cast<WindowList*>(memory)->count = 0;
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
  if constexpr (windowed) sampler.list = reinterpret_cast<WindowList*>(memory);
  bool early, has_window, has_two_values = false;
  typename Sampler::FirstPassResult first;
  typename Sampler::Largest largest;
  const auto read_with_window = [&](u64 q32, float row_sum) {
    __syncthreads();
    Window window =
        estimate_window(cluster, row, &scratch->of_window, weight_fn, static_cast<float>(q32) * 0x1p-32f, row_sum);
    if (logits && window.is_two_values()) window = Window();  // different logits may have one weight
    has_window = window.has_elements();
    if (threadIdx.x == 0) scratch->of_window.window = window;
    has_two_values = window.is_two_values();
    if (!has_window) {
      first = sampler.template read<WindowMode::none>(window);
    } else if (!logits && has_two_values) {
      first = sampler.template read<WindowMode::two_values>(window);
      scratch->of_window.bins[threadIdx.x] = first.upper;
      scratch->of_window.bins[kWindowedThreads + threadIdx.x] = first.lower;
    } else if (window.bits == kUsualWindowBits) {
      first = sampler.template read<WindowMode::usual>(window);
    } else if (window.lists) {
      first = sampler.template read<WindowMode::few>(window);
    } else {
      first = sampler.template read<WindowMode::bins>(window);
    }
  };
  const auto broadcast_window = [&] {
    exchange.broadcast_pair(
        cluster, 2, exchange.pack(warp_float_sum(first.above), warp_float_sum(first.above_lower)),
        __reduce_add_sync(kAllLanes, first.upper) | static_cast<u64>(__reduce_add_sync(kAllLanes, first.lower)) << 32);
    if (cluster.size > 1) cluster.sync();  // the bins of all blocks are complete
  };
  {
    // Read the row. For probabilities also sum the mass, assuming the common power of two.
    const RowParams<kind> params(p, row_idx);
    early = !logits && !(params.min_p > 0.f) && !params.greedy;
    has_window = windowed && early && params.q32 < kQ32One;
    if (is_rng_thread) scratch->key.load(p, row_idx);
    if constexpr (logits) {
      if (windowed) weight_fn.set_temperature(params.temperature <= 0.f ? 1.f : params.temperature);
      largest = sampler.largest();
      first.most = largest.of_lane;
    } else if (windowed && has_window) {
      read_with_window(params.q32, /*row_sum=*/1.f);
    } else {
      first = sampler.template read<WindowMode::none>(Window());
    }
  }
  if (!windowed) row.switch_to_smem();
  cluster.wait();
  const u32 most = __reduce_max_sync(kAllLanes, isnan(first.most) ? INT32_MAX : order_key(first.most + 0.f));
  exchange.broadcast_pair(cluster, 0, early ? warp_sum(sampler.group_mass) : 0, most);
  if (logits && windowed) exchange.broadcast_floats(cluster, 2, largest.of_warp, warp_float_sum(largest.sum));
  if (has_window) broadcast_window();
  if (is_rng_thread) {
    ptx::cp_async_wait_all();
    random_words(scratch->key.seed, scratch->key.offset, 0, scratch->words[0]);
  }
  exchange.wait(cluster, is_rng_thread);
  const auto keep_masses = [&](const AsyncExchange::Masses& masses) {
    if (cluster.lane == 0)
      scratch->masses[threadIdx.x >> 5] = {masses.all, masses.before, exchange.value(cluster, 0, cluster.warp)};
    __syncwarp();
  };
  {
    const AsyncExchange::Totals totals = exchange.totals(cluster);
    weight_fn.top = from_order_key(totals.most);
    keep_masses(totals.masses);
  }
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

  // The rounds. An iteration of the outer loop exchanges the masses of what remains, unless those of the whole row are
  // known. With n == kProposals it then draws four proposals from them; with n < kProposals these masses are those of
  // what precedes proposal n, which they decide. The inner loop goes over the undecided proposals, and stops for exact
  // masses where float sums do not decide.
  const bool unfiltered = first_pass == FirstPass::only || greedy || q32 == kQ32One;  // the first proposal is accepted
  if constexpr (logits && windowed) {
    if (!unfiltered && !(weight_fn.least > 0.f)) {
      const float row_sum = exchange.sum_of_weights(cluster, weight_fn);
      read_with_window(q32, row_sum);
      exchange.broadcast(cluster, 0, warp_sum(sampler.group_mass));
      if (has_window) broadcast_window();
      exchange.wait(cluster, is_rng_thread);
      keep_masses(exchange.masses(cluster));
      has_masses = true;
    }
  }
  if (windowed && has_window) sampler.keep_window_sums(has_two_values);
  bool knows_masses = has_masses;                                  // of what remains
  bool has_slices = first_pass == FirstPass::plain && has_masses;  // masses and largest elements of all slices
  u64 goal = 0;
  u32 round = 0;
  int n = kProposals;                                               // the proposal that is checked
  int decisions = 0;                                                // two bits per proposal
  bool has_float_sums = false;                                      // decisions include those by float sums
  Proposal first_rejected = {INT32_MAX, -INFINITY, kUndecided, 0};  // in descending order
#pragma unroll 1
  for (;;) {
    const Proposal* const proposals = scratch->proposals[round & 1];
    if (!knows_masses) {
      sampler.sum_masses();
      exchange.broadcast(cluster, 0, warp_sum(sampler.group_mass));
      exchange.wait(cluster, is_rng_thread);
      keep_masses(exchange.masses(cluster));
      knows_masses = true;
    }
    const RemainingMasses& remaining = scratch->masses[threadIdx.x >> 5];
    const u64 all = remaining.all;
    if (goal == 0) goal = max(u64{1}, scale_q32(all, q32));
    if (n < kProposals) {  // the exact masses decide this proposal
      first_rejected = proposals[n++];
      if (all < goal) {
        if (first_warp) p.ids[row_idx] = first_rejected.index, p.valid[row_idx] = true;
        return;
      }
      knows_masses = false;
    } else {
      if (all == 0 || round == kMostRounds) {  // only if another kernel modifies the row meanwhile
        if (first_warp) p.ids[row_idx] = 0, p.valid[row_idx] = false;
        return;
      }
      const u64 before = remaining.before, own = remaining.own;
      Located found;
#pragma unroll 1
      for (n = 0; n < (unfiltered ? 1 : kProposals); ++n) {
        const u64 point = greedy ? 0 : scale_q32(all, scratch->words[round & 1][n]);
        if (point < before || point - before >= own) continue;
        if (!found.has(point)) {
          found = sampler.locate(point, before);
          int& decision = found.proposal.decision;
          if (unfiltered) {
            if (cluster.lane == 0) p.ids[row_idx] = found.proposal.index, p.valid[row_idx] = true;
            return;
          }
          if (all - found.mass < goal) {
            decision = kAccepted;
          } else if (windowed && has_window) {
            decision = sampler.decide_by_window(found.proposal, goal);
          } else if (has_slices && found.mass > all >> 8) {
            decision = sampler.decide_by_slices(found, goal);
          }
        }
        const Proposal& proposal = found.proposal;
        exchange.broadcast_int4(cluster, reinterpret_cast<int4*>(scratch->proposals[round & 1] + n),
                                {proposal.index, __float_as_int(proposal.value), proposal.decision, 0});
      }
      if (unfiltered) return;
      exchange.broadcast(cluster, 0, 0);  // after the wait all warps have finished reading the masses
      exchange.wait(cluster, is_rng_thread, kProposals);
      n = 0;
      has_slices = has_float_sums = false;
      decisions = 0;
#pragma unroll
      for (int m = 0; m < kProposals; ++m) decisions |= proposals[m].decision << (2 * m);
    }

    // The first accepted proposal. If there is none, the first rejected one in descending order bounds what may be
    // accepted.
#pragma unroll 1
    for (; n < kProposals; ++n) {
      const Proposal proposal = proposals[n];
      if (!proposal.is_before(first_rejected)) continue;
      int decision = decisions >> (2 * n) & 3;
      if (decision == kUndecided && !has_float_sums) {
        // Ties of logits have no window, so that all proposals of a row are summed at once.
        if constexpr (windowed && !logits) {
          exchange.broadcast(cluster, 2, sampler.sum_before(proposal));
          exchange.wait(cluster, is_rng_thread);
          decisions |= sampler.compare_mass(exchange.sum(cluster, 2), goal) << (2 * n);
        } else {
          float sums[kProposals];
          sampler.sum_before(proposals, sums);
          exchange.broadcast_pair(cluster, 2, exchange.pack(sums[0], sums[1]), exchange.pack(sums[2], sums[3]));
          exchange.wait(cluster, is_rng_thread);
          has_float_sums = true;
          const float4 all_sums = exchange.template float_sums<logits ? 1 : kFloatSumLoads>(cluster);
          decisions |= sampler.compare(all_sums.x, goal) | sampler.compare(all_sums.y, goal) << 2 |
                       sampler.compare(all_sums.z, goal) << 4 | sampler.compare(all_sums.w, goal) << 6;
        }
        decision = decisions >> (2 * n) & 3;
      }
      if (decision == kUndecided) {
        sampler.restrict_to_before(proposal.value, proposal.index);
        knows_masses = false;
        break;
      }
      if (decision == kAccepted) {
        if (first_warp) p.ids[row_idx] = proposal.index, p.valid[row_idx] = true;
        return;
      }
      first_rejected = proposal;
    }
    if (n < kProposals) continue;
    if (++round >= rounds_from_row(q32)) {
      sampler.restrict_to_before(first_rejected.value, first_rejected.index);
      knows_masses = false;
    } else if (!knows_masses) {
      sampler.remove_bound();
    }
    if (is_rng_thread) random_words(scratch->key.seed, scratch->key.offset, round, scratch->words[round & 1]);
    if (knows_masses) __syncthreads();  // else the words are read after the masses are exchanged
  }
}

}  // namespace kestrel::sampling
