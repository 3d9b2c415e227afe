#include "flashgla/ops/token_shift/token_shift.h"

#include "flashgla/ops/token_shift/implementations.h"

namespace flashgla::ops::token_shift {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCuda, kSimd, kReference};
#else
  static const Implementation table[] = {kSimd, kReference};
#endif
  return table;
}

namespace {

constexpr const char* kName = "token_shift";

const Implementation& selected(const Context& context, const Inputs& in) {
  return select(kName, implementations(), Problem{in.x.dtype}, context.architecture(), context.forced_implementation());
}

void check_inputs(const Arguments& arguments, const Context& context, const Inputs& in, int rank) {
  arguments.check("x", in.x, kFloating);
  arguments.check_rank("x", in.x, rank);
  arguments.check("mu", in.mu, parameters_of(in.x.dtype), Layout::contiguous);
  if (in.mu.rank() != 2 || in.mu.size(0) < 1 || in.mu.size(0) > kMostMixes || in.mu.size(1) != in.x.size(-1)) {
    arguments.fail("mu", "has shape " + to_string(in.mu.shape),
                   "[1 to " + std::to_string(kMostMixes) + "," + std::to_string(in.x.size(-1)) + "]");
  }
  if (in.cu_seqlens) check_cu_seqlens(arguments, context, in.cu_seqlens, "x", in.x);
}

void check_state(const Arguments& arguments, const char* name, const TensorView& state, const Inputs& in,
                 std::int64_t sequences) {
  arguments.check(name, state, accumulator_of(in.x.dtype), Shape({sequences, in.x.size(-1)}), "sequences, channels",
                  Layout::contiguous);
}

void check_mixed(const Arguments& arguments, const char* name, const TensorView& mixed, const Inputs& in) {
  const Shape& x = in.x.shape;
  const std::int64_t M = in.mu.size(0);
  arguments.check(name, mixed, in.x.dtype, x.rank() == 3 ? Shape({M, x[0], x[1], x[2]}) : Shape({M, x[0], x[1]}),
                  "mu's mixes, then x");
}

// [...,N,D] as [...,N,1,D].
TensorView with_length(const TensorView& view) {
  TensorView batch = view;
  const int last = view.rank() - 1;
  batch.shape =
      last == 1 ? Shape({view.size(0), 1, view.size(1)}) : Shape({view.size(0), view.size(1), 1, view.size(2)});
  for (int dim = 0; dim < last; ++dim) batch.stride[dim] = view.stride[dim];
  batch.stride[last] = view.stride[last - 1];
  batch.stride[last + 1] = 1;
  return batch;
}

}  // namespace

void forward(Context& context, const Inputs& inputs, const Outputs& outputs) {
  const Arguments arguments(kName, context);
  check_inputs(arguments, context, inputs, 3);
  check_mixed(arguments, "y", outputs.y, inputs);
  const std::int64_t sequences = sequences_of(inputs.x, inputs.cu_seqlens);
  if (inputs.initial_state) check_state(arguments, "initial_state", inputs.initial_state, inputs, sequences);
  if (outputs.final_state) check_state(arguments, "final_state", outputs.final_state, inputs, sequences);
  selected(context, inputs).forward(context, inputs, outputs);
}

void backward(Context& context, const Inputs& inputs, const TensorView& dy, const InputGradients& gradients) {
  const Arguments arguments(kName, context);
  check_inputs(arguments, context, inputs, 3);
  check_mixed(arguments, "dy", dy, inputs);
  if (inputs.initial_state) {
    check_state(arguments, "initial_state", inputs.initial_state, inputs, sequences_of(inputs.x, inputs.cu_seqlens));
  }
  arguments.check("dx", gradients.dx, inputs.x.dtype, inputs.x.shape, "x");
  arguments.check("dmu", gradients.dmu, accumulator_of(inputs.x.dtype), inputs.mu.shape, "mu", Layout::contiguous);
  selected(context, inputs).backward(context, inputs, dy, gradients);
}

void step(Context& context, const TensorView& x, const TensorView& mu, const TensorView& state, const TensorView& y) {
  const Arguments arguments(kName, context);
  const Inputs inputs{x, mu, {}, {}};
  check_inputs(arguments, context, inputs, 2);
  check_mixed(arguments, "y", y, inputs);
  check_state(arguments, "state", state, inputs, x.size(0));
  const Inputs batch{with_length(x), mu, state, {}};
  selected(context, inputs).forward(context, batch, {with_length(y), state});
}

}  // namespace flashgla::ops::token_shift
