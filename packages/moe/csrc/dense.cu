// fused_linear_residual and fused_mlp: layers activation(x W' + bias) + residual. Up to four tokens take gemv_kernel
// (gemv.cuh), more take dense_stream_kernel (dense_stream.cuh), dense_wgmma_kernel (dense_wgmma.cuh), or the vendor's
// GEMM followed by linear_epilogue.
//
// linear_epilogue is memory-bound: one thread per pack of 16 bytes of the result, or per element of rows that are not
// aligned.
#include <kestrel/launch.h>
#include <kestrel/tensor.h>
#include <tvm/ffi/function.h>
#include <kestrel/pack.cuh>
#include <kestrel/pdl.cuh>

#include "activation.cuh"
#include "dense_launch.h"

namespace kestrel::moe {

constexpr int kEpilogueThreads = 256;

// A thread computes COUNT elements of a row. p.x is the product.
template <typename T, int COUNT>
__global__ void __launch_bounds__(kEpilogueThreads) linear_epilogue_kernel(const __grid_constant__ LinearParams p) {
  const int groups = (p.outputs + COUNT - 1) / COUNT;  // of a row
  const int64_t at = int64_t{blockIdx.x} * kEpilogueThreads + threadIdx.x;
  const int64_t row = at / groups;
  const int first = static_cast<int>(at - row * groups) * COUNT;
  pdl_wait();
  pdl_trigger();
  if (row >= p.tokens) return;
  const auto load = [&](const char* from, float (&values)[COUNT]) {
    if constexpr (COUNT == 1) {
      values[0] = to_float(*reinterpret_cast<const T*>(from));
    } else {
      Pack<T>{load16(from)}.unpack(values);
    }
  };
  const int64_t offset = int64_t{first} * sizeof(T);
  float h[COUNT], more[COUNT];
  load(p.x + row * p.x_stride + offset, h);
  if (p.activation != LinearActivation::none) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) h[i] = activate<T>(h[i], p.activation);
  }
  if (p.residual) {
    load(p.residual + row * p.residual_stride + offset, more);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) h[i] += more[i];
  }
  char* const to = p.out + row * p.out_stride + offset;
  if constexpr (COUNT == 1) {
    *reinterpret_cast<T*>(to) = from_float<T>(h[0]);
  } else {
    Pack<T> pack;
    pack.pack(h);
    store16(to, pack.bits);
  }
}

LinearActivation linear_activation(const Checks& check, const AnyView& value, bool may_be_none) {
  if (may_be_none && value.try_cast<std::string>() == std::string("none")) return LinearActivation::none;
  const std::string name = check.choice("activation", value, {"gelu_tanh", "gelu"});
  return name == "gelu" ? LinearActivation::gelu : LinearActivation::gelu_tanh;
}

DensePlan dense_plan(const Checks& check, const AnyView& kernel, const AnyView& columns, const AnyView& cluster_rows,
                     const AnyView& cluster_columns, const AnyView& splits) {
  const auto size = [&](const char* name, const AnyView& value) {
    const int64_t ctas = check.integer(name, value, 1);
    if (ctas > 8) check.fail(name, "up to 8 CTAs", std::to_string(ctas));
    return static_cast<int>(ctas);
  };
  DensePlan plan;
  const int64_t number = check.integer("kernel", kernel, 0);
  if (number > static_cast<int64_t>(DenseKernel::ping_pong)) check.fail("kernel", "up to 4", std::to_string(number));
  plan.kernel = static_cast<DenseKernel>(number);
  plan.columns = static_cast<int>(std::min(check.integer("columns", columns, 0), kMaxSize));
  plan.cluster = {size("cluster_rows", cluster_rows), size("cluster_columns", cluster_columns), size("splits", splits)};
  if (plan.cluster.size() > 8) check.fail("splits", "clusters of up to 8 CTAs", std::to_string(plan.cluster.size()));
  return plan;
}

void launch_layer(const LinearParams& p, const DensePlan& plan, const TensorView& x) {
  if (plan.kernel != DenseKernel::few_tokens) {
    launch_dense_wgmma(p, plan, x.dtype(), x.device());
  } else {
    launch_few_tokens(p, x.dtype(), x.device());
  }
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
  launch_layer(p, plan, x);
  return true;
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
  launch_layer(up, plan, x);
  if (plan2.kernel == DenseKernel::vendor) return 1;
  launch_layer(linear_params(out, hidden, w2, b2, residual), plan2, x);
  return 2;
}

// out = activation(product) + residual.
void linear_epilogue(TensorView out, TensorView product, OptionalTensor residual, AnyView activation) {
  const Checks check("linear_epilogue");
  check.dtype("product", product, {kBFloat16, kFloat16, kFloat32});
  check.rank("product", product, 2, 2);
  check.last_contiguous("product", product);
  const int64_t outputs = product.size(1);
  check.same_dtype("out", out, "product", product);
  check.last_contiguous("out", out);
  check.same_shape("out", out, product);
  check.disjoint("out", out);
  check.no_overlap("out", out, "product", product, /*may_be_same=*/true);
  check_residual(check, residual, product, outputs);
  check.no_overlap("out", out, "residual", residual, /*may_be_same=*/true);
  LinearParams p;
  p.activation = linear_activation(check, activation, /*may_be_none=*/true);
  check_devices(check, "product", product, {{"residual", residual}, {"out", out}});
  if (product.numel() == 0) return;
  if (product.size(0) > kMaxSize || outputs > kMaxSize) unsupported("a dimension of more than 2^30");
  p.x = address(product);
  p.residual = address(residual);
  p.out = address(out);
  p.x_stride = product.stride(0) * element_bytes(product);
  p.out_stride = out.stride(0) * element_bytes(out);
  if (residual.has_value()) p.residual_stride = (*residual).stride(0) * element_bytes(out);
  p.tokens = static_cast<int>(product.size(0));
  p.outputs = static_cast<int>(outputs);
  const DeviceGuard guard(product.device().device_id);
  dispatch_float(product, [&](auto t) {
    using T = decltype(t);
    constexpr int size = Pack<T>::size;
    const bool several = p.tokens > 1;
    const bool aligned = outputs % size == 0 && aligned16(p.x) && aligned16(p.out) && aligned16(p.residual) &&
                         !(several && (p.x_stride % 16 || p.out_stride % 16 || p.residual_stride % 16));
    const int64_t groups = p.tokens * ((outputs + size - 1) / size), elements = p.tokens * outputs;
    const int64_t ctas = ((aligned ? groups : elements) + kEpilogueThreads - 1) / kEpilogueThreads;
    if (ctas > kMaxSize) unsupported("a result of more than 2^38 elements");
    launch_pdl(aligned ? linear_epilogue_kernel<T, size> : linear_epilogue_kernel<T, 1>,
               dim3(static_cast<unsigned>(ctas)), dim3(kEpilogueThreads), product.device(), p);
  });
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(fused_linear_residual, fused_linear_residual);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fused_mlp, fused_mlp);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear_epilogue, linear_epilogue);

}  // namespace kestrel::moe
