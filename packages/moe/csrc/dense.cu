// fused_linear_residual and fused_mlp: layers activation(x W' + bias) + residual. Up to four tokens take gemv_kernel
// (gemv.cuh), more take stream_linear_kernel (kestrel/stream_linear.cuh), dense_wgmma_kernel (dense_wgmma.cuh), the
// vendor's GEMM with its own epilogue (dense_vendor.cu), or without it, which the caller runs.
#include <kestrel/export.h>
#include <kestrel/launch.h>
#include <kestrel/tensor.h>

#include <algorithm>

#include "dense_launch.h"

namespace kestrel::moe {

LinearActivation linear_activation(const Checks& check, const AnyView& value, bool may_be_none) {
  if (may_be_none && value.try_cast<std::string>() == std::string("none")) return LinearActivation::none;
  const std::string name = check.choice("activation", value, {"gelu_tanh", "gelu"});
  return name == "gelu" ? LinearActivation::gelu : LinearActivation::gelu_tanh;
}

DensePlan dense_plan(const Checks& check, const AnyView& kernel, const AnyView& columns, const AnyView& cluster_rows,
                     const AnyView& cluster_columns, const AnyView& splits) {
  const auto size = [&](const char* name, const AnyView& value, int64_t least = 1) {
    const int64_t ctas = check.integer(name, value, least);
    if (ctas > 8) check.fail(name, "up to 8 CTAs", std::to_string(ctas));
    return static_cast<int>(ctas);
  };
  DensePlan plan;
  const int64_t number = check.integer("kernel", kernel, 0);
  if (number > static_cast<int64_t>(DenseKernel::vendor_epilogue)) {
    check.fail("kernel", "up to 5", std::to_string(number));
  }
  plan.kernel = static_cast<DenseKernel>(number);
  plan.columns = static_cast<int>(std::min(check.integer("columns", columns, 0), kMaxSize));
  const bool chosen_here = plan.kernel == DenseKernel::stream;  // with splits = 0
  plan.cluster = {size("cluster_rows", cluster_rows), size("cluster_columns", cluster_columns),
                  size("splits", splits, chosen_here ? 0 : 1)};
  if (plan.cluster.size() > 8) check.fail("splits", "clusters of up to 8 CTAs", std::to_string(plan.cluster.size()));
  return plan;
}

// False: the plan has no kernel for these operands.
bool launch_layer(const LinearParams& p, const DensePlan& plan, const TensorView& x) {
  if (plan.kernel == DenseKernel::vendor) return false;
  if (plan.kernel == DenseKernel::vendor_epilogue) return launch_vendor(p, x.dtype(), x.device());
  if (plan.kernel == DenseKernel::few_tokens) {
    launch_few_tokens(p, x.dtype(), x.device());
  } else {
    launch_dense_wgmma(p, plan, x.dtype(), x.device());
  }
  return true;
}

// Launches the plan's kernel; returns false if it has none. The op has a residual and no activation; a benchmark
// of one layer of fused_mlp may have an activation or no residual. The last five arguments are a DensePlan.
bool fused_linear_residual(TensorView out, TensorView x, TensorView weight, OptionalTensor bias,
                           OptionalTensor residual, AnyView activation, AnyView kernel, AnyView columns,
                           AnyView cluster_rows, AnyView cluster_columns, AnyView splits) {
  const Checks check("fused_linear_residual");
  check_rows(check, x);
  check_operands(check, x, "weight", weight, "bias", bias, x.size(1));
  check_residual(check, residual, x, weight.size(0));
  const LinearActivation act = linear_activation(check, activation, /*may_be_none=*/true);
  if (!residual.has_value() && act == LinearActivation::none) {
    check.fail("residual", "a tensor", "NoneType", "TypeError");
  }
  check_result(check, "out", out, x.dtype(), x.size(0), weight.size(0));
  const DensePlan plan = dense_plan(check, kernel, columns, cluster_rows, cluster_columns, splits);
  check_overlaps(check, {{"x", x}, {"weight", weight}, {"bias", bias}, {"out", out, /*written=*/true}});
  check.no_overlap("out", out, "residual", residual, /*may_be_same=*/true);
  check_devices(check, "x", x, {{"weight", weight}, {"bias", bias}, {"residual", residual}, {"out", out}});
  if (plan.kernel == DenseKernel::vendor) return false;
  if (x.size(0) == 0 || weight.size(0) == 0) return true;
  LinearParams p = linear_params(out, x, weight, bias, residual);
  p.activation = act;
  const DeviceGuard guard(x.device().device_id);
  return launch_layer(p, plan, x);
}

// Launches the layers up to the first without a kernel, and returns their number. hidden: scratch [T, I]. The last
// ten arguments are the DensePlans of both layers.
int64_t fused_mlp(TensorView out, TensorView hidden, TensorView x, TensorView w1, OptionalTensor b1, TensorView w2,
                  OptionalTensor b2, OptionalTensor residual, AnyView activation, AnyView kernel, AnyView columns,
                  AnyView cluster_rows, AnyView cluster_columns, AnyView splits, AnyView kernel2, AnyView columns2,
                  AnyView cluster_rows2, AnyView cluster_columns2, AnyView splits2) {
  const Checks check("fused_mlp");
  check_rows(check, x);
  check_operands(check, x, "w1", w1, "b1", b1, x.size(1));
  check_operands(check, x, "w2", w2, "b2", b2, w1.size(0));
  check_residual(check, residual, x, w2.size(0));
  const LinearActivation act = linear_activation(check, activation, /*may_be_none=*/false);
  check_result(check, "out", out, x.dtype(), x.size(0), w2.size(0));
  check_result(check, "hidden", hidden, x.dtype(), x.size(0), w1.size(0));
  const DensePlan plan = dense_plan(check, kernel, columns, cluster_rows, cluster_columns, splits);
  const DensePlan plan2 = dense_plan(check, kernel2, columns2, cluster_rows2, cluster_columns2, splits2);
  check_overlaps(check, {{"x", x}, {"w1", w1}, {"b1", b1}, {"w2", w2}, {"b2", b2}, {"out", out, /*written=*/true}});
  check.no_overlap("out", out, "residual", residual, /*may_be_same=*/true);
  check_devices(
      check, "x", x,
      {{"w1", w1}, {"b1", b1}, {"w2", w2}, {"b2", b2}, {"residual", residual}, {"out", out}, {"hidden", hidden}});
  if (x.size(0) == 0 || w2.size(0) == 0) return 2;
  if (plan.kernel == DenseKernel::vendor) return 0;
  if (w1.size(0) == 0) unsupported("I = 0");
  LinearParams up = linear_params(hidden, x, w1, b1, OptionalTensor());
  up.activation = act;
  const DeviceGuard guard(x.device().device_id);
  if (!launch_layer(up, plan, x)) return 0;
  if (plan2.kernel == DenseKernel::vendor) return 1;
  return launch_layer(linear_params(out, hidden, w2, b2, residual), plan2, x) ? 2 : 1;
}

KESTREL_EXPORT(fused_linear_residual, fused_linear_residual);
KESTREL_EXPORT(fused_mlp, fused_mlp);

}  // namespace kestrel::moe
