// w4a16_token and w4a16_token_mlp: checks, parameters, launches.
#include "w4a16_token.cuh"

#include <kestrel/export.h>
#include <kestrel/launch.h>
#include <kestrel/tensor.h>

#include <algorithm>

#include "cooperative.h"
#include "w4a16_checks.h"

namespace kestrel::quant {
namespace {

void check_vector(const Checks& check, const char* name, const OptionalTensor& vector, const TensorView& x,
                  int64_t size) {
  if (!vector.has_value()) return;
  check.dtype(name, *vector, {x.dtype()});
  check.shape(name, *vector, &size, 1);
  check.last_contiguous(name, *vector);
}

void check_token(const Checks& check, const char* name, const TensorView& x, int64_t tokens, int64_t width) {
  const int64_t shape[2] = {tokens, width};
  check.shape(name, x, shape, 2);
  check.last_contiguous(name, x);
}

// activation: "none", or one that halves the result: act(first half) * second half.
TokenActivation activation_of(const Checks& check, AnyView activation, bool gated) {
  const std::string name =
      gated ? check.choice("activation", activation, {"silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"})
            : check.choice("activation", activation, {"none", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"});
  if (name == "none") return TokenActivation::none;
  if (name == "silu_and_mul") return TokenActivation::silu;
  return name == "gelu_and_mul" ? TokenActivation::gelu : TokenActivation::gelu_tanh;
}

// A product's parameters; x, out, residual and norm are the caller's.
W4TokenParams product_of(const W4Params& weight, const TensorView& scales, const OptionalTensor& bias,
                         TokenActivation activation) {
  require_covered(weight, scales);
  const bool gated = activation != TokenActivation::none;
  W4TokenParams p;
  p.rows = weight.outputs;
  p.results = gated ? p.rows / 2 : p.rows;
  if (weight.group % kStep && weight.groups > 1) unsupported("groups that are no multiples of 128 and not whole rows");
  if (p.results % 16) unsupported("a number of results that is not a multiple of 16");
  p.codes = weight.codes;
  p.scales = weight.scales;
  p.zeros = weight.zeros;
  p.bias = address(bias);
  p.width = weight.width;
  p.tiles = p.rows / 16;
  p.steps = (p.tiles + 1) / 2;
  p.blocks = weight.blocks;
  p.pairs = weight.steps;
  p.inverse_pairs_of_group = ((1u << 31) + weight.steps_per_group - 1) / weight.steps_per_group;
  p.activation = activation;
  return p;
}

void add_norm(W4TokenParams* p, const OptionalTensor& weight, double eps, double weight_bias) {
  p->norm = address(weight);
  p->eps = static_cast<float>(eps);
  p->weight_bias = static_cast<float>(weight_bias);
  if (p->norm && p->width > kTokenNormPacks * kTokenThreads * 8) unsupported("a norm of that many columns");
}

template <typename T>
void launch(const W4TokenChain& chain, DLDevice device) {
  constexpr auto kernel = w4a16_token_kernel<T>;
  const int limit = raise_shared_limit<kernel>(device);
  const int sms = device_attribute(cudaDevAttrMultiProcessorCount, device.device_id);
  int bytes = 0, steps = 0;
  for (const W4TokenParams& p : chain.products) {
    if (!aligned16(p.x) || !aligned16(p.norm)) unsupported("an x or norm that is not aligned to 16 bytes");
    bytes = std::max(bytes, p.blocks * 128 + p.pairs * 4);
    steps = std::max(steps, p.steps);
  }
  if (bytes > limit) unsupported("an x that does not fit into shared memory");
  const dim3 grid(std::min(steps, sms)), block(kTokenThreads);
  if (chain.count == 1) return launch_pdl(kernel, grid, block, device, chain, bytes);
  if (launch_cooperative(kernel, grid, block, bytes, device, chain)) return;
  for (int i = 0; i < chain.count; ++i) {  // SMs are not all to be had: as many launches, which give the same bits
    W4TokenChain one;
    one.products[0] = chain.products[i];
    one.count = 1;
    launch<T>(one, device);
  }
}

void launch(const W4TokenChain& chain, const TensorView& x) {
  const DeviceGuard guard(x.device().device_id);
  same_dtype(x.dtype(), kBFloat16) ? launch<__nv_bfloat16>(chain, x.device()) : launch<__half>(chain, x.device());
}

}  // namespace

// residual: of the result's shape.
void w4a16_token(TensorView out, TensorView x, TensorView codes, TensorView scales, OptionalTensor zeros,
                 int64_t group_size, OptionalTensor bias, OptionalTensor norm_weight, double norm_eps,
                 double norm_weight_bias, AnyView activation, OptionalTensor residual) {
  const Checks check("w4a16_token");
  check.dtype("x", x, {kBFloat16, kFloat16, kFloat32});
  check.rank("x", x, 2, 2);
  check.last_contiguous("x", x);
  W4Params weight;
  check_weight(check, codes, scales, zeros, group_size, &weight);
  const int64_t tokens = x.size(0), rows = weight.outputs;
  check_token(check, "x", x, tokens, weight.width);
  check.same_dtype("w", scales, "x", x);
  check_vector(check, "bias", bias, x, rows);
  check_vector(check, "norm_weight", norm_weight, x, weight.width);
  check.at_least("norm_eps", norm_eps, 0);
  check.number("norm_weight_bias", norm_weight_bias);
  const TokenActivation act = activation_of(check, activation, /*gated=*/false);
  const bool gated = act != TokenActivation::none;
  if (gated && rows % 2) check.fail("w", "an even number of rows", std::to_string(rows));
  const int64_t results = gated ? rows / 2 : rows;
  if (residual.has_value()) {
    check.dtype("residual", *residual, {x.dtype()});
    check_token(check, "residual", *residual, tokens, results);
  }
  check.dtype("out", out, {x.dtype()});
  check_token(check, "out", out, tokens, results);
  check_memory(check, {{"x", x},
                       {"w", codes},
                       {"w", scales},
                       {"w", zeros},
                       {"bias", bias},
                       {"norm_weight", norm_weight},
                       {"out", out, /*written=*/true}});
  check.no_overlap("out", out, "residual", residual, /*may_be_same=*/true);
  check_devices(check, "x", x, {{"residual", residual}});
  if (tokens == 0 || results == 0) return;
  if (tokens > 1) unsupported("more than one token");
  W4TokenChain chain;
  W4TokenParams& p = chain.products[chain.count++] = product_of(weight, scales, bias, act);
  add_norm(&p, norm_weight, norm_eps, norm_weight_bias);
  p.x = address(x);
  p.residual = address(residual);
  p.out = address(out);
  launch(chain, x);
}

// gates: [1, I], scratch. attention and attention_w: all of it or nothing.
void w4a16_token_mlp(TensorView out, TensorView gates, TensorView x, TensorView up_codes, TensorView up_scales,
                     OptionalTensor up_zeros, int64_t up_group, TensorView down_codes, TensorView down_scales,
                     OptionalTensor down_zeros, int64_t down_group, TensorView norm_weight, OptionalTensor up_bias,
                     OptionalTensor down_bias, double norm_eps, double norm_weight_bias, AnyView activation,
                     OptionalTensor attention, OptionalTensor attention_codes, OptionalTensor attention_scales,
                     OptionalTensor attention_zeros, int64_t attention_group, OptionalTensor attention_bias) {
  const Checks check("w4a16_token_mlp");
  check.dtype("x", x, {kBFloat16, kFloat16, kFloat32});
  check.rank("x", x, 2, 2);
  W4Params up, down, behind;
  check_weight(check, up_codes, up_scales, up_zeros, up_group, &up, "gate_up");
  check_weight(check, down_codes, down_scales, down_zeros, down_group, &down, "down");
  const int64_t tokens = x.size(0), width = up.width, inner = down.width;
  check_token(check, "x", x, tokens, width);
  check.same_dtype("gate_up", up_scales, "x", x);
  check.same_dtype("down", down_scales, "x", x);
  if (up.outputs != 2 * inner) check.fail("down", std::to_string(up.outputs / 2) + " columns", std::to_string(inner));
  if (down.outputs != width) check.fail("down", std::to_string(width) + " rows", std::to_string(down.outputs));
  check_vector(check, "norm_weight", norm_weight, x, width);
  check_vector(check, "gate_up_bias", up_bias, x, up.outputs);
  check_vector(check, "down_bias", down_bias, x, width);
  check.at_least("norm_eps", norm_eps, 0);
  check.number("norm_weight_bias", norm_weight_bias);
  const TokenActivation act = activation_of(check, activation, /*gated=*/true);
  if (attention.has_value()) {
    check_weight(check, *attention_codes, *attention_scales, attention_zeros, attention_group, &behind,
                 "attention_weight");
    check.dtype("attention", *attention, {x.dtype()});
    check_token(check, "attention", *attention, tokens, behind.width);
    check.same_dtype("attention_weight", *attention_scales, "x", x);
    if (behind.outputs != width)
      check.fail("attention_weight", std::to_string(width) + " rows", std::to_string(behind.outputs));
    check_vector(check, "attention_bias", attention_bias, x, width);
  }
  for (const auto& [name, result, columns] : {std::tuple{"out", out, width}, {"gates", gates, inner}}) {
    check.dtype(name, result, {x.dtype()});
    check_token(check, name, result, tokens, columns);
  }
  check_memory(check, {{"gate_up", up_codes},
                       {"gate_up", up_scales},
                       {"gate_up", up_zeros},
                       {"down", down_codes},
                       {"down", down_scales},
                       {"down", down_zeros},
                       {"norm_weight", norm_weight},
                       {"gate_up_bias", up_bias},
                       {"down_bias", down_bias},
                       {"attention", attention},
                       {"attention_weight", attention_codes},
                       {"attention_weight", attention_scales},
                       {"attention_weight", attention_zeros},
                       {"attention_bias", attention_bias},
                       {"out", out, /*written=*/true}});
  check.no_overlap("out", out, "x", x, /*may_be_same=*/true);
  check_devices(check, "x", x, {{"gate_up", up_codes}});
  if (tokens == 0 || width == 0 || inner == 0) return;
  if (tokens > 1) unsupported("more than one token");
  W4TokenChain chain;
  const char* stream = address(x);
  if (attention.has_value()) {
    W4TokenParams& p = chain.products[chain.count++] =
        product_of(behind, *attention_scales, attention_bias, TokenActivation::none);
    p.x = address(attention);
    p.residual = stream;
    p.out = address(out);
    stream = p.out;
  }
  W4TokenParams& first = chain.products[chain.count++] = product_of(up, up_scales, up_bias, act);
  add_norm(&first, norm_weight, norm_eps, norm_weight_bias);
  first.x = stream;
  first.out = address(gates);
  W4TokenParams& second = chain.products[chain.count++] =
      product_of(down, down_scales, down_bias, TokenActivation::none);
  second.x = first.out;
  second.residual = stream;
  second.out = address(out);
  launch(chain, x);
}

KESTREL_EXPORT(w4a16_token, w4a16_token);
KESTREL_EXPORT(w4a16_token_mlp, w4a16_token_mlp);

}  // namespace kestrel::quant
