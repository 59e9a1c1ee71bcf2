// rms_norm and fused_add_rms_norm: entry points.

#include <tvm/ffi/function.h>

#include "dispatch.h"

namespace kestrel::norm {

void rms_norm(TensorView out, TensorView x, OptionalTensor weight, double eps, double weight_bias) {
  const Checks check("rms_norm");
  check_rows(check, x);
  check_scaling(check, weight, x, eps, weight_bias);
  check_written(check, "out", out, x);
  check.no_overlap("out", out, "x", x, /*may_be_same=*/true);
  check.no_overlap("out", out, "weight", weight);
  check_devices(check, "x", x, {{"weight", weight}, {"out", out}});

  Params p;
  RowShape shape(x);
  shape.add(x, &p.x);
  shape.add(out, &p.out);
  if (!prepare(shape, x, weight, {}, eps, weight_bias, &p)) return;
  launch<Norm::rms, Residual::none, OutputSame>(p, shape, x);
}

void fused_add_rms_norm(TensorView x, TensorView residual, OptionalTensor weight, double eps, double weight_bias) {
  const Checks check("fused_add_rms_norm");
  check_rows(check, x);
  check_written(check, "residual", residual, x);
  check.disjoint("x", x);
  check_scaling(check, weight, x, eps, weight_bias);
  check_memory(check, {{"x", x, written}, {"residual", residual, written}, {"weight", weight}});

  Params p;
  RowShape shape(x);
  shape.add(x, &p.x);
  shape.add(residual, &p.residual);
  if (!prepare(shape, x, weight, {}, eps, weight_bias, &p)) return;
  p.out = p.x;
  launch<Norm::rms, Residual::add, OutputSame>(p, shape, x);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm, rms_norm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fused_add_rms_norm, fused_add_rms_norm);

}  // namespace kestrel::norm
