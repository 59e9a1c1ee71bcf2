// The arguments of history.cuh at the entry points: a history, its penalties, and a bitmask; and the entry point that
// applies them.
#pragma once

#include <algorithm>

#include "entry.h"
#include "history.cuh"

namespace kestrel::sampling {

inline IdRows id_rows(const Checks& check, const char* name, const TensorView& ids, const TensorView& logits) {
  check.dtype(name, ids, {kInt32, kInt64});
  check.rank(name, ids, 2, 2);
  check.last_contiguous(name, ids);
  const int64_t shape[2] = {logits.size(0), kAny};
  check.shape(name, ids, shape, 2);
  check.same_device(name, ids, "logits", logits);
  return {address(ids), ids.stride(0) * element_bytes(ids), static_cast<int>(std::min(ids.size(1), int64_t{INT32_MAX})),
          ids.dtype().bits == 64};
}

struct HistoryArguments {
  OptionalTensor token_ids, lengths, prompt_lengths;
  OptionalTensor repetition_penalty;
  double repetition_penalty_value;
  OptionalTensor presence_penalty;
  double presence_penalty_value;
  OptionalTensor frequency_penalty;
  double frequency_penalty_value;
};

inline void set_history(const Checks& check, HistoryParams& p, const TensorView& logits,
                        const HistoryArguments& given) {
  if (given.token_ids.has_value()) p.history = id_rows(check, "token_ids", *given.token_ids, logits);
  const auto counts = [&](const char* name, const OptionalTensor& values, int64_t value) {
    if (values.has_value() && !given.token_ids.has_value()) check.fail(name, "None without token_ids", "a tensor");
    return count_per_row(check, name, values, value, "logits", logits);
  };
  p.lengths = counts("lengths", given.lengths, INT64_MAX);
  p.prompt_lengths = counts("prompt_lengths", given.prompt_lengths, 0);
  const auto penalty = [&](const char* name, const OptionalTensor& values, double value) {
    return per_row(check, name, values, static_cast<float>(value), "logits", logits, {kFloat32});
  };
  p.repetition = penalty("repetition_penalty", given.repetition_penalty, given.repetition_penalty_value);
  p.presence = penalty("presence_penalty", given.presence_penalty, given.presence_penalty_value);
  p.frequency = penalty("frequency_penalty", given.frequency_penalty, given.frequency_penalty_value);
}

// Leaves out a history in which there is nothing to count: the penalties are the neutral numbers.
inline void drop_neutral_history(HistoryParams& p) {
  const bool has_tensor = p.repetition.values || p.presence.values || p.frequency.values;
  const bool neutral = !has_tensor && p.repetition.value == 1.f && p.presence.value == 0.f && p.frequency.value == 0.f;
  if (neutral || p.history.length == 0) p.history = {};
}

inline Bitmask bitmask_rows(const Checks& check, const OptionalTensor& bitmask, const TensorView& logits) {
  if (!bitmask.has_value()) return {};
  const TensorView words = *bitmask;
  check.dtype("bitmask", words, {kInt32});
  check.rank("bitmask", words, 2, 2);
  check.last_contiguous("bitmask", words);
  const int64_t shape[2] = {logits.size(0), (logits.size(1) + 31) / 32};
  check.shape("bitmask", words, shape, 2);
  check.same_device("bitmask", words, "logits", logits);
  return {address(words), words.stride(0) * element_bytes(words)};
}

// In process_logits.cu.
void process_logits(TensorView out, TensorView logits, OptionalTensor token_ids, OptionalTensor lengths,
                    OptionalTensor prompt_lengths, OptionalTensor repetition_penalty, double repetition_penalty_value,
                    OptionalTensor presence_penalty, double presence_penalty_value, OptionalTensor frequency_penalty,
                    double frequency_penalty_value, OptionalTensor bias_ids, OptionalTensor bias_values,
                    OptionalTensor bitmask);

}  // namespace kestrel::sampling
