// The backward as its plan has it: workspace, order of launches.
#include "flashgla/base/cuda/check.h"
#include "flashgla/ops/gated_linear_attention/cuda/backward/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/common.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"
#include "flashgla/ops/gated_linear_attention/logits.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr int kSumThreads = 256;

// Whether the gradients are not these kernels' to make: there are no chunks for them. Null: they are.
__device__ __forceinline__ bool is_idle(const std::int64_t* chunks) { return chunks != nullptr && *chunks == 0; }

// Scalar gates: dg of token t and head is the sum over the key tiles.
__global__ void sum_scalar_gates(const __grid_constant__ Params p, const float* parts,
                                 const __grid_constant__ Strided dg, std::int64_t tokens, int key_tiles,
                                 const std::int64_t* chunks) {
  if (is_idle(chunks)) return;
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * kSumThreads + threadIdx.x;
  if (at >= tokens * p.heads) return;
  float sum = 0.0f;
  for (int tile = 0; tile < key_tiles; ++tile) sum += parts[tile * tokens * p.heads + at];
  const std::int64_t token = at / p.heads, head = at % p.heads, length = p.sequences.length;
  const std::int64_t batch = p.sequences.cu_seqlens ? 0 : token / length,
                     row = p.sequences.cu_seqlens ? token : token % length;
  store_as(p.gate_dtype, dg.data, batch * dg.batch + row * dg.token + head * dg.head, sum);
}

// Constant gates: one block a head sums over all rows.
__global__ void sum_constant_gates(const float* parts, float* dg, std::int64_t dg_stride, std::int64_t rows, int heads,
                                   const std::int64_t* chunks) {
  if (is_idle(chunks)) return;
  __shared__ double shared[32];
  double sum = 0.0;
  for (std::int64_t r = threadIdx.x; r < rows; r += kSumThreads) sum += parts[r * heads + blockIdx.x];
  sum = flashgla::cuda::block_sum(sum, shared);
  if (threadIdx.x == 0) dg[blockIdx.x * dg_stride] = static_cast<float>(sum);
}

template <class Core>
void backward_in_one_kernel(Context& context, const Plan& plan, Params p, const OutputGradients& d_out,
                            const InputGradients& d_in) {
  const Problem& problem = plan.problem;
  FusedBackward f{gradients_of(problem, d_out, d_in), static_cast<const float*>(d_out.d_ht.data),
                  static_cast<float*>(d_in.dh0.data), nullptr};
  const std::int64_t walks = problem.sequences * problem.heads;
  if (problem.gate == GateKind::constant) {
    f.gate_parts = take<float>(context, walks * 4, "gla backward: gate parts");
  }
  Params states_only = p;
  if (plan.finds_states) {
    p.states = states_only.states = take(context, p.states_bytes(), "gla backward: states");
    // o is not wanted again: all sequences and heads write it to one place that nothing reads.
    states_only.o = {take(context, problem.length * p.value_dim * 2, "gla backward: unread o"), 0, p.value_dim, 0};
    states_only.ht = nullptr;
  }
  if (context.planning()) return;
  const auto stream = static_cast<cudaStream_t>(context.stream());
  if (plan.finds_states) launch_fused<Core>(context, states_only, {plan.groups, false, plan.features});
  with_gates_of<false>(p, [&]<GatesAs kGate>() {
    BackwardLaunch<Core, kGate>::one_kernel(p, f, context.architecture().multiprocessors, stream);
  });
  if (d_in.dg && problem.gate == GateKind::constant)
    launch_gate_sums(p, f.gate_parts, problem.sequences, 1, f.gradients.dg, stream);
}

template <class Core>
void backward_by_chunks(Context& context, const Plan& plan, Params p, const OutputGradients& d_out,
                        const InputGradients& d_in) {
  const Problem& problem = plan.problem;
  const std::int64_t chunks = p.sequences.most_chunks, heads = problem.heads, key_tiles = tiles_of(p.key_dim);
  const TwoPasses passes(context, p, plan, true);
  const std::int64_t state_bytes = p.states_bytes();
  BackwardWorkspace w{};
  w.prepared = passes.prepared;
  w.state_gradients = take(context, state_bytes, "gla backward: state gradients");
  const bool constant = problem.gate == GateKind::constant, of_tokens = constant || problem.gate == GateKind::scalar;
  const bool sums_gates = d_in.dg && of_tokens;
  const std::int64_t gate_rows = constant ? chunks : p.sequences.tokens();
  const std::int64_t gate_tiles = key_tiles + (constant ? problem.group() : 0);
  if (of_tokens) {
    w.gate_parts = take<float>(context, gate_tiles * gate_rows * heads * 4, "gla backward: gate parts");
  }
  if (plan.finds_states) p.states = take(context, state_bytes, "gla backward: states");
  if (context.planning()) return;

  const Gradients d = gradients_of(problem, d_out, d_in);
  const auto stream = static_cast<cudaStream_t>(context.stream());

  if (!passes.is_prepared) launch_forward_prepare<Core>(context, p, passes.prepared);
  if (plan.finds_states) {
    Recurrence run = run_of(p, passes, false);
    run.x = p.v;
    run.start = static_cast<const float*>(p.h0);
    run.states = static_cast<char*>(p.states);
    launch_recurrence<Core>(stream, p, passes, run, false);
  }
  Recurrence run = run_of(p, passes, true);
  run.x = d.d_o;
  run.out = d.dv;
  run.start = static_cast<const float*>(d_out.d_ht.data);
  run.end = static_cast<float*>(d_in.dh0.data);
  run.states = w.state_gradients;
  launch_recurrence<Core>(stream, p, passes, run, true);
  if (chunks > 0) {
    with_gates_of<false>(p, [&]<GatesAs kGate>() {
      using Launch = BackwardLaunch<Core, kGate>;
      if (d_in.dq || d_in.dk || d_in.dg) Launch::dq_dk_dg(p, w, d, context.architecture().multiprocessors, stream);
      if (sums_gates && constant) Launch::constant_gate_pairs(p, w, d.d_o, stream);
    });
  }
  if (sums_gates) {
    launch_gate_sums(p, w.gate_parts, gate_rows, static_cast<int>(gate_tiles), d.dg, stream,
                     p.sequences.may_be_idle ? p.sequences.chunk_begin + p.sequences.count : nullptr);
  }
}

}  // namespace

Gradients gradients_of(const Problem& problem, const OutputGradients& d_out, const InputGradients& d_in) {
  return {strided(d_out.d_o), strided(d_in.dq), strided(d_in.dk), strided(d_in.dv),
          strided_gate(problem.gate, d_in.dg)};
}

void launch_gate_sums(const Params& p, const float* parts, std::int64_t rows, int tiles, const Strided& dg,
                      cudaStream_t stream, const std::int64_t* chunks) {
  if (p.gate == GateKind::scalar) {
    const std::int64_t blocks = (rows * p.heads + kSumThreads - 1) / kSumThreads;
    if (blocks == 0) return;
    sum_scalar_gates<<<static_cast<unsigned>(blocks), kSumThreads, 0, stream>>>(p, parts, dg, rows, tiles, chunks);
  } else {
    sum_constant_gates<<<p.heads, kSumThreads, 0, stream>>>(parts, static_cast<float*>(dg.data), dg.head, rows * tiles,
                                                            p.heads, chunks);
  }
  flashgla::cuda::check_launch("gated_linear_attention gate sums");
}

namespace {

void run_form(Context& context, const Plan& plan, Params params, const OutputGradients& d_out,
              const InputGradients& d_in) {
  const ArenaScope scope(context.scratch());
  set_spacing(params, plan.backward_every_log2);
  switch (plan.backward) {
    case BackwardForm::tokens:  // not given to kernels that read what the plan leaves
      return;
    case BackwardForm::token_gates:
    case BackwardForm::key_gates:
      return with_core(plan.hopper,
                       [&]<class Core>() { backward_in_one_kernel<Core>(context, plan, params, d_out, d_in); });
    case BackwardForm::chunks:
      return with_core(plan.hopper,
                       [&]<class Core>() { backward_by_chunks<Core>(context, plan, params, d_out, d_in); });
    case BackwardForm::f32_tiles:
    case BackwardForm::value_gates:
      return backward_in_f32_tiles(context, plan, params, d_out, d_in);
    case BackwardForm::shared_keys:
      return backward_with_shared_keys(context, plan, params, d_out, d_in);
  }
}

void run_kernels(Context& context, const Plan& plan, const Inputs& inputs, const Outputs& outputs,
                 const OutputGradients& d_out, const InputGradients& d_in) {
  const ArenaScope scope(context.scratch());
  Params params = make_params(plan, inputs, outputs);
  if (plan.backward_up_to == 0) {
    plan_chunks(context, params);
    return run_form(context, plan, params, d_out, d_in);
  }
  const ByLength by_length = plan_chunks_by_length(context, params, plan.backward_up_to);
  OutputGradients d_longer = d_out;
  InputGradients d_up_to = d_in;
  if (d_in.dh0) d_longer.d_ht.data = d_up_to.dh0.data = take_states(context, plan.problem, "gla: gradients passed on");
  run_form(context, of_short_sequences(plan), by_length.up_to, d_out, d_up_to);
  run_form(context, of_long_sequences(plan), by_length.longer, d_longer, d_in);
}

}  // namespace

void backward(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs,
              const OutputGradients& d_out, const InputGradients& d_in, bool hopper) {
  const Layout layout = layout_of(problem, inputs, {.states = outputs.states});
  const Plan plan = plan_of_call(problem, layout, context.architecture(), hopper);
  check_states_tag(context, plan, outputs.states);
  const auto kernels = [&](const Tensors& t) { run_kernels(context, plan, t.in, t.out, t.d_out, t.d_in); };
  const auto rows = [&](const Problem& p, const Tensors& t) {
    if (plan.backward == BackwardForm::tokens) return recurrent_backward(context, p, t.in, t.out, t.d_out, t.d_in);
    const Tensors read{t.in, {.states = t.out.states}, t.d_out, t.d_in};
    plan.pieces ? run_with_aligned_rows(context, p, read, kernels) : kernels(read);
  };
  const auto features = [&](const Problem& p, const Inputs& in, const Outputs& out, const OutputGradients& d,
                            const InputGradients& to) {
    if (!plan.features) return rows(p, {in, out, d, to});
    backward_through_features(context, p, in, out, d, to, [&](const Tensors& t) { rows(without_features(p), t); });
  };
  plan.gates ? backward_with_gates(context, problem, without_logits(problem), inputs, outputs, d_out, d_in, features)
             : features(problem, inputs, outputs, d_out, d_in);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
