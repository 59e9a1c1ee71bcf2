// int4_quant and int4_dequant: the bindings for symmetric INT4 codes, two to a byte.

#include <kestrel/export.h>

#include "host.h"

namespace kestrel::quant {

void int4_quant(TensorView q, TensorView scale, TensorView x, AnyView group_size) {
  const Checks check("int4_quant");
  check_input(check, x);
  const int64_t rows = x.size(0), n = x.size(1);
  if (n % 2 != 0) check.fail("x", "an even number of columns", "shape " + shape_text(x.shape().data(), 2));
  const int64_t length = std::min(check.integer("group_size", group_size, 1), n), groups = (n + length - 1) / length;
  check_fresh(check, "q", q, kUInt8, {rows, n / 2});
  check_fresh(check, "scale", scale, kFloat32, {rows, groups});
  check_devices(check, "x", x, {{"q", q}, {"scale", scale}});
  if (rows == 0) return;

  Params p = rows_of(x, q);
  p.scales = reinterpret_cast<float*>(address(scale));
  p.scale_row = groups;
  p.scale_segment = 1;
  split_rows(&p, length);
  const DeviceGuard guard(x.device().device_id);
  dispatch_float(x, [&](auto t) { quant_per_segment<Int4, decltype(t)>(p, rows, x.device()); });
}

void int4_dequant(TensorView out, TensorView q, TensorView scale, AnyView group_size) {
  const Checks check("int4_dequant");
  check_codes(check, q, kUInt8);
  const int64_t group = check.integer("group_size", group_size, 1);
  const int64_t rows = q.size(0), n = 2 * q.size(1), groups = n / group + (n % group != 0);
  check.dtype("scale", scale, {kFloat32});
  check.rank("scale", scale, 2, 2);
  const int64_t shape[2] = {rows, groups};
  check.shape("scale", scale, shape, 2);
  check_out(check, out, rows, n);
  check_memory(check, {{"q", q}, {"scale", scale}, {"out", out, kWritten}});
  if (rows == 0 || n == 0) return;

  Params p = rows_of(out, q);
  p.scales = reinterpret_cast<float*>(address(scale));
  if (rows > 1) p.scale_row = scale.stride(0);
  if (groups > 1) p.scale_segment = scale.stride(1);
  const DeviceGuard guard(q.device().device_id);
  dispatch_float(out, [&](auto t) { dequant<Int4, decltype(t)>(p, rows, group, q.device()); });
}

KESTREL_EXPORT(int4_quant, int4_quant);
KESTREL_EXPORT(int4_dequant, int4_dequant);

}  // namespace kestrel::quant
