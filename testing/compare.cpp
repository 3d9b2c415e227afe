#include "testing/compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

#include "testing/random.h"

namespace flashgla::testing {

Tensor converted(const TensorView& view, DType dtype) {
  Tensor result = Tensor::empty(view.shape, dtype);
  copy(view, result);
  return result;
}

Difference difference(const TensorView& x, const TensorView& reference) {
  if (!(x.shape == reference.shape)) {
    throw Error("difference", "x", "has shape " + to_string(x.shape), to_string(reference.shape));
  }
  const Tensor a = converted(x, DType::f64);
  const Tensor b = converted(reference, DType::f64);
  const double* values = a.as<double>();
  const double* wanted = b.as<double>();
  const std::int64_t count = x.numel();
  Difference result;
  double error = 0.0;
  double norm = 0.0;
  for (std::int64_t i = 0; i < count; ++i) {
    const double value = values[i];
    const double expected = wanted[i];
    if (!std::isfinite(value)) result.finite = false;
    const double delta = value - expected;
    error += delta * delta;
    norm += expected * expected;
    result.largest = std::max(result.largest, std::abs(delta));
    result.reference_largest = std::max(result.reference_largest, std::abs(expected));
  }
  result.relative = norm > 0.0 ? std::sqrt(error / norm) : std::sqrt(error);
  if (!result.finite || std::isnan(error)) {
    result.relative = result.largest = std::numeric_limits<double>::infinity();
  }
  result.reference_rms = count > 0 ? std::sqrt(norm / static_cast<double>(count)) : 0.0;
  return result;
}

std::string check_close(const char* name, const TensorView& x, const TensorView& reference, double relative,
                        double largest_factor) {
  const Difference d = difference(x, reference);
  std::ostringstream text;
  if (!d.finite) {
    text << name << " has NaN or infinite elements";
  } else if (!(d.relative <= relative)) {
    text << name << ": relative error " << d.relative << " > " << relative << " (reference rms " << d.reference_rms
         << ")";
  } else {
    const double bound = largest_factor * relative * d.reference_largest;
    if (d.reference_rms > 0.0 && !(d.largest <= bound)) {
      text << name << ": largest error " << d.largest << " > " << bound;
    }
  }
  return text.str();
}

bool same_bits(const TensorView& a, const TensorView& b) {
  if (!(a.shape == b.shape) || a.dtype != b.dtype) return false;
  const Tensor x = converted(a, a.dtype);
  const Tensor y = converted(b, b.dtype);
  return std::memcmp(x->data, y->data, x->bytes()) == 0;
}

std::string check_gradient(const char* name, const TensorView& x, const TensorView& gradient,
                           const std::function<double()>& loss, int samples, double step, double relative) {
  const std::int64_t count = x.numel();
  double scale = 0.0;
  for (std::int64_t i = 0; i < count; ++i)
    scale = std::max(scale, std::abs(gradient.reshape(Shape({count})).as<double>()[i]));
  double* values = x.reshape(Shape({count})).as<double>();
  const double* analytic = gradient.reshape(Shape({count})).as<double>();
  std::ostringstream text;
  double worst = 0.0;
  for (int sample = 0; sample < samples; ++sample) {
    const auto i =
        static_cast<std::int64_t>(uniform(0x5eed, static_cast<std::uint64_t>(sample)) * static_cast<double>(count));
    const double saved = values[i];
    values[i] = saved + step;
    const double above = loss();
    values[i] = saved - step;
    const double below = loss();
    values[i] = saved;
    const double numeric = (above - below) / (2.0 * step);
    const double error = std::abs(numeric - analytic[i]) / std::max(scale, 1e-3);
    if (!(error <= relative) && !(error <= worst)) {
      worst = error;
      text.str("");
      text << name << ": gradient at " << i << " is " << analytic[i] << ", finite differences give " << numeric
           << " (error " << error << " of the largest gradient; allowed " << relative << ")";
    }
  }
  return text.str();
}

}  // namespace flashgla::testing
