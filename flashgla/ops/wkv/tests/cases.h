// The operator as cases that test and bench share.
#pragma once

#include <cmath>

#include "flashgla/ops/wkv/wkv.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::wkv {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

// B sequences of T tokens, E channels; with `ends`, packed sequences that end there (B = 1).
struct Form {
  std::int64_t batch, length, channels;
  std::vector<std::int32_t> ends{};
  bool carried = true;       // with h0 and ht
  bool kept = true;          // backward gets what forward kept
  double keys = 2.0;         // deviation of k
  double mean_decay = -2.5;  // of time_decay

  Shape wide() const { return Shape({batch, length, channels}); }
  std::int64_t sequences() const { return ends.empty() ? batch : static_cast<std::int64_t>(ends.size()); }
};

inline testing::Argument parameter(const char* name, const Shape& shape, double deviation, double mean) {
  return {
      .name = name, .shape = shape, .kind = Kind::parameter, .deviation = deviation, .mean = mean, .strided = false};
}

inline testing::Argument state_of(const char* name, std::int64_t sequences, std::int64_t channels, Role role) {
  testing::Argument state{.name = name,
                          .shape = Shape({sequences, 3, channels}),
                          .role = role,
                          .kind = Kind::accumulator,
                          .strided = false};
  if (role == Role::output) return state;
  // b as behind some tokens, and behind none in every seventh channel.
  state.fill = [=](const TensorView& view) {
    testing::fill_normal(view, 77, 1.0);
    for (std::int64_t i = 0; i < sequences * channels; ++i) {
      const std::int64_t at = (i / channels * 3 + 1) * channels + i % channels;
      const double value = i % 7 == 3 ? 0.0 : 1.0 + static_cast<double>(i % 5);
      view.dtype == DType::f64 ? view.as<double>()[at] = value : view.as<float>()[at] = static_cast<float>(value);
    }
  };
  return state;
}

// Decays from a half a token to one in a thousand tokens, as in a trained layer and beyond.
inline std::vector<testing::Argument> inputs_of(const Form& form) {
  const Shape channels({form.channels});
  std::vector<testing::Argument> arguments{{"k", form.wide(), Role::input, Kind::activation, form.keys},
                                           {"v", form.wide()},
                                           {"r", form.wide()},
                                           parameter("time_decay", channels, 2.0, form.mean_decay),
                                           parameter("time_first", channels, 0.5, -1.0)};
  if (form.carried) arguments.push_back(state_of("h0", form.sequences(), form.channels, Role::input));
  if (!form.ends.empty()) arguments.push_back(testing::bounds(form.ends));
  return arguments;
}

inline Inputs inputs_in(const NamedTensors& t) {
  return {t["k"], t["v"], t["r"], t["time_decay"], t["time_first"], t["h0"], t["cu_seqlens"]};
}

inline std::string name_of_form(const char* what, const Form& form) {
  return std::string(what) + " " + to_string(form.wide()) + (form.ends.empty() ? "" : " packed");
}

inline testing::OperatorCase forward_case(const Form& form) {
  testing::OperatorCase result;
  result.name = name_of_form("forward", form);
  result.arguments = inputs_of(form);
  result.arguments.push_back({"y", form.wide(), Role::output});
  if (form.carried) result.arguments.push_back(state_of("ht", form.sequences(), form.channels, Role::output));
  result.run = [](Context& context, const NamedTensors& t) { forward(context, inputs_in(t), {t["y"], t["ht"], {}}); };
  return result;
}

// kept: with a forward in front that keeps what backward reads, as in training.
inline testing::OperatorCase backward_case(const Form& form) {
  testing::OperatorCase result;
  result.name = name_of_form(form.kept ? "forward and backward" : "backward", form);
  result.arguments = inputs_of(form);
  result.arguments.push_back({"dy", form.wide()});
  for (const char* name : {"dk", "dv", "dr"}) result.arguments.push_back({name, form.wide(), Role::output});
  for (const char* name : {"dtime_decay", "dtime_first"}) {
    testing::Argument sum = parameter(name, Shape({form.channels}), 1.0, 0.0);
    sum.role = Role::accumulated;
    sum.kind = Kind::accumulator;
    // On CUDA it weighs exponents, of which a running maximum of some 3 deviations is rounded at each token.
    sum.relative_on_cuda = 1e-5 + 3.0 * form.keys * 0x1p-24 * std::sqrt(static_cast<double>(form.length));
    result.arguments.push_back(sum);
  }
  if (form.kept) result.arguments.push_back({"y", form.wide(), Role::output});
  result.run = [kept = form.kept](Context& context, const NamedTensors& t) {
    const ArenaScope scope(context.scratch());
    const Inputs inputs = inputs_in(t);
    const TensorView states = kept ? testing::kept_in_scratch(context, kept_bytes(context, inputs)) : TensorView();
    if (kept) forward(context, inputs, {t["y"], {}, states});
    backward(context, inputs, states, t["dy"], {t["dk"], t["dv"], t["dr"], t["dtime_decay"], t["dtime_first"]});
  };
  return result;
}

inline testing::OperatorCase step_case(std::int64_t sequences, std::int64_t channels) {
  const Form form{sequences, 1, channels, {}, false};
  testing::OperatorCase result;
  result.name = "step " + to_string(Shape({sequences, channels}));
  const Shape wide({sequences, channels});
  result.arguments = inputs_of(form);
  for (int i = 0; i < 3; ++i) result.arguments[static_cast<std::size_t>(i)].shape = wide;
  result.arguments.push_back(state_of("state", sequences, channels, Role::accumulated));
  result.arguments.push_back({"y", wide, Role::output});
  result.run = [](Context& context, const NamedTensors& t) { step(context, inputs_in(t), t["state"], t["y"]); };
  return result;
}

}  // namespace flashgla::ops::wkv
