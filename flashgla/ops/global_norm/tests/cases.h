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
          {x, {"sum", Shape({1}), Role::output, Kind::accumulator}},
          [](Context& context, const NamedTensors& t) {
            const double sum = sum_of_squares(context, t["x"]);
            if (!context.planning()) fill(t["sum"], sum);
          }};
}

inline testing::OperatorCase non_finite_case(const Shape& shape) {
  testing::Argument x{"x", shape};
  x.strided = false;
  return {"non-finite " + to_string(shape),
          {x, {"found", Shape({1}), Role::output, Kind::accumulator}},
          [](Context& context, const NamedTensors& t) {
            const bool found = find_non_finite(context, t["x"]);
            if (!context.planning()) fill(t["found"], found ? 1.0 : 0.0);
          }};
}

}  // namespace flashgla::ops::global_norm
