// What the wgmma kernels of routed experts share: token tiles, the warp that schedules them, and loads of weights.
//
// A tile is 256 weight rows (up: 128 of each half of w1) by some tokens of one expert. One warp of a CTA schedules: it
// writes the pairs, factors and scales of each tile into an entry of a ring in shared memory.
#pragma once

#include <kestrel/pdl.cuh>
#include <kestrel/ptx/cache.cuh>
#include <kestrel/ptx/cluster.cuh>
#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/tma.cuh>

#include "experts_params.cuh"
#include "signals.cuh"

namespace kestrel::moe {

constexpr uint32_t kNoRow = 0xffffffffu;  // of a column that pads a tile

// Token tiles, in clusters pairs of them, that run through all row slices.
template <typename Tile>
constexpr int kRasterTiles = Tile::cluster == 1 && Tile::tokens >= 128 ? 4 : 8;

// Work item -> token tile and slice of weight rows.
struct TmaItem {
  int tile, slice;

  __device__ __forceinline__ TmaItem(int item, int tiles, int slices, int raster) {
    const int first = item / (raster * slices) * raster, rest = item - first * slices;
    const int tiles_here = min(raster, tiles - first);
    slice = rest / tiles_here;
    tile = first + rest - slice * tiles_here;
  }
};

struct TmaParams {
  CUtensorMap low, high;  // of the weights: up: the halves of w1; down: w2 twice
  ExpertsParams p;
  int steps;                // of the pipeline for a tile: 128 bytes of K each
  int low_step, high_step;  // of the expert's coordinate: 1, or 0 if all experts share one weight
  bool even_first;          // the order of the weights' rows in shared memory: a thread has neighbouring channels
};

struct TmaBothParams {
  TmaParams up, down;
};

// Where a role of a CTA stands in the ring of stages and in that of tiles.
template <typename Tile>
struct RingPosition {
  int stage = 0, phase = 0, entry = 0, entry_phase = 0;

  __device__ __forceinline__ void next_stage() {
    if (++stage == Tile::stages) {
      stage = 0;
      phase ^= 1;
    }
  }

  __device__ __forceinline__ void next_entry() {
    if (++entry == Tile::entries) {
      entry = 0;
      entry_phase ^= 1;
    }
  }
};

// The barriers of a CTA.
template <typename Tile>
struct TmaBarriers {
  // Work items that the first CTA of a cluster sends to all. More than the items by which a CTA can be ahead of the
  // other, which is coupled to it by the stages.
  static constexpr int kTickets = Tile::cluster > 1 ? 16 : 0;
  uint64_t full[Tile::stages], empty[Tile::stages], entry_full[Tile::entries], entry_empty[Tile::entries];
  uint64_t ticket_full[kTickets + 1];
  int tickets[kTickets + 1];

  // By all threads of the CTA. loaders: arrivals that fill a stage, besides its bytes.
  __device__ __forceinline__ void init(int loaders) {
    if (threadIdx.x == 0) {
      for (int s = 0; s < Tile::stages; ++s) {
        ptx::mbarrier_init(full + s, loaders);
        ptx::mbarrier_init(empty + s, Tile::consumers / 32 * Tile::cluster);
      }
      for (int s = 0; s < Tile::entries; ++s) {
        ptx::mbarrier_init(entry_full + s, 32);
        ptx::mbarrier_init(entry_empty + s, Tile::consumers / 32);
      }
      for (int i = 0; i < kTickets; ++i) ptx::mbarrier_init(ticket_full + i, 1);
      ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if constexpr (Tile::cluster > 1) ptx::cluster_sync();
  }

  // By a warp: it has read the stage. The weights come from all CTAs of the cluster.
  __device__ __forceinline__ void release(int stage) {
    __syncwarp();
    const int lane = threadIdx.x % 32;
    if constexpr (Tile::cluster == 1) {
      if (lane == 0) ptx::mbarrier_arrive(empty + stage);
    } else {
      if (lane < Tile::cluster) {
        ptx::mbarrier_arrive_remote(ptx::map_shared(ptx::shared_address(empty + stage), lane));
      }
    }
  }
};

// What an entry has of the tokens of a tile; the second one where rows of x are gathered.
template <int TOKENS>
struct TileTokens {
  int pair[TOKENS];      // of each token; -1: none
  float factor[TOKENS];  // of its results
};
template <int TOKENS>
struct GatheredTokens : TileTokens<TOKENS> {
  uint32_t row[TOKENS];      // of x, in packs of 16 bytes; kNoRow: none
  unsigned largest[TOKENS];  // magnitude of the results, as bits, in the order of scale_position()
};

// A tile as its CTA sees it, written by the scheduling warp.
template <typename Tokens, int SCALES>
struct alignas(16) TileEntry : Tokens {
  float scale[SCALES];  // of the rows of the weights
  int expert;           // -1: the end
  int tile;
  int slice, used;  // `used` tokens at most have a pair
  Projection projection;
  bool shared;  // by the cluster: each CTA loads half of the weights

  // Whether it is a tile of this projection, and neither the end nor the first tile of the other one.
  __device__ __forceinline__ bool belongs_to(Projection of) const { return expert >= 0 && projection == of; }
};

// The tiles of experts_tma.cuh.
template <int TOKENS_, int CLUSTER_>
struct TmaTile {
  static constexpr int tokens = TOKENS_, cluster = CLUSTER_;
  static constexpr int rows = 256, half_rows = 128, half_groups = half_rows / 16;  // of weights
  static constexpr int weight_bytes = rows * kLineBytes, stage_bytes = (rows + tokens) * kLineBytes;
  static constexpr int stages = tokens <= 64 ? 5 : tokens <= 160 ? 4 : 3;
  static constexpr int entries = 3, x_bytes = tokens * kLineBytes;
  // Results on their way to memory: two buffers of each warpgroup, for `pass` tokens of 128 channels of 16 bits. Rows
  // are padded against bank conflicts. With two buffers, one barrier a pass is enough.
  static constexpr int pass = tokens == 160 ? 8 : 16, result_row = 256 + 16;
  static constexpr int result_bytes = 2 * pass * result_row;
  static constexpr int alignment = 1024;
  static constexpr int shared_bytes = stages * stage_bytes + 2 * result_bytes + alignment;
  static constexpr bool gathers = true;
  static constexpr int gatherers = 64;
  static constexpr int producers = 128, consumers = 256, threads = producers + consumers;

  // The columns of the products of `used` tokens: whole passes of the epilogue.
  static __device__ __forceinline__ int columns(int used) { return min(tokens, max(used + 31, 32) / 32 * 32); }
};

// What the roles of a CTA share.
template <typename W, typename Tile>
struct TmaShared {
  static constexpr bool fp8 = std::is_same_v<W, __nv_fp8_e4m3>;
  using Entry = TileEntry<GatheredTokens<Tile::tokens>, fp8 ? Tile::rows : 1>;
  Entry entries[Tile::entries];
  TmaBarriers<Tile> barriers;
  alignas(16) float stage_scales[fp8 ? Tile::stages : 1][Tile::tokens];  // of x, with p.x_blocks
};

// Named barriers; 0 is that of __syncthreads().
constexpr int kBarrierOfWarpgroup = 2;  // and 3: one for each consumer warpgroup
constexpr int kBarrierOfLargest = 4;    // the consumers know the largest magnitudes
constexpr int kBarrierOfCodes = 5;      // the consumers have written the codes of a tile

// Where the scale of a token of a tile lies. A thread finds those of the tokens in its part of the accumulators, 2 *
// quad and the next one of two groups of eight, in 16 bytes.
__device__ __forceinline__ int scale_position(int token) {
  return token / 16 * 16 + token % 8 / 2 * 4 + token / 8 % 2 * 2 + token % 2;
}

// A store without a branch, so that the instructions of several results interleave.
__device__ __forceinline__ void store_if(bool condition, float* to, float2 v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p st.global.v2.f32 [%0], {%1, %2};\n}" ::"l"(to), "f"(v.x),
               "f"(v.y), "r"(static_cast<int>(condition))
               : "memory");
}

template <int TOKENS>
__device__ __forceinline__ int tile_count(const ExpertsParams& p) {
  return min(min(max(*p.padded_pairs, 0) / TOKENS, p.blocks * p.tiles_of_block),
             (p.sorted_length + TOKENS - 1) / TOKENS);
}

// Whether a counter of signals is complete. What was written before them can then be loaded by bulk copies.
__device__ __forceinline__ bool is_ready(const int* ready, int signals) {
  const bool complete = ptx::load_acquire(ready) >= signals;
  ptx::fence_proxy_async_all();
  return complete;
}

// The expert of a tile, -1: none.
__device__ __forceinline__ int expert_of_tile(const ExpertsParams& p, int tile, int tiles) {
  const int expert = tile < tiles ? p.tile_experts[tile / p.tiles_of_block] : -1;
  return expert < p.experts ? expert : -1;
}

// The first work item of a CTA.
constexpr int kNoItem = -1;  // its projection is not the first one, or the item is known after the PDL wait

// By the TMA thread, before the PDL wait: loads the weights of the CTA's first tile, which are constant. Returns for
// how many steps. load(stage, step, expert, slice, shared).
template <typename Tile, typename F>
__device__ __forceinline__ int load_weights_ahead(const ExpertsParams& p, int first_item, int slices, int steps,
                                                  const F& load) {
  if (Tile::cluster > 1 || !p.routed_early || first_item == kNoItem) return 0;
  const int tiles = tile_count<Tile::tokens>(p);
  const TmaItem at(first_item, tiles, slices, kRasterTiles<Tile>);
  const int expert = first_item < tiles * slices ? expert_of_tile(p, at.tile, tiles) : -1;
  if (expert < 0) return 0;
  const int ahead = min(steps, Tile::stages);
  for (int step = 0; step < ahead; ++step) load(step, step, expert, at.slice, false);
  return ahead;
}

// By the TMA thread: loads the stages of all tiles of a projection. load_weights(stage, step, expert, slice, shared),
// load_x(stage, step, tile, used).
template <Projection PROJECTION, typename Tile, typename Entry, typename FW, typename FX>
__device__ __forceinline__ void load_stages(const TmaParams& params, int slices, const Entry* entries,
                                            TmaBarriers<Tile>& barriers, RingPosition<Tile>& at_ring, int first_item,
                                            const FW& load_weights, const FX& load_x) {
  const ExpertsParams& p = params.p;
  const int steps = params.steps;
  int ahead = load_weights_ahead<Tile>(p, first_item, slices, steps, load_weights);  // steps whose weights are loaded
  pdl_wait();
  pdl_trigger();
  while (true) {
    ptx::mbarrier_wait(barriers.entry_full + at_ring.entry, at_ring.entry_phase);
    const Entry& at = entries[at_ring.entry];
    const int expert = at.expert, slice = at.slice, tile = at.tile, used = at.used;
    const bool shared = at.shared;
    if (!at.belongs_to(PROJECTION)) break;
    if (PROJECTION == Projection::down && p.ready && !is_ready(p.ready + tile, p.ready_signals)) {
      RingPosition<Tile> next = at_ring;
      for (; ahead < min(steps, Tile::stages); ++ahead) {
        ptx::mbarrier_wait(barriers.empty + next.stage, next.phase ^ 1);
        load_weights(next.stage, ahead, expert, slice, shared);
        next.next_stage();
      }
      while (!is_ready(p.ready + tile, p.ready_signals)) __nanosleep(100);
    }
    for (int step = 0; step < steps; ++step) {
      if (step >= ahead) {
        ptx::mbarrier_wait(barriers.empty + at_ring.stage, at_ring.phase ^ 1);
        load_weights(at_ring.stage, step, expert, slice, shared);
      }
      load_x(at_ring.stage, step, tile, used);
      at_ring.next_stage();
    }
    ahead = 0;
    at_ring.next_entry();
  }
}

// The scheduling warp of the CTA of this rank: fills entries with its tiles, and with the end. ALL_TICKETS: no item
// belongs to a CTA that may not have started; `first` is a ticket, or kNoItem.
template <bool UP, bool FP8, bool ALL_TICKETS, typename Tile, typename Entry>
__device__ __forceinline__ void schedule_tiles(const ExpertsParams& p, int slices, int rank, Entry* entries,
                                               TmaBarriers<Tile>& barriers, RingPosition<Tile>& at_entry, int first,
                                               bool last) {
  constexpr int C = Tile::cluster, channels = UP ? Tile::half_rows : Tile::rows;
  const int lane = threadIdx.x % 32;
  if (!p.routed_early) pdl_wait();
  const int tiles = tile_count<Tile::tokens>(p), pairs = p.tokens * p.choices;
  if (p.routed_early) pdl_wait();
  pdl_trigger();
  const int groups = (tiles + C - 1) / C;  // of tiles that a cluster takes
  const int clusters = gridDim.x / C;
  if constexpr (ALL_TICKETS) {
    if (first == kNoItem && lane == 0) first = atomicAdd(p.tickets, 1);
  }
  int next = first / C;                               // with tickets, in lane 0 alone
  [[maybe_unused]] int ticket = 0, ticket_phase = 0;  // that is sent next
  for (int n = 0;; ++n) {
    int item = next;
    if (p.tickets) {
      if constexpr (C == 1) {
        if (n > 0) {
          // A CTA takes no more tiles ahead than it needs, so that all end together: tile n once tile n - 2 is
          // multiplied; FP8 tiles of 128, which are short, once n - 3 is. So do FP8 layers with one step of K: their
          // copies are signalled two steps later, so the end of n - 2 may need copies of n.
          static_assert(Tile::entries == 3, "at_entry held tile n - 3, the entry after it n - 2");
          RingPosition<Tile> before = at_entry;
          if (Tile::gathers && !(FP8 && p.width <= kLineBytes)) before.next_entry();
          ptx::mbarrier_wait(barriers.entry_empty + before.entry, before.entry_phase ^ 1);
          if (lane == 0) next = (ALL_TICKETS ? 0 : clusters) + atomicAdd(p.tickets, 1);
        }
        item = __shfl_sync(0xffffffffu, next, 0);
      } else if (n > 0) {
        ptx::mbarrier_wait_cluster(barriers.ticket_full + ticket, ticket_phase);
        item = barriers.tickets[ticket];
        if (++ticket == TmaBarriers<Tile>::kTickets) {
          ticket = 0;
          ticket_phase ^= 1;
        }
      }
    }
    if (item >= groups * slices) break;
    next = item + clusters;
    if constexpr (C > 1) {
      if (p.tickets && lane == 0) {
        if (rank == 0) next = clusters + atomicAdd(p.tickets, 1);
        ptx::mbarrier_arrive_expect_tx(barriers.ticket_full + ticket, 4);
        for (int r = 0; rank == 0 && r < C; ++r) {
          ptx::store_async(ptx::map_shared(ptx::shared_address(barriers.tickets + ticket), r),
                           static_cast<uint32_t>(next),
                           ptx::map_shared(ptx::shared_address(barriers.ticket_full + ticket), r));
        }
      }
    }
    const TmaItem at(item, groups, slices, kRasterTiles<Tile>);
    const int tile = at.tile * C + rank;
    int expert = expert_of_tile(p, tile, tiles);
    bool shared = false, mine = expert >= 0;
    if constexpr (C > 1) {
      const int other = expert_of_tile(p, at.tile * C + (rank ^ 1), tiles);
      if (!mine) expert = other;  // multiplies along, and stores nothing
      shared = expert == other || other < 0;
    }
    if (expert < 0) continue;
    ptx::mbarrier_wait(barriers.entry_empty + at_entry.entry, at_entry.entry_phase ^ 1);
    Entry& to = entries[at_entry.entry];
    int used = 0, pair_of[Tile::tokens / 32];
#pragma unroll
    for (int i = 0; i < Tile::tokens / 32; ++i) {
      const int position = tile * Tile::tokens + i * 32 + lane;
      pair_of[i] = mine && position < p.sorted_length ? p.sorted_pairs[position] : -1;
    }
#pragma unroll
    for (int i = 0; i < Tile::tokens / 32; ++i) {
      const int pair = pair_of[i] < pairs ? pair_of[i] : -1, token = pair / p.choices, n = i * 32 + lane;
      float factor = 1.f;
      if (pair >= 0 && FP8 && !p.x_blocks) factor = p.x_scale[(UP ? token : pair) * p.x_scale_stride];
      if (pair >= 0 && !UP) factor *= p.topk_weights[token * p.topk_weights_stride + (pair - token * p.choices)];
      to.pair[n] = max(pair, -1);
      to.factor[n] = factor;
      if constexpr (Tile::gathers) {
        to.largest[n] = 0;
        to.row[n] = pair < 0 ? kNoRow : static_cast<uint32_t>((UP ? token : pair) * (p.x_stride / 16));
      }
      const unsigned some = __ballot_sync(0xffffffffu, pair >= 0);
      if (some) used = i * 32 + 32 - __clz(some);
    }
    if (FP8 && p.scale_rank < 3) {
      float scales[Tile::rows / 32];
#pragma unroll
      for (int i = 0; i < Tile::rows / 32; ++i) {
        const int row = i * 32 + lane;
        const float* const of_expert =
            (UP && row >= Tile::half_rows ? p.weight_scale_high : p.weight_scale_low) + expert * p.scale_expert_stride;
        const int channel = at.slice * channels + (UP ? row % Tile::half_rows : row);
        scales[i] = of_expert[min(channel, p.outputs - 1) * p.scale_row_stride];
      }
#pragma unroll
      for (int i = 0; i < Tile::rows / 32; ++i) to.scale[FP8 ? i * 32 + lane : 0] = scales[i];
    }
    if (lane == 0) {
      to.expert = expert;
      to.slice = at.slice;
      to.tile = mine ? tile : tile ^ 1;
      to.used = used;
      to.shared = shared;
      to.projection = UP ? Projection::up : Projection::down;
    }
    ptx::mbarrier_arrive(barriers.entry_full + at_entry.entry);
    at_entry.next_entry();
  }
  if (!last) return;
  ptx::mbarrier_wait(barriers.entry_empty + at_entry.entry, at_entry.entry_phase ^ 1);
  if (lane == 0) entries[at_entry.entry].expert = -1;
  ptx::mbarrier_arrive(barriers.entry_full + at_entry.entry);
}

// Loads the weights of a stage, and of a tile that the cluster shares this CTA's half, for both.
template <bool UP, typename Tile>
__device__ __forceinline__ void load_weights(const TmaParams& params, uint32_t to, int k, int expert, int slice,
                                             bool shared, int rank, uint64_t* barrier, uint64_t policy) {
  constexpr int C = Tile::cluster, channels = UP ? Tile::half_rows : Tile::rows;
  const int group = slice * (channels / 16);
  if (C > 1 && shared) {
    ptx::tma_load_grouped_multicast(to + rank * Tile::half_rows * kLineBytes, rank ? params.high : params.low, k,
                                    group + (UP ? 0 : rank * Tile::half_groups),
                                    expert * (rank ? params.high_step : params.low_step), barrier, (1 << C) - 1,
                                    policy);
  } else {
    ptx::tma_load_grouped(to, params.low, k, group, expert * params.low_step, barrier, policy);
    ptx::tma_load_grouped(to + Tile::half_rows * kLineBytes, params.high, k, group + (UP ? 0 : Tile::half_groups),
                          expert * params.high_step, barrier, policy);
  }
}

// By the TMA thread, before its first tile. Returns the L2 policy of the weights.
__device__ __forceinline__ uint64_t prepare_loads(const TmaParams& params) {
  const uint64_t policy = params.p.evict_first ? ptx::l2_policy(/*evict_first=*/true) : 0;
  ptx::prefetch_tensor_map(params.low);
  ptx::prefetch_tensor_map(params.high);
  return policy;
}

// Where the down projection runs in the same launch: signals the tile whose results this thread has copied, once they
// are in memory.
__device__ __forceinline__ void signal_tile(const ExpertsParams& p, int& unsignalled) {
  if (unsignalled < 0) return;
  ptx::bulk_wait<0>();
  ptx::add_release(p.ready + unsignalled, 1);
  unsignalled = -1;
}

}  // namespace kestrel::moe
