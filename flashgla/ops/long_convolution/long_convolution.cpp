#include "flashgla/ops/long_convolution/long_convolution.h"

#include "flashgla/ops/long_convolution/implementations.h"

namespace flashgla::ops::long_convolution {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCuda, kSimd, kReference};
#else
  static const Implementation table[] = {kSimd, kReference};
#endif
  return table;
}

namespace {

constexpr const char* kName = "long_convolution";

const Implementation& selected(const Context& context, const Inputs& in) {
  return select(kName, implementations(), Problem{in.x.dtype}, context.architecture(), context.forced_implementation());
}

// Whether filter and past have room for every sequence's tokens.
void check_lengths(const Arguments& arguments, const Inputs& in, std::int64_t in_past) {
  for (std::int64_t n = 0; n < sequences_of(in); ++n) {
    const Sequence sequence = sequence_at(in, n);
    const std::int64_t needed = sequence.past + sequence.length();
    if (needed > in.filter.size(0)) {
      arguments.fail("filter", "has " + std::to_string(in.filter.size(0)) + " rows",
                     "at least the " + std::to_string(needed) + " tokens of sequence " + std::to_string(n));
    }
    if (in.past && sequence.past + in_past > in.past.size(1)) {
      arguments.fail(
          "past", "has room for " + std::to_string(in.past.size(1)) + " tokens",
          "at least " + std::to_string(sequence.past + in_past) + ", which sequence " + std::to_string(n) + " has");
    }
  }
}

// in_past: tokens of the call that lie in the past too.
void check_inputs(const Arguments& arguments, const Context& context, const Inputs& in, std::int64_t in_past) {
  arguments.check("x", in.x, kFloating);
  arguments.check_rank("x", in.x, 3);
  const DType dtype = in.x.dtype;
  const std::int64_t channels = in.x.size(2);
  arguments.check("filter", in.filter, accumulator_of(dtype), Layout::contiguous);
  if (in.filter.rank() != 2 || in.filter.size(1) != channels) {
    arguments.fail("filter", "has shape " + to_string(in.filter.shape), "[L," + std::to_string(channels) + "]");
  }
  arguments.check("skip", in.skip, parameters_of(dtype), Shape({channels}), "x's channels", Layout::contiguous);
  if (in.cu_seqlens) check_cu_seqlens(arguments, context, in.cu_seqlens, "x", in.x);
  if (in.past) {
    const std::int64_t sequences = sequences_of(in);
    arguments.check("past", in.past, parameters_of(dtype), Layout::contiguous);
    if (in.past.rank() != 3 || in.past.size(0) != sequences || in.past.size(2) != channels) {
      arguments.fail("past", "has shape " + to_string(in.past.shape),
                     "[" + std::to_string(sequences) + ",C," + std::to_string(channels) + "]");
    }
    arguments.check("positions", in.positions, DType::i32, Shape({sequences}), "sequences", Layout::contiguous);
  } else {
    arguments.check_absent("positions", in.positions, "without past");
  }
  if (!context.planning() && context.device().kind == Device::Kind::cpu) check_lengths(arguments, in, in_past);
}

// [N,D] as [N,1,D].
TensorView with_length(const TensorView& view) {
  if (view.rank() != 2) return view;
  TensorView batch(view.data, view.dtype, Shape({view.size(0), 1, view.size(1)}), view.device);
  batch.stride = {view.stride[0], view.stride[0], view.stride[1]};
  return batch;
}

}  // namespace

std::size_t kept_bytes(const Context& context, const Inputs& inputs) {
  return selected(context, inputs).kept_bytes(context.architecture(), inputs);
}

void forward(Context& context, const Inputs& inputs, const Outputs& outputs) {
  const Arguments arguments(kName, context);
  check_inputs(arguments, context, inputs, 0);
  arguments.check("y", outputs.y, inputs.x.dtype, inputs.x.shape, "x");
  const Implementation& implementation = selected(context, inputs);
  arguments.check_kept(outputs.kept, implementation.kept_bytes(context.architecture(), inputs));
  implementation.forward(context, inputs, outputs);
}

void backward(Context& context, const Inputs& inputs, const TensorView& kept, const TensorView& dy,
              const InputGradients& gradients) {
  const Arguments arguments(kName, context);
  check_inputs(arguments, context, inputs, 0);
  const DType dtype = inputs.x.dtype, sum = accumulator_of(dtype);
  arguments.check("dy", dy, dtype, inputs.x.shape, "x");
  arguments.check("dx", gradients.dx, dtype, inputs.x.shape, "x");
  arguments.check("dfilter", gradients.dfilter, sum, inputs.filter.shape, "filter", Layout::contiguous);
  arguments.check("dskip", gradients.dskip, sum, inputs.skip.shape, "skip", Layout::contiguous);
  const Implementation& implementation = selected(context, inputs);
  arguments.check_kept(kept, implementation.kept_bytes(context.architecture(), inputs));
  implementation.backward(context, inputs, kept, dy, gradients);
}

void step(Context& context, const Inputs& inputs, const TensorView& y) {
  const Arguments arguments(kName, context);
  Inputs batch = inputs;
  batch.x = with_length(inputs.x);
  check_inputs(arguments, context, batch, 1);
  arguments.check("y", y, inputs.x.dtype, inputs.x.shape, "x");
  selected(context, inputs).forward(context, batch, {with_length(y), {}});
}

}  // namespace flashgla::ops::long_convolution
