// rms_norm and fused_add_rms_norm: entry points; the tile of a row.

#include <kestrel/export.h>
#include <tvm/ffi/container/array.h>

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

// Packs per lane, warps per CTA and CTAs per row for rows of that many packs; empty without a tile. For tests.
tvm::ffi::Array<int64_t> rms_norm_tile(int64_t packs, bool fused) {
  tvm::ffi::Array<int64_t> found;
  const auto find = [&](auto spec) {
    using S = decltype(spec);
    with_tile<S>(static_cast<int>(packs), [&](auto line) {
      constexpr Tile tile = tiles_of<S>()[line];
      found = {tile.packs_per_lane, tile.warps(static_cast<int>(packs)), tile.ctas};
      return true;
    });
  };
  fused ? find(Spec<Norm::rms, Residual::add, OutputSame, float>())
        : find(Spec<Norm::rms, Residual::none, OutputSame, float>());
  return found;
}

KESTREL_EXPORT(rms_norm, rms_norm);
KESTREL_EXPORT(fused_add_rms_norm, fused_add_rms_norm);
KESTREL_EXPORT(rms_norm_tile, rms_norm_tile);

}  // namespace kestrel::norm
