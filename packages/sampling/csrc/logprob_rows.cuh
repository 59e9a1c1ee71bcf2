// Log-probabilities and ranks: of one token per row and of the n most probable, for top-k up to 1024 or no filter.
//
// A cluster reads the row once, as for top-k (top_k_candidates.cuh), and also sums the exponentials of every chunk
// relative to its largest element, so that a result does not depend on how the row is split. The group that holds the
// largest element of the row is read once more: a log-probability near 0 keeps its relative precision. The elements
// before the token in descending order are counted in the same pass. With top-k the sum is that of the selected
// elements, in float64. threshold_logprobs then corrects rows with other filters. A whole step first applies penalties
// to the tokens that a block reads itself, and masks elements as they are read.
#pragma once

#include <type_traits>

#include "history.cuh"
#include "logprob_sum.cuh"
#include "threshold_rows.cuh"
#include "top_k_draw.cuh"

namespace kestrel::sampling {

struct LogprobParams : Params {
  const char* tokens = nullptr;  // or null: those that are drawn
  bool tokens_are_int64 = false;
  bool raw = false;  // log-probabilities before temperature and filters
  int top_n = 0;
  float* logprobs = nullptr;
  int* ranks = nullptr;
  int* top_ids = nullptr;
  float* top_logprobs = nullptr;
};

// Also what process_logits does before.
struct StepParams : LogprobParams, HistoryParams {
  int hash_bits = 0;  // log2 of the slots of a hash table
  Bitmask bitmask;
};

// The parameters of a row, as token_logprobs takes them.
struct LogprobRow {
  float temperature;  // 1 instead of 0 and below
  float min_p;
  u64 q32;  // top-p in parts of 2^32
  int k;    // 0: off
  int token;
  bool has_token;  // in the vocabulary
  LogprobRow() = default;
  __device__ __forceinline__ LogprobRow(const LogprobParams& p, int64_t row)
      : temperature(p.temperature.at(row)), min_p(clamp_min_p(p.min_p.at(row))), q32(top_p_q32(p.top_p.at(row))) {
    const int64_t wanted = p.top_k.at(row);
    k = wanted > 0 && wanted < p.length ? static_cast<int>(wanted) : 0;
    if (temperature <= 0.f) temperature = 1.f, k = 1;
    token = 0, has_token = false;
    if (!p.tokens) return;
    const int64_t id = p.tokens_are_int64 ? reinterpret_cast<const int64_t*>(p.tokens)[row]
                                          : reinterpret_cast<const int*>(p.tokens)[row];
    has_token = id >= 0 && id < p.length;
    if (has_token) token = static_cast<int>(id);
  }
  __device__ __forceinline__ bool selects() const { return k > 0 && k <= kMaxK; }
  // Whether logprob_rows covers the row; else threshold_logprobs does.
  __device__ __forceinline__ bool is_covered() const {
    return selects() || (k == 0 && q32 == kQ32One && !(min_p > 0.f));
  }
};

constexpr int kStepIds = 2;  // of a history that a thread loads together

// The results of a row that is not one.
__device__ __forceinline__ void write_no_logprobs(const LogprobParams& p, int64_t row_idx, bool has_token) {
  if (threadIdx.x == 0) {
    p.logprobs[row_idx] = has_token ? not_a_number() : -INFINITY;
    p.ranks[row_idx] = 0;
  }
  for (int n = threadIdx.x; n < p.top_n; n += blockDim.x) p.top_logprobs[row_idx * p.top_n + n] = not_a_number();
}

// Finds the one of `num` entries, of different ids, in which the point of their mass in the order of ids lies. The
// block calls found(n) in one thread.
template <typename Id, typename Found>
__device__ __forceinline__ void locate_point(const u64* masses, int num, u64 point, Id id, Found found) {
  constexpr int kLanes = 8;  // per entry
  const int lane = threadIdx.x % kLanes, entries = blockDim.x / kLanes;
#pragma unroll 1
  for (int base = 0; base < num; base += entries) {
    const int own = base + threadIdx.x / kLanes, own_id = id(min(own, num - 1));
    u64 before = 0;
#pragma unroll 4
    for (int other = lane; other < num; other += kLanes) before += id(other) < own_id ? masses[other] : 0;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) before += __shfl_xor_sync(kAllLanes, before, distance);
    if (lane == 0 && own < num && point >= before && point - before < masses[own]) found(own);
  }
}

// The tokens of a history that are in the chunks of a row which this block reads.
struct TokensOfBlock : Slots {
  int shift;       // of an id: the block that reads it
  u32 rank, mask;  // of this block; of the blocks
  __device__ __forceinline__ u32 place(u32 id) const {
    return id < size && (id >> shift & mask) == rank ? id : kNoToken;
  }
};

// Applies penalties to these tokens in place. The caller has cleared the slots. Ends with a barrier.
template <typename T>
__device__ __forceinline__ void penalise(const HistoryParams& p, int64_t row_idx, const TokensOfBlock& part,
                                         const char* to) {
  struct {
    T* logits;
    const u32* mask = nullptr;  // applied where elements are read
    __device__ __forceinline__ void write(u32 token, float v) const { logits[token] = from_float<T>(v); }
  } const row = {reinterpret_cast<T*>(const_cast<char*>(to))};
  HistoryTokens<T, kStepIds, /*kThreads=*/0> tokens;
  tokens.count(p, row_idx, part, row);
  __syncthreads();
  tokens.write(p, row_idx, part, row);
  __syncthreads();
}

// draws: the token is drawn as top_k_draw does; all rows have a top-k. processes: penalties are applied first, in
// place, and the bitmask while elements are read. rings: rows are read through a TileRing, and the second block of a
// cluster adds the sums of chunks; there are no penalties.
template <bool draws, bool processes, bool rings>
__global__ void __launch_bounds__(kMaxSelectThreads, 1)
    logprob_rows(const __grid_constant__ std::conditional_t<processes, StepParams, LogprobParams> p) {
  constexpr Kind kind = processes ? Kind::masked_scores : Kind::scores;
  using Row = TopKRow<kind>;
  const Cluster cluster(p.cluster_size);
  // With a ring the blocks read alternate chunks, so that they have equally many.
  const int first_chunk = rings ? static_cast<int>(threadIdx.x / 32) * cluster.size + cluster.block_rank : cluster.warp;
  const int64_t row_idx = cluster.row_idx();
  TopKScratch* const scratch = reinterpret_cast<TopKScratch*>(dynamic_shared_memory());
  LogprobScratch* const sums = reinterpret_cast<LogprobScratch*>(scratch + 1);
  const TopKLayout layout(p.length, p.max_top_k);
  Row row(p.rows + row_idx * p.row_bytes, p.dtype, p.length, layout.chunk_bits);
  char* const memory = reinterpret_cast<char*>(sums + 1);
  ChunkSum* const chunk_sums = reinterpret_cast<ChunkSum*>(memory + layout.bytes());
  const TopKSelector<kind> selector = {cluster, row, scratch, memory, layout};
  const SecondBlockSum<kind> second = {cluster, row, sums, chunk_sums, layout.num_chunks};
  const RingMemory ring_memory(reinterpret_cast<char*>(chunk_sums + layout.num_chunks), cluster.warps_per_block);
  selector.init();
  if constexpr (rings) second.init(), ring_memory.init(/*has_mask=*/processes);
  LogprobRow params;
  float of_token = 0.f;
  bool publishes = false;  // this block writes elements that other blocks read
  if constexpr (processes && !rings) {
    row.mask = p.bitmask.row(row_idx);
    const bool has_history = p.history.ids != nullptr;
    publishes = has_history && cluster.size > 1;
    const u32 num_slots = 1u << p.hash_bits;
    u32* const slots = reinterpret_cast<u32*>(chunk_sums + layout.num_chunks);
    const int warp_bits = 31 - __clz(cluster.warps_per_block);
    const TokensOfBlock part = {{slots, slots + num_slots, p.hash_bits, 0, 0, 0, static_cast<u32>(p.length)},
                                layout.chunk_bits + warp_bits,
                                static_cast<u32>(cluster.block_rank),
                                static_cast<u32>(cluster.size - 1)};
    if (has_history) part.clear(num_slots);
    if (cluster.size > 1) cluster.arrive_release();
    __syncthreads();
    pdl_wait();
    pdl_trigger();
    if (has_history) {
      if (p.dtype == kRowFloat32) {
        penalise<float>(p, row_idx, part, row.row);
      } else if (p.dtype == kRowFloat16) {
        penalise<__half>(p, row_idx, part, row.row);
      } else {
        penalise<__nv_bfloat16>(p, row_idx, part, row.row);
      }
    }
  } else {
    if constexpr (processes) __syncthreads();  // every warp waits at the mbarrier of the bitmask
    cluster.arrive_release();
    pdl_wait();
    pdl_trigger();
    if constexpr (rings) {
      params = LogprobRow(p, row_idx);  // before the copies, for which later loads would wait
      if constexpr (processes) {
        row.mask = p.bitmask.row(row_idx);
        if (threadIdx.x == 0) ring_memory.start_mask(row.mask, mask_bytes(p.length));
      }
      const TileRing<kind> ring(row, ring_memory, first_chunk, cluster.num_warps);
      ring.start_first(0, 1);
      if constexpr (!draws) of_token = row.element(params.token) + 0.f;
      ring.start_first(1, kRingStages);
    }
  }
  WeightFn<Kind::logits> sum_fn, weight_fn;
  int k, selected;
  {
    if constexpr (!rings) params = LogprobRow(p, row_idx);
    k = params.selects() ? params.k : 0, selected = max(k, p.top_n);
    using Reader = LogprobReader<kind, !draws, rings>;
    Reader reader = [&]() -> Reader {
      if constexpr (rings) {
        return {row, {row, ring_memory, first_chunk, cluster.num_warps}, 0.f, 0, 0.f};
      } else {
        return {row, {row, {}}, 0.f, 0, 0.f};
      }
    }();
    if constexpr (processes && rings) reader.mask = ring_memory.mask;
    if constexpr (!rings) {
      if (first_chunk < layout.num_chunks) reader.load(first_chunk << layout.chunk_bits, cluster.lane);
    }
    // While the loads are in flight:
    if (draws && cluster.block_rank == 0 && threadIdx.x == blockDim.x - 32)
      scratch->random_word = random_word(p.seed.at(row_idx), p.offset.at(row_idx));
    sum_fn.set_temperature(draws && p.raw ? 1.f : params.temperature);
    if (rings) weight_fn.set_temperature(params.temperature);
    reader.slope = sum_fn.slope + sum_fn.slope_rest;
    if constexpr (!draws) {
      reader.token = params.token;
      reader.of_token = rings ? of_token : row.element(params.token) + 0.f;
    }
    if constexpr (processes && rings) ptx::mbarrier_wait(ring_memory.mask_full, 0);
    const u32 received = ptx::map_shared(ptx::shared_address(&scratch->received), 0);
    const u32 sums_to = ptx::map_shared(ptx::shared_address(chunk_sums), 0);
    ChunkSum sum;
    selector.read_row(
        first_chunk, selected,
        [&](int chunk) { return reader.read(chunk, chunk + cluster.num_warps, cluster.lane, sum); },
        [&](int chunk) {
          if (cluster.lane != 0) return;
          if constexpr (rings) {
            second.send_chunk(chunk, sum);
          } else if (cluster.size > 1) {
            ptx::store_async(sums_to + sizeof(ChunkSum) * chunk, sum.bits(), received);
          } else {
            chunk_sums[chunk] = sum;
          }
        });
    if (publishes) {  // the first block reads some of them once more, all blocks if top-p is joint
      __syncwarp();
      cluster.arrive_release();
    }
    const u64 before = draws ? 0 : __reduce_add_sync(kAllLanes, reader.before);
    if (!draws && cluster.lane == 0) {
      if (cluster.size > 1) {
        ptx::store_async(ptx::map_shared(ptx::shared_address(&sums->before[cluster.warp]), 0), before, received);
      } else {
        sums->before[cluster.warp] = before;
      }
    }
  }
  if constexpr (!rings) params = LogprobRow(p, row_idx);                // again, to save registers
  const float temperature = draws && p.raw ? 1.f : params.temperature;  // of the log-probabilities
  const bool joint = k > 0 && p.joint && params.q32 < kQ32One;
  if (!rings) weight_fn.set_temperature(params.temperature), sum_fn.set_temperature(temperature);
  TopKRange range = {};
  if (cluster.block_rank == 0)
    range = selector.receive((rings ? 0 : sizeof(ChunkSum) * layout.num_chunks) + (draws ? 0 : 8 * cluster.num_warps));
  if (publishes) cluster.wait();
  if constexpr (rings) {
    if (cluster.block_rank == 0 && threadIdx.x == 0) second.expect();
    if (cluster.block_rank == second.kRank && threadIdx.x < 32) second.sum_and_send(sum_fn);
  }
  if (joint) {
    if (cluster.block_rank == 0) scratch->largest = range.largest;
    cluster.sync();
    range.largest = cluster.map_shared(scratch, 0)->largest;
  } else if (cluster.block_rank != 0) {
    return;
  }
  const float top = Row::value(static_cast<u64>(range.largest) << 32);
  weight_fn.top = sum_fn.top = top;
  weight_fn.least = params.min_p;
  weight_fn.set_scale(p.length);
  if (joint) sum_row(selector, weight_fn, 1.f);
  if (cluster.block_rank != 0) return;

  if (!draws && !rings) of_token = row.element(params.token);
  int rank = 0;  // of the token, from 0
  if constexpr (!draws) {
    u32 before = 0;
    for (int warp = cluster.lane; warp < cluster.num_warps; warp += 32) before += static_cast<u32>(sums->before[warp]);
    rank = static_cast<int>(__reduce_add_sync(kAllLanes, before));
  }

  const bool is_ranked = selector.ranks();
  const u64* keys = selector.candidates();  // from here on in descending order
  u64* const masses = selector.masses();
  const auto sum_row_once = [&] {
    if (rings || threadIdx.x < blockDim.x - 32) return;
    const double2 sum = sum_chunks(chunk_sums, layout.num_chunks, row, sum_fn, [&](int chunk) {
      return __ballot_sync(kAllLanes, selector.maxima()[32 * chunk + cluster.lane] == row.key(sum_fn.top));
    });
    if (cluster.lane == 0) sums->row_sum = sum;
  };
  int count = 0;  // of the candidates
  if (selected > 0) {
    // The row is summed while elements are loaded.
    count = selector.collect(
        selected, range,
        [&](u32 n, u64 key) {
          if (draws && is_ranked) masses[n] = mass_of(weight_fn.scaled(Row::value(key)));
        },
        sum_row_once);
    keys = selector.template ordered<draws>(count);
  } else {
    sum_row_once();
    __syncthreads();
  }
  // The first warp may be drawing.
  const int first_n = (threadIdx.x + blockDim.x - 32) % blockDim.x;
  if constexpr (rings) second.wait();
  const double of_row = rings ? sums->log_sum : sums->row_sum.y;  // NaN if the row holds one
  const bool is_valid = fabsf(top) < INFINITY && !isnan(of_row) && !isnan(params.temperature);
  if (!is_valid) {
    if (draws && threadIdx.x == 0) p.ids[row_idx] = 0, p.valid[row_idx] = false;
    write_no_logprobs(p, row_idx, draws || params.has_token);
    for (int n = first_n; n < p.top_n; n += blockDim.x) p.top_ids[row_idx * p.top_n + n] = row.index(keys[n]);
    return;
  }

  const auto exponent = [&](float v) {
    const double below = static_cast<double>(v) - top;  // -inf stays -inf
    return temperature == 1.f ? below : below / static_cast<double>(temperature);
  };
  const u64 row_mass = joint ? scratch->row_mass : 0;
  if (draws && is_ranked) {
    if (threadIdx.x < 32)
      draw_ranked(scratch, selector.ranked_masses(), masses, k, count, row_mass, params.q32,
                  [&](int place) { scratch->drawn = place; });
  } else if (k > 0 && (draws || params.q32 < kQ32One)) {
    for (int n = threadIdx.x; n < k; n += blockDim.x) masses[n] = mass_of(weight_fn.scaled(Row::value(keys[n])));
    if (!draws && threadIdx.x == 0) scratch->random_word = 0;  // no point is drawn
    __syncthreads();
    if (threadIdx.x < 32) keep_top_p(scratch, masses, k, row_mass, params.q32);
    __syncthreads();
    if constexpr (draws) {
      locate_point(
          masses, scratch->num_kept, scratch->point, [&](int n) { return row.index(keys[n]); },
          [&](int n) { scratch->drawn = n; });
      __syncthreads();
    }
  }
  int kept = p.length;  // of the elements in descending order
  double log_sum = 0.;
  if (k == 0 || (draws && p.raw)) {
    if constexpr (rings) {
      log_sum = sums->log_sum;
    } else {
      // The logarithm takes as long as the draw.
      if (!(draws && is_ranked) || (threadIdx.x >= 32 && first_n < max(p.top_n, 1)))
        log_sum = log1p(sums->row_sum.x - 1. + sums->row_sum.y);
      if (threadIdx.x == 32) sums->log_sum = log_sum;
    }
  } else {
    int reach = 0;
    for (int n = threadIdx.x; n < k; n += blockDim.x)
      reach += !(params.min_p > 0.f) || weight_fn.weight(Row::value(keys[n])) >= params.min_p;
    kept = __syncthreads_count(reach > 0);
    // More than one element per thread where k exceeds the number of threads.
    for (int n = 1; n * static_cast<int>(blockDim.x) < k; ++n) kept += __syncthreads_count(reach > n);
    if (params.q32 < kQ32One) kept = min(kept, scratch->num_kept);
    kept = max(kept, 1);
    const double2 of_kept = block_sums(kept, sums->warp_sums, [&](int n) -> double2 {
      if (keys[n] >> 32 == range.largest) return {1., 0.};
      return {0., exp(exponent(Row::value(keys[n])))};
    });
    log_sum = log1p(of_kept.x - 1. + of_kept.y);
  }
  for (int n = first_n; n < p.top_n; n += blockDim.x) {
    const int64_t to = row_idx * p.top_n + n;
    p.top_ids[to] = row.index(keys[n]);
    p.top_logprobs[to] = n < kept ? static_cast<float>(exponent(Row::value(keys[n])) - log_sum) : -INFINITY;
  }
  if (draws && is_ranked) {
    __syncthreads();
    if (p.raw) log_sum = sums->log_sum;
  }
  if (threadIdx.x != 0) return;
  if constexpr (draws) rank = scratch->drawn, of_token = Row::value(keys[rank]);
  const bool has_token = draws || params.has_token;
  const float logprob = static_cast<float>(exponent(of_token) - log_sum);
  p.logprobs[row_idx] = has_token && rank < kept ? logprob : -INFINITY;
  p.ranks[row_idx] = has_token ? rank + 1 : 0;
  if (draws) p.ids[row_idx] = row.index(keys[rank]), p.valid[row_idx] = true;
}

// The log-probabilities of rows that logprob_rows does not cover, after it has written ids and ranks: a threshold
// search finds what the filters keep (threshold_rows.cuh).
template <Storage storage>
__global__ void __launch_bounds__(kSearchThreads, 1) threshold_logprobs(const __grid_constant__ LogprobParams p) {
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
  const LogprobRow params(p, row_idx);
  if (params.is_covered()) return cluster.wait();
  WeightFn<Kind::logits> weight_fn;
  weight_fn.set_common(p.length);
  ThresholdSearch<Kind::logits, storage> search = {cluster, slice,      weight_fn,      exchange,
                                                   scratch, candidates, p.list_capacity};
  float most = -INFINITY;
  slice.read(cluster.lane, [&](const auto& v) {
#pragma unroll
    for (int e = 0; e < static_cast<int>(sizeof(v) / sizeof(float)); ++e) most = ptx::max_nan(most, v[e]);
  });
  const int largest = __reduce_max_sync(kAllLanes, isnan(most) ? INT32_MAX : order_key(most));
  cluster.wait();
  exchange.broadcast(cluster, 0, static_cast<u32>(largest));
  exchange.sync(cluster);
  weight_fn.top = from_order_key(exchange.max(cluster, 0));
  if (!(fabsf(weight_fn.top) < INFINITY) || isnan(params.temperature)) return;  // as logprob_rows has written
  weight_fn.set_temperature(params.temperature);
  weight_fn.least = params.min_p;
  weight_fn.set_scale(p.length);
  const KeptSet kept = filter(search, {params.k, params.q32, p.joint}, /*has_histogram=*/false, 0);
  auto mass = search.template mass_of_kept<Precision::accurate>(kept);
  const double sum = static_cast<double>(search.total(mass)) / (1048576. * static_cast<double>(weight_fn.scale));
  if (cluster.block_rank != 0) return;
  const double log_sum = log(sum), top = weight_fn.top, temperature = params.temperature;
  const auto logprob = [&](int id) {
    const float v = slice.element(id);
    const bool stays =
        kept.has(v, id) && v > -INFINITY && (!(params.min_p > 0.f) || weight_fn.weight(v) >= params.min_p);
    return stays ? static_cast<float>((static_cast<double>(v) - top) / temperature - log_sum) : -INFINITY;
  };
  if (threadIdx.x == 0 && params.has_token) p.logprobs[row_idx] = logprob(params.token);
  for (int n = threadIdx.x; n < p.top_n; n += blockDim.x) {
    const int64_t to = row_idx * p.top_n + n;
    p.top_logprobs[to] = logprob(p.top_ids[to]);
  }
}

}  // namespace kestrel::sampling
