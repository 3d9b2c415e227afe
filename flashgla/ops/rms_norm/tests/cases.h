// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/rms_norm/rms_norm.h"
#include "testing/conformance.h"

namespace flashgla::ops::rms_norm {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

constexpr double kEpsilon = 1e-6;

// `optional`: with weight and rstd; dx accumulated.
inline testing::OperatorCase forward_case(const Shape& shape, bool optional) {
  testing::OperatorCase result;
  result.name = "forward " + to_string(shape);
  result.arguments = {{"x", shape}, {"y", shape, Role::output}};
  if (optional) {
    const Shape rows({shape.numel() / shape[-1]}), columns({shape[-1]});
    result.arguments.push_back({"weight", columns, Role::input, Kind::parameter});
    result.arguments.push_back({"rstd", rows, Role::output, Kind::accumulator});
  }
  result.run = [](Context& context, const NamedTensors& t) {
    forward(context, {t["x"], t["weight"]}, {t["y"], t["rstd"]}, kEpsilon);
  };
  return result;
}

inline testing::OperatorCase backward_case(const Shape& shape, bool optional) {
  const Shape rows({shape.numel() / shape[-1]}), columns({shape[-1]});
  testing::OperatorCase result;
  result.name = "backward " + to_string(shape);
  result.arguments = {{"x", shape},
                      {"rstd", rows, Role::input, Kind::accumulator, 0.1, 1.0},
                      {"dy", shape},
                      {"dx", shape, optional ? Role::accumulated : Role::output}};
  if (optional) {
    result.arguments.push_back({"weight", columns, Role::input, Kind::parameter});
    result.arguments.push_back({"dweight", columns, Role::accumulated, Kind::accumulator});
  }
  result.run = [=](Context& context, const NamedTensors& t) {
    backward(context, t["x"], t["weight"], t["rstd"], t["dy"], t["dx"], optional, t["dweight"]);
  };
  return result;
}

}  // namespace flashgla::ops::rms_norm
