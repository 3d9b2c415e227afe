// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/hyena_filter/hyena_filter.h"
#include "testing/conformance.h"

namespace flashgla::ops::hyena_filter {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

inline testing::Argument frequencies(std::int64_t channels) {
  return {.name = "frequency",
          .shape = Shape({channels}),
          .kind = Kind::parameter,
          .deviation = 0.5,
          .mean = 2.0,
          .strided = false};
}

inline testing::OperatorCase sine_case(const Shape& shape) {
  testing::OperatorCase result;
  result.name = "sine forward " + to_string(shape);
  result.arguments = {{"x", shape}, frequencies(shape[-1]), {"y", shape, Role::output}};
  result.run = [](Context& context, const NamedTensors& t) { sine_forward(context, t["x"], t["frequency"], t["y"]); };
  return result;
}

inline testing::OperatorCase sine_backward_case(const Shape& shape) {
  testing::OperatorCase result;
  result.name = "sine backward " + to_string(shape);
  result.arguments = {{"x", shape},
                      frequencies(shape[-1]),
                      {"dy", shape},
                      {"dx", shape, Role::output},
                      {.name = "dfrequency",
                       .shape = Shape({shape[-1]}),
                       .role = Role::accumulated,
                       .kind = Kind::accumulator,
                       .strided = false}};
  result.run = [](Context& context, const NamedTensors& t) {
    sine_backward(context, t["x"], t["frequency"], t["dy"], t["dx"], t["dfrequency"]);
  };
  return result;
}

// of: y's kind; a filter is f32 whatever the activations.
inline testing::OperatorCase window_case(const Shape& shape, Kind of = Kind::accumulator) {
  testing::OperatorCase result;
  result.name = "window " + to_string(shape);
  result.arguments = {{"x", shape}, {"y", shape, Role::output, of}};
  result.run = [length = shape[0] + 1](Context& context, const NamedTensors& t) {
    window(context, t["x"], {length, 0.05}, t["y"]);
  };
  return result;
}

}  // namespace flashgla::ops::hyena_filter
