// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/rotary/rotary.h"
#include "testing/conformance.h"

namespace flashgla::ops::rotary {

using testing::NamedTensors;
using testing::Role;

inline testing::OperatorCase one_case(const Shape& shape, Direction direction, std::vector<std::int32_t> positions,
                                      std::vector<std::int32_t> bounds) {
  testing::OperatorCase result;
  result.name = "rotary " + to_string(shape);
  result.arguments = {{"x", shape}, {"y", shape, Role::output}};
  if (!positions.empty()) result.arguments.push_back(testing::integers("positions", positions));
  if (!bounds.empty()) result.arguments.push_back(testing::integers("cu_seqlens", bounds));
  result.run = [=](Context& context, const NamedTensors& t) {
    run(context, t["x"], t["positions"], t["cu_seqlens"], 1e4, direction, t["y"]);
  };
  return result;
}

}  // namespace flashgla::ops::rotary
