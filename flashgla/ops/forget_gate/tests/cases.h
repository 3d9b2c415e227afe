// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/forget_gate/forget_gate.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::forget_gate {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

// Channels' bounds as every token reads them.
inline TensorView for_tokens(const TensorView& bound, const TensorView& x) {
  if (!bound) return {};
  TensorView view(bound.data, bound.dtype, x.shape, bound.device);
  for (int dim = 0; dim + 1 < view.rank(); ++dim) view.stride[dim] = 0;
  return view;
}

inline testing::Argument bounds(std::int64_t channels) {
  testing::Argument argument{.name = "bound", .shape = Shape({channels}), .kind = Kind::accumulator, .strided = false};
  argument.fill = [](const TensorView& view) {
    testing::fill_normal(view, 11, 0.1, 0.5);  // far from 0 and 1
  };
  return argument;
}

inline testing::OperatorCase forward_case(const Shape& shape, bool bounded, double normalizer) {
  testing::OperatorCase result;
  result.name = "forward " + to_string(shape);
  result.arguments = {
      {"x", shape, Role::input, Kind::activation, 5.0}, {"g", shape, Role::output}, {"k", shape, Role::output}};
  if (bounded) result.arguments.push_back(bounds(shape[-1]));
  result.run = [=](Context& context, const NamedTensors& t) {
    forward(context, t["x"], for_tokens(t["bound"], t["x"]), t["g"], t["k"], normalizer);
  };
  return result;
}

inline testing::OperatorCase backward_case(const Shape& shape, bool bounded, double normalizer) {
  testing::OperatorCase result;
  result.name = "backward " + to_string(shape);
  result.arguments = {
      {"x", shape, Role::input, Kind::activation, 5.0}, {"dg", shape}, {"dk", shape}, {"dx", shape, Role::output}};
  if (bounded) {
    result.arguments.push_back(bounds(shape[-1]));
    result.arguments.push_back({"dbound", shape, Role::output, Kind::accumulator});
  }
  result.run = [=](Context& context, const NamedTensors& t) {
    backward(context, t["x"], for_tokens(t["bound"], t["x"]), t["dg"], t["dk"], t["dx"], t["dbound"], normalizer);
  };
  return result;
}

}  // namespace flashgla::ops::forget_gate
