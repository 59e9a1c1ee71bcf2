// One id per row from its k largest elements, k up to 128, or from what top-p keeps of them.
//
// Computes: reference_sampling.py for rows of more than 4096 elements with 1 <= k <= 128.
// Must move: a row once, 4 V bytes, and 16 KB of it twice; about 3 instructions an element.
// Split:    a row per team of blocks. All blocks look at the same 4096 elements of the row and take the value that some
//           4 k of the whole row should reach; while they read the row they list what does. The first block gathers the
//           lists, ranks the largest in them, every pair compared, and draws. A row of which too few or too many
//           elements reach the value is left to sample_rows.cuh: its id is -1 until then.
// Measured: on an H200, of the limit (launches and bytes): 69 % at 256x128256, 17 % at 1x51200 (results/h200.json,
//           k = 50 and p = 0.9). No prediction was written down.
#pragma once

#include "params.cuh"
#include "stripe.cuh"

namespace kestrel::sampling {

constexpr int kFewThreads = 256;
constexpr int kListed = 1024;
constexpr int kSampleTiles = 4;  // of a warp

// Shared by a block, beside the exchange.
struct alignas(16) FewScratch {
  u64 list[kListed];   // in the first block: of all blocks, in no order
  u64 close[kListed];  // the largest of them, more or less
  float most[kFewThreads];
  u64 best[kFew];  // by rank
  u64 mass[kFew];
  u32 listed[2];
  u32 word;
};

// Larger first, then lower index.
__device__ __forceinline__ u64 ranking(float v, int i) {
  return (static_cast<u64>(static_cast<u32>(ordered(v + 0.f)) ^ 0x80000000u) << 32) | ~static_cast<u32>(i);
}
__device__ __forceinline__ float value_of(u64 key) {
  return from_ordered(static_cast<int>(static_cast<u32>(key >> 32) ^ 0x80000000u));
}
__device__ __forceinline__ u32 index_of(u64 key) { return ~static_cast<u32>(key); }

// A number that n threads' numbers reach, of one per thread, and few more than n: by bisection, in every warp.
__device__ __forceinline__ float reached_by(FewScratch* scratch, float mine, int n) {
  constexpr int kOwn = kFewThreads / 32, kSteps = 16;
  scratch->most[threadIdx.x] = mine;
  __syncthreads();
  int key[kOwn];
  int top = INT32_MIN, low = INT32_MAX;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    key[j] = ordered(scratch->most[threadIdx.x % 32 + 32 * j]);
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
    for (int j = 0; j < kOwn; ++j) count += key[j] >= middle;
    const bool reached = __reduce_add_sync(kAllLanes, count) >= n;
    low = reached ? middle : low;
    width = reached ? width - half : half - 1;
  }
  return from_ordered(low);
}

template <Kind kind>
__global__ void __launch_bounds__(kFewThreads, 4) few_rows(const __grid_constant__ Params p) {
  constexpr bool logits = kind == Kind::logits;
  using Row = Stripe<kind, 4>;
  const Team team(p.blocks);
  team.arrive();
  const int64_t number = team.row();
  FewScratch* scratch = reinterpret_cast<FewScratch*>(dynamic_shared_memory());
  Exchange exchange = {reinterpret_cast<u64*>(scratch + 1), 0};
  const char* const elements = p.rows + number * p.row_bytes;
  const Row row(elements, p.dtype, p.length, p.per_warp, team);
  if (threadIdx.x < 2) scratch->listed[threadIdx.x] = 0;
  pdl_wait();
  pdl_trigger();
  const float temperature = logits ? p.temperature.at(number) : 1.f;
  const int64_t wanted = p.top_k.at(number);
  if (wanted <= 0 || wanted > kFew || wanted >= p.length) return team.wait();  // others draw this row
  int k = logits && temperature <= 0.f ? 1 : static_cast<int>(wanted);
  const float min_p = p.min_p.at(number), top_p = p.top_p.at(number);
  const bool keyed = threadIdx.x == kFewThreads - 32;
  const u64 seed = keyed ? p.seed.at(number) : 0, offset = keyed ? p.offset.at(number) : 0;

  // A value that more than k elements should reach.
  constexpr int kSample = kFewThreads / 32 * kSampleTiles * kTile;
  float seen = -INFINITY;
  {
    const int tiles = (p.length + kTile - 1) / kTile;
    typename Row::template Raw<1> raw[kSampleTiles];
#pragma unroll
    for (int u = 0; u < kSampleTiles; ++u) {
      const int turn = u * (kFewThreads / 32) + (threadIdx.x >> 5);
      raw[u] = row.template load<1>(turn * (tiles / (kSample / kTile)) * kTile);
    }
#pragma unroll
    for (int u = 0; u < kSampleTiles; ++u) {
      float v[4];
      row.template unpack<1>(raw[u], v);
      seen = fmaxf(seen, fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3])));
    }
  }
  const int rank = 6 + static_cast<int>(4.f * static_cast<float>(k) * kSample / static_cast<float>(p.length));
  // What has no mass need not be listed; nor are k elements needed where all that have are.
  const float least = logits ? -3.4028235e38f : 1e-45f;
  const float guess = reached_by(scratch, seen + 0.f, min(rank, kFewThreads)), from = fmaxf(guess, least);

  // Read the row.
  Weigher<kind> weigher;
  weigher.set_common(p.length);
  float most = -INFINITY;
  u64 mass = 0;
  u32 mine = 0;
  row.template each<4>([&](const float (&v)[Row::size], int base) {
    MassSum sum;
#pragma unroll
    for (int u = 0; u < Row::size; u += 4) {
      float largest = v[u];
#pragma unroll
      for (int e = 1; e < 4; ++e) largest = max_or_nan(largest, v[u + e]);
      most = max_or_nan(most, largest);
      // Where too many reach it, as in a row of equal elements, none is added any more: they would wait for each other.
      if (largest >= from && *static_cast<volatile u32*>(&scratch->listed[0]) <= kListed) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (v[u + e] >= from && row.index(base, u + e) < p.length) {
            const u32 place = atomicAdd(&scratch->listed[0], 1u);
            if (place < kListed) scratch->list[place] = ranking(v[u + e], row.index(base, u + e));
            ++mine;
          }
        }
      }
    }
    if (!logits && p.joint) {
#pragma unroll
      for (int e = 0; e < Row::size; ++e) sum.add(fminf(fmaxf(v[e], 0.f), 1.f) * weigher.scale);
      mass += sum.value();
    }
  });
  if (keyed) scratch->word = random_word(seed, offset);
  const int largest = __reduce_max_sync(kAllLanes, isnan(most) ? INT32_MAX : ordered(most + 0.f));
  team.wait();
  exchange.put(team, 0, static_cast<u32>(largest));
  exchange.put(team, 1, __reduce_add_sync(kAllLanes, mine));
  if (p.joint) exchange.put(team, 2, warp_sum(mass));
  exchange.share(team);
  weigher.top = from_ordered(exchange.largest(team, 0));
  const bool first = team.block == 0 && threadIdx.x == 0;
  if (!(weigher.top > (logits ? -INFINITY : 0.f) && weigher.top < INFINITY) || isnan(temperature)) {
    if (first) p.ids[number] = 0, p.valid[number] = false;
    return;
  }
  const int count = static_cast<int>(min(exchange.sum(team, 1), u64{kListed + 1}));
  const u64 parts = parts_of(top_p);
  const bool of_row = p.joint && parts < kWhole;
  if (guess <= least) k = min(k, count);
  if (count < k || count > kListed || (of_row && (logits || min_p > 0.f || !weigher.is_common()))) {
    if (first) p.ids[number] = -1;
    return;
  }
  const u64 all = of_row ? exchange.sum(team, 2) : 0;
  if (team.blocks > 1) {
    const u32 before = static_cast<u32>(exchange.sum_of(team, 1, 0, team.block * team.warps));
    u64* list = in_block(scratch, 0, team.blocks)->list + before;
    if (team.block > 0) {
      for (u32 j = threadIdx.x; j < scratch->listed[0]; j += kFewThreads) list[j] = scratch->list[j];
    }
    team.barrier();
    if (team.block > 0) return;
  }

  // The first block: ranks, masses by rank, what top-p keeps, the id.
  const float factor = !logits && weigher.top < 0x1p-60f ? 0x1p64f : 1.f;
  if (logits) weigher.set_temperature(temperature <= 0.f ? 1.f : temperature);
  weigher.least = logits ? part_of(min_p) : __fmul_rn(part_of(min_p), weigher.top) * factor;
  weigher.top *= factor;
  weigher.set_scale(p.length);
  // Those that k threads' largest reach are few more than k.
  float largest_listed = -INFINITY;
  for (int j = threadIdx.x; j < count; j += kFewThreads)
    largest_listed = fmaxf(largest_listed, value_of(scratch->list[j]));
  const float near = reached_by(scratch, largest_listed, k);
  for (int j = threadIdx.x; j < count; j += kFewThreads) {
    const u64 key = scratch->list[j];
    if (value_of(key) >= near) scratch->close[atomicAdd(&scratch->listed[1], 1u)] = key;
  }
  __syncthreads();
  const int close = static_cast<int>(scratch->listed[1]);
  for (int j = threadIdx.x; j < close; j += kFewThreads) {
    const u64 key = scratch->close[j];
    int above = 0;
#pragma unroll 4
    for (int other = 0; other < close; ++other) above += scratch->close[other] > key;
    if (above < k) {
      scratch->best[above] = key;
      scratch->mass[above] = mass_of(weigher.scaled(value_of(key) * factor));
    }
  }
  __syncthreads();
  const int place = threadIdx.x;
  u64 before = 0, kept_mass = 0;
#pragma unroll 2
  for (int other = 0; other < k; ++other) {
    const u64 m = scratch->mass[other];
    before += other < place ? m : 0;
    kept_mass += m;
  }
  const u64 goal = fraction(of_row ? all : kept_mass, parts);
  const int kept = __syncthreads_count(place < k && (place == 0 || before < goal));
  if (place >= kept) return;
  const u32 id = index_of(scratch->best[place]);
  before = kept_mass = 0;
#pragma unroll 2
  for (int other = 0; other < kept; ++other) {
    const u64 m = scratch->mass[other];
    before += index_of(scratch->best[other]) < id ? m : 0;
    kept_mass += m;
  }
  const u64 point = fraction(kept_mass, scratch->word);
  if (point >= before && point - before < scratch->mass[place]) {
    p.ids[number] = static_cast<int>(id);
    p.valid[number] = true;
  }
}

}  // namespace kestrel::sampling
