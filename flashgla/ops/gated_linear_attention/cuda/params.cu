// Views to Params, and the numbering of chunks of packed sequences.
#include "flashgla/base/cuda/check.h"
#include "flashgla/ops/gated_linear_attention/cuda/common.cuh"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr int kPlanThreads = 1024;

// begin[n] = sum over m < n of ceil(length_m / 64), by one block: a scan over rounds of kPlanThreads sequences.
__global__ void plan_chunks_kernel(Sequences s, std::int64_t* begin) {
  __shared__ std::int64_t sums[2][kPlanThreads];
  std::int64_t before = 0;
  for (std::int64_t first = 0; first < s.count; first += kPlanThreads) {
    const std::int64_t n = first + threadIdx.x;
    std::int64_t mine = 0;
    if (n < s.count) mine = (sequence_start(s, n + 1) - sequence_start(s, n) + kChunk - 1) / kChunk;
    int current = 0;
    sums[0][threadIdx.x] = mine;
    __syncthreads();
    for (int step = 1; step < kPlanThreads; step *= 2) {
      std::int64_t sum = sums[current][threadIdx.x];
      if (static_cast<int>(threadIdx.x) >= step) sum += sums[current][threadIdx.x - step];
      sums[current ^ 1][threadIdx.x] = sum;
      current ^= 1;
      __syncthreads();
    }
    if (n < s.count) begin[n] = before + sums[current][threadIdx.x] - mine;
    before += sums[current][kPlanThreads - 1];
    __syncthreads();
  }
  if (threadIdx.x == 0) begin[s.count] = before;
}

}  // namespace

Strided strided(const TensorView& view) {
  if (!view) return {};
  return {view.data, view.stride[0], view.stride[1], view.stride[2]};
}
Strided strided_gate(GateKind gate, const TensorView& view) {
  return view && gate == GateKind::constant ? Strided{view.data, 0, 0, view.stride[0]} : strided(view);
}

Params make_params(const Problem& problem, const Inputs& inputs, const Outputs& outputs) {
  Params p;
  p.q = strided(inputs.q);
  p.k = strided(inputs.k);
  p.v = strided(inputs.v);
  p.g = strided_gate(problem.gate, inputs.g);
  p.gv = strided(inputs.gv);
  p.o = strided(outputs.o);
  p.h0 = inputs.h0.data;
  p.z0 = inputs.z0.data;
  p.ht = outputs.ht.data;
  p.zt = outputs.zt.data;
  p.states = outputs.states.data;
  p.sequences.count = problem.sequences;
  p.sequences.length = problem.length;
  p.sequences.packed = problem.packed;
  p.sequences.longest = problem.packed ? problem.max_seqlen : problem.length;
  p.sequences.cu_seqlens = inputs.cu_seqlens.data;
  p.sequences.wide = inputs.cu_seqlens && inputs.cu_seqlens.dtype == DType::i64;
  p.sequences.most_chunks = most_chunks(problem);
  p.heads = static_cast<int>(problem.heads);
  p.group = static_cast<int>(problem.group());
  p.key_dim = static_cast<int>(problem.key_dim);
  p.value_dim = static_cast<int>(problem.value_dim);
  p.gate = problem.gate;
  p.feature_map = problem.feature_map;
  p.dtype = problem.dtype;
  p.gate_dtype = problem.gate_dtype;
  p.normalize = problem.normalize;
  p.scale = static_cast<float>(problem.scale);
  p.logit_scale = problem.has_logits() ? static_cast<float>(1.0 / problem.gate_logit_normalizer) : 0.0f;
  p.gate_min = static_cast<float>(problem.gate_clamp_min);
  return p;
}

bool finds_states(const Problem& p, bool hopper) {
  const bool gate_fits = p.gate == GateKind::none || p.gate == GateKind::constant || p.gate == GateKind::scalar;
  return hopper && backward_in_chunks(p) && gate_fits && p.key_dim <= kTile && p.value_dim <= kTile && p.group() == 1;
}

void space_states(Params& params, const Problem& problem, bool hopper, bool one_kernel) {
  const bool narrow = params.key_dim <= kTile && params.value_dim <= kTile;
  params.states_every_log2 = !narrow ? 1 : !finds_states(problem, hopper) ? 0 : one_kernel ? kFoundEveryLog2 : 1;
  params.states_mask = params.states_every() - 1;
}

std::int64_t most_chunks(const Problem& problem) {
  const std::int64_t each = (problem.length + kChunk - 1) / kChunk;
  // Each packed sequence but the first may waste part of one chunk.
  return problem.packed ? problem.length / kChunk + problem.sequences : problem.batch * each;
}

void plan_chunks(Context& context, Params& params) {
  if (params.sequences.cu_seqlens == nullptr) return;
  auto* begin = static_cast<std::int64_t*>(context.scratch().allocate(
      static_cast<std::size_t>(params.sequences.count + 1) * sizeof(std::int64_t), "gla: chunk numbers"));
  params.sequences.chunk_begin = begin;
  if (context.planning()) return;
  plan_chunks_kernel<<<1, kPlanThreads, 0, static_cast<cudaStream_t>(context.stream())>>>(params.sequences, begin);
  flashgla::cuda::check_launch("plan_chunks");
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
