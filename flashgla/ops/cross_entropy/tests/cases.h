// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/cross_entropy/cross_entropy.h"
#include "testing/conformance.h"

namespace flashgla::ops::cross_entropy {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

inline testing::Argument targets_of(std::int64_t rows, std::int64_t words) {
  testing::Argument targets{"targets", Shape({rows}), Role::input, Kind::integer};
  targets.fill = [=](const TensorView& view) {
    for (std::int64_t row = 0; row < rows; ++row) {
      view.as<std::int32_t>()[row] = row % 5 == 3 ? -1 : static_cast<std::int32_t>(row * 13 % words);
    }
  };
  return targets;
}

// For one pair of dtypes.
inline testing::OperatorCase head_case(std::int64_t rows, std::int64_t length, std::int64_t words, bool backward,
                                       testing::DTypePair dtypes) {
  testing::OperatorCase result;
  result.name = (backward ? "forward_backward " : "forward ") + to_string(Shape({rows, length, words}));
  result.dtypes = {dtypes};
  result.arguments = {{"x", Shape({rows, length})},
                      {"weight", Shape({words, length}), Role::input, Kind::parameter, 0.5},
                      targets_of(rows, words),
                      {"losses", Shape({rows}), Role::output, Kind::accumulator}};
  // On CUDA the logits are rounded to bf16: each by up to half of epsilon, and a loss is their difference.
  if (dtypes.activation == DType::bf16) result.arguments.back().relative_on_cuda = testing::tolerance(DType::bf16);
  result.run = [](Context& context, const NamedTensors& t) {
    const Inputs inputs{t["x"], t["weight"], t["targets"]};
    if (!t["dx"]) return forward(context, inputs, t["losses"]);
    forward_backward(context, inputs, t["losses"], t["dx"], t["dweight"], 0.25);
  };
  if (!backward) return result;
  result.arguments.push_back({"dx", Shape({rows, length}), Role::output});
  testing::Argument dweight{"dweight", Shape({words, length}), Role::accumulated, Kind::accumulator, 0.01};
  // With bf16 the gradient of the logits is rounded before it is multiplied.
  if (dtypes.activation == DType::bf16) dweight.relative = testing::tolerance(DType::bf16);
  // On CUDA a probability has its rounded logit's error besides: |z| epsilon / 2, and |z| is up to 8 here.
  if (dtypes.activation == DType::bf16) {
    dweight.relative_on_cuda = result.arguments.back().relative_on_cuda = 2.0 * testing::tolerance(DType::bf16);
  }
  result.arguments.push_back(dweight);
  return result;
}

}  // namespace flashgla::ops::cross_entropy
