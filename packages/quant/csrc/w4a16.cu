// w4a16_linear for few tokens, and the weight itself for more: checks, parameters, the choice of a tile.
#include "w4a16_launch.h"

#include <kestrel/export.h>
#include <kestrel/tensor.h>

#include <algorithm>
#include <limits>

#include "w4a16_checks.h"

namespace kestrel::quant {

constexpr DLDataType kInt16{kDLInt, 16, 1};
constexpr int kMaxTokens = 128;  // of w4a16_kernel

// -- checks -----------------------------------------------------------------------------------------------------------

void check_weight(const Checks& check, const TensorView& codes, const TensorView& scales, const OptionalTensor& zeros,
                  int64_t group, W4Params* p) {
  check.dtype("w", scales, {kBFloat16, kFloat16, kFloat32});
  check.rank("w", scales, 2, 2);
  check.contiguous("w", scales);
  const int64_t groups = scales.size(0), rows = scales.size(1), columns = groups * group;
  const int64_t codes_shape[4] = {(rows + 15) / 16, (columns + kBlock - 1) / kBlock, 32, 4};
  check.dtype("w", codes, {kInt32});
  check.shape("w", codes, codes_shape, 4);
  check.contiguous("w", codes);
  if (zeros.has_value()) {
    const int64_t shape[2] = {groups, rows};
    check.dtype("w", *zeros, {kInt16});
    check.shape("w", *zeros, shape, 2);
    check.contiguous("w", *zeros);
  }
  if (rows >= 1 << 30 || columns >= 1 << 30) unsupported("a weight with a dimension of 2^30 or more");
  p->codes = address(codes);
  p->scales = address(scales);
  p->zeros = address(zeros);
  p->outputs = static_cast<int>(rows);
  p->width = static_cast<int>(columns);
  p->groups = static_cast<int>(groups);
  p->group = static_cast<int>(group);
  p->blocks = static_cast<int>(codes_shape[1]);
  p->steps = (p->width + kStep - 1) / kStep;
  p->steps_per_group = (p->group + kStep - 1) / kStep;
}

void require_covered(const W4Params& p, const TensorView& scales) {
  if (same_dtype(scales.dtype(), kFloat32)) unsupported("float32");
  if (p.outputs % 8 || p.width % 8) unsupported("an N or K that is not a multiple of 8");
  if (p.group != 32 && p.group != 64 && p.group % kStep && p.groups > 1) {
    unsupported("groups other than 32, 64, multiples of 128 and whole rows");
  }
  if (!aligned16(p.codes) || !aligned16(p.scales) || !aligned16(p.zeros))
    unsupported("a weight not aligned to 16 bytes");
}

// -- launches ---------------------------------------------------------------------------------------------------------

namespace w4_mma {

template <typename T, int GROUP, typename Tile, typename Largest>
void launch_tile(const W4Params& p, DLDevice device, int most_splits = kMaxSplits) {
  if constexpr (GROUP == 128) {
    if (p.residual) return launch_residual_tile<T, Tile, Largest>(p, device, most_splits);
  }
  launch_tile<T, GROUP, Tile, Largest, Residual::none>(p, device, most_splits);
}

// Whether CTAs of half an SM are faster: one or two of them for each 64 rows fill the GPU once, or take fewer waves
// than CTAs of an SM. The limits are those measured on an H200: EXPERIMENTS.md, "Few tokens: CTAs of half an SM"; with
// at most as many CTAs as SMs they take more than half of one all the same (launch_slices()).
bool half_fits(const W4Params& p, int sms, DLDevice device) {
  if (device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id) != 9) return false;
  const auto within = [&](int least, int most) { return p.outputs > least * sms && p.outputs <= most * sms; };
  if (p.steps <= 16 && within(32, 64)) return true;
  if (p.steps <= 20 && within(15, 22)) return true;
  if (p.steps <= 32 && within(128, 192)) return true;
  return (p.steps <= 48 && within(22, 32)) || (p.steps <= 64 && within(64, 96));
}

// The limits are those of the designs in EXPERIMENTS.md, "4-bit linear".
template <typename T, int GROUP>
void launch_group(const W4Params& p, DLDevice device) {
  const int sms = device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
  const bool wide = p.outputs > 96 * sms;
  if constexpr (GROUP == 128) {
    const bool half = p.tokens <= 16 && half_fits(p, sms, device);
    if (p.tokens <= 8 && half) return launch_tile<T, GROUP, Tile8Half, Tile16Half>(p, device, 2);
    if (half) return launch_tile<T, GROUP, Tile16Half, Tile16Half>(p, device, 2);
    // 32 rows need no cluster. Beyond 48 steps a CTA has more than its pipeline stages hold.
    const bool narrow = p.outputs <= 32 * sms && p.steps <= 48;
    if (p.tokens <= 8 && narrow) return launch_tile<T, GROUP, Tile8Rows32, Tile16Rows32>(p, device);
    if (p.tokens <= 16 && narrow) return launch_tile<T, GROUP, Tile16Rows32, Tile16Rows32>(p, device);
    // Long rows: fewer warps, each with more rows, where two CTAs for each 128 rows fill the GPU.
    const bool pairs = p.outputs > 48 * sms && p.outputs <= 64 * sms && p.steps >= 96;
    if (p.tokens <= 8 && pairs) return launch_tile<T, GROUP, Tile8LongRows128, Tile16LongRows128>(p, device);
    if (p.tokens <= 16 && pairs) return launch_tile<T, GROUP, Tile16LongRows128, Tile16LongRows128>(p, device);
  }
  if (p.tokens <= 8 && !wide) return launch_tile<T, GROUP, Tile8Rows64, Tile16Rows64>(p, device);
  if (p.tokens <= 8) return launch_tile<T, GROUP, Tile8Rows128, Tile16Rows128>(p, device);
  if (p.tokens <= 16 && !wide) return launch_tile<T, GROUP, Tile16Rows64, Tile16Rows64>(p, device);
  if (p.tokens <= 16) return launch_tile<T, GROUP, Tile16Rows128, Tile16Rows128>(p, device);
  const bool registers_suffice =
      GROUP != 32 || device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id) < 10;
  if (p.tokens <= 32 || !registers_suffice) return launch_tile<T, GROUP, Tile32, Tile64>(p, device);
  launch_tile<T, GROUP, Tile64, Tile64>(p, device);
}

template <typename T>
void launch_linear(const W4Params& p, DLDevice device) {
  if (p.group == 32) return launch_group<T, 32>(p, device);
  if (p.group == 64) return launch_group<T, 64>(p, device);
  launch_group<T, 128>(p, device);
}

}  // namespace w4_mma

bool has_wgmma(DLDevice device) {
  return device_attribute(cudaDevAttrComputeCapabilityMajor, device.device_id) == 9 &&
         device_attribute(cudaDevAttrComputeCapabilityMinor, device.device_id) == 0;
}

// Whether there are kernels that add a residual: those of GROUP 128.
bool adds_residual(const W4Params& p, DLDevice device) { return has_wgmma(device) && p.group != 32 && p.group != 64; }

// x: [T, K]. False: nothing was launched, as no kernel adds the residual. The plan of a call
// (src/kestrel_quant/_w4_plan.py) is wgmma_tile, splits, ctas and the size of scratch, float32 or None:
// - wgmma_tile -1: w4a16_kernel, for T up to 128. It cuts K itself. Its slices are a cluster or, with scratch [slices,
//   T, N], are added up by a second kernel.
// - wgmma_tile of launch_group, ctas 0: w4a16_wgmma_kernel, K in `splits` slices. They are a cluster or, with scratch
//   for whole tiles, are added up by a second kernel.
// - wgmma_tile of launch_group_stream, ctas > 0, splits 1: w4a16_stream_kernel. `ctas` CTAs share the steps of all
//   tiles, with scratch for kMaxStreamCtas flags and a tile's sums for each CTA.
// - wgmma_tile of launch_group_pairs, ctas > 0, splits 2: w4a16_pair_kernel, without scratch.
bool w4a16_linear(TensorView out, TensorView x, TensorView codes, TensorView scales, OptionalTensor zeros,
                  int64_t group_size, OptionalTensor bias, OptionalTensor residual, OptionalTensor scratch,
                  int64_t wgmma_tile, int64_t splits, int64_t ctas) {
  const Checks check("w4a16_linear");
  check.dtype("x", x, {kBFloat16, kFloat16, kFloat32});
  check.rank("x", x, 2, 2);
  check.last_contiguous("x", x);
  W4Params p;
  check_weight(check, codes, scales, zeros, group_size, &p);
  const int64_t tokens = x.size(0), rows = p.outputs, x_shape[2] = {tokens, p.width}, out_shape[2] = {tokens, rows};
  check.shape("x", x, x_shape, 2);
  check.same_dtype("w", scales, "x", x);
  if (bias.has_value()) {
    check.dtype("bias", *bias, {x.dtype()});
    check.shape("bias", *bias, &rows, 1);
    check.last_contiguous("bias", *bias);
  }
  if (scratch.has_value()) {
    check.dtype("scratch", *scratch, {kFloat32});
    check.contiguous("scratch", *scratch);
  }
  if (residual.has_value()) {
    check.dtype("residual", *residual, {x.dtype()});
    check.shape("residual", *residual, out_shape, 2);
    check.last_contiguous("residual", *residual);
  }
  check.dtype("out", out, {x.dtype()});
  check.shape("out", out, out_shape, 2);
  check.last_contiguous("out", out);
  check.disjoint("out", out);
  check_memory(check, {{"x", x},
                       {"w", codes},
                       {"w", scales},
                       {"w", zeros},
                       {"bias", bias},
                       {"out", out, /*written=*/true},
                       {"scratch", scratch}});
  check.no_overlap("out", out, "residual", residual, /*may_be_same=*/true);
  check_devices(check, "x", x, {{"residual", residual}});
  if (tokens == 0 || rows == 0) return true;
  require_covered(p, scales);
  p.x = address(x);
  p.bias = address(bias);
  p.residual = address(residual);
  p.out = address(out);
  p.x_stride = x.stride(0) * 2;
  p.out_stride = out.stride(0) * 2;
  p.residual_stride = residual.has_value() ? (*residual).stride(0) * 2 : 0;
  p.tokens = static_cast<int>(tokens);
  p.packed_out = p.out_aligned_to(8);
  if (!aligned16(p.x) || (tokens > 1 && p.x_stride % 16)) unsupported("rows of x that are not aligned to 16 bytes");
  const DLDevice device = x.device();
  const DeviceGuard guard(device.device_id);
  if (p.residual && !adds_residual(p, device)) return false;
  const bool wgmma = wgmma_tile >= 0;
  if (tokens > kMaxTokens && !wgmma) unsupported("more than 128 tokens");
  if (wgmma && !has_wgmma(device)) unsupported("wgmma on this GPU");
  if (scratch.has_value()) {
    p.partial = reinterpret_cast<float*>(address(*scratch));
    p.partial_floats = (*scratch).numel();
    if (!aligned16(p.partial)) unsupported("scratch memory that is not aligned to 16 bytes");
  }
  if (wgmma) {
    if (splits < 1 || splits > kMaxSplits) unsupported("a number of slices of K beyond 1 to 8");
    p.splits = static_cast<int>(splits);
    const auto launch = !same_dtype(x.dtype(), kBFloat16) ? w4_wgmma::launch<__half, Zeros::any>
                        : p.zeros                         ? w4_wgmma::launch<__nv_bfloat16, Zeros::any>
                                                          : w4_wgmma::launch<__nv_bfloat16, Zeros::eight>;
    const auto number = [](int64_t n) { return static_cast<int>(std::clamp<int64_t>(n, 0, 1 << 30)); };
    return launch(p, number(wgmma_tile), number(ctas), device);
  }
  same_dtype(x.dtype(), kBFloat16) ? w4_mma::launch_linear<__nv_bfloat16>(p, device)
                                   : w4_mma::launch_linear<__half>(p, device);
  return true;
}

// The weight [N, K]: (code - zero) * scale, rounded once to the type of the scales.
void w4_dequant(TensorView out, TensorView codes, TensorView scales, OptionalTensor zeros, int64_t group_size) {
  const Checks check("w4a16_linear");
  W4Params p;
  check_weight(check, codes, scales, zeros, group_size, &p);
  const int64_t shape[2] = {p.outputs, p.width};
  check.dtype("out", out, {scales.dtype()});
  check.shape("out", out, shape, 2);
  check.contiguous("out", out);
  check_memory(check, {{"w", codes}, {"w", scales}, {"w", zeros}, {"out", out, /*written=*/true}});
  if (out.numel() == 0) return;
  require_covered(p, scales);
  p.out = address(out);
  p.out_stride = int64_t{p.width} * 2;
  if (!aligned16(p.out)) unsupported("an out not aligned to 16 bytes");
  const DLDevice device = codes.device();
  const DeviceGuard guard(device.device_id);
  const int64_t warps = codes.size(0) * ((codes.size(1) + kW4DequantBlocks - 1) / kW4DequantBlocks);
  const int64_t ctas = (warps + kW4DequantWarps - 1) / kW4DequantWarps;
  if (ctas > std::numeric_limits<int>::max()) unsupported("more than 2^31 CTAs");
  launch_pdl(same_dtype(scales.dtype(), kBFloat16) ? w4_dequant_kernel<__nv_bfloat16> : w4_dequant_kernel<__half>,
             dim3(static_cast<unsigned>(ctas)), dim3(32 * kW4DequantWarps), device, p);
}

KESTREL_EXPORT(w4a16_linear, w4a16_linear);
KESTREL_EXPORT(w4_dequant, w4_dequant);

}  // namespace kestrel::quant
