// Entry points of routed experts: fused_experts, and the GEMMs of invoke_cute_moe_up and invoke_cute_moe_down.
#include "experts.cuh"

#include <kestrel/export.h>
#include <kestrel/launch.h>
#include <kestrel/tensor.h>

#include <algorithm>
#include <utility>

#include "experts_checks.h"
#include "experts_launch.h"
#include "experts_scratch.h"

namespace kestrel::moe {

// The table: tokens of a tile -> tile of a CTA. Two CTAs fill the shared memory of an SM with bytes in flight. More
// tokens take more weight rows, so that x is read less often.
// Arguments: tiles of 8 tokens, of 16 weight rows per warp, warps, stages, CTAs per SM.
using Tile8 = ExpertsTile<1, 1, 8, 6, 2>;
using Tile16 = ExpertsTile<2, 1, 8, 6, 2>;
using Tile32 = ExpertsTile<4, 2, 8, 3, 2>;
using Tile32Fp8 = ExpertsTile<4, 1, 8, 5, 2>;
using Tile64 = ExpertsTile<8, 4, 4, 2, 2>;
using Tile8Quantised = ExpertsTile<1, 1, 8, 5, 2, /*FOR_SMALL=*/false, Rows::quantised_here>;
using Tile8Small = ExpertsTile<1, 1, 8, 5, 1, /*FOR_SMALL=*/true>;
using Tile16Small = ExpertsTile<2, 1, 8, 5, 1, /*FOR_SMALL=*/true>;
using Tile32Small = ExpertsTile<4, 2, 8, 2, 1, /*FOR_SMALL=*/true>;
using Tile32Fp8Small = ExpertsTile<4, 1, 8, 4, 1, /*FOR_SMALL=*/true>;
using Tile8QuantisedSmall = ExpertsTile<1, 1, 8, 4, 1, /*FOR_SMALL=*/true, Rows::quantised_here>;

constexpr int kMuchSharedMemory = 160 * 1024;  // GPUs allow a CTA at least this much shared memory, or 99 KB
constexpr int64_t kFetchedBytes = 6 << 20;     // of weights, while the alignment runs
constexpr int64_t kTokensSummedByDown = 2;     // for more tokens a separate sum kernel is faster

// tile and blocks: of the alignment, blocks 0 without one; then a tile stands for both projections in one kernel.
// permutes: whether the call has positions_of_pairs. device: of CUDA.
int64_t fused_experts_scratch(int64_t tokens, int64_t pairs, int64_t inner, int64_t width, bool fp8, int64_t tile,
                              int64_t blocks, bool permutes, int64_t device) {
  if (tile && !blocks) return fused_scratch(pairs, inner, width);
  const bool wgmma = takes_wgmma(tile, fp8, {kDLCUDA, static_cast<int>(device)});
  return ExpertsScratch(tokens, pairs, wgmma ? tile * blocks : 0, inner, width, fp8, permutes).bytes;
}

int64_t multiprocessors(DLDevice device) { return device_attribute(cudaDevAttrMultiProcessorCount, device.device_id); }

template <typename W, Projection PROJECTION, bool IN_KERNEL, typename Tile>
void launch_experts(const ExpertsParams& p, int64_t tiles, DLDevice device) {
  constexpr int channels = ExpertsConfig<W, PROJECTION, IN_KERNEL, Tile>::channels;
  constexpr auto kernel = experts_kernel<W, PROJECTION, IN_KERNEL, Tile>;
  raise_shared_limit<kernel, Tile::shared_bytes>(device);
  const int64_t items = tiles * ((p.outputs + channels - 1) / channels);
  if (items > kLargest) unsupported("more than 2^30 tiles of tokens and outputs");
  const int64_t wave = Tile::ctas_per_sm * multiprocessors(device);
  const int unused = Tile::quantises ? kWidthQuantised / kScaleBlock - static_cast<int>(scale_blocks(p.width)) : 0;
  launch_pdl(kernel, dim3(static_cast<unsigned>(std::clamp<int64_t>(items, 1, wave))), dim3(Tile::threads), device, p,
             Tile::shared_bytes - unused * Tile::x_bytes);
}

template <typename W, Projection PROJECTION, bool IN_KERNEL, typename Tile, typename Small>
void launch_fitting(const ExpertsParams& p, int64_t tiles, DLDevice device) {
  static_assert(Small::shared_bytes <= kSmallSharedBytes, "a tile for little shared memory");
  const int limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device.device_id);
  if (limit < kMuchSharedMemory || KESTREL_EXPERTS_MMA_SYNC == 2) {
    launch_experts<W, PROJECTION, IN_KERNEL, Small>(p, tiles, device);
  } else {
    launch_experts<W, PROJECTION, IN_KERNEL, Tile>(p, tiles, device);
  }
}

// Whether the kernels quantise the rows of x that the CTAs group themselves.
bool quantises(const ExpertsParams& p) { return p.scale_rank > 0 && p.width <= kWidthQuantised; }

// tokens: of a tile, 8, 16, 32 or 64. IN_KERNEL: see experts_kernel.
template <typename W, Projection PROJECTION, bool IN_KERNEL>
void launch_tiles(const ExpertsParams& p, int tokens, int64_t tiles, DLDevice device) {
  if constexpr (IN_KERNEL && std::is_same_v<W, __nv_fp8_e4m3>) {
    if (tokens == 8 && quantises(p)) {
      return launch_fitting<W, PROJECTION, IN_KERNEL, Tile8Quantised, Tile8QuantisedSmall>(p, tiles, device);
    }
  }
  if (tokens == 8) return launch_fitting<W, PROJECTION, IN_KERNEL, Tile8, Tile8Small>(p, tiles, device);
  if constexpr (!IN_KERNEL) {
    if (tokens == 16) return launch_fitting<W, PROJECTION, IN_KERNEL, Tile16, Tile16Small>(p, tiles, device);
    if constexpr (std::is_same_v<W, __nv_fp8_e4m3>) {
      if (tokens == 32) return launch_fitting<W, PROJECTION, IN_KERNEL, Tile32Fp8, Tile32Fp8Small>(p, tiles, device);
    } else {
      if (tokens == 32) return launch_fitting<W, PROJECTION, IN_KERNEL, Tile32, Tile32Small>(p, tiles, device);
      if (tokens == 64) return launch_experts<W, PROJECTION, IN_KERNEL, Tile64>(p, tiles, device);
    }
  }
  unsupported("token tiles of " + std::to_string(tokens));
}

// Calls call(T()), where T is the element type of the weights.
template <typename F>
void dispatch_weight(DLDataType dtype, F call) {
  if (same_dtype(dtype, kBFloat16)) {
    call(__nv_bfloat16());
  } else if (same_dtype(dtype, kFloat16)) {
    call(__half());
  } else {
    call(__nv_fp8_e4m3());
  }
}

template <typename S>
void launch_sum(ExpertsSumParams p, DLDataType result, int64_t tokens, DLDevice device) {
  const int packs = p.outputs / Pack<S>::size;
  p.ctas_per_token = (packs + kSumThreads - 1) / kSumThreads;
  if (tokens * p.ctas_per_token > kLargest) unsupported("more than 2^30 CTAs");
  const auto kernel =
      same_dtype(result, kBFloat16) ? experts_sum_kernel<__nv_bfloat16, S> : experts_sum_kernel<__half, S>;
  launch_pdl(kernel, dim3(static_cast<unsigned>(tokens * p.ctas_per_token)), dim3(kSumThreads), device, p);
}

// Launches a projection of aligned pairs, in token tiles of `tokens`; by a wgmma kernel if `wgmma`.
void launch_sorted(const ExpertsParams& p, Projection projection, DLDataType weight, bool wgmma, int tokens,
                   int cluster, int64_t tiles, DLDevice device) {
  if (wgmma) return launch_experts_tma(p, projection, weight, tokens, cluster, tiles, device);
  if (cluster != 1) unsupported("clusters of tiles without wgmma");
  dispatch_weight(weight, [&](auto w) {
    if (projection == Projection::up) {
      launch_tiles<decltype(w), Projection::up, /*IN_KERNEL=*/false>(p, tokens, tiles, device);
    } else {
      launch_tiles<decltype(w), Projection::down, /*IN_KERNEL=*/false>(p, tokens, tiles, device);
    }
  });
}

// Tokens of a tile for alignment blocks of this size.
int tile_of_block(int64_t block_size, DLDataType weight, bool wgmma) {
  if (wgmma) return block_size % 128 ? 64 : 128;
  return static_cast<int>(std::min<int64_t>(block_size, same_dtype(weight, kFloat8E4M3) ? 32 : 64));
}

// Whether the rows fit into the 32-bit row offsets of experts_tma_kernel, in packs of 16 bytes.
bool fits_offsets(int64_t rows, int64_t stride) { return rows * (stride / 16) < int64_t{0xffffffff}; }

// Whether experts_tma_kernel covers the call: the device, the block size, and result rows of whole 16-byte packs.
bool fits_wgmma(const TensorView& out, int64_t row_bytes, int64_t block_size, DLDevice device) {
  return block_size >= kTokensOfWgmma && block_size % kTokensOfWgmma == 0 && aligned16(address(out)) &&
         row_bytes % 16 == 0 && has_wgmma(device);
}

// -- parameters -------------------------------------------------------------------------------------------------------

const float* floats(const TensorView& t) { return reinterpret_cast<const float*>(address(t)); }
const int* ints(const TensorView& t) { return reinterpret_cast<const int*>(address(t)); }

void set_routing(ExpertsParams* p, const TensorView& topk_ids, const OptionalTensor& topk_weights,
                 const OptionalTensor& expert_map, int64_t experts) {
  p->topk_ids = ints(topk_ids);
  p->ids_stride = topk_ids.stride(0);
  p->tokens = static_cast<int>(topk_ids.size(0));
  p->choices = static_cast<int>(topk_ids.size(1));
  p->experts = static_cast<int>(experts);
  if (topk_weights.has_value()) {
    p->topk_weights = floats(*topk_weights);
    p->topk_weights_stride = (*topk_weights).stride(0);
  }
  if (expert_map.has_value()) {
    const bool empty = (*expert_map).size(0) == 0;  // of no address, which would mean no map; nothing is read
    p->expert_map = ints(empty ? topk_ids : *expert_map);
    p->mapped_experts = static_cast<int>((*expert_map).size(0));
  }
}

// Returns how many tiles of `tokens` tokens the aligned pairs can fill.
int64_t set_aligned(ExpertsParams* p, const Aligned& aligned, int tokens) {
  p->sorted_pairs = ints(*aligned.sorted_token_ids);
  p->tile_experts = ints(*aligned.expert_ids);
  p->padded_pairs = ints(*aligned.num_tokens_post_pad);
  p->sorted_length = static_cast<int>(std::min((*aligned.sorted_token_ids).size(0), kLargest));
  p->blocks = static_cast<int>(std::min((*aligned.expert_ids).size(0), kLargest));
  if (aligned.block_size % tokens) unsupported("blocks that are not whole tiles of " + std::to_string(tokens));
  p->tiles_of_block = static_cast<int>(aligned.block_size / tokens);
  return p->blocks * int64_t{p->tiles_of_block};
}

void set_x(ExpertsParams* p, const char* x, int64_t stride, int64_t width, const float* scale = nullptr,
           int64_t scale_stride = 1) {
  p->x = x;
  p->x_stride = stride;
  p->width = static_cast<int>(width);
  p->x_scale = scale;
  p->x_scale_stride = scale_stride;
}

// w1 [E, 2I, K] alone, or two weights of [E, I, K].
void set_up_weight(ExpertsParams* p, const TensorView& w1, const OptionalTensor& w1_scale, const OptionalTensor& w2,
                   const OptionalTensor& w2_scale) {
  p->weight_stride = w1.stride(1) * element_bytes(w1);
  p->weight_low = address(w1);
  p->expert_stride_low = w1.stride(0) * element_bytes(w1);
  p->outputs = static_cast<int>(w2.has_value() ? w1.size(1) : w1.size(1) / 2);
  p->weight_high = w2.has_value() ? address(*w2) : p->weight_low + p->outputs * p->weight_stride;
  p->expert_stride_high = w2.has_value() ? (*w2).stride(0) * element_bytes(*w2) : p->expert_stride_low;
  if (!w1_scale.has_value()) return;
  const TensorView& scale = *w1_scale;
  p->scale_rank = scale.ndim();
  p->scale_expert_stride = scale.stride(0);
  p->scale_row_stride = scale.ndim() > 1 ? scale.stride(1) : 0;
  p->weight_scale_low = floats(scale);
  p->split_scales = w2.has_value();
  p->weight_scale_high =
      w2.has_value() ? floats(*w2_scale) : p->weight_scale_low + (scale.ndim() == 2 ? p->outputs * scale.stride(1) : 0);
}

void set_down_weight(ExpertsParams* p, const TensorView& w, const OptionalTensor& w_scale) {
  p->weight_stride = w.stride(1) * element_bytes(w);
  p->weight_low = address(w);
  p->weight_high = p->weight_low + 8 * p->weight_stride;
  p->expert_stride_low = p->expert_stride_high = w.stride(0) * element_bytes(w);
  p->outputs = static_cast<int>(w.size(1));
  if (!w_scale.has_value()) return;
  const TensorView& scale = *w_scale;
  p->scale_rank = scale.ndim();
  p->scale_expert_stride = scale.stride(0);
  p->scale_row_stride = scale.ndim() > 1 ? scale.stride(1) : 0;
  p->weight_scale_low = floats(scale);
  p->weight_scale_high = p->weight_scale_low + (scale.ndim() == 2 ? 8 * scale.stride(1) : 0);
}

// One launch covers two weights only if their scales have the same shape and strides.
void require_scales(const OptionalTensor& scale, const OptionalTensor& other) {
  if (!scale.has_value()) return;
  if ((*scale).ndim() == 3 && (*scale).size(2) > 1 && (*scale).stride(2) != 1) {
    unsupported("scales whose last dimension is not contiguous");
  }
  if (!other.has_value()) return;
  bool same = (*scale).ndim() == (*other).ndim();
  for (int i = 0; same && i < (*scale).ndim(); ++i) same = (*scale).stride(i) == (*other).stride(i);
  if (!same) unsupported("weights whose scales have different forms or strides");
}

// Zeroes the result: no kernel writes the rows of pairs that are in no block.
void clear(const TensorView& out, int64_t rows, int64_t row_stride, int64_t columns, DLDevice device) {
  const size_t bytes = element_bytes(out);
  check_cuda(cudaMemset2DAsync(address(out), row_stride * bytes, 0, columns * bytes, rows, current_stream(device)),
             "cudaMemset2DAsync");
}

// -- entry points -----------------------------------------------------------------------------------------------------

// With buffers for an alignment, which this writes, block_size is 8, 16, 32 or 64, and on Hopper also 128, or 160 for
// 16-bit weights. num_tokens_post_pad has counters, see align_for_experts. Without one the kernels group the pairs, at
// most 64, and block_size is the token tile. cluster: 1, or with blocks of 128 also 2, the CTAs that share weights
// (Hopper). 2 without an alignment: experts_fused_kernel, in tiles of 8 or 16 tokens. positions_of_pairs: a buffer of
// the alignment, if x shall be written to the positions of its pairs, in tiles of pipeline stages: FP8, blocks of 128.
void fused_experts(TensorView out, TensorView scratch, TensorView hidden, TensorView w1, TensorView w2,
                   TensorView topk_weights, TensorView topk_ids, OptionalTensor w1_scale, OptionalTensor w2_scale,
                   OptionalTensor expert_map, OptionalTensor sorted_token_ids, OptionalTensor expert_ids,
                   OptionalTensor num_tokens_post_pad, OptionalTensor positions_of_pairs, int64_t block_size,
                   int64_t cluster, AnyView activation) {
  const Checks check("fused_experts");
  const Gate gate = check_fused_experts(check, out, scratch, hidden, w1, w2, topk_weights, topk_ids, w1_scale, w2_scale,
                                        expert_map, activation);
  const int64_t tokens = hidden.size(0), width = hidden.size(1), experts = w1.size(0), inner = w1.size(1) / 2;
  const bool fp8 = same_dtype(w1.dtype(), kFloat8E4M3);
  const int64_t choices = topk_ids.size(1), pairs = tokens * choices;
  if (tokens == 0) return;
  if (choices == 0) unsupported("no choices");
  if (!same_dtype(topk_ids.dtype(), kInt32)) unsupported("ids that are not int32");
  require_sizes(hidden.dtype(), width, inner, pairs);
  require_packs("hidden", hidden);
  require_packs("w1", w1);
  require_packs("w2", w2);
  require_scales(w1_scale, {});
  require_scales(w2_scale, {});
  const bool in_kernel = !sorted_token_ids.has_value();
  const DLDevice device = hidden.device();
  const bool fused = in_kernel && cluster == 2;
  if (in_kernel && !fused && pairs > kMaxPairsInKernel) unsupported("more than 64 pairs that are not aligned");
  const bool wgmma = !in_kernel && takes_wgmma(block_size, fp8, device);
  const bool permutes = positions_of_pairs.has_value();
  if (permutes && !(fp8 && wgmma)) unsupported("positions of pairs without FP8 weights and tiles of wgmma");
  const int64_t positions = wgmma ? block_size * (*expert_ids).size(0) : 0;
  const ExpertsScratch parts(tokens, pairs, positions, inner, width, fp8, permutes);
  const int64_t needed = fused ? fused_scratch(pairs, inner, width) : parts.bytes;
  if (scratch.numel() * element_bytes(scratch) < needed) unsupported("too little scratch memory");
  char* const memory = address(scratch);
  if (reinterpret_cast<uintptr_t>(memory) % 16 != 0) unsupported("scratch memory that is not aligned to 16 bytes");
  const auto floats_at = [&](int64_t offset) { return reinterpret_cast<float*>(memory + offset); };
  const DeviceGuard guard(device.device_id);
  const Aligned aligned{sorted_token_ids, expert_ids, num_tokens_post_pad, block_size};
  if (!in_kernel) check_aligned(check, aligned, /*counters=*/2 + (*expert_ids).size(0));

  ExpertsParams up, down;
  set_routing(&up, topk_ids, {}, expert_map, experts);
  set_up_weight(&up, w1, w1_scale, {}, {});
  up.out = memory + parts.activated;
  up.out_stride = inner * (fp8 ? 4 : 2);
  up.gate = gate;
  up.evict_first = down.evict_first = are_read_once(pairs, experts, fp8);
  set_routing(&down, topk_ids, topk_weights, expert_map, experts);
  set_down_weight(&down, w2, w2_scale);
  down.out = address(out);
  down.out_stride = out.stride(0) * 2;
  down.partial = floats_at(parts.partial);
  down.routed_early = true;
  up.fp16_result = down.fp16_result = same_dtype(hidden.dtype(), kFloat16);
  set_x(&up, address(hidden), hidden.stride(0) * 2, width);
  set_x(&down, up.out, up.out_stride, inner);
  up.x_blocks = up.scale_rank == 3;
  down.x_blocks = fp8;
  if (fused) {
    down.partial = floats_at(0);
    return launch_experts_fused(up, down, w1.dtype(), static_cast<int>(block_size), device);
  }
  const int tile = static_cast<int>(block_size);
  const bool both = wgmma && cluster == 1;  // in one launch
  int64_t tiles = pairs;
  if (wgmma && !permutes && !fits_offsets(tokens, up.x_stride)) unsupported("rows of a tensor that lie 64 GiB apart");
  if (wgmma) {
    up.tiled_out = down.tiled_x = true;
    up.out_scale = floats_at(parts.scale);
    down.x_scale = up.out_scale;
  }
  up.routed_early = fp8 && wgmma;                  // the launch before it quantises x
  const bool rounds = wgmma && !down.fp16_result;  // results of experts, before they are summed; fp16 could overflow
  if (rounds) {
    down.out = memory + parts.partial;
    down.out_stride = width * 2;
    down.partial = nullptr;
  }
  const bool sums = in_kernel && tokens <= kTokensSummedByDown;
  if (sums) {
    up.arrivals = down.arrivals = reinterpret_cast<unsigned*>(memory + parts.arrivals);
    up.arrival_slices = static_cast<int>(width / 16);
  }
  if (!in_kernel) {
    tiles = set_aligned(&up, aligned, tile);
    set_aligned(&down, aligned, tile);
    // Tiles of several sizes, or tiles that others wait for: the CTAs take them in turn.
    if (both || !are_read_once(pairs, experts)) {
      up.tickets = reinterpret_cast<int*>(address(*num_tokens_post_pad)) + 1;
      down.tickets = up.tickets + 1;
    }
  }
  if (both && tile < 128 && !expert_map.has_value() && up.expert_stride_low >= 0) {
    const int64_t extent = (experts - 1) * up.expert_stride_low + (2 * inner - 1) * up.weight_stride + width;
    up.fetched = up.weight_low;
    up.fetched_bytes = std::min(kFetchedBytes, extent);
  }
  // Quantises the rows of a projection, unless its kernel does.
  const auto quantise = [&](auto t, ExpertsParams* p, int64_t rows, int64_t codes, int64_t scale) {
    if (!fp8 || p->tiled_x || (in_kernel && quantises(*p))) return;
    ExpertsQuantParams q;
    q.x = p->x;
    q.x_stride = p->x_stride;
    q.codes = memory + codes;
    q.scale = floats_at(scale);
    q.width = p->width;
    q.rows = rows;
    q.early = p == &up && !in_kernel;  // behind the alignment
    q.fetched = p->fetched;
    q.fetched_bytes = std::exchange(p->fetched_bytes, 0);
    q.row_warps = quant_row_warps(q.width / Pack<decltype(t)>::size, rows, device);
    set_x(p, q.codes, q.width, q.width, q.scale, p->x_blocks ? scale_blocks(q.width) : 1);
    const auto kernel =
        p->x_blocks ? experts_quant_kernel<decltype(t), true> : experts_quant_kernel<decltype(t), false>;
    const int64_t rows_of_cta = kQuantWarps / q.row_warps;
    launch_pdl(kernel, dim3(static_cast<unsigned>((rows + rows_of_cta - 1) / rows_of_cta)), dim3(kQuantThreads), device,
               q);
  };
  if (!in_kernel) {
    const int64_t mapped = expert_map.has_value() ? (*expert_map).size(0) : experts;
    align_for_experts(topk_ids, mapped, block_size, *sorted_token_ids, *expert_ids, *num_tokens_post_pad, expert_map,
                      positions_of_pairs, experts);
  }
  if (permutes) {
    permute_rows(&up, hidden.dtype(), tile, memory + parts.x_codes, floats_at(parts.x_scale), ints(*positions_of_pairs),
                 device);
  } else {
    dispatch_float(hidden, [&](auto t) { quantise(t, &up, tokens, parts.x_codes, parts.x_scale); });
  }
  const auto launch = [&](const ExpertsParams& p, auto projection) {
    if (!in_kernel) {
      return launch_sorted(p, projection.value, w1.dtype(), wgmma, tile, static_cast<int>(cluster), tiles, device);
    }
    dispatch_weight(w1.dtype(), [&](auto w) {
      launch_tiles<decltype(w), projection.value, /*IN_KERNEL=*/true>(p, tile, tiles, device);
    });
  };
  if (both) {
    up.ready = down.ready = reinterpret_cast<int*>(address(*num_tokens_post_pad)) + 3;
    launch_experts_both(up, down, w1.dtype(), tile, tiles, device);
  } else {
    launch(up, std::integral_constant<Projection, Projection::up>());
    quantise(float(), &down, pairs, parts.codes, parts.scale);
    launch(down, std::integral_constant<Projection, Projection::down>());
  }
  if (sums) return;
  ExpertsSumParams sum;
  sum.rows = rounds ? down.out : reinterpret_cast<const char*>(down.partial);
  sum.out = address(out);
  sum.out_stride = out.stride(0) * 2;
  sum.topk_ids = down.topk_ids;
  sum.ids_stride = down.ids_stride;
  sum.expert_map = down.expert_map;
  sum.choices = down.choices;
  sum.experts = down.experts;
  sum.mapped_experts = down.mapped_experts;
  sum.outputs = down.outputs;
  if (rounds) {
    launch_sum<__nv_bfloat16>(sum, out.dtype(), tokens, device);
  } else {
    launch_sum<float>(sum, out.dtype(), tokens, device);
  }
}

// y: [T * K, N], rows sorted by expert; positions: int32 [T * K], the row of each pair in y, or -1 if it has none.
// hidden, w1, w2 and topk_ids: the op's inputs, which `out` may not overlap.
void experts_gather_sum(TensorView out, TensorView y, TensorView positions, TensorView topk_weights, TensorView hidden,
                        TensorView w1, TensorView w2, TensorView topk_ids) {
  const Checks check("fused_experts");
  const int64_t tokens = topk_weights.size(0), choices = topk_weights.size(1);
  const int64_t rows[2] = {tokens * choices, kAny}, one[1] = {tokens * choices};
  check.dtype("y", y, {kBFloat16, kFloat16});
  check.shape("y", y, rows, 2);
  check.contiguous("y", y);
  check.dtype("positions", positions, {kInt32});
  check.shape("positions", positions, one, 1);
  check.contiguous("positions", positions);
  check.dtype("topk_weights", topk_weights, {kFloat32});
  check.last_contiguous("topk_weights", topk_weights);
  check_result(check, out, y.dtype(), {tokens, y.size(1)});
  check_memory(check, {{"hidden", hidden},
                       {"w1", w1},
                       {"w2", w2},
                       {"topk_weights", topk_weights},
                       {"topk_ids", topk_ids},
                       {"out", out, /*written=*/true}});
  if (tokens == 0 || choices == 0) return;
  require_sizes(y.dtype(), y.size(1), y.size(1), tokens * choices);
  require_packs("y", y);
  const DeviceGuard guard(y.device().device_id);
  ExpertsSumParams sum;
  sum.rows = address(y);
  sum.out = address(out);
  sum.out_stride = out.stride(0) * 2;
  sum.positions = ints(positions);
  sum.topk_weights = floats(topk_weights);
  sum.topk_weights_stride = topk_weights.stride(0);
  sum.choices = static_cast<int>(choices);
  sum.outputs = static_cast<int>(y.size(1));
  if (same_dtype(y.dtype(), kBFloat16)) {
    launch_sum<__nv_bfloat16>(sum, y.dtype(), tokens, y.device());
  } else {
    launch_sum<__half>(sum, y.dtype(), tokens, y.device());
  }
}

void check_operand(const Checks& check, const char* name, const TensorView& x, bool fp8) {
  if (fp8) {
    check.dtype(name, x, {kFloat8E4M3});
  } else {
    check.dtype(name, x, {kBFloat16, kFloat16, kFloat32});
  }
  check.rank(name, x, 2, 2);
  check.last_contiguous(name, x);
}

// One projection over an alignment; p has its routing and weights. out: `pairs` rows of `columns`.
void launch_aligned(ExpertsParams& p, Projection projection, const Aligned& aligned, const TensorView& x,
                    const OptionalTensor& x_scale, const TensorView& out, int64_t row_stride, int64_t pairs,
                    int64_t columns) {
  const bool fp8 = x_scale.has_value();
  set_x(&p, address(x), x.stride(0) * element_bytes(x), x.size(1), fp8 ? floats(*x_scale) : nullptr,
        fp8 ? (*x_scale).stride(0) : 1);
  p.out = address(out);
  p.out_stride = row_stride * 2;
  p.evict_first = are_read_once(pairs, p.experts, fp8);
  const bool wgmma =
      fits_wgmma(out, p.out_stride, aligned.block_size, x.device()) && fits_offsets(x.size(0), p.x_stride);
  const int tile = tile_of_block(aligned.block_size, x.dtype(), wgmma);
  const int64_t tiles = set_aligned(&p, aligned, tile);
  const DeviceGuard guard(x.device().device_id);
  clear(out, pairs, pairs > 1 ? row_stride : columns, columns, x.device());
  launch_sorted(p, projection, x.dtype(), wgmma, tile, /*cluster=*/1, tiles, x.device());
}

// FP8 operands have x_scale, w1_scale and w2_scale, and a bf16 result.
void invoke_moe_up(TensorView out, TensorView x, OptionalTensor x_scale, TensorView w1, OptionalTensor w1_scale,
                   OptionalTensor w2, OptionalTensor w2_scale, TensorView topk_ids, TensorView sorted_token_ids,
                   TensorView expert_ids, TensorView num_tokens_post_pad, int64_t block_size) {
  const bool fp8 = x_scale.has_value();
  const Checks check(fp8 ? "invoke_cute_moe_up_fp8" : "invoke_cute_moe_up");
  const char* x_name = fp8 ? "x_q" : "hidden_states";
  const Aligned aligned{sorted_token_ids, expert_ids, num_tokens_post_pad, block_size};
  check_operand(check, x_name, x, fp8);
  const int64_t tokens = x.size(0), width = x.size(1);
  check_routing(check, topk_ids, {}, tokens);
  check_aligned(check, aligned);
  check_weight(check, "w1", w1, x.dtype(), kAny, kAny, width);
  if (w2.has_value()) check_weight(check, "w2", *w2, x.dtype(), w1.size(0), w1.size(1), width);
  if (fp8) {
    const int64_t shape[2] = {tokens, 1};
    check.dtype("x_scale", *x_scale, {kFloat32});
    check.shape("x_scale", *x_scale, shape, 2);
    check_weight_scale(check, "w1_scale", w1_scale, w1);
    if (w2.has_value()) check_weight_scale(check, "w2_scale", w2_scale, *w2);
    if (!w2.has_value() && w2_scale.has_value()) check.fail("w2_scale", "None without w2", "scales");
  }
  const int64_t pairs = tokens * topk_ids.size(1), columns = w1.size(1) * (w2.has_value() ? 2 : 1);
  const DLDataType dtype = fp8 ? kBFloat16 : x.dtype();
  check_result(check, out, dtype, {pairs, columns});
  check_memory(check, {{x_name, x},
                       {"x_scale", x_scale},
                       {"w1", w1},
                       {"w1_scale", w1_scale},
                       {"w2", w2},
                       {"w2_scale", w2_scale},
                       {"topk_ids", topk_ids},
                       {"sorted_token_ids", sorted_token_ids},
                       {"expert_ids", expert_ids},
                       {"num_tokens_post_pad", num_tokens_post_pad},
                       {"out", out, /*written=*/true}});
  if (pairs == 0) return;
  if (columns % 32) unsupported("an I that is not a multiple of 16");
  require_sizes(x.dtype(), width, columns / 2, pairs);
  require_packs(x_name, x);
  require_packs("w1", w1);
  require_scales(w1_scale, w2_scale);
  if (w2.has_value()) {
    require_packs("w2", *w2);
    if ((*w2).stride(1) != w1.stride(1)) unsupported("w1 and w2 with different row strides");
  }
  ExpertsParams p;
  set_routing(&p, topk_ids, {}, {}, w1.size(0));
  set_up_weight(&p, w1, w1_scale, w2, w2_scale);
  launch_aligned(p, Projection::up, aligned, x, x_scale, out, out.stride(0), pairs, columns);
}

void invoke_moe_down(TensorView out, TensorView x, OptionalTensor x_scale, TensorView w3, OptionalTensor w3_scale,
                     TensorView topk_weights, TensorView topk_ids, TensorView sorted_token_ids, TensorView expert_ids,
                     TensorView num_tokens_post_pad, int64_t block_size) {
  const bool fp8 = x_scale.has_value();
  const Checks check(fp8 ? "invoke_cute_moe_down_fp8" : "invoke_cute_moe_down");
  const char* x_name = fp8 ? "x_q" : "moe_out";
  const Aligned aligned{sorted_token_ids, expert_ids, num_tokens_post_pad, block_size};
  check_operand(check, x_name, x, fp8);
  check.rank("topk_ids", topk_ids, 2, 2);
  check_routing(check, topk_ids, topk_weights, topk_ids.size(0));
  check_aligned(check, aligned);
  const int64_t tokens = topk_ids.size(0), choices = topk_ids.size(1), pairs = tokens * choices;
  const int64_t width = x.size(1), x_shape[2] = {pairs, width}, scale_shape[2] = {pairs, 1};
  check.shape(x_name, x, x_shape, 2);
  check_weight(check, "w3", w3, x.dtype(), kAny, kAny, width);
  if (fp8) {
    check.dtype("x_scale", *x_scale, {kFloat32});
    check.shape("x_scale", *x_scale, scale_shape, 2);
    check_weight_scale(check, "w3_scale", w3_scale, w3);
  }
  const DLDataType dtype = fp8 ? kBFloat16 : x.dtype();
  check_result(check, out, dtype, {tokens, choices, w3.size(1)});
  check_memory(check, {{x_name, x},
                       {"x_scale", x_scale},
                       {"w3", w3},
                       {"w3_scale", w3_scale},
                       {"topk_weights", topk_weights},
                       {"topk_ids", topk_ids},
                       {"sorted_token_ids", sorted_token_ids},
                       {"expert_ids", expert_ids},
                       {"num_tokens_post_pad", num_tokens_post_pad},
                       {"out", out, /*written=*/true}});
  if (pairs == 0) return;
  require_sizes(x.dtype(), width, w3.size(1), pairs);
  require_packs(x_name, x);
  require_packs("w3", w3);
  require_scales(w3_scale, {});
  if (tokens > 1 && choices > 1 && out.stride(0) != choices * out.stride(1))
    unsupported("an out whose pairs are not evenly spaced");
  ExpertsParams p;
  set_routing(&p, topk_ids, topk_weights, {}, w3.size(0));
  set_down_weight(&p, w3, w3_scale);
  const int64_t row_stride = choices > 1 ? out.stride(1) : out.stride(0);
  launch_aligned(p, Projection::down, aligned, x, x_scale, out, row_stride, pairs, w3.size(1));
}

KESTREL_EXPORT(experts_gather_sum, experts_gather_sum);
KESTREL_EXPORT(fused_experts, fused_experts);
KESTREL_EXPORT(fused_experts_scratch, fused_experts_scratch);
KESTREL_EXPORT(invoke_moe_up, invoke_moe_up);
KESTREL_EXPORT(invoke_moe_down, invoke_moe_down);

}  // namespace kestrel::moe
