// Which probabilities fall out, on the CPU.
#pragma once

#include <optional>

#include "flashgla/ops/dropout/mask.h"
#include "flashgla/ops/softmax_attention/implementations.h"

namespace flashgla::ops::softmax_attention {

class ProbabilityMask {
 public:
  ProbabilityMask(const Inputs& in, const Options& options)
      : rule_(options.dropout),
        tokens_(in.q.size(1)),
        heads_(in.q.size(2)),
        cached_(in.past_k ? in.past_k.size(1) : 0),
        draws_a_row_((tokens_ + cached_ + dropout::kElementsPerDraw - 1) / dropout::kElementsPerDraw),
        stream_(rule_.stream()) {}

  // None where nothing falls out.
  static std::optional<ProbabilityMask> of(const Inputs& in, const Options& options) {
    return options.dropout.probability > 0.0 ? std::optional(ProbabilityMask(in, options)) : std::nullopt;
  }

  // Of token t of the sequence and a head, calls body(j, factor) for the keys at positions first <= j < last.
  template <class Body>
  void for_each(const Sequence& s, std::int64_t t, std::int64_t head, std::int64_t first, std::int64_t last,
                const Body& body) const {
    const std::int64_t row = ((s.batch * tokens_ + s.begin + t) * heads_ + head) * draws_a_row_;
    std::int64_t drawn = -1;
    random::Words words{};
    for (std::int64_t j = first; j < last; ++j) {
      const std::int64_t column = j >= s.position ? s.begin + j - s.position : tokens_ + j % cached_;
      const std::int64_t draw = row + column / dropout::kElementsPerDraw;
      if (draw != drawn) words = stream_.words(static_cast<std::uint64_t>(drawn = draw));
      body(j, rule_.factor_of(words, static_cast<int>(column % dropout::kElementsPerDraw)));
    }
  }

 private:
  dropout::Rule rule_;
  std::int64_t tokens_, heads_, cached_, draws_a_row_;
  random::Stream stream_;
};

}  // namespace flashgla::ops::softmax_attention
