// The definition, in f64.
#include <cmath>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/short_convolution/implementations.h"

namespace flashgla::ops::short_convolution {

namespace {

double sigmoid(double z) { return 1.0 / (1.0 + std::exp(-z)); }

// The input of channel d at time t of a sequence; before its start, from the state (zeros when absent).
struct History {
  const Elements& x;
  const Elements& state;
  bool has_state;
  std::int64_t n, row, d, width;  // row: that of the sequence's first token in x
  double operator()(std::int64_t t) const {
    if (t >= 0) return x(row + t, d);
    return has_state ? state(n * x.length() + d, width - 1 + t) : 0.0;
  }
};

double convolve(const History& input, const Elements& weight, std::int64_t t) {
  double z = 0.0;
  for (std::int64_t j = 0; j < input.width; ++j) z += weight(input.d, j) * input(t - (input.width - 1) + j);
  return z;
}

void reference_forward(Context& context, const Inputs& inputs, const Outputs& outputs, Activation activation) {
  if (context.planning()) return;
  const Elements x(inputs.x), weight(inputs.weight), initial(inputs.initial_state);
  const Elements y(outputs.y), final_state(outputs.final_state);
  const std::int64_t channels = x.length();
  const std::int64_t width = inputs.weight.size(1);
  const std::int64_t sequences = inputs.cu_seqlens ? inputs.cu_seqlens.size(0) - 1 : inputs.x.size(0);
  parallel_for(context, sequences * channels, [&](std::int64_t task) {
    const std::int64_t n = task / channels, d = task % channels;
    const Span span = span_of(inputs, n);
    const std::int64_t row = span.batch * inputs.x.size(1) + span.begin;
    const std::int64_t length = span.end - span.begin;
    const History input{x, initial, static_cast<bool>(inputs.initial_state), n, row, d, width};
    for (std::int64_t t = 0; t < length; ++t) {
      const double z = convolve(input, weight, t);
      y.set(row + t, d, activation == Activation::silu ? z * sigmoid(z) : z);
    }
    if (!outputs.final_state) return;
    for (std::int64_t j = 0; j + 1 < width; ++j) final_state.set(task, j, input(length - (width - 1) + j));
  });
}

void reference_backward(Context& context, const Inputs& inputs, const OutputGradients& output_gradients,
                        const InputGradients& input_gradients, Activation activation) {
  if (context.planning()) return;
  const Elements x(inputs.x), weight(inputs.weight), initial(inputs.initial_state);
  const Elements dy(output_gradients.dy), d_final(output_gradients.d_final_state);
  const Elements dx(input_gradients.dx), dweight(input_gradients.dweight), d_initial(input_gradients.d_initial_state);
  const std::int64_t channels = x.length();
  const std::int64_t width = inputs.weight.size(1);
  const std::int64_t sequences = inputs.cu_seqlens ? inputs.cu_seqlens.size(0) - 1 : inputs.x.size(0);
  parallel_for(context, channels, [&](std::int64_t d) {
    double weight_gradient[4] = {};
    for (std::int64_t n = 0; n < sequences; ++n) {
      const Span span = span_of(inputs, n);
      const std::int64_t row = span.batch * inputs.x.size(1) + span.begin;
      const std::int64_t length = span.end - span.begin;
      const History input{x, initial, static_cast<bool>(inputs.initial_state), n, row, d, width};
      // Gradient of the convolution's result at time t; 0 outside the sequence.
      const auto dz = [&](std::int64_t t) {
        if (t < 0 || t >= length) return 0.0;
        const double gradient = dy(row + t, d);
        if (activation == Activation::none) return gradient;
        const double z = convolve(input, weight, t);
        const double s = sigmoid(z);
        return gradient * (s + z * s * (1.0 - s));
      };
      // Gradient of the input at time t: of the outputs that it reaches and of the final state, if it is in there.
      const auto d_input = [&](std::int64_t t) {
        double total = 0.0;
        for (std::int64_t j = 0; j < width; ++j) total += weight(d, j) * dz(t + (width - 1) - j);
        const std::int64_t place = t - (length - (width - 1));
        if (output_gradients.d_final_state && place >= 0) total += d_final(n * channels + d, place);
        return total;
      };
      for (std::int64_t t = 0; t < length; ++t) {
        dx.set(row + t, d, d_input(t));
        for (std::int64_t j = 0; j < width; ++j) weight_gradient[j] += dz(t) * input(t - (width - 1) + j);
      }
      if (!input_gradients.d_initial_state) continue;
      for (std::int64_t j = 0; j + 1 < width; ++j) d_initial.set(n * channels + d, j, d_input(j - (width - 1)));
    }
    for (std::int64_t j = 0; j < width; ++j) dweight.add(d, j, weight_gradient[j]);
  });
}

void reference_step(Context& context, const TensorView& x_view, const TensorView& weight_view,
                    const TensorView& state_view, const TensorView& y_view, Activation activation) {
  if (context.planning()) return;
  const Elements x(x_view), weight(weight_view), state(state_view), y(y_view);
  const std::int64_t width = weight_view.size(1);
  parallel_for(context, x.rows() * x.length(), [&](std::int64_t task) {
    const std::int64_t n = task / x.length(), d = task % x.length();
    const double now = x(n, d);
    double z = weight(d, width - 1) * now;
    for (std::int64_t j = 0; j + 1 < width; ++j) z += weight(d, j) * state(task, j);
    for (std::int64_t j = 0; j + 2 < width; ++j) state.set(task, j, state(task, j + 1));
    state.set(task, width - 2, now);
    y.set(n, d, activation == Activation::silu ? z * sigmoid(z) : z);
  });
}

}  // namespace

const Implementation kReference{
    "reference",       Device::Kind::cpu,  [](const Problem&, const Architecture&) { return Support::yes(); },
    reference_forward, reference_backward, reference_step};

}  // namespace flashgla::ops::short_convolution
