// The operator out of others, on any device: for rows and layouts that no fused kernel takes.
#include "flashgla/ops/linear_step/implementations.h"
#include "flashgla/ops/log_sigmoid_gate/log_sigmoid_gate.h"
#include "flashgla/ops/quantised_linear/quantised_linear.h"
#include "flashgla/ops/rms_norm/rms_norm.h"
#include "flashgla/ops/rms_norm_swish_gate/rms_norm_swish_gate.h"
#include "flashgla/ops/swiglu/swiglu.h"

namespace flashgla::ops::linear_step {

TensorView run_prologue(Context& context, const Inputs& inputs) {
  const TensorView& x = inputs.x;
  if (inputs.prologue == Prologue::none) return x;
  const TensorView u = context.scratch().tensor(x.shape, x.dtype, "linear step: inputs");
  if (inputs.prologue == Prologue::rms_norm) {
    rms_norm::forward(context, {x, inputs.norm_weight}, {u, {}}, inputs.epsilon);
    return u;
  }
  const std::int64_t heads = x.size(1) / inputs.head_size;
  if (inputs.gate) {
    rms_norm_swish_gate::forward(context, x.split_last(heads), inputs.gate.split_last(heads), inputs.norm_weight,
                                 u.split_last(heads), {}, inputs.epsilon);
  } else {
    rms_norm::forward(context, {x.split_last(heads), inputs.norm_weight}, {u.split_last(heads), {}}, inputs.epsilon);
  }
  return u;
}

namespace {

void composed(Context& context, const Inputs& inputs, std::span<const Layer> layers, const Options& options) {
  const ArenaScope scope(context.scratch());
  const TensorView u = run_prologue(context, inputs);
  for (const Layer& layer : layers) {
    if (options.epilogue == Epilogue::swiglu) {
      const std::int64_t out = layer.y.size(1);
      // In f32 beside bf16: rounded once, at the end.
      const TensorView both =
          context.scratch().tensor(Shape({u.size(0), 2 * out}), accumulator_of(u.dtype), "linear step: gate and up");
      const TensorView gate = both.slice(1, 0, out), up = both.slice(1, out, 2 * out);
      quantised_linear::multiply(context, u, layer.weight, both);
      swiglu::forward(context, gate, up, layer.y);
      continue;
    }
    quantised_linear::multiply(context, u, layer.weight, layer.y, {options.epilogue == Epilogue::add, layer.bias});
    if (options.epilogue == Epilogue::log_sigmoid) {
      log_sigmoid_gate::forward(context, layer.y, layer.y, options.normalizer, options.clamp_min);
    }
  }
}

Support any(const Problem&, const Architecture&) { return Support::yes(); }

}  // namespace

const Implementation kComposed{"composed", Device::Kind::cpu, any, composed};
#ifdef FLASHGLA_CUDA
const Implementation kComposedCuda{"cuda_composed", Device::Kind::cuda, any, composed};
#endif

}  // namespace flashgla::ops::linear_step
