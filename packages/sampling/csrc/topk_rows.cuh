// The k largest of long rows in order, k up to 1024.
//
// Computes:   topk_fwd, where the kernels for short rows and small k do not reach: rows of a vocabulary.
// Must move:  a row once and 6 or 8 k bytes out.
// Split:      as sample_rows.cuh: a team of blocks per row, the row in shared memory. The search for the k-th largest
//             is that of top-k sampling; the k elements from it up are gathered in the first block and sorted there.
// Measured:   32x128256 64.6 us with k = 50, 77.6 with 1024, 0.08 and 0.06 of the limit (results/h200.json);
//             what bounds it is the search, as in sample_rows.cuh.
#pragma once

#include "search.cuh"

namespace kestrel::sampling {

constexpr int kMostK = 1024;
constexpr int kSortThreads = 512;

struct TopKParams {
  const char* rows = nullptr;
  int64_t row_bytes = 0;
  int dtype = kRowFloat32;
  int length = 0;
  int blocks = 1;
  int per_warp = 0;
  int list_size = 0;
  int k = 0;
  bool softmax = false;
  char* values = nullptr;
  int* indices = nullptr;
};

// What locate() weighs to find the last NaN that is needed.
struct NotANumber {
  int end;  // of the elements of this warp: what each_tile() gives beyond is NaN as well
  u32 count = 0;
  __device__ __forceinline__ void add(float4 v, int i) {
    u64 one[4];
    each(v, i, one);
    count += static_cast<u32>(one[0] + one[1] + one[2] + one[3]);
  }
  __device__ __forceinline__ u64 value() const { return count; }
  __device__ __forceinline__ void each(float4 four, int i, u64 (&one)[4]) const {
    const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) one[e] = i + e < end && isnan(v[e]);
  }
};

// Larger first, then lower index; NaN, whose upper half is 0, last.
__device__ __forceinline__ u64 sort_key(float v, int i) {
  const u32 value = isnan(v) ? 0u : static_cast<u32>(ordered(v)) ^ 0x80000000u;
  return (static_cast<u64>(value) << 32) | (0xffffffffu - static_cast<u32>(i));
}

// Sorts `size` keys, a power of two, in descending order, by all threads of a block.
__device__ __forceinline__ void sort_descending(u64* keys, int size) {
  for (int run = 2; run <= size; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
        const int low = 2 * pair - (pair & (distance - 1)), high = low + distance;
        const u64 a = keys[low], b = keys[high];
        if ((a < b) == ((low & run) == 0)) keys[low] = b, keys[high] = a;
      }
    }
  }
  __syncthreads();
}

template <bool resident>
__device__ __forceinline__ void write_sorted(const TopKParams& p, int64_t row, const Piece<resident>& piece,
                                             const u64* keys, Scratch* scratch) {
  float total = 1.f, top = 0.f;
  if (p.softmax) {
    top = piece.element(static_cast<int>(0xffffffffu - static_cast<u32>(keys[0])));
    if (threadIdx.x < 32) {
      float sum = 0.f;
      for (int j = threadIdx.x; j < p.k; j += 32) {
        sum += expf(piece.element(static_cast<int>(0xffffffffu - static_cast<u32>(keys[j]))) - top);
      }
#pragma unroll
      for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(kAllLanes, sum, other);
      if (threadIdx.x == 0) scratch->warp_sums[0] = __float_as_uint(sum);
    }
    __syncthreads();
    total = __int_as_float(static_cast<int>(scratch->warp_sums[0]));
  }
  for (int j = threadIdx.x; j < p.k; j += blockDim.x) {
    const int index = static_cast<int>(0xffffffffu - static_cast<u32>(keys[j]));
    const int64_t to = row * p.k + j;
    p.indices[to] = index;
    const float share = p.softmax ? expf(piece.element(index) - top) / total : 0.f;
    if (p.dtype == kRowFloat32) {
      reinterpret_cast<float*>(p.values)[to] = p.softmax ? share : reinterpret_cast<const float*>(piece.row)[index];
    } else if (!p.softmax) {
      reinterpret_cast<uint16_t*>(p.values)[to] = reinterpret_cast<const uint16_t*>(piece.row)[index];
    } else if (p.dtype == kRowFloat16) {
      reinterpret_cast<__half*>(p.values)[to] = __float2half_rn(share);
    } else {
      reinterpret_cast<__nv_bfloat16*>(p.values)[to] = __float2bfloat16_rn(share);
    }
  }
}

template <bool resident>
__global__ void __launch_bounds__(kSortThreads, 1) topk_rows(const __grid_constant__ TopKParams p) {
  const Team team(p.blocks);
  team.arrive();
  const int64_t row = team.row();
  char* memory = dynamic_shared_memory();
  Scratch* scratch = reinterpret_cast<Scratch*>(memory);
  Exchange exchange = {reinterpret_cast<u64*>(memory + sizeof(Scratch)), 0};
  float* list = reinterpret_cast<float*>(memory + sizeof(Scratch) + Exchange::bytes(team.all_warps));
  Piece<resident> piece(p.rows + row * p.row_bytes, p.dtype, p.length, p.per_warp, team, list + p.list_size);
  for (int b = threadIdx.x; b < kBins; b += blockDim.x) scratch->bins[b] = 0;
  if (threadIdx.x < 2) scratch->listed[threadIdx.x] = 0;
  pdl_wait();
  pdl_trigger();

  float most = -INFINITY;
  u32 numbers = 0;
  piece.read(team.lane, [&](const auto& v) {
    constexpr int size = sizeof(v) / sizeof(float);
#pragma unroll
    for (int e = 0; e < size; ++e) most = fmaxf(most, v[e]), numbers += !isnan(v[e]);
  });
  team.wait();
  exchange.put(team, 0, static_cast<u32>(__reduce_max_sync(kAllLanes, ordered(most))));
  exchange.put(team, 1, __reduce_add_sync(kAllLanes, numbers));
  exchange.share(team);
  Weigher<Kind::scores> weigher;
  weigher.top = from_ordered(exchange.largest(team, 0));
  const int all_numbers = static_cast<int>(exchange.sum(team, 1));

  // The numbers that stay, and NaN up to an index where the numbers are too few.
  Search<Kind::scores, resident> search = {team, piece, weigher, exchange, scratch, list, p.list_size};
  Kept kept;
  int last_nan = -1;
  if (p.k < all_numbers) {
    search.template survey<false>(true);
    if (team.block == 0) {
      search.guess().guess_count(p.k, kEntries * blockDim.x);
    }
    team.barrier();
    bool then_done;
    const Range range = {ordered(-INFINITY), ordered(weigher.top) + 1, 0};
    kept = search.resolve(search.template search<false>(range, p.k, scratch->guess[0][0], scratch->guess[0][1],
                                                        u64{1} << 32, &then_done));
  } else if (p.k > all_numbers) {
    last_nan = search.place_for_all(NotANumber{min(p.length, piece.end)}, p.k - all_numbers - 1);
  }

  // Everything that stays goes to the first block, in the order of the warps, and is sorted there.
  const auto stays = [&](float v, int i) { return kept.has(v, i) || (isnan(v) && i <= last_nan); };
  u32 mine = 0;
  piece.each_tile(team.lane, [&](float4 four, int i) {
    const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) mine += i + e < p.length && i < piece.end && stays(v[e], i + e);
  });
  u32 place = mine;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u32 below = __shfl_up_sync(kAllLanes, place, distance);
    if (team.lane >= distance) place += below;
  }
  exchange.put(team, 0, __shfl_sync(kAllLanes, place, 31));
  exchange.share(team);
  place += static_cast<u32>(exchange.sum_of(team, 0, 0, team.warp)) - mine;
  u64* keys = reinterpret_cast<u64*>(in_block(list, 0, team.blocks));  // nobody needs the list any more
  int size = 2;
  while (size < p.k) size *= 2;
  piece.each_tile(team.lane, [&](float4 four, int i) {
    const float v[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (i + e < p.length && i < piece.end && stays(v[e], i + e)) keys[place++] = sort_key(v[e], i + e);
    }
  });
  if (team.block == 0) {
    for (int j = p.k + threadIdx.x; j < size; j += blockDim.x) keys[j] = 0;
  }
  team.barrier();
  if (team.block != 0) return;
  sort_descending(keys, size);
  write_sorted(p, row, piece, keys, scratch);
}

}  // namespace kestrel::sampling
