// Quantisation of a whole tensor with one computed scale, in one launch.
//
// clang-format off
// Computes:   scale = f(largest finite magnitude of all elements); code = round(x / scale), bit for bit the reference's.
// Must move:  x in and codes out once each, 3 bytes per bf16 element, where x fits into registers and shared memory (15 and 30 MB on an
//             H200); beyond that the rest is read a second time, the last part of it from L2.
// Split:      the tensor is cut into pieces that a warp holds; warps take them in turn. One block where that is enough, else one
//             cluster, else as many blocks as the GPU holds at once.
// Barrier:    between the maximum and the codes stands a barrier over the grid. All blocks must be resident: the hardware promises it
//             for a cluster, a cooperative launch for a grid, whatever else runs. With programmatic dependent launch too: the kernel
//             before has started all its blocks when it lets this one in, so it ends without waiting for this one's, and the kernel
//             after is let in when all blocks here run. Maxima go through shared memory of the cluster, or through memory that the
//             call allocated and that is written before it is read: nothing needs zeroing, and no state outlives a launch.
// PDL:        as in quant_segments.cuh.
// Measured:   results/, README.md.
// clang-format on
#pragma once

#include <cooperative_groups.h>

#include "codes.cuh"

namespace kestrel::quant {

constexpr int kTensorWarps = 14;  // of a block
// That share a multiprocessor. 72 registers are not enough for sm_120.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ / 10 == 120
constexpr int kTensorBlocks = 1;
#else
constexpr int kTensorBlocks = 2;
#endif
constexpr int kHeld = 2;         // segments that a warp keeps in registers
constexpr int kTensorPacks = 4;  // of a segment, per lane
constexpr int kPieceBytes = 32 * kTensorPacks * 16;
constexpr int kRoundBytes = kTensorWarps * kPieceBytes;  // of shared memory: a piece for each warp of a block

// The maximum of all blocks from each block's: over a cluster through its shared memory, else through p.slots, a float
// per block of memory that need not hold anything before. The barrier between writing and reading is that of the
// hardware or of a cooperative launch, so nothing has to be zeroed and nothing is shared with another launch.
__device__ __forceinline__ float grid_amax(float amax, const Params& p, float* memory, const TeamMaximum& block_amax) {
  namespace cg = cooperative_groups;
  if (p.cluster) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const cg::cluster_group cluster = cg::this_cluster();
    if (threadIdx.x < gridDim.x) *cluster.map_shared_rank(memory + blockIdx.x, threadIdx.x) = amax;
    cluster.sync();
    amax = threadIdx.x < gridDim.x ? memory[threadIdx.x] : 0.f;
#endif
  } else {
    if (threadIdx.x == 0) __stcg(p.slots + blockIdx.x, amax);
    cg::this_grid().sync();
    for (int i = threadIdx.x; i < gridDim.x; i += blockDim.x) amax = fmaxf(amax, __ldcg(p.slots + i));
  }
  return block_amax(amax);
}

// Starts to copy a lane's packs of a piece to shared memory, where only that lane reads them.
template <typename T, int V>
__device__ __forceinline__ void keep(unsigned shelf, const char* values, int count) {
#pragma unroll
  for (int v = 0; v < V; ++v) {
    if (v * 32 * Pack<T>::size >= count) break;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shelf + v * 512), "l"(values + v * 512) : "memory");
  }
}

__device__ __forceinline__ void kept_arrived() { asm volatile("cp.async.wait_all;" ::: "memory"); }

template <typename T, int V>
__device__ __forceinline__ Held<T, V> kept_pieces(unsigned shelf, int count) {
  Held<T, V> held;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    uint4& bits = held.packs[v].bits = make_uint4(0, 0, 0, 0);
    if (v * 32 * Pack<T>::size >= count) continue;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "r"(shelf + v * 512)
                 : "memory");
  }
  return held;
}

// Warps take pieces in turn. The first ones they keep in registers, the next in shared memory; the rest is read twice.
template <typename C, typename T, bool VECTORS>
__global__ void __launch_bounds__(kTensorWarps * 32, kTensorBlocks) quant_tensor(const __grid_constant__ Params p) {
  __shared__ float memory[3][32];
  extern __shared__ uint4 rounds_kept[];  // of pieces, a round of one for each warp behind the other
  constexpr int V = kTensorPacks;
  using Piece = Segment<C, T>;
  const int lane = threadIdx.x & 31, piece_lane = VECTORS ? lane : 0;
  const unsigned first = (threadIdx.x >> 5) * gridDim.x + blockIdx.x, step = kTensorWarps * gridDim.x;
  const unsigned kept = first + kHeld * step;  // the first piece in shared memory, and the first that is read twice
  const unsigned rest = first + (VECTORS ? kHeld + p.kept : 0) * step;
  const unsigned rounds = rest < p.segments ? (p.segments - rest - 1) / step + 1 : 0;
  const TeamMaximum block_amax(memory[0], 0, threadIdx.x, blockDim.x), again(memory[1], 0, threadIdx.x, blockDim.x);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (p.cluster) cooperative_groups::this_cluster().sync();  // its shared memory is there
#endif
  const unsigned shelf = static_cast<unsigned>(__cvta_generic_to_shared(rounds_kept)) +
                         (threadIdx.x >> 5) * kPieceBytes + lane * 16;  // of this lane's packs of the first round
  Held<T, V> held[kHeld];
  float largest = 0.f, amax = 0.f;  // largest: of what is held
  if (VECTORS && p.prefetch > 0) {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const Piece piece(p, first + h * step, lane);
      prefetch<V>(piece.values, 16, Pack<T>::size, lane, 32, piece.count);
    }
  }
  pdl_wait();
  pdl_trigger();

  if constexpr (VECTORS) {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const Piece piece(p, first + h * step, lane);
      held[h].load(piece.values, 32, piece.count);
    }
#pragma unroll 1
    for (unsigned k = 0; k < p.kept; ++k) {
      const Piece piece(p, kept + k * step, lane);
      keep<T, V>(shelf + k * kRoundBytes, piece.values, piece.count);
    }
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const Piece piece(p, first + h * step, lane);
      const float here = held[h].largest();
      amax = fmaxf(amax, held[h].amax(here, piece.values, 32, piece.count));
      asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(here));
    }
    kept_arrived();
#pragma unroll 1
    for (unsigned k = 0; k < p.kept; ++k) {
      const Piece piece(p, kept + k * step, lane);
      const Held<T, V> more = kept_pieces<T, V>(shelf + k * kRoundBytes, piece.count);
      amax = fmaxf(amax, more.amax(more.largest(), piece.values, 32, piece.count));
    }
  }
  for (unsigned i = 0; i < rounds; ++i) {
    const Piece piece(p, rest + i * step, piece_lane);
    if constexpr (VECTORS) {
      Held<T, V> more;
      more.load(piece.values, 32, piece.count);
      amax = fmaxf(amax, more.amax(more.largest(), piece.values, 32, piece.count));
    } else {
      for (int j = lane; j < piece.count; j += 32 * kElements) {
        float x[kElements];
        load_elements(x, reinterpret_cast<const T*>(piece.values), j, 32, piece.count);
        amax = fmaxf(amax, finite_amax(x));
      }
    }
  }

  amax = block_amax(amax);
  if (gridDim.x > 1) amax = grid_amax(amax, p, memory[2], again);
  const float scale = C::scale(amax, p.bound);
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.scales = scale;
  const DivisorOf<T> by(scale);

  if constexpr (VECTORS) {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) encode(held[h], largest, by, Piece(p, first + h * step, lane), 32, p.streamed);
#pragma unroll 1
    for (unsigned k = 0; k < p.kept; ++k) {
      const Piece piece(p, kept + k * step, lane);
      const Held<T, V> more = kept_pieces<T, V>(shelf + k * kRoundBytes, piece.count);
      encode(more, more.largest(), by, piece, 32, p.streamed);
    }
  }
  for (unsigned i = rounds; i-- > 0;) {  // what was read last is still in L2
    const Piece piece(p, rest + i * step, piece_lane);
    if constexpr (VECTORS) {
      Held<T, V> more;
      more.load(piece.values, 32, piece.count);
      encode(more, more.largest(), by, piece, 32, p.streamed);
    } else {
      const T* values = reinterpret_cast<const T*>(piece.values);
      for (int j = lane; j < piece.count; j += 32 * kElements) {
        float x[kElements];
        load_elements(x, values, j, 32, piece.count);
        encode_elements<C>(x, by, values, piece.codes, j, 32, piece.count);
      }
    }
  }
}

}  // namespace kestrel::quant
