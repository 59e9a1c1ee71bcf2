// multimodal_rotary_embedding: entry point, three positions per row.

#include <kestrel/export.h>

#include "host.h"

namespace kestrel::rope {

// Sizes of the sections of time, height and width: they sum to `half`; interleaved, height and width have every third
// frequency from 1 and 2 on.
void check_sections(const Checks& check, const int64_t (&sections)[kAxes], int64_t half, bool interleaved) {
  const char* name = "mrope_section";
  const auto text = [&] {
    return "[" + std::to_string(sections[0]) + ", " + std::to_string(sections[1]) + ", " + std::to_string(sections[2]) +
           "]";
  };
  int64_t rest = half;  // -1: the sections exceed it
  for (int64_t size : sections) {
    rest = size > rest ? -1 : rest - size;
  }
  if (rest != 0) {
    check.fail(name, "sizes that sum to " + std::to_string(half) + ", half the columns of cos_sin_cache", text());
  }
  if (interleaved && (kAxes * sections[1] - 2 >= half || kAxes * sections[2] - 1 >= half)) {
    check.fail(name,
               "interleaved, a height <= " + std::to_string((half + 1) / 3) + " and a width <= " +
                   std::to_string(half / 3) + ", every third of " + std::to_string(half) + " frequencies",
               text());
  }
}

void multimodal_rotary_embedding(TensorView positions, TensorView query, OptionalTensor key, AnyView head_size,
                                 TensorView table, AnyView time, AnyView height, AnyView width, AnyView is_neox,
                                 AnyView interleaved) {
  const Checks check("multimodal_rotary_embedding");
  check.dtype("positions", positions, {kInt32, kInt64});
  check.rank("positions", positions, 2, 2);
  const int64_t axes_and_rows[] = {kAxes, kAny};
  check.shape("positions", positions, axes_and_rows, 2);
  const int64_t rows = positions.size(1);
  const int64_t size = check_rotary_rows(check, &rows, 1, query, key, head_size);
  check_rotary_table(check, table, query, size, AnyView(int64_t{0}));
  Call call;
  call.pairs = check.flag("is_neox", is_neox) ? Pairs::neox : Pairs::gptj;
  call.p.interleaved = check.flag("interleaved", interleaved);
  const int64_t sections[kAxes] = {check.integer("mrope_section", time, 0), check.integer("mrope_section", height, 0),
                                   check.integer("mrope_section", width, 0)};
  check_sections(check, sections, table.size(1) / 2, call.p.interleaved);
  check_memory(check, {{"positions", positions},
                       {"query", query, /*written=*/true},
                       {"key", key, /*written=*/true},
                       {"cos_sin_cache", table}});

  if (!prepare(positions, 1, query, key, size, 0, table, &call)) return;
  const bool interleave = call.p.interleaved;
  call.p.sections[0] = static_cast<int>(interleave ? sections[1] : sections[0]);
  call.p.sections[1] = static_cast<int>(interleave ? sections[2] : sections[0] + sections[1]);
  launch<Positions::per_axis>(call, query, table);
}

KESTREL_EXPORT(multimodal_rotary_embedding, multimodal_rotary_embedding);

}  // namespace kestrel::rope
