#include "flashgla/ops/quantised_linear/gptq.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "flashgla/ops/quantised_linear/blocks.h"
#include "flashgla/ops/quantised_linear/quantise.h"

namespace flashgla::ops::quantised_linear {

namespace {

using Matrix = std::vector<float>;  // [n,n] row-major

float* row_of(Matrix& matrix, std::int64_t n, std::int64_t i) { return matrix.data() + i * n; }

// a = R^T R: R in the upper half, in place.
void factor(Context& context, Matrix& a, std::int64_t n) {
  for (std::int64_t j = 0; j < n; ++j) {
    float* pivot = row_of(a, n, j);
    if (!(pivot[j] > 0.0f)) throw Error("has inputs that GPTQ cannot invert; --method search does without");
    const float factor = 1.0f / std::sqrt(pivot[j]);
    for (std::int64_t k = j; k < n; ++k) pivot[k] *= factor;
    parallel_for_blocks(context, n - j - 1, 64, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = j + 1 + begin; i < j + 1 + end; ++i) {
        float* row = row_of(a, n, i);
        const float times = pivot[i];
        for (std::int64_t k = i; k < n; ++k) row[k] -= times * pivot[k];
      }
    });
  }
}

// inverse(R), upper triangular like R.
Matrix inverse_of(Context& context, Matrix& r, std::int64_t n) {
  Matrix inverse(static_cast<std::size_t>(n * n), 0.0f);
  for (std::int64_t i = n; i-- > 0;) {
    float* row = row_of(inverse, n, i);
    row[i] = 1.0f;
    parallel_for_blocks(context, n - i, 256, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t k = i + 1; k < n && k < i + end; ++k) {
        const float times = row_of(r, n, i)[k];
        const float* below = row_of(inverse, n, k);
        for (std::int64_t c = std::max(k, i + begin); c < i + end; ++c) row[c] -= times * below[c];
      }
      for (std::int64_t c = i + begin; c < i + end; ++c) row[c] /= row_of(r, n, i)[i];
    });
  }
  return inverse;
}

}  // namespace

void compensate(Context& context, const TensorView& values, const TensorView& products, const TensorView& packed) {
  const std::int64_t n = values.size(1);
  // inverse(H) = U^T U with U upper triangular is wanted, in the order of the columns. With both sides of H reversed
  // and that H = R^T R, U[t][s] = inverse(R)[n - 1 - s][n - 1 - t].
  std::vector<std::int64_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  const auto* h = products.as<float>();
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return h[a * n + a] > h[b * n + b]; });
  double mean = 0.0;
  for (std::int64_t k = 0; k < n; ++k) mean += static_cast<double>(h[k * n + k]) / static_cast<double>(n);
  if (!(mean > 0.0)) return;  // inputs that are all zero have no errors
  Matrix h_reversed(static_cast<std::size_t>(n * n));
  const auto reversed = [&](std::int64_t i) { return order[static_cast<std::size_t>(n - 1 - i)]; };
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < n; ++j)
      h_reversed[static_cast<std::size_t>(i * n + j)] = h[reversed(i) * n + reversed(j)];
    h_reversed[static_cast<std::size_t>(i * n + i)] += static_cast<float>(0.01 * mean);
  }
  factor(context, h_reversed, n);
  const Matrix inverse = inverse_of(context, h_reversed, n);
  Matrix rows(static_cast<std::size_t>(n * n), 0.0f);  // [t][s], s >= t
  for (std::int64_t t = 0; t < n; ++t) {
    for (std::int64_t s = t; s < n; ++s) {
      rows[static_cast<std::size_t>(t * n + s)] = inverse[static_cast<std::size_t>((n - 1 - s) * n + n - 1 - t)];
    }
  }
  const auto format = format_of(packed);
  const Blocks blocks(packed);
  parallel_for(context, packed.size(0), [&](std::int64_t panel) {
    const std::int64_t first = panel * kPanelRows;
    const std::int64_t last = std::min(values.size(0), first + kPanelRows);
    std::vector<float> w(static_cast<std::size_t>(n));
    std::vector<QuantisedGroup> groups(static_cast<std::size_t>(packed.size(1)));
    for (std::int64_t row = first; row < last; ++row) {
      for (std::int64_t t = 0; t < n; ++t) {
        w[static_cast<std::size_t>(t)] = values.as<float>()[row * n + order[static_cast<std::size_t>(t)]];
      }
      for (std::int64_t g = 0; g < packed.size(1); ++g) {
        auto& group = groups[static_cast<std::size_t>(g)];
        group.scale = blocks.scale(row, g);
        std::fill(std::begin(group.codes), std::end(group.codes), nearest_code(format, 0.0f, 0.0f));
      }
      for (std::int64_t t = 0; t < n; ++t) {
        const std::int64_t column = order[static_cast<std::size_t>(t)];
        auto& group = groups[static_cast<std::size_t>(column / kGroup)];
        const float value = w[static_cast<std::size_t>(t)];
        const std::uint8_t code = nearest_code(format, value, group.scale);
        group.codes[column % kGroup] = code;
        const float* own = row_of(rows, n, t);
        const float error = (value - group.scale * static_cast<float>(value_of(format, code))) / own[t];
        for (std::int64_t s = t + 1; s < n; ++s) w[static_cast<std::size_t>(s)] -= error * own[s];
      }
      for (std::int64_t g = 0; g < packed.size(1); ++g) {
        store_group(packed, row, g, groups[static_cast<std::size_t>(g)]);
      }
    }
  });
}

}  // namespace flashgla::ops::quantised_linear
