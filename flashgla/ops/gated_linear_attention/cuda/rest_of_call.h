// What is left of a call once some of it has been dealt with, as a function that the caller hands down.
#pragma once

#include <functional>

#include "flashgla/ops/gated_linear_attention/implementations.h"

namespace flashgla::ops::gated_linear_attention::cuda {

using RestOfForward = std::function<void(const Inputs&, const Outputs&)>;
using RestOfBackward =
    std::function<void(const Inputs&, const Outputs&, const OutputGradients&, const InputGradients&)>;

}  // namespace flashgla::ops::gated_linear_attention::cuda
