// The norm behind the operator in HGRN2 and GSA.
#pragma once

namespace flashgla::mixers {

// flash-linear-attention's fused function, which these two layers call, is not told the model's norm_eps and has this.
constexpr double kInnerEpsilon = 1e-5;

}  // namespace flashgla::mixers
