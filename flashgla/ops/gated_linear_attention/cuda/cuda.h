// The CUDA implementations' functions, as the rows of the operator's table call them. No CUDA types here.
#pragma once

#include "flashgla/ops/gated_linear_attention/cuda/params.h"
#include "flashgla/ops/gated_linear_attention/implementations.h"

namespace flashgla::ops::gated_linear_attention::cuda {

// [B,T,heads,channels] or [B,T,heads]; without data for no view. A constant gate, [heads], is the same for all tokens.
Strided strided(const TensorView& view);
Strided strided_gate(GateKind gate, const TensorView& view);

// Fields of Params that a call's views give; states from outputs.states. `chunk_begin` stays null: see plan_chunks.
Params make_params(const Problem& problem, const Inputs& inputs, const Outputs& outputs);

Gradients gradients_of(const Problem& problem, const OutputGradients& d_out, const InputGradients& d_in);

// Upper bound of the number of chunks, all sequences together, from the problem alone.
std::int64_t most_chunks(const Problem& problem);

// When packed: takes chunk_begin from context.scratch() and queues the kernel that fills it. The caller holds the
// ArenaScope.
void plan_chunks(Context& context, Params& params);

// Whether the backward goes by chunks, as far as the problem alone tells: then it reads their start states.
bool backward_in_chunks(const Problem& problem);

// Whether chunks can serve the call at all, or the recurrence token by token must. bf16 with gates over values is asked
// about apart (gates_values_by_chunks).
bool goes_by_chunks(const Problem& problem);

// Whether kernels on Hopper turn gates given as logits into log gates themselves, forward and backward, as far as the
// problem alone tells; rows have to be aligned besides. Others are given gates in workspace: beside bf16 in bf16.
bool turns_logits(const Problem& problem);
Problem with_gates_on_cuda(const Problem& problem);

// Whether the one-pass forward can take the call: it alone needs no workspace to find the chunk states.
bool forward_fits_one_pass(const Problem& problem, const Params& params);

// Whether the backward in one kernel finds states between kept ones (backward/by_role.cuh): heads of up to 64 x 64
// without gates or with one a token, on Hopper.
bool finds_states(const Problem& problem, bool hopper);

// Sets at which chunks states are kept, forward and backward alike. For heads wider than a tile every second, since
// there states are most of the bytes that move, and pairs of chunks are what their backward goes by. For others every
// one, but where finds_states(): every fourth for that one kernel (one_kernel_is_faster), every second where the
// backward goes by pairs too.
void space_states(Params& params, const Problem& problem, bool hopper, bool one_kernel);

// The gradient token by token in f32, for whatever the table's rows take.
void recurrent_backward(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                        const OutputGradients& d_out, const InputGradients& d_in);

// Rows of the table. `hopper` stands for the row cuda_sm90. Bytes of Outputs.states: the chunk-start states of
// most_chunks(problem) chunks (params.h), and what else backward reads (forward/two_pass.h).
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
bool takes_projection(const Context& context, const Problem& problem, const GateProjection& gate, DType state);
void step(Context& context, const Problem& problem, const StepInputs& inputs, const TensorView& h, const TensorView& z,
          const TensorView& o);

}  // namespace flashgla::ops::gated_linear_attention::cuda
