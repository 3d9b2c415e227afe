// The layer of softmax_attention.h.
#include "flashgla/mixers/inner_norm.h"
#include "flashgla/mixers/mixer.h"
#include "flashgla/mixers/softmax_attention/config.h"
#include "flashgla/nn/linear.h"
#include "flashgla/nn/norm.h"
#include "flashgla/ops/arguments.h"
#include "flashgla/ops/rotary/rotary.h"
#include "flashgla/ops/softmax_attention/softmax_attention.h"

namespace flashgla::mixers {

namespace {

namespace softmax_attention = ops::softmax_attention;
using ops::rotary::Direction;

class SoftmaxAttention : public Mixer {
  enum Part : std::size_t { kQ, kK, kV };  // of the projections

 public:
  SoftmaxAttention(const SoftmaxAttentionConfig& config, const Common& common, std::int64_t layer,
                   const std::string& name)
      : config_(config),
        layer_(layer),
        channels_(config.head_channels(common)),
        input_({{name + ".q_proj", config.num_heads * channels_},
                {name + ".k_proj", config.kv_heads() * channels_},
                {name + ".v_proj", config.kv_heads() * channels_}},
               common.hidden_size, common.initializer_range, config.qkv_bias),
        output_({{name + ".o_proj", common.hidden_size, nn::Quantisation::sensitive}}, config.num_heads * channels_,
                common.initializer_range, config.o_bias) {
    if (config.qk_norm) {
      norms_.emplace_back(name + ".q_norm", channels_, kInnerEpsilon);
      norms_.emplace_back(name + ".k_norm", channels_, kInnerEpsilon);
    }
  }

  void for_each_parameter(const nn::ParameterVisitor& visit) override {
    input_.for_each_parameter(visit);
    for (nn::Norm& norm : norms_) norm.for_each_parameter(visit);
    output_.for_each_parameter(visit);
  }

  std::vector<StateEntry> state_layout(std::int64_t sequences, std::int64_t capacity, DType parameters) const override {
    const bool growing = !config_.window_size;
    const Shape shape({sequences, growing ? capacity : *config_.window_size, config_.kv_heads(), channels_});
    return {{"k", shape, parameters, growing}, {"v", shape, parameters, growing}};
  }

  Cost cost(std::int64_t length) const override {
    const auto heads = static_cast<double>(config_.num_heads), k = static_cast<double>(channels_);
    const auto tokens = static_cast<double>(length), window = static_cast<double>(config_.window_size.value_or(0));
    constexpr double kBytes = 2.0;  // of a bf16 model
    Cost cost;
    cost.forward_flops = heads * softmax_attention::forward_flops(k, k, tokens, window);
    cost.training_flops = heads * softmax_attention::training_flops(k, k, tokens, window);
    cost.decode_bytes =
        kBytes * 2.0 * static_cast<double>(config_.kv_heads()) * k * (window > 0.0 ? std::min(tokens, window) : tokens);
    return cost;
  }

  void forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
               const LayerState& after) override;
  void backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) override;
  void step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) override;

 private:
  std::int64_t heads_of(std::size_t part) const { return part == kQ ? config_.num_heads : config_.kv_heads(); }
  TensorView heads(const TensorView& projected, std::size_t part) const {
    return input_.part(projected, part).split_last(heads_of(part));
  }
  void rotate(const nn::Pass& pass, const TensorView& of, Direction direction) const {
    if (!config_.use_rope) return;
    ops::rotary::run(pass.context, of, pass.positions, pass.sequences.bounds, config_.rope_theta, direction, of);
  }
  // The heads of q and of k, which lie side by side: one call turns them all.
  TensorView heads_to_turn(const TensorView& projected) const {
    const std::int64_t count = config_.num_heads + config_.kv_heads();
    return projected.slice(projected.rank() - 1, 0, count * channels_).split_last(count);
  }
  // q and k as attention takes them, from the projections; with norms into `normalized`, else in place.
  void prepare(const nn::Pass& pass, bool want_deviations);
  softmax_attention::Inputs attention_inputs(const nn::Pass& pass) const {
    softmax_attention::Inputs inputs{saved_.heads[kQ],     saved_.heads[kK], saved_.heads[kV], {}, {}, {},
                                     pass.sequences.bounds};
    if (!saved_.before.empty() && pass.positions) {
      inputs.past_k = saved_.before[0];
      inputs.past_v = saved_.before[1];
      inputs.positions = pass.positions;
    }
    return inputs;
  }

  softmax_attention::Options options_of(const nn::Pass& pass) const {
    softmax_attention::Options options;
    options.window = config_.window_size.value_or(0);
    options.dropout = pass.dropout.attention_mask(layer_);
    options.training = pass.training() || pass.repeated;
    return options;
  }

  SoftmaxAttentionConfig config_;
  std::int64_t layer_;
  std::int64_t channels_;  // of a head
  nn::Linear input_;       // q, k, v: one matrix product
  nn::Linear output_;
  std::vector<nn::Norm> norms_;  // none, or those of q's and k's heads
  struct Saved {
    TensorView projected;  // [B,T,input_.out()]; q and k turned in place, without norms
    TensorView rstd[2];    // of the norms: [B*T*heads]
    TensorView heads[3];   // q, k, v [B,T,heads,K] as attention takes them; with norms q and k are recomputed
    TensorView o;          // [B,T,H,K]
    TensorView lse;        // [B,T,H]
    LayerState before;
  } saved_;
};

void SoftmaxAttention::prepare(const nn::Pass& pass, bool want_deviations) {
  if (norms_.empty()) return rotate(pass, heads_to_turn(saved_.projected), Direction::forward);
  for (const std::size_t part : {kQ, kK}) {
    norms_[part].forward(pass.context, heads(saved_.projected, part), saved_.heads[part],
                         want_deviations ? saved_.rstd[part] : TensorView());
    rotate(pass, saved_.heads[part], Direction::forward);
  }
}

void SoftmaxAttention::forward(nn::Pass& pass, const TensorView& x, const nn::Output& y, const LayerState& before,
                               const LayerState& after) {
  Context& context = pass.context;
  const ArenaScope scope(context.scratch());
  const std::int64_t batch = x.size(0), length = x.size(1);
  const DType wide = ops::accumulator_of(x.dtype);
  saved_.before = before;
  saved_.projected = pass.keep().tensor(Shape({batch, length, input_.out()}), x.dtype, "attention: projections");
  input_.forward(context, x, saved_.projected);
  for (const std::size_t part : {kQ, kK, kV}) {
    const TensorView projected = heads(saved_.projected, part);
    const bool own = part != kV && !norms_.empty();
    saved_.heads[part] =
        own ? pass.keep_or_recompute().tensor(projected.shape, x.dtype, "attention: normalised heads") : projected;
    if (own && pass.training()) {
      saved_.rstd[part] = pass.saved->tensor(Shape({batch * length * heads_of(part)}), wide, "norms: statistics");
    }
  }
  prepare(pass, pass.training());
  const Shape rows({batch, length, output_.in()});
  saved_.o = pass.keep().tensor(rows, x.dtype, "attention: outputs").split_last(config_.num_heads);
  saved_.lse = pass.training() ? pass.saved->tensor(Shape({batch, length, config_.num_heads}), wide,
                                                    "attention: sums of exponentials")
                               : TensorView();
  softmax_attention::forward(context, attention_inputs(pass), {saved_.o, saved_.lse}, options_of(pass));
  if (!after.empty()) {
    const auto appended = [&](std::size_t part) {
      const std::size_t entry = part - kK;
      return softmax_attention::Appended{saved_.heads[part], before.empty() ? TensorView() : before[entry],
                                         after[entry]};
    };
    const softmax_attention::Appended both[] = {appended(kK), appended(kV)};
    softmax_attention::append(context, both, pass.positions, pass.sequences.bounds);
  }
  if (y) output_.forward(context, saved_.o.reshape(rows), y);
}

void SoftmaxAttention::backward(nn::Pass& pass, const TensorView& x, const TensorView& dy, const TensorView& dx) {
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  if (pass.recompute == nn::Recompute::activations && !norms_.empty()) {
    for (const std::size_t part : {kQ, kK}) {
      saved_.heads[part] = scratch.tensor(saved_.heads[part].shape, x.dtype, "attention: normalised heads");
    }
    prepare(pass, false);
  }
  const Shape rows({x.size(0), x.size(1), output_.in()});
  const TensorView d_o = scratch.tensor(saved_.o.shape, x.dtype, "attention: gradients");
  output_.backward(context, saved_.o.reshape(rows), dy, d_o.reshape(rows));
  const TensorView dprojected = scratch.tensor(saved_.projected.shape, x.dtype, "attention: gradients");
  const TensorView dq = heads(dprojected, kQ), dk = heads(dprojected, kK);
  softmax_attention::backward(context, attention_inputs(pass), {saved_.o, saved_.lse}, d_o,
                              {dq, dk, heads(dprojected, kV)}, options_of(pass));
  rotate(pass, heads_to_turn(dprojected), Direction::inverse);
  for (const std::size_t part : {kQ, kK}) {
    const TensorView gradient = part == kQ ? dq : dk;
    if (norms_.empty()) break;
    norms_[part].backward(context, heads(saved_.projected, part), saved_.rstd[part], gradient, gradient, false);
  }
  input_.backward(context, x, dprojected, dx);
}

void SoftmaxAttention::step(nn::Pass& pass, const nn::Norm& norm, const TensorView& x, const LayerState& state) {
  namespace linear_step = ops::linear_step;
  Context& context = pass.context;
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  const std::int64_t batch = x.size(0);
  const TensorView projected = scratch.tensor(Shape({batch, 1, input_.out()}), x.dtype, "attention: projections");
  std::vector<linear_step::Layer> inputs = input_.step_layers(projected.reshape(Shape({batch, input_.out()})));
  if (norms_.empty() && config_.use_rope) {
    linear_step::turn_first(inputs, (config_.num_heads + config_.kv_heads()) * channels_);
  }
  linear_step::Options turning;
  turning.rotary = {config_.rope_theta, channels_, pass.positions};
  linear_step::run(context, norm.before_step(context, x), inputs, turning);
  if (!norms_.empty()) {
    for (const std::size_t part : {kQ, kK}) {
      const TensorView own = heads(projected, part);
      norms_[part].forward(context, own, own, {});
    }
    rotate(pass, heads_to_turn(projected), Direction::forward);
  }
  const TensorView o = scratch.tensor(Shape({batch, output_.in()}), x.dtype, "attention: outputs");
  const auto token = [&](std::size_t part) { return heads(projected, part).select(1, 0); };
  softmax_attention::step(context, token(kQ), {token(kK), token(kV), true}, state[0], state[1], pass.positions,
                          o.split_last(config_.num_heads), options_of(pass));
  output_.step(context, {o}, x, {linear_step::Epilogue::add});
}

}  // namespace

std::unique_ptr<Mixer> SoftmaxAttentionConfig::create(const Common& common, std::int64_t layer) const {
  return std::make_unique<SoftmaxAttention>(*this, common, layer, layer_prefix(layer) + ".attn");
}

}  // namespace flashgla::mixers
