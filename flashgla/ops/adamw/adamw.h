// Adam with decoupled weight decay. Loshchilov and Hutter 2019, Algorithm 2 (with the decay times the learning rate).
//
//     g = gradient_scale gradient
//     m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
//     p = p - learning_rate (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + epsilon) + weight_decay p)
//
// One parameter tensor a call.
#pragma once

#include <cstdint>

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::adamw {

// All of one shape, contiguous. Parameter f32, f64 or bf16. Gradient, moments and master f32 (f64 with f64).
// bf16 parameters need the master, which is what is updated; the parameter becomes its copy, rounded to nearest even.
struct Tensors {
  TensorView parameter;
  TensorView gradient;
  TensorView first_moment;   // m
  TensorView second_moment;  // v
  TensorView master;         // absent unless the parameter is bf16
};

struct Settings {
  double learning_rate = 3e-4;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.0;
  double gradient_scale = 1.0;  // clipping, and one over the accumulated micro-batches
  std::int64_t step = 1;        // counts from 1
};

// Throws Error naming the argument.
void step(Context& context, const Tensors& tensors, const Settings& settings);

}  // namespace flashgla::ops::adamw
