// layer_norm and fused_add_layer_norm: entry points.

#include <kestrel/export.h>

#include "dispatch.h"

namespace kestrel::norm {

void check_affine(const Checks& check, const OptionalTensor& weight, const OptionalTensor& bias, const TensorView& x,
                  double eps) {
  check_vector(check, "weight", weight, x, {x.dtype()});
  check_vector(check, "bias", bias, x, {x.dtype()});
  check.at_least("eps", eps, 0);
}

void layer_norm(TensorView out, TensorView x, OptionalTensor weight, OptionalTensor bias, double eps) {
  const Checks check("layer_norm");
  check_rows(check, x);
  check_affine(check, weight, bias, x, eps);
  check_written(check, "out", out, x);
  check.no_overlap("out", out, "x", x, /*may_be_same=*/true);
  check.no_overlap("out", out, "weight", weight);
  check.no_overlap("out", out, "bias", bias);
  check_devices(check, "x", x, {{"weight", weight}, {"bias", bias}, {"out", out}});

  Params p;
  RowShape shape(x);
  shape.add(x, &p.x);
  shape.add(out, &p.out);
  if (!prepare(shape, x, weight, bias, eps, 0.0, &p)) return;
  launch<Norm::layer, Residual::none, OutputSame>(p, shape, x);
}

void fused_add_layer_norm(TensorView x, TensorView residual, OptionalTensor weight, OptionalTensor bias, double eps) {
  const Checks check("fused_add_layer_norm");
  check_rows(check, x);
  check_written(check, "residual", residual, x);
  check.disjoint("x", x);
  check_affine(check, weight, bias, x, eps);
  check_memory(check, {{"x", x, written}, {"residual", residual, written}, {"weight", weight}, {"bias", bias}});

  Params p;
  RowShape shape(x);
  shape.add(x, &p.x);
  shape.add(residual, &p.residual);
  if (!prepare(shape, x, weight, bias, eps, 0.0, &p)) return;
  p.out = p.x;
  launch<Norm::layer, Residual::add, OutputSame>(p, shape, x);
}

KESTREL_EXPORT(layer_norm, layer_norm);
KESTREL_EXPORT(fused_add_layer_norm, fused_add_layer_norm);

}  // namespace kestrel::norm
