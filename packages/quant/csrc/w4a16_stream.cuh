// w4a16_wgmma_kernel's product by persistent CTAs. The CTAs of a token tile share the steps of all its row tiles evenly
// (stream-K), so tokens of different tiles have the same order of sums.
//
// A CTA does whole tiles first, so that CTAs read the same x at the same time. Where its last tile goes on in the next
// CTA, it leaves its sums in scratch memory and sets a flag; who has the last steps of a tile does them last, adds the
// sums of the CTAs before it, in their order, and writes the result. So a CTA waits for CTAs of smaller numbers alone.
// Assumed, as CUDA does not promise it: CTAs start in the order of blockIdx, so those that it waits for have started.
// Sums of others come through the ring of stages like loads, and results leave through stages of it.
#pragma once

#include "w4a16_wgmma_tile.cuh"

namespace kestrel::quant::w4_wgmma {

constexpr int kMaxStreamCtas = 256;

struct StreamParams : WgmmaParams {
  uint32_t* flags = nullptr;  // [CTAs]: set once a CTA's sums are in `partial`, [CTA][fragment][consumer] of float4
  int token_tiles = 0, row_ctas = 0;  // the grid: row_ctas CTAs for each token tile
  bool aligned_out = false;           // rows of out are aligned to 16 bytes
};

template <typename Tile>
struct StreamTile {
  static constexpr int pitch = Tile::rows * 2 + 16;  // bytes of a token's results: keeps stmatrix free of conflicts
  static constexpr int most_tokens = Tile::bytes / pitch / 16 * 16;  // of a stage
  static constexpr int out_chunks = (Tile::tokens + most_tokens - 1) / most_tokens;
  static constexpr int out_tokens = ((Tile::tokens + out_chunks - 1) / out_chunks + 15) / 16 * 16;
  static constexpr int fragment_bytes = Tile::consumers * 16;
  static constexpr int most_fragments = Tile::bytes / fragment_bytes;  // of a stage
  static constexpr int sum_chunks = (Tile::fragments + most_fragments - 1) / most_fragments;
  static constexpr int sum_fragments = (Tile::fragments + sum_chunks - 1) / sum_chunks;
  static constexpr int slot_bytes = Tile::fragments * fragment_bytes;
  static_assert(out_tokens * pitch <= Tile::bytes && out_tokens * out_chunks >= Tile::tokens);
  static_assert(sum_fragments * fragment_bytes <= Tile::bytes && Tile::m_blocks == 1);
};

// A CTA's place in the ring.
struct RingPlace {
  int stage = 0, phase = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// What a CTA does: steps begin to end of those of all row tiles, for a token tile.
struct StreamShare {
  int number, first_token;
  int64_t begin, end;
};

__device__ __forceinline__ int64_t share_begin(const StreamParams& p, int number) {
  return int64_t{p.row_tiles} * p.steps * number / p.row_ctas;
}

template <typename Tile>
__device__ __forceinline__ StreamShare share_of_cta(const StreamParams& p) {
  const int number = blockIdx.x / p.token_tiles, token_tile = blockIdx.x - number * p.token_tiles;
  return {number, token_tile * Tile::tokens, share_begin(p, number), share_begin(p, number + 1)};
}

// The row tiles of a share, in the order of the work: whole ones, the one that goes on in the next CTA, and the one
// that began in a CTA before.
struct ShareTiles {
  int first, end_of_whole, whole, count;
  bool goes_on;

  __device__ __forceinline__ ShareTiles(const StreamShare& share, int steps)
      : first(static_cast<int>(share.begin / steps)),
        end_of_whole(static_cast<int>(share.end / steps)),
        whole(max(end_of_whole - static_cast<int>((share.begin + steps - 1) / steps), 0)),
        count(static_cast<int>((share.end - 1) / steps) - first + 1),
        goes_on(share.end % steps != 0) {}

  __device__ __forceinline__ int operator[](int i) const {
    return i < whole ? end_of_whole - 1 - i : i == whole && goes_on ? end_of_whole : first;
  }
};

// Steps of a row tile that a CTA does.
struct Piece {
  int first, end;
};

__device__ __forceinline__ Piece piece_of(const StreamParams& p, int row_tile, const StreamShare& share) {
  const int64_t first = int64_t{row_tile} * p.steps;
  return {static_cast<int>(max(share.begin - first, int64_t{0})),
          static_cast<int>(min(share.end - first, static_cast<int64_t>(p.steps)))};
}

// The first CTA that has steps of this CTA's row tile: the number of its share.
__device__ __forceinline__ int first_contributor(const StreamParams& p, int row_tile, int number) {
  while (share_begin(p, number) > int64_t{row_tile} * p.steps) --number;
  return number;
}

__device__ __forceinline__ void wait_for_flag(const uint32_t* flag) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t set;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(set) : "l"(flag) : "memory");
  } while (!set);
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

__device__ __forceinline__ void set_flag(uint32_t* flag) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __threadfence();
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(1u) : "memory");
#endif
}

// Flags to zero, before the kernel that sets them. T: of that kernel, each of which has a source of its own.
template <typename T>
__global__ void __launch_bounds__(kMaxStreamCtas) w4a16_stream_flags_kernel(const __grid_constant__ StreamParams p) {
  pdl_wait();
  pdl_trigger();
  p.flags[threadIdx.x] = 0;
}

// One thread: all loads of a CTA.
template <typename Tile>
__device__ __forceinline__ void stream_loads(const StreamParams& p, uint32_t ring, uint64_t* full,
                                             const uint64_t* empty, const StreamShare& share) {
  using S = StreamTile<Tile>;
  const ShareTiles tiles(share, p.steps);
  const Piece at_start = piece_of(p, tiles[0], share);
  const int ahead = min(p.stages, at_start.end - at_start.first);
  ptx::prefetch_tensor_map(p.x_map);
  for (int s = 0; s < ahead; ++s) {
    load_weights<Tile>(p, ring + s * Tile::bytes, full + s, tiles[0] * Tile::rows, at_start.first + s);
  }
  pdl_wait();
  pdl_trigger();
  for (int s = 0; s < ahead; ++s) {
    load_x<Tile>(p, ring + s * Tile::bytes, full + s, share.first_token, at_start.first + s);
  }
  RingPlace at;
  int loaded = ahead;
  for (int t = 0; t < tiles.count; ++t) {
    const int tile = tiles[t];
    const Piece piece = piece_of(p, tile, share);
    for (int step = piece.first; step < piece.end; ++step) {
      if (loaded > 0) {
        --loaded;
      } else {
        ptx::mbarrier_wait(empty + at.stage, at.phase ^ 1);
        load_weights<Tile>(p, ring + at.stage * Tile::bytes, full + at.stage, tile * Tile::rows, step);
        load_x<Tile>(p, ring + at.stage * Tile::bytes, full + at.stage, share.first_token, step);
      }
      at.advance(p.stages);
    }
    if (piece.end < p.steps) continue;
    if (piece.first > 0) {
      for (int number = first_contributor(p, tile, share.number); number < share.number; ++number) {
        const int cta = blockIdx.x - (share.number - number) * p.token_tiles;
        wait_for_flag(p.flags + cta);
        const char* const from = reinterpret_cast<const char*>(p.partial) + int64_t{cta} * S::slot_bytes;
        for (int chunk = 0; chunk < S::sum_chunks; ++chunk) {
          const int first = chunk * S::sum_fragments, count = min(S::sum_fragments, Tile::fragments - first);
          ptx::mbarrier_wait(empty + at.stage, at.phase ^ 1);
          ptx::mbarrier_arrive_expect_tx(full + at.stage, count * S::fragment_bytes);
          ptx::bulk_load(ring + at.stage * Tile::bytes, from + first * S::fragment_bytes, count * S::fragment_bytes,
                         full + at.stage);
          at.advance(p.stages);
        }
      }
    }
    for (int chunk = 0; chunk < S::out_chunks; ++chunk) {  // stages for results
      ptx::mbarrier_wait(empty + at.stage, at.phase ^ 1);
      ptx::mbarrier_arrive(full + at.stage);
      at.advance(p.stages);
    }
  }
}

template <typename T, typename Tile>
__global__ void __launch_bounds__(Tile::threads, Tile::occupancy)
    w4a16_stream_kernel(const __grid_constant__ StreamParams p) {
#ifdef KESTREL_HAS_WGMMA
  using S = StreamTile<Tile>;
  constexpr int N = Tile::tokens;
  extern __shared__ char dynamic[];
  __shared__ uint64_t full[Tile::max_stages], empty[Tile::max_stages];
  const uint32_t ring = (ptx::shared_address(dynamic) + Tile::alignment - 1) / Tile::alignment * Tile::alignment;
  if (threadIdx.x == 0) {
    for (int s = 0; s < p.stages; ++s) {
      ptx::mbarrier_init(full + s, 1);
      ptx::mbarrier_init(empty + s, Tile::consumers / 32);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32 % 4, warpgroup = thread / 128;
  const StreamShare share = share_of_cta<Tile>(p);

  if (thread >= Tile::consumers) {
    ptx::reduce_registers<Tile::producer_registers>();
    if (thread == Tile::consumers) stream_loads<Tile>(p, ring, full, empty, share);
    return;
  }

  ptx::raise_registers<Tile::consumer_registers>();
  const char* const ring_pointer = dynamic + (ring - ptx::shared_address(dynamic));
  const int row_of_warp = warpgroup * 64 + warp * 16;
  const StagePlace<Tile> place(ring, row_of_warp, lane);
  RingPlace at;
  const auto release = [&](int stage) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(empty + stage);
  };

  const ShareTiles tiles(share, p.steps);
  for (int t = 0; t < tiles.count; ++t) {
    const int tile = tiles[t];
    const Piece piece = piece_of(p, tile, share);
    const int first_row = tile * Tile::rows;

    // -- main loop, as that of w4a16_wgmma_kernel --

    float acc[1][N / 2];
    uint32_t fragments[Tile::depth][8 * Tile::batch];
    const int steps = piece.end - piece.first;
    int previous = 0;  // the stage that products may still read
    for (int i = 0; i < steps; ++i) {
      ptx::mbarrier_wait(full + at.stage, at.phase);
      const auto previous_done = [&] {  // with more branches here ptxas would not overlap products
        __syncwarp();
        if (i > 0 && lane == 0) ptx::mbarrier_arrive(empty + previous);
      };
      multiply_stage<T, Tile>(p, acc, fragments, place, at.stage * Tile::bytes, previous_done, i > 0);
      previous = at.stage;
      at.advance(p.stages);
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_registers(acc[0]);
    release(previous);

    // -- sums of a tile that goes on in the next CTA --

    if (piece.end < p.steps) {
      float4* const to = reinterpret_cast<float4*>(p.partial) + int64_t{blockIdx.x} * (S::slot_bytes / 16) + thread;
#pragma unroll
      for (int i = 0; i < Tile::fragments; ++i) {
        to[i * Tile::consumers] = make_float4(acc[0][4 * i], acc[0][4 * i + 1], acc[0][4 * i + 2], acc[0][4 * i + 3]);
      }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      asm volatile("fence.proxy.async;" ::: "memory");  // a bulk copy reads them
#endif
      __threadfence();
      ptx::named_barrier(1, Tile::consumers);
      if (thread == 0) set_flag(p.flags + blockIdx.x);
      continue;
    }

    // -- sums of the CTAs before --

    if (piece.first > 0) {
      for (int number = first_contributor(p, tile, share.number); number < share.number; ++number) {
#pragma unroll
        for (int chunk = 0; chunk < S::sum_chunks; ++chunk) {
          ptx::mbarrier_wait(full + at.stage, at.phase);
          const float4* const from = reinterpret_cast<const float4*>(ring_pointer + at.stage * Tile::bytes) + thread;
#pragma unroll
          for (int i = 0; i < S::sum_fragments; ++i) {
            const int f = chunk * S::sum_fragments + i;
            if (f >= Tile::fragments) break;
            const float4 v = from[i * Tile::consumers];
            acc[0][4 * f] += v.x;
            acc[0][4 * f + 1] += v.y;
            acc[0][4 * f + 2] += v.z;
            acc[0][4 * f + 3] += v.w;
          }
          release(at.stage);
          at.advance(p.stages);
        }
      }
    }

    // -- result --

    float bias[2] = {};
    if (p.bias) {
      const T* const from = reinterpret_cast<const T*>(p.bias) + first_row + row_of_warp + lane / 4;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (first_row + row_of_warp + lane / 4 + 8 * r < p.outputs) bias[r] = static_cast<float>(from[8 * r]);
      }
    }
    constexpr int kPacks = Tile::rows / 8;
#pragma unroll
    for (int chunk = 0; chunk < S::out_chunks; ++chunk) {
      constexpr int kPairs = S::out_tokens / 16;
      ptx::mbarrier_wait(full + at.stage, at.phase);
      const uint32_t buffer = ring + at.stage * Tile::bytes;
      const uint32_t to = buffer + (lane / 16 * 8 + lane % 8) * S::pitch + (row_of_warp + lane / 8 % 2 * 8) * 2;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int f = (chunk * kPairs + j) * 8;
        if (f >= N / 2) break;
        unsigned m[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          m[i] = ptx::pack_pair<T>(make_float2(acc[0][f + 2 * i] + bias[i % 2], acc[0][f + 2 * i + 1] + bias[i % 2]));
        }
        ptx::store_matrices_transposed(to + j * 16 * S::pitch, m);
      }
      ptx::named_barrier(1, Tile::consumers);
      const int first = share.first_token + chunk * S::out_tokens;
      const int count = min(min(S::out_tokens, N - chunk * S::out_tokens), p.tokens - first);
      for (int i = thread; i < count * kPacks; i += Tile::consumers) {
        const int token = i / kPacks, row = i % kPacks * 8;
        if (first_row + row >= p.outputs) continue;
        const uint4 v = ptx::load_shared_uint4(buffer + token * S::pitch + row * 2);
        char* const out = p.out + (first + token) * p.out_stride + int64_t{first_row + row} * 2;
        if (p.aligned_out) {
          *reinterpret_cast<uint4*>(out) = v;
        } else {
          const uint32_t words_of[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            reinterpret_cast<unsigned short*>(out)[e] = static_cast<unsigned short>(words_of[e / 2] >> 16 * (e % 2));
          }
        }
      }
      ptx::fence_proxy_async();
      release(at.stage);
      at.advance(p.stages);
    }
  }
#endif
}

}  // namespace kestrel::quant::w4_wgmma
