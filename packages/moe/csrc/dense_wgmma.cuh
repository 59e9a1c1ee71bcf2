// A dense layer on Hopper: activation(x W' + bias) + residual, warp-specialised, for more than a few tokens.
//
// A tile is 128 tokens by COLUMNS outputs. One thread loads x and one the weight, 64 columns of K per stage (TMA); CTAs
// of a cluster multicast the operand that they share. Two consumer warpgroups multiply (wgmma): `cooperative`, 64
// tokens of each tile; `ping_pong`, every other tile, so that one's epilogue overlaps the other's products. In the
// epilogue each warp passes its 16 tokens through its own shared memory, where the residual has arrived (cp.async), and
// stores whole rows. Split-K: the two CTAs of a pair exchange half of their sums through DSMEM, and each finishes 64
// tokens. CTAs are persistent.
#pragma once

#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>
#include <kestrel/ptx/cluster.cuh>
#include <kestrel/ptx/cp_async.cuh>
#include <kestrel/ptx/matrix.cuh>
#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/named_barrier.cuh>
#include <kestrel/ptx/shared.cuh>
#include <kestrel/ptx/tma.cuh>
#include <kestrel/ptx/wgmma.cuh>

#include "activation.cuh"
#include "dense_params.cuh"

namespace kestrel::moe {

enum class Schedule { cooperative, ping_pong };

template <int COLUMNS_, Schedule SCHEDULE_>
struct DenseTile {
  static constexpr Schedule schedule = SCHEDULE_;
  static constexpr bool ping_pong = schedule == Schedule::ping_pong;
  static constexpr int rows = 128, columns = COLUMNS_;
  static constexpr int blocks = ping_pong ? 2 : 1;  // of 64 rows, for a consumer warpgroup
  static constexpr int stages = columns <= 64 ? 8 : columns <= 96 ? 7 : columns <= 128 ? 6 : columns <= 160 ? 5 : 4;
  static constexpr int line_bytes = 128;  // 64 elements of K
  static constexpr int stage_bytes = (rows + columns) * line_bytes;
  // The epilogue of a warp: passes of 16 tokens by `pass` columns, through one buffer or two in turn.
  static constexpr int pass = columns == 224                ? 112
                              : !ping_pong && columns < 256 ? columns
                              : columns == 144              ? 48
                              : columns == 160              ? 80
                                                            : 64;
  static_assert(columns % pass == 0 && pass % 16 == 0);
  static constexpr int passes_of_block = columns / pass, passes = blocks * passes_of_block;
  static constexpr int buffers = passes > 2 ? 2 : 1;
  static constexpr int row_bytes = pass * 2, buffer_bytes = 16 * row_bytes;
  static constexpr int alignment = 1024;
  static constexpr int shared_bytes = stages * stage_bytes + 8 * buffers * buffer_bytes + alignment;
  static constexpr int producers = 128, consumers = 256, threads = producers + consumers;
  static_assert(shared_bytes <= 230400, "dynamic shared memory, beside the bias and the barriers");

  // Where a 16-byte chunk of a row is stored in a buffer: free of bank conflicts in ldmatrix and stmatrix.
  __device__ static __forceinline__ uint32_t chunk_at(uint32_t buffer, int row, int chunk) {
    constexpr int chunks = pass / 8, mask = chunks % 8 == 0 ? 7 : chunks % 4 == 0 ? 3 : 1;
    return buffer + row * row_bytes + (chunk ^ (row * (mask + 1) / 8 & mask)) * 16;
  }
};

constexpr int kRasterRows = 8;  // rasterisation: so many row tiles pass over all column tiles together, for reuse in L2

// The position of a CTA in its cluster, and the index and number of the clusters.
struct DensePlace {
  int row, column, split;  // in the cluster
  int first_rank;          // of the CTAs with this `split`
  int cluster, clusters;

  __device__ __forceinline__ explicit DensePlace(const DenseParams& p) {
    const int size = p.cluster.size(), rank = blockIdx.x % size, group = p.cluster.rows * p.cluster.columns;
    cluster = blockIdx.x / size;
    clusters = gridDim.x / size;
    split = rank / group;
    first_rank = split * group;
    column = (rank - first_rank) / p.cluster.rows;
    row = rank - first_rank - column * p.cluster.rows;
  }

  __device__ __forceinline__ int rank_of(const DenseParams& p, int at_row, int at_column) const {
    return first_rank + at_column * p.cluster.rows + at_row;
  }
};

// The origin, in the result, of a CTA's tile within tile `tile` of its cluster.
template <typename Tile>
struct DenseItem {
  int row, column;  // of the result

  __device__ __forceinline__ DenseItem(const DenseParams& p, const DensePlace& place, int tile) {
    const int first = tile / (kRasterRows * p.column_tiles) * kRasterRows, rest = tile - first * p.column_tiles;
    const int rows_here = min(kRasterRows, p.row_tiles - first);
    const int column_tile = rest / rows_here, row_tile = first + rest - column_tile * rows_here;
    row = (row_tile * p.cluster.rows + place.row) * Tile::rows;
    column = (column_tile * p.cluster.columns + place.column) * Tile::columns;
  }
};

// The part of an operand that a CTA loads of each tile, `box` of its `rows` rows, for all CTAs of `ranks`.
struct OperandPart {
  int rows, box, offset;  // offset: of the box in the rows
  uint32_t to;            // in the first stage
  uint16_t ranks;
};

// A producer thread: loads its operand, `size` rows long, of all tiles of this CTA. Little code for each step: the one
// thread must not be the limit. first_row(item): of the tile.
template <typename Tile, typename FirstRow>
__device__ __forceinline__ void dense_produce(const DenseParams& p, const DensePlace& place, const CUtensorMap& whole,
                                              const CUtensorMap& tail, int size, const OperandPart& part,
                                              uint64_t* full, uint64_t* empty, int first_step, int steps,
                                              FirstRow first_row) {
  const int tiles = p.row_tiles * p.column_tiles;
  int stage = 0, phase = 0;
  for (int tile = place.cluster; tile < tiles; tile += place.clusters) {
    const int row = first_row(DenseItem<Tile>(p, place, tile)), first = row + part.offset, left = size - first;
    const int bytes = max(min(part.rows, (size - row + 7) / 8 * 8), 0) * Tile::line_bytes;  // in all boxes
    const auto each_step = [&](auto load) {
      int k = first_step * 64;
      for (int step = 0; step < steps; ++step, k += 64) {
        ptx::mbarrier_wait(empty + stage, phase ^ 1);
        ptx::mbarrier_arrive_expect_tx(full + stage, bytes);
        load(part.to + stage * Tile::stage_bytes, k, full + stage);
        if (++stage == Tile::stages) {
          stage = 0;
          phase ^= 1;
        }
      }
    };
    const bool multicast = part.ranks & (part.ranks - 1);
    if (left >= part.box && !multicast) {
      each_step([&](uint32_t to, int k, uint64_t* barrier) { ptx::tma_load(to, whole, k, first, barrier); });
    } else if (left >= part.box) {
      each_step([&](uint32_t to, int k, uint64_t* barrier) {
        ptx::tma_load_multicast(to, whole, k, first, barrier, part.ranks);
      });
    } else if (left > 0 && !multicast) {
      each_step([&](uint32_t to, int k, uint64_t* barrier) { ptx::tma_load(to, tail, k, first, barrier); });
    } else if (left > 0) {
      each_step([&](uint32_t to, int k, uint64_t* barrier) {
        ptx::tma_load_multicast(to, tail, k, first, barrier, part.ranks);
      });
    } else {
      each_step([](uint32_t, int, uint64_t*) {});
    }
  }
  for (int s = 0; s < Tile::stages; ++s) {  // this CTA stays until other CTAs have made their last arrivals here
    ptx::mbarrier_wait(empty + stage, phase ^ 1);
    if (++stage == Tile::stages) {
      stage = 0;
      phase ^= 1;
    }
  }
}

// What waits for what:
//   full[stage]       the producer's arrival, and the bytes of x and of the weight, which other CTAs may send
//   empty[stage]      the consumers of every CTA that this one's loads go to: two warpgroups each, one in ping-pong
//   multiplied        [warpgroup], in ping-pong: its tile has left the pipeline
//   received          split-K: the bytes of the other CTA's sums
//   named barriers 1 and 2, one per warpgroup, twice per tile: the bias of the last tile has been read; this one's is
//   there
template <typename T, typename Tile>
__global__ void __launch_bounds__(Tile::threads, 1) dense_wgmma_kernel(const __grid_constant__ DenseParams p) {
#ifdef KESTREL_HAS_WGMMA
  constexpr bool ping_pong = Tile::ping_pong;
  constexpr int S = Tile::stages, N = Tile::columns;
  extern __shared__ char dynamic[];
  __shared__ uint64_t full[S], empty[S], multiplied[2], received;
  __shared__ T bias_of[2][N];  // one for each consumer warpgroup
  const uint32_t ring = (ptx::shared_address(dynamic) + Tile::alignment - 1) / Tile::alignment * Tile::alignment;
  const DensePlace place(p);
  const int steps_per_split = (p.steps + p.cluster.splits - 1) / p.cluster.splits;
  const int first_step = place.split * steps_per_split, steps = min(steps_per_split, p.steps - first_step);
  const int tiles = p.row_tiles * p.column_tiles;
  const int partners = p.cluster.rows + p.cluster.columns - 1;  // CTAs that load for this one, itself included
  const bool clustered = p.cluster.size() > 1;
  if (threadIdx.x == 0) {
    for (int s = 0; s < S; ++s) {
      ptx::mbarrier_init(full + s, 2);
      ptx::mbarrier_init(empty + s, partners * (ping_pong ? 1 : 2));
    }
    for (int w = 0; w < 2; ++w) ptx::mbarrier_init(multiplied + w, 1);
    ptx::mbarrier_init(&received, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(&received, 64 * N * 4);
  }
  __syncthreads();
  if (clustered) {
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }

  // -- the producer warpgroup: one thread loads the weight, which is constant, one x --

  if (threadIdx.x < Tile::producers) {
    ptx::reduce_registers<40>();  // with the consumers' 232 not more than the launch has
    if (threadIdx.x == 0) {
      ptx::prefetch_tensor_map(p.weight);
      ptx::prefetch_tensor_map(p.weight_tail);
      OperandPart part{N, N / p.cluster.rows, place.row * (N / p.cluster.rows)};
      part.to = ring + (Tile::rows + part.offset) * Tile::line_bytes;
      part.ranks = 0;
      for (int r = 0; r < p.cluster.rows; ++r) part.ranks |= 1 << place.rank_of(p, r, place.column);
      dense_produce<Tile>(p, place, p.weight, p.weight_tail, p.outputs, part, full, empty, first_step, steps,
                          [](const DenseItem<Tile>& item) { return item.column; });
    } else if (threadIdx.x == 32) {
      ptx::prefetch_tensor_map(p.x);
      ptx::prefetch_tensor_map(p.x_tail);
      OperandPart part{Tile::rows, Tile::rows / p.cluster.columns, place.column * (Tile::rows / p.cluster.columns)};
      part.to = ring + part.offset * Tile::line_bytes;
      part.ranks = 0;
      for (int c = 0; c < p.cluster.columns; ++c) part.ranks |= 1 << place.rank_of(p, place.row, c);
      pdl_wait();
      pdl_trigger();
      dense_produce<Tile>(p, place, p.x, p.x_tail, p.tokens, part, full, empty, first_step, steps,
                          [](const DenseItem<Tile>& item) { return item.row; });
    }
    __syncwarp();
    if (p.cluster.splits > 1) {
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();
    }
    if (clustered) {  // no CTA exits while others still load or arrive there
      ptx::cluster_arrive_relaxed();
      ptx::cluster_wait();
    }
    return;
  }

  // -- the consumer warpgroups --

  ptx::raise_registers<232>();
  pdl_wait();
  pdl_trigger();
  const int warpgroup = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const int row_of_warpgroup = ping_pong ? 0 : warpgroup * 64;
  // Thread t arrives at the t-th CTA that loads for this one: the CTAs of its column, then the others of its row.
  uint32_t empty_there = 0;
  if (thread < partners) {
    const int other = thread - p.cluster.rows + (thread - p.cluster.rows >= place.column ? 1 : 0);
    const int rank =
        thread < p.cluster.rows ? place.rank_of(p, thread, place.column) : place.rank_of(p, place.row, other);
    empty_there = ptx::map_shared(ptx::shared_address(empty), rank);
  }
  const auto release = [&](int stage) {
    if (thread < partners) ptx::mbarrier_arrive_remote(empty_there + stage * 8);
  };
  // The warp's part of an epilogue pass: neighbouring lanes take neighbouring 16 bytes of a row.
  const uint32_t buffers_at =
      ring + S * Tile::stage_bytes + (warpgroup * 4 + warp) * Tile::buffers * Tile::buffer_bytes;
  const auto for_each_chunk = [&](const DenseItem<Tile>& item, int pass, auto each) {
    constexpr int chunks = Tile::pass / 8, unrolled = ping_pong ? 1 : 16;  // registers are short in ping-pong
    const uint32_t buffer = buffers_at + pass % Tile::buffers * Tile::buffer_bytes;
    const int first_row = item.row + row_of_warpgroup + pass / Tile::passes_of_block * 64 + warp * 16;
    const int first_column = item.column + pass % Tile::passes_of_block * Tile::pass;
#pragma unroll unrolled
    for (int i = 0; i < 16 * chunks / 32; ++i) {
      const int row = (i * 32 + lane) / chunks, chunk = (i * 32 + lane) % chunks;
      const bool inside = first_row + row < p.tokens && first_column + chunk * 8 < p.outputs;
      each(Tile::chunk_at(buffer, row, chunk), first_row + row, int64_t{first_column + chunk * 8} * 2, inside);
    }
  };
  const auto load_residual = [&](const DenseItem<Tile>& item, int pass) {
    for_each_chunk(item, pass, [&](uint32_t to, int row, int64_t offset, bool inside) {
      ptx::cp_async16_if(inside, to, p.residual + row * p.residual_stride + offset, 16);
    });
  };
  int stage = 0, phase = 0;
  int turn = 0;
  for (int tile = place.cluster; tile < tiles; tile += place.clusters, ++turn) {
    if (ping_pong && turn % 2 != warpgroup) {  // the other warpgroup's tile
      const int after = stage + steps;
      stage = after % S;
      phase ^= after / S & 1;
      continue;
    }
    const DenseItem<Tile> item(p, place, tile);
    if (turn > 0) ptx::named_barrier(1 + warpgroup, 128);
    for (int n = thread; n < N; n += 128) {
      const bool inside = p.bias != nullptr && item.column + n < p.outputs;
      bias_of[warpgroup][n] = inside ? reinterpret_cast<const T*>(p.bias)[item.column + n] : from_float<T>(0.f);
    }
    const bool finishes = p.cluster.splits == 1 || place.split == warpgroup;
    if (p.residual && finishes) {
#pragma unroll
      for (int pass = 0; pass < Tile::buffers; ++pass) {
        load_residual(item, pass);
        ptx::cp_async_commit();
      }
    }

    // -- main loop --
    //
    // The parity of `full` says which tile a stage holds only after the other warpgroup's tile has left the pipeline.
    if (ping_pong && turn > 0) ptx::mbarrier_wait(multiplied + (warpgroup ^ 1), (turn - 1) / 2 % 2);
    float acc[Tile::blocks][N / 2];
    int previous = 0;
    for (int step = 0; step < steps; ++step) {
      ptx::mbarrier_wait(full + stage, phase);
      const uint32_t here = ring + stage * Tile::stage_bytes;
      const uint64_t a = ptx::wgmma_descriptor(here + row_of_warpgroup * Tile::line_bytes);
      const uint64_t b = ptx::wgmma_descriptor(here + Tile::rows * Tile::line_bytes);
#pragma unroll
      for (int m = 0; m < Tile::blocks; ++m) ptx::wgmma_fence_registers(acc[m]);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int m = 0; m < Tile::blocks; ++m) {
          ptx::wgmma<T, N>(acc[m], a + 2 * k + m * (64 * Tile::line_bytes / 16), b + 2 * k, step + k > 0);
        }
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();  // the previous stage has been read
      if (step > 0) release(previous);
      previous = stage;
      if (++stage == S) {
        stage = 0;
        phase ^= 1;
      }
    }
    if (ping_pong && thread == 0) ptx::mbarrier_arrive(multiplied + warpgroup);
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < Tile::blocks; ++m) ptx::wgmma_fence_registers(acc[m]);
    release(previous);

    // -- split-K: the sums of the tokens that the other CTA finishes go to it, in the memory of the ring --

    if constexpr (!ping_pong) {
      if (p.cluster.splits > 1) {  // one tile for a cluster: once both CTAs have multiplied, the rings are free
        ptx::cluster_arrive_relaxed();
        ptx::cluster_wait();
        const uint32_t sums = ring + thread * 16;
        if (!finishes) {
          const int group = p.cluster.rows * p.cluster.columns;
          const int rank = blockIdx.x % p.cluster.size() + (place.split == 0 ? group : -group);
          const uint32_t there = ptx::map_shared(sums, rank);
          const uint32_t received_there = ptx::map_shared(ptx::shared_address(&received), rank);
#pragma unroll
          for (int i = 0; i < N / 2; i += 4) {
            const float4 four = make_float4(acc[0][i], acc[0][i + 1], acc[0][i + 2], acc[0][i + 3]);
            ptx::store_async(there + i * 512, four, received_there);
          }
          continue;
        }
        ptx::mbarrier_wait_cluster(&received, 0);
#pragma unroll
        for (int i = 0; i < N / 2; i += 4) {  // the same bits in either order of two terms
          const float4 other = ptx::load_shared_float4(sums + i * 512);
          acc[0][i] += other.x;
          acc[0][i + 1] += other.y;
          acc[0][i + 2] += other.z;
          acc[0][i + 3] += other.w;
        }
      }
    }

    // -- epilogue --

    ptx::named_barrier(1 + warpgroup, 128);
#pragma unroll
    for (int pass = 0; pass < Tile::passes; ++pass) {
      const uint32_t buffer = buffers_at + pass % Tile::buffers * Tile::buffer_bytes;
      if (p.residual) ptx::cp_async_wait<Tile::buffers - 1>();
      __syncwarp();
      const auto finish = [&](auto activation) {
#pragma unroll
        for (int j = 0; j < Tile::pass / 8; j += 2) {  // two groups of eight columns
          const uint32_t at = Tile::chunk_at(buffer, lane % 16, j + lane / 16);
          unsigned matrices[4] = {0, 0, 0, 0};
          if (p.residual) ptx::load_matrices(at, matrices);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int column = pass % Tile::passes_of_block * Tile::pass + (j + i / 2) * 8;
            const float* const sums = acc[pass / Tile::passes_of_block] + column / 2 + i % 2 * 2;
            const unsigned pair = *reinterpret_cast<const unsigned*>(bias_of[warpgroup] + column + lane % 4 * 2);
            const float2 bias = ptx::unpack_pair<T>(pair), residual = ptx::unpack_pair<T>(matrices[i]);
            const float low = activation(sums[0] + bias.x), high = activation(sums[1] + bias.y);
            matrices[i] = ptx::pack_pair<T>(make_float2(low + residual.x, high + residual.y));
          }
          ptx::store_matrices(at, matrices);
        }
      };
      if (p.activation == LinearActivation::none) {
        finish([](float h) { return h; });
      } else if (p.activation == LinearActivation::gelu_tanh) {
        finish([](float h) { return gelu_tanh(h); });
      } else {
        finish([](float h) { return activate<Activation::gelu, T>(h); });
      }
      __syncwarp();
      for_each_chunk(item, pass, [&](uint32_t from, int row, int64_t offset, bool inside) {
        const uint4 results = ptx::load_shared_uint4(from);
        if (inside) store16(p.out + row * p.out_stride + offset, results);
      });
      if (p.residual && Tile::buffers < Tile::passes) {
        __syncwarp();
        if (pass + Tile::buffers < Tile::passes) load_residual(item, pass + Tile::buffers);
        ptx::cp_async_commit();
      }
    }
  }
  __syncwarp();
  if (clustered) {
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }
#endif
}

}  // namespace kestrel::moe
