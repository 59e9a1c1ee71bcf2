// route_and_align: topk_softmax and moe_align_block_size of few tokens in one launch.
//
// Built for the decode step of a routed layer, 1 to some hundred tokens: what it saves against the two launches is one
// of them, and the trip of the ids through memory.
//
// Work: one block, or from sm_90 on a cluster of 8 or 16, splits the rows in runs; a block routes its rows (topk.cuh),
// keeps their ids in shared memory and aligns them (align.cuh). More tokens take the two launches.
#include <kestrel/launch.h>
#include <tvm/ffi/function.h>
#include <kestrel/pdl.cuh>

#include <algorithm>
#include <climits>

#include "align_host.h"
#include "router.h"

namespace kestrel::moe {

struct RouteParams {
  Router router;
  Alignment a;
  int rows = 1;  // of a block
};

constexpr int kRouteThreads = 512;  // at most
constexpr int kTokensOfOne = 16;    // as many are one block's
constexpr int kTokensOfEight = 64;  // and as many a cluster's of eight

template <int PER_LANE>
__global__ void __launch_bounds__(kRouteThreads, 1) route_and_align_kernel(RouteParams p) {
  extern __shared__ unsigned shared[];
  const Router& r = p.router;
  const AlignMemory memory(p.a, shared);
  int* ids = reinterpret_cast<int*>(shared + align_words(p.a));  // [rows * k], of this block
  const int rank = blockIdx.x, first = rank * p.rows, last = min(first + p.rows, r.tokens);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (first + warp < last && lane * PER_LANE < r.experts) {
    prefetch_l2(r.logits + (first + warp) * r.stride + lane * PER_LANE * (r.dtype == Float::f32 ? 4 : 2));
  }
  align_begin(p.a, memory);
  pdl_wait();
  pdl_trigger();
  if (p.a.cluster == 1) fill_with_padding(p.a);
  for (int row = first + warp; row < last; row += warps) {
    const Choice choice = route_row<PER_LANE>(r, r.logits + row * r.stride);
    if (lane < r.k) {
      const int64_t place = static_cast<int64_t>(row) * r.k + lane;
      r.weights[place] = choice.weight;
      r.ids[place] = choice.id;
      ids[(row - first) * r.k + lane] = choice.id;
    }
  }
  __syncthreads();
  align_pairs<4, true>(p.a, memory, rank, [&](int pair) { return ids[pair - first * r.k]; });
}

void route_and_align(TensorView weights, TensorView ids, TensorView sorted_token_ids, TensorView expert_ids,
                     TensorView num_tokens_post_pad, TensorView logits, AnyView k, AnyView block_size,
                     AnyView renormalize, OptionalTensor bias, OptionalTensor expert_map) {
  const Checks check("route_and_align");
  const int64_t choices = check_logits(check, "logits", logits, k);
  const int64_t size = check.integer("block_size", block_size, 1);
  const bool sum_to_one = check.flag("renormalize", renormalize);
  const int64_t tokens = logits.size(0), experts = logits.size(1), pairs = tokens * choices, one = 1;
  check_bias(check, bias, experts);
  check_map(check, expert_map, experts);
  if (size > INT_MAX) unsupported("a block of 2^31 or more");
  check_result(check, "weights", weights, kFloat32, tokens, choices);
  check_result(check, "ids", ids, kInt32, tokens, choices);
  const int64_t blocks = most_blocks(pairs, experts, size), slots = blocks * size;
  check.dtype("sorted_token_ids", sorted_token_ids, {kInt32});
  check.shape("sorted_token_ids", sorted_token_ids, &slots, 1);
  check.dtype("expert_ids", expert_ids, {kInt32});
  check.shape("expert_ids", expert_ids, &blocks, 1);
  check.dtype("num_tokens_post_pad", num_tokens_post_pad, {kInt32});
  check.shape("num_tokens_post_pad", num_tokens_post_pad, &one, 1);
  check_devices(check, "logits", logits,
                {{"bias", bias},
                 {"expert_map", expert_map},
                 {"weights", weights},
                 {"ids", ids},
                 {"sorted_token_ids", sorted_token_ids},
                 {"expert_ids", expert_ids},
                 {"num_tokens_post_pad", num_tokens_post_pad}});

  RouteParams p;
  p.router = router(logits, choices, sum_to_one, bias, weights, ids);
  set_sizes(&p.a, pairs, experts, size);
  p.a.sorted = reinterpret_cast<int*>(address(sorted_token_ids));
  p.a.experts_of = reinterpret_cast<int*>(address(expert_ids));
  p.a.length = reinterpret_cast<int*>(address(num_tokens_post_pad));
  p.a.expert_map = reinterpret_cast<const int*>(address(expert_map));
  p.a.slots = slots;
  p.a.blocks = blocks;
  const DeviceGuard guard(logits.device().device_id);
  dispatch_experts(&p.router, [&](auto per_lane) {
    constexpr auto kernel = route_and_align_kernel<per_lane()>;
    const int device = logits.device().device_id;
    p.a.cluster = tokens > kTokensOfOne ? widest_cluster(device) : 1;
    if (p.a.cluster > kCluster && (tokens <= kTokensOfEight || !runs_wide<kernel, kRouteThreads>(device))) {
      p.a.cluster = kCluster;
    }
    p.rows = static_cast<int>((tokens + p.a.cluster - 1) / p.a.cluster);
    p.a.own = p.rows * p.router.k;
    p.a.warps = std::clamp((p.a.own + 31) / 32, 1, kRouteThreads / 32);
    p.a.run = std::max(1, (p.a.own + 32 * p.a.warps - 1) / (32 * p.a.warps)) * 32;
    const int threads = threads_for(p.a, std::clamp(p.rows * 32, 256, kRouteThreads), kRouteThreads);
    const size_t bytes = shared_bytes(p.a) + 4 * static_cast<size_t>(p.a.own);
    if (static_cast<int64_t>(bytes) > kShared) unsupported("so many pairs in one launch");
    allow_shared(kernel, bytes);
    launch_pdl(kernel, dim3(p.a.cluster), dim3(threads), logits.device(), p, bytes, p.a.cluster);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(route_and_align, route_and_align);

}  // namespace kestrel::moe
