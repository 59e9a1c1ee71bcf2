// Speculative sampling along a chain of draft tokens: which are accepted, and the token after them, in one launch.
//
// Every block of a row's cluster decides all draft tokens of the row. The cluster then draws the last token from the
// positive part of target - draft, or from the target: each warp sums the masses of a contiguous slice of the row, in
// up to 32 groups, and the warp whose slice has the drawn point reads one group again (reference_speculative.py).

#include <kestrel/export.h>

#include <algorithm>
#include <string>
#include <tuple>

#include "entry.h"
#include "row_slice.cuh"

namespace kestrel::sampling {

constexpr int kChainThreads = 512;
constexpr int kChainTiles = 4;  // that a warp loads together

struct ChainParams {
  const char *draft = nullptr, *target = nullptr, *tokens = nullptr;  // draft: null for tokens without probabilities
  int64_t draft_row_bytes = 0, draft_step_bytes = 0, target_row_bytes = 0, target_step_bytes = 0, tokens_row_bytes = 0;
  int draft_dtype = kRowFloat32, target_dtype = kRowFloat32;
  bool tokens_are_int64 = false;
  int steps = 0, length = 0;  // draft tokens of a row, entries of a position
  int cluster_size = 1, elements_per_warp = 0;
  int *accepted = nullptr, *emitted = nullptr, *ids = nullptr;
  bool* valid = nullptr;
  PerRow<int64_t> seed;
  OffsetPerRow offset;
};

__device__ __forceinline__ float element_of(const char* row, int dtype, int64_t i) {
  if (dtype == kRowFloat32) return reinterpret_cast<const float*>(row)[i];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[i];
  return dtype == kRowFloat16 ? __half2float(__ushort_as_half(bits)) : __uint_as_float(static_cast<u32>(bits) << 16);
}

// The distribution that the last token is drawn from: target, or target - draft, or target - 1 at one token.
struct LastRow {
  RowSlice<Kind::probs, kChainTiles> target, draft;
  bool has_draft;
  int removed = -1;  // the token, without draft probabilities

  // f(values, the first index) for n tiles at a time.
  template <int n, typename F>
  __device__ __forceinline__ void for_each(int begin, int end, F f) const {
#pragma unroll 1
    for (int base = begin; base < end; base += n * kTile) {
      float v[4 * n];
      const auto raw = target.template load<n>(base);
      if (has_draft) {
        const auto of_draft = draft.template load<n>(base);
        float q[4 * n];
        draft.template unpack<n>(of_draft, q);
        target.template unpack<n>(raw, v);
#pragma unroll
        for (int e = 0; e < 4 * n; ++e) v[e] = __fsub_rn(v[e], q[e] < 0.f ? 0.f : q[e]);  // NaN stays
      } else {
        target.template unpack<n>(raw, v);
        if (removed >= base && removed < base + n * kTile) {
#pragma unroll
          for (int e = 0; e < 4 * n; ++e) v[e] = target.index(base, e) == removed ? __fsub_rn(v[e], 1.f) : v[e];
        }
      }
      f(v, base);
    }
  }
};

struct ChainScratch {
  int emitted, accepted;
  u32 words[4];  // of the last position
};

__global__ void __launch_bounds__(kChainThreads, 1)
    chain_speculative_sampling_kernel(const __grid_constant__ ChainParams p) {
  __shared__ ChainScratch scratch;
  const Cluster cluster(p.cluster_size);
  cluster.arrive();
  const int64_t row_idx = cluster.row_idx();
  ClusterExchange exchange = {reinterpret_cast<u64*>(dynamic_shared_memory()), 0};
  if (threadIdx.x == 0) scratch.emitted = p.steps, scratch.accepted = 0;
  __syncthreads();
  pdl_wait();
  pdl_trigger();
  const char* const tokens = p.tokens + row_idx * p.tokens_row_bytes;
  const char* const target = p.target + row_idx * p.target_row_bytes;
  const char* const draft = p.draft ? p.draft + row_idx * p.draft_row_bytes : nullptr;
  const u64 seed = p.seed.at(row_idx), offset = p.offset.at(row_idx);
  const auto token = [&](int i) {
    return p.tokens_are_int64 ? reinterpret_cast<const int64_t*>(tokens)[i] : reinterpret_cast<const int*>(tokens)[i];
  };
  for (int i = threadIdx.x; i < p.steps; i += kChainThreads) {
    const int64_t id = token(i);
    bool accepts = false;
    if (id >= 0 && id < p.length) {
      u32 words[4];
      random_words(seed, offset, i, words);
      const double of_target = element_of(target + i * p.target_step_bytes, p.target_dtype, id);
      double of_draft = draft ? element_of(draft + i * p.draft_step_bytes, p.draft_dtype, id) : 1.;
      if (of_draft < 0.) of_draft = 0.;
      accepts = __dmul_rn(static_cast<double>(words[1]), of_draft) < of_target * 4294967296.;
    }
    if (accepts) {
      atomicAdd(&scratch.accepted, 1);
    } else {
      atomicMin(&scratch.emitted, i);
    }
  }
  __syncthreads();
  const int emitted = scratch.emitted;
  if (threadIdx.x == 0) {
    random_words(seed, offset, emitted, scratch.words);
    if (cluster.block_rank == 0) p.accepted[row_idx] += scratch.accepted, p.emitted[row_idx] += emitted;
  }
  __syncthreads();
  const int64_t last = emitted < p.steps ? token(emitted) : -1;
  bool residual = last >= 0 && last < p.length;

  using Slice = RowSlice<Kind::probs, kChainTiles>;
  LastRow row = {Slice(target + emitted * p.target_step_bytes, p.target_dtype, p.length, p.elements_per_warp, cluster),
                 Slice(draft ? draft + emitted * p.draft_step_bytes : target, p.draft_dtype, p.length,
                       p.elements_per_warp, cluster),
                 residual && draft, residual ? static_cast<int>(last) : -1};
  const int begin = row.target.begin, end = row.target.end;
  WeightFn<Kind::probs> weight_fn;
  weight_fn.set_common(p.length);
  float factor = 1.f;
  u64 group_mass = 0;
  // Passes over the row: the largest entry, and the masses under the common power of two. Another one where that power
  // does not apply, or where nothing of target - draft remains.
  bool scaled = false;
  cluster.wait();
#pragma unroll 1
  for (;;) {
    float most = -INFINITY;
    group_mass = 0;
    GroupMasses groups(cluster.lane, row.target.chunks_per_group());
    row.for_each<kChainTiles>(begin, end, [&](const float (&v)[4 * kChainTiles], int) {
      MassSum sum;
      float x[4 * kChainTiles];
#pragma unroll
      for (int e = 0; e < 4 * kChainTiles; ++e) {
        most = ptx::max_nan(most, v[e]);
        // Where the common power does not apply, the result is discarded.
        x[e] = v[e] > 0.f ? weight_fn.scaled(v[e] * factor) : 0.f;
      }
      sum.add(x);
      groups.add(group_mass, warp_sum(sum.value()));
    });
    exchange.broadcast(cluster, 0,
                       static_cast<u32>(__reduce_max_sync(kAllLanes, isnan(most) ? INT32_MAX : order_key(most + 0.f))));
    exchange.broadcast(cluster, 1, warp_sum(group_mass));
    exchange.sync(cluster);
    if (scaled) break;
    weight_fn.top = from_order_key(exchange.max(cluster, 0));
    if (residual && weight_fn.top <= 0.f) {
      residual = row.has_draft = false;
      row.removed = -1;
      continue;
    }
    if (!(weight_fn.top > 0.f && weight_fn.top < INFINITY) || weight_fn.is_common(p.length)) break;
    if (weight_fn.top < 0x1p-60f) factor = 0x1p64f, weight_fn.top *= factor;
    weight_fn.set_scale(p.length);
    scaled = true;
  }
  const bool valid = weight_fn.top > 0.f && weight_fn.top < INFINITY;
  int* const ids = p.ids + row_idx * (p.steps + 1);
  if (cluster.block_rank == 0) {
    for (int i = threadIdx.x; i <= p.steps; i += kChainThreads) {
      if (i != emitted) ids[i] = i < emitted ? static_cast<int>(token(i)) : -1;
    }
    if (threadIdx.x == 0) {
      p.valid[row_idx] = valid;
      if (!valid) ids[emitted] = 0;
    }
  }
  if (!valid) return;
  const u64 point = scale_q32(exchange.sum(cluster, 1), scratch.words[0]);
  const u64 of_warp = exchange.values(cluster, 1)[cluster.warp];
  u64 running = exchange.sum_range(cluster, 1, 0, cluster.warp);
  if (point < running || point - running >= of_warp) return;
  const u64 up_to = running + warp_inclusive_sum(group_mass, cluster.lane);
  const int group = __ffs(__ballot_sync(kAllLanes, up_to > point)) - 1;
  running = __shfl_sync(kAllLanes, up_to - group_mass, group);
  const int first = begin + group * row.target.chunks_per_group() * Slice::chunk;
  bool found = false;
  row.for_each<1>(first, min(end, first + row.target.chunks_per_group() * Slice::chunk),
                  [&](const float (&v)[4], int base) {
                    u64 each[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e) each[e] = v[e] > 0.f ? mass_of(weight_fn.scaled(v[e] * factor)) : 0;
                    const u64 sum = each[0] + each[1] + each[2] + each[3];
                    const u64 reached = running + warp_inclusive_sum(sum, cluster.lane);
                    const u32 past = __ballot_sync(kAllLanes, reached > point);
                    if (!found && past != 0 && cluster.lane == __ffs(past) - 1) {
                      u64 before = reached - sum;
                      int e = 0;
#pragma unroll
                      for (int n = 0; n < 3; ++n) {
                        before += each[n];
                        if (before <= point) e = n + 1;
                      }
                      ids[emitted] = row.target.index(base, e);
                    }
                    found |= past != 0;
                    running = __shfl_sync(kAllLanes, reached, 31);
                  });
}

// ---- the host -------------------------------------------------------------------------------------------------------

void launch(ChainParams p, int64_t rows, DLDevice device) {
  const int64_t sms = num_sms(device);
  constexpr int chunk = kChainTiles * kTile;
  const int chunks = (p.length + chunk - 1) / chunk;
  p.cluster_size = !has_clusters(device) ? 1 : 8 * rows <= sms ? 8 : 4 * rows <= sms ? 4 : 2 * rows <= sms ? 2 : 1;
  while (p.cluster_size > 1 && p.cluster_size * kChainThreads / 32 > chunks) p.cluster_size /= 2;
  const int warps = p.cluster_size * kChainThreads / 32;
  p.elements_per_warp = (chunks + warps - 1) / warps * chunk;
  launch_pdl(chain_speculative_sampling_kernel, dim3(static_cast<unsigned>(rows * p.cluster_size)), dim3(kChainThreads),
             device, p, ClusterExchange::bytes(warps), p.cluster_size, /*balanced=*/true);
}

void chain_speculative_sampling(TensorView ids, TensorView valid, OptionalTensor draft_probs,
                                TensorView draft_token_ids, TensorView target_probs, TensorView accepted,
                                TensorView emitted, OptionalTensor seed, int64_t seed_value, OptionalTensor offset,
                                int64_t offset_value, int64_t offset_stride) {
  const Checks check("chain_speculative_sampling");
  check.dtype("draft_token_ids", draft_token_ids, {kInt32, kInt64});
  check.rank("draft_token_ids", draft_token_ids, 2, 2);
  check.last_contiguous("draft_token_ids", draft_token_ids);
  const int64_t rows = draft_token_ids.size(0), steps = draft_token_ids.size(1);
  if (draft_probs.has_value()) {
    check.dtype("draft_probs", *draft_probs, {kBFloat16, kFloat16, kFloat32});
    check.rank("draft_probs", *draft_probs, 3, 3);
    check.last_contiguous("draft_probs", *draft_probs);
  }
  check.dtype("target_probs", target_probs, {kBFloat16, kFloat16, kFloat32});
  check.rank("target_probs", target_probs, 3, 3);
  check.last_contiguous("target_probs", target_probs);
  const int64_t of_target[3] = {rows, steps + 1, kAny}, width = target_probs.size(2);
  check.shape("target_probs", target_probs, of_target, 3);
  if (width == 0) {
    check.fail("target_probs", "at least one entry per row",
               "shape " + shape_text(target_probs.shape().data(), target_probs.ndim()));
  }
  if (draft_probs.has_value()) {
    const int64_t of_draft[3] = {rows, steps, width};
    check.shape("draft_probs", *draft_probs, of_draft, 3);
  }
  constexpr const char *kAccepted = "maybe_output_accepted_token_num",
                       *kEmitted = "maybe_output_emitted_draft_token_num";
  for (const auto& [name, counts] : {std::tuple{kAccepted, accepted}, std::tuple{kEmitted, emitted}}) {
    check.dtype(name, counts, {kInt32});
    check.rank(name, counts, 1, 1);
    check.last_contiguous(name, counts);
    check.shape(name, counts, &rows, 1);
  }
  ChainParams p;
  p.seed = per_row(check, "seed", seed, seed_value, "target_probs", target_probs, {kInt64});
  p.offset = offset_per_row(check, offset, offset_value, offset_stride, "target_probs", target_probs);
  check_result(check, "valid", valid, target_probs, kBool);
  check.dtype("ids", ids, {kInt32});
  const int64_t of_ids[2] = {rows, steps + 1};
  check.shape("ids", ids, of_ids, 2);
  check.contiguous("ids", ids);
  check_overlaps(check, {{"draft_probs", draft_probs},
                         {"draft_token_ids", draft_token_ids},
                         {"target_probs", target_probs},
                         {kAccepted, accepted, /*written=*/true},
                         {kEmitted, emitted, /*written=*/true},
                         {"seed", seed},
                         {"offset", offset}});
  check_devices(check, "draft_token_ids", draft_token_ids,
                {{"draft_probs", draft_probs},
                 {"target_probs", target_probs},
                 {kAccepted, accepted},
                 {kEmitted, emitted},
                 {"ids", ids},
                 {"valid", valid}});
  if (rows == 0) return;
  if (rows > (1 << 27) || width > (1 << 30)) {
    unsupported("more than 2^27 rows, or rows of more than 2^30 entries");
  }
  if (steps > (1 << 20)) unsupported("more than 2^20 draft tokens");
  const DeviceGuard guard(target_probs.device().device_id);
  if (draft_probs.has_value() && steps > 0) {
    const TensorView draft = *draft_probs;
    p.draft = address(draft);
    p.draft_row_bytes = draft.stride(0) * element_bytes(draft);
    p.draft_step_bytes = draft.stride(1) * element_bytes(draft);
    p.draft_dtype = row_dtype(draft);
  }
  p.target = address(target_probs);
  p.target_row_bytes = target_probs.stride(0) * element_bytes(target_probs);
  p.target_step_bytes = target_probs.stride(1) * element_bytes(target_probs);
  p.target_dtype = row_dtype(target_probs);
  p.tokens = address(draft_token_ids);
  p.tokens_row_bytes = draft_token_ids.stride(0) * element_bytes(draft_token_ids);
  p.tokens_are_int64 = draft_token_ids.dtype().bits == 64;
  p.steps = static_cast<int>(steps);
  p.length = static_cast<int>(width);
  p.accepted = reinterpret_cast<int*>(address(accepted));
  p.emitted = reinterpret_cast<int*>(address(emitted));
  p.ids = reinterpret_cast<int*>(address(ids));
  p.valid = reinterpret_cast<bool*>(address(valid));
  launch(p, rows, target_probs.device());
}

KESTREL_EXPORT(chain_speculative_sampling, chain_speculative_sampling);

}  // namespace kestrel::sampling
