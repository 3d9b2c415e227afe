// What goes to this folder's kernels, workspace and launches.
#include <algorithm>

#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/aligned_rows/aligned_rows.h"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/gradients_by_role.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/outputs.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/shared_keys/shared_keys.h"
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

std::int64_t tokens_of(const Problem& problem) { return problem.batch * problem.length; }

template <bool kBackwards>
void queue_walk(const Params& p, const Walk& walk, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(p.heads * tiles_of(p.key_dim)), static_cast<unsigned>(p.sequences.count));
  launch("gated_linear_attention shared keys", walk_kernel<kBackwards>, blocks, kGroupThreads, kWalkBytes, stream,
         Begin::after_previous, p, walk);
}

template <int kTiles>
void queue_outputs(const Params& p, int multiprocessors, cudaStream_t stream) {
  const int splits = splits_of(p, kOutputsBlocks, multiprocessors);
  launch("gated_linear_attention shared keys", outputs_kernel<kTiles>,
         dim3(static_cast<unsigned>(p.sequences.most_chunks), static_cast<unsigned>(splits)), kGroupThreads,
         OutputsPlan<kTiles>::bytes, stream, Begin::after_previous, p, p.heads / splits);
}

template <int kTiles>
void queue_gradients(const Params& p, const ChunkGradients& d, int splits, bool hopper, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(p.sequences.most_chunks), static_cast<unsigned>(splits));
  const auto queue = [&](auto* kernel, int threads, int bytes) {
    launch("gated_linear_attention shared keys", kernel, blocks, threads, bytes, stream, Begin::after_previous, p, d,
           p.heads / splits);
  };
  if (hopper) {
    queue(gradients_by_role_kernel<TensorCore90, kTiles>, ByRole<kTiles>::threads, ByRole<kTiles>::total);
  } else {
    queue(gradients_kernel<kTiles>, kGradientThreads, kGradientBytes<kTiles>);
  }
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
  if (p.states == nullptr) {
    p.states = context.scratch().allocate(static_cast<std::size_t>(p.states_bytes()), "gla: states");
  }
  if (context.planning() || p.sequences.most_chunks == 0) return;
  const auto stream = static_cast<cudaStream_t>(context.stream());
  const int multiprocessors = context.architecture().multiprocessors;
  queue_walk<false>(
      p, {p.k, p.v, static_cast<const float*>(p.h0), static_cast<float*>(p.ht), static_cast<char*>(p.states)}, stream);
  p.key_dim == kTile ? queue_outputs<1>(p, multiprocessors, stream) : queue_outputs<2>(p, multiprocessors, stream);
}

void backward_with_shared_keys(Context& context, const Plan& plan, Params p, const OutputGradients& d_out,
                               const InputGradients& d_in) {
  check_rows(!plan.rows && is_aligned(d_out.d_o) && is_aligned(d_in.dq) && is_aligned(d_in.dk) && is_aligned(d_in.dv));
  const Problem& problem = plan.problem;
  const auto take = [&](std::int64_t bytes, const char* label) {
    return context.scratch().allocate(static_cast<std::size_t>(bytes), label);
  };
  if (plan.finds_states) p.states = take(p.states_bytes(), "gla backward: states");
  auto* const state_gradients = static_cast<char*>(take(p.states_bytes(), "gla backward: state gradients"));
  const std::int64_t tokens = tokens_of(problem);
  const int splits = splits_of(p, 1, context.architecture().multiprocessors);
  const std::int64_t part_bytes = splits * tokens * p.key_dim * static_cast<std::int64_t>(sizeof(float));
  auto* const dq = static_cast<float*>(take(part_bytes, "gla backward: parts of dq and dk"));
  auto* const dk = static_cast<float*>(take(part_bytes, "gla backward: parts of dq and dk"));
  if (context.planning() || p.sequences.most_chunks == 0) return;

  const auto stream = static_cast<cudaStream_t>(context.stream());
  const Gradients d = gradients_of(problem, d_out, d_in);
  if (plan.finds_states) {
    queue_walk<false>(p, {p.k, p.v, static_cast<const float*>(p.h0), nullptr, static_cast<char*>(p.states)}, stream);
  }
  queue_walk<true>(
      p, {p.q, d.d_o, static_cast<const float*>(d_out.d_ht.data), static_cast<float*>(d_in.dh0.data), state_gradients},
      stream);
  const ChunkGradients chunks{d.d_o, d.dv, d.dg, state_gradients, dq, dk, tokens};
  p.key_dim == kTile ? queue_gradients<1>(p, chunks, splits, plan.hopper, stream)
                     : queue_gradients<2>(p, chunks, splits, plan.hopper, stream);
  const auto blocks = static_cast<unsigned>((tokens * p.key_dim / 4 + kSumThreads - 1) / kSumThreads);
  const auto sum = [&](const float* parts, const Strided& to) {
    if (to.data == nullptr) return;
    launch("gated_linear_attention shared keys", sum_splits_kernel, dim3(blocks), kSumThreads, 0, stream,
           Begin::after_previous, p, parts, to, tokens, splits);
  };
  sum(dq, d.dq);
  sum(dk, d.dk);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
