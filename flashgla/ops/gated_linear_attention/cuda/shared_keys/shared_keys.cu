// What goes to this folder's kernels, workspace and launches.
#include <cmath>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/gradients.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/outputs.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/walk.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

using namespace shared_keys;
using flashgla::cuda::Begin;
using flashgla::cuda::launch;

constexpr int kOutputsBlocks = 3;  // that a multiprocessor holds
constexpr double kOfABlock = 2.0;  // heads' time that a block's scores, and what comes after the heads, take

// Over how many blocks the heads of a chunk are split, so that multiprocessors have about the same to do.
int splits_of(const Params& p, int blocks_each, int multiprocessors) {
  const auto slots = static_cast<double>(blocks_each * multiprocessors);
  int best = 1;
  double least = 0.0;
  for (int splits = 1; splits <= p.heads; ++splits) {
    if (p.heads % splits != 0) continue;
    const double rounds = std::ceil(static_cast<double>(p.sequences.most_chunks) * splits / slots);
    const double time = rounds * (static_cast<double>(p.heads / splits) + kOfABlock);
    if (splits == 1 || time < least) {
      least = time;
      best = splits;
    }
  }
  return best;
}

// Room for sums of gates, which the forms for Hopper read; null for the others.
float* take_gate_sums(Context& context, const Plan& plan, const Params& p) {
  if (!plan.hopper) return nullptr;
  return take<float>(context, p.sequences.most_chunks * p.heads * kChunk * 4, "gla: sums of gates");
}

// Of these functions' gate_sums, null: the form on mma.sync.
template <bool kBackwards>
void queue_walk(const Params& p, const Walk& walk, const float* gate_sums, cudaStream_t stream) {
  if (gate_sums != nullptr) {
    return launch_walk_by_role(p, walk, gate_sums, kBackwards ? WalkFor::gradients : WalkFor::states, stream);
  }
  const dim3 blocks(static_cast<unsigned>(p.heads * tiles_of(p.key_dim)), static_cast<unsigned>(p.sequences.count));
  launch(kName, walk_kernel<kBackwards>, blocks, kGroupThreads, kWalkBytes, stream, Begin::after_previous, p, walk);
}

void queue_outputs(const Params& p, int multiprocessors, cudaStream_t stream) {
  const int splits = splits_of(p, kOutputsBlocks, multiprocessors);
  with_tiles(p, [&]<int kTiles>() {
    launch(kName, outputs_kernel<kTiles>, blocks_of(p, splits), kGroupThreads, OutputsPlan<kTiles>::bytes, stream,
           Begin::after_previous, p, p.heads / splits);
  });
}

void queue_gradients(const Params& p, const ChunkGradients& d, const float* gate_sums, int splits,
                     cudaStream_t stream) {
  if (gate_sums != nullptr) return launch_gradients_by_role(p, d, gate_sums, splits, stream);
  with_tiles(p, [&]<int kTiles>() {
    launch(kName, gradients_kernel<kTiles>, blocks_of(p, splits), kGradientThreads, GradientsPlan<kTiles>::bytes,
           stream, Begin::after_previous, p, d, p.heads / splits);
  });
}

void check_rows(bool aligned) {
  if (!aligned) {
    throw Error("gated_linear_attention", "sums_over_heads", "is set for rows that are no multiples of 16 bytes",
                "aligned rows of q, k, v, o and their gradients");
  }
}

}  // namespace

void forward_with_shared_keys(Context& context, const Plan& plan, Params p, const Outputs& outputs) {
  check_rows(!plan.rows && is_aligned(outputs.o));
  const ArenaScope scope(context.scratch());
  float* const gate_sums = take_gate_sums(context, plan, p);
  if (p.states == nullptr && gate_sums == nullptr) p.states = take(context, p.states_bytes(), "gla: states");
  if (context.planning() || p.sequences.most_chunks == 0) return;
  const auto stream = static_cast<cudaStream_t>(context.stream());
  const Walk walk{p.k, p.v, static_cast<const float*>(p.h0), static_cast<float*>(p.ht), static_cast<char*>(p.states)};
  if (gate_sums != nullptr) {
    launch_gate_sums(p, gate_sums, stream);
    return launch_walk_by_role(p, walk, gate_sums, WalkFor::outputs, stream);
  }
  queue_walk<false>(p, walk, nullptr, stream);
  queue_outputs(p, context.architecture().multiprocessors, stream);
}

void backward_with_shared_keys(Context& context, const Plan& plan, Params p, const OutputGradients& d_out,
                               const InputGradients& d_in) {
  check_rows(!plan.rows && is_aligned(d_out.d_o) && is_aligned(d_in.dq) && is_aligned(d_in.dk) && is_aligned(d_in.dv));
  const Problem& problem = plan.problem;
  if (plan.finds_states) p.states = take(context, p.states_bytes(), "gla backward: states");
  char* const state_gradients = take(context, p.states_bytes(), "gla backward: state gradients");
  const std::int64_t tokens = p.sequences.tokens();
  const int splits = splits_of(p, 1, context.architecture().multiprocessors);
  const std::int64_t part_bytes = splits * tokens * p.key_dim * 4;
  float* const dq = take<float>(context, part_bytes, "gla backward: parts of dq and dk");
  float* const dk = take<float>(context, part_bytes, "gla backward: parts of dq and dk");
  float* const gate_sums = take_gate_sums(context, plan, p);
  if (context.planning() || p.sequences.most_chunks == 0) return;

  const auto stream = static_cast<cudaStream_t>(context.stream());
  if (gate_sums != nullptr) launch_gate_sums(p, gate_sums, stream);
  const Gradients d = gradients_of(problem, d_out, d_in);
  if (plan.finds_states) {
    queue_walk<false>(p, {p.k, p.v, static_cast<const float*>(p.h0), nullptr, static_cast<char*>(p.states)}, gate_sums,
                      stream);
  }
  queue_walk<true>(
      p, {p.q, d.d_o, static_cast<const float*>(d_out.d_ht.data), static_cast<float*>(d_in.dh0.data), state_gradients},
      gate_sums, stream);
  const ChunkGradients chunks{d.d_o, d.dv, d.dg, state_gradients, dq, dk, tokens};
  queue_gradients(p, chunks, gate_sums, splits, stream);
  const dim3 blocks(static_cast<unsigned>((tokens * p.key_dim / 4 + kSumThreads - 1) / kSumThreads), 2);
  launch(kName, sum_splits_kernel, blocks, kSumThreads, 0, stream,
         gate_sums != nullptr ? Begin::beside_previous : Begin::after_previous, p, SplitSums{{dq, dk}, {d.dq, d.dk}},
         tokens, splits);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
