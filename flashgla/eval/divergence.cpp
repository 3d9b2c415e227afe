#include "flashgla/eval/divergence.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace flashgla::eval {

namespace {

// log sum exp(row)
double log_total(const float* row, std::int64_t count) {
  const double largest = *std::max_element(row, row + count);
  double total = 0.0;
  for (std::int64_t v = 0; v < count; ++v) total += std::exp(row[v] - largest);
  return largest + std::log(total);
}

double of_row(const float* reference, const float* other, std::int64_t count) {
  const double p_total = log_total(reference, count), q_total = log_total(other, count);
  double sum = 0.0;
  for (std::int64_t v = 0; v < count; ++v) {
    const double p = reference[v] - p_total, q = other[v] - q_total;
    sum += std::exp(p) * (p - q);
  }
  return sum;
}

}  // namespace

Divergence divergence(Context& context, model::LanguageModel& reference, model::LanguageModel& model,
                      std::span<const Document> documents, std::int64_t length, std::int64_t tokens,
                      const Monitor& monitor) {
  constexpr std::int64_t kRows = 256;  // whose logits exist at a time
  const std::int64_t words = model.config().vocab_size;
  if (reference.config().vocab_size != words) {
    throw Error("divergence: the models have vocabularies of " + std::to_string(reference.config().vocab_size) +
                " and " + std::to_string(words));
  }
  std::int64_t total = 0;
  for (const Document& document : documents) total += static_cast<std::int64_t>(document.tokens.size());
  total = std::min(total, tokens);
  Divergence result;
  double sum = 0.0;
  for (const Document& document : documents) {
    const auto size = static_cast<std::int64_t>(document.tokens.size());
    for (std::int64_t begin = 0; begin < size && result.tokens < total && result.complete; begin += length) {
      const std::int64_t count = std::min({length, size - begin, total - result.tokens});
      const ArenaScope scope(context.scratch());
      const TensorView ids(const_cast<std::int32_t*>(document.tokens.data()) + begin, DType::i32, Shape({1, count}));
      const auto hidden_of = [&](model::LanguageModel& of) {
        nn::Pass pass{context};
        const TensorView hidden =
            context.scratch().tensor(Shape({count, of.config().hidden_size}), of.activation_dtype(), "divergence");
        of.hidden_states(pass, ids, hidden);
        return hidden;
      };
      const TensorView p_hidden = hidden_of(reference), q_hidden = hidden_of(model);
      for (std::int64_t row = 0; row < count; row += kRows) {
        const ArenaScope rows(context.scratch());
        const std::int64_t end = std::min(count, row + kRows);
        const TensorView p = context.scratch().tensor(Shape({end - row, words}), DType::f32, "divergence");
        const TensorView q = context.scratch().tensor(p.shape, DType::f32, "divergence");
        reference.logits(context, p_hidden.slice(0, row, end), p);
        model.logits(context, q_hidden.slice(0, row, end), q);
        std::vector<double> each(static_cast<std::size_t>(end - row));
        parallel_for(context, end - row, [&](std::int64_t r) {
          each[static_cast<std::size_t>(r)] = of_row(p.as<float>() + r * words, q.as<float>() + r * words, words);
        });
        for (const double one : each) sum += one;
      }
      if (std::isnan(sum)) {
        throw Error("divergence: is NaN; the weights of one of the two models may be damaged");
      }
      result.tokens += count;
      result.mean = sum / static_cast<double>(result.tokens);
      result.complete = !monitor || monitor(result.tokens, total, result.mean) || result.tokens == total;
    }
  }
  return result;
}

}  // namespace flashgla::eval
