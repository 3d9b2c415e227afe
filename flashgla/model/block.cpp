#include "flashgla/model/block.h"

#include "flashgla/ops/elementwise/elementwise.h"

namespace flashgla::model {

namespace {
std::string layer_name(std::int64_t layer) { return "model.layers." + std::to_string(layer); }
}  // namespace

Block::Block(const ModelConfig& config, std::int64_t layer)
    : mixer_norm_(layer_name(layer) + ".attn_norm", config.hidden_size, config.norm_eps),
      mixer_(mixers::find_mixer(config.model_type).create(config, layer)),
      mlp_norm_(layer_name(layer) + ".mlp_norm", config.hidden_size, config.norm_eps),
      mlp_(layer_name(layer) + ".mlp", config.hidden_size, config.mlp_dim(), config.initializer_range) {}

void Block::for_each_parameter(const nn::ParameterVisitor& visit) {
  mixer_norm_.for_each_parameter(visit);
  mixer_->for_each_parameter(visit);
  mlp_norm_.for_each_parameter(visit);
  mlp_.for_each_parameter(visit);
}

void Block::forward(nn::Pass& pass, const TensorView& x, const TensorView& y, const mixers::LayerState& before,
                    const mixers::LayerState& after) {
  if (pass.training() && pass.recompute == nn::Recompute::block) {
    saved_.before = before;
    nn::Pass inference = pass.without_keeping();
    run_forward(inference, x, y, before, after);
  } else {
    run_forward(pass, x, y, before, after);
  }
}

void Block::backward(nn::Pass& pass, const TensorView& x, const TensorView& d) {
  if (pass.recompute == nn::Recompute::block) {
    const ArenaScope scope(*pass.saved);
    nn::Pass again = pass;
    again.recompute = nn::Recompute::nothing;
    run_forward(again, x, {}, saved_.before, {});
    run_backward(again, x, d);
  } else {
    run_backward(pass, x, d);
  }
}

void Block::run_forward(nn::Pass& pass, const TensorView& x, const TensorView& y, const mixers::LayerState& before,
                        const mixers::LayerState& after) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const std::int64_t rows = x.as_rows().size(0);
  const DType wide = x.dtype == DType::f64 ? DType::f64 : DType::f32;
  if (pass.training()) {
    saved_.mixer_rstd = pass.saved->tensor(Shape({rows}), wide, "norms: deviations");
    saved_.mlp_rstd = pass.saved->tensor(Shape({rows}), wide, "norms: deviations");
    saved_.sum = pass.saved->tensor(x.shape, x.dtype, "blocks: residual");
  } else {
    saved_.mixer_rstd = {};
    saved_.mlp_rstd = {};
    saved_.sum = y;
  }
  saved_.mixer_input = pass.keep_or_recompute().tensor(x.shape, x.dtype, "norms: outputs");
  saved_.mlp_input = pass.keep_or_recompute().tensor(x.shape, x.dtype, "norms: outputs");

  mixer_norm_.forward(context, x, {}, saved_.mixer_input, {}, saved_.mixer_rstd);
  const TensorView branch = scratch.tensor(x.shape, x.dtype, "blocks: branch");
  mixer_->forward(pass, saved_.mixer_input, branch, before, after);
  mlp_norm_.forward(context, branch, x, saved_.mlp_input, saved_.sum, saved_.mlp_rstd);
  mlp_.forward(pass, saved_.mlp_input, y ? branch : y);
  if (y) ops::elementwise::add_to(context, branch, saved_.sum, y);
}

void Block::run_backward(nn::Pass& pass, const TensorView& x, const TensorView& d) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const bool recompute = pass.recompute == nn::Recompute::activations;
  const TensorView branch = scratch.tensor(x.shape, x.dtype, "blocks: branch");
  if (recompute) saved_.mlp_input = scratch.tensor(x.shape, x.dtype, "norms: outputs");
  if (recompute) mlp_norm_.forward(context, saved_.sum, {}, saved_.mlp_input, {}, {});
  mlp_.backward(pass, saved_.mlp_input, d, branch);
  mlp_norm_.backward(context, saved_.sum, saved_.mlp_rstd, branch, d, true);

  if (recompute) saved_.mixer_input = saved_.mlp_input;
  if (recompute) mixer_norm_.forward(context, x, {}, saved_.mixer_input, {}, {});
  mixer_->backward(pass, saved_.mixer_input, d, branch);
  mixer_norm_.backward(context, x, saved_.mixer_rstd, branch, d, true);
}

void Block::step(nn::Pass& pass, const TensorView& x, const mixers::LayerState& state) {
  Context& context = pass.context;
  const ArenaScope scope(context.scratch());
  const TensorView normalized = context.scratch().tensor(x.shape, x.dtype, "norms: outputs");
  const TensorView branch = context.scratch().tensor(x.shape, x.dtype, "blocks: branch");
  mixer_norm_.forward(context, x, {}, normalized, {}, {});
  mixer_->step(pass, normalized, branch, state);
  mlp_norm_.forward(context, branch, x, normalized, x, {});
  mlp_.forward(pass, normalized, branch);
  ops::elementwise::add(context, branch, x);
}

}  // namespace flashgla::model
