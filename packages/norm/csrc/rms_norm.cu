// rms_norm and fused_add_rms_norm: the bindings of norm_rows.cuh for RMSNorm.

#include <tvm/ffi/function.h>

#include "host.h"

namespace kestrel::norm {

void check_numbers(const Checks& check, const OptionalTensor& weight, const TensorView& x, double eps,
                   double weight_bias) {
  check_vector(check, "weight", weight, x, {x.dtype(), kFloat32});
  check.at_least("eps", eps, 0);
  check.number("weight_bias", weight_bias);
}

// The weight may be float32 where x is not.
template <bool add>
void dispatch_rms(const TensorView& x, const OptionalTensor& weight, const Params& p, const RowShape& shape) {
  const bool wide = weight.has_value() && same_dtype((*weight).dtype(), kFloat32);
  dispatch_float(x, [&](auto t) {
    using T = decltype(t);
    if (wide && sizeof(T) < 4) {
      launch<Op<Norm::rms, add, T, float>>(p, shape, x.device());
    } else {
      launch<Op<Norm::rms, add, T>>(p, shape, x.device());
    }
  });
}

void rms_norm(TensorView out, TensorView x, OptionalTensor weight, double eps, double weight_bias) {
  const Checks check("rms_norm");
  check_rows(check, x);
  check_numbers(check, weight, x, eps, weight_bias);
  check_written(check, "out", out, x);
  check_devices(check, "x", x, {{"weight", weight}, {"out", out}});

  Params p;
  RowShape shape(x);
  shape.add(x, &p.x);
  shape.add(out, &p.out);
  if (!prepare(shape, x, weight, {}, eps, weight_bias, &p)) return;
  const DeviceGuard guard(x.device().device_id);
  dispatch_rms<false>(x, weight, p, shape);
}

void fused_add_rms_norm(TensorView x, TensorView residual, OptionalTensor weight, double eps, double weight_bias) {
  const Checks check("fused_add_rms_norm");
  check_rows(check, x);
  check_written(check, "residual", residual, x);
  check.disjoint("x", x);
  check_numbers(check, weight, x, eps, weight_bias);
  check_devices(check, "x", x, {{"residual", residual}, {"weight", weight}});

  Params p;
  RowShape shape(x);
  shape.add(x, &p.x);
  shape.add(residual, &p.residual);
  if (!prepare(shape, x, weight, {}, eps, weight_bias, &p)) return;
  p.out = p.x;
  const DeviceGuard guard(x.device().device_id);
  dispatch_rms<true>(x, weight, p, shape);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm, rms_norm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fused_add_rms_norm, fused_add_rms_norm);

}  // namespace kestrel::norm
