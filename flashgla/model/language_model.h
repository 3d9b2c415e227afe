// The language model: embedding, blocks of mixer and gated MLP, final norm, head. Pre-norm residual stream.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "flashgla/mixers/mixer.h"
#include "flashgla/model/config.h"
#include "flashgla/model/decode_state.h"
#include "flashgla/nn/norm.h"
#include "flashgla/nn/parameter.h"
#include "flashgla/nn/pass.h"

namespace flashgla::model {

class Block;

// The parts of a model that have parameters.
struct Layers {
  explicit Layers(const ModelConfig& config);
  ~Layers();
  void for_each_parameter(const nn::ParameterVisitor& visit);

  nn::Parameter embedding;
  std::vector<nn::Parameter> positions;  // none, or the table of learned positions
  std::vector<nn::Norm> embedding_norm;  // none, or one
  mixers::SharedParameters shared;       // by the blocks
  std::vector<std::unique_ptr<Block>> blocks;
  nn::Norm final_norm;
  std::vector<nn::Parameter> head;  // none with tied embeddings, or one
};

// Names and shapes of the parameters of a model of this shape, in the model's order, without memory for them.
std::vector<nn::Parameter> describe_parameters(const ModelConfig& config);

// What all layers of such a model carry of one sequence; growing entries with room for one token.
std::vector<mixers::StateEntry> describe_state(const ModelConfig& config, DType parameters);

// The places of a batch that are scored, where not all are; head and loss are computed of these alone.
struct Scored {
  TensorView
      places;  // i32 [R], distinct: row*T + t of tokens [B,T]; targets are then i32 [R] and losses [R]. Absent: all
  TensorView hits;  // f32 (f64 with f64) as losses: what cross_entropy says of them; absent: not computed
};

class LanguageModel {
 public:
  // dtype: of parameters and activations while training (f32, bf16; f64 for gradient checks). For inference the
  // parameters keep `dtype` and activations are f32 (f64 with f64). Parameters are not initialised. placements: some
  // lie elsewhere or are packed, on the CPU and for inference alone; `keeps` is what the model holds for them.
  // threads: as nn::ParameterStore.
  LanguageModel(const ModelConfig& config, DType dtype, Device device, bool training,
                const nn::Placements& placements = {}, std::shared_ptr<const void> keeps = nullptr, int threads = 0);
  LanguageModel(const LanguageModel&) = delete;
  LanguageModel& operator=(const LanguageModel&) = delete;

  const ModelConfig& config() const { return config_; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  bool training() const { return training_; }
  nn::ParameterStore& parameters() { return *store_; }
  const nn::ParameterStore& parameters() const { return *store_; }

  // Activations of evaluate and prefill, and of steps of more than a few sequences: f32, or bf16 beside bf16
  // parameters, which is what matrix units multiply at their full rate. f32 unless it is set; nothing of a training
  // model.
  void set_inference_dtype(DType dtype);

  // capacity: tokens that growing states (those of softmax attention) have room for, of each sequence. The model must
  // outlive it. Also makes what steps read of the parameters alone (Mixer::prepare_steps): a state is of the parameters
  // of now.
  // `ring`: with what steps append to (Mixer::ring_layout).
  DecodeState make_state(std::int64_t sequences, std::int64_t capacity = 0, bool ring = false) const;
  // Whether steps of so many sequences gain by a ring here.
  bool ring_pays(std::int64_t sequences) const;
  // Mixer::fold_ring of every layer of a state that has a ring; returns when it is done.
  void fold_rings(const DecodeState& state) const;

  // Loss of each token: tokens, targets i32 [B,T] (target -1: ignored, loss 0), losses f32 [B*T] (natural log; f64
  // with f64). Packed sequences: pass.sequences, B = 1. With `state`, sequences start from it and leave their end
  // state in it; null: they start from zeros. Used for evaluation: pass.saved and pass.dropout are not looked at,
  // nothing is kept.
  void evaluate(nn::Pass& pass, const TensorView& tokens, const TensorView& targets, const TensorView& losses,
                DecodeState* state = nullptr, const Scored& scored = {});

  // As evaluate, and adds d(gradient_scale * sum of losses) to the parameters' gradients. No gradient flows into
  // `state` (truncated back-propagation through time). Needs a training model and pass.saved; releases what it took.
  // Only the places of `scored` are looked at.
  void forward_backward(nn::Pass& pass, const TensorView& tokens, const TensorView& targets, const TensorView& losses,
                        double gradient_scale, DecodeState* state = nullptr, const Scored& scored = {});

  // Logits f32 [N,V] (f64 with f64) after the last token of each of N sequences, in chunk form: tokens i32 [total],
  // sequences with bounds on the CPU too (each sequence at least one token). Sequences start from `state` and leave
  // their end state in it; its histories are the caller's to advance.
  void prefill(Context& context, const TensorView& tokens, const nn::Sequences& sequences, DecodeState& state,
               const TensorView& logits);

  // For scores of any positions: the final hidden states [total,D] (activation_dtype()) of a packed batch, tokens i32
  // [1,total] with pass.sequences; and logits f32 [R,V] (f64 with f64) of some of them [R,D]. `state` as in evaluate.
  void hidden_states(nn::Pass& pass, const TensorView& tokens, const TensorView& hidden, DecodeState* state = nullptr);
  void logits(Context& context, const TensorView& hidden, const TensorView& logits);
  DType activation_dtype() const { return training_ ? dtype_ : inference_dtype_; }

  // One token a sequence in recurrent form: tokens i32 [N], logits f32 [N,V] (f64 with f64). Histories as in prefill.
  void step(Context& context, const TensorView& tokens, DecodeState& state, const TensorView& logits);

 private:
  const nn::Parameter& head() const { return layers_.head.empty() ? layers_.embedding : layers_.head.front(); }
  void check_batch(const char* operation, const nn::Pass& pass, const TensorView& tokens, const TensorView& targets,
                   const TensorView& losses, const DecodeState* state, const Scored& scored) const;
  // Throws Error where a sequence cannot have so many.
  void check_positions(const char* operation, std::int64_t tokens) const;
  // Throws Error unless growing states have room for what comes, and it has positions: `length` tokens, or those of the
  // packed sequences, behind the histories.
  void check_capacity(const char* operation, const DecodeState& state, const nn::Sequences& sequences,
                      std::int64_t length) const;
  // x [B,T,D] (or [N,D], a token a sequence): the rows of tokens, and of their positions; embed normalises them where
  // the model does.
  void look_up(const nn::Pass& pass, const TensorView& tokens, const TensorView& x) const;
  void embed(const nn::Pass& pass, const TensorView& tokens, const TensorView& x) const;
  // The positions of tokens [B,T] in scratch, i32.
  TensorView positions_of(const nn::Pass& pass, const TensorView& tokens) const;
  // A copy of the state's constant entries in `arena`, as the blocks' start state; absent without a state.
  TensorView snapshot(Context& context, Arena& arena, const DecodeState* state) const;
  // All blocks in place on x [B,T,D], nothing kept.
  void run_blocks(nn::Pass& pass, const TensorView& x, DecodeState* state);

  ModelConfig config_;
  DType dtype_;
  Device device_;
  bool training_;
  DType inference_dtype_;
  Layers layers_;
  std::shared_ptr<const void> keeps_;
  std::unique_ptr<nn::ParameterStore> store_;
};

}  // namespace flashgla::model
