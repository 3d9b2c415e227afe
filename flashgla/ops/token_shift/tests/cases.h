// The operator as cases that test and bench share.
#pragma once

#include <algorithm>

#include "flashgla/ops/token_shift/token_shift.h"
#include "testing/conformance.h"

namespace flashgla::ops::token_shift {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

// B sequences of T tokens, D channels, M mixes; with `ends`, packed sequences that end there (B = 1).
struct Form {
  std::int64_t batch, length, channels, mixes = 3;
  std::vector<std::int32_t> ends{};
  bool carried = true;  // with states

  Shape wide() const { return Shape({batch, length, channels}); }
  Shape mixed() const { return Shape({mixes, batch, length, channels}); }
  std::int64_t sequences() const { return ends.empty() ? batch : static_cast<std::int64_t>(ends.size()); }
};

inline testing::Argument state_of(const char* name, const Form& form, Role role) {
  return {.name = name,
          .shape = Shape({form.sequences(), form.channels}),
          .role = role,
          .kind = Kind::accumulator,
          .strided = false};
}

inline std::vector<testing::Argument> inputs_of(const Form& form) {
  std::vector<testing::Argument> arguments{{"x", form.wide()},
                                           {.name = "mu",
                                            .shape = Shape({form.mixes, form.channels}),
                                            .kind = Kind::parameter,
                                            .deviation = 0.3,
                                            .mean = 0.5,
                                            .strided = false}};
  if (form.carried) arguments.push_back(state_of("initial_state", form, Role::input));
  if (!form.ends.empty()) arguments.push_back(testing::bounds(form.ends));
  return arguments;
}

inline Inputs inputs_in(const NamedTensors& t) { return {t["x"], t["mu"], t["initial_state"], t["cu_seqlens"]}; }

inline std::string name_of_form(const char* what, const Form& form) {
  return std::string(what) + " " + std::to_string(form.mixes) + " x " + to_string(form.wide()) +
         (form.ends.empty() ? "" : " packed");
}

inline testing::OperatorCase forward_case(const Form& form) {
  testing::OperatorCase result;
  result.name = name_of_form("forward", form);
  result.arguments = inputs_of(form);
  result.arguments.push_back({"y", form.mixed(), Role::output});
  if (form.carried) result.arguments.push_back(state_of("final_state", form, Role::output));
  result.run = [](Context& context, const NamedTensors& t) {
    forward(context, inputs_in(t), {t["y"], t["final_state"]});
  };
  return result;
}

inline testing::OperatorCase backward_case(const Form& form) {
  testing::OperatorCase result;
  result.name = name_of_form("backward", form);
  result.arguments = inputs_of(form);
  result.arguments.push_back({"dy", form.mixed()});
  result.arguments.push_back({"dx", form.wide(), Role::output});
  result.arguments.push_back({.name = "dmu",
                              .shape = Shape({form.mixes, form.channels}),
                              .role = Role::accumulated,
                              .kind = Kind::accumulator,
                              .strided = false});
  result.run = [](Context& context, const NamedTensors& t) {
    backward(context, inputs_in(t), t["dy"], {t["dx"], t["dmu"]});
  };
  return result;
}

inline testing::OperatorCase step_case(std::int64_t sequences, std::int64_t channels, std::int64_t mixes) {
  const Form form{sequences, 1, channels, mixes, {}, false};
  testing::OperatorCase result;
  result.name = "step " + to_string(form.mixed());
  result.arguments = inputs_of(form);
  result.arguments[0].shape = Shape({sequences, channels});
  result.arguments.push_back(state_of("state", form, Role::accumulated));
  result.arguments.push_back({"y", Shape({mixes, sequences, channels}), Role::output});
  result.run = [](Context& context, const NamedTensors& t) { step(context, t["x"], t["mu"], t["state"], t["y"]); };
  return result;
}

}  // namespace flashgla::ops::token_shift
