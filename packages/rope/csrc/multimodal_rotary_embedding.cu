// multimodal_rotary_embedding: the binding of rotate_heads.cuh with three positions per row.

#include <tvm/ffi/function.h>

#include "host.h"

namespace kestrel::rope {

// How many frequencies time, height and width turn: their sum is `half`, and interleaved they fit among every third.
void check_sections(const Checks& check, const int64_t (&sections)[AXES], int64_t half, bool interleaved) {
  const char* name = "mrope_section";
  const auto text = [&] {
    return "[" + std::to_string(sections[0]) + ", " + std::to_string(sections[1]) + ", " + std::to_string(sections[2]) +
           "]";
  };
  int64_t left = half;
  for (int64_t size : sections) {
    left = size > left ? -1 : left - size;
  }
  if (left != 0) {
    check.fail(name, "sizes that sum to " + std::to_string(half) + ", half the columns of cos_sin_cache", text());
  }
  if (interleaved && (AXES * sections[1] - 2 >= half || AXES * sections[2] - 1 >= half)) {
    check.fail(name, "a height and a width that fit when every third of " + std::to_string(half) + " is theirs",
               text());
  }
}

void multimodal_rotary_embedding(TensorView positions, TensorView query, OptionalTensor key, AnyView head_size,
                                 TensorView table, AnyView time, AnyView height, AnyView width, AnyView is_neox,
                                 AnyView interleaved) {
  const Checks check("multimodal_rotary_embedding");
  check.dtype("positions", positions, {kInt32, kInt64});
  check.rank("positions", positions, 2, 2);
  const int64_t axes_and_rows[] = {AXES, kAny};
  check.shape("positions", positions, axes_and_rows, 2);
  const int64_t rows = positions.size(1);
  const int64_t size = check_rotary_rows(check, &rows, 1, query, key, head_size);
  check_rotary_table(check, table, query, size, AnyView(int64_t{0}));
  Call call;
  call.neox = check.flag("is_neox", is_neox);
  call.p.interleaved = check.flag("interleaved", interleaved);
  const int64_t sections[AXES] = {check.integer("mrope_section", time, 0), check.integer("mrope_section", height, 0),
                                  check.integer("mrope_section", width, 0)};
  check_sections(check, sections, table.size(1) / 2, call.p.interleaved);
  check_devices(check, "positions", positions, {{"query", query}, {"key", key}, {"cos_sin_cache", table}});

  if (!prepare(positions, 1, query, key, size, 0, table, &call)) return;
  const bool interleave = call.p.interleaved;
  call.p.sections[0] = static_cast<int>(interleave ? sections[1] : sections[0]);
  call.p.sections[1] = static_cast<int>(interleave ? sections[2] : sections[0] + sections[1]);
  launch<true>(call, query, table);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(multimodal_rotary_embedding, multimodal_rotary_embedding);

}  // namespace kestrel::rope
