#include "flashgla/ops/short_convolution/short_convolution.h"

#include "flashgla/ops/short_convolution/implementations.h"

namespace flashgla::ops::short_convolution {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCuda, kSimd, kReference};
#else
  static const Implementation table[] = {kSimd, kReference};
#endif
  return table;
}

namespace {

const Implementation& selected(const Context& context, const TensorView& x, const TensorView& weight) {
  return select("short_convolution", implementations(), Problem{x.dtype, weight.dtype}, context.architecture(),
                context.forced_implementation());
}

void check_weight(const Arguments& arguments, const TensorView& x, const TensorView& weight) {
  arguments.check("weight", weight, parameters_of(x.dtype), Layout::contiguous);
  if (weight.rank() != 2 || weight.size(0) != x.size(-1) || weight.size(1) < 2 || weight.size(1) > 4) {
    arguments.fail("weight", "has shape " + to_string(weight.shape),
                   "[" + std::to_string(x.size(-1)) + ",W] (as x's last dimension), W from 2 to 4");
  }
}

void check_bias(const Arguments& arguments, const char* name, const TensorView& bias, DType dtype,
                const TensorView& x) {
  arguments.check(name, bias, dtype, Shape({x.size(-1)}), "x's channels", Layout::contiguous);
}

void check_state(const Arguments& arguments, const char* name, const TensorView& state, const TensorView& x,
                 const TensorView& weight, std::int64_t sequences) {
  arguments.check(name, state, accumulator_of(x.dtype), Shape({sequences, weight.size(0), weight.size(1) - 1}),
                  "sequences, channels, width - 1", Layout::contiguous);
}

void check_inputs(const Arguments& arguments, const Context& context, const Inputs& inputs) {
  const TensorView& x = inputs.x;
  arguments.check("x", x, kFloating);
  arguments.check_rank("x", x, 3);
  check_weight(arguments, x, inputs.weight);
  if (inputs.bias) check_bias(arguments, "bias", inputs.bias, inputs.weight.dtype, x);
  if (inputs.cu_seqlens) {
    check_cu_seqlens(arguments, context, inputs.cu_seqlens, "x", x, {DType::i32, DType::i64});
  }
  if (inputs.initial_state) {
    check_state(arguments, "initial_state", inputs.initial_state, x, inputs.weight, sequences_of(inputs));
  }
}

}  // namespace

void forward(Context& context, const Inputs& inputs, const Outputs& outputs, Activation activation) {
  const Arguments arguments("short_convolution", context);
  const TensorView& x = inputs.x;
  check_inputs(arguments, context, inputs);
  arguments.check("y", outputs.y, x.dtype, x.shape, "x");
  if (outputs.final_state) {
    check_state(arguments, "final_state", outputs.final_state, x, inputs.weight, sequences_of(inputs));
  }
  selected(context, x, inputs.weight).forward(context, inputs, outputs, activation);
}

void backward(Context& context, const Inputs& inputs, const OutputGradients& output_gradients,
              const InputGradients& input_gradients, Activation activation) {
  const Arguments arguments("short_convolution", context);
  const TensorView& x = inputs.x;
  check_inputs(arguments, context, inputs);
  arguments.check("dy", output_gradients.dy, x.dtype, x.shape, "x");
  arguments.check("dx", input_gradients.dx, x.dtype, x.shape, "x");
  arguments.check("dweight", input_gradients.dweight, accumulator_of(x.dtype), inputs.weight.shape, "weight",
                  Layout::contiguous);
  if (inputs.bias) {
    check_bias(arguments, "dbias", input_gradients.dbias, accumulator_of(x.dtype), x);
  } else {
    arguments.check_absent("dbias", input_gradients.dbias, "without a bias");
  }
  const std::int64_t sequences = sequences_of(inputs);
  if (output_gradients.d_final_state) {
    check_state(arguments, "d_final_state", output_gradients.d_final_state, x, inputs.weight, sequences);
  }
  if (input_gradients.d_initial_state) {
    check_state(arguments, "d_initial_state", input_gradients.d_initial_state, x, inputs.weight, sequences);
  }
  selected(context, x, inputs.weight).backward(context, inputs, output_gradients, input_gradients, activation);
}

void step(Context& context, const TensorView& x, const TensorView& weight, const TensorView& state, const TensorView& y,
          Activation activation, const TensorView& bias) {
  const Arguments arguments("short_convolution", context);
  arguments.check("x", x, kFloating);
  arguments.check_rank("x", x, 2);
  check_weight(arguments, x, weight);
  if (bias) check_bias(arguments, "bias", bias, weight.dtype, x);
  check_state(arguments, "state", state, x, weight, x.size(0));
  arguments.check("y", y, x.dtype, x.shape, "x");
  const Implementation& implementation = selected(context, x, weight);
  if (!context.planning()) implementation.step(context, x, weight, bias, state, y, activation);
}

}  // namespace flashgla::ops::short_convolution
