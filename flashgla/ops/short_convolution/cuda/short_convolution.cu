// Launches of forward and backward, and the step of one token.
#include "flashgla/ops/short_convolution/cuda/backward.cuh"
#include "flashgla/ops/short_convolution/cuda/forward.cuh"
#include "flashgla/ops/short_convolution/implementations.h"

namespace flashgla::ops::short_convolution {

namespace {

using cuda::bf16;
using cuda::Call;
using cuda::kThreads;
using ops::cuda::Lines;
using ops::cuda::Operand;

constexpr int kMostPast = 3;  // tokens that the widest filter looks back

template <class T>
__global__ void __launch_bounds__(256)
    step_kernel(Operand<T> x, Operand<T> y, const void* weight, const void* bias, bool wide_weight, float* states,
                std::int64_t batch, std::int64_t channels, int width, bool silu) {
  // A projection of the same token comes next, which asks for its weights meanwhile, as this kernel does.
  flashgla::cuda::release_next();
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool there = item < batch * channels;
  const std::int64_t row = item / channels, d = item % channels;
  const auto parameter = [there, wide_weight](const void* from, std::int64_t i) {
    if (!there || from == nullptr) return 0.0f;
    return wide_weight ? static_cast<const float*>(from)[i]
                       : flashgla::cuda::to_float(static_cast<const bf16*>(from)[i]);
  };
  const float last = parameter(weight, d * width + width - 1), offset = parameter(bias, d);
  float weights[kMostPast], past[kMostPast];
#pragma unroll
  for (int j = 0; j < kMostPast; ++j) weights[j] = j < width - 1 ? parameter(weight, d * width + j) : 0.0f;
  flashgla::cuda::wait_for_previous();
  if (!there) return;
  float* state = states + item * (width - 1);
  const float arriving = flashgla::cuda::to_float(*x.at(row, d));
#pragma unroll
  for (int j = 0; j < kMostPast; ++j) past[j] = j < width - 1 ? state[j] : 0.0f;
  float z = last * arriving;
#pragma unroll
  for (int j = 0; j < kMostPast; ++j) {
    if (j >= width - 1) break;
    z = fmaf(weights[j], past[j], z);
    if (j > 0) state[j - 1] = past[j];
  }
  state[width - 2] = arriving;
  z += offset;
  *y.at(row, d) = flashgla::cuda::from_float<T>(silu ? z * ops::cuda::sigmoid(z) : z);
}

Call call_of(const Inputs& inputs, Activation activation) {
  const TensorView& x = inputs.x;
  return {x.size(0),
          x.size(1),
          x.size(2),
          sequences_of(inputs),
          inputs.cu_seqlens.data,
          inputs.cu_seqlens.dtype == DType::i64,
          inputs.weight.data,
          inputs.bias.data,
          inputs.weight.dtype == DType::f32,
          inputs.initial_state ? inputs.initial_state.as<float>() : nullptr,
          activation == Activation::silu};
}

// Calls run(integral_constant W).
template <class Run>
void with_width(std::int64_t width, const Run& run) {
  if (width == 2) return run(std::integral_constant<int, 2>());
  if (width == 3) return run(std::integral_constant<int, 3>());
  run(std::integral_constant<int, 4>());
}

// Whether a thread may take `elements` channels, and read their filters at once.
bool is_wide(const Inputs& inputs, int elements, std::initializer_list<const TensorView*> tensors) {
  const std::size_t filter_bytes = static_cast<std::size_t>(elements) * size_of(inputs.weight.dtype);
  return inputs.x.size(2) % elements == 0 && ops::cuda::are_aligned(tensors, elements) &&
         reinterpret_cast<std::uintptr_t>(inputs.weight.data) % filter_bytes == 0;
}

std::int64_t bytes_of_token(const TensorView& view) {
  return view.stride[1] * static_cast<std::int64_t>(size_of(view.dtype));
}

// Division by a number of pieces, which is 0 where there is nothing to do.
ops::cuda::Division division_by(std::int64_t pieces) {
  return ops::cuda::Division(static_cast<std::uint32_t>(std::max<std::int64_t>(pieces, 1)));
}

template <int N, class T, bool kBias>
void forward_of(Context& context, const Inputs& inputs, const Outputs& outputs, Activation activation) {
  const Call call = call_of(inputs, activation);
  const std::int64_t tiles = call.pieces_of_line(cuda::kTile), blocks = call.lines * tiles * call.slices(N);
  auto* final_state = outputs.final_state ? outputs.final_state.as<float>() : nullptr;
  with_width(inputs.weight.size(1), [&](auto width) {
    ops::cuda::queue_kernel(context, "short_convolution",
                            call.silu ? cuda::forward_kernel<width.value, N, T, true, kBias>
                                      : cuda::forward_kernel<width.value, N, T, false, kBias>,
                            blocks + (final_state ? call.state_blocks(cuda::kForwardThreads) : 0),
                            cuda::kForwardThreads, 0, call, division_by(call.slices(N)), division_by(tiles), blocks,
                            Lines<T>(inputs.x), Lines<T>(outputs.y), final_state);
  });
}

template <int N, class T, bool kBias>
void backward_of(Context& context, const Inputs& inputs, const OutputGradients& from, const InputGradients& to,
                 Activation activation, const ops::cuda::PartialSums& partial) {
  const Call call = call_of(inputs, activation);
  const cuda::Gradients<T> gradients{Lines<T>(inputs.x),
                                     Lines<T>(from.dy),
                                     Lines<T>(to.dx),
                                     from.d_final_state ? from.d_final_state.as<float>() : nullptr,
                                     to.d_initial_state ? to.d_initial_state.as<float>() : nullptr,
                                     bytes_of_token(inputs.x),
                                     bytes_of_token(from.dy),
                                     bytes_of_token(to.dx)};
  const std::int64_t blocks = partial.blocks() * call.slices(N);
  with_width(inputs.weight.size(1), [&](auto width) {
    ops::cuda::queue_kernel(context, "short_convolution",
                            call.silu ? cuda::backward_kernel<width.value, N, T, true, kBias>
                                      : cuda::backward_kernel<width.value, N, T, false, kBias>,
                            blocks + (to.d_initial_state ? call.state_blocks(kThreads) : 0), kThreads,
                            cuda::kBackwardShared<width.value, N, T, kBias>, call, division_by(call.slices(N)),
                            division_by(call.pieces_of_line(cuda::kChunk)), blocks, gradients, partial);
  });
}

template <class T>
void forward_of(Context& context, const Inputs& inputs, const Outputs& outputs, Activation activation) {
  constexpr int kElements = cuda::kForwardElements;
  const bool wide = is_wide(inputs, kElements, {&inputs.x, &outputs.y});
  if (inputs.bias) {
    (wide ? forward_of<kElements, T, true> : forward_of<1, T, true>)(context, inputs, outputs, activation);
  } else {
    (wide ? forward_of<kElements, T, false> : forward_of<1, T, false>)(context, inputs, outputs, activation);
  }
}

void cuda_forward(Context& context, const Inputs& inputs, const Outputs& outputs, Activation activation) {
  if (context.planning()) return;
  (inputs.x.dtype == DType::f32 ? forward_of<float> : forward_of<bf16>)(context, inputs, outputs, activation);
}

template <class T>
void backward_of(Context& context, const Inputs& inputs, const OutputGradients& from, const InputGradients& to,
                 Activation activation, const ops::cuda::PartialSums& partial) {
  constexpr int kElements = cuda::kBackwardElements<T>;
  const bool wide = is_wide(inputs, kElements, {&inputs.x, &from.dy, &to.dx});
  if (inputs.bias) {
    (wide ? backward_of<kElements, T, true> : backward_of<1, T, true>)(context, inputs, from, to, activation, partial);
  } else {
    (wide ? backward_of<kElements, T, false> : backward_of<1, T, false>)(context, inputs, from, to, activation,
                                                                         partial);
  }
}

// Where a channel's sums go, of its `width` weights and its bias.
struct SumsOut {
  float *dweight, *dbias;
  int width;
  __device__ __forceinline__ float* operator()(std::int64_t column) const {
    const std::int64_t d = column / (width + 1);
    const int j = static_cast<int>(column - d * (width + 1));
    return j < width ? dweight + d * width + j : dbias + d;
  }
};

void cuda_backward(Context& context, const Inputs& inputs, const OutputGradients& from, const InputGradients& to,
                   Activation activation) {
  const ArenaScope scope(context.scratch());
  const std::int64_t chunks = call_of(inputs, activation).pieces(cuda::kChunk);
  const std::int64_t groups = (chunks + cuda::kDown - 1) / cuda::kDown;
  const std::int64_t sums = inputs.weight.numel() + (inputs.bias ? inputs.bias.numel() : 0);
  const auto partial = ops::cuda::take_partial_sums(context, groups, sums, std::max<std::int64_t>(groups, 1), 1,
                                                    "short_convolution: sums of chunks");
  if (context.planning()) return;
  (inputs.x.dtype == DType::f32 ? backward_of<float> : backward_of<bf16>)(context, inputs, from, to, activation,
                                                                          partial);
  auto* dweight = to.dweight.as<float>();
  if (inputs.bias) {
    const SumsOut out{dweight, to.dbias.as<float>(), static_cast<int>(inputs.weight.size(1))};
    return ops::cuda::reduce<32, true>(context, partial, out, true);
  }
  ops::cuda::reduce<32, true>(context, partial, dweight, true);
}

template <class T>
void step_of(Context& context, const TensorView& x, const TensorView& weight, const TensorView& bias,
             const TensorView& state, const TensorView& y, bool silu) {
  const std::int64_t batch = x.size(0), channels = x.size(1);
  ops::cuda::queue_kernel(context, "short_convolution", step_kernel<T>, (batch * channels + 255) / 256, 256, 0,
                          Operand<T>(x), Operand<T>(y), static_cast<const void*>(weight.data),
                          static_cast<const void*>(bias.data), weight.dtype == DType::f32, state.as<float>(), batch,
                          channels, static_cast<int>(weight.size(1)), silu);
}

void cuda_step(Context& context, const TensorView& x, const TensorView& weight, const TensorView& bias,
               const TensorView& state, const TensorView& y, Activation activation) {
  (x.dtype == DType::f32 ? step_of<float> : step_of<bf16>)(context, x, weight, bias, state, y,
                                                           activation == Activation::silu);
}

}  // namespace

const Implementation kCuda{"cuda",
                           Device::Kind::cuda,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.weight_dtype});
                           },
                           cuda_forward,
                           cuda_backward,
                           cuda_step};

}  // namespace flashgla::ops::short_convolution
