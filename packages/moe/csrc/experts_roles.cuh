// The kernels of experts_tma.cuh and experts_fp8.cuh, put together from the roles of their warps.
//
// Warp 0 loads by TMA, warp 1 schedules, warps 2 and 3 assist: they gather rows of x or load block scales. Two
// warpgroups multiply. A CTA runs one projection, or both: when no tile of the up projection is left it goes on with
// those of the down projection, whose weights then stream while other CTAs end their last tiles. A tile of it waits for
// signals that its tile of the hidden layer is in memory. Tickets hand out the up tiles to CTAs that run, so nobody
// waits for a CTA that has not started.
#pragma once

#include <kestrel/pdl.cuh>
#include <kestrel/ptx/cluster.cuh>
#include <kestrel/ptx/tma.cuh>

#include "experts_tma_tiles.cuh"

namespace kestrel::moe {

template <typename Tile>
__device__ __forceinline__ uint32_t ring_of_stages() {
  extern __shared__ char dynamic[];
  return (ptx::shared_address(dynamic) + Tile::alignment - 1) / Tile::alignment * Tile::alignment;
}

// The consumer warpgroups. multiply_tiles(buffer): of the results, that the next pass of an epilogue fills.
template <typename F>
__device__ __forceinline__ void consume(const F& multiply_tiles) {
  ptx::raise_registers<232>();
  pdl_wait();
  pdl_trigger();
  int buffer = 0;
  multiply_tiles(buffer);
  ptx::bulk_wait_read<0>();  // shared memory outlives the copies
}

template <typename Roles>
__device__ __forceinline__ void run_one(const TmaParams& params) {
  using Tile = typename Roles::Tile;
  __shared__ typename Roles::Shared shared;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // uniform to the compiler
  const int rank = Tile::cluster == 1 ? 0 : blockIdx.x % Tile::cluster;
  const Roles roles{params, params.p, shared, ring_of_stages<Tile>(), rank};
  shared.barriers.init(/*loaders=*/1 + roles.assistants());
  RingPosition<Tile> at_ring;
  if (threadIdx.x < Tile::producers) {
    ptx::reduce_registers<40>();
    if (warp == 0) {
      if (lane == 0) roles.load_tiles(at_ring, /*first_item=*/blockIdx.x, /*absent=*/0);
    } else if (warp == 1) {
      schedule_tiles<Roles::up, Roles::fp8, /*ALL_TICKETS=*/false, Tile>(params.p, roles.slices(), rank, shared.entries,
                                                                         shared.barriers, at_ring, blockIdx.x,
                                                                         /*last=*/true);
    } else if (roles.assistants() && warp < 2 + Roles::assistant_warps) {
      roles.assist(at_ring);
    }
    __syncwarp();
  } else {
    consume([&](int& buffer) { roles.multiply_tiles(at_ring, buffer); });
  }
  if constexpr (Tile::cluster > 1) {  // no CTA leaves while the other may still load into it or arrive on its barriers
    __syncwarp();
    ptx::cluster_sync();
  }
}

// An assistant that has nothing to do in a projection passes by its tiles. It arrives like one that has, so that the
// stages cannot get ahead of it.
template <Projection PROJECTION, typename Tile, typename Shared>
__device__ __forceinline__ void skip_tiles(Shared& shared, int steps, bool arrives, RingPosition<Tile>& at_ring) {
  while (true) {
    ptx::mbarrier_wait(shared.barriers.entry_full + at_ring.entry, at_ring.entry_phase);
    if (!shared.entries[at_ring.entry].belongs_to(PROJECTION)) break;
    for (int step = 0; step < steps; ++step) {
      ptx::mbarrier_wait(shared.barriers.empty + at_ring.stage, at_ring.phase ^ 1);
      __syncwarp();
      if (arrives) ptx::mbarrier_arrive(shared.barriers.full + at_ring.stage);
      at_ring.next_stage();
    }
    at_ring.next_entry();
  }
}

template <typename Up, typename Down>
__device__ __forceinline__ void run_both(const TmaBothParams& params) {
  using Tile = typename Up::Tile;
  static_assert(Tile::cluster == 1, "clusters share tickets");
  __shared__ typename Up::Shared shared;
  const TmaParams &up = params.up, &down = params.down;
  const uint32_t ring = ring_of_stages<Tile>();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // uniform to the compiler
  const Up up_roles{up, up.p, shared, ring, 0};
  const Down down_roles{down, down.p, shared, ring, 0};
  const int assistants = max(up_roles.assistants(), down_roles.assistants());
  __shared__ int first_item;
  if (threadIdx.x == 0) first_item = up.p.routed_early ? atomicAdd(up.p.tickets, 1) : kNoItem;
  shared.barriers.init(/*loaders=*/1 + assistants);
  RingPosition<Tile> at_ring;
  if (threadIdx.x < Tile::producers) {
    ptx::reduce_registers<40>();
    if (warp == 0) {
      if (lane == 0) {
        up_roles.load_tiles(at_ring, first_item, /*absent=*/0);
        down_roles.load_tiles(at_ring, kNoItem, /*absent=*/assistants - down_roles.assistants());
      }
    } else if (warp == 1) {
      schedule_tiles<true, Up::fp8, /*ALL_TICKETS=*/true, Tile>(up.p, up_roles.slices(), 0, shared.entries,
                                                                shared.barriers, at_ring, first_item, /*last=*/false);
      const int items = tile_count<Tile::tokens>(up.p) * up_roles.slices(), ctas = gridDim.x;
      schedule_tiles<false, Up::fp8, /*ALL_TICKETS=*/false, Tile>(down.p, down_roles.slices(), 0, shared.entries,
                                                                  shared.barriers, at_ring,
                                                                  (blockIdx.x + ctas - items % ctas) % ctas,
                                                                  /*last=*/true);
    } else if (assistants && warp < 2 + Up::assistant_warps) {
      if (up_roles.assistants()) {
        up_roles.assist(at_ring);
      } else {
        skip_tiles<Projection::up>(shared, up.steps, /*arrives=*/assistants > 1 || lane == 0, at_ring);
      }
      if (down_roles.assistants()) down_roles.assist(at_ring);
    }
    __syncwarp();
  } else {
    consume([&](int& buffer) {
      up_roles.multiply_tiles(at_ring, buffer);
      down_roles.multiply_tiles(at_ring, buffer);
    });
  }
}

}  // namespace kestrel::moe
