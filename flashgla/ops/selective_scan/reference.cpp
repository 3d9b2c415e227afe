// The definition, in f64: a channel of a sequence after the other, all of its states kept for the way back.
#include <cmath>
#include <vector>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/selective_scan/implementations.h"

namespace flashgla::ops::selective_scan {

namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

// One channel.
struct Channel {
  Elements x, raw, z, b, c, dt_bias, a_log, skip;
  std::int64_t e, states;

  Channel(const Inputs& in, std::int64_t channel)
      : x(in.x),
        raw(in.raw),
        z(in.z),
        b(in.b),
        c(in.c),
        dt_bias(in.dt_bias),
        a_log(in.a_log),
        skip(in.skip),
        e(channel),
        states(in.b.size(-1)) {}
  double dt(std::int64_t row) const { return softplus(raw(row, e) + dt_bias(e)); }
  double a(std::int64_t k) const { return -std::exp(a_log(e, k)); }

  // h_row from h_(row-1), in place; the sum over the states and the skip, before the gate.
  double advance(std::int64_t row, double* h) const {
    double sum = skip(e) * x(row, e);
    for (std::int64_t k = 0; k < states; ++k) {
      h[k] = std::exp(dt(row) * a(k)) * h[k] + dt(row) * b(row, k) * x(row, e);
      sum += c(row, k) * h[k];
    }
    return sum;
  }
};

std::vector<double> state_of(const TensorView& states, std::int64_t n, std::int64_t e, std::int64_t count) {
  std::vector<double> h(static_cast<std::size_t>(count), 0.0);
  const Elements from(states);
  for (std::int64_t k = 0; states && k < count; ++k) h[static_cast<std::size_t>(k)] = from(n * states.size(1) + e, k);
  return h;
}

void reference_forward(Context& context, const Inputs& inputs, const Outputs& outputs) {
  if (context.planning()) return;
  const Sizes sizes(inputs);
  const Elements y(outputs.y), ht(outputs.ht);
  parallel_for(context, sizes.sequences * sizes.channels, [&](std::int64_t item) {
    const std::int64_t n = item / sizes.channels, e = item % sizes.channels;
    const Channel channel(inputs, e);
    std::vector<double> h = state_of(inputs.h0, n, e, sizes.states);
    const Sequence sequence = sequence_at(inputs.x, inputs.cu_seqlens, n);
    for (std::int64_t row = sequence.begin; row < sequence.end; ++row) {
      const double sum = channel.advance(row, h.data()), z = channel.z(row, e);
      if (outputs.y) y.set(row, e, sum * z * sigmoid(z));
    }
    for (std::int64_t k = 0; outputs.ht && k < sizes.states; ++k) ht.set(item, k, h[static_cast<std::size_t>(k)]);
  });
}

// Of a channel: d h carries over from token to token.
void channel_backward(const Inputs& inputs, const Channel& in, std::int64_t n, const Elements& dy,
                      const InputGradients& gradients) {
  const Elements dx(gradients.dx), draw(gradients.draw), dz(gradients.dz), db(gradients.db), dc(gradients.dc);
  const Elements da_log(gradients.da_log), dskip(gradients.dskip);
  const std::int64_t K = in.states, e = in.e;
  const Sequence sequence = sequence_at(inputs.x, inputs.cu_seqlens, n);
  const std::int64_t begin = sequence.begin, end = sequence.end;
  const auto at = [&](std::int64_t row, std::int64_t k) { return static_cast<std::size_t>((row - begin + 1) * K + k); };
  std::vector<double> h = state_of(inputs.h0, n, e, K), sums;  // rows one before begin to the last
  h.resize(static_cast<std::size_t>((end - begin + 1) * K));
  for (std::int64_t row = begin; row < end; ++row) {
    for (std::int64_t k = 0; k < K; ++k) h[at(row, k)] = h[at(row - 1, k)];
    sums.push_back(in.advance(row, &h[at(row, 0)]));
  }
  std::vector<double> dh(static_cast<std::size_t>(K), 0.0);
  for (std::int64_t row = end - 1; row >= begin; --row) {
    const double x = in.x(row, e), dt = in.dt(row), z = in.z(row, e), s = sigmoid(z);
    const double dsum = dy(row, e) * z * s;
    dz.set(row, e, dy(row, e) * sums[static_cast<std::size_t>(row - begin)] * s * (1.0 + z * (1.0 - s)));
    double to_x = in.skip(e) * dsum, to_dt = 0.0;
    dskip.add(e, dsum * x);
    for (std::int64_t k = 0; k < K; ++k) {
      double& d = dh[static_cast<std::size_t>(k)];
      d += in.c(row, k) * dsum;
      const double decay = std::exp(dt * in.a(k)), decayed = decay * h[at(row - 1, k)];
      to_x += d * dt * in.b(row, k);
      to_dt += d * (in.b(row, k) * x + in.a(k) * decayed);
      db.add(row, k, d * dt * x);
      dc.add(row, k, dsum * h[at(row, k)]);
      da_log.add(e, k, in.a(k) * d * dt * decayed);
      d *= decay;
    }
    dx.set(row, e, to_x);
    draw.set(row, e, to_dt * sigmoid(in.raw(row, e) + in.dt_bias(e)));
  }
}

void reference_backward(Context& context, const Inputs& inputs, const TensorView&, const TensorView& dy_view,
                        const InputGradients& gradients) {
  const Sizes sizes(inputs);
  ArenaScope scope(context.scratch());
  // Sums over the channels in f64, whatever db's dtype is.
  const TensorView db = context.scratch().tensor({sizes.rows, sizes.states}, DType::f64, "selective_scan: sums");
  const TensorView dc = context.scratch().tensor({sizes.rows, sizes.states}, DType::f64, "selective_scan: sums");
  if (context.planning()) return;
  context.queue().zero(db.data, db.bytes());
  context.queue().zero(dc.data, dc.bytes());
  InputGradients wide = gradients;
  wide.db = db;
  wide.dc = dc;
  const Elements dy(dy_view);
  for (std::int64_t n = 0; n < sizes.sequences; ++n) {
    for (std::int64_t e = 0; e < sizes.channels; ++e) channel_backward(inputs, Channel(inputs, e), n, dy, wide);
  }
  const Elements sum_b(db), sum_c(dc), to_b(gradients.db), to_c(gradients.dc);
  for (std::int64_t row = 0; row < sizes.rows; ++row) {
    for (std::int64_t k = 0; k < sizes.states; ++k) {
      to_b.set(row, k, sum_b(row, k));
      to_c.set(row, k, sum_c(row, k));
    }
  }
}

void reference_step(Context& context, const Inputs& inputs, const TensorView& state, const TensorView& y_view,
                    const StepProjection&) {
  if (context.planning()) return;
  const Elements y(y_view), to(state);
  const std::int64_t channels = inputs.x.size(1), states = inputs.b.size(1);
  parallel_for(context, inputs.x.size(0) * channels, [&](std::int64_t item) {
    const std::int64_t n = item / channels, e = item % channels;
    const Channel channel(inputs, e);
    std::vector<double> h = state_of(state, n, e, states);
    const double z = channel.z(n, e), sum = channel.advance(n, h.data());
    for (std::int64_t k = 0; k < states; ++k) to.set(item, k, h[static_cast<std::size_t>(k)]);
    y.set(n, e, sum * z * sigmoid(z));
  });
}

}  // namespace

const Implementation kReference{"reference",
                                Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); },
                                [](const Inputs&) { return std::size_t{0}; },
                                reference_forward,
                                reference_backward,
                                reference_step,
                                [](const Inputs&, const StepProjection&) { return false; }};

}  // namespace flashgla::ops::selective_scan
