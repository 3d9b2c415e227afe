// The definition, in f64.
#include <cmath>

#include "flashgla/ops/adamw/implementations.h"
#include "flashgla/ops/elements.h"

namespace flashgla::ops::adamw {

namespace {

void reference_step(Context& context, const Tensors& tensors, const Settings& s) {
  const std::int64_t count = tensors.parameter.numel();
  const Shape flat({count});
  const Elements parameter(tensors.parameter.reshape(flat)), gradient(tensors.gradient.reshape(flat));
  const Elements m(tensors.first_moment.reshape(flat)), v(tensors.second_moment.reshape(flat));
  const Elements kept(tensors.master ? tensors.master.reshape(flat) : tensors.parameter.reshape(flat));
  const double correction1 = 1.0 - std::pow(s.beta1, static_cast<double>(s.step));
  const double correction2 = 1.0 - std::pow(s.beta2, static_cast<double>(s.step));
  parallel_for_blocks(context, count, kElementsPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const double g = s.gradient_scale * gradient(i);
      const double first = s.beta1 * m(i) + (1.0 - s.beta1) * g;
      const double second = s.beta2 * v(i) + (1.0 - s.beta2) * g * g;
      const double direction = first / correction1 / (std::sqrt(second / correction2) + s.epsilon);
      const double value = kept(i) - s.learning_rate * (direction + s.weight_decay * kept(i));
      m.set(i, first);
      v.set(i, second);
      kept.set(i, value);
      if (tensors.master) parameter.set(i, kept(i));
    }
  });
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, reference_step};

}  // namespace flashgla::ops::adamw
