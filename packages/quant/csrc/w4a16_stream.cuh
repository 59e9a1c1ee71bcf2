// w4a16_wgmma_kernel's product by persistent CTAs. The CTAs of a token tile share the steps of all its row tiles evenly
// (stream-K), so tokens of different tiles have the same order of sums.
//
// A CTA does whole tiles first, so that CTAs read the same x at the same time. Where its last tile goes on in the next
// CTA, it stores its sums in scratch memory and sets a flag. The CTA with the last steps of a tile does them last,
// loads the sums of the CTAs before it through the ring of stages, adds them in order, and writes the result. So a CTA
// waits for CTAs of smaller numbers alone. Assumed, as CUDA does not promise it: they start in the order of blockIdx.
#pragma once

#include "w4a16_wgmma_tile.cuh"

namespace kestrel::quant::w4_wgmma {

constexpr int kMaxStreamCtas = 256;  // one flag, and one thread that clears it, for each; no GPU has more SMs

struct StreamParams : WgmmaParams {
  uint32_t* flags = nullptr;  // [CTAs]: set once a CTA's sums are in `partial`, [CTA][fragment][consumer] of float4
  int token_tiles = 0, row_ctas = 0;  // the grid: row_ctas CTAs for each token tile
  int share = 0, rest = 0;            // steps of a CTA, and those that are left over
};

// What leaves a CTA, or comes from another: a tile, in pieces that fit a stage.
template <typename Tile>
struct StreamTile {
  static constexpr int tokens = Tile::tokens, fragments = Tile::fragments;
  static constexpr int most_tokens = Tile::bytes / ResultTile<Tile, 16>::pitch / 16 * 16;  // of a stage
  static constexpr int out_chunks = (tokens + most_tokens - 1) / most_tokens;
  static constexpr int out_tokens = ((tokens + out_chunks - 1) / out_chunks + 15) / 16 * 16;
  static constexpr int fragment_bytes = Tile::consumers * 16;
  static constexpr int most_fragments = Tile::bytes / fragment_bytes;  // of a stage
  static constexpr int sum_chunks = (fragments + most_fragments - 1) / most_fragments;
  static constexpr int sum_fragments = (fragments + sum_chunks - 1) / sum_chunks;
  static constexpr int slot_bytes = fragments * fragment_bytes;
  static_assert(ResultTile<Tile, out_tokens>::bytes <= Tile::bytes && out_tokens * out_chunks >= tokens);
  static_assert(sum_fragments * fragment_bytes <= Tile::bytes && Tile::m_blocks == 1);
  static_assert((sum_chunks - 1) * sum_fragments < fragments, "as many chunks are loaded as are added");
};

// What a CTA does: steps begin to end of those of all row tiles, for a token tile. Its row tiles are `count` ones from
// `first` on, in the order of the work: whole ones, the one that goes on in the next CTA, and the one that began in a
// CTA before.
struct StreamShare {
  int number, first_token;
  int begin, end;
  int first, end_of_whole, whole, count;

  __device__ __forceinline__ int tile(int i) const {
    return i < whole ? end_of_whole - 1 - i : i == whole && first + count > end_of_whole ? end_of_whole : first;
  }
};

__device__ __forceinline__ int share_begin(const StreamParams& p, int number) {
  return p.share * number + p.rest * number / p.row_ctas;
}

__device__ __forceinline__ StreamShare share_of_cta(const StreamParams& p, int tokens_of_tile) {
  StreamShare s;
  s.number = blockIdx.x / p.token_tiles;
  s.first_token = (blockIdx.x - s.number * p.token_tiles) * tokens_of_tile;
  s.begin = share_begin(p, s.number);
  s.end = share_begin(p, s.number + 1);
  s.first = s.begin / p.steps;
  s.end_of_whole = s.end / p.steps;
  s.whole = max(s.end_of_whole - s.first - (s.begin != s.first * p.steps), 0);
  s.count = s.end_of_whole - s.first + (s.end != s.end_of_whole * p.steps);
  return s;
}

// Steps of a row tile that a CTA does.
struct Piece {
  int first, end;
};

__device__ __forceinline__ Piece piece_of(const StreamParams& p, int row_tile, const StreamShare& share) {
  const int first = row_tile * p.steps;
  return {max(share.begin - first, 0), min(share.end - first, p.steps)};
}

__device__ __forceinline__ int steps_of(const StreamParams& p, int row_tile, const StreamShare& share) {
  const Piece piece = piece_of(p, row_tile, share);
  return piece.end - piece.first;
}

// The first CTA that has steps of this CTA's row tile: the number of its share.
__device__ __forceinline__ int first_contributor(const StreamParams& p, int row_tile, int number) {
  while (share_begin(p, number) > row_tile * p.steps) --number;
  return number;
}

// Orders plain stores of sums before bulk copies of them. Both the CTA that stores and the one that copies call it.
__device__ __forceinline__ void fence_loads_of_sums() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_flag(const uint32_t* flag) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t set;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(set) : "l"(flag) : "memory");
  } while (!set);
#endif
  fence_loads_of_sums();
}

__device__ __forceinline__ void set_flag(uint32_t* flag) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __threadfence();
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(1u) : "memory");
#endif
}

// Flags to zero, before the kernel that sets them. T, ZEROS: of that kernel, each of which has a source of its own.
template <typename T, Zeros ZEROS>
__global__ void __launch_bounds__(kMaxStreamCtas) w4a16_stream_flags_kernel(const __grid_constant__ StreamParams p) {
  pdl_wait();
  pdl_trigger();
  p.flags[threadIdx.x] = 0;
}

// The thread that loads weights: loads the sums of another CTA.
template <typename Tile>
__device__ __forceinline__ void load_sums(const StreamParams& p, int cta, uint32_t ring, uint64_t* full,
                                          const uint64_t* empty, RingPlace& at) {
  using S = StreamTile<Tile>;
  constexpr int kBytes = S::sum_fragments * S::fragment_bytes;
  const char* const from = reinterpret_cast<const char*>(p.partial) + int64_t{cta} * S::slot_bytes;
#pragma unroll 1
  for (int done = 0; done < S::slot_bytes; done += kBytes) {
    const int bytes = min(kBytes, S::slot_bytes - done);
    ptx::mbarrier_wait(empty + at.stage, at.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full + at.stage, bytes);
    ptx::bulk_load(ring + at.stage * Tile::bytes, from + done, bytes, full + at.stage);
    at.advance(p.stages);
  }
}

// One of the two threads that load: its arrival at COUNT stages once they are empty, in which the consumers write
// results or the other thread loads sums.
template <int COUNT>
__device__ __forceinline__ void skip_stages(const StreamParams& p, uint64_t* full, const uint64_t* empty,
                                            RingPlace& at) {
#pragma unroll 1
  for (int i = 0; i < COUNT; ++i) {
    ptx::mbarrier_wait(empty + at.stage, at.phase ^ 1);
    ptx::mbarrier_arrive(full + at.stage);
    at.advance(p.stages);
  }
}

// Producers: all loads of a CTA. X: those of x, else those of the weights, and of the sums of other CTAs.
template <typename Tile, bool X>
__device__ __forceinline__ void stream_loads(const StreamParams& p, uint32_t ring, uint64_t* full,
                                             const uint64_t* empty, const StreamShare& share) {
  RingPlace at;
  if (X) {
    pdl_wait();
    pdl_trigger();
  }
  for (int t = 0; t < share.count; ++t) {
    const int tile = share.tile(t);
    const Piece piece = piece_of(p, tile, share);
    for (int step = piece.first; step < piece.end; ++step) {
      ptx::mbarrier_wait(empty + at.stage, at.phase ^ 1);
      const uint32_t to = ring + at.stage * Tile::bytes;
      if constexpr (X) {
        load_x<Tile>(p, to, full + at.stage, share.first_token, step);
      } else {
        load_weights<Tile>(p, to, full + at.stage, tile * Tile::rows, step);
      }
      at.advance(p.stages);
    }
    if (piece.end < p.steps) continue;
    if (piece.first > 0) {
      for (int number = first_contributor(p, tile, share.number); number < share.number; ++number) {
        if constexpr (X) {
          skip_stages<StreamTile<Tile>::sum_chunks>(p, full, empty, at);
        } else {
          const int cta = blockIdx.x - (share.number - number) * p.token_tiles;
          pdl_wait();  // for the launch that clears the flags
          wait_for_flag(p.flags + cta);
          load_sums<Tile>(p, cta, ring, full, empty, at);
        }
      }
    }
    skip_stages<StreamTile<Tile>::out_chunks>(p, full, empty, at);
  }
}

// Adds the sums that come through the ring.
template <typename Tile, typename Release>
__device__ __forceinline__ void add_sums(const StreamParams& p, float (&acc)[Tile::tokens / 2], const char* ring,
                                         const uint64_t* full, RingPlace& at, const Release& release) {
  using S = StreamTile<Tile>;
#pragma unroll
  for (int chunk = 0; chunk < S::sum_chunks; ++chunk) {
    ptx::mbarrier_wait(full + at.stage, at.phase);
    const float4* const from = reinterpret_cast<const float4*>(ring + at.stage * Tile::bytes) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < S::sum_fragments; ++i) {
      if (chunk * S::sum_fragments + i >= S::fragments) break;
      const int f = (chunk * S::sum_fragments + i) * 4;
      const float4 v = from[i * Tile::consumers];
      acc[f] += v.x;
      acc[f + 1] += v.y;
      acc[f + 2] += v.z;
      acc[f + 3] += v.w;
    }
    release(at.stage);
    at.advance(p.stages);
  }
}

// Writes the results of a tile, through stages of the ring.
template <typename T, typename Tile, typename Release>
__device__ __forceinline__ void write_results(const StreamParams& p, const float (&acc)[Tile::tokens / 2],
                                              uint32_t ring, const uint64_t* full, RingPlace& at,
                                              const Release& release, int first_row, int first_token, int row_of_warp) {
  using S = StreamTile<Tile>;
  using Results = ResultTile<Tile, S::out_tokens>;
  const int lane = threadIdx.x % 32;
  const float2 bias = load_bias<T>(p, first_row + row_of_warp, lane);
#pragma unroll
  for (int chunk = 0; chunk < S::out_chunks; ++chunk) {
    const int begin = chunk * S::out_tokens, tokens = min(S::out_tokens, S::tokens - begin);
    ptx::mbarrier_wait(full + at.stage, at.phase);
    const uint32_t buffer = ring + at.stage * Tile::bytes;
    stage_results<T, Results, Residual::none>(p, acc, begin, tokens, bias, buffer, row_of_warp, lane);
    ptx::named_barrier(1, Tile::consumers);
    const int first = first_token + begin;
    copy_results<Results>(p, buffer, first_row, first, min(tokens, p.tokens - first));
    ptx::fence_proxy_async();
    release(at.stage);
    at.advance(p.stages);
  }
}

// Whether this is the first lane, read anew: in a register it would cost the products theirs.
__device__ __forceinline__ bool first_lane() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane == 0;
}

template <typename T, Zeros ZEROS, typename Tile>
__global__ void __launch_bounds__(Tile::threads, Tile::occupancy)
    w4a16_stream_kernel(const __grid_constant__ StreamParams p) {
#ifdef KESTREL_HAS_WGMMA
  using S = StreamTile<Tile>;
  constexpr int N = Tile::tokens;
  extern __shared__ char dynamic[];
  __shared__ uint64_t full[Tile::max_stages], empty[Tile::max_stages];
  __shared__ StreamShare share;  // in registers it would cost the products theirs
  const uint32_t ring = (ptx::shared_address(dynamic) + Tile::alignment - 1) / Tile::alignment * Tile::alignment;
  prefetch_maps<Tile>(p);
  if (threadIdx.x == 0) {
    init_ring<Tile>(p, full, empty);
    share = share_of_cta(p, Tile::tokens);
  }
  __syncthreads();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32 % 4, warpgroup = thread / 128;

  if (thread >= Tile::consumers) {
    ptx::reduce_registers<Tile::producer_registers>();
    if (thread == Tile::consumers) stream_loads<Tile, false>(p, ring, full, empty, share);
    if (thread == Tile::consumers + 32) stream_loads<Tile, true>(p, ring, full, empty, share);
    return;
  }

  ptx::raise_registers<Tile::consumer_registers>();
  const int row_of_warp = warpgroup * 64 + warp * 16;
  const StagePlace<Tile> place(ring, row_of_warp, lane);
  RingPlace at;
  const auto release = [&](int stage) {
    __syncwarp();
    if (first_lane()) ptx::mbarrier_arrive(empty + stage);
  };

  for (int t = 0; t < share.count; ++t) {
    // -- main loop, as that of w4a16_wgmma_kernel --

    float acc[1][N / 2];
    uint32_t fragments[Tile::depth][8 * Tile::batch];
    const int steps = steps_of(p, share.tile(t), share);
    int previous = 0;  // the stage that products may still read
    for (int i = 0; i < steps; ++i) {
      ptx::mbarrier_wait(full + at.stage, at.phase);
      const auto previous_done = [&] {  // with more branches here ptxas would not overlap products
        __syncwarp();
        if (i > 0 && first_lane()) ptx::mbarrier_arrive(empty + previous);
      };
      multiply_stage<T, ZEROS, Tile>(p, acc, fragments, place, at.stage * Tile::bytes, previous_done, i > 0);
      previous = at.stage;
      at.advance(p.stages);
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_registers(acc[0]);
    release(previous);
    const int tile = share.tile(t), first_row = tile * Tile::rows;
    const Piece piece = piece_of(p, tile, share);
    const char* const ring_pointer = dynamic + (ring - ptx::shared_address(dynamic));

    // -- sums of a tile that goes on in the next CTA --

    if (piece.end < p.steps) {
      float4* const to = reinterpret_cast<float4*>(p.partial) + int64_t{blockIdx.x} * (S::slot_bytes / 16) + thread;
#pragma unroll
      for (int i = 0; i < S::fragments; ++i) {
        to[i * Tile::consumers] = make_float4(acc[0][4 * i], acc[0][4 * i + 1], acc[0][4 * i + 2], acc[0][4 * i + 3]);
      }
      fence_loads_of_sums();
      __threadfence();
      ptx::named_barrier(1, Tile::consumers);
      if (thread == 0) set_flag(p.flags + blockIdx.x);
      continue;
    }

    // -- sums of the CTAs before, result --

    if (piece.first > 0) {
      for (int number = first_contributor(p, tile, share.number); number < share.number; ++number) {
        add_sums<Tile>(p, acc[0], ring_pointer, full, at, release);
      }
    }
    write_results<T, Tile>(p, acc[0], ring, full, at, release, first_row, share.first_token, row_of_warp);
  }
#endif
}

}  // namespace kestrel::quant::w4_wgmma
