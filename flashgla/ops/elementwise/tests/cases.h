// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/elementwise/elementwise.h"
#include "testing/conformance.h"

namespace flashgla::ops::elementwise {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

// Every function; `narrow`: whether what may be f32 beside bf16 has x's dtype all the same.
inline std::vector<testing::OperatorCase> cases_of(const Shape& shape, bool narrow) {
  const Kind kind = narrow ? Kind::activation : Kind::accumulator;
  const Shape columns({shape[-1]});
  std::vector<testing::OperatorCase> cases;
  auto add_case = [&](const char* name, std::vector<testing::Argument> arguments, auto run) {
    cases.push_back({std::string(name) + " " + to_string(shape), std::move(arguments), run});
  };
  add_case("add", {{"x", shape}, {"y", shape, Role::accumulated, kind}},
           [](Context& context, const NamedTensors& t) { add(context, t["x"], t["y"]); });
  add_case("convert", {{"src", shape}, {"dst", shape, Role::output, kind}},
           [](Context& context, const NamedTensors& t) { convert(context, t["src"], t["dst"]); });
  add_case("convert back", {{"src", shape, Role::input, kind}, {"dst", shape, Role::output}},
           [](Context& context, const NamedTensors& t) { convert(context, t["src"], t["dst"]); });
  add_case("add_to", {{"a", shape}, {"b", shape}, {"out", shape, Role::output}},
           [](Context& context, const NamedTensors& t) { add_to(context, t["a"], t["b"], t["out"]); });
  add_case("multiply", {{"a", shape}, {"b", shape}, {"out", shape, Role::output}},
           [](Context& context, const NamedTensors& t) { multiply(context, t["a"], t["b"], t["out"]); });
  add_case("scale", {{"x", shape, Role::accumulated}},
           [](Context& context, const NamedTensors& t) { scale(context, t["x"], -0.3); });
  add_case("zero", {{"x", shape, Role::output}},
           [](Context& context, const NamedTensors& t) { zero(context, t["x"]); });
  for (const bool accumulate : {false, true}) {
    add_case("column_sum",
             {{"dy", shape}, {"db", columns, accumulate ? Role::accumulated : Role::output, Kind::accumulator}},
             [=](Context& context, const NamedTensors& t) { column_sum(context, t["dy"], t["db"], accumulate); });
  }
  add_case("silu", {{"x", shape, Role::input, Kind::activation, 4.0}, {"y", shape, Role::output}},
           [](Context& context, const NamedTensors& t) { silu_forward(context, t["x"], t["y"]); });
  add_case("silu backward",
           {{"x", shape, Role::input, Kind::activation, 4.0}, {"dy", shape}, {"dx", shape, Role::output}},
           [](Context& context, const NamedTensors& t) { silu_backward(context, t["x"], t["dy"], t["dx"]); });
  add_case("squared_relu", {{"x", shape}, {"y", shape, Role::output}},
           [](Context& context, const NamedTensors& t) { squared_relu_forward(context, t["x"], t["y"]); });
  add_case("squared_relu backward", {{"x", shape}, {"dy", shape}, {"dx", shape, Role::output}},
           [](Context& context, const NamedTensors& t) { squared_relu_backward(context, t["x"], t["dy"], t["dx"]); });
  const testing::Argument gate{"gate", shape, Role::input, Kind::activation, 4.0};
  add_case("sigmoid_gate", {gate, {"x", shape}, {"y", shape, Role::output}},
           [](Context& context, const NamedTensors& t) { sigmoid_gate_forward(context, t["gate"], t["x"], t["y"]); });
  add_case("sigmoid_gate backward",
           {gate, {"x", shape}, {"dy", shape}, {"dgate", shape, Role::output}, {"dx", shape, Role::output}},
           [](Context& context, const NamedTensors& t) {
             sigmoid_gate_backward(context, t["gate"], t["x"], t["dy"], t["dgate"], t["dx"]);
           });
  return cases;
}

}  // namespace flashgla::ops::elementwise
