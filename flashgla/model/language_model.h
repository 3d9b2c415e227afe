// The language model: embedding, blocks of mixer and gated MLP, final norm, head. Pre-norm residual stream.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "flashgla/mixers/mixer.h"
#include "flashgla/model/config.h"
#include "flashgla/nn/parameter.h"
#include "flashgla/nn/pass.h"

namespace flashgla::model {

class Block;

// What generation carries: the state of every layer for a number of sequences. Constant in the length.
class DecodeState {
 public:
  DecodeState(const std::vector<std::unique_ptr<mixers::Mixer>*>& mixers, std::int64_t sequences, Device device);

  std::int64_t sequences() const { return sequences_; }
  std::int64_t position = 0;  // tokens seen so far (of the longest sequence); informative
  const mixers::LayerState& layer(std::size_t index) const { return layers_[index]; }
  std::size_t layer_count() const { return layers_.size(); }
  const std::vector<mixers::StateEntry>& layout(std::size_t index) const { return layouts_[index]; }
  std::size_t bytes() const { return memory_.view().bytes(); }
  void reset();                        // all zeros: the start of a sequence
  void reset_sequence(std::int64_t i);

 private:
  std::int64_t sequences_;
  Tensor memory_;
  std::vector<mixers::LayerState> layers_;
  std::vector<std::vector<mixers::StateEntry>> layouts_;
};

class LanguageModel {
 public:
  // dtype: of parameters and activations while training (f32, bf16; f64 for gradient checks). For inference the
  // parameters keep `dtype` and activations are f32 (on CPU).
  LanguageModel(const ModelConfig& config, DType dtype, Device device, bool training);
  ~LanguageModel();

  const ModelConfig& config() const { return config_; }
  DType dtype() const { return dtype_; }
  nn::ParameterStore& parameters() { return *store_; }
  const nn::ParameterStore& parameters() const { return *store_; }

  DecodeState make_state(std::int64_t sequences) const;

  // Loss of each token: tokens, targets i32 [B,T] (target -1: ignored, loss 0), losses f32 [B*T] (natural log).
  // With `state`, sequences start from it and leave their end state in it; null: they start from zeros.
  // Used for evaluation: nothing is kept.
  void evaluate(nn::Pass& pass, const TensorView& tokens, const TensorView& targets, const TensorView& losses,
                DecodeState* state = nullptr);

  // As evaluate, and adds d(gradient_scale * sum of losses) to the parameters' gradients. Needs pass.saved; releases
  // what it took of it.
  void forward_backward(nn::Pass& pass, const TensorView& tokens, const TensorView& targets, const TensorView& losses,
                        double gradient_scale, DecodeState* state = nullptr);

  // Logits f32 [N,V] after the last token of each of N sequences, in chunk form: tokens i32 [total], cu_seqlens i32
  // [N+1] (each sequence at least one token). Sequences start from `state` and leave their end state in it.
  void prefill(Context& context, const TensorView& tokens, const TensorView& cu_seqlens, DecodeState& state,
               const TensorView& logits);

  // One token a sequence in recurrent form: tokens i32 [N], logits f32 [N,V].
  void step(Context& context, const TensorView& tokens, DecodeState& state, const TensorView& logits);

 private:
  ModelConfig config_;
  DType dtype_;
  Device device_;
  nn::Parameter embedding_;
  std::vector<std::unique_ptr<Block>> blocks_;
  nn::Parameter final_norm_;
  nn::Parameter head_;  // unused with tied embeddings
  std::unique_ptr<nn::ParameterStore> store_;
};

}  // namespace flashgla::model
