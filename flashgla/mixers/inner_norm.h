// The norm behind the operator in HGRN2 and GSA, and those of queries and keys in softmax attention.
#pragma once

namespace flashgla::mixers {

// flash-linear-attention's norms there are not told the model's norm_eps and have this.
constexpr double kInnerEpsilon = 1e-5;

}  // namespace flashgla::mixers
