// int8_quant and int8_dequant: the bindings for symmetric INT8 codes.

#include <kestrel/export.h>

#include "host.h"

namespace kestrel::quant {

void int8_quant(TensorView q, TensorView scale, OptionalTensor partial_amax, TensorView x, AnyView granularity) {
  const Checks check("int8_quant");
  check_input(check, x);
  const std::string scope = check.choice("granularity", granularity, {"row", "tensor"});
  const int64_t rows = x.size(0);
  check_fresh(check, "q", q, kInt8, {rows, x.size(1)});
  if (scope == "tensor") {
    check_fresh(check, "scale", scale, kFloat32, {1});
    check_partial_amax(check, partial_amax);
  } else {
    check_fresh(check, "scale", scale, kFloat32, {rows, 1});
  }
  check_devices(check, "x", x, {{"q", q}, {"scale", scale}, {"partial_amax", partial_amax}});

  Params p = rows_of(x, q);
  p.scales = reinterpret_cast<float*>(address(scale));
  const DeviceGuard guard(x.device().device_id);
  if (scope == "tensor") {
    dispatch_float(x, [&](auto t) { quant_per_tensor<Int8, decltype(t)>(p, rows, *partial_amax, x.device()); });
    return;
  }
  if (rows == 0) return;
  p.scale_row = 1;
  split_rows(&p, p.n);
  dispatch_float(x, [&](auto t) { quant_per_segment<Int8, decltype(t)>(p, rows, x.device()); });
}

void int8_dequant(TensorView out, TensorView q, TensorView scale) {
  const Checks check("int8_dequant");
  check_codes(check, q, kInt8);
  const int64_t rows = q.size(0), n = q.size(1);
  check_scale(check, scale, rows);
  check_out(check, out, rows, n);
  check_memory(check, {{"q", q}, {"scale", scale}, {"out", out, kWritten}});
  if (rows == 0 || n == 0) return;

  Params p = rows_of(out, q);
  p.scales = reinterpret_cast<float*>(address(scale));
  if (scale.ndim() == 2 && rows > 1) p.scale_row = scale.stride(0);
  const DeviceGuard guard(q.device().device_id);
  dispatch_float(out, [&](auto t) { dequant<Int8, decltype(t)>(p, rows, n, q.device()); });
}

KESTREL_EXPORT(int8_quant, int8_quant);
KESTREL_EXPORT(int8_dequant, int8_dequant);

}  // namespace kestrel::quant
