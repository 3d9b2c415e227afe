// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/log_sigmoid_gate/log_sigmoid_gate.h"
#include "testing/conformance.h"

namespace flashgla::ops::log_sigmoid_gate {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

// `gate`: whether g has x's dtype or is f32.
inline testing::OperatorCase forward_case(const Shape& shape, Kind gate, double clamp_min) {
  return {"forward " + to_string(shape),
          {{"x", shape, Role::input, Kind::activation, 5.0}, {"g", shape, Role::output, gate}},
          [=](Context& context, const NamedTensors& t) { forward(context, t["x"], t["g"], 16.0, clamp_min); }};
}

inline testing::OperatorCase backward_case(const Shape& shape, Kind gate, double clamp_min) {
  return {
      "backward " + to_string(shape),
      {{"x", shape, Role::input, Kind::activation, 5.0}, {"dg", shape, Role::input, gate}, {"dx", shape, Role::output}},
      [=](Context& context, const NamedTensors& t) { backward(context, t["x"], t["dg"], t["dx"], 16.0, clamp_min); }};
}

}  // namespace flashgla::ops::log_sigmoid_gate
