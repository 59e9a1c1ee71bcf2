// topk_fwd for rows of a vocabulary and k up to 1024: the k largest of each row, sorted. A cluster processes a row
// (top_k_candidates.cuh); its first block sorts and writes.
#pragma once

#include "top_k_candidates.cuh"

namespace kestrel::sampling {

struct TopKParams {
  const char* rows = nullptr;
  int64_t row_bytes = 0;
  int dtype = kRowFloat32;
  int length = 0;
  int cluster_size = 1;
  int k = 0;
  int max_top_k = 0;  // see TopKLayout
  bool softmax = false;
  char* values = nullptr;
  int* indices = nullptr;
};

__device__ __forceinline__ void write_sorted(const TopKParams& p, int64_t row_idx, const TopKRow<Kind::scores>& row,
                                             const u64* keys, float* sum) {
  float total = 1.f, top = 0.f;
  if (p.softmax) {
    top = row.element(row.index(keys[0]));
    if (threadIdx.x < 32) {
      float own = 0.f;
      for (int j = threadIdx.x; j < p.k; j += 32) own += expf(row.element(row.index(keys[j])) - top);
      own = warp_float_sum(own);
      if (threadIdx.x == 0) *sum = own;
    }
    __syncthreads();
    total = *sum;
  }
  for (int j = threadIdx.x; j < p.k; j += blockDim.x) {
    const int index = row.index(keys[j]);
    const int64_t to = row_idx * p.k + j;
    p.indices[to] = index;
    const float share = p.softmax ? expf(row.element(index) - top) / total : 0.f;
    if (p.dtype == kRowFloat32) {
      reinterpret_cast<float*>(p.values)[to] = p.softmax ? share : reinterpret_cast<const float*>(row.row)[index];
    } else if (!p.softmax) {
      reinterpret_cast<uint16_t*>(p.values)[to] = reinterpret_cast<const uint16_t*>(row.row)[index];
    } else if (p.dtype == kRowFloat16) {
      reinterpret_cast<__half*>(p.values)[to] = __float2half_rn(share);
    } else {
      reinterpret_cast<__nv_bfloat16*>(p.values)[to] = __float2bfloat16_rn(share);
    }
  }
}

__global__ void __launch_bounds__(kMaxSelectThreads, kTopKBlocksPerSm) topk_rows(const __grid_constant__ TopKParams p) {
  const Cluster cluster(p.cluster_size);
  const int64_t row_idx = cluster.row_idx();
  TopKScratch* const scratch = reinterpret_cast<TopKScratch*>(dynamic_shared_memory());
  const TopKLayout layout(p.length, p.max_top_k);
  const TopKRow<Kind::scores> row(p.rows + row_idx * p.row_bytes, p.dtype, p.length, layout.chunk_bits);
  const TopKSelector<Kind::scores> selector = {cluster, row, scratch, reinterpret_cast<char*>(scratch + 1), layout};
  selector.init();
  cluster.arrive_release();
  pdl_wait();
  pdl_trigger();
  selector.read_row(p.k);
  if (cluster.block_rank != 0) return;
  const TopKRange range = selector.receive();
  const int count = selector.collect(p.k, range, [](u32, u64) {});
  const u64* const keys = selector.template ordered</*places_masses=*/false>(count);
  write_sorted(p, row_idx, row, keys, &scratch->softmax_sum);
}

}  // namespace kestrel::sampling
