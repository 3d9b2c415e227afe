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

// One to `lanes` elements at a time: f(i, count) for pieces of a slice, where all but the last are whole vectors.
template <class F>
HWY_INLINE void for_each_vector(std::int64_t count, const F& f) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(simd::F32()));
  for (std::int64_t i = 0; i < count; i += lanes) f(i, std::min(lanes, count - i));
}
template <class T>
HWY_INLINE VF32 load_up_to(const T* from, std::int64_t count) {
  const simd::F32 d;
  return count == static_cast<std::int64_t>(hn::Lanes(d)) ? simd::load(d, from) : simd::load_part(d, from, count);
}
template <class T>
HWY_INLINE void store_up_to(VF32 value, T* to, std::int64_t count) {
  const simd::F32 d;
  if (count == static_cast<std::int64_t>(hn::Lanes(d))) {
    simd::store(d, value, to);
  } else {
    simd::store_part(d, value, to, count);
  }
}

// The slice's weights as [W, kSlice] and its biases behind them, zero beyond its channels.
struct SliceWeight {
  alignas(64) float rows[kMostWidth + 1][kSlice];

  SliceWeight(const float* weight, const Slice& slice, std::int64_t channels, std::int64_t width) {
    for (std::int64_t j = 0; j < width + 1; ++j) {
      std::fill_n(rows[j], kSlice, 0.0f);
      std::copy_n(weight + j * channels + slice.begin, slice.count, rows[j]);
    }
  }
};

// z[t] = bias + sum_j weight[j] e[t+j], where e[t+W-1] is the input that arrives.
template <int Width>
HWY_INLINE VF32 convolve(const SliceWeight& weight, const float* const (&taps)[Width], VF32 arriving, std::int64_t i) {
  const simd::F32 d;
  VF32 z = hn::MulAdd(hn::Load(d, weight.rows[Width - 1] + i), arriving, hn::Load(d, weight.rows[Width] + i));
  for (int j = 0; j < Width - 1; ++j) z = hn::MulAdd(hn::Load(d, weight.rows[j] + i), hn::Load(d, taps[j] + i), z);
  return z;
}

template <int Width, class T>
void forward(Context& context, const Inputs& inputs, const Outputs& outputs, Activation activation,
             const float* weights) {
  const TypedRows<T> x(inputs.x), y(outputs.y);
  const std::int64_t channels = inputs.x.size(2);
  const bool silu = activation == Activation::silu;
  parallel_for(context, tasks_of(inputs), [&](std::int64_t task) {
    const simd::F32 d;
    const Slice slice(task, channels);
    const Sequence sequence = sequence_at(inputs.x, inputs.cu_seqlens, slice.n);
    const SliceWeight weight(weights, slice, channels, Width);
    Window window(Width);
    load_initial(inputs, slice, Width, window);
    for (std::int64_t t = 0; t < sequence.length(); ++t) {
      const T* in = x[sequence.begin + t] + slice.begin;
      T* out = y[sequence.begin + t] + slice.begin;
      const float* taps[Width];
      for (int j = 0; j < Width; ++j) taps[j] = window[t + j];
      float* newest = window[t + Width - 1];
      for_each_vector(slice.count, [&](std::int64_t i, std::int64_t count) {
        const VF32 arriving = load_up_to(in + i, count);
        hn::Store(arriving, d, newest + i);
        const VF32 z = convolve(weight, taps, arriving, i);
        store_up_to(silu ? hn::Mul(z, simd::sigmoid(d, z)) : z, out + i, count);
      });
    }
    if (!outputs.final_state) return;
    for (std::int64_t i = 0; i < Width - 1; ++i) {
      for (std::int64_t c = 0; c < slice.count; ++c) {
        *state_at(outputs.final_state, slice, c, i) = window[sequence.length() + i][c];
      }
    }
  });
}

// dweights: [N,W+1,D], a sum for each sequence, and of the bias behind those of the weights.
template <int Width, class T>
void backward(Context& context, const Inputs& inputs, const OutputGradients& output_gradients,
              const InputGradients& input_gradients, Activation activation, const float* weights, float* dweights) {
  const TypedRows<T> x(inputs.x), dy(output_gradients.dy), dx(input_gradients.dx);
  const std::int64_t channels = inputs.x.size(2);
  const bool silu = activation == Activation::silu;
  parallel_for(context, tasks_of(inputs), [&](std::int64_t task) {
    const simd::F32 d;
    const Slice slice(task, channels);
    const Sequence sequence = sequence_at(inputs.x, inputs.cu_seqlens, slice.n);
    const SliceWeight weight(weights, slice, channels, Width);
    alignas(64) float dweight[Width + 1][kSlice] = {};
    alignas(64) float de[kSlice];
    Window window(Width), dz(Width);
    load_initial(inputs, slice, Width, window);
    for (std::int64_t p = 0; p < sequence.length() + Width - 1; ++p) {
      const bool inside = p < sequence.length();
      const float* taps[Width];
      const float* gradients[Width];  // dz[p-j]
      for (int j = 0; j < Width; ++j) {
        taps[j] = window[p + j];
        gradients[j] = dz[p - j + Width];
      }
      float *newest = window[p + Width - 1], *newest_dz = dz[p];
      const T* in = inside ? x[sequence.begin + p] + slice.begin : nullptr;
      const T* dy_row = inside ? dy[sequence.begin + p] + slice.begin : nullptr;
      T* dx_row = p >= Width - 1 ? dx[sequence.begin + p - (Width - 1)] + slice.begin : nullptr;
      const bool plain = dx_row && inside;  // no state takes part
      for_each_vector(slice.count, [&](std::int64_t i, std::int64_t count) {
        VF32 gradient = hn::Zero(d);
        if (inside) {
          const VF32 arriving = load_up_to(in + i, count);
          hn::Store(arriving, d, newest + i);
          gradient = load_up_to(dy_row + i, count);
          if (silu) {
            const VF32 z = convolve(weight, taps, arriving, i);
            const VF32 s = simd::sigmoid(d, z);
            const VF32 swish = hn::Mul(z, s);
            gradient = hn::Mul(gradient, hn::NegMulAdd(swish, s, hn::Add(s, swish)));
          }
          for (int j = 0; j < Width; ++j) {
            float* sums = dweight[j] + i;
            hn::Store(hn::MulAdd(gradient, hn::Load(d, taps[j] + i), hn::Load(d, sums)), d, sums);
          }
          if (inputs.bias) hn::Store(hn::Add(hn::Load(d, dweight[Width] + i), gradient), d, dweight[Width] + i);
        }
        hn::Store(gradient, d, newest_dz + i);
        VF32 total = hn::Mul(hn::Load(d, weight.rows[0] + i), gradient);
        for (int j = 1; j < Width; ++j) {
          total = hn::MulAdd(hn::Load(d, weight.rows[j] + i), hn::Load(d, gradients[j] + i), total);
        }
        if (plain) {
          store_up_to(total, dx_row + i, count);
        } else {
          hn::Store(total, d, de + i);
        }
      });
      if (plain) continue;
      if (!inside && output_gradients.d_final_state) {
        for (std::int64_t c = 0; c < slice.count; ++c) {
          de[c] += *state_at(output_gradients.d_final_state, slice, c, p - sequence.length());
        }
      }
      if (dx_row) {
        simd::map([](VF32 value) { return value; }, slice.count, dx_row, static_cast<const float*>(de));
      } else if (input_gradients.d_initial_state) {
        for (std::int64_t c = 0; c < slice.count; ++c) {
          *state_at(input_gradients.d_initial_state, slice, c, p) = de[c];
        }
      }
    }
    for (int j = 0; j < Width + 1; ++j) {
      std::copy_n(dweight[j], slice.count, dweights + (slice.n * (Width + 1) + j) * channels + slice.begin);
    }
  });
}

template <class T>
void step(Context& context, const TensorView& x_view, const TensorView& weight_view, const TensorView& bias,
          const TensorView& states, const TensorView& y_view, Activation activation) {
  const TypedRows<T> x(x_view), y(y_view);
  const std::int64_t channels = x.length(), kept = states.size(2);
  const bool half = weight_view.dtype == DType::bf16;
  const auto parameter = [half](const TensorView& from, std::int64_t i) {
    return half ? static_cast<float>(from.as<BFloat16>()[i]) : from.as<float>()[i];
  };
  const auto weight = [&](std::int64_t i) { return parameter(weight_view, i); };
  parallel_for_blocks(context, x.count() * channels, kElementsPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t row = item / channels, d = item % channels;
      float* state = states.as<float>() + item * kept;
      const auto value = static_cast<float>(x[row][d]);
      float z = weight(d * (kept + 1) + kept) * value;
      for (std::int64_t j = 0; j < kept; ++j) z += weight(d * (kept + 1) + j) * state[j];
      if (bias) z += parameter(bias, d);
      std::copy(state + 1, state + kept, state);
      state[kept - 1] = value;
      y[row][d] = static_cast<T>(activation == Activation::silu ? z / (1.0f + std::exp(-z)) : z);
    }
  });
}

template <class T>
void forward_of_width(Context& context, const Inputs& inputs, const Outputs& outputs, Activation activation,
                      const float* weights) {
  switch (inputs.weight.size(1)) {
    case 2:
      return forward<2, T>(context, inputs, outputs, activation, weights);
    case 3:
      return forward<3, T>(context, inputs, outputs, activation, weights);
    default:
      return forward<4, T>(context, inputs, outputs, activation, weights);
  }
}

template <class T>
void backward_of_width(Context& context, const Inputs& inputs, const OutputGradients& from, const InputGradients& to,
                       Activation activation, const float* weights, float* dweights) {
  switch (inputs.weight.size(1)) {
    case 2:
      return backward<2, T>(context, inputs, from, to, activation, weights, dweights);
    case 3:
      return backward<3, T>(context, inputs, from, to, activation, weights, dweights);
    default:
      return backward<4, T>(context, inputs, from, to, activation, weights, dweights);
  }
}

void Forward(Context& context, const Inputs& inputs, const Outputs& outputs, Activation activation,
             const float* weights) {
  const bool wide = inputs.x.dtype == DType::f32;
  (wide ? forward_of_width<float> : forward_of_width<BFloat16>)(context, inputs, outputs, activation, weights);
}

void Backward(Context& context, const Inputs& inputs, const OutputGradients& from, const InputGradients& to,
              Activation activation, const float* weights, float* dweights) {
  const bool wide = inputs.x.dtype == DType::f32;
  (wide ? backward_of_width<float> : backward_of_width<BFloat16>)(context, inputs, from, to, activation, weights,
                                                                  dweights);
}

void Step(Context& context, const TensorView& x, const TensorView& weight, const TensorView& bias,
          const TensorView& state, const TensorView& y, Activation activation) {
  if (x.dtype == DType::f32) return step<float>(context, x, weight, bias, state, y, activation);
  step<BFloat16>(context, x, weight, bias, state, y, activation);
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

// The weight as [W,D] f32, so that channels are vectors, and the bias, or zeros, behind it.
const float* transposed_weight(Context& context, const Inputs& inputs) {
  const std::int64_t channels = inputs.weight.size(0), width = inputs.weight.size(1);
  const TensorView rows = context.scratch().tensor({width + 1, channels}, DType::f32, "short_convolution: weight");
  if (context.planning()) return rows.as<float>();
  copy(inputs.weight.transpose(0, 1), rows.slice(0, 0, width));
  const TensorView bias = rows.select(0, width);
  if (inputs.bias) {
    copy(inputs.bias, bias);
  } else {
    std::fill_n(bias.as<float>(), channels, 0.0f);
  }
  return rows.as<float>();
}

void simd_forward(Context& context, const Inputs& inputs, const Outputs& outputs, Activation activation) {
  ArenaScope scope(context.scratch());
  const float* weight = transposed_weight(context, inputs);
  if (!context.planning()) HWY_DYNAMIC_DISPATCH(Forward)(context, inputs, outputs, activation, weight);
}

void simd_backward(Context& context, const Inputs& inputs, const OutputGradients& output_gradients,
                   const InputGradients& input_gradients, Activation activation) {
  ArenaScope scope(context.scratch());
  const std::int64_t channels = inputs.weight.size(0), width = inputs.weight.size(1), count = sequences_of(inputs);
  const float* weight = transposed_weight(context, inputs);
  const TensorView dweights =
      context.scratch().tensor({count, width + 1, channels}, DType::f32, "short_convolution: sums of sequences");
  if (context.planning()) return;
  const auto run = HWY_DYNAMIC_DISPATCH(Backward);
  run(context, inputs, output_gradients, input_gradients, activation, weight, dweights.as<float>());
  auto* dweight = input_gradients.dweight.as<float>();
  for (std::int64_t n = 0; n < count; ++n) {
    const float* sums = dweights.as<float>() + n * (width + 1) * channels;
    for (std::int64_t d = 0; d < channels; ++d) {
      for (std::int64_t j = 0; j < width; ++j) dweight[d * width + j] += sums[j * channels + d];
      if (inputs.bias) input_gradients.dbias.as<float>()[d] += sums[width * channels + d];
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
                           [](Context& context, const TensorView& x, const TensorView& weight, const TensorView& bias,
                              const TensorView& state, const TensorView& y, Activation activation) {
                             HWY_DYNAMIC_DISPATCH(Step)(context, x, weight, bias, state, y, activation);
                           }};

}  // namespace flashgla::ops::short_convolution
#endif
