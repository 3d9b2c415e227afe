// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/layer_norm/layer_norm.h"
#include "testing/conformance.h"

namespace flashgla::ops::layer_norm {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

constexpr double kEpsilon = 1e-5;

// `training`: with mean and rstd.
inline testing::OperatorCase forward_case(const Shape& shape, bool training) {
  const Shape rows({shape.numel() / shape[-1]}), columns({shape[-1]});
  testing::OperatorCase result;
  result.name = "forward " + to_string(shape);
  result.arguments = {{"x", shape},
                      {"weight", columns, Role::input, Kind::parameter},
                      {"bias", columns, Role::input, Kind::parameter},
                      {"y", shape, Role::output}};
  if (training) {
    result.arguments.push_back({"mean", rows, Role::output, Kind::accumulator});
    result.arguments.push_back({"rstd", rows, Role::output, Kind::accumulator});
  }
  result.run = [](Context& context, const NamedTensors& t) {
    forward(context, {t["x"], t["weight"], t["bias"]}, {t["y"], t["mean"], t["rstd"]}, kEpsilon);
  };
  return result;
}

inline testing::OperatorCase backward_case(const Shape& shape, bool accumulate) {
  const Shape rows({shape.numel() / shape[-1]}), columns({shape[-1]});
  testing::OperatorCase result;
  result.name = "backward " + to_string(shape);
  result.arguments = {{"x", shape},
                      {"mean", rows, Role::input, Kind::accumulator, 0.1},
                      {"rstd", rows, Role::input, Kind::accumulator, 0.1, 1.0},
                      {"dy", shape},
                      {"weight", columns, Role::input, Kind::parameter},
                      {"dx", shape, accumulate ? Role::accumulated : Role::output},
                      {"dweight", columns, Role::accumulated, Kind::accumulator}};
  result.run = [=](Context& context, const NamedTensors& t) {
    backward(context, t["x"], t["weight"], t["mean"], t["rstd"], t["dy"], t["dx"], accumulate, t["dweight"]);
  };
  return result;
}

}  // namespace flashgla::ops::layer_norm
