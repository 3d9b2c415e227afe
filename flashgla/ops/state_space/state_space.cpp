#include "flashgla/ops/state_space/state_space.h"

#include "flashgla/ops/cu_seqlens.h"
#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/rms_norm/rms_norm.h"
#include "flashgla/ops/short_convolution/short_convolution.h"
#include "flashgla/ops/state_space/implementations.h"

namespace flashgla::ops::state_space {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCuda, kSimd, kReference};
#else
  static const Implementation table[] = {kSimd, kReference};
#endif
  return table;
}

namespace {

constexpr const char* kName = "state_space";

const Implementation& selected(const Context& context, DType dtype) {
  return select(kName, implementations(), Problem{dtype}, context.architecture(), context.forced_implementation());
}

Shape with_last(const TensorView& view, std::int64_t size) {
  Shape shape = view.shape;
  shape[-1] = size;
  return shape;
}

void check_vector(const Arguments& arguments, const char* name, const TensorView& vector, DType activations,
                  std::int64_t size) {
  arguments.check(name, vector, parameters_of(activations), Shape({size}), "the channels it belongs to",
                  Layout::contiguous);
}

// Throws unless `heads` of whole channels make `inner`, and B and C are of equal size behind it.
void check_inputs(const Arguments& arguments, const Inputs& in, std::int64_t inner) {
  arguments.check("c", in.c, kFloating);
  arguments.check("raw", in.raw, in.c.dtype);
  const std::int64_t heads = in.raw.size(-1);
  arguments.check("raw", in.raw, in.c.dtype, with_last(in.c, heads), "c");
  if (heads < 1 || inner % heads != 0 || inner < 1) {
    arguments.fail("raw", "has " + std::to_string(heads) + " heads", "a divisor of " + std::to_string(inner));
  }
  if (in.c.size(-1) <= inner || (in.c.size(-1) - inner) % 2 != 0) {
    arguments.fail("c", "has " + std::to_string(in.c.size(-1)) + " channels",
                   std::to_string(inner) + " and twice those of the states");
  }
  if (in.bias) check_vector(arguments, "bias", in.bias, in.c.dtype, in.c.size(-1));
  check_vector(arguments, "dt_bias", in.dt_bias, in.c.dtype, heads);
  check_vector(arguments, "a_log", in.a_log, in.c.dtype, heads);
}

void check_gate(const Arguments& arguments, const Gate& in, const TensorView& weight) {
  const TensorView &o = in.o, &skip = in.skip;
  arguments.check("o", o, kFloating);
  arguments.check("x", in.x, o.dtype, o.shape, "o");
  arguments.check("z", in.z, o.dtype, o.shape, "o");
  arguments.check("skip", skip, parameters_of(o.dtype), Layout::contiguous);
  if (skip.rank() != 1 || skip.size(0) < 1 || o.size(-1) % skip.size(0) != 0) {
    arguments.fail("skip", "has shape " + to_string(skip.shape), "[H], a divisor of " + std::to_string(o.size(-1)));
  }
  check_vector(arguments, "weight", weight, o.dtype, o.size(-1));
}

Shape rows_shape(const TensorView& view) { return Shape({rows_of(view.shape)}); }

void check_forward(const Arguments& arguments, const Inputs& inputs, const Outputs& outputs) {
  arguments.check("v", outputs.v, kFloating);
  check_inputs(arguments, inputs, outputs.v.size(-1));
  const TensorView& c = inputs.c;
  arguments.check("v", outputs.v, c.dtype, with_last(c, outputs.v.size(-1)), "c");
  arguments.check("u", outputs.u, c.dtype, c.shape, "c");
  arguments.check("g", outputs.g, accumulator_of(c.dtype), inputs.raw.shape, "raw");
}

void check_backward(const Arguments& arguments, const Inputs& inputs, const TensorView& skip,
                    const OutputGradients& from, const InputGradients& to) {
  arguments.check("dv", from.dv, kFloating);
  check_inputs(arguments, inputs, from.dv.size(-1));
  const TensorView &c = inputs.c, &raw = inputs.raw;
  arguments.check("dv", from.dv, c.dtype, with_last(c, from.dv.size(-1)), "c");
  arguments.check("ds", from.ds, c.dtype, from.dv.shape, "dv");
  check_vector(arguments, "skip", skip, c.dtype, raw.size(-1));
  arguments.check("dk", from.dk, c.dtype, Layout::contiguous);
  arguments.check("dq", from.dq, c.dtype, from.dk.shape, "dk", Layout::contiguous);
  const std::int64_t states = (c.size(-1) - from.dv.size(-1)) / 2, heads = raw.size(-1), key_dim = from.dk.size(-1);
  const std::int64_t groups = states % key_dim == 0 ? states / key_dim : 0,
                     rows = from.dk.rank() < 2 ? 0 : from.dk.size(-2);
  const bool fits = groups > 0 && heads % groups == 0 && (rows == heads || rows == groups) &&
                    from.dk.numel() == raw.numel() / heads * rows * key_dim;
  if (!fits) {
    arguments.fail("dk", "has shape " + to_string(from.dk.shape),
                   "[...,H,K] or [...,G,K] of raw's heads and c's groups");
  }
  arguments.check("dg", from.dg, accumulator_of(c.dtype), raw.shape, "raw");
  arguments.check("dc", to.dc, c.dtype, c.shape, "c");
  arguments.check("draw", to.draw, c.dtype, raw.shape, "raw");
  const auto check_sums = [&](const char* name, const TensorView& sums, std::int64_t size) {
    arguments.check(name, sums, accumulator_of(c.dtype), Shape({size}), "the channels it belongs to",
                    Layout::contiguous);
  };
  if (to.dbias) check_sums("dbias", to.dbias, c.size(-1));
  check_sums("ddt_bias", to.ddt_bias, heads);
  check_sums("da_log", to.da_log, heads);
  check_sums("dskip", to.dskip, heads);
}

short_convolution::Inputs inputs_of(const Convolution& convolution) {
  return {convolution.x, convolution.weight, convolution.initial_state, convolution.cu_seqlens};
}

void check_convolution(const Arguments& arguments, const Context& context, const Convolution& convolution) {
  const TensorView &x = convolution.x, &weight = convolution.weight;
  arguments.check("x", x, kFloating);
  arguments.check_rank("x", x, 3);
  arguments.check("weight", weight, parameters_of(x.dtype), Layout::contiguous);
  if (weight.rank() != 2 || weight.size(0) != x.size(-1)) {
    arguments.fail("weight", "has shape " + to_string(weight.shape), "[" + std::to_string(x.size(-1)) + ",W]");
  }
  if (convolution.cu_seqlens) {
    check_cu_seqlens(arguments, context, convolution.cu_seqlens, "x", x, {DType::i32, DType::i64});
  }
}

// With the convolution's input in c's place, which has its shape.
Inputs with_input(const Inputs& inputs, const Convolution& convolution) {
  Inputs with = inputs;
  with.c = convolution.x;
  return with;
}

TensorView convolved(Context& context, const Convolution& convolution, const TensorView& final_state) {
  const TensorView& x = convolution.x;
  const TensorView c = context.scratch().tensor(x.shape, x.dtype, "state_space: convolutions");
  short_convolution::forward(context, inputs_of(convolution), {c, final_state}, short_convolution::Activation::none);
  return c;
}

}  // namespace

void forward(Context& context, const Inputs& inputs, const Outputs& outputs) {
  check_forward(Arguments(kName, context), inputs, outputs);
  selected(context, inputs.c.dtype).forward(context, inputs, outputs);
}

void backward(Context& context, const Inputs& inputs, const TensorView& skip, const OutputGradients& from,
              const InputGradients& to) {
  check_backward(Arguments(kName, context), inputs, skip, from, to);
  selected(context, inputs.c.dtype).backward(context, inputs, skip, from, to);
}

void forward(Context& context, const Convolution& convolution, const Inputs& inputs, const Outputs& outputs,
             const TensorView& final_state) {
  const Arguments arguments(kName, context);
  check_convolution(arguments, context, convolution);
  Inputs in = with_input(inputs, convolution);
  check_forward(arguments, in, outputs);
  const Implementation& implementation = selected(context, in.c.dtype);
  if (implementation.convolved_forward &&
      implementation.convolved_forward(context, convolution, in, outputs, final_state)) {
    return;
  }
  const ArenaScope scope(context.scratch());
  in.c = convolved(context, convolution, final_state);
  implementation.forward(context, in, outputs);
}

void backward(Context& context, const Convolution& convolution, const Inputs& inputs, const TensorView& skip,
              const OutputGradients& from, const InputGradients& to, const TensorView& dweight) {
  const Arguments arguments(kName, context);
  check_convolution(arguments, context, convolution);
  Inputs in = with_input(inputs, convolution);
  check_backward(arguments, in, skip, from, to);
  arguments.check("dweight", dweight, accumulator_of(in.c.dtype), convolution.weight.shape, "weight",
                  Layout::contiguous);
  const Implementation& implementation = selected(context, in.c.dtype);
  if (implementation.convolved_backward &&
      implementation.convolved_backward(context, convolution, in, skip, from, to, dweight)) {
    return;
  }
  const ArenaScope scope(context.scratch());
  in.c = convolved(context, convolution, {});
  InputGradients behind = to;
  behind.dc = context.scratch().tensor(in.c.shape, in.c.dtype, "state_space: convolutions");
  implementation.backward(context, in, skip, from, behind);
  short_convolution::backward(context, inputs_of(convolution), {behind.dc, {}}, {to.dc, dweight, {}},
                              short_convolution::Activation::none);
}

void gate_norm(Context& context, const Gate& inputs, const TensorView& weight, double epsilon, const TensorView& y,
               const TensorView& rstd) {
  const Arguments arguments(kName, context);
  check_gate(arguments, inputs, weight);
  const TensorView& o = inputs.o;
  if (!(epsilon >= 0.0)) arguments.fail("epsilon", "is " + std::to_string(epsilon), "at least 0");
  arguments.check("y", y, o.dtype, o.shape, "o");
  if (rstd) arguments.check("rstd", rstd, accumulator_of(o.dtype), rows_shape(o), "o's rows", Layout::contiguous);
  selected(context, o.dtype).gate_norm(context, inputs, weight, epsilon, y, rstd);
}

void gate_norm_backward(Context& context, const Gate& inputs, const TensorView& weight, const TensorView& rstd,
                        const TensorView& dy, const TensorView& ds, const TensorView& dz, const TensorView& dweight) {
  const Arguments arguments(kName, context);
  check_gate(arguments, inputs, weight);
  const TensorView& o = inputs.o;
  arguments.check("rstd", rstd, accumulator_of(o.dtype), rows_shape(o), "o's rows", Layout::contiguous);
  arguments.check("dy", dy, o.dtype, o.shape, "o");
  arguments.check("ds", ds, o.dtype, o.shape, "o");
  arguments.check("dz", dz, o.dtype, o.shape, "o");
  if (dweight) {
    arguments.check("dweight", dweight, accumulator_of(o.dtype), weight.shape, "weight", Layout::contiguous);
  }
  selected(context, o.dtype).gate_norm_backward(context, inputs, weight, rstd, dy, ds, dz, dweight);
}

HeadTerms::HeadTerms(Context& context, const TensorView& raw)
    : ddt_bias(context.scratch().tensor(raw.shape, DType::f32, "state_space: terms of ddt_bias")),
      da_log(context.scratch().tensor(raw.shape, DType::f32, "state_space: terms of da_log")),
      dskip(context.scratch().tensor(raw.shape, DType::f32, "state_space: terms of dskip")) {}

void add_up(Context& context, const HeadTerms& terms, const InputGradients& to) {
  if (to.dbias) elementwise::column_sum(context, to.dc, to.dbias, true);
  elementwise::column_sum(context, terms.ddt_bias, to.ddt_bias, true);
  elementwise::column_sum(context, terms.da_log, to.da_log, true);
  elementwise::column_sum(context, terms.dskip, to.dskip, true);
}

void gate_then_norm(Context& context, GateAlone gate, const Gate& inputs, const TensorView& weight, double epsilon,
                    const TensorView& y, const TensorView& rstd) {
  const ArenaScope scope(context.scratch());
  const TensorView gated = context.scratch().tensor(inputs.o.shape, inputs.o.dtype, "state_space: gated");
  gate(context, inputs, gated);
  rms_norm::forward(context, {gated, weight}, {y, rstd}, epsilon);
}

void norm_then_gate_backward(Context& context, GateAlone gate, GateAloneBackward backward, const Gate& inputs,
                             const TensorView& weight, const TensorView& rstd, const TensorView& dy,
                             const TensorView& ds, const TensorView& dz, const TensorView& dweight) {
  const ArenaScope scope(context.scratch());
  const TensorView gated = context.scratch().tensor(inputs.o.shape, inputs.o.dtype, "state_space: gated");
  const TensorView gradient = context.scratch().tensor(dy.shape, dy.dtype, "state_space: gradients");
  gate(context, inputs, gated);
  rms_norm::backward(context, gated, weight, rstd, dy, gradient, false, dweight);
  backward(context, inputs, gradient, ds, dz);
}

}  // namespace flashgla::ops::state_space
