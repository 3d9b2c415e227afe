// Preparation, segments, recurrence: workspace, plan, launches, and the forward made of them.
#include <utility>

#include "flashgla/base/context.h"
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/estimates.h"
#include "flashgla/ops/gated_linear_attention/cuda/forward/two_pass.h"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"

namespace flashgla::ops::gated_linear_attention::cuda {

RowMap q_map(const Params& p) { return row_map_of(p, p.q, p.heads * p.group, p.key_dim); }
RowMap k_map(const Params& p) { return row_map_of(p, p.k, p.heads, p.key_dim); }

namespace {

// But for P: place(bytes, label) says where each part lies; P^T where it is wanted.
template <class Place>
Prepared prepared_at(const Params& p, const Plan& plan, bool wants_transposed, const Place& place) {
  const std::int64_t chunks = p.sequences.most_chunks, query_heads = p.heads * p.group;
  Prepared out;
  out.plain = plan.plain;
  out.blocks = tiles_of(p.key_dim);
  if (!plan.plain) {
    out.q = place(chunks * query_heads * out.blocks * kImageBytes, "gla: gated q");
    out.k = place(chunks * p.heads * out.blocks * kImageBytes, "gla: gated k");
    out.decay = reinterpret_cast<float*>(place(chunks * p.heads * out.blocks * kTile * 4, "gla: chunk decays"));
    out.scale = p.scale;
  }
  if (wants_transposed) out.transposed_scores = place(chunks * query_heads * kImageBytes, "gla: scores");
  return out;
}

}  // namespace

Prepared kept_prepared(const Params& p, const Plan& plan) {
  char* at = static_cast<char*>(p.states) + p.states_bytes();
  return prepared_at(p, plan, true, [&](std::int64_t bytes, const char*) { return std::exchange(at, at + bytes); });
}

TwoPasses::TwoPasses(Context& context, const Params& p, const Plan& plan, bool backwards)
    : is_prepared(false), parts(nullptr), shared_memory(static_cast<int>(context.architecture().shared_memory)) {
  const std::int64_t chunks = p.sequences.most_chunks, heads = p.heads, query_heads = heads * p.group;
  if (p.states != nullptr && plan.states.has_prepared()) {
    prepared = kept_prepared(p, plan);
    is_prepared = backwards;
  } else {
    prepared = prepared_at(p, plan, backwards,
                           [&](std::int64_t bytes, const char* label) { return take(context, bytes, label); });
  }
  if (!backwards) prepared.scores = take(context, chunks * query_heads * kImageBytes, "gla: scores");

  const int blocks = prepared.blocks;
  blocks_each = blocks_of_launch(blocks);
  if (recurrence_launches(blocks) > 1) {
    const std::int64_t tiles = chunks * (backwards ? heads : query_heads) * tiles_of(p.value_dim);
    parts = take<float>(context, tiles * kTile * kTile * 4, "gla: parts of outputs");
  }
  const TimeCut& cut = backwards ? plan.backward_cut : plan.forward_cut;
  segments.count = cut.segments;
  segments.chunks = cut.chunks;
  if (segments.count > 1) {
    const std::int64_t states = segments.joins(p.sequences) * heads;
    const std::int64_t state_bytes = blocks * tiles_of(p.value_dim) * (kTile * kTile * 4);
    segments.decays = take<float>(context, states * blocks * 64 * 4, "gla: segment decays");
    segments.ends = take<float>(context, states * state_bytes, "gla: segment ends");
    segments.starts = take<float>(context, states * state_bytes, "gla: segment starts");
  }
}

Recurrence run_of(const Params& p, const TwoPasses& passes, bool backwards) {
  const Prepared& prepared = passes.prepared;
  Recurrence run;
  run.backwards = backwards;
  run.read = backwards ? prepared.k : prepared.q;
  run.write = backwards ? prepared.q : prepared.k;
  run.scores = backwards ? prepared.transposed_scores : prepared.scores;
  run.decay = prepared.decay;
  if (prepared.plain) {
    const RowMap q = q_map(p), k = k_map(p);
    run.read_rows = backwards ? k : q;
    run.write_rows = backwards ? q : k;
    run.out_scale = p.scale;
    if (backwards) {  // the walk's state is a gradient over the scale
      run.start_scale = 1.0f / p.scale;
      run.end_scale = p.scale;
    }
  }
  return run;
}

void forward_in_two_passes(Context& context, const Params& p, const Plan& plan) {
  const ArenaScope scope(context.scratch());
  const TwoPasses passes(context, p, plan, false);
  if (context.planning()) return;
  Recurrence run = run_of(p, passes, false);
  run.x = p.v;
  run.out = p.o;
  run.start = static_cast<const float*>(p.h0);
  run.end = static_cast<float*>(p.ht);
  run.states = static_cast<char*>(p.states);
  with_core(plan.hopper, [&]<class Core>() {
    launch_forward_prepare<Core>(context, p, passes.prepared);
    launch_recurrence<Core>(static_cast<cudaStream_t>(context.stream()), p, passes, run, true);
  });
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
