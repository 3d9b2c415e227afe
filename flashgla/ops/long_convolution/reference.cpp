// The definition, in f64.
#include "flashgla/ops/elements.h"
#include "flashgla/ops/long_convolution/implementations.h"

namespace flashgla::ops::long_convolution {

namespace {

// x of a sequence by index from its first token on, those in the past included.
struct Tokens {
  Elements x, past;
  std::int64_t n, room;
  Sequence sequence;

  Tokens(const Inputs& in, std::int64_t number)
      : x(in.x), past(in.past), n(number), room(in.past ? in.past.size(1) : 0), sequence(sequence_at(in, number)) {}
  double operator()(std::int64_t index, std::int64_t d) const {
    return index < sequence.past ? past(n * room + index, d) : x(sequence.begin + index - sequence.past, d);
  }
};

void reference_forward(Context& context, const Inputs& in, const TensorView& y_view) {
  if (context.planning()) return;
  const Elements filter(in.filter), skip(in.skip), y(y_view);
  parallel_for(context, sequences_of(in) * in.x.size(2), [&](std::int64_t item) {
    const std::int64_t n = item / in.x.size(2), d = item % in.x.size(2);
    const Tokens x(in, n);
    for (std::int64_t t = 0; t < x.sequence.length(); ++t) {
      const std::int64_t index = x.sequence.past + t;
      double sum = skip(d) * x(index, d);
      for (std::int64_t j = 0; j <= index; ++j) sum += filter(j, d) * x(index - j, d);
      y.set(x.sequence.begin + t, d, sum);
    }
  });
}

void reference_backward(Context& context, const Inputs& in, const TensorView& dy_view, const InputGradients& to) {
  if (context.planning()) return;
  const Elements filter(in.filter), skip(in.skip), dy(dy_view), dx(to.dx), dfilter(to.dfilter), dskip(to.dskip);
  parallel_for(context, in.x.size(2), [&](std::int64_t d) {
    for (std::int64_t j = 0; j < in.filter.size(0); ++j) dfilter.set(j, d, 0.0);
    for (std::int64_t n = 0; n < sequences_of(in); ++n) {
      const Tokens x(in, n);
      const Sequence& sequence = x.sequence;
      for (std::int64_t t = 0; t < sequence.length(); ++t) {
        const double gradient = dy(sequence.begin + t, d);
        double sum = skip(d) * gradient;
        for (std::int64_t j = t; j < sequence.length(); ++j) sum += filter(j - t, d) * dy(sequence.begin + j, d);
        dx.set(sequence.begin + t, d, sum);
        const std::int64_t index = sequence.past + t;
        for (std::int64_t j = 0; j <= index; ++j) dfilter.add(j, d, gradient * x(index - j, d));
        dskip.add(d, gradient * x(index, d));
      }
    }
  });
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, reference_forward,
                                reference_backward};

}  // namespace flashgla::ops::long_convolution
