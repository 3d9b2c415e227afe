// The language model's head: linear layer and softmax cross entropy in one, in pieces of rows.
//
//     z[r,v] = sum_d x[r,d] weight[v,d];   losses[r] = log(sum_v exp(z[r,v])) - z[r,targets[r]]      natural log
//
// Logits exist for one piece of rows at a time, in scratch: in f32 (f64 with f64), and on CUDA in bf16 where x is bf16;
// normalised probabilities are never stored. A target of -1 marks an ignored row: its loss and gradient are 0.
// Shapes: x, dx [rows,D] (row stride allowed); weight, dweight [V,D]; targets i32 [rows] and losses [rows] contiguous.
// dtypes: x one of f64, f32, bf16; weight that dtype, or bf16 beside f32 x; dx as x; losses and dweight f32 (f64 with
// f64). With bf16 x the gradient of the logits is rounded to bf16 for its two products. Throw Error naming the
// argument.
//
// A target outside [-1, V): on the CPU an Error that names it with its row. On CUDA, where the host does not wait, the
// row's loss is NaN, its gradient 0, and bad_target, where it is given, says so: i32 [1], which becomes the smallest of
// row + 1 and what it holds, 0 standing for none yet.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/tensor.h"

namespace flashgla::ops::cross_entropy {

struct Inputs {
  TensorView x;
  TensorView weight;
  TensorView targets;
  TensorView bad_target{};
};

// hits f32 (f64 with f64) [rows]: 1 where the target's logit is above all others, else 0, and 0 in ignored rows;
// absent: not computed.
void forward(Context& context, const Inputs& inputs, const TensorView& losses, const TensorView& hits = {});

// Losses, and the gradient of gradient_scale * sum(losses): dx overwritten, dweight accumulated (absent: not computed).
void forward_backward(Context& context, const Inputs& inputs, const TensorView& losses, const TensorView& dx,
                      const TensorView& dweight, double gradient_scale);

}  // namespace flashgla::ops::cross_entropy
