#include "testing/random.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "flashgla/base/context.h"
#include "flashgla/base/random.h"

namespace flashgla::testing {

double uniform(std::uint64_t seed, std::uint64_t index) {
  return random::Stream(seed, random::Use::tests).uniform(index);
}

double normal(std::uint64_t seed, std::uint64_t index) {
  return random::Stream(seed, random::Use::tests).normal(index);
}

namespace {

// block(begin, count, out): values begin .. begin + count - 1 of the view, at most kBlock of them.
constexpr std::int64_t kBlock = 256;

void fill_by_block(const TensorView& view, const std::function<void(std::int64_t, std::int64_t, double*)>& block) {
  if (!view.is_contiguous()) {
    const Tensor packed = Tensor::empty(view.shape, view.dtype);
    fill_by_block(packed, block);
    copy(packed, view);
    return;
  }
  dispatch_floating(view.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* out = view.as<T>();
    parallel_for_blocks(Context(), view.numel(), 64 * kBlock, [&](std::int64_t begin, std::int64_t end) {
      std::array<double, kBlock> values;
      for (std::int64_t i = begin; i < end; i += kBlock) {
        const std::int64_t count = std::min(end - i, kBlock);
        block(i, count, values.data());
        for (std::int64_t j = 0; j < count; ++j) out[i + j] = static_cast<T>(values[static_cast<std::size_t>(j)]);
      }
    });
  });
}

}  // namespace

void fill_by_index(const TensorView& view, const std::function<double(std::uint64_t)>& value) {
  fill_by_block(view, [&](std::int64_t begin, std::int64_t count, double* out) {
    for (std::int64_t j = 0; j < count; ++j) out[j] = value(static_cast<std::uint64_t>(begin + j));
  });
}

void fill_normal(const TensorView& view, std::uint64_t seed, double deviation, double mean) {
  const random::Stream stream(seed, random::Use::tests);
  fill_by_block(view, [&](std::int64_t begin, std::int64_t count, double* out) {
    random::fill_normals(stream, static_cast<std::uint64_t>(begin), count, out);
    for (std::int64_t j = 0; j < count; ++j) out[j] = std::fma(deviation, out[j], mean);
  });
}

Tensor random_normal(const Shape& shape, DType dtype, std::uint64_t seed, double deviation, double mean) {
  Tensor tensor = Tensor::empty(shape, dtype);
  fill_normal(tensor, seed, deviation, mean);
  return tensor;
}

void poison(const TensorView& view) {
  if (is_floating(view.dtype)) {
    fill(view, std::numeric_limits<double>::quiet_NaN());
  } else {
    std::memset(view.data, 0x7f, view.bytes());
  }
}

}  // namespace flashgla::testing
