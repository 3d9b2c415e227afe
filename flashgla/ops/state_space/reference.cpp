// The definition, in f64.
#include <cmath>
#include <vector>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/state_space/implementations.h"

namespace flashgla::ops::state_space {

namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double silu(double x) { return x * sigmoid(x); }
double silu_slope(double x) { return sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x))); }
double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

struct Call {
  Elements c, bias, raw, dt_bias, a_log;
  bool has_bias;
  explicit Call(const Inputs& in)
      : c(in.c),
        bias(in.bias ? in.bias : in.dt_bias),
        raw(in.raw),
        dt_bias(in.dt_bias),
        a_log(in.a_log),
        has_bias(in.bias) {}
  double z(std::int64_t row, std::int64_t i) const { return c(row, i) + (has_bias ? bias(i) : 0.0); }
  double s(std::int64_t row, std::int64_t h) const { return raw(row, h) + dt_bias(h); }
};

void reference_forward(Context& context, const Inputs& inputs, const Outputs& outputs) {
  if (context.planning()) return;
  const Call in(inputs);
  const Sizes sizes(outputs.v, inputs.c, inputs.raw.size(-1));
  const Elements u(outputs.u), v(outputs.v), g(outputs.g);
  parallel_for(context, u.rows(), [&](std::int64_t row) {
    for (std::int64_t i = 0; i < u.length(); ++i) u.set(row, i, silu(in.z(row, i)));
    for (std::int64_t i = 0; i < sizes.inner; ++i) {
      v.set(row, i, softplus(in.s(row, i / sizes.value_dim)) * silu(in.z(row, i)));
    }
    for (std::int64_t h = 0; h < sizes.heads; ++h) {
      g.set(row, h, -std::exp(in.a_log(h)) * softplus(in.s(row, h)));
    }
  });
}

void reference_backward(Context& context, const Inputs& inputs, const TensorView& skip_view,
                        const OutputGradients& from, const InputGradients& to) {
  if (context.planning()) return;
  const Call in(inputs);
  const Sizes sizes(from.dv, inputs.c, inputs.raw.size(-1));
  const KeyGradients keys(from.dk, sizes);
  const Elements skip(skip_view), dv(from.dv), ds(from.ds), dk(from.dk), dq(from.dq), dg(from.dg);
  const Elements dc(to.dc), draw(to.draw);
  const std::int64_t V = sizes.value_dim, K = keys.key_dim, group = keys.rows_a_group, H = sizes.heads;
  const auto of_rows = [&](std::int64_t length) {
    return std::vector<double>(static_cast<std::size_t>(dc.rows() * length));
  };
  std::vector<double> biases = of_rows(dc.length()), times = of_rows(H), decays = of_rows(H), skips = of_rows(H);
  const auto at = [](std::vector<double>& terms, std::int64_t i) -> double& {
    return terms[static_cast<std::size_t>(i)];
  };
  const auto set_dc = [&](std::int64_t row, std::int64_t i, double gradient) {
    dc.set(row, i, gradient);
    at(biases, row * dc.length() + i) = gradient;
  };
  parallel_for(context, dc.rows(), [&](std::int64_t row) {
    for (std::int64_t h = 0; h < sizes.heads; ++h) {
      const double dt = softplus(in.s(row, h)), A = -std::exp(in.a_log(h));
      double to_dt = A * dg(row, h), to_skip = 0.0;
      for (std::int64_t i = h * V; i < (h + 1) * V; ++i) {
        const double z = in.z(row, i), x = silu(z);
        to_dt += dv(row, i) * x;
        to_skip += ds(row, i) * x;
        set_dc(row, i, (dt * dv(row, i) + skip(h) * ds(row, i)) * silu_slope(z));
      }
      draw.set(row, h, at(times, row * H + h) = to_dt * sigmoid(in.s(row, h)));
      at(decays, row * H + h) = dg(row, h) * A * dt;
      at(skips, row * H + h) = to_skip;
    }
    for (std::int64_t i = 0; i < 2 * sizes.states; ++i) {
      const Elements& each = i < sizes.states ? dk : dq;
      const std::int64_t state = i % sizes.states, first = state / K * group;
      double sum = 0.0;
      for (std::int64_t h = first; h < first + group; ++h) sum += each(row * keys.rows + h, state % K);
      set_dc(row, sizes.inner + i, sum * silu_slope(in.z(row, sizes.inner + i)));
    }
  });
  const auto add_up = [&](const std::vector<double>& terms, const TensorView& view) {
    const Elements sums(view);
    for (std::int64_t i = 0; i < sums.length(); ++i) {
      double sum = 0.0;
      for (std::int64_t row = 0; row < dc.rows(); ++row)
        sum += terms[static_cast<std::size_t>(row * sums.length() + i)];
      sums.add(i, sum);
    }
  };
  if (to.dbias) add_up(biases, to.dbias);
  add_up(times, to.ddt_bias);
  add_up(decays, to.da_log);
  add_up(skips, to.dskip);
}

void reference_gate(Context& context, const Gate& in, const TensorView& y_view) {
  if (context.planning()) return;
  const Elements o(in.o), x(in.x), skip(in.skip), z(in.z), y(y_view);
  const std::int64_t value_dim = y.length() / skip.length();
  parallel_for(context, y.rows(), [&](std::int64_t row) {
    for (std::int64_t i = 0; i < y.length(); ++i) {
      y.set(row, i, (o(row, i) + skip(i / value_dim) * x(row, i)) * silu(z(row, i)));
    }
  });
}

void reference_gate_backward(Context& context, const Gate& in, const TensorView& dy_view, const TensorView& ds_view,
                             const TensorView& dz_view) {
  if (context.planning()) return;
  const Elements o(in.o), x(in.x), skip(in.skip), z(in.z), dy(dy_view), ds(ds_view), dz(dz_view);
  const std::int64_t value_dim = dy.length() / skip.length();
  parallel_for(context, dy.rows(), [&](std::int64_t row) {
    for (std::int64_t i = 0; i < dy.length(); ++i) {
      const double gradient = dy(row, i), s = o(row, i) + skip(i / value_dim) * x(row, i);
      ds.set(row, i, gradient * silu(z(row, i)));
      dz.set(row, i, gradient * s * silu_slope(z(row, i)));
    }
  });
}

void reference_gate_norm(Context& context, const Gate& inputs, const TensorView& weight, double epsilon,
                         const TensorView& y, const TensorView& rstd) {
  gate_then_norm(context, reference_gate, inputs, weight, epsilon, y, rstd);
}

void reference_gate_norm_backward(Context& context, const Gate& inputs, const TensorView& weight,
                                  const TensorView& rstd, const TensorView& dy, const TensorView& ds,
                                  const TensorView& dz, const TensorView& dweight) {
  norm_then_gate_backward(context, reference_gate, reference_gate_backward, inputs, weight, rstd, dy, ds, dz, dweight);
}

}  // namespace

const Implementation kReference{"reference",
                                Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); },
                                reference_forward,
                                reference_backward,
                                reference_gate_norm,
                                reference_gate_norm_backward};

}  // namespace flashgla::ops::state_space
