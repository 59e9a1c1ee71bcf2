// rms_norm_fp8 and fused_add_rms_norm_fp8: entry points.

#include <kestrel/export.h>

#include "dispatch.h"

namespace kestrel::norm {

// The checks after those of x, residual and weight: q is e4m3 of x's shape, scale has one float32 per row, both
// contiguous.
void check_quantised(const Checks& check, const TensorView& q, const TensorView& scale, const TensorView& x,
                     const OptionalTensor& scale_ub) {
  constexpr int64_t one = 1;
  if (scale_ub.has_value()) {
    check.dtype("scale_ub", *scale_ub, {kFloat32});
    check.rank("scale_ub", *scale_ub, 1, 1);
    check.shape("scale_ub", *scale_ub, &one, 1);
  }
  if (x.size(-1) == 0)
    check.fail("x", "rows of at least one element", "shape " + shape_text(x.shape().data(), x.ndim()));
  check.dtype("q", q, {kFloat8E4M3});
  check.same_shape("q", q, x);
  check.dtype("scale", scale, {kFloat32});
  if (!q.IsContiguous() || !scale.IsContiguous() || scale.numel() != row_count(x)) {
    check.fail("scale", "one element per row, contiguous as q", shape_text(scale.shape().data(), scale.ndim()));
  }
}

template <Residual mode>
void launch_fp8(const TensorView& q, const TensorView& scale, const TensorView& x, const TensorView* residual,
                const OptionalTensor& weight, double eps, double weight_bias, const OptionalTensor& scale_ub) {
  Params p;
  RowShape shape(x);
  shape.add(x, &p.x);
  shape.add(q, &p.out, 16 / element_bytes(x));  // one byte per element of a pack
  if constexpr (mode == Residual::add) shape.add(*residual, &p.residual);
  if (!prepare(shape, x, weight, {}, eps, weight_bias, &p)) return;
  p.scale = reinterpret_cast<float*>(address(scale));
  p.scale_ub = reinterpret_cast<const float*>(address(scale_ub));
  launch<Norm::rms, mode, OutputFp8>(p, shape, x);
}

void rms_norm_fp8(TensorView q, TensorView scale, TensorView x, OptionalTensor weight, double eps, double weight_bias,
                  OptionalTensor scale_ub) {
  const Checks check("rms_norm_fp8");
  check_rows(check, x);
  check_scaling(check, weight, x, eps, weight_bias);
  check_quantised(check, q, scale, x, scale_ub);
  check_devices(check, "x", x, {{"weight", weight}, {"scale_ub", scale_ub}, {"q", q}, {"scale", scale}});
  launch_fp8<Residual::none>(q, scale, x, nullptr, weight, eps, weight_bias, scale_ub);
}

void fused_add_rms_norm_fp8(TensorView q, TensorView scale, TensorView x, TensorView residual, OptionalTensor weight,
                            double eps, double weight_bias, OptionalTensor scale_ub) {
  const Checks check("fused_add_rms_norm_fp8");
  check_rows(check, x);
  check_written(check, "residual", residual, x);
  check_scaling(check, weight, x, eps, weight_bias);
  check_quantised(check, q, scale, x, scale_ub);
  check_overlaps(check, {{"x", x}, {"residual", residual, written}, {"weight", weight}, {"scale_ub", scale_ub}});
  check_devices(check, "x", x,
                {{"residual", residual}, {"weight", weight}, {"scale_ub", scale_ub}, {"q", q}, {"scale", scale}});
  launch_fp8<Residual::add>(q, scale, x, &residual, weight, eps, weight_bias, scale_ub);
}

KESTREL_EXPORT(rms_norm_fp8, rms_norm_fp8);
KESTREL_EXPORT(fused_add_rms_norm_fp8, fused_add_rms_norm_fp8);

}  // namespace kestrel::norm
