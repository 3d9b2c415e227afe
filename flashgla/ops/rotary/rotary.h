// Rotary position embedding, in halves. Su et al. 2021, "RoFormer", eq. 34; halves instead of neighbours as in
// GPT-NeoX, LLaMA and flash-linear-attention.
//
//     a = x[j], b = x[j + K/2], phi = p base^(-2j/K), 0 <= j < K/2
//     y[j] = a cos phi - b sin phi,    y[j + K/2] = b cos phi + a sin phi
//
// p is the token's position in its sequence: positions[n] plus the tokens of the sequence before it in the call. The
// inverse turns back, which is the gradient too.
// Shapes: x, y [B,T,heads,K] (any strides, K contiguous and even); positions i32 [N], absent: zeros; cu_seqlens i32
// [N+1], absent: N = B. dtypes: x, y one of f64, f32, bf16, f16; angles in f64, products in f32 (f64 with f64). y may
// be x. Throw Error naming the argument.
#pragma once

#include <cstdint>

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::rotary {

enum class Direction : std::uint8_t { forward, inverse };

void run(Context& context, const TensorView& x, const TensorView& positions, const TensorView& cu_seqlens, double base,
         Direction direction, const TensorView& y);

}  // namespace flashgla::ops::rotary
