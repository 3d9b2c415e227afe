// The definition, in f64: the features of a row, and the products of their gradients with the map's derivatives.
#include <cmath>
#include <vector>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/feature_map/implementations.h"

namespace flashgla::ops::feature_map {

namespace {

using Values = std::vector<double>;

Values row_of(const Elements& of, std::int64_t row) {
  Values values;
  for (std::int64_t i = 0; i < of.length(); ++i) values.push_back(of(row, i));
  return values;
}

// (max(x, 0), max(-x, 0)), or with (2 x, -2 x).
Values signs(const Values& x, bool rectified, double factor) {
  Values both;
  for (const double sign : {1.0, -1.0}) {
    for (const double value : x) both.push_back(rectified ? std::max(sign * value, 0.0) : sign * factor * value);
  }
  return both;
}
// Where r_(i-j) is.
std::size_t behind(std::size_t i, std::size_t shift, std::size_t count) { return (i + shift * count - shift) % count; }

Values features(const Values& x, Map map) {
  Values y;
  switch (map) {
    case Map::as_is:
      return x;
    case Map::relu:
      for (const double value : x) y.push_back(std::max(value, 0.0));
      return y;
    case Map::elu_plus_one:
      for (const double value : x) y.push_back(value > 0.0 ? value + 1.0 : std::exp(value));
      return y;
    case Map::both_signs: {
      double largest = 0.0, sum = 0.0;
      for (const double value : x) largest = std::max(largest, 2.0 * std::abs(value));
      for (const double value : signs(x, false, 2.0)) sum += y.emplace_back(std::exp(value - largest));
      for (double& value : y) value /= sum;
      return y;
    }
    case Map::dpfp: {
      const Values r = signs(x, true, 1.0);
      for (std::size_t shift = 1; shift <= kShifts; ++shift) {
        for (std::size_t i = 0; i < r.size(); ++i) y.push_back(r[i] * r[behind(i, shift, r.size())]);
      }
      return y;
    }
  }
  return y;
}

// Of x, from those of phi(x).
Values gradients(const Values& x, const Values& y, const Values& dy, Map map) {
  Values dx(x.size());
  switch (map) {
    case Map::as_is:
      return dy;
    case Map::relu:
      for (std::size_t i = 0; i < x.size(); ++i) dx[i] = x[i] > 0.0 ? dy[i] : 0.0;
      return dx;
    case Map::elu_plus_one:
      for (std::size_t i = 0; i < x.size(); ++i) dx[i] = dy[i] * (x[i] > 0.0 ? 1.0 : std::exp(x[i]));
      return dx;
    case Map::both_signs: {
      double dot = 0.0;
      for (std::size_t i = 0; i < y.size(); ++i) dot += y[i] * dy[i];
      for (std::size_t i = 0; i < x.size(); ++i) {
        const std::size_t minus = i + x.size();
        dx[i] = 2.0 * (y[i] * (dy[i] - dot) - y[minus] * (dy[minus] - dot));
      }
      return dx;
    }
    case Map::dpfp: {
      const Values r = signs(x, true, 1.0);
      Values dr(r.size());
      for (std::size_t shift = 1; shift <= kShifts; ++shift) {
        for (std::size_t i = 0; i < r.size(); ++i) {
          const std::size_t other = behind(i, shift, r.size());
          const double gradient = dy[(shift - 1) * r.size() + i];
          dr[i] += gradient * r[other];
          dr[other] += gradient * r[i];
        }
      }
      for (std::size_t i = 0; i < x.size(); ++i) {
        dx[i] = x[i] > 0.0 ? dr[i] : x[i] < 0.0 ? -dr[i + x.size()] : 0.0;
      }
      return dx;
    }
  }
  return dx;
}

double divisor(const Values& y) {
  double sum = kSumEpsilon;
  for (const double value : y) sum += value;
  return sum;
}

void reference_forward(Context& context, const TensorView& x_view, const TensorView& y_view, const Options& options) {
  const Elements x(x_view), y(y_view);
  parallel_for(context, x.rows(), [&](std::int64_t row) {
    const Values made = features(row_of(x, row), options.map);
    const double by = options.divide ? divisor(made) : 1.0;
    for (std::size_t i = 0; i < made.size(); ++i) y.set(row, static_cast<std::int64_t>(i), made[i] / by);
  });
}

void reference_backward(Context& context, const TensorView& x_view, const TensorView& dy_view,
                        const TensorView& dx_view, const Options& options) {
  const Elements x(x_view), dy(dy_view), dx(dx_view);
  parallel_for(context, x.rows(), [&](std::int64_t row) {
    const Values in = row_of(x, row), made = features(in, options.map);
    Values out = row_of(dy, row);
    if (options.divide) {
      const double by = divisor(made);
      double dot = 0.0;
      for (std::size_t i = 0; i < made.size(); ++i) dot += out[i] * made[i] / by;
      for (double& gradient : out) gradient = (gradient - dot) / by;
    }
    const Values found = gradients(in, made, out, options.map);
    for (std::size_t i = 0; i < found.size(); ++i) dx.set(row, static_cast<std::int64_t>(i), found[i]);
  });
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, reference_forward,
                                reference_backward};

}  // namespace flashgla::ops::feature_map
