// The layer that GLA and its relatives share: projections, optional short convolutions and rotary positions, the
// operator gated_linear_attention with some gate, a norm of the heads' outputs with or without an output gate, and W_o.
//
//     q, k, v = W_q x, W_k x, W_v x
//     g, gv   = none | constant by head | log_sigmoid(W x + b) / normalizer by head | that of W_2 (W_1 x) + b by
//               channel of the keys (g), of the values (gv), or of both
//     o       = gated_linear_attention(q, k, v, g, gv)            q, k behind feature maps where there are any
//     y       = W_o (RMSNorm(o) * swish(W_g x))
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "flashgla/mixers/head_map.h"
#include "flashgla/mixers/mixer.h"
#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"

namespace flashgla::mixers {

struct GatedLayerSettings {
  Common common;
  std::string name;  // of the parameters: "model.layers.3.attn"
  std::int64_t num_heads = 1;
  std::int64_t kv_heads = 1;
  std::int64_t key_dim = 1;    // query channels of all heads together
  std::int64_t value_dim = 1;  // value channels of the outputs of all heads together
  ops::gated_linear_attention::FeatureMap feature_map = ops::gated_linear_attention::FeatureMap::identity;
  std::optional<HeadMapSettings> head_map;  // before the operator, which then has no map of its own
  bool normalize = false;                   // o is divided by q . z
  double rope_base = 0.0;                   // of rotary positions of q and k; 0: none
  std::int64_t conv_size = 0;               // of short convolutions of q, k and v; 0: none

  // Of the state: none, by head (fixed or computed), by channel of its keys, of its values, of both.
  enum class Gate : std::uint8_t { none, constant, scalar, key, value, key_value };
  Gate gate = Gate::none;
  std::vector<double> constant_gate;    // log, a head
  std::int64_t gate_low_rank_dim = 16;  // of gates by channel
  double gate_logit_normalizer = 16.0;
  std::optional<double> clamp_min;

  bool output_gate = false;
  bool output_gate_bias = false;
  std::string norm_name;  // of the weight of the outputs' norm, behind `name`; "": it has none
};

// RetNet's fixed decays: ln(1 - 2^(-5 - h)) of head h. Sun et al. 2023, "Retentive Network", section 2.2.
std::vector<double> retention_decays(std::int64_t heads);

// Channels of all heads: hidden_size times `expand`.
inline std::int64_t expanded(const Common& common, double expand) {
  return static_cast<std::int64_t>(static_cast<double>(common.hidden_size) * expand);
}
// Throws Error naming the field unless these make whole heads.
void require_heads(const Common& common, std::int64_t num_heads, double expand_k, double expand_v);

std::unique_ptr<Mixer> make_gated_layer(const GatedLayerSettings& settings);

}  // namespace flashgla::mixers
