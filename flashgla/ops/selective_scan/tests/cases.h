// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/elements.h"
#include "flashgla/ops/matmul/matmul.h"
#include "flashgla/ops/selective_scan/selective_scan.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::selective_scan {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

// B sequences of T tokens, E channels of K states; with `ends`, packed sequences that end there (B = 1).
struct Form {
  std::int64_t batch, length, channels, states = 16;
  std::vector<std::int32_t> ends{};
  bool carried = true;  // with h0 and ht
  bool kept = true;     // backward gets what forward kept

  Shape wide() const { return Shape({batch, length, channels}); }
  Shape narrow() const { return Shape({batch, length, states}); }
  std::int64_t sequences() const { return ends.empty() ? batch : static_cast<std::int64_t>(ends.size()); }
};

inline testing::Argument parameter(const char* name, const Shape& shape, double deviation, double mean) {
  return {
      .name = name, .shape = shape, .kind = Kind::parameter, .deviation = deviation, .mean = mean, .strided = false};
}

inline testing::Argument state_of(const char* name, const Form& form, Role role) {
  return {.name = name,
          .shape = Shape({form.sequences(), form.channels, form.states}),
          .role = role,
          .kind = Kind::accumulator,
          .strided = false};
}

// Steps are from 0.001 to some tenths and rates from 0.1 to 20, as in a trained layer and beyond.
inline std::vector<testing::Argument> inputs_of(const Form& form) {
  std::vector<testing::Argument> arguments{{"x", form.wide()},
                                           {"raw", form.wide()},
                                           {"z", form.wide(), Role::input, Kind::activation, 2.0},
                                           {"b", form.narrow()},
                                           {"c", form.narrow()},
                                           parameter("dt_bias", Shape({form.channels}), 1.0, -3.0),
                                           parameter("a_log", Shape({form.channels, form.states}), 1.0, 1.0),
                                           parameter("skip", Shape({form.channels}), 0.5, 1.0)};
  if (form.carried) arguments.push_back(state_of("h0", form, Role::input));
  if (!form.ends.empty()) arguments.push_back(testing::bounds(form.ends));
  return arguments;
}

inline Inputs inputs_in(const NamedTensors& t) {
  return {t["x"], t["raw"], t["z"], t["b"], t["c"], t["dt_bias"], t["a_log"], t["skip"], t["h0"], t["cu_seqlens"]};
}

inline std::string name_of_form(const char* what, const Form& form) {
  return std::string(what) + " " + to_string(form.wide()) + " K" + std::to_string(form.states) +
         (form.ends.empty() ? "" : " packed");
}

inline testing::OperatorCase forward_case(const Form& form) {
  testing::OperatorCase result;
  result.name = name_of_form("forward", form);
  result.arguments = inputs_of(form);
  result.arguments.push_back({"y", form.wide(), Role::output});
  if (form.carried) result.arguments.push_back(state_of("ht", form, Role::output));
  result.run = [](Context& context, const NamedTensors& t) { forward(context, inputs_in(t), {t["y"], t["ht"], {}}); };
  return result;
}

// kept: with a forward in front that keeps what backward reads, as in training.
inline testing::OperatorCase backward_case(const Form& form) {
  testing::OperatorCase result;
  result.name = name_of_form(form.kept ? "forward and backward" : "backward", form);
  result.arguments = inputs_of(form);
  result.arguments.push_back({"dy", form.wide()});
  for (const char* name : {"dx", "draw", "dz"}) result.arguments.push_back({name, form.wide(), Role::output});
  for (const char* name : {"db", "dc"}) result.arguments.push_back({name, form.narrow(), Role::output});
  testing::Argument da_log = parameter("da_log", Shape({form.channels, form.states}), 1.0, 0.0);
  testing::Argument dskip = parameter("dskip", Shape({form.channels}), 1.0, 0.0);
  for (testing::Argument* sum : {&da_log, &dskip}) {
    sum->role = Role::accumulated;
    sum->kind = Kind::accumulator;
    result.arguments.push_back(*sum);
  }
  if (form.kept) result.arguments.push_back({"y", form.wide(), Role::output});
  result.run = [kept = form.kept](Context& context, const NamedTensors& t) {
    const ArenaScope scope(context.scratch());
    const Inputs inputs = inputs_in(t);
    const TensorView states = kept ? testing::kept_in_scratch(context, kept_bytes(context, inputs)) : TensorView();
    if (kept) forward(context, inputs, {t["y"], {}, states});
    backward(context, inputs, states, t["dy"],
             {t["dx"], t["draw"], t["dz"], t["db"], t["dc"], t["da_log"], t["dskip"]});
  };
  return result;
}

inline testing::OperatorCase step_case(std::int64_t sequences, std::int64_t channels, std::int64_t states) {
  const Form form{sequences, 1, channels, states};
  testing::OperatorCase result;
  result.name = "step " + to_string(Shape({sequences, channels, states}));
  const Shape wide({sequences, channels}), narrow({sequences, states});
  result.arguments = inputs_of(form);
  result.arguments.pop_back();  // h0
  for (int i = 0; i < 5; ++i) result.arguments[static_cast<std::size_t>(i)].shape = i < 3 ? wide : narrow;
  result.arguments.push_back(state_of("state", form, Role::accumulated));
  result.arguments.push_back({"y", wide, Role::output});
  result.run = [](Context& context, const NamedTensors& t) { step(context, inputs_in(t), t["state"], t["y"]); };
  return result;
}

// Element i of a dense matrix: value_of(i).
template <class ValueOf>
void fill_rows(const TensorView& view, const ValueOf& value_of) {
  const Elements elements(view);
  for (std::int64_t i = 0; i < view.numel(); ++i) elements.set(i / view.size(1), i % view.size(1), value_of(i));
}

// The same with raw as a product of `rank` columns where the implementation computes it, with the product beforehand
// elsewhere. Sums of a few ones and 32nds, which bf16 holds exactly: rounding the product to x's dtype changes nothing.
inline testing::OperatorCase projected_step_case(std::int64_t sequences, std::int64_t channels, std::int64_t states,
                                                 std::int64_t rank) {
  testing::OperatorCase result = step_case(sequences, channels, states);
  result.name += " with a projection";
  result.arguments[1] = {"ranks", Shape({sequences, rank})};
  result.arguments[1].fill = [](const TensorView& view) {
    fill_rows(view, [](std::int64_t i) { return i % 11 == 3 ? 1.0 : 0.0; });
  };
  result.arguments.push_back(parameter("weight", Shape({channels, rank}), 0.0, 0.0));
  result.arguments.back().fill = [](const TensorView& view) {
    fill_rows(view, [](std::int64_t i) { return static_cast<double>(i * 7 % 53 - 26) / 32.0; });
  };
  result.run = [=](Context& context, const NamedTensors& t) {
    const ArenaScope scope(context.scratch());
    Inputs inputs = inputs_in(t);
    StepProjection projection{t["ranks"], t["weight"]};
    if (!step_projects(context, inputs, projection)) {
      projection = {};
      inputs.raw = context.scratch().tensor(inputs.x.shape, inputs.x.dtype, "selective_scan: raw");
      matmul::run(context, t["ranks"], t["weight"].transpose(0, 1), inputs.raw);
    }
    step(context, inputs, t["state"], t["y"], projection);
  };
  return result;
}

}  // namespace flashgla::ops::selective_scan
