// Where the weights' pages lie on a machine with several memory nodes: at the thread that writes them first.
#pragma once

#include <vector>

#include "flashgla/nn/parameter.h"

namespace flashgla::nn {

// Writes into every page of these values, which nobody has written yet: for each matrix who of `threads` reads its rows
// in a decoding step (base/cut.h), and for all else the calling thread. What they hold is lost.
void place_pages(const std::vector<Parameter*>& parameters, int threads);

}  // namespace flashgla::nn
