// moe_align_block_size and moe_lora_align_block_size: (token, choice) pairs grouped by expert, in padded blocks.
//
// For 8 to 65536 pairs over 8 to 1024 and more experts. Latency-bound: the chain count, scan, scatter decides, and from
// some thousand pairs on the scattered 4-byte stores of one SM.
//
// Work: few pairs and experts take up to 32 CTAs that exchange nothing (align_independent.cuh). Others take a cluster
// of 16 or 8 CTAs, or one CTA: up to 1024 pairs, and always before sm_90 (align_cluster.cuh). AlignCall::launch is the
// table. moe_lora_align_block_size launches as many CTAs for each adapter.
#include <kestrel/export.h>
#include <kestrel/launch.h>
#include <kestrel/pdl.cuh>

#include "align_host.h"

namespace kestrel::moe {

// The largest cases of align_independent. With adapters the limit is lower, because every adapter counts all pairs.
constexpr int64_t kIndependentPairs = 8192, kIndependentPairsOfAdapters = 1024, kIndependentExperts = 256;
constexpr int kIndependentThreads = 512;  // half of them up to kFewPairs
constexpr int kFewPairs = 1024;
constexpr int kMinThreads = 256;  // of align_cluster

struct AlignParams {
  Alignment a;
  IndependentSplit split;
  const void* topk_ids = nullptr;
  int64_t token_stride = 0;  // in elements
  int k = 1;
  bool ids_int64 = false;
  bool ids_contiguous = true;
  bool has_adapters = false;                // one alignment for each
  const int* token_lora_mapping = nullptr;  // [tokens]
  const void* adapter_enabled = nullptr;    // [adapters]
  bool enabled_is_bool = false;             // int32 otherwise
  int64_t sorted_stride = 0;                // of an adapter, in elements, as those below
  int64_t expert_ids_stride = 0;
  int64_t num_post_pad_stride = 0;
};

// What a kernel is compiled for. plain: contiguous int32 ids, no adapters (align_independent: no expert map either).
enum class Ids { plain, any };

template <Ids IDS>
__device__ __forceinline__ int expert_of(const AlignParams& p, int pair, int adapter) {
  if constexpr (IDS == Ids::plain) {
    return static_cast<const int*>(p.topk_ids)[pair];
  } else {
    int64_t at = pair;
    if (!p.ids_contiguous || p.has_adapters) {
      const int token = pair / p.k;
      if (!p.ids_contiguous) at = token * p.token_stride + (pair - token * p.k);
      if (p.has_adapters && p.token_lora_mapping[token] != adapter) return -1;
    }
    if (!p.ids_int64) return static_cast<const int*>(p.topk_ids)[at];
    const int64_t id = static_cast<const int64_t*>(p.topk_ids)[at];
    return id >= 0 && id < p.a.num_experts ? static_cast<int>(id) : -1;
  }
}

// Points the outputs at those of an adapter; false if it is disabled.
__device__ __forceinline__ bool select_adapter(AlignParams& p, int adapter) {
  const bool enabled = p.enabled_is_bool ? static_cast<const unsigned char*>(p.adapter_enabled)[adapter] != 0
                                         : static_cast<const int*>(p.adapter_enabled)[adapter] != 0;
  p.a.sorted_token_ids += adapter * p.sorted_stride;
  p.a.expert_ids += adapter * p.expert_ids_stride;
  p.a.num_post_pad += adapter * p.num_post_pad_stride;
  return enabled;
}

template <Ids IDS>
__global__ void __launch_bounds__(kMaxThreads, 1) moe_align_cluster_kernel(AlignParams p) {
  extern __shared__ unsigned shared[];
  const ClusterAlignMemory memory(p.a, shared);
  const unsigned cta_rank = IDS == Ids::plain ? blockIdx.x : blockIdx.x % p.a.cluster_size;
  const int adapter = IDS == Ids::plain ? 0 : blockIdx.x / p.a.cluster_size;
  align_cluster_prologue(p.a, memory);
  pdl_wait();
  pdl_trigger();
  zero_counters(p.a);
  if (IDS == Ids::any && p.has_adapters && !select_adapter(p, adapter)) {
    if (p.a.cluster_size > 1) exchange_ready();  // every CTA of the cluster waits once
    return;
  }
  if (p.a.cluster_size == 1) fill_with_padding(p.a);
  constexpr int rounds = IDS == Ids::plain ? 8 : 4;  // what registers hold
  align_cluster<rounds>(p.a, memory, cta_rank, [&](int pair) { return expert_of<IDS>(p, pair, adapter); });
}

template <int PER_LANE, Ids IDS>
__global__ void __launch_bounds__(kIndependentThreads, 1) moe_align_independent_kernel(AlignParams p) {
  extern __shared__ unsigned shared[];
  const int cta_rank = IDS == Ids::plain ? blockIdx.x : blockIdx.x % p.split.ctas;
  const int adapter = IDS == Ids::plain ? 0 : blockIdx.x / p.split.ctas;
  if (IDS == Ids::plain) p.a.expert_map = nullptr;  // null already; the compiler drops the code for maps
  align_independent_prologue<PER_LANE>(p.split.rounds_per_cta, shared);
  pdl_wait();
  pdl_trigger();
  zero_counters(p.a);
  if (IDS == Ids::any && p.has_adapters && !select_adapter(p, adapter)) return;
  align_independent<PER_LANE>(p.a, p.split, shared, cta_rank,
                              [&](int pair) { return expert_of<IDS>(p, pair, adapter); });
}

constexpr DLDataType kBool8{kDLBool, 8, 1};
constexpr bool kWritten = true;

// The arguments that both ops share, checked in the order of their Python checks.
class AlignCall {
 public:
  explicit AlignCall(const char* op) : check(op) {}

  void check_inputs(const TensorView& ids, const AnyView& experts, const AnyView& block_size,
                    const OptionalTensor& map) {
    check.dtype("topk_ids", ids, {kInt32, kInt64});
    check.rank("topk_ids", ids, 2, 2);
    check.last_contiguous("topk_ids", ids);
    experts_ = check_count(check, "num_experts", experts);
    block_size_ = check_count(check, "block_size", block_size);
    check_map(check, map, experts_);
    pairs_ = ids.size(0) * ids.size(1);
  }

  // An int32 output [..., at least `least`], with `adapters` rows unless that is 0.
  void check_output(const char* name, const TensorView& t, int64_t adapters, int64_t least) const {
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

  void check_outputs(const TensorView& sorted_token_ids, const TensorView& expert_ids,
                     const TensorView& num_tokens_post_pad, int64_t adapters, int64_t counters = 0) const {
    const int64_t blocks = most_blocks(pairs_, experts_, block_size_), lengths = (adapters ? adapters : 1) + counters;
    check_output("sorted_token_ids", sorted_token_ids, adapters, blocks * block_size_);
    check_output("expert_ids", expert_ids, adapters, blocks);
    check_output("num_tokens_post_pad", num_tokens_post_pad, 0, lengths);
    check.shape("num_tokens_post_pad", num_tokens_post_pad, &lengths, 1);
  }

  // One alignment per adapter, or one in all; p holds the fields of adapters.
  void launch(const TensorView& ids, const TensorView& sorted_token_ids, const TensorView& expert_ids,
              const TensorView& num_tokens_post_pad, const OptionalTensor& map, AlignParams p,
              unsigned alignments) const {
    set_sizes(&p.a, pairs_, experts_, block_size_);
    p.a.sorted_token_ids = reinterpret_cast<int*>(address(sorted_token_ids));
    p.a.expert_ids = reinterpret_cast<int*>(address(expert_ids));
    p.a.num_post_pad = reinterpret_cast<int*>(address(num_tokens_post_pad));
    p.a.expert_map = reinterpret_cast<const int*>(address(map));
    p.a.num_positions = sorted_token_ids.size(-1);
    p.a.num_blocks = expert_ids.size(-1);
    p.topk_ids = address(ids);
    p.k = static_cast<int>(std::max<int64_t>(ids.size(1), 1));
    p.token_stride = ids.stride(0);
    p.ids_int64 = same_dtype(ids.dtype(), kInt64);
    p.ids_contiguous = ids.size(0) < 2 || ids.stride(0) == ids.size(1);
    const DLDevice device = ids.device();
    const DeviceGuard guard(device.device_id);
    const bool plain = p.ids_contiguous && !p.ids_int64 && !p.has_adapters;
    const bool few = pairs_ <= (p.has_adapters ? kIndependentPairsOfAdapters : kIndependentPairs);

    // The table: condition -> kernel. A wide cluster that this GPU does not run leaves the case to the next row.
    if (few && experts_ <= 64) return launch_independent<2>(p, plain && !p.a.expert_map, device, alignments);
    if (few && experts_ <= kIndependentExperts) {
      return launch_independent<8>(p, plain && !p.a.expert_map, device, alignments);
    }
    for (const int largest : {largest_cluster(device.device_id), kPortableCluster}) {
      split_cluster(&p.a, largest);
      if (plain ? launch_cluster<Ids::plain>(p, device, alignments) : launch_cluster<Ids::any>(p, device, alignments)) {
        return;
      }
    }
  }

  const Checks check;

 private:
  template <int PER_LANE>
  static void launch_independent(AlignParams& p, bool plain, DLDevice device, unsigned alignments) {
    const int threads = p.a.num_pairs > kFewPairs ? kIndependentThreads : kIndependentThreads / 2;
    p.split = split_independent(p.a, threads);
    const auto kernel =
        plain ? moe_align_independent_kernel<PER_LANE, Ids::plain> : moe_align_independent_kernel<PER_LANE, Ids::any>;
    launch_pdl(kernel, dim3(p.split.ctas * alignments), dim3(threads), device, p,
               4 * align_independent_words<PER_LANE>(p.split.rounds_per_cta));
  }

  // False if the GPU does not run so large a cluster.
  template <Ids IDS>
  static bool launch_cluster(const AlignParams& p, DLDevice device, unsigned alignments) {
    constexpr auto kernel = moe_align_cluster_kernel<IDS>;
    const bool wide = p.a.cluster_size > kPortableCluster;
    if (wide && !runs_wide_clusters<kernel, kMaxThreads>(device.device_id)) return false;
    const size_t bytes = shared_bytes(p.a);
    if (bytes > kDefaultSharedBytes) raise_shared_limit<kernel, kMaxSharedBytes>(device);
    launch_pdl(kernel, dim3(p.a.cluster_size * alignments), dim3(threads_for(p.a, kMinThreads, kMaxThreads)), device, p,
               bytes, p.a.cluster_size);
    return true;
  }

  int64_t experts_ = 0, block_size_ = 0, pairs_ = 0;
};

void moe_align_block_size(TensorView topk_ids, AnyView num_experts, AnyView block_size, TensorView sorted_token_ids,
                          TensorView expert_ids, TensorView num_tokens_post_pad, OptionalTensor expert_map) {
  AlignCall call("moe_align_block_size");
  call.check_inputs(topk_ids, num_experts, block_size, expert_map);
  call.check_outputs(sorted_token_ids, expert_ids, num_tokens_post_pad, /*adapters=*/0);
  check_memory(call.check, {{"topk_ids", topk_ids},
                            {"sorted_token_ids", sorted_token_ids, kWritten},
                            {"expert_ids", expert_ids, kWritten},
                            {"num_tokens_post_pad", num_tokens_post_pad, kWritten},
                            {"expert_map", expert_map}});
  call.launch(topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad, expert_map, {}, /*alignments=*/1);
}

// The same for fused_experts. num_tokens_post_pad: int32 [3 + blocks], the number, two counters of work items and
// one for each block, which are zeroed. positions: int32 [pairs], of each pair, not written for those that are dropped.
// The map also drops experts whose index is not below local_experts: a block then has weights.
void align_for_experts(TensorView topk_ids, AnyView num_experts, AnyView block_size, TensorView sorted_token_ids,
                       TensorView expert_ids, TensorView num_tokens_post_pad, OptionalTensor expert_map,
                       OptionalTensor positions, int64_t local_experts) {
  AlignCall call("moe_align_block_size");
  call.check_inputs(topk_ids, num_experts, block_size, expert_map);
  const int64_t counters = 2 + expert_ids.size(-1);
  call.check_outputs(sorted_token_ids, expert_ids, num_tokens_post_pad, /*adapters=*/0, counters);
  AlignParams p;
  p.a.counters = reinterpret_cast<int*>(address(num_tokens_post_pad)) + 1;
  p.a.num_counters = static_cast<int>(counters);
  p.a.num_mapped = static_cast<int>(std::min<int64_t>(local_experts, p.a.num_mapped));
  if (positions.has_value()) {
    call.check_output("positions", *positions, /*adapters=*/0, topk_ids.numel());
    p.a.positions = reinterpret_cast<int*>(address(*positions));
  }
  call.launch(topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad, expert_map, p, /*alignments=*/1);
}

void moe_lora_align_block_size(TensorView topk_ids, TensorView token_lora_mapping, AnyView num_experts,
                               AnyView block_size, AnyView max_loras, TensorView sorted_token_ids,
                               TensorView expert_ids, TensorView num_tokens_post_pad, TensorView adapter_enabled,
                               OptionalTensor expert_map) {
  AlignCall call("moe_lora_align_block_size");
  const Checks& check = call.check;
  call.check_inputs(topk_ids, num_experts, block_size, expert_map);
  const int64_t tokens = topk_ids.size(0);
  check.dtype("token_lora_mapping", token_lora_mapping, {kInt32});
  check.last_contiguous("token_lora_mapping", token_lora_mapping);
  check.shape("token_lora_mapping", token_lora_mapping, &tokens, 1);
  const int64_t adapters = check.integer("max_loras", max_loras, 1);
  call.check_outputs(sorted_token_ids, expert_ids, num_tokens_post_pad, adapters);
  check.dtype("adapter_enabled", adapter_enabled, {kInt32, kBool8});
  check.last_contiguous("adapter_enabled", adapter_enabled);
  check.shape("adapter_enabled", adapter_enabled, &adapters, 1);
  check_memory(check, {{"topk_ids", topk_ids},
                       {"token_lora_mapping", token_lora_mapping},
                       {"sorted_token_ids", sorted_token_ids, kWritten},
                       {"expert_ids", expert_ids, kWritten},
                       {"num_tokens_post_pad", num_tokens_post_pad, kWritten},
                       {"adapter_enabled", adapter_enabled},
                       {"expert_map", expert_map}});
  if (adapters > (1 << 20)) unsupported("more than 2^20 adapters");

  AlignParams p;
  p.has_adapters = true;
  p.token_lora_mapping = reinterpret_cast<const int*>(address(token_lora_mapping));
  p.adapter_enabled = address(adapter_enabled);
  p.enabled_is_bool = adapter_enabled.dtype().bits == 8;
  p.sorted_stride = sorted_token_ids.stride(0);
  p.expert_ids_stride = expert_ids.stride(0);
  p.num_post_pad_stride = num_tokens_post_pad.stride(0);
  call.launch(topk_ids, sorted_token_ids, expert_ids, num_tokens_post_pad, expert_map, p,
              static_cast<unsigned>(adapters));
}

KESTREL_EXPORT(align_for_experts, align_for_experts);
KESTREL_EXPORT(moe_align_block_size, moe_align_block_size);
KESTREL_EXPORT(moe_lora_align_block_size, moe_lora_align_block_size);

}  // namespace kestrel::moe
