// The definition, in f64.
#include <algorithm>
#include <iterator>
#include <vector>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/long_convolution/implementations.h"

namespace flashgla::ops::long_convolution {

namespace {

using Column = std::vector<double>;

// Rows of a channel.
Column rows_of(const Elements& from, std::int64_t begin, std::int64_t count, std::int64_t d) {
  Column result(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) result[i] = from(begin + i, d);
  return result;
}

// x of a sequence's channel from its first token on, those in the past included.
Column tokens_of(const Inputs& in, std::int64_t n, std::int64_t d) {
  const Sequence sequence = sequence_at(in, n);
  Column result = sequence.past > 0 ? rows_of(Elements(in.past), n * in.past.size(1), sequence.past, d) : Column();
  const Column own = rows_of(Elements(in.x), sequence.begin, sequence.length(), d);
  result.insert(result.end(), own.begin(), own.end());
  return result;
}

void reference_forward(Context& context, const Inputs& in, const Outputs& out) {
  if (context.planning()) return;
  const Elements skip(in.skip), y(out.y);
  parallel_for(context, sequences_of(in) * in.x.size(2), [&](std::int64_t item) {
    const std::int64_t n = item / in.x.size(2), d = item % in.x.size(2);
    const Sequence sequence = sequence_at(in, n);
    const Column x = tokens_of(in, n, d), filter = rows_of(Elements(in.filter), 0, std::ssize(x), d);
    for (std::int64_t t = 0; t < sequence.length(); ++t) {
      const std::int64_t index = sequence.past + t;
      double sum = skip(d) * x[index];
      for (std::int64_t j = 0; j <= index; ++j) sum += filter[j] * x[index - j];
      y.set(sequence.begin + t, d, sum);
    }
  });
}

// dx[t] = skip dy[t] + sum_{j>=t} filter[j-t] dy[j]
void inputs_gradient(Context& context, const Inputs& in, const Elements& dy_elements, const Elements& dx) {
  const Elements skip(in.skip);
  parallel_for(context, sequences_of(in) * in.x.size(2), [&](std::int64_t item) {
    const std::int64_t n = item / in.x.size(2), d = item % in.x.size(2);
    const Sequence sequence = sequence_at(in, n);
    const Column dy = rows_of(dy_elements, sequence.begin, sequence.length(), d),
                 filter = rows_of(Elements(in.filter), 0, std::ssize(dy), d);
    for (std::int64_t t = 0; t < std::ssize(dy); ++t) {
      double sum = skip(d) * dy[t];
      for (std::int64_t j = t; j < std::ssize(dy); ++j) sum += filter[j - t] * dy[j];
      dx.set(sequence.begin + t, d, sum);
    }
  });
}

// dfilter[j] = sum_n sum_t dy[t] x[p + t - j], and the skip's, which is that of j = 0 and is added to.
void filters_gradient(Context& context, const Inputs& in, const Elements& dy_elements, const InputGradients& to) {
  constexpr std::int64_t kRows = 256;  // of a task
  const Elements dfilter(to.dfilter), dskip(to.dskip);
  const std::int64_t rows = in.filter.size(0), channels = in.x.size(2);
  parallel_for(context, channels * ((rows + kRows - 1) / kRows), [&](std::int64_t item) {
    const std::int64_t d = item % channels, first = item / channels * kRows, end = std::min(first + kRows, rows);
    Column sums(static_cast<std::size_t>(end - first));
    for (std::int64_t n = 0; n < sequences_of(in); ++n) {
      const Sequence sequence = sequence_at(in, n);
      const Column x = tokens_of(in, n, d), dy = rows_of(dy_elements, sequence.begin, sequence.length(), d);
      for (std::int64_t t = 0; t < std::ssize(dy); ++t) {
        const std::int64_t index = sequence.past + t;
        for (std::int64_t j = first; j < std::min(end, index + 1); ++j) sums[j - first] += dy[t] * x[index - j];
      }
    }
    for (std::int64_t j = first; j < end; ++j) dfilter.set(j, d, sums[j - first]);
    if (first == 0) dskip.add(d, sums[0]);
  });
}

void reference_backward(Context& context, const Inputs& in, const TensorView& /*kept*/, const TensorView& dy_view,
                        const InputGradients& to) {
  if (context.planning()) return;
  const Elements dy(dy_view);
  inputs_gradient(context, in, dy, Elements(to.dx));
  filters_gradient(context, in, dy, to);
}

}  // namespace

const Implementation kReference{
    "reference",   Device::Kind::cpu, [](const Problem&, const Architecture&) { return Support::yes(); },
    keeps_nothing, reference_forward, reference_backward};

}  // namespace flashgla::ops::long_convolution
