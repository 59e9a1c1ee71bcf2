// topk_softmax: softmax over the experts of each token, the k most probable of them, and how often each was chosen.
//
// Built for float32 logits of 64 and 256 experts and k = 8, one to thousands of tokens. A row moves 4E + 8k bytes and
// takes some 4E operations: 1.0 us at 4.3 TB/s for 4096x256, next to nothing else, so the chain load - sort - k maxima
// - exp - store counts. Predicted about 1.5 us for few rows; the counts, a sum over the grid in one launch, +0.3.
//
// Work: a warp has a row of up to 512 experts (topk.cuh). A block counts in shared memory. One block alone stores its
// counts. Of several, the first to come to a meeting in scratch memory zeroes the counts and opens it; the others add
// theirs when they see it open (integers: the order does not show). Nobody waits for a block that may not have started.
// A warp without rows does that while the rows are routed.
//
// Measured (README.md): 1.4 us for 1x64, 2.2 for 740x64, 6.9 for 4096x256, whose limit is 2.1: instructions decide.
#include <kestrel/launch.h>
#include <tvm/ffi/function.h>
#include <kestrel/pdl.cuh>

#include <algorithm>
#include <atomic>
#include <random>

#include "router.h"

namespace kestrel::moe {

// Scratch memory of one call, in any state before and without the key after. The key is new for every call, 64 random
// bits, so nothing that lay here before is taken for it; a replayed graph brings the same key, hence the last block to
// see the meeting open erases it.
struct Meeting {
  unsigned long long first;  // the key once a block has come
  unsigned long long open;   // the key once the counts are zero
  unsigned long long seen;   // by so many of the others
};

struct TopkParams {
  Router router;
  int* counts = nullptr;  // [experts]
  Meeting* meeting = nullptr;
  unsigned long long key = 0;
};

__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* p) {
  unsigned long long v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_release(unsigned long long* p, unsigned long long v) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// One warp of each block: returns when the counts are zero.
__device__ __forceinline__ void meet(const TopkParams& p) {
  const int lane = threadIdx.x % 32;
  Meeting* const m = p.meeting;
  const bool first = __shfl_sync(FULL, lane == 0 && atomicExch(&m->first, p.key) != p.key, 0);
  if (first) {
    for (int e = lane; e < p.router.experts; e += 32) p.counts[e] = 0;
    if (lane == 0) m->seen = 0;
    __syncwarp();
    if (lane == 0) store_release(&m->open, p.key);
  } else if (lane == 0) {
    while (load_acquire(&m->open) != p.key) {
    }
    if (atomicAdd(&m->seen, 1ull) == gridDim.x - 2) m->first = m->open = 0;
  }
}

constexpr int kRowsOfOne = 8;     // as many rows are one block's
constexpr int kMostBlocks = 264;  // each adds its counts to the same few lines of L2
template <int PER_LANE>
constexpr int blocks_aimed_at = PER_LANE >= 8 ? 96 : 64;

// With rows, of a block; 16 experts a lane take many registers.
template <int PER_LANE>
constexpr int most_warps = PER_LANE == 16 ? 8 : 16;

template <int PER_LANE>
__global__ void __launch_bounds__(32 * (most_warps<PER_LANE> + 1), 1) topk_softmax_kernel(TopkParams p) {
  __shared__ int histogram[kMostExperts];
  const Router& r = p.router;
  const int row_warps = static_cast<int>(blockDim.x / 32) - (p.meeting ? 1 : 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = static_cast<int>(blockIdx.x) * row_warps + warp;
  const char* logits = r.logits + first_row * r.stride;
  if (warp < row_warps && first_row < r.tokens && lane * PER_LANE < r.experts) {
    prefetch_l2(logits + lane * PER_LANE * (r.dtype == Float::f32 ? 4 : 2));
  }
  int64_t place = static_cast<int64_t>(first_row) * r.k + lane;
  pin(logits);
  for (int e = threadIdx.x; e < r.experts; e += blockDim.x) histogram[e] = 0;
  __syncthreads();
  pdl_wait();
  pdl_trigger();

  if (warp < row_warps) {
    const int real = r.num_tokens ? min(*r.num_tokens, r.tokens) : r.tokens;
    const int step = static_cast<int>(gridDim.x) * row_warps;
    for (int row = first_row; row < r.tokens; row += step) {
      Choice choice{-1, 0.f};
      if (row < real) choice = route_row<PER_LANE>(r, logits);
      if (lane < r.k) {
        r.weights[place] = choice.weight;
        r.ids[place] = choice.id;
        if (row < real) atomicAdd(&histogram[choice.id], 1);
      }
      logits += step * r.stride;
      place += static_cast<int64_t>(step) * r.k;
    }
  } else {
    meet(p);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < r.experts; e += blockDim.x) {
    const int n = histogram[e];
    if (!p.meeting) {
      p.counts[e] = n;
    } else if (n) {
      atomicAdd(&p.counts[e], n);
    }
  }
}

// A new key for every call: a random start, then the steps of splitmix64.
inline unsigned long long next_key() {
  static std::atomic<unsigned long long> state{static_cast<unsigned long long>(std::random_device{}()) << 32 |
                                               std::random_device{}()};
  unsigned long long z = state.fetch_add(0x9e3779b97f4a7c15ull) + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31) | 1;
}

void topk_softmax(TensorView weights, TensorView ids, TensorView counts, OptionalTensor scratch, TensorView gating,
                  AnyView k, AnyView renormalize, OptionalTensor bias, OptionalTensor num_tokens) {
  const Checks check("topk_softmax");
  const int64_t choices = check_logits(check, "gating", gating, k);
  const int64_t tokens = gating.size(0), experts = gating.size(1), one = 1;
  const bool sum_to_one = check.flag("renormalize", renormalize);
  check_bias(check, bias, experts);
  if (num_tokens.has_value()) {
    check.dtype("num_tokens", *num_tokens, {kInt32});
    check.shape("num_tokens", *num_tokens, &one, 1);
  }
  check_result(check, "weights", weights, kFloat32, tokens, choices);
  check_result(check, "ids", ids, kInt32, tokens, choices);
  check.dtype("counts", counts, {kInt32});
  check.shape("counts", counts, &experts, 1);
  if (scratch.has_value()) {
    constexpr int64_t words = sizeof(Meeting) / 8;
    check.dtype("scratch", *scratch, {kInt64});
    check.shape("scratch", *scratch, &words, 1);
    check.last_contiguous("scratch", *scratch);
  }
  check_devices(check, "gating", gating,
                {{"bias", bias},
                 {"num_tokens", num_tokens},
                 {"weights", weights},
                 {"ids", ids},
                 {"counts", counts},
                 {"scratch", scratch}});

  TopkParams p;
  p.router = router(gating, choices, sum_to_one, bias, weights, ids);
  if (num_tokens.has_value()) p.router.num_tokens = reinterpret_cast<const int*>(address(*num_tokens));
  p.counts = reinterpret_cast<int*>(address(counts));
  const DeviceGuard guard(gating.device().device_id);
  dispatch_experts(&p.router, [&](auto per_lane) {
    const auto kernel = topk_softmax_kernel<per_lane()>;
    if (tokens <= kRowsOfOne || !scratch.has_value()) {
      const int64_t warps = std::clamp<int64_t>(tokens, 1, most_warps<per_lane()>);
      launch_pdl(kernel, dim3(1), dim3(static_cast<unsigned>(32 * warps)), gating.device(), p);
    } else {
      p.meeting = reinterpret_cast<Meeting*>(address(*scratch));
      p.key = next_key();
      const int64_t warps = std::clamp<int64_t>(
          (tokens + blocks_aimed_at<per_lane()> - 1) / blocks_aimed_at<per_lane()>, 4, most_warps<per_lane()>);
      const int64_t blocks = std::min<int64_t>((tokens + warps - 1) / warps, kMostBlocks);
      launch_pdl(kernel, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(32 * (warps + 1))),
                 gating.device(), p);
    }
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_softmax, topk_softmax);

}  // namespace kestrel::moe
