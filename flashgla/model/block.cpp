#include "flashgla/model/block.h"

#include <algorithm>

#include "flashgla/nn/gated_mlp.h"
#include "flashgla/ops/elementwise/elementwise.h"

namespace flashgla::model {

namespace {

// The MLP as a part of a block.
class Feedforward : public mixers::Mixer {
 public:
  explicit Feedforward(nn::GatedMLP mlp) : mlp_(std::move(mlp)) {}

  void for_each_parameter(const nn::ParameterVisitor& visit) override { mlp_.for_each_parameter(visit); }
  std::vector<mixers::StateEntry> state_layout(std::int64_t, std::int64_t, DType) const override { return {}; }
  mixers::Cost cost(std::int64_t) const override { return {}; }
  void forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const mixers::LayerState&,
               const mixers::LayerState&) override {
    mlp_.forward(pass, x, y);
  }
  void backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) override {
    mlp_.backward(pass, x, dy, dx);
  }
  void step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const mixers::LayerState&) override {
    mlp_.step(pass, norm, x);
  }

 private:
  nn::GatedMLP mlp_;
};

// What adds its normalised input to the residual stream.
class Identity : public mixers::Mixer {
 public:
  void for_each_parameter(const nn::ParameterVisitor&) override {}
  std::vector<mixers::StateEntry> state_layout(std::int64_t, std::int64_t, DType) const override { return {}; }
  mixers::Cost cost(std::int64_t) const override { return {}; }
  void forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const mixers::LayerState&,
               const mixers::LayerState&) override {
    if (!y) return;
    if (y.residual) return ops::elementwise::add_to(pass.context, x, y.residual, y.to);
    ops::elementwise::convert(pass.context, x, y.to);
  }
  void backward(nn::Pass& pass, const TensorView&, const TensorView& dy, const TensorView& dx) override {
    ops::elementwise::convert(pass.context, dy, dx);
  }
  void step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const mixers::LayerState&) override {
    const ArenaScope scope(pass.context.scratch());
    const TensorView normalized = pass.context.scratch().tensor(x.shape, x.dtype, "norms: outputs");
    norm.forward(pass.context, x, normalized, {});
    ops::elementwise::add(pass.context, normalized, x);
  }
};

bool drops(const nn::Pass& pass) { return pass.dropout.branches > 0.0; }

}  // namespace

Block::Block(const ModelConfig& config, std::int64_t layer) : layer_(layer) {
  const std::string name = mixers::layer_prefix(layer);
  const nn::NormKind kind = nn::norm_kind_from_name(config.norm_type);
  const auto norm = [&](const char* part) { return nn::Norm(name + part, config.hidden_size, config.norm_eps, kind); };
  add_part(norm(".attn_norm"), config.mixer_of(layer)->create(config, layer));
  if (!config.use_mlp) return;
  if (config.identity_mlp) {
    add_part(norm(".mlp_norm"), std::make_unique<Identity>());
  } else if (const std::int64_t own = config.mixer_of(layer)->own_mlp_width(config); own > 0) {
    add_part(norm(".mlp_norm"),
             config.mixer_of(layer)->create_mlp(config, layer, config.intermediate_size.value_or(own)));
  } else {
    add_part(norm(".mlp_norm"), std::make_unique<Feedforward>(nn::GatedMLP(
                                    name + ".mlp", config.hidden_size, config.mlp_dim(), config.initializer_range)));
  }
}

void Block::add_part(nn::Norm norm, std::unique_ptr<mixers::Mixer> branch) {
  const std::size_t states = branch->state_layout(1, 1, DType::f32).size();
  const std::size_t rings = branch->ring_layout(1, DType::f32).size();
  parts_.push_back({std::move(norm), std::move(branch), states, rings, {}});
}

mixers::LayerState Block::state_of(const mixers::LayerState& state, const Part& part) const {
  if (state.empty()) return {};
  std::size_t begin = 0, ring = 0;
  for (const Part& each : parts_) {
    if (&each < &part) begin += each.states, ring += each.rings;
    ring += each.states;
  }
  const auto at = [&](std::size_t i) { return state.begin() + static_cast<std::ptrdiff_t>(i); };
  mixers::LayerState own(at(begin), at(begin + part.states));
  if (ring + part.rings <= state.size()) own.insert(own.end(), at(ring), at(ring + part.rings));
  return own;
}

void Block::for_each_parameter(const nn::ParameterVisitor& visit) {
  for (Part& part : parts_) {
    part.norm.for_each_parameter(visit);
    part.branch->for_each_parameter(visit);
  }
}

void Block::share(mixers::SharedParameters& shared) {
  for (const Part& part : parts_) part.branch->share(shared);
}

std::vector<mixers::StateEntry> Block::state_layout(std::int64_t sequences, std::int64_t capacity, DType parameters,
                                                    bool ring) const {
  std::vector<mixers::StateEntry> all;
  const auto append = [&](const std::vector<mixers::StateEntry>& entries) {
    all.insert(all.end(), entries.begin(), entries.end());
  };
  for (const Part& part : parts_) append(part.branch->state_layout(sequences, capacity, parameters));
  for (const Part& part : parts_) {
    if (ring) append(part.branch->ring_layout(sequences, parameters));
  }
  return all;
}

void Block::fold_ring(Context& context, const mixers::LayerState& state, const TensorView& positions) const {
  for (const Part& part : parts_) part.branch->fold_ring(context, state_of(state, part), positions);
}

mixers::Cost Block::cost(std::int64_t length) const {
  mixers::Cost cost;
  for (const Part& part : parts_) cost += part.branch->cost(length);
  return cost;
}

void Block::forward(nn::Pass& pass, const TensorView& x, const TensorView& y, const mixers::LayerState& before,
                    const mixers::LayerState& after) {
  if (pass.training() && pass.recompute == nn::Recompute::block) {
    saved_before_ = before;
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
    run_forward(again, x, {}, saved_before_, {});
    run_backward(again, d);
  } else {
    run_backward(pass, d);
  }
}

void Block::run_forward(nn::Pass& pass, const TensorView& x, const TensorView& y, const mixers::LayerState& before,
                        const mixers::LayerState& after) {
  Context& context = pass.context;
  const ArenaScope scope(context.scratch());
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    Part::Saved& saved = parts_[i].saved;
    saved.statistics = pass.training() ? parts_[i].norm.take_statistics(*pass.saved, x) : TensorView();
    saved.normalized = pass.keep_or_recompute().tensor(x.shape, x.dtype, "norms: outputs");
    // Apart from x and y in every class: products that add in place may round otherwise.
    saved.in = i == 0 ? x : pass.keep().tensor(x.shape, x.dtype, "blocks: residual");
  }
  const TensorView whole = drops(pass) ? context.scratch().tensor(x.shape, x.dtype, "blocks: branch") : TensorView();
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    Part& part = parts_[i];
    const TensorView in = part.saved.in, sum = i + 1 < parts_.size() ? parts_[i + 1].saved.in : y;
    part.norm.forward(context, in, part.saved.normalized, part.saved.statistics);
    // The branch adds the stream to what it writes, but where something of it falls out first.
    nn::Output output;
    if (sum) output = whole ? nn::Output{whole, {}} : nn::Output{sum, in};
    part.branch->forward(pass, part.saved.normalized, output, state_of(before, part), state_of(after, part));
    if (sum && whole) ops::dropout::run(context, whole, in, sum, mask_of(pass, i));
  }
}

void Block::run_backward(nn::Pass& pass, const TensorView& d) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const TensorView branch = scratch.tensor(d.shape, d.dtype, "blocks: branch");
  const TensorView dropped = drops(pass) ? scratch.tensor(d.shape, d.dtype, "blocks: dropout") : TensorView();
  const bool recompute = pass.recompute == nn::Recompute::activations;
  const TensorView normalized = recompute ? scratch.tensor(d.shape, d.dtype, "norms: outputs") : TensorView();
  for (std::size_t i = parts_.size(); i-- > 0;) {
    Part& part = parts_[i];
    if (recompute) {
      part.saved.normalized = normalized;
      part.norm.forward(context, part.saved.in, normalized, {});
    }
    if (dropped) ops::dropout::run(context, d, {}, dropped, mask_of(pass, i));
    part.branch->backward(pass, part.saved.normalized, dropped ? dropped : d, branch);
    part.norm.backward(context, part.saved.in, part.saved.statistics, branch, d, true);
  }
}

bool Block::prepares_steps() const {
  return std::any_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.branch->prepares_steps(); });
}

void Block::prepare_steps(Context& context, DType activations) {
  for (Part& part : parts_) part.branch->prepare_steps(context, activations);
}

void Block::step(nn::Pass& pass, const TensorView& x, const mixers::LayerState& state) {
  for (Part& part : parts_) {
    part.branch->step(pass, part.norm, x, state_of(state, part));
  }
}

}  // namespace flashgla::model
