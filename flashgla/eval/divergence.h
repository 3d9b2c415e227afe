// How far one model's predictions are from another's.
#pragma once

#include <cstdint>
#include <span>

#include "flashgla/base/context.h"
#include "flashgla/eval/evaluation.h"
#include "flashgla/eval/tasks.h"
#include "flashgla/model/language_model.h"

namespace flashgla::eval {

struct Divergence {
  double mean = 0.0;  // of sum_v P(v) log(P(v) / Q(v)) over positions, nats; P: the reference's
  std::int64_t tokens = 0;
  bool complete = true;  // false: the monitor ended it
};

// On the first `tokens` tokens of the documents, in windows of `length`, each from an empty state. On the CPU. The
// monitor is asked after each window. Throws Error where the divergence is NaN.
Divergence divergence(Context& context, model::LanguageModel& reference, model::LanguageModel& model,
                      std::span<const Document> documents, std::int64_t length, std::int64_t tokens,
                      const Monitor& monitor = {});

}  // namespace flashgla::eval
