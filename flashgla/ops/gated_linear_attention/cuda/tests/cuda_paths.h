// Cases that between them take every path of kernels on CUDA.
#pragma once

#include <vector>

#include "flashgla/ops/gated_linear_attention/tests/cases.h"

namespace flashgla::ops::gated_linear_attention {

// The kernels are chosen by type, widths and how many blocks there are (PLAN.md). What each of these takes on a device
// of 132 multiprocessors is written down in path_plans_text.cpp: one pass and one kernel (136 sequence-heads of 64
// channels), one pass of wide heads (many, brief, pairs), two passes and chunks (wide heads, few sequences), with
// segments of time (one sequence), tiles of f32 (f32, f16, more than 256 key channels), both sides' gates, features
// before and after, token by token (fewer than 8 key channels), pairs of tokens (asked for by name).
std::vector<Case> path_cases();

}  // namespace flashgla::ops::gated_linear_attention
