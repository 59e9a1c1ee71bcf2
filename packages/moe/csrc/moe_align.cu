// moe_align_block_size and moe_lora_align_block_size: (token, choice) pairs grouped by expert, in padded blocks.
//
// Built for 8 to 8192 pairs over 64 experts and 65536 over 256. The bytes are nothing (65536 pairs: 0.6 MB, 0.15 us at
// 4.3 TB/s); what counts is the chain count - scan - scatter with its barriers, and beyond some thousand pairs the
// scattered 4-byte stores, of which one SM issues few per cycle.
//
// Work: up to 8192 pairs and 256 experts 32 blocks that exchange nothing (align_apart.cuh). Beyond, a cluster of 16 or
// 8 blocks, or one block: up to 1024 pairs, and before sm_90 always (align.cuh). The adapters of
// moe_lora_align_block_size have as many each.
//
// Predicted 2 us for few pairs and 2.2 for 8192, 5 for 65536 by a cluster; measured 1.8, 2.8 and 9.2 (README.md). What
// the prediction missed: a block adds its 8192 pairs to counters in shared memory about two at a time, and one of 4096
// pairs of a cluster is bound by its accesses to shared memory, six per pair.
#include <kestrel/launch.h>
#include <tvm/ffi/function.h>
#include <kestrel/pdl.cuh>

#include <climits>

#include "align_host.h"

namespace kestrel::moe {

// What is aligned apart; adapters, which all count the pairs, only an eighth of that. Few pairs take half of the
// threads.
constexpr int64_t kPairsApart = 8192, kExpertsApart = 256;
constexpr int kThreadsApart = 512, kFewPairs = 1024;

struct AlignParams {
  Alignment a;
  Apart apart;
  const void* ids = nullptr;
  int64_t stride = 0;  // of a token's ids, in elements
  int k = 1;
  bool wide = false;                // ids are int64
  bool flat = true;                 // tokens follow one another
  bool adapters = false;            // one alignment for each
  const int* adapter_of = nullptr;  // [tokens]
  const void* enabled = nullptr;    // [adapters]
  bool enabled_bytes = false;       // of bool, not int32
  int64_t sorted_stride = 0;
  int64_t experts_stride = 0;
  int64_t length_stride = 0;
};

// PLAIN: int32 ids that follow one another, no adapters; apart, no map either.
template <bool PLAIN>
__device__ __forceinline__ int expert_of(const AlignParams& p, int pair, int adapter) {
  if constexpr (PLAIN) {
    return static_cast<const int*>(p.ids)[pair];
  } else {
    int64_t at = pair;
    if (!p.flat || p.adapters) {
      const int token = pair / p.k;
      if (!p.flat) at = token * p.stride + (pair - token * p.k);
      if (p.adapters && p.adapter_of[token] != adapter) return -1;
    }
    if (!p.wide) return static_cast<const int*>(p.ids)[at];
    const int64_t id = static_cast<const int64_t*>(p.ids)[at];
    return id >= 0 && id < p.a.experts ? static_cast<int>(id) : -1;
  }
}

// Makes the outputs those of an adapter; false where it is disabled.
__device__ __forceinline__ bool choose_adapter(AlignParams& p, int adapter) {
  const bool on = p.enabled_bytes ? static_cast<const unsigned char*>(p.enabled)[adapter] != 0
                                  : static_cast<const int*>(p.enabled)[adapter] != 0;
  p.a.sorted += adapter * p.sorted_stride;
  p.a.experts_of += adapter * p.experts_stride;
  p.a.length += adapter * p.length_stride;
  return on;
}

template <bool PLAIN>
__global__ void __launch_bounds__(kThreads, 1) moe_align_kernel(AlignParams p) {
  extern __shared__ unsigned shared[];
  const AlignMemory memory(p.a, shared);
  const unsigned rank = PLAIN ? blockIdx.x : blockIdx.x % p.a.cluster;
  const int adapter = PLAIN ? 0 : blockIdx.x / p.a.cluster;
  align_begin(p.a, memory);
  pdl_wait();
  pdl_trigger();
  if (!PLAIN && p.adapters && !choose_adapter(p, adapter)) {
    if (p.a.cluster > 1) cluster_ready();
    return;
  }
  if (p.a.cluster == 1) fill_with_padding(p.a);
  constexpr int rounds = PLAIN ? 8 : 4;  // what registers hold
  align_pairs<rounds, true>(p.a, memory, rank, [&](int pair) { return expert_of<PLAIN>(p, pair, adapter); });
}

template <int PER_LANE, bool PLAIN>
__global__ void __launch_bounds__(kThreadsApart, 1) moe_align_apart_kernel(AlignParams p) {
  extern __shared__ unsigned shared[];
  const int rank = PLAIN ? blockIdx.x : blockIdx.x % p.apart.blocks;
  const int adapter = PLAIN ? 0 : blockIdx.x / p.apart.blocks;
  if (PLAIN) p.a.expert_map = nullptr;  // as the host has seen to
  apart_begin<PER_LANE>(p.apart.own, shared);
  pdl_wait();
  pdl_trigger();
  if (!PLAIN && p.adapters && !choose_adapter(p, adapter)) return;
  align_apart<PER_LANE>(p.a, p.apart, shared, rank, [&](int pair) { return expert_of<PLAIN>(p, pair, adapter); });
}

constexpr DLDataType kBool8{kDLBool, 8, 1};

// The arguments that both ops share, in the order of their Python checks.
class AlignCall {
 public:
  explicit AlignCall(const char* op) : check(op) {}

  void ids(const TensorView& ids, const AnyView& experts, const AnyView& block_size, const OptionalTensor& map) {
    check.dtype("topk_ids", ids, {kInt32, kInt64});
    check.rank("topk_ids", ids, 2, 2);
    check.last_contiguous("topk_ids", ids);
    experts_ = check.integer("num_experts", experts, 1);
    block_size_ = check.integer("block_size", block_size, 1);
    check_map(check, map, experts_);
    if (experts_ > INT_MAX || block_size_ > INT_MAX) unsupported("2^31 experts or more, or so large a block");
    pairs_ = ids.size(0) * ids.size(1);
  }

  // An int32 output [..., at least `least`], with `adapters` rows where that is not 0.
  void buffer(const char* name, const TensorView& t, int64_t adapters, int64_t least) const {
    const int rank = adapters ? 2 : 1;
    check.dtype(name, t, {kInt32});
    check.rank(name, t, rank, rank);
    check.last_contiguous(name, t);
    const int64_t expected[2] = {adapters ? adapters : kAny, kAny};
    check.shape(name, t, expected, rank);
    if (t.size(-1) < least) {
      check.fail(name, "at least " + std::to_string(least) + " elements (the most these ids can need)",
                 std::to_string(t.size(-1)));
    }
    check.disjoint(name, t);
  }

  void outputs(const TensorView& sorted, const TensorView& experts_of, const TensorView& length,
               int64_t adapters) const {
    const int64_t blocks = most_blocks(pairs_, experts_, block_size_), lengths = adapters ? adapters : 1;
    buffer("sorted_token_ids", sorted, adapters, blocks * block_size_);
    buffer("expert_ids", experts_of, adapters, blocks);
    buffer("num_tokens_post_pad", length, 0, lengths);
    check.shape("num_tokens_post_pad", length, &lengths, 1);
  }

  void launch(const TensorView& ids, const TensorView& sorted, const TensorView& experts_of, const TensorView& length,
              const OptionalTensor& map, AlignParams p, unsigned adapters) const {
    set_sizes(&p.a, pairs_, experts_, block_size_);
    p.a.sorted = reinterpret_cast<int*>(address(sorted));
    p.a.experts_of = reinterpret_cast<int*>(address(experts_of));
    p.a.length = reinterpret_cast<int*>(address(length));
    p.a.expert_map = reinterpret_cast<const int*>(address(map));
    p.a.slots = sorted.size(-1);
    p.a.blocks = experts_of.size(-1);
    p.ids = address(ids);
    p.k = static_cast<int>(std::max<int64_t>(ids.size(1), 1));
    p.stride = ids.stride(0);
    p.wide = same_dtype(ids.dtype(), kInt64);
    p.flat = ids.size(0) < 2 || ids.stride(0) == ids.size(1);
    const DeviceGuard guard(ids.device().device_id);
    const bool plain = p.flat && !p.wide && !p.adapters;
    if (pairs_ <= (p.adapters ? kPairsApart / 8 : kPairsApart) && experts_ <= kExpertsApart) {
      const bool plainest = plain && !p.a.expert_map;
      return experts_ <= kExpertsApart / 4 ? launch_apart<kExpertsApart / 128>(p, plainest, ids.device(), adapters)
                                           : launch_apart<kExpertsApart / 32>(p, plainest, ids.device(), adapters);
    }
    const auto launched = [&](int widest) {
      split(&p.a, widest);
      return plain ? launched_as<true>(p, ids.device(), adapters) : launched_as<false>(p, ids.device(), adapters);
    };
    if (!launched(widest_cluster(ids.device().device_id))) launched(kCluster);
  }

  const Checks check;

 private:
  template <int PER_LANE>
  static void launch_apart(AlignParams& p, bool plain, DLDevice device, unsigned adapters) {
    const int threads = p.a.pairs > kFewPairs ? kThreadsApart : kThreadsApart / 2;
    p.apart = spread(p.a, threads);
    launch_pdl(plain ? moe_align_apart_kernel<PER_LANE, true> : moe_align_apart_kernel<PER_LANE, false>,
               dim3(p.apart.blocks * adapters), dim3(threads), device, p, 4 * apart_words<PER_LANE>(p.apart.own));
  }

  template <bool PLAIN>
  static bool launched_as(const AlignParams& p, DLDevice device, unsigned adapters) {
    constexpr auto kernel = moe_align_kernel<PLAIN>;
    if (p.a.cluster > kCluster && !runs_wide<kernel, kThreads>(device.device_id)) return false;
    const size_t bytes = shared_bytes(p.a);
    allow_shared(kernel, bytes);
    launch_pdl(kernel, dim3(p.a.cluster * adapters), dim3(threads_for(p.a, 256, kThreads)), device, p, bytes,
               p.a.cluster);
    return true;
  }

  int64_t experts_ = 0, block_size_ = 0, pairs_ = 0;
};

void moe_align_block_size(TensorView topk_ids, AnyView num_experts, AnyView block_size, TensorView sorted_token_ids,
                          TensorView expert_ids, TensorView num_tokens_post_pad, OptionalTensor expert_map) {
  AlignCall call("moe_align_block_size");
  call.ids(topk_ids, num_experts, block_size, expert_map);
  call.outputs(sorted_token_ids, expert_ids, num_tokens_post_pad, 0);
  check_devices(call.check, "topk_ids", topk_ids,
                {{"expert_map", expert_map},
                 {"sorted_token_ids", sorted_token_ids},
                 {"expert_ids", expert_ids},
                 {"num_tokens_post_pad", num_tokens_post_pad}});
  call.launch(topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad, expert_map, {}, 1);
}

void moe_lora_align_block_size(TensorView topk_ids, TensorView token_lora_mapping, AnyView num_experts,
                               AnyView block_size, AnyView max_loras, TensorView sorted_token_ids,
                               TensorView expert_ids, TensorView num_tokens_post_pad, TensorView adapter_enabled,
                               OptionalTensor expert_map) {
  AlignCall call("moe_lora_align_block_size");
  const Checks& check = call.check;
  call.ids(topk_ids, num_experts, block_size, expert_map);
  const int64_t tokens = topk_ids.size(0);
  check.dtype("token_lora_mapping", token_lora_mapping, {kInt32});
  check.last_contiguous("token_lora_mapping", token_lora_mapping);
  check.shape("token_lora_mapping", token_lora_mapping, &tokens, 1);
  const int64_t adapters = check.integer("max_loras", max_loras, 1);
  call.outputs(sorted_token_ids, expert_ids, num_tokens_post_pad, adapters);
  check.dtype("adapter_enabled", adapter_enabled, {kInt32, kBool8});
  check.last_contiguous("adapter_enabled", adapter_enabled);
  check.shape("adapter_enabled", adapter_enabled, &adapters, 1);
  check_devices(check, "topk_ids", topk_ids,
                {{"expert_map", expert_map},
                 {"token_lora_mapping", token_lora_mapping},
                 {"sorted_token_ids", sorted_token_ids},
                 {"expert_ids", expert_ids},
                 {"num_tokens_post_pad", num_tokens_post_pad},
                 {"adapter_enabled", adapter_enabled}});
  if (adapters > (1 << 20)) unsupported("more than 2^20 adapters");

  AlignParams p;
  p.adapters = true;
  p.adapter_of = reinterpret_cast<const int*>(address(token_lora_mapping));
  p.enabled = address(adapter_enabled);
  p.enabled_bytes = adapter_enabled.dtype().bits == 8;
  p.sorted_stride = sorted_token_ids.stride(0);
  p.experts_stride = expert_ids.stride(0);
  p.length_stride = num_tokens_post_pad.stride(0);
  call.launch(topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad, expert_map, p,
              static_cast<unsigned>(adapters));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_align_block_size, moe_align_block_size);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(moe_lora_align_block_size, moe_lora_align_block_size);

}  // namespace kestrel::moe
