// rotary_embedding: entry point, one position per row.

#include <kestrel/export.h>

#include "host.h"

namespace kestrel::rope {

void rotary_embedding(TensorView positions, TensorView query, OptionalTensor key, AnyView head_size, TensorView table,
                      AnyView is_neox, AnyView rope_dim_offset, AnyView inverse) {
  const Checks check("rotary_embedding");
  check.dtype("positions", positions, {kInt32, kInt64});
  check.rank("positions", positions, 1, 2);
  const int64_t size = check_rotary_rows(check, positions.shape().data(), positions.ndim(), query, key, head_size);
  const int64_t offset = check_rotary_table(check, table, query, size, rope_dim_offset);
  Call call;
  call.pairs = check.flag("is_neox", is_neox) ? Pairs::neox : Pairs::gptj;
  call.p.inverse = check.flag("inverse", inverse);
  check_memory(check, {{"positions", positions},
                       {"query", query, /*written=*/true},
                       {"key", key, /*written=*/true},
                       {"cos_sin_cache", table}});

  if (prepare(positions, 0, query, key, size, offset, table, &call)) launch<Positions::one>(call, query, table);
}

KESTREL_EXPORT(rotary_embedding, rotary_embedding);

}  // namespace kestrel::rope
