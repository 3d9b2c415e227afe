// Normals of a seeded stream, drawn on a GPU.
#pragma once

#include "flashgla/base/context.h"
#include "flashgla/base/random.h"
#include "flashgla/base/tensor.h"

namespace flashgla::nn::cuda {

// Queues values[i] = deviation times the stream's i-th normal, rounded as on the CPU; f32 or bf16 without gaps.
void draw_normals(const Context& context, const TensorView& values, const random::Stream& stream, double deviation);

}  // namespace flashgla::nn::cuda
