// fp8_quant, fp8_quant_static and fp8_dequant: the bindings for FP8 e4m3fn codes.

#include <kestrel/export.h>

#include "host.h"

namespace kestrel::quant {

void fp8_quant(TensorView q, TensorView scale, OptionalTensor partial_amax, TensorView x, AnyView granularity,
               AnyView group_size, OptionalTensor scale_ub, bool column_major_scales) {
  const Checks check("fp8_quant");
  check_input(check, x);
  const std::string scope = check.choice("granularity", granularity, {"row", "tensor", "group"});
  const int64_t group = check.integer("group_size", group_size, 1);
  const int64_t rows = x.size(0), n = x.size(1), one = 1;
  if (scale_ub.has_value()) {
    check.dtype("scale_ub", *scale_ub, {kFloat32});
    check.shape("scale_ub", *scale_ub, &one, 1);
  }
  if (column_major_scales && scope != "group") {
    check.fail("column_major_scales", "False unless granularity is 'group'", "True");
  }
  const int64_t length = scope == "group" ? std::min(group, n) : n, groups = (n + length - 1) / length;
  check_fresh(check, "q", q, kFloat8E4M3, {rows, n});
  if (scope == "tensor") {
    check_fresh(check, "scale", scale, kFloat32, {1});
    check_partial_amax(check, partial_amax);
  } else if (column_major_scales) {
    check_fresh(check, "scale", scale, kFloat32, {groups, (rows + 3) / 4 * 4});
  } else {
    check_fresh(check, "scale", scale, kFloat32, {rows, groups});
  }
  check_devices(check, "x", x, {{"scale_ub", scale_ub}, {"q", q}, {"scale", scale}, {"partial_amax", partial_amax}});

  Params p = rows_of(x, q);
  p.scales = reinterpret_cast<float*>(address(scale));
  p.scale_ub = reinterpret_cast<const float*>(address(scale_ub));
  const DeviceGuard guard(x.device().device_id);
  if (scope == "tensor") {
    dispatch_float(x, [&](auto t) { quant_per_tensor<Fp8, decltype(t)>(p, rows, *partial_amax, x.device()); });
    return;
  }
  if (rows == 0) return;
  p.scale_row = column_major_scales ? 1 : groups;
  p.scale_segment = column_major_scales ? scale.size(1) : 1;
  p.padding = column_major_scales ? static_cast<int>(scale.size(1) - rows) : 0;
  split_rows(&p, length);
  dispatch_float(x, [&](auto t) { quant_per_segment<Fp8, decltype(t)>(p, rows, x.device()); });
}

void fp8_quant_static(TensorView q, TensorView x, TensorView scale) {
  const Checks check("fp8_quant");
  check_input(check, x);
  check_scale(check, scale, x.size(0));
  check_fresh(check, "q", q, kFloat8E4M3, {x.size(0), x.size(1)});
  check_devices(check, "x", x, {{"scale", scale}, {"q", q}});
  if (x.size(0) == 0) return;

  Params p = rows_of(x, q);
  p.scales = reinterpret_cast<float*>(address(scale));
  if (scale.ndim() == 2 && scale.size(0) > 1) p.scale_row = scale.stride(0);
  const DeviceGuard guard(x.device().device_id);
  dispatch_float(x, [&](auto t) { quant_static<Fp8, decltype(t)>(p, x.size(0), x.device()); });
}

void fp8_dequant(TensorView out, TensorView q, TensorView scale, AnyView group_size) {
  const Checks check("fp8_dequant");
  check_codes(check, q, kFloat8E4M3);
  const int64_t rows = q.size(0), n = q.size(1), group = check.integer("group_size", group_size, 1);
  check_scale(check, scale, rows, n / group + (n % group != 0));
  check_out(check, out, rows, n);
  check_memory(check, {{"q", q}, {"scale", scale}, {"out", out, kWritten}});
  if (rows == 0 || n == 0) return;

  Params p = rows_of(out, q);
  p.scales = reinterpret_cast<float*>(address(scale));
  if (scale.ndim() == 2) {
    if (rows > 1) p.scale_row = scale.stride(0);
    if (scale.size(1) > 1) p.scale_segment = scale.stride(1);
  }
  const DeviceGuard guard(q.device().device_id);
  dispatch_float(out, [&](auto t) { dequant<Fp8, decltype(t)>(p, rows, group, q.device()); });
}

KESTREL_EXPORT(fp8_quant, fp8_quant);
KESTREL_EXPORT(fp8_quant_static, fp8_quant_static);
KESTREL_EXPORT(fp8_dequant, fp8_dequant);

}  // namespace kestrel::quant
