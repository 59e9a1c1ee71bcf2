// x [T, K] times a weight [N, K] of 4-bit codes, transposed, for few tokens: memory-bound by the codes.
//
// Codes are the 16 rows of mma.sync, tokens its 8 columns. The packed layout [N / 16, K / 64, 32 lanes, 16 bytes] is
// that of the instruction: 16 bytes of a lane are its fragments of four products, and no lane needs those of another.
// The warps of a CTA have slices of K; those of one slice share a ring of pipeline stages (cp.async) of 128 k. Codes
// become small numbers in 16 bits, exactly. Their products with x are added in float32 over a group and then scaled.
// Slices of K are added in order, in shared memory, then over a cluster or by a second kernel: the order depends on N,
// K, the range of T and the GPU alone, so a token's result does not depend on other tokens.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <kestrel/pdl.cuh>
#include <kestrel/ptx/cluster.cuh>
#include <kestrel/ptx/cp_async.cuh>
#include <kestrel/ptx/matrix.cuh>
#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/mma.cuh>
#include <kestrel/ptx/named_barrier.cuh>
#include <kestrel/ptx/shared.cuh>
#include <type_traits>

#include "w4a16_codes.cuh"

namespace kestrel::quant {

constexpr int kStep = 128;  // k of a pipeline stage
constexpr int kBlock = 64;  // k of a block of the packed layout: 16 rows are 512 bytes
constexpr int kBlockBytes = 512;
constexpr int kMaxSplits = 8;    // the portable size of a cluster
constexpr int kLineBytes = 128;  // of x in shared memory: a token's k of a block

enum class Zeros { eight, any };  // what zero points a weight has
// Whether a residual is added. Kernels that add one are compiled apart, for sm_90 and GROUP 128: a test in the epilogue
// costs the main loop.
enum class Residual { none, added };

struct W4Params {
  const char* x = nullptr;               // [T, K]
  const char* codes = nullptr;           // [ceil(N / 16), ceil(K / 64), 32, 16 bytes], unsigned
  const char* scales = nullptr;          // [groups, N], of x's type
  const char* zeros = nullptr;           // int16 [groups, N]; null: 8
  const char* bias = nullptr;            // [N]
  char* out = nullptr;                   // [T, N]
  float* partial = nullptr;              // [splits, T, N], where a second kernel adds up; else null
  int64_t partial_floats = 0;            // what `partial` has room for
  int64_t x_stride = 0, out_stride = 0;  // bytes
  int tokens = 0, outputs = 0, width = 0;
  int groups = 0, group = 0;  // of K that share a scale: their number and size
  int steps_per_group = 1;    // for groups of 128 k and more
  int blocks = 0, steps = 0;  // of K: of kBlock and kStep elements
  int splits = 1, parts = 1;  // CTAs that share K, and slices of K of a CTA
  int cluster = 1;            // the same, where they are a cluster; else 1
  int stages = 0;             // of the ring of a wgmma kernel
  bool packed_out = false;    // four elements of out, and of the residual, are 8 aligned bytes

  const char* residual = nullptr;  // [T, N]; it may be `out`
  int64_t residual_stride = 0;     // bytes

  // Whether rows of out, and of the residual, are aligned to so many bytes.
  bool out_aligned_to(unsigned bytes) const {
    const auto starts = reinterpret_cast<uintptr_t>(out) | reinterpret_cast<uintptr_t>(residual);
    return starts % bytes == 0 && (tokens == 1 || (out_stride | residual_stride) % bytes == 0);
  }
};

// The rows and tokens of a CTA, and its warps.
template <int N_TILES_, int M_TILES_, int WARPS_, int STAGES_, int PARTS_>
struct W4Tile {
  static constexpr int n_tiles = N_TILES_;  // of 8 tokens
  static constexpr int m_tiles = M_TILES_;  // of 16 rows, a warp
  static constexpr int warps = WARPS_;      // that share a slice of K
  static constexpr int rows = 16 * m_tiles * warps;
  static constexpr int threads = 32 * warps;  // of a slice of K
  static constexpr int parts = PARTS_;        // slices of K of a CTA, at most
  static constexpr int stages = STAGES_;
  static constexpr int tokens = 8 * n_tiles;
  static constexpr bool subnormal_codes = m_tiles < 4 || n_tiles == 1;  // where they are a gain
  // Where load_or_zero() is a gain: not for tiles of 8 tokens with 32 rows of a warp and two stages.
  static constexpr bool predicated_x = n_tiles == 2 || (n_tiles == 1 && (m_tiles != 2 || stages == 3));
  static constexpr int x_copies = (tokens * 2 * kLineBytes / 16 + threads - 1) / threads;  // a thread and stage
};

// A pipeline stage: offsets in bytes of [m tile][block][lane][16 bytes] of codes, [block][token][128 bytes] of x, and
// [group][row] of scales and zeros.
template <typename Tile, int GROUP>
struct W4Stage {
  static constexpr int rows = Tile::rows;
  static constexpr int codes = 0;
  static constexpr int x = rows * kStep / 2;
  static constexpr int scales = x + Tile::tokens * 2 * kLineBytes;
  static constexpr int groups = kStep / GROUP;
  static constexpr int scale_bytes = groups * rows * 2;
  static constexpr int zeros = scales + scale_bytes;
  static constexpr int bytes = zeros + scale_bytes;
  static constexpr int sum_pitch = rows + 4;  // floats: keeps stores of fragments free of bank conflicts
  static constexpr int ring_bytes = Tile::stages * bytes, sum_bytes = Tile::tokens * sum_pitch * 4;
  static constexpr int shared_bytes = ring_bytes > sum_bytes ? ring_bytes : sum_bytes;  // of a slice of K
};

template <typename T>
__device__ __forceinline__ float widen(uint32_t bits) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __uint_as_float(bits << 16);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

template <typename T>
__device__ __forceinline__ uint32_t narrow(float v) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __bfloat16_as_ushort(__float2bfloat16_rn(v));
  return __half_as_ushort(__float2half_rn(v));
}

__device__ __forceinline__ uint32_t load_shared_u16(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}

// 16 bytes, or zeros where they are not valid, without a branch: several such loads are in flight sooner.
__device__ __forceinline__ uint4 load_or_zero(const char* from, bool valid) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile("{\n.reg .pred valid;\nsetp.ne.b32 valid, %5, 0;\n@valid ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(from), "r"(static_cast<int>(valid))
               : "memory");
  return v;
}

__device__ __forceinline__ float4 added(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Four elements of the residual. The launch before may write them: called after pdl_wait().
__device__ __forceinline__ uint2 load_residual(const W4Params& p, int token, int row) {
  const char* const from = p.residual + token * p.residual_stride + int64_t{row} * 2;
  if (p.packed_out) return *reinterpret_cast<const uint2*>(from);
  const auto* const elements = reinterpret_cast<const unsigned short*>(from);
  return make_uint2(elements[0] | uint32_t{elements[1]} << 16, elements[2] | uint32_t{elements[3]} << 16);
}

// Four sums of neighbouring rows, plus bias and residual, into the result.
template <typename T, Residual RESIDUAL>
__device__ __forceinline__ void store_sums(const W4Params& p, int token, int row, float4 sum, uint2 residual) {
  float v[4] = {sum.x, sum.y, sum.z, sum.w};
  const T* bias = reinterpret_cast<const T*>(p.bias);
  if (bias) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] += static_cast<float>(bias[row + i]);
  }
  if constexpr (RESIDUAL == Residual::added) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] += widen<T>((i < 2 ? residual.x : residual.y) >> 16 * (i % 2) & 0xffffu);
  }
  char* to = p.out + token * p.out_stride + int64_t{row} * 2;
  const uint32_t bits[4] = {narrow<T>(v[0]), narrow<T>(v[1]), narrow<T>(v[2]), narrow<T>(v[3])};
  if (p.packed_out) {
    *reinterpret_cast<uint2*>(to) = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) reinterpret_cast<unsigned short*>(to)[i] = static_cast<unsigned short>(bits[i]);
  }
}

// A CTA's sums in shared memory, [slice of K][token][row], and their place in the result.
struct W4Sums {
  float* at;
  int pitch, slice;  // floats from one token to the next, from one slice of K to the next
  int first_row, first_token, tokens, split;
};

// Whether the CTA shares K with others of its cluster. Compiled for sm_90 alone: elsewhere the code would cost
// registers for nothing.
__device__ __forceinline__ bool in_cluster(const W4Params& p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
  return p.cluster > 1;
#else
  return false;
#endif
}

// Packs of four rows of a token: how many there are, how many of them each CTA of a cluster finishes at most, and how
// many the CTA `rank` does.
struct W4Packs {
  int all, most, own;
  __device__ __forceinline__ W4Packs(int tokens, int rows, int cluster, int rank)
      : all(tokens * (rows / 4)), most((all + cluster - 1) / cluster), own(min(max(all - rank * most, 0), most)) {}
};

// Adds up the slices of K: those of the CTA, then those of its cluster, into the result; or writes the CTA's sums for
// w4a16_sum_kernel. All threads of the CTA that count among `threads` see the sums; those of a cluster all call this,
// after cluster_arrive_relaxed(). Peers send their sums to memory behind this CTA's; `received` counts their bytes.
template <typename T, int ROWS, Residual RESIDUAL>
__device__ __forceinline__ void finish_sums(const W4Params& p, const W4Sums& sums, const uint64_t* received, int thread,
                                            int threads) {
  constexpr int row_packs = ROWS / 4;
  const int rank = in_cluster(p) ? sums.split % p.cluster : 0;
  const W4Packs packs(sums.tokens, ROWS, p.cluster, rank);
  const auto residual_of = [&](int pack) {
    const int row = sums.first_row + pack % row_packs * 4;
    return row < p.outputs ? load_residual(p, sums.first_token + pack / row_packs, row) : make_uint2(0, 0);
  };
  // The residual of the thread's first result is in flight while the sums are added up.
  const int first_pack = rank * packs.most + thread;
  uint2 first_residual{};
  if constexpr (RESIDUAL == Residual::added) {
    if (!p.partial && thread < packs.own) first_residual = residual_of(first_pack);
  }
  const auto finish = [&](int token, int row, float4 sum) {
    if (sums.first_row + row >= p.outputs) return;
    if (p.partial) {
      const int64_t of = int64_t{sums.split} * p.tokens + sums.first_token + token;
      *reinterpret_cast<float4*>(p.partial + of * p.outputs + sums.first_row + row) = sum;
    } else if constexpr (RESIDUAL == Residual::added) {
      const int pack = token * row_packs + row / 4;
      store_sums<T, RESIDUAL>(p, sums.first_token + token, sums.first_row + row, sum,
                              pack == first_pack ? first_residual : residual_of(pack));
    } else {
      store_sums<T, RESIDUAL>(p, sums.first_token + token, sums.first_row + row, sum, uint2());
    }
  };
  const auto place = [&](int pack) { return sums.at + pack / row_packs * sums.pitch + pack % row_packs * 4; };
  float4* const from_peers = reinterpret_cast<float4*>(sums.at + p.parts * sums.slice);  // [peer][pack]
  if (in_cluster(p)) {
    __syncwarp();
    ptx::cluster_wait();  // that memory is free in all CTAs
  }
  for (int pack = thread; pack < packs.all; pack += threads) {
    float* const from = place(pack);
    float4 sum = *reinterpret_cast<const float4*>(from);
    for (int k = 1; k < p.parts; ++k) sum = added(sum, *reinterpret_cast<const float4*>(from + k * sums.slice));
    const int owner = pack / packs.most;
    if (!in_cluster(p)) {
      finish(pack / row_packs, pack % row_packs * 4, sum);
    } else if (owner == rank) {
      *reinterpret_cast<float4*>(from) = sum;
    } else {
      const float4* const to = from_peers + (rank < owner ? rank : rank - 1) * packs.most + pack - owner * packs.most;
      ptx::store_async(ptx::map_shared(ptx::shared_address(to), owner), sum,
                       ptx::map_shared(ptx::shared_address(received), owner));
    }
  }
  if (!in_cluster(p)) return;
  __syncthreads();
  ptx::mbarrier_wait_cluster(received, 0);
  for (int i = thread; i < packs.own; i += threads) {
    const int pack = rank * packs.most + i;
    const float4 own = *reinterpret_cast<const float4*>(place(pack));
    float4 sum{};
#pragma unroll
    for (int s = 0; s < kMaxSplits; ++s) {
      if (s >= p.cluster) break;
      const float4 v = s == rank ? own : from_peers[(s < rank ? s : s - 1) * packs.most + i];
      sum = s == 0 ? v : added(sum, v);
    }
    finish(pack / row_packs, pack % row_packs * 4, sum);
  }
}

// GROUP: 32, 64, or 128 for groups that are multiples of 128 or whole rows. N is a multiple of 8.
template <typename T, int GROUP, typename Tile, Residual RESIDUAL>
__global__ void __launch_bounds__(Tile::threads* Tile::parts, 1) w4a16_kernel(const __grid_constant__ W4Params p) {
  using Stage = W4Stage<Tile, GROUP>;
  using Codes = CentredCodes<T, std::is_same_v<T, __nv_bfloat16> && Tile::subnormal_codes>;
  constexpr int MT = Tile::m_tiles, NT = Tile::n_tiles, S = Tile::stages;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
  if constexpr (RESIDUAL == Residual::added) return;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  if constexpr (NT == 8 && GROUP == 32) return;  // it would spill; launch_group() has the tile of 32 tokens instead
#endif
  extern __shared__ __align__(128) char all_memory[];
  const int thread = threadIdx.x % Tile::threads, part_of_cta = threadIdx.x / Tile::threads;
  char* const memory = all_memory + part_of_cta * Stage::ring_bytes;  // the ring of this slice of K
  const uint32_t shared = ptx::shared_address(memory);
  const int warp = thread / 32, lane = thread % 32, group = lane / 4, quad = lane % 4;
  const int row_tile = blockIdx.x / p.splits, split = blockIdx.x - row_tile * p.splits;
  const int first_row = row_tile * Tile::rows, first_token = blockIdx.y * Tile::tokens;
  const int tokens = min(p.tokens - first_token, Tile::tokens);
  const int k_slices = p.splits * p.parts, k_slice = split * p.parts + part_of_cta;
  const int first_step = static_cast<int>(int64_t{p.steps} * k_slice / k_slices);
  const int last_step = static_cast<int>(int64_t{p.steps} * (k_slice + 1) / k_slices);
  __shared__ uint64_t received;  // bytes of the sums of other CTAs
  if (in_cluster(p) && threadIdx.x == 0) {
    const int own = W4Packs(tokens, Tile::rows, p.cluster, split % p.cluster).own;
    ptx::mbarrier_init(&received, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(&received, (p.cluster - 1) * own * 16);
  }

  // -- loads --
  //
  // Codes: this warp's 16-row tiles; a lane copies what it reads itself. What does not exist is not copied: any
  // codes are finite, x is 0 where K has ended, and rows past N are not stored.
  const int first_tile = first_row / 16 + warp * MT;
  const int tiles = (p.outputs + 15) / 16 - first_tile;  // that exist
  const int64_t tile_bytes = int64_t{p.blocks} * kBlockBytes;
  const char* codes_at = p.codes + first_tile * tile_bytes + int64_t{first_step} * (2 * kBlockBytes) + lane * 16;
  const uint32_t own_codes = shared + warp * MT * 2 * kBlockBytes + lane * 16;
  int blocks_left = min(last_step * 2, p.blocks) - first_step * 2;  // of those to be copied
  // Scales and zeros: 16 bytes are those of 8 rows.
  constexpr int kScaleCopies = Stage::scale_bytes / 16, kScaleRowCopies = Tile::rows / 8;
  static_assert(kScaleCopies <= Tile::threads);
  const int scale_row = first_row + thread % kScaleRowCopies * 8;
  const bool copies_scales = thread < kScaleCopies && scale_row < p.outputs;
  const int first_group =
      GROUP == 128 ? first_step / p.steps_per_group : first_step * Stage::groups + thread / kScaleRowCopies;
  const char* scales_at = p.scales + (int64_t{first_group} * p.outputs + scale_row) * 2;
  const int64_t to_zeros = p.zeros - p.scales, group_bytes = int64_t{p.outputs} * 2;
  int groups_left = p.groups - first_group;
  int steps_left_of_group = (first_group + 1) * p.steps_per_group - first_step;  // GROUP 128

  const auto load_weights = [&](uint32_t stage) {
#pragma unroll
    for (int i = 0; i < MT; ++i) {
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (b < blocks_left && i < tiles) {
          ptx::cp_async16(own_codes + stage + (i * 2 + b) * kBlockBytes, codes_at + i * tile_bytes + b * kBlockBytes);
        }
      }
    }
    if (copies_scales && blocks_left > 0) {
      const uint32_t to = shared + stage + Stage::scales + thread * 16;
      const bool valid = groups_left > 0;
      ptx::cp_async16_or_zero(to, valid ? scales_at : p.scales, valid);
      if (p.zeros) ptx::cp_async16_or_zero(to + Stage::scale_bytes, valid ? scales_at + to_zeros : p.zeros, valid);
    }
    codes_at += 2 * kBlockBytes;
    blocks_left -= 2;
    if (GROUP != 128) {
      scales_at += Stage::groups * group_bytes;
      groups_left -= Stage::groups;
    } else if (--steps_left_of_group == 0) {
      scales_at += group_bytes;
      steps_left_of_group = p.steps_per_group;
    }
  };

  // x: a warp copies 256 bytes of two tokens, in the 128-byte swizzle. Columns of tokens that do not exist are never
  // stored, so they may hold anything.
  constexpr int kTokensOfCopy = Tile::threads / 16;
  const int x_token = thread / 16, x_byte = thread % 16 * 16;
  const uint32_t x_line =
      Stage::x + (x_byte / kLineBytes * Tile::tokens + x_token) * kLineBytes + (x_byte % kLineBytes ^ x_token % 8 * 16);
  static_assert(8 % kTokensOfCopy == 0 || kTokensOfCopy % 8 == 0);
  static_assert(!Tile::predicated_x || kTokensOfCopy * Tile::x_copies == Tile::tokens,
                "zeros are stored past the tile");
  const auto x_place = [&](int token) { return (x_line ^ token % 8 * 16) + token * kLineBytes; };  // of x_token + token
  const char* x_at = p.x + (first_token + x_token) * p.x_stride + int64_t{first_step} * (kStep * 2) + x_byte;
  int x_left = p.width * 2 - first_step * (kStep * 2) - x_byte;  // bytes of the row from x_at on

  // -- prologue: S - 1 stages, the weights before the PDL wait --

#pragma unroll
  for (int s = 0; s < S - 1; ++s) {
    load_weights(s * Stage::bytes);
    ptx::cp_async_commit();
  }
  pdl_wait();
  pdl_trigger();
  // The first stages of x come through registers: a wait for copies would be one for all weights before them.
  constexpr int kPrologueCopies = (S - 1) * Tile::x_copies, kBatch = kPrologueCopies < 16 ? kPrologueCopies : 16;
#pragma unroll
  for (int first = 0; first < kPrologueCopies; first += kBatch) {
    uint4 v[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int s = (first + j) / Tile::x_copies, token = (first + j) % Tile::x_copies * kTokensOfCopy;
      const bool valid = s < S - 1 && first_step + s < last_step && x_token + token < tokens && x_left > s * kStep * 2;
      v[j] = make_uint4(0, 0, 0, 0);
      if constexpr (Tile::predicated_x) {
        v[j] = load_or_zero(x_at + token * p.x_stride + s * kStep * 2, valid);
      } else if (valid) {
        v[j] = *reinterpret_cast<const uint4*>(x_at + token * p.x_stride + s * kStep * 2);
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int s = (first + j) / Tile::x_copies, token = (first + j) % Tile::x_copies * kTokensOfCopy;
      if (s < S - 1 && (Tile::predicated_x || x_token + token < tokens)) {
        *reinterpret_cast<uint4*>(memory + s * Stage::bytes + x_place(token)) = v[j];
      }
    }
  }
  x_at += (S - 1) * kStep * 2;
  x_left -= (S - 1) * kStep * 2;

  // -- main loop --
  //
  // Lane 4 * group + quad holds sums of rows group and group + 8 of an m tile, tokens 2 * quad and the next one of an n
  // tile.
  float acc[MT][NT][4] = {};
  const uint32_t from_x = shared + Stage::x + lane % 8 * kLineBytes + (lane / 8 ^ lane % 8) * 16;
  const uint32_t from_x_halves[2] = {from_x, from_x ^ 64};
  const uint32_t from_scales = shared + Stage::scales + (warp * MT * 16 + group) * 2;
  uint32_t at = 0, free_stage = (S - 1) * Stage::bytes;
  for (int step = first_step; step < last_step; ++step) {
    ptx::cp_async_wait<S - 2>();
    // The stage is there for all warps of this slice of K, and all are done with the one before.
    ptx::named_barrier(1 + part_of_cta, Tile::threads);
    if (step + S - 1 < last_step) {
      load_weights(free_stage);
#pragma unroll
      for (int i = 0; i < Tile::x_copies; ++i) {
        const int token = i * kTokensOfCopy;
        if (x_token + token < tokens) {
          ptx::cp_async16_or_zero(shared + free_stage + x_place(token), x_left > 0 ? x_at + token * p.x_stride : p.x,
                                  x_left > 0);
        }
      }
      x_at += kStep * 2;
      x_left -= kStep * 2;
    }
    ptx::cp_async_commit();
    constexpr int kBlocks = GROUP == 128 ? 2 : 1,
                  kGroups = Stage::groups * kBlocks / 2;  // of an iteration
#pragma unroll(NT == 8 || GROUP == 32 ? 1 : 2)
    for (int first_block = 0; first_block < 2; first_block += kBlocks) {
      uint4 words[MT];
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float product[MT][NT][4] = {}, scale[MT][2];
        uint32_t minus_zeros[MT][2];
#pragma unroll
        for (int i = 0; i < MT; ++i) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int of_group = first_block * Stage::groups / 2 + g;
            const uint32_t of_row = at + from_scales + (of_group * Tile::rows + i * 16 + r * 8) * 2;
            scale[i][r] = widen<T>(load_shared_u16(of_row));
            const uint32_t zero = p.zeros ? load_shared_u16(of_row + Stage::scale_bytes) : 8u;
            minus_zeros[i][r] = Codes::minus_zero(zero);
          }
        }
#pragma unroll
        for (int q = 0; q < GROUP / 32; ++q) {
          const int k32 = g * (GROUP / 32) + q, h = k32 % 2, block = first_block + k32 / 2;
          uint32_t a[MT][2][4];
#pragma unroll
          for (int i = 0; i < MT; ++i) {
            if (h == 0) words[i] = ptx::load_shared_uint4(own_codes + at + (i * 2 + block) * kBlockBytes);
            Codes::decode(h == 0 ? words[i].x : words[i].z, minus_zeros[i], a[i][0]);
            Codes::decode(h == 0 ? words[i].y : words[i].w, minus_zeros[i], a[i][1]);
          }
          uint32_t b[NT][4];
#pragma unroll
          for (int j = 0; j < NT; ++j) {
            ptx::load_matrices(from_x_halves[h] + at + (block * Tile::tokens + j * 8) * kLineBytes, b[j]);
          }
#pragma unroll
          for (int w = 0; w < 2; ++w) {  // neighbouring products do not wait for each other
#pragma unroll
            for (int j = 0; j < NT; ++j) {
              const uint32_t low = b[j][2 * w], high = b[j][2 * w + 1];
#pragma unroll
              for (int i = 0; i < MT; ++i) ptx::mma_16x8x16(product[i][j], a[i][w], low, high, T());
            }
          }
        }
#pragma unroll
        for (int i = 0; i < MT; ++i) {
#pragma unroll
          for (int j = 0; j < NT; ++j) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              acc[i][j][c] = fmaf(product[i][j][c], scale[i][c / 2], acc[i][j][c]);
            }
          }
        }
      }
    }
    free_stage = at;
    at = at == (S - 1) * Stage::bytes ? 0 : at + Stage::bytes;
  }

  // -- epilogue --
  //
  // The sums of each slice of K, [slice][token][row], replace the rings. They are added in order over the slices of the
  // CTA, then over its cluster or, through p.partial, by w4a16_sum_kernel.
  ptx::cp_async_wait_all();
  __syncthreads();
  if (in_cluster(p)) ptx::cluster_arrive_relaxed();
  static_assert(Stage::ring_bytes >= 2 * Stage::sum_bytes, "peers' sums have room behind the CTA's");
  constexpr int pitch = Stage::sum_pitch;
  float* const sums = reinterpret_cast<float*>(all_memory);
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int token = part_of_cta * Tile::tokens + j * 8 + 2 * quad + c % 2;
        sums[token * pitch + (warp * MT + i) * 16 + group + c / 2 * 8] = acc[i][j][c] * Codes::unit;
      }
    }
  }
  __syncthreads();
  const int threads = static_cast<int>(blockDim.x);
  finish_sums<T, Tile::rows, RESIDUAL>(p, {sums, pitch, Tile::tokens * pitch, first_row, first_token, tokens, split},
                                       &received, static_cast<int>(threadIdx.x), threads);
}

constexpr int kW4SumThreads = 128;

// Adds up the slices of K in order, where there are no clusters.
template <typename T, Residual RESIDUAL>
__global__ void __launch_bounds__(kW4SumThreads) w4a16_sum_kernel(const __grid_constant__ W4Params p) {
  pdl_wait();
  pdl_trigger();
  const int packs_of_token = p.outputs / 4;
  const int64_t pack = int64_t{blockIdx.x} * kW4SumThreads + threadIdx.x;
  if (pack >= int64_t{p.tokens} * packs_of_token) return;
  const int token = static_cast<int>(pack / packs_of_token), row = static_cast<int>(pack % packs_of_token) * 4;
  uint2 residual{};
  if constexpr (RESIDUAL == Residual::added) residual = load_residual(p, token, row);
  float4 slices[kMaxSplits];
#pragma unroll
  for (int s = 0; s < kMaxSplits; ++s) {
    if (s < p.splits) {
      slices[s] = *reinterpret_cast<const float4*>(p.partial + (int64_t{s} * p.tokens + token) * p.outputs + row);
    }
  }
  float4 sum = slices[0];
#pragma unroll
  for (int s = 1; s < kMaxSplits; ++s) {
    if (s < p.splits) sum = added(sum, slices[s]);
  }
  store_sums<T, RESIDUAL>(p, token, row, sum, residual);
}

constexpr int kW4DequantWarps = 8, kW4DequantBlocks = 2;  // of a CTA; of a warp

// The weight itself, [N, K] in T, rounded once: a warp takes blocks of 16 rows and 64 k, side by side. A block becomes
// 16 lines of 128 bytes in shared memory, in chunks of 16 bytes, whose order in a line avoids bank conflicts.
template <typename T>
__global__ void __launch_bounds__(32 * kW4DequantWarps) w4_dequant_kernel(const __grid_constant__ W4Params p) {
  using Codes = CentredCodes<T, false>;
  __shared__ __align__(128) char lines[kW4DequantWarps][16 * kLineBytes];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
  const int parts = (p.blocks + kW4DequantBlocks - 1) / kW4DequantBlocks;  // of 16 rows
  const int64_t at = int64_t{blockIdx.x} * kW4DequantWarps + warp;
  const int tile = static_cast<int>(at / parts), first_block = static_cast<int>(at % parts) * kW4DequantBlocks;
  if (tile * 16 >= p.outputs) return;
  const char* codes_at = p.codes + (int64_t{tile} * p.blocks + first_block) * kBlockBytes + lane * 16;
  uint4 codes[kW4DequantBlocks];
#pragma unroll
  for (int b = 0; b < kW4DequantBlocks; ++b) {
    if (first_block + b < p.blocks) codes[b] = *reinterpret_cast<const uint4*>(codes_at + b * kBlockBytes);
  }
  // Of the rows `group` and `group` + 8, for each half of a block. What does not exist is not stored.
  uint32_t scales[kW4DequantBlocks][2][2], minus_zeros[kW4DequantBlocks][2][2];
#pragma unroll
  for (int b = 0; b < kW4DequantBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int k = min((first_block + b) * kBlock + h * 32, p.width - 1);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int64_t of = int64_t{k / p.group} * p.outputs + min(tile * 16 + r * 8 + group, p.outputs - 1);
        scales[b][h][r] = reinterpret_cast<const unsigned short*>(p.scales)[of] * 0x10001u;
        const int zero = p.zeros ? reinterpret_cast<const short*>(p.zeros)[of] : 8;
        minus_zeros[b][h][r] = Codes::minus_zero(zero);
      }
    }
  }
  pdl_wait();
  pdl_trigger();
#pragma unroll
  for (int b = 0; b < kW4DequantBlocks; ++b) {
    if (b > 0) __syncwarp();  // the lines have been read
    const uint32_t words[4] = {codes[b].x, codes[b].y, codes[b].z, codes[b].w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {  // 16 columns; element i of a fragment is of row i % 2 and of chunk i / 2
      uint32_t a[4];
      Codes::decode(words[w], minus_zeros[b][w / 2], a);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        char* const line = lines[warp] + (i % 2 * 8 + group) * kLineBytes;
        *reinterpret_cast<uint32_t*>(line + ((w * 2 + i / 2) ^ group) * 16 + quad * 4) =
            times<T>(a[i], scales[b][w / 2][i % 2]);
      }
    }
    __syncwarp();
    const int chunk = lane % 8, column = (first_block + b) * kBlock + chunk * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int of_tile = i * 4 + lane / 8, row = tile * 16 + of_tile;
      const char* const from = lines[warp] + of_tile * kLineBytes + (chunk ^ of_tile % 8) * 16;
      if (row < p.outputs && column < p.width) {
        *reinterpret_cast<uint4*>(p.out + row * p.out_stride + int64_t{column} * 2) =
            *reinterpret_cast<const uint4*>(from);
      }
    }
  }
}

}  // namespace kestrel::quant
