// The CUDA implementations' functions, as the rows of the operator's table call them, and what their sources share. No
// CUDA types here.
#pragma once

#include <functional>

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

// The same for two ways to run a call, of which one has its sequences, and the other as many without tokens: `up_to` if
// none has more than so many chunks, else `longer`. A state without tokens is passed on, so the second starts from what
// the first ends in.
struct ByLength {
  Params up_to, longer;
};
ByLength plan_chunks_by_length(Context& context, const Params& params, std::int64_t most_chunks);

// So many bytes from context.scratch().
template <class T = char>
T* take(Context& context, std::int64_t bytes, const char* label) {
  return static_cast<T*>(context.scratch().allocate(static_cast<std::size_t>(bytes), label));
}

// Of all sequences' states, f32 [N,G,K,V].
float* take_states(Context& context, const Problem& problem, const char* label);

// In a debug build: writes the plan's tag behind the states of a forward; stops the device where a backward that is
// given states does not find it.
void write_states_tag(const Context& context, const Plan& plan, const TensorView& states);
void check_states_tag(const Context& context, const Plan& plan, const TensorView& states);

// ---- the table's rows: `hopper` is cuda_sm90, else cuda_portable, which runs there too ----

Support supports(const Problem& problem, const Architecture& architecture, bool hopper);
void forward(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs, bool hopper);
void backward(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
              const OutputGradients& output_gradients, const InputGradients& input_gradients, bool hopper);
bool takes_projection(const Context& context, const Problem& problem, const GateProjection& gate, DType state);
void step(Context& context, const Problem& problem, const StepInputs& inputs, const TensorView& h, const TensorView& z,
          const TensorView& o);
bool takes_ring(const Problem& problem);
void step_with_ring(Context& context, const Problem& problem, const StepInputs& inputs, const Ring& ring,
                    const TensorView& h, const TensorView& o);
void fold(Context& context, const Ring& ring, const TensorView& h, const TensorView& to);

// ---- what plans are made of ----

// Of a call; the forward has no gradients.
struct Tensors {
  Inputs in;
  Outputs out;
  OutputGradients d_out;
  InputGradients d_in;
};
// What is left of a call once some of it has been dealt with, as a function that the caller hands down.
using RestOfCall = std::function<void(const Tensors&)>;

// Copies of tensors whose rows the kernels by chunks cannot move, before and after those (aligned_rows/README.md):
// around calls whose plan moves pieces. Tensors that can be moved as they are stay. `rest` is called once with tensors
// as wide as with_aligned_rows(problem) has them (plan.h), in planning mode too. Workspace from context.scratch(), as
// that of all below.
void run_with_aligned_rows(Context& context, const Problem& problem, const Tensors& tensors, const RestOfCall& rest);

// Feature maps and the normaliser, around calls whose plan has features (features/README.md): `rest` is called once
// with what is left of the call, without_features(problem) (plan.h), in planning mode too.
void forward_through_features(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                              const RestOfCall& rest);
// Reads outputs.o with a normaliser.
void backward_through_features(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                               const OutputGradients& d_out, const InputGradients& d_in, const RestOfCall& rest);

// f16 and f32 by chunks, in tiles of f32 (f32_tiles/README.md); bf16 with gates over values (value_gates/README.md).
// Identity features, no normaliser; aligned rows, any gates. States, images of split tiles [chunks, G, key tiles, value
// tiles] of 16 or 24 KiB each (bf16: 8), are kept where params.states is given. params as plan_chunks leaves them.
void forward_in_f32_tiles(Context& context, const Plan& plan, const Params& params);
void backward_in_f32_tiles(Context& context, const Plan& plan, const Params& params, const OutputGradients& d_out,
                           const InputGradients& d_in);

// Scalar gates where all heads have the same q and k, and dq and dk are sums over the heads (shared_keys/README.md).
// Rows of every tensor are multiples of 16 bytes; Error where they are not.
void forward_with_shared_keys(Context& context, const Plan& plan, Params params, const Outputs& outputs);
void backward_with_shared_keys(Context& context, const Plan& plan, Params params, const OutputGradients& d_out,
                               const InputGradients& d_in);

// Token by token in f32, for whatever the table's rows take. o, ht, zt and states as far as params names them.
void recurrent_forward(Context& context, const Params& params);
void recurrent_backward(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
                        const OutputGradients& d_out, const InputGradients& d_in);

// A forward in pairs of tokens (parallel/README.md): gates over keys, no normaliser. Tensors as they lie.
void parallel_forward(Context& context, const Params& params);

}  // namespace flashgla::ops::gated_linear_attention::cuda
