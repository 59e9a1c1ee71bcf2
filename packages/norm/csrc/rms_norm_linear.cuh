// y = rms_norm(x) W' for at most 32 rows of x: one launch that reads the weight once.
//
// Weight rows are the 16 rows of mma.sync, tokens its 8 columns. A CTA has 128 rows of W and a slice of K; the CTAs of
// a cluster share the rows and divide K. A slice of x times the norm's weight stays in shared memory; sums of squares
// and of products go to the CTA that owns the rows, which adds the slices in order and scales by rstd. Each warp
// streams its own 32 rows through a ring of its own (cp.async), so the main loop has no barrier, and the ring fills
// before the PDL wait. K is permuted alike in both operands so that a lane's eight k are neighbours: one load of 16
// bytes feeds two MMAs.
#pragma once

#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>
#include <kestrel/ptx/cluster.cuh>
#include <kestrel/ptx/cp_async.cuh>
#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/mma.cuh>
#include <kestrel/ptx/shared.cuh>

#include <cstdint>
#include <type_traits>

namespace kestrel::norm {

constexpr int kLinearRows = 128, kLinearThreads = 256, kMaxSlices = 8;
constexpr int kRowWarps = 4, kWarpsOfK = 2, kRowTiles = 2;  // 4 x 2 warps; a warp has 2 x 16 rows
constexpr int kLineBytes = 128, kBlockK = 64;               // a block of K: 64 elements of a row, a line of 128 bytes

struct LinearParams {  // x [tokens, width], norm_weight [width], weight [outputs, width], out [tokens, outputs]
  const char *x = nullptr, *norm_weight = nullptr, *weight = nullptr;
  char* out = nullptr;
  int64_t x_stride = 0, out_stride = 0;  // bytes
  unsigned weight_stride = 0;
  int tokens = 0, outputs = 0, width = 0;
  int blocks = 0;           // of K
  int tiles = 0;            // of 128 rows of the weight
  int slices = 1;           // of K: the CTAs of a cluster
  int buffers = 1;          // for received sums: two where a cluster has several tiles
  bool packed_out = false;  // two elements of out are 4 aligned bytes
  float eps = 0, inv_width = 0;
};

constexpr int default_stages(int token_tiles) { return token_tiles == 1 ? 5 : token_tiles == 2 ? 4 : 3; }

template <int TOKEN_TILES, int STAGES>
struct LinearTile {
  static constexpr int tokens = 8 * TOKEN_TILES;
  static constexpr int row_tiles_per_stage = TOKEN_TILES <= 2 ? 1 : 2;
  static constexpr int stages = STAGES;
  static constexpr int stage_bytes = row_tiles_per_stage * 16 * kLineBytes;  // of a warp
  static constexpr int ring_bytes = stages * stage_bytes;
  static constexpr int rings_bytes = ring_bytes * (kLinearThreads / 32);
  static constexpr int min_ctas = TOKEN_TILES <= 2 ? 2 : 1;
  // What a CTA receives: sums of its share of the rows of a tile from both halves of every slice, [source][row][token].
  static constexpr int sum_bytes = kWarpsOfK * kLinearRows * tokens * 4;
  static constexpr int square_bytes = kMaxSlices * tokens * 4;  // [slice][token]

  // Rings, received sums and squares, scales of tokens, x.
  static constexpr __host__ __device__ int x_at(int buffers) {
    return rings_bytes + buffers * sum_bytes + square_bytes + tokens * 4;
  }
  static constexpr int shared_bytes(int blocks_of_slice, int buffers) {
    return x_at(buffers) + blocks_of_slice * kLineBytes * tokens;
  }
};

// Where 16 bytes of a line are stored: odd lines have their halves exchanged, so that fragments are read without bank
// conflicts.
__device__ __forceinline__ int chunk_offset(int line, int chunk) { return (chunk ^ (line & 1) * 4) * 16; }

// The power of two that scales a slice of x so that its mean square is between 1 and 4.
__device__ __forceinline__ float power_of_two(float sum_sq, float count) {
  const int exponent = static_cast<int>(__float_as_uint(sum_sq / count) >> 23) - 127;
  return __uint_as_float(static_cast<uint32_t>(127 - min(max(exponent >> 1, -30), 60)) << 23);
}

// Two neighbouring tokens' sums of a row, to the CTA that adds them up.
__device__ __forceinline__ void send(bool remote, uint32_t to, unsigned rank, float a, float b, uint64_t* received) {
  if (remote) {
    const uint64_t both = __float_as_uint(a) | static_cast<uint64_t>(__float_as_uint(b)) << 32;
    ptx::store_async(ptx::map_shared(to, rank), both, ptx::map_shared(ptx::shared_address(received), rank));
  } else {
    ptx::store_shared(to, a);
    ptx::store_shared(to + 4, b);
  }
}

template <typename T, int TOKEN_TILES, int STAGES>
__global__ void __launch_bounds__(kLinearThreads, LinearTile<TOKEN_TILES, STAGES>::min_ctas)
    rms_norm_linear_kernel(const __grid_constant__ LinearParams p) {
  using Tile = LinearTile<TOKEN_TILES, STAGES>;
  constexpr int NT = TOKEN_TILES, MS = Tile::row_tiles_per_stage, S = Tile::stages, kStages = kRowTiles / MS;
  extern __shared__ __align__(128) char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int first_tile = blockIdx.x / p.slices, slice = blockIdx.x - first_tile * p.slices;
  const int clusters = gridDim.x / p.slices, row_of_warp = warp % kRowWarps * (16 * kRowTiles);
  const int first_block = static_cast<int>(int64_t{p.blocks} * slice / p.slices);
  const int blocks = static_cast<int>(int64_t{p.blocks} * (slice + 1) / p.slices) - first_block;
  const int k_warp = warp / kRowWarps;                                       // of two, each for every second block of K
  const int blocks_of_warp = (blocks - k_warp + kWarpsOfK - 1) / kWarpsOfK;  // k_warp, k_warp + 2, ...
  const bool remote = p.slices > 1;
  __shared__ uint64_t received[2], received_squares;
  const auto expect_sums = [&](uint64_t* barrier) { ptx::mbarrier_arrive_expect_tx(barrier, Tile::sum_bytes); };
  if (remote) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(received, 1);
      ptx::mbarrier_init(received + 1, 1);
      ptx::mbarrier_init(&received_squares, 1);
      ptx::fence_mbarrier_init();
      expect_sums(received);
      expect_sums(received + 1);
      ptx::mbarrier_arrive_expect_tx(&received_squares, p.slices * Tile::tokens * 4);
    }
    __syncwarp();
    ptx::cluster_arrive_relaxed();  // the fence has ordered the mbarriers, and nothing else is shared yet
  }

  float* const squares = reinterpret_cast<float*>(memory + Tile::rings_bytes + p.buffers * Tile::sum_bytes);
  float* const token_scale = squares + Tile::square_bytes / 4;
  char* const x = memory + Tile::x_at(p.buffers);  // [block][token][line]
  const int packs = blocks * 8;                    // of a row of the slice
  const int64_t first_byte = int64_t{first_block} * kLineBytes;
  const int packs_left = p.width / 8 - first_block * 8;  // that exist

  // -- loads of the weight --
  //
  // A warp copies a line of 128 bytes with eight lanes: four rows at a time. Rows past the last are copies of it.
  const uint32_t ring = ptx::shared_address(memory + warp * Tile::ring_bytes);
  const int line = lane / 8, chunk = lane % 8;
  const uint32_t copy_to = ring + line * kLineBytes + chunk_offset(line, chunk);
  unsigned row_offset[kRowTiles][4];
  const char* copy_from = nullptr;
  int packs_from_copy = 0;  // of the row, from copy_from on
  int copy_tile = blocks_of_warp > 0 ? first_tile : p.tiles, blocks_to_copy = 0;
  const auto start_tile = [&]() {
    if (copy_tile >= p.tiles) return;
    const int row = copy_tile * kLinearRows, last = p.outputs - 1 - row;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) row_offset[i][c] = min(row_of_warp + i * 16 + c * 4 + line, last) * p.weight_stride;
    }
    copy_from = p.weight + int64_t{row} * p.weight_stride + first_byte + k_warp * kLineBytes + chunk * 16;
    packs_from_copy = packs_left - k_warp * 8 - chunk;
    blocks_to_copy = blocks_of_warp;
  };
  start_tile();
  const auto copy_stage = [&](uint32_t stage, int of_block) {
    if (copy_tile < p.tiles) {
#pragma unroll
      for (int i = 0; i < MS; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          ptx::cp_async16_or_zero(copy_to + stage + (i * 16 + c * 4) * kLineBytes,
                                  copy_from + row_offset[of_block * MS + i][c], packs_from_copy > 0);
        }
      }
      if (of_block == kStages - 1) {
        copy_from += kWarpsOfK * kLineBytes;
        packs_from_copy -= kWarpsOfK * 8;
        if (--blocks_to_copy == 0) {
          copy_tile += clusters;
          start_tile();
        }
      }
    }
    ptx::cp_async_commit();
  };

  // -- prologue: fills the ring, prefetches x, waits --

#pragma unroll
  for (int s = 0; s < S; ++s) copy_stage(s * Tile::stage_bytes, s % kStages);
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const int token = warp + 8 * j;
    for (int pack = lane * 8; pack < packs; pack += 256) {
      if (token < p.tokens && pack < packs_left) prefetch_l2(p.x + token * p.x_stride + first_byte + pack * 16);
    }
  }
  constexpr int kBatch = 4;  // loads of a token in flight
  const char* const norm_weight = p.norm_weight + first_byte;
  Pack<T> weight[kBatch];
  const auto load_weight = [&](int first) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int pack = first + 32 * b;
      weight[b].bits = make_uint4(0, 0, 0, 0);
      if (pack < packs && pack < packs_left) weight[b].bits = load16_constant(norm_weight + pack * 16);
    }
  };
  load_weight(lane);
  pdl_wait();
  pdl_trigger();

  // -- x --
  //
  // The slice of x times the norm's weight, rounded, and its sums of squares: a warp per token. In fp16 the slice is
  // scaled by a power of two first, so that products neither overflow nor lose bits.
  constexpr bool kScaled = std::is_same_v<T, __half>;
  const auto place = [&](int pack, int token) {
    return reinterpret_cast<uint4*>(x + (pack / 8 * Tile::tokens + token) * kLineBytes + chunk_offset(token, pack % 8));
  };
  const auto weighted = [&](const Pack<T>& v, const Pack<T>& by, float scale) {
    float f[8], w[8];
    v.unpack(f);
    by.unpack(w);
#pragma unroll
    for (int i = 0; i < 8; ++i) f[i] *= kScaled ? w[i] * scale : w[i];
    Pack<T> product;
    product.pack(f);
    return product.bits;
  };
  float sum_sq[NT] = {};
  for (int first = lane; first < packs; first += 32 * kBatch) {
    if (first != lane) load_weight(first);
    Pack<T> v[kBatch][NT];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int pack = first + 32 * b;
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const int token = warp + 8 * j;
        v[b][j].bits = make_uint4(0, 0, 0, 0);
        if (token < p.tokens && pack < packs_left && pack < packs) {
          v[b][j].bits = load16(p.x + token * p.x_stride + first_byte + pack * 16);
        }
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int pack = first + 32 * b;
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        float f[8];
        v[b][j].unpack(f);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum_sq[j] = fmaf(f[i], f[i], sum_sq[j]);
        if (pack < packs) {
          *place(pack, warp + 8 * j) = kScaled ? v[b][j].bits : weighted(v[b][j], weight[b], 1.f);
        }
      }
    }
  }
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum_sq[j] += __shfl_xor_sync(0xffffffffu, sum_sq[j], by);
  }
  if constexpr (kScaled) {
    float scale[NT];
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      scale[j] = power_of_two(sum_sq[j], static_cast<float>(packs * 8));
      if (lane == 0) token_scale[warp + 8 * j] = 1.f / scale[j];
    }
    for (int pack = lane; pack < packs; pack += 32) {
      Pack<T> by;
      by.bits = make_uint4(0, 0, 0, 0);
      if (pack < packs_left) by.bits = load16_constant(norm_weight + pack * 16);
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        uint4* const at = place(pack, warp + 8 * j);
        *at = weighted(Pack<T>{*at}, by, scale[j]);
      }
    }
  }
  if (remote) {
    __syncwarp();
    ptx::cluster_wait();  // the other CTAs have initialised their barriers
    if (lane < p.slices) {
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const uint32_t to = ptx::shared_address(squares + slice * Tile::tokens + warp + 8 * j);
        ptx::store_async(ptx::map_shared(to, lane), __float_as_uint(sum_sq[j]),
                         ptx::map_shared(ptx::shared_address(&received_squares), lane));
      }
    }
  } else if (lane == 0) {
#pragma unroll
    for (int j = 0; j < NT; ++j) squares[warp + 8 * j] = sum_sq[j];
  }
  __syncthreads();

  // -- the sums of a tile: sent to the CTAs that own its rows, which add them up one tile later --

  const uint32_t from_ring = ring + group * kLineBytes;
  const int halves[2] = {chunk_offset(group, quad), chunk_offset(group, quad + 4)};
  const int rows_of_cta = kLinearRows / p.slices, pairs = rows_of_cta / 2;
  uint32_t stage = 0;
  int count = 0, sent_tile = 0;  // tiles whose sums are sent
  // Adds up this CTA's share of the rows of the tile sent last, over the slices in order.
  const auto add_up = [&]() {
    const int buffer = (count - 1) % 2;
    const float* const sums = reinterpret_cast<const float*>(memory + Tile::rings_bytes + buffer * Tile::sum_bytes);
    if (remote) {
      if (count == 1) ptx::mbarrier_wait_cluster(&received_squares, 0);
      ptx::mbarrier_wait_cluster(received + buffer, (count - 1) / 2 % 2);
      if (threadIdx.x == 0 && sent_tile + 2 * clusters < p.tiles) expect_sums(received + buffer);
    } else {
      __syncthreads();
    }
    for (int at = threadIdx.x; at < Tile::tokens * pairs; at += kLinearThreads) {
      const int token = at % Tile::tokens, row = at / Tile::tokens * 2;
      const int output = sent_tile * kLinearRows + slice * rows_of_cta + row;
      if (token >= p.tokens || output >= p.outputs) continue;
      float square = 0.f, sum[2] = {0.f, 0.f};
      for (int s = 0; s < p.slices; ++s) square += squares[s * Tile::tokens + token];
      for (int s = 0; s < p.slices * kWarpsOfK; ++s) {
        const float* const from = sums + (s * rows_of_cta + row) * Tile::tokens + token;
        sum[0] += from[0];
        sum[1] += from[Tile::tokens];
      }
      const float rstd = rsqrtf(fmaf(square, p.inv_width, p.eps));
      T rounded[2] = {from_float<T>(sum[0] * rstd), from_float<T>(sum[1] * rstd)};
      T* const to = reinterpret_cast<T*>(p.out + token * p.out_stride) + output;
      if (p.packed_out) {
        uint32_t bits;
        memcpy(&bits, rounded, 4);
        *reinterpret_cast<uint32_t*>(to) = bits;
      } else {
        to[0] = rounded[0];
        if (output + 1 < p.outputs) to[1] = rounded[1];
      }
    }
  };

  // -- main loop over tiles --

  for (int tile = first_tile; tile < p.tiles; tile += clusters) {
    float acc[kRowTiles][NT][4] = {};
    uint32_t from_x = ptx::shared_address(x) + (k_warp * Tile::tokens + group) * kLineBytes;
    for (int block = 0; block < blocks_of_warp; ++block) {
#pragma unroll
      for (int of_block = 0; of_block < kStages; ++of_block) {
        ptx::cp_async_wait<S - 1>();
        __syncwarp();
        uint4 low[MS][2], high[MS][2];  // rows g and g + 8
#pragma unroll
        for (int i = 0; i < MS; ++i) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            low[i][h] = ptx::load_shared_uint4(from_ring + stage + i * 16 * kLineBytes + halves[h]);
            high[i][h] = ptx::load_shared_uint4(from_ring + stage + (i * 16 + 8) * kLineBytes + halves[h]);
          }
        }
        __syncwarp();
        copy_stage(stage, (of_block + S) % kStages);
        stage = stage == (S - 1) * Tile::stage_bytes ? 0 : stage + Tile::stage_bytes;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint4 b[NT];
#pragma unroll
          for (int j = 0; j < NT; ++j) b[j] = ptx::load_shared_uint4(from_x + j * 8 * kLineBytes + halves[h]);
#pragma unroll
          for (int i = 0; i < MS; ++i) {
            const uint4 l = low[i][h], u = high[i][h];
            const uint32_t first[4] = {l.x, u.x, l.y, u.y}, second[4] = {l.z, u.z, l.w, u.w};
#pragma unroll
            for (int j = 0; j < NT; ++j) ptx::mma_16x8x16(acc[of_block * MS + i][j], first, b[j].x, b[j].y, T());
#pragma unroll
            for (int j = 0; j < NT; ++j) ptx::mma_16x8x16(acc[of_block * MS + i][j], second, b[j].z, b[j].w, T());
          }
        }
      }
      from_x += kWarpsOfK * Tile::tokens * kLineBytes;
    }

    // The previous tile is added up first: its sums have arrived meanwhile. No CTA sends sums of a tile before all its
    // threads have read those of two tiles back, which the next ones replace.
    if (count > 0) {
      add_up();
      __syncthreads();
    }
    const int buffer = count % 2;
    float* const sums = reinterpret_cast<float*>(memory + Tile::rings_bytes + buffer * Tile::sum_bytes);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of_warp + i * 16 + half * 8 + group, rank = row / rows_of_cta;
        const int source = slice * kWarpsOfK + k_warp;
        const uint32_t to =
            ptx::shared_address(sums + (source * rows_of_cta + row % rows_of_cta) * Tile::tokens + 2 * quad);
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          float a = acc[i][j][half * 2], b = acc[i][j][half * 2 + 1];
          if constexpr (kScaled) {
            a *= token_scale[j * 8 + 2 * quad];
            b *= token_scale[j * 8 + 2 * quad + 1];
          }
          send(remote, to + j * 32, rank, a, b, received + buffer);
        }
      }
    }
    sent_tile = tile;
    ++count;
  }
  if (count > 0) add_up();
}

}  // namespace kestrel::norm
