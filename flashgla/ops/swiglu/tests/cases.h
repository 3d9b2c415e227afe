// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/swiglu/swiglu.h"
#include "testing/conformance.h"

namespace flashgla::ops::swiglu {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

// y in bf16 beside f32 where the pair of dtypes says so.
inline testing::OperatorCase forward_case(const Shape& shape) {
  return {
      "forward " + to_string(shape),
      {{"gate", shape, Role::input, Kind::activation, 4.0}, {"up", shape}, {"y", shape, Role::output, Kind::parameter}},
      [](Context& context, const NamedTensors& t) { forward(context, t["gate"], t["up"], t["y"]); }};
}

// `again`: y is wanted too.
inline testing::OperatorCase backward_case(const Shape& shape, bool again) {
  testing::OperatorCase result{"backward " + to_string(shape),
                               {{"gate", shape, Role::input, Kind::activation, 4.0},
                                {"up", shape},
                                {"dy", shape},
                                {"dgate", shape, Role::output},
                                {"dup", shape, Role::output}},
                               [](Context& context, const NamedTensors& t) {
                                 backward(context, t["gate"], t["up"], t["dy"], t["dgate"], t["dup"], t["y"]);
                               }};
  if (again) result.arguments.push_back({"y", shape, Role::output});
  return result;
}

}  // namespace flashgla::ops::swiglu
