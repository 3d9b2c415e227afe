// The CUDA implementations' functions, as the rows of the operator's table call them, and what their sources share. No
// CUDA types here.
#pragma once

#include <string>

#include "flashgla/ops/gated_linear_attention/cuda/plan.h"
#include "flashgla/ops/gated_linear_attention/implementations.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// [B,T,heads,channels] or [B,T,heads]; without data for no view. A constant gate, [heads], is the same for all tokens.
Strided strided(const TensorView& view);
Strided strided_gate(GateKind gate, const TensorView& view);

// Sizes and views; states from outputs.states. `chunk_begin` stays null: see plan_chunks.
Params make_params(const Problem& problem, const Inputs& inputs, const Outputs& outputs);
// Of what the plan leaves to the kernels, states as it has them.
Params make_params(const Plan& plan, const Inputs& inputs, const Outputs& outputs);

Gradients gradients_of(const Problem& problem, const OutputGradients& d_out, const InputGradients& d_in);

// When packed: takes chunk_begin from context.scratch() and queues the kernel that fills it. The caller holds the
// ArenaScope.
void plan_chunks(Context& context, Params& params);

// In a debug build: writes the plan's tag behind the states of a forward; stops the device where a backward that is
// given states does not find it.
void write_states_tag(const Context& context, const Plan& plan, const TensorView& states);
void check_states_tag(const Context& context, const Plan& plan, const TensorView& states);

// The gradient token by token in f32, for whatever the table's rows take.
void recurrent_backward(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                        const OutputGradients& d_out, const InputGradients& d_in);

// Rows of the table. `hopper` stands for the row cuda_sm90.
Support portable_supports(const Problem& problem, const Architecture& architecture);
Support hopper_supports(const Problem& problem, const Architecture& architecture);
std::size_t portable_states_bytes(const Problem& problem);
std::size_t hopper_states_bytes(const Problem& problem);
void portable_forward(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs);
void hopper_forward(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs);
void portable_backward(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                       const OutputGradients& output_gradients, const InputGradients& input_gradients);
void hopper_backward(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                     const OutputGradients& output_gradients, const InputGradients& input_gradients);
std::string portable_plan(const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                          const Architecture& architecture);
std::string hopper_plan(const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                        const Architecture& architecture);
bool takes_projection(const Context& context, const Problem& problem, const GateProjection& gate, DType state);
void step(Context& context, const Problem& problem, const StepInputs& inputs, const TensorView& h, const TensorView& z,
          const TensorView& o);

}  // namespace flashgla::ops::gated_linear_attention::cuda
