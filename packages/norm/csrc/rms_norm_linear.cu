// rms_norm_linear for few tokens: checks, parameters, the choice of a tile and of the slices of K. For more tokens, on
// Hopper, a product that starts to load its weight while the norm runs.

#include "rms_norm_linear.cuh"

#include <kestrel/export.h>
#include <kestrel/launch.h>
#include <kestrel/stream_linear.cuh>

#include <algorithm>

#include "host.h"

namespace kestrel::norm {

constexpr int kLinearTokens = 32;  // _STREAM_ROWS in rms_norm_linear.py

// False if a slice of x does not fit into shared memory, or if few SMs would have a tile.
template <typename T, int TOKEN_TILES>
bool launch_linear(LinearParams p, DLDevice device) {
  constexpr int stages = default_stages(TOKEN_TILES);
  using Tile = LinearTile<TOKEN_TILES, stages>;
  constexpr auto kernel = rms_norm_linear_kernel<T, TOKEN_TILES, stages>;
  const int limit = raise_shared_limit<kernel>(device);
  const int sms = device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
  const int major = device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id);
  const bool clusters = major >= 9;
  p.tiles = (p.outputs + kLinearRows - 1) / kLinearRows;
  // Of four tiles of tokens, and of grids of one to two CTAs per SM, product_of_norm() is faster.
  if (major == 9 && (TOKEN_TILES == 4 || (p.tiles > sms && p.tiles <= 2 * sms))) return false;
  const auto bytes = [&](int slices, int buffers) {
    return Tile::shared_bytes((p.blocks + slices - 1) / slices, buffers);
  };
  const int most = clusters ? std::min(kMaxSlices, p.blocks) : 1;
  // Two CTAs per SM, of this launch or of the next one, leave no gap between launches. Of an SM's shared memory, each
  // has 1 KB that the driver reserves, and 64 bytes of static variables.
  const int half = (device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device.device_id) - 2048) / 2 - 64;
  const int max_ctas = sms * 7 / 4;  // CTAs at two per SM; clusters leave some SMs free
  int slices = 1;
  while (2 * slices <= most) {
    const bool too_few = Tile::min_ctas == 2 ? 2 * slices * p.tiles <= max_ctas : slices * p.tiles < sms * 3 / 4;
    if (!too_few && slices >= (TOKEN_TILES == 1 ? 2 : 4) && bytes(slices, 1) <= limit) break;
    slices *= 2;
  }
  const bool two_per_sm = bytes(slices, 1) <= half;
  int groups = p.tiles;
  p.buffers = 1;
  if (p.tiles * slices > (two_per_sm ? max_ctas : sms)) {
    // The vendor's product, or product_of_norm(), is faster.
    if (TOKEN_TILES == 4 || (TOKEN_TILES == 2 && major == 9) || (TOKEN_TILES == 2 && p.width > 4096)) return false;
    p.buffers = 2;
    // Clusters of one CTA per SM leave SMs of a GPC free: about an eighth, if a cluster has more than two CTAs.
    groups = sms / slices - (slices > 2 && bytes(slices, 2) > half ? sms / slices / 8 : 0);
    groups = std::max(1, std::min(p.tiles, groups));
  }
  // product_of_norm() is also faster for long rows where one CTA for each SM has a part of a tile.
  const bool one_per_sm = slices < kMaxSlices && p.tiles * slices <= sms;
  if (TOKEN_TILES == 2 && major == 9 && one_per_sm && p.width >= 3072) return false;
  if (bytes(slices, p.buffers) > limit || (!clusters && p.tiles < sms / 2)) return false;
  p.slices = slices;
  if constexpr (TOKEN_TILES == 2) {  // one more stage, where two CTAs still share an SM
    const int more = LinearTile<2, stages + 1>::shared_bytes((p.blocks + slices - 1) / slices, p.buffers);
    if (two_per_sm && p.buffers == 1 && more <= half) {
      constexpr auto deeper = rms_norm_linear_kernel<T, 2, stages + 1>;
      raise_shared_limit<deeper>(device);
      launch_pdl(deeper, dim3(groups * slices), dim3(kLinearThreads), device, p, more, slices);
      return true;
    }
  }
  launch_pdl(kernel, dim3(groups * slices), dim3(kLinearThreads), device, p, bytes(slices, p.buffers), slices);
  return true;
}

template <typename T>
bool launch_linear(const LinearParams& p, DLDevice device) {
  if (p.tokens <= 8) return launch_linear<T, 1>(p, device);
  if (p.tokens <= 16) return launch_linear<T, 2>(p, device);
  return launch_linear<T, 4>(p, device);
}

// Returns false where the op is better composed of rms_norm and the vendor's product: many tokens, float32, rows that
// are not aligned or do not fit.
bool rms_norm_linear(TensorView out, TensorView x, TensorView norm_weight, TensorView weight, double eps) {
  const Checks check("rms_norm_linear");
  check_rows(check, x);
  const int64_t width = x.size(-1), weight_shape[2] = {kAny, width};
  check.dtype("norm_weight", norm_weight, {x.dtype()});
  check.last_contiguous("norm_weight", norm_weight);
  check.shape("norm_weight", norm_weight, &width, 1);
  check.dtype("weight", weight, {x.dtype()});
  check.rank("weight", weight, 2, 2);
  check.last_contiguous("weight", weight);
  check.shape("weight", weight, weight_shape, 2);
  check.at_least("eps", eps, 0);
  int64_t out_shape[4];
  for (int d = 0; d < x.ndim(); ++d) out_shape[d] = d + 1 < x.ndim() ? x.size(d) : weight.size(0);
  check.dtype("out", out, {x.dtype()});
  check.last_contiguous("out", out);
  check.shape("out", out, out_shape, x.ndim());
  check.disjoint("out", out);
  check_memory(check, {{"x", x}, {"norm_weight", norm_weight}, {"weight", weight}, {"out", out, written}});

  const int64_t rows = row_count(x), outputs = weight.size(0);
  if (rows == 0 || outputs == 0) return true;
  if (rows > kLinearTokens || width == 0 || width % 8 || width >= 1 << 24 || outputs >= 1 << 30) return false;
  if (same_dtype(x.dtype(), kFloat32)) return false;
  Params row_params;
  RowShape shape(x);
  shape.add(x, &row_params.x);
  shape.add(out, &row_params.out);
  shape.fill(&row_params);
  const int64_t weight_stride = outputs == 1 ? 0 : weight.stride(0) * 2;
  LinearParams p;
  p.x = row_params.x.base;
  p.norm_weight = address(norm_weight);
  p.weight = address(weight);
  if (!row_params.single_stride || weight_stride % 16 || weight_stride >= 1 << 24 || weight_stride < 0) return false;
  if (!aligned16(p.x) || !aligned16(p.norm_weight) || !aligned16(p.weight)) return false;
  p.out = row_params.out.base;
  p.x_stride = row_params.x.stride[0];
  p.out_stride = row_params.out.stride[0];
  if (p.x_stride % 16) return false;
  p.weight_stride = static_cast<unsigned>(weight_stride);
  p.tokens = static_cast<int>(rows);
  p.outputs = static_cast<int>(outputs);
  p.width = static_cast<int>(width);
  p.blocks = (p.width + kBlockK - 1) / kBlockK;
  p.packed_out = outputs % 2 == 0 && reinterpret_cast<uintptr_t>(p.out) % 4 == 0 && p.out_stride % 4 == 0;
  p.eps = static_cast<float>(eps);
  p.inv_width = static_cast<float>(1.0 / static_cast<double>(width));
  const DeviceGuard guard(x.device().device_id);
  return same_dtype(x.dtype(), kBFloat16) ? launch_linear<__nv_bfloat16>(p, x.device())
                                          : launch_linear<__half>(p, x.device());
}

// Stores rounded sums.
template <typename T>
struct Rounded {
  char* out = nullptr;
  int64_t stride = 0;  // bytes

  __device__ __forceinline__ void finish(float (&h)[8], int64_t token, int output) const {
    Pack<T> pack;
    pack.pack(h);
    store16(out + token * stride + output * 2, pack.bits);
  }
};

// out = normed W'. Returns false where the vendor's product is faster or stream_linear_kernel does not apply: other
// GPUs than sm_90, float32, more than 32 rows, rows that are not aligned.
bool product_of_norm(TensorView out, TensorView normed, TensorView weight) {
  const Checks check("rms_norm_linear");
  check.rank("normed", normed, 2, 2);
  check.last_contiguous("normed", normed);
  const int64_t rows = normed.size(0), width = normed.size(1), outputs = weight.size(0);
  const int64_t weight_shape[2] = {kAny, width}, out_shape[2] = {rows, outputs};
  check.same_dtype("weight", weight, "normed", normed);
  check.last_contiguous("weight", weight);
  check.shape("weight", weight, weight_shape, 2);
  check.same_dtype("out", out, "normed", normed);
  check.last_contiguous("out", out);
  check.shape("out", out, out_shape, 2);
  check_memory(check, {{"normed", normed}, {"weight", weight}, {"out", out, written}});
  const DLDevice device = normed.device();
  if (device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id) != 9) return false;
  if (rows < 1 || rows > kLinearTokens || width < 8 || outputs < 8 || width % 8 || outputs % 8) return false;
  if (width >= 1 << 30 || outputs >= 1 << 30 || same_dtype(normed.dtype(), kFloat32)) return false;
  const auto aligned = [](const TensorView& t) {
    const int64_t stride = t.stride(0) * 2;
    return aligned16(address(t)) && (t.size(0) == 1 || (stride % 16 == 0 && stride >= t.size(1) * 2));
  };
  if (!aligned(normed) || !aligned(weight) || !aligned(out)) return false;
  StreamOperands operands{address(normed), address(weight), normed.stride(0) * 2, weight.stride(0) * 2};
  operands.tokens = static_cast<int>(rows);
  operands.outputs = static_cast<int>(outputs);
  operands.width = static_cast<int>(width);
  const int sms = device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
  const int splits = rows > 16 ? stream_splits_behind(operands.outputs, operands.width, sms)
                               : stream_splits(operands.outputs, operands.width);
  const DeviceGuard guard(device.device_id);
  const auto launch = [&](auto t) {
    using T = decltype(t);
    const Rounded<T> epilogue{const_cast<char*>(address(out)), out.stride(0) * 2};
    launch_stream_linear<T>(operands, epilogue, splits, device);
  };
  if (same_dtype(normed.dtype(), kBFloat16)) {
    launch(__nv_bfloat16());
  } else {
    launch(__half());
  }
  return true;
}

KESTREL_EXPORT(rms_norm_linear, rms_norm_linear);
KESTREL_EXPORT(product_of_norm, product_of_norm);

}  // namespace kestrel::norm
