// Sampling from probabilities or logits, filtered probabilities, and the k largest of long rows: the choice of kernels.
//
// short_rows.cuh      ids from rows of up to 4096 elements, k up to 128
// rejection_rows.cuh  ids from longer rows without top-k
// top_k_draw.cuh      ids from longer rows, k up to 1024
// threshold_rows.cuh  larger k, softmax and renormalisation
// topk_rows.cuh       the k largest of a row, sorted
// All compute what reference_sampling.py does, integer for integer: ids do not depend on the split of a row.

#include <kestrel/export.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>

#include "entry.h"
#include "rejection_rows.cuh"
#include "short_rows.cuh"
#include "split.h"
#include "threshold_rows.cuh"
#include "top_k_draw.cuh"
#include "topk_rows.cuh"

namespace kestrel::sampling {

// ---- the host -------------------------------------------------------------------------------------------------------

struct RejectionSplit : Split {
  FirstPass first_pass;
};

// filtered: top-p may reject proposals, which takes more passes over the row. The blocks then hold the row in shared
// memory if it fits; if it does not, and there are many rows, the first pass is `first_pass_of_many_rows`.
// stage_bytes: of a warp, where rows have windows.
RejectionSplit split_for_rejection(const Params& params, DLDevice device, bool filtered,
                                   FirstPass first_pass_of_many_rows, size_t stage_bytes, SplitRequest request) {
  const int64_t sms = num_sms(device), rows = params.num_rows;
  const size_t max_bytes = max_smem_bytes(device);
  const int chunk = kChunkTiles * kTile, chunks = (params.length + chunk - 1) / chunk;
  // Whole chunks per warp, and no idle warps.
  const auto split_into = [&](FirstPass first_pass, int cluster_size, int max_threads, bool copy_to_smem) {
    const int max_warps = cluster_size * (max_threads / 32);
    const int chunks_per_warp = (chunks + max_warps - 1) / max_warps;
    const int warps = std::max(1, (chunks + cluster_size * chunks_per_warp - 1) / (cluster_size * chunks_per_warp));
    const size_t own = sizeof(RejectionScratch) + AsyncExchange::bytes(cluster_size * warps) +
                       (first_pass == FirstPass::windowed ? sizeof(WindowList) + warps * stage_bytes : 0);
    const size_t copy =
        static_cast<size_t>(std::min(chunks, warps * chunks_per_warp)) * chunk * (params.dtype == kRowFloat32 ? 4 : 2);
    const bool fits = copy_to_smem && own + copy <= max_bytes;
    return RejectionSplit{{cluster_size, warps * 32, fits, own + (fits ? copy : 0)}, first_pass};
  };
  // Clusters of four and eight blocks do not fill all multiprocessors: those of a GPC need not be a multiple of four.
  const auto fit_in_one_wave = [&](int cluster_size) {
    return cluster_size * rows <= (cluster_size > 2 ? sms * 3 / 4 : sms);
  };
  if (!has_clusters(device)) request.cluster_size = 1;
  if (request.cluster_size || request.threads) {
    const int cluster_size = std::max(1, request.cluster_size);
    const FirstPass first_pass = cluster_size * rows > sms ? first_pass_of_many_rows : FirstPass::plain;
    const int most = max_threads(first_pass), threads = request.threads ? std::min(request.threads, most) : most;
    return split_into(first_pass, cluster_size, threads, filtered && first_pass == FirstPass::plain);
  }
  if (fit_in_one_wave(8)) return split_into(FirstPass::plain, 8, 512, filtered);
  for (int cluster_size = 4; filtered && cluster_size > 0; cluster_size /= 2) {
    const RejectionSplit split = split_into(FirstPass::plain, cluster_size, kPlainThreads, /*copy_to_smem=*/true);
    if (split.in_smem && fit_in_one_wave(cluster_size)) return split;
  }
  // Without shared memory two blocks share a multiprocessor, unless they are too few and read a row more than once.
  // Clusters of four then fill two thirds of the places for blocks, clusters of two half of them.
  const bool few = first_pass_of_many_rows == FirstPass::plain && filtered && rows <= sms;
  const int cluster_size = 3 * rows <= sms && !few ? 4 : 2 * rows <= sms ? 2 : 1;
  const int threads = few ? kPlainThreads : std::min(max_threads(first_pass_of_many_rows), kPlainThreads / 2);
  return split_into(first_pass_of_many_rows, cluster_size, threads, /*copy_to_smem=*/false);
}

template <Kind kind>
void launch_short_rows(const Params& params, DLDevice device) {
  const int threads = std::min(kShortThreads, (params.length + kTile - 1) / kTile * 32 + 32);
  launch_pdl(short_rows<kind>, dim3(static_cast<unsigned>(params.num_rows)), dim3(threads), device, params);
}

template <Kind kind>
void launch_rejection_rows(Params params, DLDevice device, SplitRequest request) {
  const bool filtered = params.top_p.values || params.top_p.value < 1.f;
  const int64_t bytes = int64_t{params.num_rows} * params.length * (params.dtype == kRowFloat32 ? 4 : 2);
  const bool in_l2 = bytes <= device_attribute(cudaDevAttrL2CacheSize, device.device_id);
  const FirstPass first_pass = filtered && !in_l2 ? FirstPass::windowed : FirstPass::plain;  // of many rows
  // Only for probabilities are proposals that a window does not decide summed one at a time.
  const size_t stage_bytes = kind == Kind::probs ? kAsyncBytes<kAsyncTiles> : 0;
  const RejectionSplit split = split_for_rejection(params, device, filtered, first_pass, stage_bytes, request);
  params.copy_to_smem = split.in_smem;
  constexpr int unit = kChunkTiles * kTile;
  if (!filtered) return launch_slices<rejection_rows<kind, FirstPass::only>>(params, split, unit, device);
  if (split.first_pass == FirstPass::plain) {
    launch_slices<rejection_rows<kind, FirstPass::plain>>(params, split, unit, device);
    return;
  }
  launch_slices<rejection_rows<kind, FirstPass::windowed>>(params, split, unit, device);
}

template <Kind kind>
void launch_top_k_draw(const Params& params, DLDevice device, SplitRequest request) {
  const Split split =
      split_for_top_k(params.length, params.num_rows, params.max_top_k, num_sms(device), has_clusters(device), request);
  launch_split<top_k_draw<kind>>(params, params.num_rows, split, device, /*balanced=*/true);
}

template <Kind kind>
void launch_threshold_rows(Params params, DLDevice device, SplitRequest request) {
  const Split split = split_for_search(params.length, params.num_rows, device, request);
  params.list_capacity = static_cast<int>(candidate_bytes(split.threads) / sizeof(float));
  if (split.in_smem) {
    launch_slices<threshold_rows<kind, Storage::shared>>(params, split, 8, device);
  } else {
    launch_slices<threshold_rows<kind, Storage::global>>(params, split, 8, device);
  }
}

// The kernels of a call. If top-k is a tensor with one value per row, all kernels of a line run, and each draws only
// the rows of its column:
//
//   rows            no top-k        k <= 128        k <= 1024       k > 1024
//   length <= 4096  short_rows      short_rows      threshold_rows  threshold_rows
//   longer          rejection_rows  top_k_draw      top_k_draw      threshold_rows
//   probabilities   threshold_rows  threshold_rows  threshold_rows  threshold_rows
template <Kind kind>
void launch_kind(Params params, DLDevice device, SplitRequest request) {
  const CountPerRow& k = params.top_k;
  if (!params.ids) return launch_threshold_rows<kind>(params, device, request);
  const bool any_k = k.values != nullptr;  // all columns of the table
  const bool no_top_k = any_k || k.value <= 0 || k.value >= params.length;
  if (params.length <= kShortRow) {
    params.largest_other_k = kMaxSmallK;
    if (no_top_k || k.value <= kMaxSmallK) launch_short_rows<kind>(params, device);
  } else {
    if (no_top_k) launch_rejection_rows<kind>(params, device, request);
    params.max_top_k = !any_k && k.value <= kMaxRankedK ? kMaxRankedK : kMaxK;
    params.largest_other_k = kMaxK;
    if (any_k || (!no_top_k && k.value <= kMaxK)) launch_top_k_draw<kind>(params, device, request);
  }
  if (any_k || (!no_top_k && k.value > params.largest_other_k)) launch_threshold_rows<kind>(params, device, request);
}

void launch(Params params, const TensorView& rows, bool logits, SplitRequest request) {
  const int64_t count = rows.size(0);
  if (count == 0) return;
  if (count > (1 << 27) || rows.size(1) > (1 << 30)) {
    unsupported("more than 2^27 rows, or rows of more than 2^30 entries");
  }
  const DeviceGuard guard(rows.device().device_id);
  params.rows = address(rows);
  params.row_bytes = rows.stride(0) * element_bytes(rows);
  params.num_rows = static_cast<int>(count);
  params.dtype = row_dtype(rows);
  params.length = static_cast<int>(rows.size(1));
  logits ? launch_kind<Kind::logits>(params, rows.device(), request)
         : launch_kind<Kind::probs>(params, rows.device(), request);
}

// ---- the entry points -----------------------------------------------------------------------------------------------

SplitRequest checked_split(const Checks& check, int64_t blocks, int64_t threads) {
  if (blocks < 0 || blocks > 8 || (blocks & (blocks - 1)) != 0) {
    check.fail("blocks", "0, 1, 2, 4 or 8", std::to_string(blocks));
  }
  if (threads < 0 || threads > kPlainThreads || threads % 32 != 0) {
    check.fail("threads", "a multiple of 32 up to " + std::to_string(kPlainThreads), std::to_string(threads));
  }
  return {static_cast<int>(blocks), static_cast<int>(threads)};
}

// Draws one id per row. logits: rows are logits, else probabilities. offset_stride: see OffsetPerRow. blocks, threads:
// see SplitRequest.
void sample(tvm::ffi::String op, TensorView ids, TensorView valid, TensorView rows, bool logits,
            OptionalTensor temperature, double temperature_value, OptionalTensor top_k, int64_t top_k_value,
            OptionalTensor top_p, double top_p_value, OptionalTensor min_p, double min_p_value, bool joint,
            OptionalTensor seed, int64_t seed_value, OptionalTensor offset, int64_t offset_value, int64_t offset_stride,
            int64_t blocks, int64_t threads) {
  const Checks check(op.c_str());
  const char* name = logits ? "logits" : "probs";
  check_rows(check, name, rows);
  Params p;
  p.temperature =
      per_row(check, "temperature", temperature, static_cast<float>(temperature_value), name, rows, {kFloat32});
  p.top_k = count_per_row(check, "top_k", top_k, top_k_value, name, rows);
  p.top_p = per_row(check, "top_p", top_p, static_cast<float>(top_p_value), name, rows, {kFloat32});
  p.min_p = per_row(check, "min_p", min_p, static_cast<float>(min_p_value), name, rows, {kFloat32});
  p.seed = per_row(check, "seed", seed, seed_value, name, rows, {kInt64});
  p.offset = offset_per_row(check, offset, offset_value, offset_stride, name, rows);
  check_result(check, "ids", ids, rows, kInt32);
  check_result(check, "valid", valid, rows, kBool);
  const SplitRequest request = checked_split(check, blocks, threads);
  check_devices(check, name, rows, {{"ids", ids}, {"valid", valid}});
  p.joint = joint;
  p.ids = reinterpret_cast<int*>(address(ids));
  p.valid = reinterpret_cast<bool*>(address(valid));
  launch(p, rows, logits, request);
}

// Writes float32 probabilities: softmax of logits, or probabilities renormalised after top-k or top-p.
void probabilities(tvm::ffi::String op, TensorView out, TensorView rows, bool logits, OptionalTensor temperature,
                   double temperature_value, OptionalTensor top_k, int64_t top_k_value, OptionalTensor top_p,
                   double top_p_value, int64_t blocks, int64_t threads) {
  const Checks check(op.c_str());
  const char* name = logits ? "logits" : "probs";
  check_rows(check, name, rows);
  Params p;
  p.temperature =
      per_row(check, "temperature", temperature, static_cast<float>(temperature_value), name, rows, {kFloat32});
  p.top_k = count_per_row(check, "top_k", top_k, top_k_value, name, rows);
  p.top_p = per_row(check, "top_p", top_p, static_cast<float>(top_p_value), name, rows, {kFloat32});
  check.dtype("out", out, {kFloat32});
  check.last_contiguous("out", out);
  check.same_shape("out", out, rows);
  check.disjoint("out", out);
  const SplitRequest request = checked_split(check, blocks, threads);
  check.no_overlap("out", out, name, rows, /*may_be_same=*/true);
  check.no_overlap("out", out, "temperature", temperature);
  check.no_overlap("out", out, "top_k", top_k);
  check.no_overlap("out", out, "top_p", top_p);
  check_devices(check, name, rows, {{"out", out}});
  p.out = reinterpret_cast<float*>(address(out));
  p.out_stride = out.stride(0);
  launch(p, rows, logits, request);
}

// The k largest of each row, sorted; values and indices are [rows, k] and contiguous.
void topk_rows_entry(TensorView scores, TensorView values, TensorView indices, bool softmax) {
  const Checks check("topk_fwd");
  check.dtype("scores", scores, {kBFloat16, kFloat16, kFloat32});
  check.rank("scores", scores, 2, 2);
  check.last_contiguous("scores", scores);
  check.rank("values", values, 2, 2);
  const int64_t k = values.size(1), rows = scores.size(0), shape[2] = {rows, k};
  check.at_least("k", static_cast<double>(k), 1);
  if (k > scores.size(1)) {
    check.fail("k", "at most the row length " + std::to_string(scores.size(1)), std::to_string(k));
  }
  for (const auto& [name, t, dtype] : {std::tuple{"values", values, scores.dtype()}, {"indices", indices, kInt32}}) {
    check.dtype(name, t, {dtype});
    check.shape(name, t, shape, 2);
    check.last_contiguous(name, t);
    if (t.stride(0) != k && rows > 1) check.fail(name, "a contiguous tensor", "stride " + std::to_string(t.stride(0)));
  }
  check_devices(check, "scores", scores, {{"values", values}, {"indices", indices}});
  if (rows == 0) return;
  const DLDevice device = scores.device();
  TopKParams p;
  p.max_top_k = k <= kMaxRankedK ? kMaxRankedK : kMaxK;
  if (k > kMaxK) unsupported("kernels cover k up to 1024");
  if (rows > (1 << 27) || scores.size(1) > (1 << 30)) {
    unsupported("more than 2^27 rows, or rows of more than 2^30 entries");
  }
  p.length = static_cast<int>(scores.size(1));
  const Split split = split_for_top_k(p.length, rows, p.max_top_k, num_sms(device), has_clusters(device), {});
  const DeviceGuard guard(device.device_id);
  p.rows = address(scores);
  p.row_bytes = scores.stride(0) * element_bytes(scores);
  p.dtype = row_dtype(scores);
  p.k = static_cast<int>(k);
  p.softmax = softmax;
  p.values = address(values);
  p.indices = reinterpret_cast<int*>(address(indices));
  launch_split<topk_rows>(p, rows, split, device, /*balanced=*/true);
}

KESTREL_EXPORT(sample, sample);
KESTREL_EXPORT(probabilities, probabilities);
KESTREL_EXPORT(topk_rows, topk_rows_entry);

}  // namespace kestrel::sampling
