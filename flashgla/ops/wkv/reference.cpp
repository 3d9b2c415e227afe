// The definition, in f64: a channel of a sequence after the other, all of its states kept for the way back.
#include <cmath>
#include <vector>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/wkv/implementations.h"

namespace flashgla::ops::wkv {

namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// A = a e^p, B = b e^p.
struct State {
  double a = 0.0, b = 0.0, p = kNothing;
};

// What a token reads: numerator and denominator of its output are num e^s and den e^s.
struct Read {
  double num, den, s, first;  // first: of its own key, e^(u + k - s)
};

// One channel.
struct Channel {
  Elements k, v, r, time_decay, time_first;
  std::int64_t e;
  double w, u;

  Channel(const Inputs& in, std::int64_t channel)
      : k(in.k),
        v(in.v),
        r(in.r),
        time_decay(in.time_decay),
        time_first(in.time_first),
        e(channel),
        w(-std::exp(time_decay(channel))),
        u(time_first(channel)) {}

  Read read(std::int64_t row, const State& before) const {
    const double own = u + k(row, e), s = std::max(before.p, own), first = std::exp(own - s);
    const double past = std::exp(before.p - s);
    return {past * before.a + first * v(row, e), past * before.b + first, s, first};
  }
  State after(std::int64_t row, const State& before) const {
    const double key = k(row, e), p = std::max(before.p + w, key);
    const double past = std::exp(before.p + w - p), own = std::exp(key - p);
    return {past * before.a + own * v(row, e), past * before.b + own, p};
  }
};

State state_of(const TensorView& states, std::int64_t n, std::int64_t e) {
  if (!states) return {};
  const Elements from(states);
  if (from(3 * n + 1, e) <= 0.0) return {};
  return {from(3 * n, e), from(3 * n + 1, e), from(3 * n + 2, e)};
}

void store_state(const State& state, const Elements& to, std::int64_t n, std::int64_t e) {
  to.set(3 * n, e, state.a);
  to.set(3 * n + 1, e, state.b);
  to.set(3 * n + 2, e, state.p);
}

void reference_forward(Context& context, const Inputs& inputs, const Outputs& outputs) {
  if (context.planning()) return;
  const Sizes sizes(inputs);
  const Elements y(outputs.y), ht(outputs.ht), h0(inputs.h0);
  parallel_for(context, sizes.sequences * sizes.channels, [&](std::int64_t item) {
    const std::int64_t n = item / sizes.channels, e = item % sizes.channels;
    const Channel channel(inputs, e);
    State state = state_of(inputs.h0, n, e);
    const Sequence sequence = sequence_at(inputs.k, inputs.cu_seqlens, n);
    for (std::int64_t row = sequence.begin; row < sequence.end; ++row) {
      const Read read = channel.read(row, state);
      const double output = sigmoid(channel.r(row, e)) * read.num / read.den;
      state = channel.after(row, state);  // before y, which may be k
      if (outputs.y) y.set(row, e, output);
    }
    if (!outputs.ht) return;
    if (sequence.begin < sequence.end) return store_state(state, ht, n, e);
    for (std::int64_t i = 3 * n; i < 3 * n + 3; ++i) ht.set(i, e, inputs.h0 ? h0(i, e) : 0.0);
  });
}

// Of a channel. P and Q, the gradients of a state's A and minus that of its B, are carried from token to token in units
// of e^m, m being the largest exponent in them.
void channel_backward(const Inputs& inputs, const Channel& in, std::int64_t n, const Elements& dy,
                      const InputGradients& gradients) {
  const Elements dk(gradients.dk), dv(gradients.dv), dr(gradients.dr);
  const Elements dtime_decay(gradients.dtime_decay), dtime_first(gradients.dtime_first);
  const std::int64_t e = in.e;
  const Sequence sequence = sequence_at(inputs.k, inputs.cu_seqlens, n);
  std::vector<State> before{state_of(inputs.h0, n, e)};
  for (std::int64_t row = sequence.begin; row < sequence.end; ++row) before.push_back(in.after(row, before.back()));
  double P = 0.0, Q = 0.0, m = kNothing, dw = 0.0, du = 0.0;
  for (std::int64_t row = sequence.end - 1; row >= sequence.begin; --row) {
    const State& state = before[static_cast<std::size_t>(row - sequence.begin)];
    const Read read = in.read(row, state);
    const double k = in.k(row, e), v = in.v(row, e), open = sigmoid(in.r(row, e)), y = read.num / read.den;
    const double q = dy(row, e) * open / read.den, through = std::exp(k + m);
    const double own = read.first * q * (v - y);
    dr.set(row, e, dy(row, e) * y * open * (1.0 - open));
    dv.set(row, e, read.first * q + through * P);
    dk.set(row, e, own + through * (v * P - Q));
    du += own;
    dw += std::exp(in.w + state.p + m) * (P * state.a - Q * state.b);
    const double next = std::max(m + in.w, -read.s), past = std::exp(m + in.w - next), now = std::exp(-read.s - next);
    P = past * P + now * q;
    Q = past * Q + now * q * y;
    m = next;
  }
  dtime_decay.add(e, in.w * dw);
  dtime_first.add(e, du);
}

void reference_backward(Context& context, const Inputs& inputs, const TensorView&, const TensorView& dy_view,
                        const InputGradients& gradients) {
  if (context.planning()) return;
  const Sizes sizes(inputs);
  const Elements dy(dy_view);
  parallel_for(context, sizes.channels, [&](std::int64_t e) {
    const Channel channel(inputs, e);
    for (std::int64_t n = 0; n < sizes.sequences; ++n) channel_backward(inputs, channel, n, dy, gradients);
  });
}

void reference_step(Context& context, const Inputs& inputs, const TensorView& state, const TensorView& y) {
  Inputs batch = as_batch(inputs);
  batch.h0 = state;
  reference_forward(context, batch, {as_batch(y), state, {}});
}

}  // namespace

const Implementation kReference{"reference",
                                Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); },
                                [](const Inputs&) { return std::size_t{0}; },
                                reference_forward,
                                reference_backward,
                                reference_step};

}  // namespace flashgla::ops::wkv
