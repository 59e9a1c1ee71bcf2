// Ids and probabilities by a search for thresholds: larger k than few_rows.cuh takes, what it leaves, softmax,
// renormalisation.
//
// Must move:  a row once, and what is written; about 25 instructions an element.
// Split:      a row per team of blocks, which hold it in shared memory where that is large enough.
// Measured:   on an H200, of the limit (launches and bytes): top-k then top-p, k = 50, 12 % at 1x51200 and 9 % at
//             256x128256, when it took these rows (results/h200_designs.json, search). Predicted: 36 % at 1x51200.
//             What it takes today is not on record.
#pragma once

#include "params.cuh"
#include "search.cuh"

namespace kestrel::sampling {

// What the caller asks of one row.
struct Filters {
  int64_t top_k;
  u64 top_p;  // in parts of 2^32
  bool joint;
};

template <Kind kind, bool resident>
__device__ __forceinline__ Kept filter(Search<kind, resident>& search, const Filters& filters, bool surveyed, u64 all) {
  const Team& team = search.team;
  Scratch* scratch = search.scratch;
  const int length = search.piece.length, top = ordered(search.weigher.top);
  const bool counted = filters.top_k > 0 && filters.top_k < length, weighed = filters.top_p < kWhole;
  Kept kept;
  if (!counted && !weighed) return kept;
  if (counted && filters.top_k == 1) return search.resolve({top, 1, UINT32_MAX});

  const bool of_row = weighed && (filters.joint || !counted);  // top-p of the row, not of what top-k keeps
  const bool held = search.is_held();
  if (!surveyed && of_row) {
    all = search.template survey<true>(!held);
  } else if (!surveyed && !held) {
    search.template survey<false>(true);
  }
  const u64 goal = max(u64{1}, fraction(all, filters.top_p));
  if (!held) {
    if (team.block == 0) {
      if (counted) search.guess().guess_count(filters.top_k, kEntries * blockDim.x);
      if (of_row) search.guess().guess_mass(all, goal);
    }
    team.barrier();
  }
  bool then_done = false;
  if (counted) {
    const Range range = {ordered(-INFINITY), top + 1, 0};
    const u64 then = weighed && !filters.joint ? filters.top_p : kWhole;
    const Found found = held ? search.template search_held<false>(range, filters.top_k, then, &then_done)
                             : search.template search<false>(range, filters.top_k, scratch->guess[0][0],
                                                             scratch->guess[0][1], then, &then_done);
    kept = search.resolve(found);
    if (weighed && !filters.joint && !then_done) {
      auto mass = search.mass_of_kept(kept);
      const u64 kept_mass = search.total(mass);
      const Range rest = {found.key, top + 1, 0};
      const Found again = search.template search<true>(rest, max(u64{1}, fraction(kept_mass, filters.top_p)), found.key,
                                                       top + 1, kWhole, &then_done);
      kept = kept.and_also(search.resolve(again));
    }
  }
  if (of_row) {
    const Range range = {ordered(search.weigher.nothing_below()), top + 1, 0};
    const Found found = held ? search.template search_held<true>(range, goal, kWhole, &then_done)
                             : search.template search<true>(range, goal, scratch->guess[1][0], scratch->guess[1][1],
                                                            kWhole, &then_done);
    kept = kept.and_also(search.resolve(found));
  }
  return kept;
}

// Writes the probabilities of a row: its kept weights over their sum.
template <Kind kind, bool resident>
__device__ __forceinline__ void write_probabilities(Search<kind, resident>& search, const Kept& kept, float* out) {
  auto mass = search.template mass_of_kept<true>(kept);
  const Weigher<kind>& weigher = search.weigher;
  const double share = 1048576. / static_cast<double>(search.total(mass)) * static_cast<double>(weigher.scale);
  search.piece.each_tile(search.team.lane, [&](float4 four, int i) {
    const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (i + e >= search.piece.length || i >= search.piece.end) continue;
      const double weight = weigher.fine_weight(v[e]);
      out[i + e] = kept.has(v[e], i + e) ? static_cast<float>(weight * share) : 0.f;
    }
  });
}

// More threads would leave it too few registers.
constexpr int kSearchThreads = 512;

template <Kind kind, bool resident>
__global__ void __launch_bounds__(kSearchThreads, 1) sample_rows(const __grid_constant__ Params p) {
  constexpr bool logits = kind == Kind::logits;
  const Team team(p.blocks);
  team.arrive();
  const int64_t row = team.row();
  char* memory = dynamic_shared_memory();
  Scratch* scratch = reinterpret_cast<Scratch*>(memory);
  Exchange exchange = {reinterpret_cast<u64*>(memory + sizeof(Scratch)), 0};
  float* list = reinterpret_cast<float*>(memory + sizeof(Scratch) + Exchange::bytes(team.all_warps));
  Piece<resident> piece(p.rows + row * p.row_bytes, p.dtype, p.length, p.per_warp, team, list + p.list_size);
  for (int b = threadIdx.x; b < kBins; b += blockDim.x) scratch->bins[b] = 0;
  if (threadIdx.x < 2) scratch->listed[threadIdx.x] = 0;
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  // These come before the row, so that nobody waits for them behind it.
  const float temperature = logits ? p.temperature.at(row) : 1.f;
  const float min_p = p.min_p.at(row), top_p = p.top_p.at(row);
  const int64_t top_k = p.top_k.at(row);
  if (p.left && (top_k <= 0 || top_k >= p.length || (top_k <= kFew && p.ids[row] >= 0))) return team.wait();
  const bool draws = p.ids && threadIdx.x == blockDim.x - 32;
  const u64 seed = draws ? p.seed.at(row) : 0, offset = draws ? p.offset.at(row) : 0;

  // Read the row; of probabilities also find the mass, and the histogram, as if the row were a common one.
  Weigher<kind> weigher;
  weigher.set_common(p.length);
  Search<kind, resident> search = {team, piece, weigher, exchange, scratch, list, p.list_size};
  const bool early = !logits && !(min_p > 0.f);
  float most = -INFINITY;
  u64 mass = 0;
  piece.read(team.lane, [&](const auto& v) {
#pragma unroll
    for (int e = 0; e < static_cast<int>(sizeof(v) / sizeof(float)); ++e) most = max_or_nan(most, v[e]);
  });
  if (early) mass = search.template survey_piece<true>(!search.is_held());
  if (draws) scratch->word = random_word(seed, offset);
  const int largest = __reduce_max_sync(kAllLanes, isnan(most) ? INT32_MAX : ordered(most));
  team.wait();
  exchange.put(team, 0, static_cast<u32>(largest));
  if (early) exchange.put(team, 1, mass);
  exchange.share(team);
  weigher.top = from_ordered(exchange.largest(team, 0));

  const bool valid = weigher.top > (logits ? -INFINITY : 0.f) && weigher.top < INFINITY && !isnan(temperature);
  if (!valid) {
    if (p.ids && team.warp == 0 && team.lane == 0) p.ids[row] = 0, p.valid[row] = false;
    if (p.out) {
      const float all = !logits && weigher.top <= 0.f ? 0.f : not_a_number();
      for (int i = piece.begin + team.lane; i < min(piece.end, p.length); i += 32) p.out[row * p.out_step + i] = all;
    }
    return;
  }
  const Filters filters = {logits && temperature <= 0.f ? 1 : top_k, parts_of(top_p), p.joint};
  if constexpr (logits) {
    weigher.set_temperature(temperature <= 0.f ? 1.f : temperature);
    weigher.least = part_of(min_p);
  } else {
    weigher.least = __fmul_rn(part_of(min_p), weigher.top);
    if (weigher.top < 0x1p-60f) {
      piece.enlarge(team.lane);
      weigher.top *= piece.factor;
      weigher.least *= piece.factor;
    }
  }
  weigher.set_scale(p.length);
  const bool surveyed = early && weigher.is_common();
  if (early && !surveyed) {  // begin the histogram again
    for (int b = threadIdx.x; b < kBins; b += blockDim.x) scratch->bins[b] = 0;
    __syncthreads();
  }
  const Kept kept = filter(search, filters, surveyed, surveyed ? exchange.sum(team, 1) : 0);
  if (p.out) {
    write_probabilities(search, kept, p.out + row * p.out_step);
    return;
  }
  const u64 word = scratch->word;
  int id;
  if (search.locate(search.mass_of_kept(kept), [&](u64 all) { return fraction(all, word); }, &id) && team.lane == 0) {
    p.ids[row] = id;
    p.valid[row] = true;
  }
}

}  // namespace kestrel::sampling
