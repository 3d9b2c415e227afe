// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/global_norm/global_norm.h"
#include "testing/conformance.h"

namespace flashgla::ops::global_norm {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

inline testing::OperatorCase sum_case(const Shape& shape) {
  testing::Argument x{"x", shape};
  x.strided = false;
  return {"sum of squares " + to_string(shape),
          {x, {"sum", Shape({1}), Role::output, Kind::fixed}},
          [](Context& context, const NamedTensors& t) { sum_of_squares(context, t["x"], t["sum"]); }};
}

inline testing::OperatorCase non_finite_case(const Shape& shape) {
  testing::Argument x{"x", shape};
  x.strided = false;
  return {"non-finite " + to_string(shape), {x}, [](Context& context, const NamedTensors& t) {
            find_non_finite(context, t["x"]);
          }};
}

}  // namespace flashgla::ops::global_norm
