// The operator as cases that test and bench share.
#pragma once

#include "flashgla/ops/embedding/embedding.h"
#include "testing/conformance.h"

namespace flashgla::ops::embedding {

using testing::Kind;
using testing::NamedTensors;
using testing::Role;

// Every word, many times.
inline void fill_tokens(const TensorView& tokens, std::int64_t words) {
  for (std::int64_t i = 0; i < tokens.numel(); ++i) {
    tokens.as<std::int32_t>()[i] = static_cast<std::int32_t>(i * 7919 % words);
  }
}

inline testing::Argument tokens_of(const Shape& shape, std::int64_t words) {
  testing::Argument tokens{"tokens", shape, Role::input, Kind::integer};
  tokens.strided = false;
  tokens.fill = [=](const TensorView& view) { fill_tokens(view, words); };
  return tokens;
}

// shape: of y.
inline testing::OperatorCase forward_case(const Shape& shape, std::int64_t words) {
  const Shape tokens = shape.rank() == 3 ? Shape({shape[0], shape[1]}) : Shape({shape[0]});
  return {"forward " + to_string(shape),
          {tokens_of(tokens, words),
           {"table", Shape({words, shape[-1]}), Role::input, Kind::parameter},
           {"y", shape, Role::output}},
          [](Context& context, const NamedTensors& t) { forward(context, t["tokens"], t["table"], t["y"]); }};
}

inline testing::OperatorCase backward_case(const Shape& shape, std::int64_t words) {
  const Shape tokens = shape.rank() == 3 ? Shape({shape[0], shape[1]}) : Shape({shape[0]});
  return {"backward " + to_string(shape),
          {tokens_of(tokens, words),
           {"dy", shape},
           {"dtable", Shape({words, shape[-1]}), Role::accumulated, Kind::accumulator}},
          [](Context& context, const NamedTensors& t) { backward(context, t["tokens"], t["dy"], t["dtable"]); }};
}

}  // namespace flashgla::ops::embedding
