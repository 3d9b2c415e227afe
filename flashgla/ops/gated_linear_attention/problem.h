// What a call of the operator is, in plain numbers: all that selection and kernels need to know of it.
#pragma once

#include <cstdint>
#include <limits>

#include "flashgla/base/dtype.h"

namespace flashgla::ops::gated_linear_attention {

enum class GateKind : std::uint8_t {
  none,       // linear attention
  constant,   // one per head: RetNet, Lightning attention
  scalar,     // one per token and head: simple GLA, Mamba-2
  key,        // a vector over keys: GLA
  key_value,  // vectors over keys and over values: the paper's first version
};

enum class Algorithm : std::uint8_t {
  automatic,
  recurrent,           // token by token (section 2.1)
  parallel,            // quadratic in T, for short sequences (section 4.2, "parallel form")
  chunk_materialized,  // chunk states kept by forward for backward (Algorithms 1-4)
  chunk_recomputed,    // chunk states recomputed in backward (Algorithms 5, 6)
};

enum class FeatureMap : std::uint8_t { identity, elu_plus_one, relu };

// What float32 matrix products may be rounded to; only CUDA has a choice.
enum class Float32Math : std::uint8_t { ieee, tf32 };

constexpr double kNormalizerEpsilon = 1e-10;  // of Problem::normalize
constexpr double kNoClamp = -std::numeric_limits<double>::infinity();

// Everything that selection may depend on: no pointers, no data.
struct Problem {
  std::int64_t batch = 1;
  std::int64_t length = 1;       // T; with packing the total over all sequences
  std::int64_t query_heads = 1;  // H
  std::int64_t heads = 1;        // G: key-value heads
  std::int64_t key_dim = 1;      // K
  std::int64_t value_dim = 1;    // V
  std::int64_t sequences = 1;    // N
  bool packed = false;           // cu_seqlens given (then B = 1)
  std::int64_t max_seqlen = 0;   // packed: tokens of the longest sequence, as far as the caller knows; 0: unknown
  DType dtype = DType::f32;
  DType gate_dtype = DType::f32;
  GateKind gate = GateKind::none;
  FeatureMap feature_map = FeatureMap::identity;
  bool normalize = false;
  bool sums_over_heads = false;  // Options::sums_over_heads
  Algorithm algorithm = Algorithm::automatic;
  Float32Math float32_math = Float32Math::ieee;
  double scale = 1.0;
  double gate_logit_normalizer = 0.0;  // above 0: gates are logits
  double gate_clamp_min = kNoClamp;    // of what they stand for

  std::int64_t group() const { return query_heads / heads; }
  bool has_logits() const { return gate_logit_normalizer > 0.0; }
  bool operator==(const Problem&) const = default;
};

}  // namespace flashgla::ops::gated_linear_attention
