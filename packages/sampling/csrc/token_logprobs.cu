// The entry points of token_logprobs, sample_with_logprobs and process_and_sample: logprob_rows for every call, then
// threshold_logprobs where a filter may need it.
//
// A draw and its log-probabilities take one launch if top-k is a number from 1 to kMaxK below the length of a row.
// Otherwise the two entry points that draw return false, and the caller launches the draw and token_logprobs.

#include <kestrel/export.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "history_arguments.h"
#include "logprob_ring.h"

namespace kestrel::sampling {

// Any row fits into the shared memory of every GPU: a call cannot fail after penalties are written.
static_assert(sizeof(TopKScratch) + sizeof(LogprobScratch) + TopKLayout(1 << 30, kMaxK).bytes() +
                  sizeof(ChunkSum) * kMaxChunks <=
              99 * 1024);

Split split_rows(LogprobParams& p, int64_t largest_k, const Gpu& gpu) {
  const int64_t sms = gpu.num_sms;
  p.max_top_k = std::max<int64_t>(p.top_n, largest_k) <= kMaxRankedK ? kMaxRankedK : kMaxK;
  SplitRequest request;
  if (p.num_rows > sms) {
    request = {1, kSelectThreads};  // two blocks on an SM, so that one loads during the other's epilogue
  } else if (2 * p.num_rows <= sms && 8 * 4 * p.num_rows > 7 * sms) {
    request.cluster_size = 2;  // clusters of four do not fill all SMs
  }
  Split split = split_for_top_k(p.length, p.num_rows, p.max_top_k, sms, gpu.capability >= 90, request);
  split.smem_bytes += sizeof(LogprobScratch) + sizeof(ChunkSum) * TopKLayout(p.length, p.max_top_k).num_chunks;
  return split;
}

template <bool draws>
void launch_rows(LogprobParams& p, int64_t largest_k, DLDevice device) {
  const Gpu gpu = gpu_of(device);
  const Split split = split_rows(p, largest_k, gpu);
  if (has_ring(p, split, gpu)) {
    launch_ring_rows(p, draws, split, device);
  } else {
    launch_split<logprob_rows<draws, /*processes=*/false, /*rings=*/false>>(p, p.num_rows, split, device,
                                                                            /*balanced=*/true);
  }
}

void launch(LogprobParams p, DLDevice device) {
  const CountPerRow& k = p.top_k;
  const bool any_k = k.values != nullptr, has_k = !any_k && k.value > 0 && k.value < p.length;
  launch_rows</*draws=*/false>(p, any_k ? kMaxK : has_k ? std::min<int64_t>(k.value, kMaxK) : 1, device);
  const bool has_p = p.top_p.values || p.top_p.value < 1.f || p.min_p.values || p.min_p.value > 0.f;
  if (!any_k && (has_k ? k.value <= kMaxK : !has_p)) return;
  const Split search = split_for_search(p.length, p.num_rows, device, {});
  p.list_capacity = static_cast<int>(candidate_bytes(search.threads) / sizeof(float));
  if (search.in_smem) {
    launch_slices<threshold_logprobs<Storage::shared>>(p, search, 8, device);
  } else {
    launch_slices<threshold_logprobs<Storage::global>>(p, search, 8, device);
  }
}

// ---- the entry points: results [rows], and top_ids and top_logprobs [rows, top_n], contiguous -----------------------

struct FilterArguments {
  OptionalTensor temperature;
  double temperature_value;
  OptionalTensor top_k;
  int64_t top_k_value;
  OptionalTensor top_p;
  double top_p_value;
  OptionalTensor min_p;
  double min_p_value;
};

void set_filters(const Checks& check, LogprobParams& p, const TensorView& logits, const FilterArguments& f) {
  const auto number = [&](const char* name, const OptionalTensor& values, double value) {
    return per_row(check, name, values, static_cast<float>(value), "logits", logits, {kFloat32});
  };
  p.temperature = number("temperature", f.temperature, f.temperature_value);
  p.top_k = count_per_row(check, "top_k", f.top_k, f.top_k_value, "logits", logits);
  p.top_p = number("top_p", f.top_p, f.top_p_value);
  p.min_p = number("min_p", f.min_p, f.min_p_value);
}

void check_top_n(const Checks& check, const TensorView& top_ids, const TensorView& logits) {
  check.rank("top_ids", top_ids, 2, 2);
  if (top_ids.size(1) > logits.size(1)) {
    check.fail("top_n", "an integer <= " + std::to_string(logits.size(1)), std::to_string(top_ids.size(1)));
  }
}

struct Results {
  TensorView logprobs, ranks, top_ids, top_logprobs;
};

void set_results(const Checks& check, LogprobParams& p, const TensorView& logits, const Results& r) {
  const int64_t shape[2] = {logits.size(0), r.top_ids.size(1)};
  check_result(check, "logprobs", r.logprobs, logits, kFloat32);
  check_result(check, "ranks", r.ranks, logits, kInt32);
  for (const auto& [name, t, dtype] :
       {std::tuple{"top_ids", r.top_ids, kInt32}, std::tuple{"top_logprobs", r.top_logprobs, kFloat32}}) {
    check.dtype(name, t, {dtype});
    check.shape(name, t, shape, 2);
    check.contiguous(name, t);
  }
  check_devices(
      check, "logits", logits,
      {{"logprobs", r.logprobs}, {"ranks", r.ranks}, {"top_ids", r.top_ids}, {"top_logprobs", r.top_logprobs}});
  p.top_n = static_cast<int>(shape[1]);
  p.logprobs = reinterpret_cast<float*>(address(r.logprobs));
  p.ranks = reinterpret_cast<int*>(address(r.ranks));
  p.top_ids = reinterpret_cast<int*>(address(r.top_ids));
  p.top_logprobs = reinterpret_cast<float*>(address(r.top_logprobs));
}

void set_rows(LogprobParams& p, const TensorView& logits) {
  if (logits.size(0) > (1 << 27) || logits.size(1) > (1 << 30)) {
    unsupported("more than 2^27 rows, or rows of more than 2^30 entries");
  }
  if (p.top_n > kMaxK) unsupported("kernels cover top_n up to 1024");
  p.rows = address(logits);
  p.row_bytes = logits.stride(0) * element_bytes(logits);
  p.num_rows = static_cast<int>(logits.size(0));
  p.dtype = row_dtype(logits);
  p.length = static_cast<int>(logits.size(1));
}

void token_logprobs(TensorView logprobs, TensorView ranks, TensorView top_ids, TensorView top_logprobs,
                    TensorView logits, TensorView ids, OptionalTensor temperature, double temperature_value,
                    OptionalTensor top_k, int64_t top_k_value, OptionalTensor top_p, double top_p_value,
                    OptionalTensor min_p, double min_p_value, bool joint) {
  const Checks check("token_logprobs");
  LogprobParams p;
  check_rows(check, "logits", logits);
  const int64_t rows = logits.size(0);
  check.dtype("ids", ids, {kInt32, kInt64});
  check.rank("ids", ids, 1, 1);
  check.last_contiguous("ids", ids);
  check.shape("ids", ids, &rows, 1);
  check.same_device("ids", ids, "logits", logits);
  check_top_n(check, top_ids, logits);
  set_filters(check, p, logits,
              {temperature, temperature_value, top_k, top_k_value, top_p, top_p_value, min_p, min_p_value});
  set_results(check, p, logits, {logprobs, ranks, top_ids, top_logprobs});
  if (rows == 0) return;
  set_rows(p, logits);
  p.joint = joint;
  p.tokens = address(ids);
  p.tokens_are_int64 = ids.dtype().bits == 64;
  const DeviceGuard guard(logits.device().device_id);
  launch(p, logits.device());
}

struct DrawArguments {
  bool joint, raw;  // raw: log-probabilities before temperature and filters
  OptionalTensor seed;
  int64_t seed_value;
  OptionalTensor offset;
  int64_t offset_value, offset_stride;
};

// Sets what a draw with log-probabilities needs.
void set_draw(const Checks& check, LogprobParams& p, const TensorView& logits, const TensorView& ids,
              const TensorView& valid, const Results& results, const FilterArguments& filters,
              const DrawArguments& draw) {
  check_rows(check, "logits", logits);
  set_filters(check, p, logits, filters);
  check_top_n(check, results.top_ids, logits);
  p.seed = per_row(check, "seed", draw.seed, draw.seed_value, "logits", logits, {kInt64});
  p.offset = offset_per_row(check, draw.offset, draw.offset_value, draw.offset_stride, "logits", logits);
  check_result(check, "ids", ids, logits, kInt32);
  check_result(check, "valid", valid, logits, kBool);
  check_devices(check, "logits", logits, {{"ids", ids}, {"valid", valid}});
  set_results(check, p, logits, results);
  if (logits.size(0) > 0) set_rows(p, logits);
  p.joint = draw.joint;
  p.raw = draw.raw;
  p.ids = reinterpret_cast<int*>(address(ids));
  p.valid = reinterpret_cast<bool*>(address(valid));
}

bool is_one_launch(const LogprobParams& p) {
  return !p.top_k.values && p.top_k.value >= 1 && p.top_k.value <= kMaxK && p.top_k.value < p.length;
}

// False, with nothing written, for calls that take several launches.
bool sample_with_logprobs(TensorView ids, TensorView valid, TensorView logprobs, TensorView ranks, TensorView top_ids,
                          TensorView top_logprobs, TensorView logits, OptionalTensor temperature,
                          double temperature_value, OptionalTensor top_k, int64_t top_k_value, OptionalTensor top_p,
                          double top_p_value, OptionalTensor min_p, double min_p_value, bool joint, bool raw,
                          OptionalTensor seed, int64_t seed_value, OptionalTensor offset, int64_t offset_value,
                          int64_t offset_stride) {
  const Checks check("sample_with_logprobs");
  LogprobParams p;
  set_draw(check, p, logits, ids, valid, {logprobs, ranks, top_ids, top_logprobs},
           {temperature, temperature_value, top_k, top_k_value, top_p, top_p_value, min_p, min_p_value},
           {joint, raw, seed, seed_value, offset, offset_value, offset_stride});
  if (logits.size(0) == 0) return true;
  if (!is_one_launch(p)) return false;
  const DeviceGuard guard(logits.device().device_id);
  launch_rows</*draws=*/true>(p, top_k_value, logits.device());
  return true;
}

// The same after process_logits in place: in one launch, or in two where shared memory has no room for a hash table of
// the history. What `logits` holds afterwards is not specified. For calls that take several launches everything is
// checked, process_logits is launched, and the result is false: the draw is not refused after that write.
bool process_and_sample(TensorView ids, TensorView valid, TensorView logprobs, TensorView ranks, TensorView top_ids,
                        TensorView top_logprobs, TensorView logits, OptionalTensor token_ids, OptionalTensor lengths,
                        OptionalTensor prompt_lengths, OptionalTensor repetition_penalty,
                        double repetition_penalty_value, OptionalTensor presence_penalty, double presence_penalty_value,
                        OptionalTensor frequency_penalty, double frequency_penalty_value, OptionalTensor bitmask,
                        OptionalTensor temperature, double temperature_value, OptionalTensor top_k, int64_t top_k_value,
                        OptionalTensor top_p, double top_p_value, OptionalTensor min_p, double min_p_value, bool joint,
                        bool raw, OptionalTensor seed, int64_t seed_value, OptionalTensor offset, int64_t offset_value,
                        int64_t offset_stride) {
  const Checks check("process_and_sample");
  StepParams p;
  check_rows(check, "logits", logits);
  set_history(check, p, logits,
              {token_ids, lengths, prompt_lengths, repetition_penalty, repetition_penalty_value, presence_penalty,
               presence_penalty_value, frequency_penalty, frequency_penalty_value});
  p.bitmask = bitmask_rows(check, bitmask, logits);
  check.disjoint("logits", logits);
  for (const auto& [name, tensor] :
       std::initializer_list<std::pair<const char*, const OptionalTensor&>>{{"token_ids", token_ids},
                                                                            {"lengths", lengths},
                                                                            {"prompt_lengths", prompt_lengths},
                                                                            {"repetition_penalty", repetition_penalty},
                                                                            {"presence_penalty", presence_penalty},
                                                                            {"frequency_penalty", frequency_penalty},
                                                                            {"bitmask", bitmask},
                                                                            {"temperature", temperature},
                                                                            {"top_k", top_k},
                                                                            {"top_p", top_p},
                                                                            {"min_p", min_p},
                                                                            {"seed", seed},
                                                                            {"offset", offset}}) {
    check.no_overlap("logits", logits, name, tensor);
  }
  set_draw(check, p, logits, ids, valid, {logprobs, ranks, top_ids, top_logprobs},
           {temperature, temperature_value, top_k, top_k_value, top_p, top_p_value, min_p, min_p_value},
           {joint, raw, seed, seed_value, offset, offset_value, offset_stride});
  if (logits.size(0) == 0) return true;
  const auto process_in_place = [&] {
    process_logits(logits, logits, token_ids, lengths, prompt_lengths, repetition_penalty, repetition_penalty_value,
                   presence_penalty, presence_penalty_value, frequency_penalty, frequency_penalty_value, {}, {},
                   bitmask);
  };
  if (!is_one_launch(p)) {
    process_in_place();
    return false;
  }
  drop_neutral_history(p);
  const DLDevice device = logits.device();
  const DeviceGuard guard(device.device_id);
  if (p.history.ids || p.bitmask.words) {
    const Gpu gpu = gpu_of(device);
    Split split = split_rows(p, top_k_value, gpu);
    const bool is_short = p.history.length <= kMaxHashed;
    if (is_short) p.hash_bits = hash_bits_for(std::min(p.history.length, p.length));
    const size_t table_bytes = p.history.ids ? size_t{8} << p.hash_bits : 0;
    if (has_ring(p, split, gpu)) {
      launch_ring_step(p, split, device);
      return true;
    }
    if (is_short && split.smem_bytes + table_bytes <= gpu.max_smem_bytes) {
      split.smem_bytes += table_bytes;
      launch_split<logprob_rows</*draws=*/true, /*processes=*/true, /*rings=*/false>>(p, p.num_rows, split, device,
                                                                                      /*balanced=*/true);
      return true;
    }
    process_in_place();
  }
  launch_rows</*draws=*/true>(p, top_k_value, device);
  return true;
}

// Blocks of a row, their threads, and whether a ring brings the rows, on a GPU like that. mask: an address, or 0 for
// calls without a bitmask. For tests.
tvm::ffi::Array<int64_t> logprob_split(int64_t rows, int64_t length, int64_t element_bytes, int64_t address,
                                       int64_t row_bytes, int64_t mask, int64_t mask_row_bytes, int64_t largest_k,
                                       int64_t sms, int64_t capability, int64_t max_smem) {
  StepParams p;
  p.num_rows = static_cast<int>(rows), p.length = static_cast<int>(length);
  p.dtype = element_bytes == 4 ? kRowFloat32 : kRowBFloat16;
  p.rows = reinterpret_cast<const char*>(address), p.row_bytes = row_bytes;
  p.bitmask = {reinterpret_cast<const char*>(mask), mask_row_bytes};
  const Gpu gpu = {sms, static_cast<int>(capability), static_cast<size_t>(max_smem)};
  const Split split = split_rows(p, largest_k, gpu);
  const bool ring = mask ? has_ring(p, split, gpu) : has_ring(static_cast<const LogprobParams&>(p), split, gpu);
  return {split.cluster_size, split.threads, int64_t{ring}};
}

KESTREL_EXPORT(token_logprobs, token_logprobs);
KESTREL_EXPORT(sample_with_logprobs, sample_with_logprobs);
KESTREL_EXPORT(process_and_sample, process_and_sample);
KESTREL_EXPORT(logprob_split, logprob_split);

}  // namespace kestrel::sampling
