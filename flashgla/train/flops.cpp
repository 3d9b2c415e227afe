#include "flashgla/train/flops.h"

#include "flashgla/model/language_model.h"
#include "flashgla/ops/gated_linear_attention/flops.h"

namespace flashgla::train {

double training_flops_per_token(const model::ModelConfig& config) {
  double matrices = 0.0;
  for (const nn::Parameter& parameter : model::describe_parameters(config)) {
    const bool looked_up = parameter.name == "model.embeddings.weight" && !config.tie_word_embeddings;
    if (parameter.shape.rank() == 2 && !looked_up) matrices += static_cast<double>(parameter.shape.numel());
  }
  const double heads = static_cast<double>(config.num_heads);
  const double k = static_cast<double>(config.key_dim()) / heads;
  const double v = static_cast<double>(config.value_dim()) / heads;
  const double scan = ops::gated_linear_attention::training_flops(k, v);
  return 6.0 * matrices + static_cast<double>(config.num_hidden_layers) * heads * scan;
}

}  // namespace flashgla::train
