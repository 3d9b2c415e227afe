// A task is a slice of channels of one sequence, which walks through time with the last W inputs (and, backward, the
// last W gradients) in the first-level cache: every tensor moves once. Notation as in reference.cpp.
#include <algorithm>
#include <cmath>

#include "flashgla/ops/rows.h"
#include "flashgla/ops/short_convolution/implementations.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/short_convolution/cpu/simd.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::short_convolution {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

constexpr std::int64_t kSlice = 128;
constexpr std::int64_t kMostWidth = 4;

// The last W rows of a slice; row p lies in place p mod W.
class Window {
 public:
  explicit Window(std::int64_t width) : width_(width) {
    for (auto& row : rows_) std::fill_n(row, kSlice, 0.0f);
  }
  float* operator[](std::int64_t p) { return rows_[(p + width_) % width_]; }

 private:
  std::int64_t width_;
  alignas(64) float rows_[kMostWidth][kSlice];
};

struct Slice {
  std::int64_t n, begin, count;  // sequence, first channel, channels

  Slice(std::int64_t task, std::int64_t channels) {
    const std::int64_t slices = (channels + kSlice - 1) / kSlice;
    n = task / slices;
    begin = task % slices * kSlice;
    count = std::min(kSlice, channels - begin);
  }
};

std::int64_t tasks_of(const Inputs& inputs) {
  return sequences_of(inputs) * ((inputs.x.size(2) + kSlice - 1) / kSlice);
}

// Element (channel, i) of the states [N,D,W-1].
float* state_at(const TensorView& states, const Slice& slice, std::int64_t channel, std::int64_t i) {
  return states.as<float>() + ((slice.n * states.size(1)) + slice.begin + channel) * states.size(2) + i;
}

void load_initial(const Inputs& inputs, const Slice& slice, std::int64_t width, Window& window) {
  if (!inputs.initial_state) return;
  for (std::int64_t p = 0; p < width - 1; ++p) {
    for (std::int64_t c = 0; c < slice.count; ++c) window[p][c] = *state_at(inputs.initial_state, slice, c, p);
  }
}

// out = sum_j weight[j] rows(j), where weight is [W,D] at the slice's first channel. All buffers hold kSlice elements,
// but for the weight.
template <class RowOf>
void convolve(const float* weight, std::int64_t channels, std::int64_t width, std::int64_t count, const RowOf& rows,
              float* out) {
  simd::map([](VF32 w, VF32 e) { return hn::Mul(w, e); }, count, out, weight, rows(0));
  for (std::int64_t j = 1; j < width; ++j) {
    simd::map([](VF32 w, VF32 e, VF32 total) { return hn::MulAdd(w, e, total); }, count, out, weight + j * channels,
              rows(j), static_cast<const float*>(out));
  }
}

template <class T>
void forward(Context& context, const Inputs& inputs, const Outputs& outputs, Activation activation,
             const float* weight) {
  const TypedRows<T> x(inputs.x), y(outputs.y);
  const std::int64_t channels = inputs.x.size(2), width = inputs.weight.size(1);
  parallel_for(context, tasks_of(inputs), [&](std::int64_t task) {
    const Slice slice(task, channels);
    const Sequence sequence = sequence_at(inputs, slice.n);
    Window window(width);
    load_initial(inputs, slice, width, window);
    alignas(64) float z[kSlice];
    for (std::int64_t t = 0; t < sequence.length; ++t) {
      const std::int64_t row = sequence.begin + t;
      simd::map([](VF32 value) { return value; }, slice.count, window[t + width - 1], x[row] + slice.begin);
      convolve(
          weight + slice.begin, channels, width, slice.count, [&](std::int64_t j) { return window[t + j]; }, z);
      T* out = y[row] + slice.begin;
      if (activation == Activation::silu) {
        simd::map([](VF32 v) { return hn::Mul(v, simd::sigmoid(simd::F32(), v)); }, slice.count, out, z);
      } else {
        simd::map([](VF32 v) { return v; }, slice.count, out, z);
      }
    }
    if (!outputs.final_state) return;
    for (std::int64_t i = 0; i < width - 1; ++i) {
      for (std::int64_t c = 0; c < slice.count; ++c) {
        *state_at(outputs.final_state, slice, c, i) = window[sequence.length + i][c];
      }
    }
  });
}

// dweights: [N,W,D], a sum for each sequence.
template <class T>
void backward(Context& context, const Inputs& inputs, const OutputGradients& output_gradients,
              const InputGradients& input_gradients, Activation activation, const float* weight, float* dweights) {
  const TypedRows<T> x(inputs.x), dy(output_gradients.dy), dx(input_gradients.dx);
  const std::int64_t channels = inputs.x.size(2), width = inputs.weight.size(1);
  parallel_for(context, tasks_of(inputs), [&](std::int64_t task) {
    const Slice slice(task, channels);
    const Sequence sequence = sequence_at(inputs, slice.n);
    const float* slice_weight = weight + slice.begin;
    float* slice_dweight = dweights + slice.n * width * channels + slice.begin;
    for (std::int64_t j = 0; j < width; ++j) std::fill_n(slice_dweight + j * channels, slice.count, 0.0f);
    Window window(width), dz(width);
    load_initial(inputs, slice, width, window);
    alignas(64) float buffer[kSlice];
    for (std::int64_t p = 0; p < sequence.length + width - 1; ++p) {
      float* gradient = dz[p];
      if (p < sequence.length) {
        const std::int64_t row = sequence.begin + p;
        simd::map([](VF32 value) { return value; }, slice.count, window[p + width - 1], x[row] + slice.begin);
        if (activation == Activation::silu) {
          convolve(
              slice_weight, channels, width, slice.count, [&](std::int64_t j) { return window[p + j]; }, buffer);
          simd::map(
              [](VF32 g, VF32 z) {
                const VF32 s = simd::sigmoid(simd::F32(), z);
                const VF32 swish = hn::Mul(z, s);
                return hn::Mul(g, hn::NegMulAdd(swish, s, hn::Add(s, swish)));
              },
              slice.count, gradient, dy[row] + slice.begin, static_cast<const float*>(buffer));
        } else {
          simd::map([](VF32 g) { return g; }, slice.count, gradient, dy[row] + slice.begin);
        }
        for (std::int64_t j = 0; j < width; ++j) {
          float* sums = slice_dweight + j * channels;
          simd::map([](VF32 total, VF32 g, VF32 e) { return hn::MulAdd(g, e, total); }, slice.count, sums,
                    static_cast<const float*>(sums), static_cast<const float*>(gradient), window[p + j]);
        }
      } else {
        std::fill_n(gradient, slice.count, 0.0f);
      }
      convolve(
          slice_weight, channels, width, slice.count, [&](std::int64_t j) { return dz[p - j + width]; }, buffer);
      if (p >= sequence.length && output_gradients.d_final_state) {
        for (std::int64_t c = 0; c < slice.count; ++c) {
          buffer[c] += *state_at(output_gradients.d_final_state, slice, c, p - sequence.length);
        }
      }
      if (p >= width - 1) {
        simd::map([](VF32 value) { return value; }, slice.count, dx[sequence.begin + p - (width - 1)] + slice.begin,
                  static_cast<const float*>(buffer));
      } else if (input_gradients.d_initial_state) {
        for (std::int64_t c = 0; c < slice.count; ++c) {
          *state_at(input_gradients.d_initial_state, slice, c, p) = buffer[c];
        }
      }
    }
  });
}

template <class T>
void step(Context& context, const TensorView& x_view, const TensorView& weight_view, const TensorView& states,
          const TensorView& y_view, Activation activation) {
  const TypedRows<T> x(x_view), y(y_view);
  const std::int64_t channels = x.length(), kept = states.size(2);
  const bool half = weight_view.dtype == DType::bf16;
  auto weight = [&](std::int64_t i) {
    return half ? static_cast<float>(weight_view.as<BFloat16>()[i]) : weight_view.as<float>()[i];
  };
  parallel_for_blocks(context, x.count() * channels, kElementsPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t row = item / channels, d = item % channels;
      float* state = states.as<float>() + item * kept;
      const auto value = static_cast<float>(x[row][d]);
      float z = weight(d * (kept + 1) + kept) * value;
      for (std::int64_t j = 0; j < kept; ++j) z += weight(d * (kept + 1) + j) * state[j];
      std::copy(state + 1, state + kept, state);
      state[kept - 1] = value;
      y[row][d] = static_cast<T>(activation == Activation::silu ? z / (1.0f + std::exp(-z)) : z);
    }
  });
}

void Forward(Context& context, const Inputs& inputs, const Outputs& outputs, Activation activation,
             const float* weight) {
  if (inputs.x.dtype == DType::f32) return forward<float>(context, inputs, outputs, activation, weight);
  forward<BFloat16>(context, inputs, outputs, activation, weight);
}

void Backward(Context& context, const Inputs& inputs, const OutputGradients& output_gradients,
              const InputGradients& input_gradients, Activation activation, const float* weight, float* dweights) {
  const bool wide = inputs.x.dtype == DType::f32;
  (wide ? backward<float> : backward<BFloat16>)(context, inputs, output_gradients, input_gradients, activation, weight,
                                                dweights);
}

void Step(Context& context, const TensorView& x, const TensorView& weight, const TensorView& state, const TensorView& y,
          Activation activation) {
  if (x.dtype == DType::f32) return step<float>(context, x, weight, state, y, activation);
  step<BFloat16>(context, x, weight, state, y, activation);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::short_convolution
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::short_convolution {

HWY_EXPORT(Forward);
HWY_EXPORT(Backward);
HWY_EXPORT(Step);

namespace {

// The weight as [W,D] f32, so that channels are vectors.
const float* transposed_weight(Context& context, const TensorView& weight) {
  const std::int64_t channels = weight.size(0), width = weight.size(1);
  const TensorView transposed = context.scratch().tensor({width, channels}, DType::f32, "short_convolution: weight");
  if (!context.planning()) copy(weight.transpose(0, 1), transposed);
  return transposed.as<float>();
}

void simd_forward(Context& context, const Inputs& inputs, const Outputs& outputs, Activation activation) {
  ArenaScope scope(context.scratch());
  const float* weight = transposed_weight(context, inputs.weight);
  if (!context.planning()) HWY_DYNAMIC_DISPATCH(Forward)(context, inputs, outputs, activation, weight);
}

void simd_backward(Context& context, const Inputs& inputs, const OutputGradients& output_gradients,
                   const InputGradients& input_gradients, Activation activation) {
  ArenaScope scope(context.scratch());
  const std::int64_t channels = inputs.weight.size(0), width = inputs.weight.size(1), count = sequences_of(inputs);
  const float* weight = transposed_weight(context, inputs.weight);
  const TensorView dweights =
      context.scratch().tensor({count, width, channels}, DType::f32, "short_convolution: dweight of sequences");
  if (context.planning()) return;
  const auto run = HWY_DYNAMIC_DISPATCH(Backward);
  run(context, inputs, output_gradients, input_gradients, activation, weight, dweights.as<float>());
  auto* dweight = input_gradients.dweight.as<float>();
  for (std::int64_t n = 0; n < count; ++n) {
    const float* sums = dweights.as<float>() + n * width * channels;
    for (std::int64_t d = 0; d < channels; ++d) {
      for (std::int64_t j = 0; j < width; ++j) dweight[d * width + j] += sums[j * channels + d];
    }
  }
}

}  // namespace

const Implementation kSimd{"simd",
                           Device::Kind::cpu,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.weight_dtype});
                           },
                           simd_forward,
                           simd_backward,
                           [](Context& context, const TensorView& x, const TensorView& weight, const TensorView& state,
                              const TensorView& y, Activation activation) {
                             HWY_DYNAMIC_DISPATCH(Step)(context, x, weight, state, y, activation);
                           }};

}  // namespace flashgla::ops::short_convolution
#endif
