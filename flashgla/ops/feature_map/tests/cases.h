// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/feature_map/feature_map.h"
#include "testing/conformance.h"

namespace flashgla::ops::feature_map {

inline Shape features_of_shape(const Shape& shape, Map map) {
  Shape features = shape;
  features[-1] = features_of(map, shape[-1]);
  return features;
}

// What is divided by its sum is about 1 there, so that the sum is far from 0 where features have signs.
inline testing::OperatorCase case_of(const Shape& shape, const Options& options, bool is_backward) {
  using testing::Kind;
  using testing::Role;
  const Shape features = features_of_shape(shape, options.map);
  testing::OperatorCase result;
  result.name = std::string(is_backward ? "backward " : "forward ") + to_string(shape) + ", map " +
                std::to_string(static_cast<int>(options.map)) + (options.divide ? ", divided" : "");
  const bool shifted = options.divide && options.map == Map::as_is;
  result.arguments = {{"x", shape, Role::input, Kind::activation, shifted ? 0.2 : 1.0, shifted ? 1.0 : 0.0},
                      is_backward ? testing::Argument{"dy", features} : testing::Argument{"y", features, Role::output}};
  if (is_backward) result.arguments.push_back({"dx", shape, Role::output});
  result.run = [=](Context& context, const testing::NamedTensors& t) {
    is_backward ? backward(context, t["x"], t["dy"], t["dx"], options) : forward(context, t["x"], t["y"], options);
  };
  return result;
}

}  // namespace flashgla::ops::feature_map
