// The operator as cases that test and bench share.
#pragma once

#include <cmath>
#include <optional>

#include "flashgla/ops/linear_step/linear_step.h"
#include "flashgla/ops/quantised_linear/quantise.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::linear_step {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

struct Form {
  Prologue prologue = Prologue::none;
  Epilogue epilogue = Epilogue::store;
  std::int64_t heads = 1;  // of head_norm
  bool gate = false, norm_weight = false, bias = false;
  std::int64_t second_out = 0;                       // columns of a second layer; 0: none
  std::int64_t head_size = 0;                        // of heads that are turned; 0: none are
  std::int64_t turned = 0;                           // columns, of both layers
  std::optional<quantised_linear::Format> packed{};  // of the first layer's weights; the second's stay in floats
};

// u as 16-bit integers (quantised_linear's tests), and twice that where two such sums are multiplied or one is steep.
constexpr double kPackedTolerance = 1.3e-4;

inline testing::OperatorCase step_case(std::int64_t rows, std::int64_t in, std::int64_t out, Form form) {
  const std::int64_t halves = form.epilogue == Epilogue::swiglu ? 2 : 1;
  const Role role = form.epilogue == Epilogue::add ? Role::accumulated : Role::output;
  const double deviation = 1.0 / std::sqrt(static_cast<double>(in));
  testing::OperatorCase result;
  static const char* const prologues[] = {"plain", "rms norm", "head norm"};
  static const char* const epilogues[] = {"store", "add", "swiglu", "log sigmoid"};
  result.name = "linear step " + to_string(Shape({rows, in, out})) + " " + prologues[static_cast<int>(form.prologue)] +
                (form.gate ? " gate" : "") + " " + epilogues[static_cast<int>(form.epilogue)] +
                (form.bias ? " bias" : "") +
                (form.packed ? std::string(" ") + quantised_linear::name_of(*form.packed) : "") +
                (form.second_out ? " two layers" : "") +
                (form.turned ? " " + std::to_string(form.turned) + " turned by " + std::to_string(form.head_size) : "");
  const auto parameter = [&](const char* name, const Shape& shape, double spread, double mean = 0.0) {
    testing::Argument argument{name, shape, Role::input, Kind::parameter, spread, mean};
    argument.strided = false;
    result.arguments.push_back(argument);
  };
  result.arguments.push_back({"x", Shape({rows, in})});
  if (form.gate) result.arguments.push_back({"gate", Shape({rows, in})});
  if (form.norm_weight) parameter("norm_weight", Shape({in / form.heads}), 0.2, 1.0);
  if (form.packed) {
    testing::Argument packed{"weight", quantised_linear::packed_shape(*form.packed, halves * out, in), Role::input,
                             Kind::fixed};
    packed.dtype = DType::u8;
    packed.strided = false;
    packed.fill = [=](const TensorView& view) {
      Context context;
      const Tensor values = testing::random_normal({halves * out, in}, DType::f32, 7, deviation);
      quantised_linear::quantise(context, values, {}, view);
    };
    result.arguments.push_back(packed);
  } else {
    parameter("weight", Shape({halves * out, in}), deviation);
  }
  if (form.bias) parameter("bias", Shape({out}), 1.0);
  const auto output = [&](const char* name, std::int64_t columns) {
    testing::Argument y{name, Shape({rows, columns}), role};
    if (form.packed) y.relative = kPackedTolerance;
    result.arguments.push_back(y);
  };
  output("y", out);
  if (form.second_out) {
    parameter("weight2", Shape({halves * form.second_out, in}), deviation);
    output("y2", form.second_out);
  }
  if (form.turned) {
    testing::Argument positions{"positions", Shape({rows}), Role::input, Kind::integer};
    positions.fill = [](const TensorView& view) {
      for (std::int32_t n = 0; n < view.size(0); ++n) view.as<std::int32_t>()[n] = n % 2 == 0 ? 7 + n : 30011;
    };
    result.arguments.push_back(positions);
  }
  result.run = [=](Context& context, const NamedTensors& t) {
    Inputs inputs{
        t["x"],   form.prologue, t["norm_weight"], 1e-6, form.prologue == Prologue::head_norm ? in / form.heads : 0,
        t["gate"]};
    std::vector<Layer> layers = {{t["weight"], t["bias"], t["y"]}};
    if (form.second_out) layers.push_back({t["weight2"], {}, t["y2"]});
    Options options;
    options.epilogue = form.epilogue;
    if (form.turned) {
      turn_first(layers, form.turned);
      options.rotary = {1e4, form.head_size, t["positions"]};
    }
    run(context, inputs, layers, options);
  };
  result.dtypes = {{DType::f32, DType::f32}, {DType::f32, DType::bf16}};
  if (!form.packed) result.dtypes.push_back({DType::bf16, DType::bf16});
  return result;
}

}  // namespace flashgla::ops::linear_step
