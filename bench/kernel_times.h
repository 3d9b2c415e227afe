// Which operators' kernels a step's time goes to: counted by CUPTI, which is loaded when it is asked for.
#pragma once

#include <functional>
#include <vector>

#include "flashgla/model/config.h"
#include "testing/bench.h"

namespace flashgla::bench {

// Throws Error with the remedy where kernels cannot be counted.
void require_kernel_times(Device device);

// Of one step, of which run() queues so many; the longest first. Graphs are looked into. A kernel's blocks may begin
// beside those of the kernel before it and wait there: what is counted of it begins where all that ended before it
// have.
std::vector<testing::OperatorTime> operator_times(const Context& context, const std::function<void()>& run, int steps);

// What a step must do: FLOPs of products and bytes of all else, each tensor once.
enum class Step { training, prompt, token };
// Writes the floors of those operators that have one, in a model of GLA layers in bf16 with f32 gradients, moments and
// master; other models' have none. state_bytes: read and written of the states, of a token's step.
void add_floors(std::vector<testing::OperatorTime>& operators, const model::ModelConfig& config, Step step,
                std::int64_t tokens, double state_bytes = 0.0);

}  // namespace flashgla::bench
