// The operator as cases that test and bench share.
#pragma once

#include "flashgla/base/memory.h"
#include "flashgla/ops/dropout/dropout.h"
#include "testing/conformance.h"

namespace flashgla::ops::dropout {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

inline testing::OperatorCase case_of(const Shape& shape, double probability, bool sum) {
  testing::OperatorCase result{
      (sum ? "with a sum " : "alone ") + to_string(shape) + " p " + std::to_string(probability),
      {{.name = "x", .shape = shape, .strided = false},
       {.name = "out", .shape = shape, .role = Role::output, .strided = false},
       {.name = "step",
        .shape = Shape({1}),
        .kind = Kind::fixed,
        .fill = [](const TensorView& view) { view.as<double>()[0] = 70000.0; },
        .dtype = DType::f64},
       {.name = "micro_batch",
        .shape = Shape({1}),
        .kind = Kind::integer,
        .fill = [](const TensorView& view) { view.as<std::int32_t>()[0] = 3; }}},
      [probability](Context& context, const NamedTensors& t) {
        run(context, t["x"], t["residual"], t["out"],
            {probability, 0x123456789abcdefull, 17, t["step"], t["micro_batch"]});
      }};
  if (sum) result.arguments.push_back({.name = "residual", .shape = shape, .strided = false});
  return result;
}

}  // namespace flashgla::ops::dropout
