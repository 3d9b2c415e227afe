#include "flashgla/ops/selective_scan/selective_scan.h"

#include "flashgla/ops/selective_scan/implementations.h"

namespace flashgla::ops::selective_scan {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCuda, kSimd, kReference};
#else
  static const Implementation table[] = {kSimd, kReference};
#endif
  return table;
}

namespace {

constexpr const char* kName = "selective_scan";

const Implementation& selected(const Context& context, const Inputs& in) {
  return select(kName, implementations(), Problem{in.x.dtype, in.b.size(-1)}, context.architecture(),
                context.forced_implementation());
}

// rank: of x, 3, or 2 in a step. projected: raw is computed.
void check_inputs(const Arguments& arguments, const Context& context, const Inputs& in, int rank,
                  bool projected = false) {
  arguments.check("x", in.x, kFloating);
  arguments.check_rank("x", in.x, rank);
  if (!projected) arguments.check("raw", in.raw, in.x.dtype, in.x.shape, "x");
  arguments.check("z", in.z, in.x.dtype, in.x.shape, "x");
  const std::int64_t channels = in.x.size(-1);
  const DTypes parameters = parameters_of(in.x.dtype);
  arguments.check("a_log", in.a_log, parameters, Layout::contiguous);
  if (in.a_log.rank() != 2 || in.a_log.size(0) != channels || in.a_log.size(1) < 1) {
    arguments.fail("a_log", "has shape " + to_string(in.a_log.shape), "[" + std::to_string(channels) + ",K]");
  }
  Shape states = in.x.shape;
  states[-1] = in.a_log.size(1);
  arguments.check("b", in.b, in.x.dtype, states, "x's tokens and a_log's states");
  arguments.check("c", in.c, in.x.dtype, states, "x's tokens and a_log's states");
  arguments.check("dt_bias", in.dt_bias, parameters, Shape({channels}), "x's channels", Layout::contiguous);
  arguments.check("skip", in.skip, parameters, Shape({channels}), "x's channels", Layout::contiguous);
  if (rank == 2) {
    arguments.check_absent("h0", in.h0, "in a step");
    arguments.check_absent("cu_seqlens", in.cu_seqlens, "in a step");
    return;
  }
  if (in.cu_seqlens) check_cu_seqlens(arguments, context, in.cu_seqlens, "x", in.x);
}

void check_state(const Arguments& arguments, const char* name, const TensorView& state, const Inputs& in,
                 std::int64_t sequences) {
  arguments.check(name, state, accumulator_of(in.x.dtype), Shape({sequences, in.x.size(-1), in.a_log.size(1)}),
                  "sequences, channels, states", Layout::contiguous);
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
  if (outputs.y) arguments.check("y", outputs.y, inputs.x.dtype, inputs.x.shape, "x");
  const Implementation& implementation = selected(context, inputs);
  arguments.check_kept(outputs.kept, implementation.kept_bytes(inputs));
  implementation.forward(context, inputs, outputs);
}

void backward(Context& context, const Inputs& inputs, const TensorView& kept, const TensorView& dy,
              const InputGradients& gradients) {
  const Arguments arguments(kName, context);
  check_inputs(arguments, context, inputs, 3);
  if (inputs.h0) check_state(arguments, "h0", inputs.h0, inputs, Sizes(inputs).sequences);
  const DType dtype = inputs.x.dtype, sum = accumulator_of(dtype);
  arguments.check("dy", dy, dtype, inputs.x.shape, "x");
  arguments.check("dx", gradients.dx, dtype, inputs.x.shape, "x");
  arguments.check("draw", gradients.draw, dtype, inputs.x.shape, "x");
  arguments.check("dz", gradients.dz, dtype, inputs.x.shape, "x");
  arguments.check("db", gradients.db, dtype, inputs.b.shape, "b");
  arguments.check("dc", gradients.dc, dtype, inputs.b.shape, "b");
  arguments.check("da_log", gradients.da_log, sum, inputs.a_log.shape, "a_log", Layout::contiguous);
  arguments.check("dskip", gradients.dskip, sum, inputs.skip.shape, "skip", Layout::contiguous);
  const Implementation& implementation = selected(context, inputs);
  arguments.check_kept(kept, implementation.kept_bytes(inputs));
  implementation.backward(context, inputs, kept, dy, gradients);
}

bool step_projects(const Context& context, const Inputs& inputs, const StepProjection& projection) {
  return selected(context, inputs).projects(inputs, projection);
}

void step(Context& context, const Inputs& inputs, const TensorView& state, const TensorView& y,
          const StepProjection& projection) {
  const Arguments arguments(kName, context);
  const bool projected = static_cast<bool>(projection.weight);
  check_inputs(arguments, context, inputs, 2, projected);
  check_state(arguments, "state", state, inputs, inputs.x.size(0));
  arguments.check("y", y, inputs.x.dtype, inputs.x.shape, "x");
  const Implementation& implementation = selected(context, inputs);
  if (projected) {
    arguments.check_absent("raw", inputs.raw, "with a projection");
    arguments.check("projection's weight", projection.weight, parameters_of(inputs.x.dtype), Layout::contiguous);
    arguments.check_rank("projection's weight", projection.weight, 2);
    const std::int64_t ranks = projection.weight.size(1);
    arguments.check("projection's weight", projection.weight, projection.weight.dtype, Shape({inputs.x.size(1), ranks}),
                    "x's channels");
    arguments.check("projection's ranks", projection.ranks, inputs.x.dtype, Shape({inputs.x.size(0), ranks}),
                    "x's sequences and the weight's columns");
    if (!implementation.projects(inputs, projection)) {
      arguments.fail("projection", std::string("is one that ") + implementation.name + " does not compute",
                     "raw (step_projects)");
    }
  }
  implementation.step(context, inputs, state, y, projection);
}

}  // namespace flashgla::ops::selective_scan
