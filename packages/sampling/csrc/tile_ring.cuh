// The tiles of a row that a warp reads, brought ahead to its stages in shared memory by bulk copies (sm_90), and the
// row's words of a bitmask. Addresses and bytes of rows are multiples of 16.
#pragma once

#include <kestrel/ptx/mbarrier.cuh>
#include <kestrel/ptx/tma.cuh>

#include "top_k_row.cuh"

namespace kestrel::sampling {

constexpr int kRingStages = 2;  // per warp

// The bytes of a row's words of a bitmask.
constexpr __host__ __device__ int mask_bytes(int length) { return (length + 31) / 32 * static_cast<int>(sizeof(u32)); }

// The stages of all warps of a block, and the bitmask; each with an mbarrier.
struct RingMemory {
  static constexpr int kTileBytes = sizeof(float) * kTileOfGroups;
  char* tiles;
  u64 *full, *mask_full;
  u32* mask;
  static __host__ __device__ size_t bytes(int warps, int of_mask) {
    return warps * kRingStages * (kTileBytes + sizeof(u64)) + 16 + of_mask;
  }
  __device__ __forceinline__ RingMemory(char* memory, int warps)
      : tiles(memory), full(reinterpret_cast<u64*>(memory + warps * kRingStages * kTileBytes)) {
    mask_full = full + warps * kRingStages;
    mask = reinterpret_cast<u32*>(mask_full + 2);  // aligned to 16 bytes
  }
  // By every warp for its own stages. With a bitmask, a barrier of the block follows.
  __device__ __forceinline__ void init(bool has_mask) const {
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int n = 0; n < kRingStages; ++n) ptx::mbarrier_init(full + threadIdx.x / 32 * kRingStages + n, 1);
      if (has_mask && threadIdx.x == 0) ptx::mbarrier_init(mask_full, 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
  }
  // Starts the copy of the bitmask. By one thread.
  __device__ __forceinline__ void start_mask(const u32* words, int bytes) const {
    ptx::mbarrier_arrive_expect_tx(mask_full, bytes);
    ptx::bulk_load(ptx::shared_address(mask), words, bytes, mask_full);
  }
};

// The stages of this warp, which reads every num_warps-th chunk.
template <Kind kind>
struct TileRing {
  const TopKRow<kind>& row;
  char* tiles;
  u64* full;
  int first_chunk, num_warps;
  int next = 0;  // the tile that is read next

  __device__ __forceinline__ TileRing(const TopKRow<kind>& row_, const RingMemory& memory, int first_chunk_,
                                      int num_warps_)
      : row(row_),
        tiles(memory.tiles + threadIdx.x / 32 * kRingStages * RingMemory::kTileBytes),
        full(memory.full + threadIdx.x / 32 * kRingStages),
        first_chunk(first_chunk_),
        num_warps(num_warps_) {}

  // Starts the copy of a tile of this warp, if there is one. By one lane.
  __device__ __forceinline__ void start(int tile) const {
    const int bits = row.chunk_bits - kTileBits, element_bits = row.dtype == kRowFloat32 ? 2 : 1;
    const int64_t begin = (int64_t{first_chunk + (tile >> bits) * num_warps} << row.chunk_bits) +
                          ((tile & ((1 << bits) - 1)) << kTileBits);
    if (begin >= row.length) return;
    const u32 bytes = min(kTileOfGroups, row.length - static_cast<int>(begin)) << element_bits;
    const int stage = tile % kRingStages;
    ptx::mbarrier_arrive_expect_tx(full + stage, bytes);
    ptx::bulk_load(ptx::shared_address(tiles + stage * RingMemory::kTileBytes), row.row + (begin << element_bits),
                   bytes, full + stage);
  }
  // By all lanes, as are the rest.
  __device__ __forceinline__ void start_first(int tile, int end) const {
    if (threadIdx.x % 32 == 0) {
      for (; tile < end; ++tile) start(tile);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void wait() const {
    ptx::mbarrier_wait(full + next % kRingStages, next / kRingStages & 1);
  }
  // Pack u of the elements of this lane.
  __device__ __forceinline__ uint4 pack(int u) const {
    return *reinterpret_cast<const uint4*>(tiles + next % kRingStages * RingMemory::kTileBytes + 512 * u +
                                           16 * (threadIdx.x % 32));
  }
  // The tile has been read: its stage is filled again.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) start(next + kRingStages);
    __syncwarp();
    ++next;
  }
};

}  // namespace kestrel::sampling
