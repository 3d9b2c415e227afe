// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/state_space/state_space.h"
#include "testing/conformance.h"

namespace flashgla::ops::state_space {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

// H heads of V channels, G groups of K state channels.
struct Form {
  std::int64_t rows, heads, value_dim, groups, key_dim;
  bool bias = true;

  std::int64_t inner() const { return heads * value_dim; }
  std::int64_t channels() const { return inner() + 2 * groups * key_dim; }
  Shape wide(std::int64_t size) const { return Shape({rows, size}); }
  Shape keys() const { return Shape({rows, heads, key_dim}); }
};

inline testing::Argument parameter(const char* name, std::int64_t size) {
  return {.name = name, .shape = Shape({size}), .kind = Kind::parameter, .deviation = 0.5, .strided = false};
}

inline std::vector<testing::Argument> inputs_of(const Form& form) {
  std::vector<testing::Argument> arguments{{"c", form.wide(form.channels())},
                                           {"raw", form.wide(form.heads), Role::input, Kind::activation, 3.0},
                                           parameter("dt_bias", form.heads),
                                           parameter("a_log", form.heads)};
  if (form.bias) arguments.push_back(parameter("bias", form.channels()));
  return arguments;
}

inline Inputs inputs_in(const NamedTensors& t) { return {t["c"], t["bias"], t["raw"], t["dt_bias"], t["a_log"]}; }

inline testing::OperatorCase forward_case(const Form& form) {
  testing::OperatorCase result;
  result.name = "forward " + to_string(form.wide(form.channels()));
  result.arguments = inputs_of(form);
  result.arguments.push_back({"u", form.wide(form.channels()), Role::output});
  result.arguments.push_back({"v", form.wide(form.inner()), Role::output});
  result.arguments.push_back({"g", form.wide(form.heads), Role::output, Kind::accumulator});
  result.run = [](Context& context, const NamedTensors& t) {
    forward(context, inputs_in(t), {t["u"], t["v"], t["g"]});
  };
  return result;
}

// Implementations may sum dc as they have rounded it to bf16, by 2^-9 of itself. A token's terms of ddt_bias, through v
// and g, may cancel: with one token, to 2^-7 of themselves, each with f32's errors. sums_of_keys: gradients of keys
// come as sums over a group's heads.
inline testing::OperatorCase backward_case(const Form& form, DType dtype, bool sums_of_keys = false) {
  testing::OperatorCase result;
  result.dtypes = {{dtype, dtype}};
  const double of_sums = dtype == DType::bf16 ? 0x1p-9 : 0.0;
  result.name = "backward " + to_string(form.wide(form.channels()));
  result.arguments = inputs_of(form);
  result.arguments.push_back(parameter("skip", form.heads));
  result.arguments.push_back({"dv", form.wide(form.inner())});
  result.arguments.push_back({"ds", form.wide(form.inner())});
  const Shape keys = sums_of_keys ? Shape({form.rows, form.groups, form.key_dim}) : form.keys();
  result.arguments.push_back({.name = "dk", .shape = keys, .strided = false});
  result.arguments.push_back({.name = "dq", .shape = keys, .strided = false});
  result.arguments.push_back({"dg", form.wide(form.heads), Role::input, Kind::accumulator});
  result.arguments.push_back({"dc", form.wide(form.channels()), Role::output});
  result.arguments.push_back({"draw", form.wide(form.heads), Role::output});
  const auto sums = [&](const char* name, std::int64_t size, double relative) {
    result.arguments.push_back({name, Shape({size}), Role::accumulated, Kind::accumulator, 1.0, 0.0, false, relative});
  };
  if (form.bias) sums("dbias", form.channels(), of_sums);
  sums("ddt_bias", form.heads, 0x1p-14);
  sums("da_log", form.heads, 0.0);
  sums("dskip", form.heads, 0.0);
  result.run = [](Context& context, const NamedTensors& t) {
    backward(context, inputs_in(t), t["skip"], {t["dv"], t["ds"], t["dk"], t["dq"], t["dg"]},
             {t["dc"], t["draw"], t["dbias"], t["ddt_bias"], t["da_log"], t["dskip"]});
  };
  return result;
}

// Behind the convolution: B sequences of T tokens, or one line of packed ones that end at `ends`; form.rows: all
// tokens. B and C have a gradient a group, or (each_head) one a head.
struct ConvolvedForm {
  Form form;
  std::int64_t batch = 1, width = 4;
  std::vector<std::int32_t> ends{};
  bool each_head = false, states = false;

  Shape wide(std::int64_t size) const { return Shape({batch, form.rows / batch, size}); }
  std::int64_t sequences() const { return ends.empty() ? batch : static_cast<std::int64_t>(ends.size()); }
  Shape state() const { return Shape({sequences(), form.channels(), width - 1}); }
};

inline std::vector<testing::Argument> convolved_inputs_of(const ConvolvedForm& of) {
  std::vector<testing::Argument> arguments = inputs_of(of.form);
  arguments[0].name = "x";
  for (std::size_t i = 0; i < 2; ++i) arguments[i].shape = of.wide(arguments[i].shape[-1]);
  arguments.push_back({.name = "weight",
                       .shape = Shape({of.form.channels(), of.width}),
                       .kind = Kind::parameter,
                       .deviation = 0.5,
                       .strided = false});
  if (of.states) {
    arguments.push_back({.name = "initial_state", .shape = of.state(), .kind = Kind::accumulator, .strided = false});
  }
  if (!of.ends.empty()) arguments.push_back(testing::bounds(of.ends));
  return arguments;
}
inline Convolution convolution_in(const NamedTensors& t) {
  return {t["x"], t["weight"], t["initial_state"], t["cu_seqlens"]};
}
inline Inputs beside_in(const NamedTensors& t) { return {{}, t["bias"], t["raw"], t["dt_bias"], t["a_log"]}; }

// Implementations may round the convolution to bf16, by 2^-9 of itself: then so are x, B and C.
inline testing::OperatorCase convolved_forward_case(const ConvolvedForm& of) {
  testing::OperatorCase result;
  result.name = "convolved forward " + to_string(of.wide(of.form.channels())) + " W" + std::to_string(of.width);
  result.arguments = convolved_inputs_of(of);
  result.arguments.push_back({"u", of.wide(of.form.channels()), Role::output});
  result.arguments.push_back({"v", of.wide(of.form.inner()), Role::output});
  result.arguments.push_back({"g", of.wide(of.form.heads), Role::output, Kind::accumulator});
  if (of.states) {
    result.arguments.push_back({.name = "final_state",
                                .shape = of.state(),
                                .role = Role::output,
                                .kind = Kind::accumulator,
                                .strided = false});
  }
  result.run = [](Context& context, const NamedTensors& t) {
    forward(context, convolution_in(t), beside_in(t), {t["u"], t["v"], t["g"]}, t["final_state"]);
  };
  return result;
}

// Implementations may round the convolution and its gradient to bf16, each by 2^-9 of itself. SiLU makes twice as much
// of what it is given at most where it gives much, and sums over few tokens cancel to half of what their terms are.
inline testing::OperatorCase convolved_backward_case(const ConvolvedForm& of, DType dtype) {
  const Form& form = of.form;
  testing::OperatorCase result;
  result.dtypes = {{dtype, dtype}};
  const double of_sums = dtype == DType::bf16 ? 0x1p-7 : 0.0;
  result.name = "convolved backward " + to_string(of.wide(form.channels())) + " W" + std::to_string(of.width);
  result.arguments = convolved_inputs_of(of);
  result.arguments.push_back(parameter("skip", form.heads));
  result.arguments.push_back({"dv", of.wide(form.inner())});
  result.arguments.push_back({"ds", of.wide(form.inner())});
  const Shape keys({of.batch, form.rows / of.batch, of.each_head ? form.heads : form.groups, form.key_dim});
  result.arguments.push_back({.name = "dk", .shape = keys, .strided = false});
  result.arguments.push_back({.name = "dq", .shape = keys, .strided = false});
  result.arguments.push_back({"dg", of.wide(form.heads), Role::input, Kind::accumulator});
  result.arguments.push_back({"dx", of.wide(form.channels()), Role::output});
  result.arguments.push_back({"draw", of.wide(form.heads), Role::output});
  const auto sums = [&](const char* name, const Shape& shape, double relative) {
    result.arguments.push_back({name, shape, Role::accumulated, Kind::accumulator, 1.0, 0.0, false, relative});
  };
  sums("dweight", Shape({form.channels(), of.width}), of_sums);
  if (form.bias) sums("dbias", Shape({form.channels()}), of_sums);
  sums("ddt_bias", Shape({form.heads}), of_sums + 0x1p-14);
  sums("da_log", Shape({form.heads}), 0.0);
  sums("dskip", Shape({form.heads}), of_sums);
  result.run = [](Context& context, const NamedTensors& t) {
    backward(context, convolution_in(t), beside_in(t), t["skip"], {t["dv"], t["ds"], t["dk"], t["dq"], t["dg"]},
             {t["dx"], t["draw"], t["dbias"], t["ddt_bias"], t["da_log"], t["dskip"]}, t["dweight"]);
  };
  return result;
}

// The gate and the norm behind it. Backward from reciprocal deviations that are an input like others. Implementations
// may round what the gate gives to bf16, by 2^-9 of itself: then so are its mean square and the sums of dweight.
inline testing::OperatorCase gate_case(const Form& form, bool backward, DType dtype) {
  testing::OperatorCase result;
  result.dtypes = {{dtype, dtype}};
  const double of_sums = dtype == DType::bf16 ? 0x1p-9 : 0.0;
  const Shape shape = form.wide(form.inner()), rows({form.rows});
  result.name = std::string(backward ? "gate and norm backward " : "gate and norm ") + to_string(shape);
  result.arguments = {{"o", shape},
                      {"x", shape},
                      {"z", shape, Role::input, Kind::activation, 3.0},
                      parameter("skip", form.heads),
                      parameter("weight", form.inner())};
  const auto inputs = [](const NamedTensors& t) { return Gate{t["o"], t["x"], t["skip"], t["z"]}; };
  if (!backward) {
    result.arguments.push_back({"y", shape, Role::output});
    result.arguments.push_back({"rstd", rows, Role::output, Kind::accumulator, 1.0, 0.0, true, of_sums});
    result.run = [=](Context& context, const NamedTensors& t) {
      gate_norm(context, inputs(t), t["weight"], 1e-5, t["y"], t["rstd"]);
    };
    return result;
  }
  result.arguments.push_back({.name = "rstd", .shape = rows, .kind = Kind::accumulator, .deviation = 0.1, .mean = 0.5});
  result.arguments.push_back({"dy", shape});
  result.arguments.push_back({"ds", shape, Role::output});
  result.arguments.push_back({"dz", shape, Role::output});
  result.arguments.push_back(
      {"dweight", Shape({form.inner()}), Role::accumulated, Kind::accumulator, 1.0, 0.0, false, of_sums});
  result.run = [=](Context& context, const NamedTensors& t) {
    gate_norm_backward(context, inputs(t), t["weight"], t["rstd"], t["dy"], t["ds"], t["dz"], t["dweight"]);
  };
  return result;
}

}  // namespace flashgla::ops::state_space
