// route_and_align: topk_softmax and moe_align_block_size of few tokens in one launch.
//
// Built for the decode step of a routed layer, 1 to 16 tokens: what it saves against the two launches is one of them,
// the trip of the ids through memory, and the counts. More tokens take the two launches, which are as fast there: a
// cluster of blocks that routed up to 256 tokens was not faster (results/h200_designs.json).
//
// Work: some blocks that exchange nothing. Each routes all rows, a warp a row (topk.cuh), keeps the ids in shared
// memory and aligns its share of them (align_apart.cuh); the first writes weights and ids.
//
// Predicted: the two ops in turn less one launch, 0.6 us; measured 0.3 to 0.5 less (README.md). Of the limit, which for
// some kilobytes is a launch: one token of 64 experts 42 %, 16 tokens 33 %; of 256 experts 27 and 24 %
// (results/h200.json).
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
  Apart split;
};

constexpr int kRouteThreads = 512;
constexpr int kRouteTokens = kRouteThreads / 32;

template <int PER_LANE>
__global__ void __launch_bounds__(kRouteThreads, 1) route_and_align_kernel(RouteParams p) {
  extern __shared__ unsigned shared[];
  const Router& r = p.router;
  int* ids = reinterpret_cast<int*>(shared + apart_words<PER_LANE>(p.split.own));  // [tokens * k]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const char* logits = r.logits + warp * r.stride;
  if (warp < r.tokens && lane * PER_LANE < r.experts) {
    prefetch_l2(logits + lane * PER_LANE * (r.dtype == Float::f32 ? 4 : 2));
  }
  apart_begin<PER_LANE>(p.split.own, shared);
  pdl_wait();
  pdl_trigger();
  if (warp < r.tokens) {
    const Choice choice = route_row<PER_LANE>(r, logits);
    if (lane < r.k) {
      const int place = warp * r.k + lane;
      ids[place] = choice.id;
      if (blockIdx.x == 0) {
        r.weights[place] = choice.weight;
        r.ids[place] = choice.id;
      }
    }
  }
  __syncthreads();
  align_apart<PER_LANE>(p.a, p.split, shared, blockIdx.x, [&](int pair) { return ids[pair]; });
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
  if (tokens > kRouteTokens) unsupported("more than 16 tokens in one launch");
  const DeviceGuard guard(logits.device().device_id);
  dispatch_experts(&p.router, [&](auto per_lane) {
    p.split = spread(p.a, kRouteThreads);
    const size_t bytes = 4 * static_cast<size_t>(apart_words<per_lane()>(p.split.own) + p.a.pairs);
    launch_pdl(route_and_align_kernel<per_lane()>, dim3(p.split.blocks), dim3(kRouteThreads), logits.device(), p,
               bytes);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(route_and_align, route_and_align);

}  // namespace kestrel::moe
