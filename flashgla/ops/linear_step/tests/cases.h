// The operator as cases that test and bench share.
#pragma once

#include <cmath>

#include "flashgla/ops/linear_step/linear_step.h"
#include "testing/conformance.h"

namespace flashgla::ops::linear_step {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

struct Form {
  Prologue prologue = Prologue::none;
  Epilogue epilogue = Epilogue::store;
  std::int64_t heads = 1;  // of head_norm
  bool gate = false, norm_weight = false, bias = false;
  std::int64_t second_out = 0;  // columns of a second layer; 0: none
};

inline testing::OperatorCase step_case(std::int64_t rows, std::int64_t in, std::int64_t out, Form form) {
  const std::int64_t halves = form.epilogue == Epilogue::swiglu ? 2 : 1;
  const Role role = form.epilogue == Epilogue::add ? Role::accumulated : Role::output;
  const double deviation = 1.0 / std::sqrt(static_cast<double>(in));
  testing::OperatorCase result;
  static const char* const prologues[] = {"plain", "rms norm", "head norm"};
  static const char* const epilogues[] = {"store", "add", "swiglu", "log sigmoid"};
  result.name = "linear step " + to_string(Shape({rows, in, out})) + " " + prologues[static_cast<int>(form.prologue)] +
                (form.gate ? " gate" : "") + " " + epilogues[static_cast<int>(form.epilogue)] +
                (form.bias ? " bias" : "") + (form.second_out ? " two layers" : "");
  const auto parameter = [&](const char* name, const Shape& shape, double spread, double mean = 0.0) {
    testing::Argument argument{name, shape, Role::input, Kind::parameter, spread, mean};
    argument.strided = false;
    result.arguments.push_back(argument);
  };
  result.arguments.push_back({"x", Shape({rows, in})});
  if (form.gate) result.arguments.push_back({"gate", Shape({rows, in})});
  if (form.norm_weight) parameter("norm_weight", Shape({in / form.heads}), 0.2, 1.0);
  parameter("weight", Shape({halves * out, in}), deviation);
  if (form.bias) parameter("bias", Shape({out}), 1.0);
  result.arguments.push_back({"y", Shape({rows, out}), role});
  if (form.second_out) {
    parameter("weight2", Shape({halves * form.second_out, in}), deviation);
    result.arguments.push_back({"y2", Shape({rows, form.second_out}), role});
  }
  result.run = [=](Context& context, const NamedTensors& t) {
    Inputs inputs{
        t["x"],   form.prologue, t["norm_weight"], 1e-6, form.prologue == Prologue::head_norm ? in / form.heads : 0,
        t["gate"]};
    std::vector<Layer> layers = {{t["weight"], t["bias"], t["y"]}};
    if (form.second_out) layers.push_back({t["weight2"], {}, t["y2"]});
    run(context, inputs, layers, {form.epilogue});
  };
  result.dtypes = {{DType::f32, DType::f32}, {DType::f32, DType::bf16}, {DType::bf16, DType::bf16}};
  return result;
}

}  // namespace flashgla::ops::linear_step
