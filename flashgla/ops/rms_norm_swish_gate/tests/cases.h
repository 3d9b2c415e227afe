// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/rms_norm_swish_gate/rms_norm_swish_gate.h"
#include "testing/conformance.h"

namespace flashgla::ops::rms_norm_swish_gate {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

constexpr double kEpsilon = 1e-6;

// `weighted`: with weight, rstd and dweight.
inline testing::OperatorCase forward_case(const Shape& shape, bool weighted) {
  testing::OperatorCase result;
  result.name = "forward " + to_string(shape);
  result.arguments = {{"x", shape}, {"gate", shape, Role::input, Kind::activation, 3.0}, {"y", shape, Role::output}};
  if (weighted) {
    const Shape rows({shape.numel() / shape[-1]}), columns({shape[-1]});
    result.arguments.push_back({"weight", columns, Role::input, Kind::parameter});
    result.arguments.push_back({"rstd", rows, Role::output, Kind::accumulator});
  }
  result.run = [](Context& context, const NamedTensors& t) {
    forward(context, t["x"], t["gate"], t["weight"], t["y"], t["rstd"], kEpsilon);
  };
  return result;
}

inline testing::OperatorCase backward_case(const Shape& shape, bool weighted) {
  const Shape rows({shape.numel() / shape[-1]}), columns({shape[-1]});
  testing::OperatorCase result;
  result.name = "backward " + to_string(shape);
  result.arguments = {{"x", shape},
                      {"gate", shape, Role::input, Kind::activation, 3.0},
                      {"rstd", rows, Role::input, Kind::accumulator, 0.1, 1.0},
                      {"dy", shape},
                      {"dx", shape, Role::output},
                      {"dgate", shape, Role::output}};
  if (weighted) {
    result.arguments.push_back({"weight", columns, Role::input, Kind::parameter});
    result.arguments.push_back({"dweight", columns, Role::accumulated, Kind::accumulator});
  }
  result.run = [](Context& context, const NamedTensors& t) {
    backward(context, t["x"], t["gate"], t["weight"], t["rstd"], t["dy"], t["dx"], t["dgate"], t["dweight"]);
  };
  return result;
}

}  // namespace flashgla::ops::rms_norm_swish_gate
