// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/adamw/adamw.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::adamw {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

// `half`: a bf16 parameter with its master.
inline testing::OperatorCase step_case(const Shape& shape, bool half) {
  testing::OperatorCase result;
  result.name = "step " + to_string(shape);
  auto argument = [&](const char* name, Role role, Kind kind) {
    testing::Argument one{name, shape, role, kind};
    one.strided = false;
    return one;
  };
  result.arguments = {argument("parameter", half ? Role::output : Role::accumulated, Kind::activation),
                      argument("gradient", Role::input, Kind::accumulator),
                      argument("first_moment", Role::accumulated, Kind::accumulator),
                      argument("second_moment", Role::accumulated, Kind::accumulator)};
  result.arguments.back().fill = [](const TensorView& view) {
    for (std::int64_t i = 0; i < view.numel(); ++i) {
      view.as<float>()[i] = static_cast<float>(testing::uniform(9, static_cast<std::uint64_t>(i)));
    }
  };
  if (half) result.arguments.push_back(argument("master", Role::accumulated, Kind::accumulator));
  result.dtypes = {{half ? DType::bf16 : DType::f32, DType::f32}};
  result.run = [](Context& context, const NamedTensors& t) {
    Tensors tensors{t["parameter"], t["gradient"], t["first_moment"], t["second_moment"], t["master"]};
    // The f64 run has no master: what it updates is the master, and the parameter its copy.
    const bool doubles = t["parameter"].dtype == DType::f64 && tensors.master;
    if (doubles) {
      tensors.parameter = tensors.master;
      tensors.master = {};
    }
    step(context, tensors, {1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5, 3});
    if (doubles && !context.planning()) copy(t["master"], t["parameter"]);
  };
  return result;
}

}  // namespace flashgla::ops::adamw
