// route_and_align: topk_softmax and moe_align_block_size of few tokens in one launch.
//
// For the decode step of a routed layer, up to 16 tokens and 2048 logits; more take the two launches. Latency-bound:
// what it saves is one launch, the round trip of the ids through memory, and the counts.
//
// Work: up to 32 CTAs that exchange nothing. Each routes all rows, one warp per row (topk.cuh), keeps the ids in shared
// memory and aligns its share of the pairs (align_independent.cuh). CTA 0 writes weights and ids.
#include <kestrel/export.h>
#include <kestrel/launch.h>
#include <kestrel/pdl.cuh>

#include <algorithm>

#include "align_host.h"
#include "router.h"

namespace kestrel::moe {

struct RouteParams {
  Router router;
  Alignment a;
  IndependentSplit split;
};

constexpr int kRouteThreads = 512;
constexpr int kMaxRouteTokens = kRouteThreads / 32;  // one warp each

template <int PER_LANE>
__global__ void __launch_bounds__(kRouteThreads, 1) route_and_align_kernel(RouteParams p) {
  extern __shared__ unsigned shared[];
  const Router& r = p.router;
  int* ids =
      reinterpret_cast<int*>(shared + align_independent_words<PER_LANE>(p.split.rounds_per_cta));  // [tokens * k]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const char* logits = r.logits + warp * r.stride;
  if (warp < r.tokens && lane * PER_LANE < r.experts) {
    prefetch_l2(logits + lane * PER_LANE * (r.dtype == Float::f32 ? 4 : 2));
  }
  align_independent_prologue<PER_LANE>(p.split.rounds_per_cta, shared);
  pdl_wait();
  pdl_trigger();
  if (warp < r.tokens) {
    const Choice choice = route_row<PER_LANE>(r, logits);
    if (lane < r.k) {
      const int at = warp * r.k + lane;
      ids[at] = choice.id;
      if (blockIdx.x == 0) {
        r.weights[at] = choice.weight;
        r.ids[at] = choice.id;
      }
    }
  }
  __syncthreads();
  align_independent<PER_LANE>(p.a, p.split, shared, blockIdx.x, [&](int pair) { return ids[pair]; });
}

void route_and_align(TensorView weights, TensorView ids, TensorView sorted_token_ids, TensorView expert_ids,
                     TensorView num_tokens_post_pad, TensorView logits, AnyView k, AnyView block_size,
                     AnyView renormalize, OptionalTensor bias, OptionalTensor expert_map) {
  const Checks check("route_and_align");
  const int64_t choices = check_logits(check, "logits", logits, k);
  const int64_t size = check_count(check, "block_size", block_size);
  const bool sum_to_one = check.flag("renormalize", renormalize);
  const int64_t tokens = logits.size(0), experts = logits.size(1), pairs = tokens * choices, one = 1;
  check_bias(check, bias, experts);
  check_map(check, expert_map, experts);
  check_result(check, "weights", weights, kFloat32, tokens, choices);
  check_result(check, "ids", ids, kInt32, tokens, choices);
  const int64_t blocks = most_blocks(pairs, experts, size), positions = blocks * size;
  check.dtype("sorted_token_ids", sorted_token_ids, {kInt32});
  check.shape("sorted_token_ids", sorted_token_ids, &positions, 1);
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
  p.router = router_params(logits, choices, sum_to_one, bias, weights, ids);
  set_sizes(&p.a, pairs, experts, size);
  p.a.sorted_token_ids = reinterpret_cast<int*>(address(sorted_token_ids));
  p.a.expert_ids = reinterpret_cast<int*>(address(expert_ids));
  p.a.num_post_pad = reinterpret_cast<int*>(address(num_tokens_post_pad));
  p.a.expert_map = reinterpret_cast<const int*>(address(expert_map));
  p.a.num_positions = positions;
  p.a.num_blocks = blocks;
  if (tokens > kMaxRouteTokens) unsupported("more than 16 tokens in one launch");
  const DeviceGuard guard(logits.device().device_id);
  dispatch_experts(&p.router, [&](auto per_lane) {
    p.split = split_independent(p.a, kRouteThreads);
    const size_t bytes =
        4 * static_cast<size_t>(align_independent_words<per_lane()>(p.split.rounds_per_cta) + p.a.num_pairs);
    launch_pdl(route_and_align_kernel<per_lane()>, dim3(p.split.ctas), dim3(kRouteThreads), logits.device(), p, bytes);
  });
}

KESTREL_EXPORT(route_and_align, route_and_align);

}  // namespace kestrel::moe
