// topk_softmax: softmax over the experts of each token, the k largest, and how often each expert was chosen.
//
// For 64 to 512 experts, k of 1 to 32, one to thousands of tokens. Latency-bound for few rows: load, sort, k maxima,
// exp, store. Instruction-bound for thousands.
//
// Work: one warp per row of up to 512 experts (topk.cuh). A CTA counts in shared memory. A single CTA stores its
// counts; several add theirs with integer atomics, after the first CTA to arrive has zeroed the counts
// (CountsHandshake). One more warp per CTA does the handshake while the others route.
#include <kestrel/export.h>
#include <kestrel/launch.h>
#include <kestrel/pdl.cuh>

#include <algorithm>
#include <atomic>
#include <random>

#include "router.h"

namespace kestrel::moe {

// Scratch memory of one call, uninitialised. `key` is 64 random bits, new for every call, so that earlier contents of
// the memory do not match. A replayed graph repeats the key: the last CTA to see `zeroed` therefore erases both fields.
// No CTA waits for one that may not have started: whoever arrives first zeroes the counts.
struct CountsHandshake {
  unsigned long long claimed;  // the key once a CTA has arrived
  unsigned long long zeroed;   // the key once the counts are zero
  unsigned long long seen;     // number of other CTAs that have seen `zeroed`
};
constexpr int kScratchWords = 8;  // of 32 bits: it starts at an even one

struct TopkParams {
  Router router;
  int* counts = nullptr;                 // [experts]
  CountsHandshake* handshake = nullptr;  // null if there is one CTA
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

// One warp of each CTA: returns when the counts are zero.
__device__ __forceinline__ void wait_for_zeroed_counts(const TopkParams& p) {
  const int lane = threadIdx.x % 32;
  CountsHandshake* const h = p.handshake;
  const bool first = __shfl_sync(kFullMask, lane == 0 && atomicExch(&h->claimed, p.key) != p.key, 0);
  if (first) {
    for (int e = lane; e < p.router.experts; e += 32) p.counts[e] = 0;
    if (lane == 0) h->seen = 0;
    __syncwarp();
    if (lane == 0) store_release(&h->zeroed, p.key);
  } else if (lane == 0) {
    while (load_acquire(&h->zeroed) != p.key) {
    }
    if (atomicAdd(&h->seen, 1ull) == gridDim.x - 2) h->claimed = h->zeroed = 0;
  }
}

constexpr int kSingleCtaRows = 8;  // as many rows take one CTA
constexpr int kMaxCtas = 264;      // all add their counts to the same few lines of L2
constexpr int kMinRowWarps = 4;    // of several CTAs

template <int PER_LANE>
constexpr int target_ctas = PER_LANE >= 8 ? 96 : 64;

// Warps of a CTA that have rows; 16 experts per lane take many registers.
template <int PER_LANE>
constexpr int max_row_warps = PER_LANE == 16 ? 8 : 16;

template <int PER_LANE>
__global__ void __launch_bounds__(32 * (max_row_warps<PER_LANE> + 1), 1) topk_softmax_kernel(TopkParams p) {
  __shared__ int histogram[kMaxExperts];
  const Router& r = p.router;
  const int row_warps = static_cast<int>(blockDim.x / 32) - (p.handshake ? 1 : 0);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = static_cast<int>(blockIdx.x) * row_warps + warp;
  const char* logits = r.logits + first_row * r.stride;
  if (warp < row_warps && first_row < r.tokens && lane * PER_LANE < r.experts) {
    prefetch_l2(logits + lane * PER_LANE * (r.dtype == Float::f32 ? 4 : 2));
  }
  int64_t at = static_cast<int64_t>(first_row) * r.k + lane;
  pin(logits);
  for (int e = threadIdx.x; e < r.experts; e += blockDim.x) histogram[e] = 0;
  __syncthreads();
  pdl_wait();
  pdl_trigger();

  if (warp < row_warps) {
    const int num_tokens = r.num_tokens ? min(*r.num_tokens, r.tokens) : r.tokens;
    const int step = static_cast<int>(gridDim.x) * row_warps;
    for (int row = first_row; row < r.tokens; row += step) {
      Choice choice{-1, 0.f};
      if (row < num_tokens) choice = route_row<PER_LANE>(r, logits);
      if (lane < r.k) {
        r.weights[at] = choice.weight;
        r.ids[at] = choice.id;
        if (row < num_tokens) atomicAdd(&histogram[choice.id], 1);
      }
      logits += step * r.stride;
      at += static_cast<int64_t>(step) * r.k;
    }
  } else {
    wait_for_zeroed_counts(p);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < r.experts; e += blockDim.x) {
    const int n = histogram[e];
    if (!p.handshake) {
      p.counts[e] = n;
    } else if (n) {
      atomicAdd(&p.counts[e], n);
    }
  }
}

// A new key for every call: a random start, then splitmix64.
inline unsigned long long next_key() {
  static std::atomic<unsigned long long> state{static_cast<unsigned long long>(std::random_device{}()) << 32 |
                                               std::random_device{}()};
  unsigned long long z = state.fetch_add(0x9e3779b97f4a7c15ull) + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31) | 1;
}

// counts is [experts], or [experts + kScratchWords] for a launch of several CTAs.
void topk_softmax(TensorView weights, TensorView ids, TensorView counts, TensorView gating, AnyView k,
                  AnyView renormalize, OptionalTensor bias, OptionalTensor num_tokens) {
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
  const bool has_scratch = counts.ndim() == 1 && counts.size(0) == experts + kScratchWords;
  const int64_t words = has_scratch ? experts + kScratchWords : experts;
  check.dtype("counts", counts, {kInt32});
  check.shape("counts", counts, &words, 1);
  check.contiguous("counts", counts);
  check_devices(check, "gating", gating,
                {{"bias", bias}, {"num_tokens", num_tokens}, {"weights", weights}, {"ids", ids}, {"counts", counts}});

  TopkParams p;
  p.router = router_params(gating, choices, sum_to_one, bias, weights, ids);
  if (num_tokens.has_value()) p.router.num_tokens = reinterpret_cast<const int*>(address(*num_tokens));
  p.counts = reinterpret_cast<int*>(address(counts));
  const DeviceGuard guard(gating.device().device_id);
  dispatch_experts(&p.router, [&](auto per_lane) {
    const auto kernel = topk_softmax_kernel<per_lane()>;
    constexpr int max_warps = max_row_warps<per_lane()>, target = target_ctas<per_lane()>;
    if (tokens <= kSingleCtaRows || !has_scratch) {
      const int64_t warps = std::clamp<int64_t>(tokens, 1, max_warps);
      launch_pdl(kernel, dim3(1), dim3(static_cast<unsigned>(32 * warps)), gating.device(), p);
    } else {
      p.handshake = reinterpret_cast<CountsHandshake*>(p.counts + (experts + 1) / 2 * 2);
      p.key = next_key();
      const int64_t warps = std::clamp<int64_t>((tokens + target - 1) / target, kMinRowWarps, max_warps);
      const int64_t ctas = std::min<int64_t>((tokens + warps - 1) / warps, kMaxCtas);
      launch_pdl(kernel, dim3(static_cast<unsigned>(ctas)), dim3(static_cast<unsigned>(32 * (warps + 1))),
                 gating.device(), p);
    }
  });
}

KESTREL_EXPORT(topk_softmax, topk_softmax);

}  // namespace kestrel::moe
