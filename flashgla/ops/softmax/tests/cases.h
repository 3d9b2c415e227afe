// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/softmax/softmax.h"
#include "testing/conformance.h"

namespace flashgla::ops::softmax {

inline testing::OperatorCase case_of(const Shape& shape, bool is_backward) {
  using testing::Kind;
  using testing::Role;
  if (is_backward) {  // what a forward gives is between 0 and 1
    return {"backward " + to_string(shape),
            {{"y", shape, Role::input, Kind::activation, 0.1, 0.5}, {"dy", shape}, {"dx", shape, Role::output}},
            [](Context& context, const testing::NamedTensors& t) { backward(context, t["y"], t["dy"], t["dx"]); }};
  }
  return {"forward " + to_string(shape),
          {{"x", shape, Role::input, Kind::activation, 5.0}, {"y", shape, Role::output}},
          [](Context& context, const testing::NamedTensors& t) { forward(context, t["x"], t["y"]); }};
}

}  // namespace flashgla::ops::softmax
