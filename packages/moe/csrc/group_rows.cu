// What products of groups of rows need beside an alignment in blocks of 1: the token of each row, the row of each
// pair, and where the rows of each expert end.
//
// For some thousand to 65536 pairs of fused_experts through PyTorch's grouped GEMM. Latency-bound: one launch.
//
// Work: one thread per row, which is also the number of a pair. Rows ascend by expert, and those that no pair has are
// the last ones, so the thread at the start of a group writes the ends of all experts between it and the group before.
#include <kestrel/export.h>
#include <kestrel/launch.h>
#include <kestrel/tensor.h>
#include <kestrel/pdl.cuh>

#include <algorithm>

namespace kestrel::moe {

struct GroupRowsParams {
  const int *topk_ids = nullptr, *sorted_token_ids = nullptr, *expert_ids = nullptr;
  int *tokens = nullptr, *positions = nullptr, *ends = nullptr;
  int64_t ids_stride = 0;
  int pairs = 0, choices = 0, experts = 0;
};

constexpr int kGroupThreads = 256;

__global__ void __launch_bounds__(kGroupThreads) group_rows_kernel(const __grid_constant__ GroupRowsParams p) {
  const int row = blockIdx.x * kGroupThreads + threadIdx.x;
  pdl_wait();
  pdl_trigger();
  if (row >= p.pairs) return;
  const auto group_of = [&](int r) {  // rows that no pair has come last
    const int expert = p.expert_ids[r];
    return expert < 0 ? p.experts : expert;
  };
  const int pair = p.sorted_token_ids[row], group = group_of(row), before = row == 0 ? 0 : group_of(row - 1);
  p.tokens[row] = min(pair, p.pairs - 1) / p.choices;
  if (group < p.experts) p.positions[pair] = row;
  const int token = row / p.choices, id = p.topk_ids[token * p.ids_stride + (row - token * p.choices)];
  if (id < 0 || id >= p.experts) p.positions[row] = -1;  // of the pair of this number
  for (int e = before; e < group; ++e) p.ends[e] = row;
  for (int e = group; row == p.pairs - 1 && e < p.experts; ++e) p.ends[e] = p.pairs;
}

// topk_ids: int32 [T, K]. sorted_token_ids, expert_ids: int32 [T * K], of its alignment in blocks of 1. tokens,
// positions: int32 [T * K], of each row and of each pair, -1 for pairs without a row. ends: int32 [E].
void group_rows(TensorView topk_ids, TensorView sorted_token_ids, TensorView expert_ids, TensorView tokens,
                TensorView positions, TensorView ends) {
  const Checks check("fused_experts");
  check.dtype("topk_ids", topk_ids, {kInt32});
  check.rank("topk_ids", topk_ids, 2, 2);
  check.last_contiguous("topk_ids", topk_ids);
  const int64_t pairs = topk_ids.size(0) * topk_ids.size(1), any = kAny;
  const auto check_vector = [&](const char* name, const TensorView& t, const int64_t* size) {
    check.dtype(name, t, {kInt32});
    check.shape(name, t, size, 1);
    check.contiguous(name, t);
  };
  check_vector("sorted_token_ids", sorted_token_ids, &pairs);
  check_vector("expert_ids", expert_ids, &pairs);
  check_vector("tokens", tokens, &pairs);
  check_vector("positions", positions, &pairs);
  check_vector("ends", ends, &any);
  check_memory(check, {{"topk_ids", topk_ids},
                       {"sorted_token_ids", sorted_token_ids},
                       {"expert_ids", expert_ids},
                       {"tokens", tokens, /*written=*/true},
                       {"positions", positions, /*written=*/true},
                       {"ends", ends, /*written=*/true}});
  if (pairs == 0) unsupported("no pairs: no thread would write the ends of the groups");
  if (pairs > (1 << 30) || ends.size(0) > (1 << 30)) unsupported("more than 2^30 pairs or experts");
  const DeviceGuard guard(topk_ids.device().device_id);
  const auto ints = [](const TensorView& t) { return reinterpret_cast<int*>(address(t)); };
  GroupRowsParams p;
  p.topk_ids = ints(topk_ids);
  p.sorted_token_ids = ints(sorted_token_ids);
  p.expert_ids = ints(expert_ids);
  p.tokens = ints(tokens);
  p.positions = ints(positions);
  p.ends = ints(ends);
  p.ids_stride = topk_ids.stride(0);
  p.pairs = static_cast<int>(pairs);
  p.choices = static_cast<int>(topk_ids.size(1));
  p.experts = static_cast<int>(ends.size(0));
  const auto ctas = static_cast<unsigned>((pairs + kGroupThreads - 1) / kGroupThreads);
  launch_pdl(group_rows_kernel, dim3(ctas), dim3(kGroupThreads), topk_ids.device(), p);
}
KESTREL_EXPORT(group_rows, group_rows);

}  // namespace kestrel::moe
