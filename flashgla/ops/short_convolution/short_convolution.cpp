#include "flashgla/ops/short_convolution/short_convolution.h"

#include "flashgla/ops/short_convolution/implementations.h"

namespace flashgla::ops::short_convolution {

std::span<const Implementation> implementations() {
  static const Implementation table[] = {kReference};
  return table;
}

namespace {

std::int64_t bound(const TensorView& cu_seqlens, std::int64_t i) {
  return cu_seqlens.dtype == DType::i32 ? cu_seqlens.as<std::int32_t>()[i] : cu_seqlens.as<std::int64_t>()[i];
}

const Implementation& selected(const Context& context, const TensorView& x, const TensorView& weight) {
  return select("short_convolution", implementations(), Problem{x.dtype, weight.dtype, weight.size(1)},
                context.architecture(), context.forced_implementation());
}

void check_weight(const Arguments& arguments, const TensorView& x, const TensorView& weight) {
  arguments.check("weight", weight, parameters_of(x.dtype), Layout::contiguous);
  arguments.check_rank("weight", weight, 2);
  if (weight.size(0) != x.size(-1) || weight.size(1) < 2 || weight.size(1) > 4) {
    arguments.fail("weight", "has shape " + to_string(weight.shape),
                   "[" + std::to_string(x.size(-1)) + ",2..4] (x's channels, width)");
  }
}

// Checks what forward and backward share and returns the shape of a state.
Shape check_inputs(const Arguments& arguments, const Context& context, const Inputs& inputs) {
  const TensorView& x = inputs.x;
  arguments.check("x", x, kFloating);
  arguments.check_rank("x", x, 3);
  check_weight(arguments, x, inputs.weight);
  std::int64_t sequences = x.size(0);
  const TensorView& cu_seqlens = inputs.cu_seqlens;
  if (cu_seqlens) {
    arguments.check("cu_seqlens", cu_seqlens, {DType::i32, DType::i64}, Layout::contiguous);
    arguments.check_rank("cu_seqlens", cu_seqlens, 1);
    if (x.size(0) != 1) arguments.fail("x", "has batch " + std::to_string(x.size(0)), "1 with cu_seqlens");
    sequences = cu_seqlens.size(0) - 1;
    if (sequences < 1) arguments.fail("cu_seqlens", "has shape " + to_string(cu_seqlens.shape), "[N+1] with N >= 1");
    if (context.device() == Device::cpu() && !context.planning()) {
      bool ordered = bound(cu_seqlens, 0) == 0 && bound(cu_seqlens, sequences) == x.size(1);
      for (std::int64_t n = 0; n < sequences; ++n)
        ordered = ordered && bound(cu_seqlens, n) <= bound(cu_seqlens, n + 1);
      if (!ordered) arguments.fail("cu_seqlens", "is not monotone from 0 to T", "0 = c_0 <= ... <= c_N = T");
    }
  }
  const Shape state({sequences, x.size(2), inputs.weight.size(1) - 1});
  if (inputs.initial_state) {
    arguments.check("initial_state", inputs.initial_state, accumulator_of(x.dtype), state, "N, channels, width - 1",
                    Layout::contiguous);
  }
  return state;
}

}  // namespace

Span span_of(const Inputs& inputs, std::int64_t n) {
  if (!inputs.cu_seqlens) return {n, 0, inputs.x.size(1)};
  return {0, bound(inputs.cu_seqlens, n), bound(inputs.cu_seqlens, n + 1)};
}

void forward(Context& context, const Inputs& inputs, const Outputs& outputs, Activation activation) {
  const Arguments arguments("short_convolution", context);
  const Shape state = check_inputs(arguments, context, inputs);
  arguments.check("y", outputs.y, inputs.x.dtype, inputs.x.shape, "x");
  if (outputs.final_state) {
    arguments.check("final_state", outputs.final_state, accumulator_of(inputs.x.dtype), state, "N, channels, width - 1",
                    Layout::contiguous);
  }
  selected(context, inputs.x, inputs.weight).forward(context, inputs, outputs, activation);
}

void backward(Context& context, const Inputs& inputs, const OutputGradients& output_gradients,
              const InputGradients& input_gradients, Activation activation) {
  const Arguments arguments("short_convolution", context);
  const Shape state = check_inputs(arguments, context, inputs);
  const TensorView& x = inputs.x;
  const DType wide = accumulator_of(x.dtype);
  arguments.check("dy", output_gradients.dy, x.dtype, x.shape, "x");
  arguments.check("dx", input_gradients.dx, x.dtype, x.shape, "x");
  arguments.check("dweight", input_gradients.dweight, wide, inputs.weight.shape, "weight", Layout::contiguous);
  const auto check_state = [&](const char* name, const TensorView& view) {
    if (view) arguments.check(name, view, wide, state, "N, channels, width - 1", Layout::contiguous);
  };
  check_state("d_final_state", output_gradients.d_final_state);
  check_state("d_initial_state", input_gradients.d_initial_state);
  selected(context, x, inputs.weight).backward(context, inputs, output_gradients, input_gradients, activation);
}

void step(Context& context, const TensorView& x, const TensorView& weight, const TensorView& state, const TensorView& y,
          Activation activation) {
  const Arguments arguments("short_convolution step", context);
  arguments.check("x", x, kFloating);
  arguments.check_rank("x", x, 2);
  check_weight(arguments, x, weight);
  arguments.check("state", state, accumulator_of(x.dtype), Shape({x.size(0), x.size(1), weight.size(1) - 1}),
                  "batch, channels, width - 1", Layout::contiguous);
  arguments.check("y", y, x.dtype, x.shape, "x");
  selected(context, x, weight).step(context, x, weight, state, y, activation);
}

}  // namespace flashgla::ops::short_convolution
