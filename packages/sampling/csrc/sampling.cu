// Sampling from probabilities or logits, and probabilities of what a filter keeps: which kernel takes which row.
//
// Computes: reference_sampling.py, integer for integer. short_rows.cuh draws from rows of up to 4096 elements; from
//           longer ones draw_rows.cuh without top-k, few_rows.cuh for k up to 128. sample_rows.cuh does everything else
//           by a search for thresholds: larger k, rows that few_rows leaves, softmax and renormalisation. topk_rows.cuh
//           sorts the k largest.
// Built for: rows of 1 K to 256 K, from one row (latency) to 256 and more (bandwidth), warm in L2.
// Must move: a row once, 4 V bytes of float32; 10 to 20 instructions an element.
// Split:    a row per team of blocks (a cluster, with distributed shared memory, from sm_90 on), a contiguous piece per
//           warp. Sums are integers: ids do not depend on the split.
// Measured: the kernels' files, results/ and README.md.

#include <kestrel/check.h>
#include <kestrel/launch.h>
#include <kestrel/tensor.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <tuple>
#include <type_traits>

#include "draw_rows.cuh"
#include "few_rows.cuh"
#include "sample_rows.cuh"
#include "short_rows.cuh"
#include "topk_rows.cuh"

namespace kestrel::sampling {

// ---- the host -------------------------------------------------------------------------------------------------------

constexpr DLDataType kInt32{kDLInt, 32, 1};
constexpr DLDataType kInt64{kDLInt, 64, 1};
constexpr DLDataType kBool{kDLBool, 8, 1};

int row_dtype(const TensorView& rows) {
  if (same_dtype(rows.dtype(), kFloat32)) return kRowFloat32;
  return same_dtype(rows.dtype(), kFloat16) ? kRowFloat16 : kRowBFloat16;
}

struct Split {
  int blocks, threads;
  bool resident;
  size_t shared_bytes;
};

size_t list_bytes(int threads) { return kEntries * threads * sizeof(float); }

int warp_share(int length, int warps, int unit) { return ((length + warps - 1) / warps + unit - 1) / unit * unit; }

bool has_clusters(DLDevice device) {
  return device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id) >= 9;
}

int64_t processors(DLDevice device) { return device_attribute(cudaDevAttrMultiProcessorCount, device.device_id); }

// For sample_rows and topk_rows.
size_t shared_bytes(int length, int blocks, int threads, bool resident) {
  const int warps = threads / 32;
  const size_t held = resident ? static_cast<size_t>(warp_share(length, blocks * warps, 8)) * warps * sizeof(float) : 0;
  return sizeof(Scratch) + Exchange::bytes(blocks * warps) + list_bytes(threads) + held;
}

Split split_to_search(int length, int64_t rows, DLDevice device, int blocks, int threads) {
  const size_t most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device.device_id);
  if (!has_clusters(device)) blocks = 1;
  if (length <= kShortRow) {
    if (!blocks) blocks = 1;
    if (!threads) threads = std::min(kSearchThreads, (length + 127) / 128 * 32);
  }
  // A row alone: all there is. Many rows: one block each where that can hold a row, else blocks that share a processor.
  const bool few = rows * 8 <= processors(device);
  const bool fits = shared_bytes(length, 1, kSearchThreads, true) <= most;
  if (!blocks) blocks = !few && fits ? 1 : 8;
  if (!threads) threads = kSearchThreads;
  threads = std::clamp(threads, kGuessers, kSearchThreads);
  const bool resident = shared_bytes(length, blocks, threads, true) <= most;
  return {blocks, threads, resident, shared_bytes(length, blocks, threads, resident)};
}

// How draw_rows shares out a row. filtered: ids are judged, which takes more passes over it, so that blocks keep their
// elements where that is possible; where it is not, and rows are many, they look out (looks_out) for the likely ids.
Split split_to_draw(const Params& params, DLDevice device, bool filtered, int blocks, int threads, bool* looks_out) {
  const int64_t all = processors(device), rows = params.count;
  const size_t most_bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device.device_id);
  const int chunk = kChunkTiles * kTile, chunks = (params.length + chunk - 1) / chunk;
  // Whole chunks to each warp, and no warp without.
  const auto split_to = [&](int blocks, int most, bool keeps) {
    const int each = (chunks + blocks * (most / 32) - 1) / (blocks * (most / 32));
    const int warps = std::max(1, (chunks + blocks * each - 1) / (blocks * each));
    const size_t own = sizeof(DrawScratch) + Mail::bytes(blocks * warps);
    const size_t kept =
        static_cast<size_t>(std::min(chunks, warps * each)) * chunk * (params.dtype == kRowFloat32 ? 4 : 2);
    const bool fits = keeps && own + kept <= most_bytes;
    return Split{blocks, warps * 32, fits, own + (fits ? kept : 0)};
  };
  if (!has_clusters(device)) blocks = 1;
  // Clusters of four and eight blocks do not fill all multiprocessors.
  const auto fit_at_once = [&](int blocks) { return blocks * rows <= (blocks > 2 ? all * 3 / 4 : all); };
  *looks_out = false;
  if (blocks || threads) {
    *looks_out = std::max(1, blocks) * rows > all;
    const int most = *looks_out ? kThreadsOfSharers : kThreadsAlone;
    return split_to(blocks ? blocks : 1, threads ? std::min(threads, most) : most, filtered && !*looks_out);
  }
  if (fit_at_once(8)) return split_to(8, 512, filtered);
  for (blocks = 4; filtered && blocks > 0; blocks /= 2) {
    const Split split = split_to(blocks, kThreadsAlone, true);
    if (split.resident && fit_at_once(blocks)) return split;
  }
  *looks_out = true;
  return split_to(3 * rows <= all ? 4 : 2 * rows <= all ? 2 : 1, kThreadsOfSharers, false);
}

Split split_to_list(int length, int64_t rows, DLDevice device, int blocks) {
  if (!blocks) {
    blocks = rows * 8 <= processors(device) ? 8 : rows <= processors(device) / 3 ? 4 : 2;
  }
  if (!has_clusters(device)) blocks = 1;
  return {blocks, kFewThreads, false, sizeof(FewScratch) + Exchange::bytes(blocks * kFewThreads / 32)};
}

// Raises the limit of a kernel's shared memory, once per device.
template <auto kernel>
void allow_shared_memory(DLDevice device) {
  static std::atomic<uint64_t> done{0};
  const uint64_t bit = uint64_t{1} << (device.device_id & 63);
  if (done.load(std::memory_order_relaxed) & bit) return;
  const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device.device_id);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), "cudaFuncSetAttribute");
  done.fetch_or(bit);
}

template <typename F>
void dispatch_bool(bool value, F call) {
  value ? call(std::true_type()) : call(std::false_type());
}

template <auto kernel>
void launch_teams(Params params, int64_t rows, const Split& split, int unit, DLDevice device) {
  params.blocks = split.blocks;
  params.per_warp = warp_share(params.length, split.blocks * split.threads / 32, unit);
  params.list_size = static_cast<int>(list_bytes(split.threads) / sizeof(float));
  params.held = split.resident;
  allow_shared_memory<kernel>(device);
  launch_pdl(kernel, dim3(static_cast<unsigned>(rows * split.blocks)), dim3(split.threads), device, params,
             split.shared_bytes, split.blocks);
}

template <Kind kind>
void launch_short(const Params& params, DLDevice device) {
  const int threads = std::min(kShortThreads, (params.length + kTile - 1) / kTile * 32 + 32);
  launch_pdl(short_rows<kind>, dim3(static_cast<unsigned>(params.count)), dim3(threads), device, params);
}

template <Kind kind>
void launch_kind(const Params& params, DLDevice device, int blocks, int threads) {
  const int64_t rows = params.count;
  const CountPerRow& k = params.top_k;
  const bool draws = params.ids != nullptr, every = k.number <= 0 || k.number >= params.length;  // no top-k
  bool few = draws && (k.values || k.number <= kFew);
  if (draws && params.length <= kShortRow) {
    if (k.values || every || few) launch_short<kind>(params, device);
    if (!k.values && (every || few)) return;
  } else if (draws && (k.values || every)) {
    bool looks_out;
    const bool filtered = params.top_p.values || params.top_p.number < 1.f;
    const Split split = split_to_draw(params, device, filtered, blocks, threads, &looks_out);
    dispatch_bool(looks_out, [&](auto looks_out) {
      launch_teams<draw_rows<kind, looks_out.value>>(params, rows, split, kChunkTiles * kTile, device);
    });
    if (!k.values) return;
  }
  if (few && params.length > kShortRow) {
    const Split split = split_to_list(params.length, rows, device, blocks);
    launch_teams<few_rows<kind>>(params, rows, split, 4 * kTile, device);
  }
  Params searching = params;
  searching.left = few;  // mostly none: blocks that end at once should be few
  if (few && !blocks && rows * 8 > processors(device)) blocks = 1;
  const Split split = split_to_search(params.length, rows, device, blocks, threads);
  dispatch_bool(split.resident, [&](auto resident) {
    launch_teams<sample_rows<kind, resident.value>>(searching, rows, split, 8, device);
  });
}

void launch(Params params, const TensorView& rows, bool logits, int blocks, int threads) {
  const int64_t count = rows.size(0);
  if (count == 0) return;
  if (count > (1 << 27) || rows.size(1) > (1 << 30)) unsupported("more than 2^27 rows, or rows of more than 2^30");
  const DeviceGuard guard(rows.device().device_id);
  params.rows = address(rows);
  params.row_bytes = rows.stride(0) * element_bytes(rows);
  params.count = static_cast<int>(count);
  params.dtype = row_dtype(rows);
  params.length = static_cast<int>(rows.size(1));
  logits ? launch_kind<Kind::logits>(params, rows.device(), blocks, threads)
         : launch_kind<Kind::probs>(params, rows.device(), blocks, threads);
}

// -- checks, in the order and with the words of the Python ones
// --------------------------------------------------------

void check_rows(const Checks& check, const char* name, const TensorView& rows) {
  check.dtype(name, rows, {kBFloat16, kFloat16, kFloat32});
  check.rank(name, rows, 2, 2);
  check.last_contiguous(name, rows);
  if (rows.size(1) == 0) check.fail(name, "at least one entry per row", "shape " + shape_text(rows.shape().data(), 2));
}

template <typename N>
PerRow<N> per_row(const Checks& check, const char* name, const OptionalTensor& values, N number, const char* rows_name,
                  const TensorView& rows, std::initializer_list<DLDataType> dtypes) {
  PerRow<N> parameter;
  parameter.number = number;
  if (!values.has_value()) return parameter;
  const TensorView t = *values;
  check.dtype(name, t, dtypes);
  check.rank(name, t, 1, 1);
  check.last_contiguous(name, t);
  const int64_t wanted = t.size(0) == 1 ? 1 : rows.size(0);
  check.shape(name, t, &wanted, 1);
  check.same_device(name, t, rows_name, rows);
  parameter.values = address(t);
  parameter.step = t.size(0) == 1 ? 0 : 1;
  return parameter;
}

CountPerRow count_per_row(const Checks& check, const OptionalTensor& top_k, int64_t number, const char* rows_name,
                          const TensorView& rows) {
  CountPerRow parameter;
  static_cast<PerRow<int64_t>&>(parameter) = per_row(check, "top_k", top_k, number, rows_name, rows, {kInt32, kInt64});
  parameter.wide = !top_k.has_value() || (*top_k).dtype().bits == 64;
  return parameter;
}

void check_result(const Checks& check, const char* name, const TensorView& t, const TensorView& rows,
                  DLDataType dtype) {
  check.dtype(name, t, {dtype});
  const int64_t count = rows.size(0);
  check.shape(name, t, &count, 1);
  check.last_contiguous(name, t);
}

// No two rows of a tensor to write share memory.
void check_rows_apart(const Checks& check, const char* name, const TensorView& t) {
  if (t.size(0) > 1 && std::abs(t.stride(0)) < t.size(1)) {
    check.fail(name, "a tensor to write whose elements do not share memory",
               "strides " + shape_text(t.strides().data(), 2));
  }
}

// blocks and threads of a row, as an experiment may ask for them.
void check_split(const Checks& check, int64_t blocks, int64_t threads) {
  if (blocks < 0 || blocks > 8 || (blocks & (blocks - 1)) != 0) {
    check.fail("blocks", "0, 1, 2, 4 or 8", std::to_string(blocks));
  }
  if (threads < 0 || threads > kThreadsAlone || threads % 32 != 0) {
    check.fail("threads", "a multiple of 32 up to " + std::to_string(kThreadsAlone), std::to_string(threads));
  }
}

// Draws one id per row. logits: rows are logits, else probabilities. blocks, threads: of a row; 0 lets the host choose,
// and no choice changes an id.
void sample(tvm::ffi::String op, TensorView ids, TensorView valid, TensorView rows, bool logits,
            OptionalTensor temperature, double temperature_value, OptionalTensor top_k, int64_t top_k_value,
            OptionalTensor top_p, double top_p_value, OptionalTensor min_p, double min_p_value, bool joint,
            OptionalTensor seed, int64_t seed_value, OptionalTensor offset, int64_t offset_value, int64_t blocks,
            int64_t threads) {
  const Checks check(op.c_str());
  const char* name = logits ? "logits" : "probs";
  check_rows(check, name, rows);
  Params p;
  p.temperature =
      per_row(check, "temperature", temperature, static_cast<float>(temperature_value), name, rows, {kFloat32});
  p.top_k = count_per_row(check, top_k, top_k_value, name, rows);
  p.top_p = per_row(check, "top_p", top_p, static_cast<float>(top_p_value), name, rows, {kFloat32});
  p.min_p = per_row(check, "min_p", min_p, static_cast<float>(min_p_value), name, rows, {kFloat32});
  p.seed = per_row(check, "seed", seed, seed_value, name, rows, {kInt64});
  p.offset = per_row(check, "offset", offset, offset_value, name, rows, {kInt64});
  check_result(check, "ids", ids, rows, kInt32);
  check_result(check, "valid", valid, rows, kBool);
  check_split(check, blocks, threads);
  check_devices(check, name, rows, {{"ids", ids}, {"valid", valid}});
  p.joint = joint;
  p.ids = reinterpret_cast<int*>(address(ids));
  p.valid = reinterpret_cast<bool*>(address(valid));
  launch(p, rows, logits, static_cast<int>(blocks), static_cast<int>(threads));
}

// Writes float32 probabilities: softmax of logits, or what top-k or top-p keeps of probabilities, divided by its sum.
void probabilities(tvm::ffi::String op, TensorView out, TensorView rows, bool logits, OptionalTensor temperature,
                   double temperature_value, OptionalTensor top_k, int64_t top_k_value, OptionalTensor top_p,
                   double top_p_value, int64_t blocks, int64_t threads) {
  const Checks check(op.c_str());
  const char* name = logits ? "logits" : "probs";
  check_rows(check, name, rows);
  Params p;
  p.temperature =
      per_row(check, "temperature", temperature, static_cast<float>(temperature_value), name, rows, {kFloat32});
  p.top_k = count_per_row(check, top_k, top_k_value, name, rows);
  p.top_p = per_row(check, "top_p", top_p, static_cast<float>(top_p_value), name, rows, {kFloat32});
  check.dtype("out", out, {kFloat32});
  check.last_contiguous("out", out);
  check.same_shape("out", out, rows);
  check_rows_apart(check, "out", out);
  check_split(check, blocks, threads);
  check_devices(check, name, rows, {{"out", out}});
  p.out = reinterpret_cast<float*>(address(out));
  p.out_step = out.stride(0);
  launch(p, rows, logits, static_cast<int>(blocks), static_cast<int>(threads));
}

// The k largest of each row in order; values and indices are [rows, k] and contiguous.
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
  if (k > kMostK || rows > (1 << 27) || scores.size(1) > (1 << 30)) unsupported("kernels cover k up to 1024");
  const DLDevice device = scores.device();
  const DeviceGuard guard(device.device_id);
  TopKParams p;
  p.rows = address(scores);
  p.row_bytes = scores.stride(0) * element_bytes(scores);
  p.dtype = row_dtype(scores);
  p.length = static_cast<int>(scores.size(1));
  const Split split = split_to_search(p.length, rows, device, 0, kSortThreads);
  p.blocks = split.blocks;
  p.per_warp = warp_share(p.length, split.blocks * split.threads / 32, 8);
  p.list_size = static_cast<int>(list_bytes(split.threads) / sizeof(float));
  p.k = static_cast<int>(k);
  p.softmax = softmax;
  p.values = address(values);
  p.indices = reinterpret_cast<int*>(address(indices));
  dispatch_bool(split.resident, [&](auto r) {
    constexpr auto kernel = topk_rows<r.value>;
    allow_shared_memory<kernel>(device);
    launch_pdl(kernel, dim3(static_cast<unsigned>(rows * split.blocks)), dim3(split.threads), device, p,
               split.shared_bytes, split.blocks);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sample, sample);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(probabilities, probabilities);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(topk_rows, topk_rows_entry);

}  // namespace kestrel::sampling
