// The benches of the whole model, beside the operators' (flashgla/ops/benches.h).
#pragma once

#include <vector>

#include "flashgla/ops/benches.h"

namespace flashgla::model {

const std::vector<ops::Bench>& benches();

}  // namespace flashgla::model
