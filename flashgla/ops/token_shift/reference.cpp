// The definition, in f64.
#include "flashgla/ops/elements.h"
#include "flashgla/ops/token_shift/implementations.h"

namespace flashgla::ops::token_shift {

namespace {

// x one token before a row.
struct Previous {
  Elements x, state;
  bool there;
  explicit Previous(const Inputs& in) : x(in.x), state(in.initial_state), there(in.initial_state) {}
  double operator()(const Sequence& sequence, std::int64_t n, std::int64_t row, std::int64_t d) const {
    if (row > sequence.begin) return x(row - 1, d);
    return there ? state(n, d) : 0.0;
  }
};

void reference_forward(Context& context, const Inputs& in, const Outputs& out) {
  if (context.planning()) return;
  const Elements x(in.x), mu(in.mu), y(out.y), after(out.final_state);
  const Previous previous(in);
  const std::int64_t rows = x.rows();
  parallel_for(context, sequences_of(in.x, in.cu_seqlens), [&](std::int64_t n) {
    const Sequence sequence = sequence_at(in.x, in.cu_seqlens, n);
    for (std::int64_t d = 0; d < x.length(); ++d) {
      for (std::int64_t row = sequence.begin; row < sequence.end; ++row) {
        const double before = previous(sequence, n, row, d);
        for (std::int64_t m = 0; m < mu.rows(); ++m) {
          y.set(m * rows + row, d, mu(m, d) * x(row, d) + (1.0 - mu(m, d)) * before);
        }
      }
      if (out.final_state) after.set(n, d, previous(sequence, n, sequence.end, d));
    }
  });
}

void reference_backward(Context& context, const Inputs& in, const TensorView& dy_view, const InputGradients& to) {
  if (context.planning()) return;
  const Elements x(in.x), mu(in.mu), dy(dy_view), dx(to.dx), dmu(to.dmu);
  const Previous previous(in);
  const std::int64_t rows = x.rows();
  parallel_for(context, x.length(), [&](std::int64_t d) {
    for (std::int64_t n = 0; n < sequences_of(in.x, in.cu_seqlens); ++n) {
      const Sequence sequence = sequence_at(in.x, in.cu_seqlens, n);
      for (std::int64_t row = sequence.begin; row < sequence.end; ++row) {
        double sum = 0.0;
        for (std::int64_t m = 0; m < mu.rows(); ++m) {
          const double gradient = dy(m * rows + row, d);
          sum += mu(m, d) * gradient;
          if (row + 1 < sequence.end) sum += (1.0 - mu(m, d)) * dy(m * rows + row + 1, d);
          dmu.add(m, d, gradient * (x(row, d) - previous(sequence, n, row, d)));
        }
        dx.set(row, d, sum);
      }
    }
  });
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, reference_forward,
                                reference_backward};

}  // namespace flashgla::ops::token_shift
