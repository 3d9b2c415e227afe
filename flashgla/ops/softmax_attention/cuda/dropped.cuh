// Dropout of probabilities in kernels: probability_mask.h's elements.
#pragma once

#include <optional>

#include "flashgla/ops/dropout/mask.h"
#include "flashgla/ops/softmax_attention/cuda/call.cuh"

namespace flashgla::ops::softmax_attention::cuda {

struct Dropped {
  dropout::Rule rule;
  std::int64_t draws_a_row;
  float kept;  // the factor of what stays

  static std::optional<Dropped> of(const Call& call, const Options& options) {
    if (options.dropout.probability <= 0.0) return std::nullopt;
    const dropout::Rule rule(options.dropout);
    return Dropped{rule, (call.length + call.rows + dropout::kElementsPerDraw - 1) / dropout::kElementsPerDraw,
                   static_cast<float>(rule.factor())};
  }

  // What the probability of the key at position j is multiplied by, for token t of the sequence and a head.
  __device__ __forceinline__ float factor(const Call& call, const SequenceOfCall& s, int t, int head, int j) const {
    const std::int64_t token = static_cast<std::int64_t>(s.batch) * call.length + s.begin + t;
    const auto column = static_cast<unsigned>(j >= s.position ? static_cast<int>(s.begin) + j - s.position
                                                              : call.length + j % call.rows);
    const std::int64_t draw = (token * call.heads + head) * draws_a_row + column / dropout::kElementsPerDraw;
    const random::Words words = rule.stream().words(static_cast<std::uint64_t>(draw));
    return dropout::bits_of(words, static_cast<int>(column % dropout::kElementsPerDraw)) >= rule.threshold ? kept
                                                                                                           : 0.0f;
  }
};

// Where nothing falls out.
struct NoneDropped {
  __device__ __forceinline__ float factor(const Call&, const SequenceOfCall&, int, int, int) const { return 1.0f; }
};

// Calls run(Dropped) or run(NoneDropped).
template <class Run>
void with_dropped(const Call& call, const Options& options, const Run& run) {
  const std::optional<Dropped> dropped = Dropped::of(call, options);
  dropped ? run(*dropped) : run(NoneDropped());
}

}  // namespace flashgla::ops::softmax_attention::cuda
