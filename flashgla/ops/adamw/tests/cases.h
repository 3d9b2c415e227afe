// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/adamw/adamw.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::adamw {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

// What lies beside the parameter.
struct Form {
  const char* name;
  DType parameter;
  DType master;  // of a bf16 parameter
  DType moments;
};
constexpr Form kForms[] = {
    {"f32", DType::f32, DType::f32, DType::f32},
    {"f32 with bf16 moments", DType::f32, DType::f32, DType::bf16},
    {"bf16 with f32 master", DType::bf16, DType::f32, DType::f32},
    {"bf16 with split master", DType::bf16, DType::u16, DType::f32},
    {"bf16 with split master, bf16 moments", DType::bf16, DType::u16, DType::bf16},
};

inline Settings case_settings() {
  Settings settings;
  settings.weight_decay = 0.1;
  settings.seed = 7;
  return settings;
}

// Decay ends, begins, ends in [0, count).
inline std::vector<std::int64_t> case_boundaries(std::int64_t count) { return {count / 3, count / 2 + 1, count - 3}; }

inline testing::OperatorCase step_case(std::int64_t count, const Form& form) {
  const Shape shape({count});
  testing::OperatorCase result;
  result.name = "step " + std::string(form.name) + " " + to_string(shape);
  const bool half = form.parameter == DType::bf16, split_master = half && form.master == DType::u16;
  const Kind moments = form.moments == DType::bf16 ? Kind::parameter : Kind::accumulator;
  result.arguments = {{"parameter", shape, half && !split_master ? Role::output : Role::accumulated, Kind::activation},
                      {"gradient", shape, Role::input, Kind::accumulator},
                      {"first_moment", shape, Role::accumulated, moments},
                      {"second_moment", shape, Role::accumulated, moments}};
  result.arguments.back().fill = [](const TensorView& view) {
    testing::fill_by_index(view, [](std::uint64_t i) { return testing::uniform(9, i); });
  };
  testing::Argument boundaries{"boundaries", Shape({3}), Role::input, Kind::fixed};
  boundaries.dtype = DType::i64;
  boundaries.fill = [=](const TensorView& view) {
    const std::vector<std::int64_t> values = case_boundaries(count);
    std::copy(values.begin(), values.end(), view.as<std::int64_t>());
  };
  result.arguments.push_back(boundaries);
  testing::Argument scalars{"scalars", Shape({kStepScalars}), Role::input, Kind::fixed};
  scalars.fill = [](const TensorView& view) {
    StepScalars start;
    start.learning_rate = 1e-2;
    start.gradient_scale = 0.5;
    start.updates = 2.0;
    *reinterpret_cast<StepScalars*>(view.as<double>()) = prepared(start, 1.0, 0.0, case_settings());
  };
  result.arguments.push_back(scalars);
  if (split_master) {  // changed too, but not a number of its own: with the parameter it is one
    testing::Argument low{"master", shape, Role::input, Kind::fixed};
    low.dtype = DType::u16;
    low.fill = [](const TensorView& view) { fill(view, 0.0); };
    result.arguments.push_back(low);
  } else if (half) {
    result.arguments.push_back({"master", shape, Role::accumulated, Kind::accumulator});
  }
  result.dtypes = {{form.parameter, form.moments}};
  result.run = [=](Context& context, const NamedTensors& t) {
    Tensors tensors{
        t["parameter"],  t["gradient"], t["first_moment"], t["second_moment"], half ? t["master"] : TensorView(),
        t["boundaries"], t["scalars"]};
    // The f64 run has no master: what it updates is the master, and the parameter its copy.
    const bool doubles = t["parameter"].dtype == DType::f64 && half;
    if (doubles && !split_master) tensors.parameter = t["master"];
    if (doubles) tensors.master = {};
    step(context, tensors, case_settings());
    if (doubles && !split_master && !context.planning()) copy(t["master"], t["parameter"]);
  };
  return result;
}

}  // namespace flashgla::ops::adamw
