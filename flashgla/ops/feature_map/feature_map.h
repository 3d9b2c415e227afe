// Feature maps of linear attention's queries and keys that gated_linear_attention has not itself, and their division by
// the sum of a row's features.
//
//     y = phi(x),   or   phi(x) / (sum phi(x) + kSumEpsilon)
//
//     map          phi(x) of x [C]                                                    features
//     as_is        x                                                                  C
//     relu         max(x, 0)                                                          C
//     elu_plus_one x + 1 where x > 0, else e^x                                        C
//     both_signs   softmax of (2 x, -2 x)                                             2 C
//     dpfp         r_i r_(i-j), j = 1 to 4 behind one another, of r = (relu x, relu -x);  i - j counted mod 2 C      8
//     C
//
// both_signs: Zhang et al. 2024, "The Hedgehog and the Porcupine"; dpfp: Schlag et al. 2021, "Linear Transformers Are
// Secretly Fast Weight Programmers", eq. 37. Shapes: x, dx [...,C] with C >= 1, y, dy [...,features] (any strides, last
// dimension contiguous). dtypes: one of f64, f32, bf16, f16; arithmetic in f32 (f64 with f64). Throw Error naming the
// argument.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::feature_map {

enum class Map : std::uint8_t { as_is, relu, elu_plus_one, both_signs, dpfp };

constexpr std::int64_t kShifts = 4;   // of dpfp
constexpr double kSumEpsilon = 1e-4;  // flash-linear-attention's

constexpr std::int64_t features_of(Map map, std::int64_t channels) {
  return map == Map::both_signs ? 2 * channels : map == Map::dpfp ? 2 * kShifts * channels : channels;
}

struct Options {
  Map map = Map::as_is;
  bool divide = false;  // by the sum
};

// y must not overlap x.
void forward(Context& context, const TensorView& x, const TensorView& y, const Options& options);

// dx from x and dy; neither may overlap dx.
void backward(Context& context, const TensorView& x, const TensorView& dy, const TensorView& dx,
              const Options& options);

}  // namespace flashgla::ops::feature_map
