// The definition, in f64.
#include <cmath>

#include "flashgla/ops/adamw/implementations.h"
#include "flashgla/ops/adamw/rounding.h"
#include "flashgla/ops/elements.h"

namespace flashgla::ops::adamw {

namespace {

// bf16 moments are rounded stochastically, all others as their dtype says.
void set_moment(const TensorView& view, const Elements& elements, std::int64_t i, double value, std::uint32_t random) {
  if (view.dtype == DType::bf16) {
    view.as<BFloat16>()[i].bits = round_stochastically(static_cast<float>(value), random);
  } else {
    elements.set(i, value);
  }
}

void reference_step(Context& context, const Tensors& tensors, const Settings& settings) {
  const StepScalars& s = scalars_in(tensors.scalars);
  if (s.made == 0.0) return;
  const std::int64_t count = tensors.parameter.numel();
  const Shape flat({count});
  const TensorView parameter_view = tensors.parameter.reshape(flat), m_view = tensors.first_moment.reshape(flat);
  const TensorView v_view = tensors.second_moment.reshape(flat), master = tensors.master;
  const Elements parameter(parameter_view), gradient(tensors.gradient.reshape(flat)), m(m_view), v(v_view);
  const double correction1 = 1.0 - std::pow(settings.beta1, s.updates);
  const double correction2 = 1.0 - std::pow(settings.beta2, s.updates);
  auto value_of = [&](std::int64_t i) {
    if (!master) return parameter(i);
    if (master.dtype == DType::f32) return static_cast<double>(master.as<float>()[i]);
    return static_cast<double>(join(parameter_view.as<BFloat16>()[i].bits, master.as<std::uint16_t>()[i]));
  };
  auto set_value = [&](std::int64_t i, double value) {
    if (!master) return parameter.set(i, value);
    const SplitFloat parts = split(static_cast<float>(value));
    parameter_view.as<BFloat16>()[i].bits = parts.high;
    if (master.dtype == DType::f32) {
      master.as<float>()[i] = static_cast<float>(value);
    } else {
      master.as<std::uint16_t>()[i] = parts.low;
    }
  };
  parallel_for_blocks(context, count, kElementsPerTask, [&](std::int64_t first, std::int64_t last) {
    for_each_segment(tensors.boundaries, first, last, [&](std::int64_t begin, std::int64_t end, bool decays) {
      const double decay = decays ? settings.weight_decay : 0.0;
      for (std::int64_t i = begin; i < end; ++i) {
        const double g = s.gradient_factor * gradient(i), value = value_of(i);
        const double first_moment = settings.beta1 * m(i) + (1.0 - settings.beta1) * g;
        const double second_moment = settings.beta2 * v(i) + (1.0 - settings.beta2) * g * g;
        const double direction =
            first_moment / correction1 / (std::sqrt(second_moment / correction2) + settings.epsilon);
        const std::uint32_t random =
            rounding_bits(settings.seed, static_cast<std::uint64_t>(s.updates), static_cast<std::uint64_t>(i) / 4)
                .part(static_cast<int>(i % 4));
        set_moment(m_view, m, i, first_moment, random);
        set_moment(v_view, v, i, second_moment, random >> 16);
        set_value(i, value - s.learning_rate * (direction + decay * value));
      }
    });
  });
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, prepare_on_cpu,
                                reference_step};

}  // namespace flashgla::ops::adamw
