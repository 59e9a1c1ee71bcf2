// layer_norm: the binding of norm_rows.cuh for LayerNorm.

#include <tvm/ffi/function.h>

#include "host.h"

namespace kestrel::norm {

template <typename T>
using LayerNorm = Op<Norm::layer, false, T>;

void layer_norm(TensorView out, TensorView x, OptionalTensor weight, OptionalTensor bias, double eps) {
  const Checks check("layer_norm");
  check_rows(check, x);
  check_vector(check, "weight", weight, x, {x.dtype()});
  check_vector(check, "bias", bias, x, {x.dtype()});
  check.at_least("eps", eps, 0);
  check_written(check, "out", out, x);
  check_devices(check, "x", x, {{"weight", weight}, {"bias", bias}, {"out", out}});

  Params p;
  RowShape shape(x);
  shape.add(x, &p.x);
  shape.add(out, &p.out);
  if (!prepare(shape, x, weight, bias, eps, 0.0, &p)) return;
  const DeviceGuard guard(x.device().device_id);
  dispatch_float(x, [&](auto t) { launch<LayerNorm<decltype(t)>>(p, shape, x.device()); });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(layer_norm, layer_norm);

}  // namespace kestrel::norm
