// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/short_convolution/short_convolution.h"
#include "testing/conformance.h"

namespace flashgla::ops::short_convolution {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

// x [B,T,D]; with `ends`, packed sequences that end there (B = 1); `states`: with initial and final state; `bias`: with
// one.
struct Form {
  Shape shape;
  std::int64_t width = 4;
  std::vector<std::int32_t> ends{};
  bool states = true;
  Activation activation = Activation::silu;
  bool bias = false;
};

inline testing::Argument state_of(const char* name, const Form& form, Role role) {
  const std::int64_t count = form.ends.empty() ? form.shape[0] : static_cast<std::int64_t>(form.ends.size());
  testing::Argument state{name, Shape({count, form.shape[2], form.width - 1}), role, Kind::accumulator};
  state.strided = false;
  return state;
}

inline std::vector<testing::Argument> inputs_of(const Form& form) {
  testing::Argument weight{"weight", Shape({form.shape[2], form.width}), Role::input, Kind::parameter};
  weight.strided = false;
  std::vector<testing::Argument> arguments{{"x", form.shape}, weight};
  if (form.states) arguments.push_back(state_of("initial_state", form, Role::input));
  if (!form.ends.empty()) arguments.push_back(testing::bounds(form.ends));
  if (form.bias) arguments.push_back({"bias", Shape({form.shape[2]}), Role::input, Kind::parameter});
  return arguments;
}

inline Inputs inputs_in(const NamedTensors& t) {
  return {t["x"], t["weight"], t["initial_state"], t["cu_seqlens"], t["bias"]};
}
inline std::string name_of_form(const char* what, const Form& form) {
  return std::string(what) + " " + to_string(form.shape) + (form.bias ? " with a bias" : "");
}

inline testing::OperatorCase forward_case(const Form& form) {
  testing::OperatorCase result;
  result.name = name_of_form("forward", form);
  result.arguments = inputs_of(form);
  result.arguments.push_back({"y", form.shape, Role::output});
  if (form.states) result.arguments.push_back(state_of("final_state", form, Role::output));
  result.run = [=](Context& context, const NamedTensors& t) {
    forward(context, inputs_in(t), {t["y"], t["final_state"]}, form.activation);
  };
  return result;
}

inline testing::OperatorCase backward_case(const Form& form) {
  testing::OperatorCase result;
  result.name = name_of_form("backward", form);
  result.arguments = inputs_of(form);
  testing::Argument dweight{"dweight", Shape({form.shape[2], form.width}), Role::accumulated, Kind::accumulator};
  dweight.strided = false;
  result.arguments.push_back({"dy", form.shape});
  result.arguments.push_back({"dx", form.shape, Role::output});
  result.arguments.push_back(dweight);
  if (form.states) {
    result.arguments.push_back(state_of("d_final_state", form, Role::input));
    result.arguments.push_back(state_of("d_initial_state", form, Role::output));
  }
  if (form.bias) result.arguments.push_back({"dbias", Shape({form.shape[2]}), Role::accumulated, Kind::accumulator});
  result.run = [=](Context& context, const NamedTensors& t) {
    backward(context, inputs_in(t), {t["dy"], t["d_final_state"]},
             {t["dx"], t["dweight"], t["d_initial_state"], t["dbias"]}, form.activation);
  };
  return result;
}

inline testing::OperatorCase step_case(std::int64_t batch, std::int64_t channels, std::int64_t width,
                                       Activation activation, bool biased) {
  testing::OperatorCase result;
  result.name = "step " + to_string(Shape({batch, channels})) + (biased ? " with a bias" : "");
  testing::Argument weight{"weight", Shape({channels, width}), Role::input, Kind::parameter};
  testing::Argument state{"state", Shape({batch, channels, width - 1}), Role::accumulated, Kind::accumulator};
  weight.strided = state.strided = false;
  result.arguments = {{"x", Shape({batch, channels})}, weight, state, {"y", Shape({batch, channels}), Role::output}};
  if (biased) result.arguments.push_back({"bias", Shape({channels}), Role::input, Kind::parameter});
  result.run = [=](Context& context, const NamedTensors& t) {
    step(context, t["x"], t["weight"], t["state"], t["y"], activation, t["bias"]);
  };
  return result;
}

}  // namespace flashgla::ops::short_convolution
