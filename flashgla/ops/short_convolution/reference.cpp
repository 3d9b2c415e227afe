// The definition, in f64. A sequence of L tokens is extended by its initial state to e[0 .. L+W-2]: then
// z[t] = bias + sum_j weight[j] e[t+j], de[p] = sum_j weight[j] dz[p-j], and the final state is e[L .. L+W-2].
#include <cmath>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/short_convolution/implementations.h"

namespace flashgla::ops::short_convolution {

namespace {

double silu(double z) { return z / (1.0 + std::exp(-z)); }
double silu_slope(double z) {
  const double s = 1.0 / (1.0 + std::exp(-z));
  return s + z * s * (1.0 - s);
}

// One channel of one sequence.
class Channel {
 public:
  Channel(const Inputs& inputs, std::int64_t n, std::int64_t d)
      : x_(inputs.x),
        weight_(inputs.weight),
        initial_(inputs.initial_state),
        has_initial_(inputs.initial_state),
        bias_(inputs.bias ? Elements(inputs.bias)(d) : 0.0),
        sequence_(sequence_at(inputs.x, inputs.cu_seqlens, n)),
        width_(inputs.weight.size(1)),
        state_row_(n * inputs.weight.size(0) + d),
        d_(d) {}

  std::int64_t length() const { return sequence_.length(); }
  std::int64_t width() const { return width_; }
  std::int64_t state_row() const { return state_row_; }
  std::int64_t row(std::int64_t t) const { return sequence_.begin + t; }
  double weight(std::int64_t j) const { return weight_(d_, j); }
  double extended(std::int64_t p) const {
    if (p >= width_ - 1) return x_(row(p - (width_ - 1)), d_);
    return has_initial_ ? initial_(state_row_, p) : 0.0;
  }
  double convolved(std::int64_t t) const {
    double z = bias_;
    for (std::int64_t j = 0; j < width_; ++j) z += weight(j) * extended(t + j);
    return z;
  }

 private:
  Elements x_, weight_, initial_;
  bool has_initial_;
  double bias_;
  Sequence sequence_;
  std::int64_t width_, state_row_, d_;
};

void reference_forward(Context& context, const Inputs& inputs, const Outputs& outputs, Activation activation) {
  if (context.planning()) return;
  const Elements y(outputs.y), final_state(outputs.final_state);
  const std::int64_t channels = inputs.x.size(2);
  parallel_for(context, sequences_of(inputs) * channels, [&](std::int64_t task) {
    const std::int64_t d = task % channels;
    const Channel channel(inputs, task / channels, d);
    for (std::int64_t t = 0; t < channel.length(); ++t) {
      const double z = channel.convolved(t);
      y.set(channel.row(t), d, activation == Activation::silu ? silu(z) : z);
    }
    for (std::int64_t i = 0; outputs.final_state && i < channel.width() - 1; ++i) {
      final_state.set(channel.state_row(), i, channel.extended(channel.length() + i));
    }
  });
}

void reference_backward(Context& context, const Inputs& inputs, const OutputGradients& output_gradients,
                        const InputGradients& input_gradients, Activation activation) {
  if (context.planning()) return;
  const Elements dy(output_gradients.dy), d_final(output_gradients.d_final_state);
  const Elements dx(input_gradients.dx), dweight(input_gradients.dweight), d_initial(input_gradients.d_initial_state),
      dbias(input_gradients.dbias);
  parallel_for(context, inputs.x.size(2), [&](std::int64_t d) {
    for (std::int64_t n = 0; n < sequences_of(inputs); ++n) {
      const Channel channel(inputs, n, d);
      const std::int64_t length = channel.length(), width = channel.width();
      auto dz = [&](std::int64_t t) {
        if (t < 0 || t >= length) return 0.0;
        const double gradient = dy(channel.row(t), d);
        return activation == Activation::silu ? gradient * silu_slope(channel.convolved(t)) : gradient;
      };
      for (std::int64_t j = 0; j < width; ++j) {
        double total = 0.0;
        for (std::int64_t t = 0; t < length; ++t) total += dz(t) * channel.extended(t + j);
        dweight.add(d, j, total);
      }
      if (inputs.bias) {
        double total = 0.0;
        for (std::int64_t t = 0; t < length; ++t) total += dz(t);
        dbias.add(d, total);
      }
      for (std::int64_t p = 0; p < length + width - 1; ++p) {
        double gradient = 0.0;
        for (std::int64_t j = 0; j < width; ++j) gradient += channel.weight(j) * dz(p - j);
        if (p >= length && output_gradients.d_final_state) gradient += d_final(channel.state_row(), p - length);
        if (p >= width - 1) {
          dx.set(channel.row(p - (width - 1)), d, gradient);
        } else if (input_gradients.d_initial_state) {
          d_initial.set(channel.state_row(), p, gradient);
        }
      }
    }
  });
}

void reference_step(Context& context, const TensorView& x_view, const TensorView& weight_view,
                    const TensorView& bias_view, const TensorView& state_view, const TensorView& y_view,
                    Activation activation) {
  const Elements x(x_view), weight(weight_view), bias(bias_view), state(state_view), y(y_view);
  const std::int64_t width = weight.length();
  parallel_for(context, x.rows(), [&](std::int64_t row) {
    for (std::int64_t d = 0; d < x.length(); ++d) {
      const std::int64_t state_row = row * x.length() + d;
      const double value = x(row, d);
      double z = weight(d, width - 1) * value;
      for (std::int64_t j = 0; j < width - 1; ++j) z += weight(d, j) * state(state_row, j);
      if (bias_view) z += bias(d);
      for (std::int64_t j = 0; j < width - 2; ++j) state.set(state_row, j, state(state_row, j + 1));
      state.set(state_row, width - 2, value);
      y.set(row, d, activation == Activation::silu ? silu(z) : z);
    }
  });
}

}  // namespace

const Implementation kReference{
    "reference",       Device::Kind::cpu,  [](const Problem&, const Architecture&) { return Support::yes(); },
    reference_forward, reference_backward, reference_step};

}  // namespace flashgla::ops::short_convolution
