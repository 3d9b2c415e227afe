// The forward in parallel form: workspace and launches.
#include "flashgla/base/cuda/launch.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/parallel/parallel.cuh"

namespace flashgla::ops::gated_linear_attention::cuda {

void parallel_forward(Context& context, const Params& p) {
  const ArenaScope scope(context.scratch());
  // With rows beside the tokens for states that are given or wanted.
  ParallelCall c{.p = p, .before = p.h0 != nullptr ? p.key_dim : 0, .after = p.ht != nullptr ? p.key_dim : 0};
  const Sequences& s = p.sequences;
  const std::int64_t heads = p.heads * p.group;
  c.rows = s.tokens() + s.count * (c.before + c.after);
  c.queries = take<float>(context, heads * c.rows * p.key_dim * 4, "gla parallel: decayed queries");
  c.keys = take<float>(context, heads * c.rows * p.key_dim * 4, "gla parallel: decayed keys");
  c.decays = take<float>(context, (c.rows / kParallelRows + s.count) * heads * p.key_dim * 4, "gla parallel: decays");
  // Heads of all sequences, and tiles of their rows: packed ones may all be as long as their sum.
  const std::int64_t rows = c.before + s.length + c.after;
  dim3 blocks(static_cast<unsigned>(s.count * heads),
              static_cast<unsigned>((rows + kParallelRows - 1) / kParallelRows));
  if (context.planning() || blocks.x == 0 || blocks.y == 0) return;
  const auto run = [&](void (*kernel)(ParallelCall)) {
    flashgla::cuda::launch("gated_linear_attention in parallel form", kernel, blocks, kParallelThreads, 0,
                           static_cast<cudaStream_t>(context.stream()), flashgla::cuda::Begin::after_previous, c);
  };
  run(parallel_prepare_kernel);
  const int columns = p.value_dim > 128 ? 256 : 128;
  blocks.z = static_cast<unsigned>((p.value_dim + columns - 1) / columns);
  run(columns == 256 ? parallel_form_kernel<256> : parallel_form_kernel<128>);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
