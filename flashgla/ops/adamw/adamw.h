// Adam with decoupled weight decay. Loshchilov and Hutter 2019, Algorithm 2 (with the decay times the learning rate).
//
//     g = gradient_factor gradient
//     m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
//     p = p - learning_rate (m / (1 - beta1^updates) / (sqrt(v / (1 - beta2^updates)) + epsilon) + weight_decay p)
//
// All parameters of a model in one call: they lie in one block, as do their gradients and moments. What changes from
// step to step lies in the device's memory (step_scalars.h); nothing here makes the host wait.
#pragma once

#include <cstdint>

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"
#include "flashgla/ops/adamw/step_scalars.h"

namespace flashgla::ops::adamw {

// Of one shape [count] and contiguous, but for boundaries and scalars.
struct Tensors {
  TensorView parameter;      // f32, f64 or bf16
  TensorView gradient;       // f32 (f64 with f64)
  TensorView first_moment;   // m: f32 (f64 with f64), or bf16, which is rounded stochastically
  TensorView second_moment;  // v: as m
  // What is updated in a bf16 parameter's stead, of which the parameter is the nearest bf16, halfway cases away from
  // zero: f32, or u16, the low bits that together with the parameter are the f32 (rounding.h). Both give the same
  // parameters to the bit. Absent beside other parameters.
  TensorView master;
  // i64 [S], rising: elements before the first and from every second one on (boundary 1 to 2, 3 to 4, ...) decay, those
  // between the others do not. Absent: all decay.
  TensorView boundaries;
  TensorView scalars;  // f64 [kStepScalars]
};

// From sum_of_squares, f64 [1], of the gradient: its norm, whether the update is made (the norm and `loss` are finite;
// f32 or f64 [1]; absent: finite), the clipping factor and the bias corrections. scalars.updates rises if it is made.
void prepare(Context& context, const TensorView& sum_of_squares, const TensorView& loss, const TensorView& scalars,
             const Settings& settings);

// The update that was prepared; nothing is touched when it is not to be made. The random bits of stochastic rounding
// are a function of (seed, update, element). Throws Error naming the argument.
void step(Context& context, const Tensors& tensors, const Settings& settings);

}  // namespace flashgla::ops::adamw
