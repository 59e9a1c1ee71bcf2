// The entry point of token_logprobs: logprob_rows for every call, then threshold_logprobs where a filter may need it.

#include <tvm/ffi/function.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "logprob_rows.cuh"
#include "split.h"

namespace kestrel::sampling {

void launch(LogprobParams p, DLDevice device) {
  const CountPerRow& k = p.top_k;
  const bool any_k = k.values != nullptr, has_k = !any_k && k.value > 0 && k.value < p.length;
  const int64_t largest_k = std::max<int64_t>(p.top_n, any_k ? kMaxK : has_k ? std::min<int64_t>(k.value, kMaxK) : 1);
  p.max_top_k = largest_k <= kMaxRankedK ? kMaxRankedK : kMaxK;
  Split split = split_for_top_k(p.length, p.num_rows, p.max_top_k, device, {});
  split.smem_bytes += sizeof(LogprobScratch) + 256 * TopKLayout(p.length, p.max_top_k).num_chunks;
  launch_split<logprob_rows>(p, p.num_rows, split, device, /*balanced=*/true);
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

// ids, ranks and logprobs are [rows]; top_ids and top_logprobs [rows, top_n] and contiguous.
void token_logprobs(TensorView logprobs, TensorView ranks, TensorView top_ids, TensorView top_logprobs,
                    TensorView logits, TensorView ids, OptionalTensor temperature, double temperature_value,
                    OptionalTensor top_k, int64_t top_k_value, OptionalTensor top_p, double top_p_value,
                    OptionalTensor min_p, double min_p_value, bool joint) {
  const Checks check("token_logprobs");
  check_rows(check, "logits", logits);
  const int64_t rows = logits.size(0);
  check.dtype("ids", ids, {kInt32, kInt64});
  check.rank("ids", ids, 1, 1);
  check.last_contiguous("ids", ids);
  check.shape("ids", ids, &rows, 1);
  check.same_device("ids", ids, "logits", logits);
  check.rank("top_ids", top_ids, 2, 2);
  const int64_t top_n = top_ids.size(1), shape[2] = {rows, top_n};
  if (top_n > logits.size(1)) {
    check.fail("top_n", "an integer <= " + std::to_string(logits.size(1)), std::to_string(top_n));
  }
  LogprobParams p;
  p.temperature =
      per_row(check, "temperature", temperature, static_cast<float>(temperature_value), "logits", logits, {kFloat32});
  p.top_k = count_per_row(check, "top_k", top_k, top_k_value, "logits", logits);
  p.top_p = per_row(check, "top_p", top_p, static_cast<float>(top_p_value), "logits", logits, {kFloat32});
  p.min_p = per_row(check, "min_p", min_p, static_cast<float>(min_p_value), "logits", logits, {kFloat32});
  check_result(check, "logprobs", logprobs, logits, kFloat32);
  check_result(check, "ranks", ranks, logits, kInt32);
  for (const auto& [name, t, dtype] :
       {std::tuple{"top_ids", top_ids, kInt32}, std::tuple{"top_logprobs", top_logprobs, kFloat32}}) {
    check.dtype(name, t, {dtype});
    check.shape(name, t, shape, 2);
    check.contiguous(name, t);
  }
  check_devices(check, "logits", logits,
                {{"logprobs", logprobs}, {"ranks", ranks}, {"top_ids", top_ids}, {"top_logprobs", top_logprobs}});
  if (rows == 0) return;
  if (rows > (1 << 27) || logits.size(1) > (1 << 30)) unsupported("more than 2^27 rows, or rows of more than 2^30");
  if (top_n > kMaxK) unsupported("kernels cover top_n up to 1024");
  const DeviceGuard guard(logits.device().device_id);
  p.rows = address(logits);
  p.row_bytes = logits.stride(0) * element_bytes(logits);
  p.num_rows = static_cast<int>(rows);
  p.dtype = row_dtype(logits);
  p.length = static_cast<int>(logits.size(1));
  p.joint = joint;
  p.tokens = address(ids);
  p.tokens_are_int64 = ids.dtype().bits == 64;
  p.top_n = static_cast<int>(top_n);
  p.logprobs = reinterpret_cast<float*>(address(logprobs));
  p.ranks = reinterpret_cast<int*>(address(ranks));
  p.top_ids = reinterpret_cast<int*>(address(top_ids));
  p.top_logprobs = reinterpret_cast<float*>(address(top_logprobs));
  launch(p, logits.device());
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(token_logprobs, token_logprobs);

}  // namespace kestrel::sampling
