#include "flashgla/ops/wkv/wkv.h"

#include "flashgla/ops/wkv/implementations.h"

namespace flashgla::ops::wkv {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCuda, kSimd, kReference};
#else
  static const Implementation table[] = {kSimd, kReference};
#endif
  return table;
}

namespace {

constexpr const char* kName = "wkv";

const Implementation& selected(const Context& context, const Inputs& in) {
  return select(kName, implementations(), Problem{in.k.dtype}, context.architecture(), context.forced_implementation());
}

// rank: of k, 3, or 2 in a step.
void check_inputs(const Arguments& arguments, const Context& context, const Inputs& in, int rank) {
  arguments.check("k", in.k, kFloating);
  arguments.check_rank("k", in.k, rank);
  arguments.check("v", in.v, in.k.dtype, in.k.shape, "k");
  arguments.check("r", in.r, in.k.dtype, in.k.shape, "k");
  const Shape channels({in.k.size(-1)});
  const DTypes parameters = parameters_of(in.k.dtype);
  arguments.check("time_decay", in.time_decay, parameters, channels, "k's channels", Layout::contiguous);
  arguments.check("time_first", in.time_first, parameters, channels, "k's channels", Layout::contiguous);
  if (rank == 2) {
    arguments.check_absent("h0", in.h0, "in a step");
    arguments.check_absent("cu_seqlens", in.cu_seqlens, "in a step");
    return;
  }
  if (in.cu_seqlens) check_cu_seqlens(arguments, context, in.cu_seqlens, "k", in.k);
}

void check_state(const Arguments& arguments, const char* name, const TensorView& state, const Inputs& in,
                 std::int64_t sequences) {
  arguments.check(name, state, accumulator_of(in.k.dtype), Shape({sequences, 3, in.k.size(-1)}), "sequences, channels",
                  Layout::contiguous);
}

}  // namespace

std::size_t kept_bytes(const Context& context, const Inputs& inputs) {
  return selected(context, inputs).kept_bytes(inputs);
}

void forward(Context& context, const Inputs& inputs, const Outputs& outputs) {
  const Arguments arguments(kName, context);
  check_inputs(arguments, context, inputs, 3);
  const std::int64_t sequences = Sizes(inputs).sequences;
  if (inputs.h0) check_state(arguments, "h0", inputs.h0, inputs, sequences);
  if (outputs.ht) check_state(arguments, "ht", outputs.ht, inputs, sequences);
  if (outputs.y) arguments.check("y", outputs.y, inputs.k.dtype, inputs.k.shape, "k");
  const Implementation& implementation = selected(context, inputs);
  arguments.check_kept(outputs.kept, implementation.kept_bytes(inputs));
  implementation.forward(context, inputs, outputs);
}

void backward(Context& context, const Inputs& inputs, const TensorView& kept, const TensorView& dy,
              const InputGradients& gradients) {
  const Arguments arguments(kName, context);
  check_inputs(arguments, context, inputs, 3);
  if (inputs.h0) check_state(arguments, "h0", inputs.h0, inputs, Sizes(inputs).sequences);
  const DType dtype = inputs.k.dtype, sum = accumulator_of(dtype);
  const Shape channels({inputs.k.size(-1)});
  arguments.check("dy", dy, dtype, inputs.k.shape, "k");
  arguments.check("dk", gradients.dk, dtype, inputs.k.shape, "k");
  arguments.check("dv", gradients.dv, dtype, inputs.k.shape, "k");
  arguments.check("dr", gradients.dr, dtype, inputs.k.shape, "k");
  arguments.check("dtime_decay", gradients.dtime_decay, sum, channels, "k's channels", Layout::contiguous);
  arguments.check("dtime_first", gradients.dtime_first, sum, channels, "k's channels", Layout::contiguous);
  const Implementation& implementation = selected(context, inputs);
  arguments.check_kept(kept, implementation.kept_bytes(inputs));
  implementation.backward(context, inputs, kept, dy, gradients);
}

void step(Context& context, const Inputs& inputs, const TensorView& state, const TensorView& y) {
  const Arguments arguments(kName, context);
  check_inputs(arguments, context, inputs, 2);
  check_state(arguments, "state", state, inputs, inputs.k.size(0));
  arguments.check("y", y, inputs.k.dtype, inputs.k.shape, "k");
  selected(context, inputs).step(context, inputs, state, y);
}

}  // namespace flashgla::ops::wkv
