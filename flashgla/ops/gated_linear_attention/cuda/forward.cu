// Rows of the table: what they take, and how forward is put together from the kernels.
#include <cstdlib>

#include "flashgla/base/cuda/check.h"
#include "flashgla/ops/gated_linear_attention/cuda/aligned_rows/aligned_rows.h"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/estimates.h"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/f32_tiles.h"
#include "flashgla/ops/gated_linear_attention/cuda/features/features.h"
#include "flashgla/ops/gated_linear_attention/cuda/forward/two_pass.h"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/value_gates/value_gates.h"
#include "flashgla/ops/gated_linear_attention/logits.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr std::int64_t kMostKeys = 512;
constexpr std::int64_t kTooLong = std::int64_t{1} << 31;  // tokens: the copy engine counts them in 32 bits
constexpr std::int64_t kFewChannels =
    8;  // below, a tile is mostly padding and bf16 operands have nothing to average over
constexpr std::int64_t kShortSequence = 16;  // mean tokens a sequence up to which a chunk is mostly empty

Support supports(const Problem& p) {
  if (p.dtype != DType::f32 && p.dtype != DType::bf16 && p.dtype != DType::f16) {
    return Support::no(std::string("takes f32, bf16 and f16, not ") + name_of(p.dtype));
  }
  if (p.key_dim > kMostKeys || p.value_dim > kMostKeys) {
    return Support::no("takes K and V up to 512, not K " + std::to_string(p.key_dim) + ", V " +
                       std::to_string(p.value_dim));
  }
  if (p.length >= kTooLong) return Support::no("takes less than 2^31 tokens, not " + std::to_string(p.length));
  if (p.algorithm == Algorithm::parallel) return Support::no("has no parallel form");
  if (p.has_logits() && p.gate_dtype == DType::f16) return Support::no("takes logits in f32 and bf16, not f16");
  return Support::yes();
}

// Whether 31 bits count what lies between a tensor's first element and its last: pieces of 8 elements, or elements.
bool fits_31_bits(const Params& p, const Strided& s, std::int64_t heads, std::int64_t elements) {
  const std::int64_t batches = p.sequences.packed ? 1 : p.sequences.count;
  const std::int64_t extent = (batches - 1) * std::abs(s.batch) + (p.sequences.length + kChunk) * std::abs(s.token) +
                              (heads - 1) * std::abs(s.head);
  return extent < elements * (std::int64_t{1} << 31);
}

// Whether narrow heads can go in one pass.
bool fits_one_pass(const Problem& p, const Params& params) {
  const std::int64_t heads = params.heads, query_heads = heads * params.group;
  return params.fit_one_pass() && (p.gate != GateKind::key || p.gate_dtype == DType::bf16) &&
         fits_31_bits(params, params.q, query_heads, 8) && fits_31_bits(params, params.k, heads, 8) &&
         fits_31_bits(params, params.v, heads, 8) && fits_31_bits(params, params.o, query_heads, 8) &&
         fits_31_bits(params, params.g, heads, p.gate == GateKind::key ? 8 : 1) &&
         params.states_bytes() < std::int64_t{1} << 35;
}

// The same for wider heads, up to two key tiles, on Hopper, where no states are kept: what the backward wants beside
// them is not made on the way.
bool fits_one_wide_pass(const Problem& p, const Params& params) {
  return params.states == nullptr && params.key_dim <= 2 * kTile &&
         (p.gate != GateKind::key || p.gate_dtype == DType::bf16);
}

}  // namespace

bool goes_by_chunks(const Problem& p) {
  const bool has_its_own = p.gate == GateKind::key_value && p.dtype == DType::bf16;  // gates_values_by_chunks
  return !has_its_own && p.feature_map == FeatureMap::identity && !p.normalize && p.key_dim >= kFewChannels &&
         p.value_dim >= kFewChannels && p.algorithm != Algorithm::recurrent &&
         p.batch * p.length > kShortSequence * p.sequences;
}

bool turns_logits(const Problem& p) {
  return p.gate == GateKind::key && p.gate_dtype == DType::bf16 && goes_by_chunks(p) && backward_in_chunks(p);
}
Problem with_gates_on_cuda(const Problem& p) {
  return p.gate_dtype == DType::bf16 ? with_gates(p, DType::bf16) : with_gates(p);
}

bool forward_fits_one_pass(const Problem& problem, const Params& params) {
  return goes_by_chunks(problem) && problem.dtype == DType::bf16 && fits_one_pass(problem, params);
}

namespace {

// What the backward by chunks finds beside the states, after a forward that has no use for it itself.
void keep_prepared(Context& context, const Problem& problem, const Params& params, bool hopper) {
  if (params.states == nullptr || !params.keeps_prepared() || !backward_in_chunks(problem) || context.planning())
    return;
  const Prepared kept = kept_prepared(params, hopper);
  hopper ? launch_preparation<TensorCore90>(context, params, kept)
         : launch_preparation<TensorCore80>(context, params, kept);
}

void run(Context& context, const Problem& problem, const Params& params, bool hopper) {
  const bool chunks = goes_by_chunks(problem);
  if (chunks && problem.dtype == DType::bf16) {
    switch (fastest_form(params, fits_one_pass(problem, params), hopper && fits_one_wide_pass(problem, params),
                         context.architecture().multiprocessors)) {
      case Form::one_pass:
        if (!context.planning()) launch_fused(context, params, hopper);
        break;
      case Form::one_wide_pass:
        if (!context.planning()) launch_wide_forward(context.stream(), params);
        break;
      case Form::two_passes:
        forward_in_two_passes(context, params, hopper);
    }
  } else if (chunks) {
    forward_in_f32_tiles(context, problem, params, hopper);
  } else {
    Params by_token = params;
    if (!backward_in_chunks(problem)) by_token.states = nullptr;  // laid out for kernels that cannot take this call
    if (!context.planning() && by_token.states != nullptr) {      // these kernels write what lies within K and V
      flashgla::cuda::check(cudaMemsetAsync(by_token.states, 0, static_cast<std::size_t>(params.states_bytes()),
                                            static_cast<cudaStream_t>(context.stream())),
                            "gated_linear_attention states");
    }
    if (!context.planning()) launch_recurrent(context.stream(), by_token);
    keep_prepared(context, problem, by_token, hopper);
  }
}

void forward(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs, bool hopper) {
  if (problem.has_logits() && !(hopper && turns_logits(problem) && has_aligned_rows(problem, inputs, outputs))) {
    return forward_with_gates(
        context, problem, with_gates_on_cuda(problem), inputs, outputs,
        [&](const Problem& p, const Inputs& in, const Outputs& out) { forward(context, p, in, out, hopper); });
  }
  if (goes_through_features(problem)) {
    return forward_through_features(
        context, problem, inputs, outputs,
        [&](const Problem& p, const Inputs& in, const Outputs& out) { forward(context, p, in, out, hopper); });
  }
  if (!has_aligned_rows(problem, inputs, outputs)) {
    return forward_with_aligned_rows(
        context, problem, inputs, outputs,
        [&](const Problem& p, const Inputs& in, const Outputs& out) { forward(context, p, in, out, hopper); });
  }
  if (gates_values_by_chunks(problem)) return forward_with_value_gates(context, problem, inputs, outputs, hopper);
  Params params = make_params(problem, inputs, outputs);
  space_states(params, problem, hopper, one_kernel_is_faster(params, context.architecture().multiprocessors));
  plan_chunks(context, params);
  run(context, problem, params, hopper);
}

}  // namespace

Support portable_supports(const Problem& problem, const Architecture& architecture) {
  if (architecture.cuda_capability < 80) {
    return Support::no("needs compute capability 8.0, not " + std::to_string(architecture.cuda_capability / 10) + "." +
                       std::to_string(architecture.cuda_capability % 10));
  }
  return supports(problem);
}

static std::size_t states_bytes(const Problem& any, bool hopper) {
  if (goes_through_features(any)) return states_bytes(without_features(any), hopper);
  const Problem problem = with_aligned_rows(any);
  if (problem.algorithm == Algorithm::chunk_recomputed) return 0;
  if (gates_values_by_chunks(problem)) return value_gates_states_bytes(problem);
  if (goes_by_chunks(problem) && problem.dtype != DType::bf16) return split_states_bytes(problem);
  if (!backward_in_chunks(problem)) return 0;
  Params params = make_params(problem, {}, {});
  space_states(params, problem, hopper, false);  // which takes more
  return static_cast<std::size_t>(params.states_bytes() + kept_prepared_bytes(params, hopper));
}

std::size_t portable_states_bytes(const Problem& problem) { return states_bytes(problem, false); }
void portable_forward(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs) {
  forward(context, problem, inputs, outputs, false);
}

Support hopper_supports(const Problem& problem, const Architecture& architecture) {
  if (architecture.cuda_capability != 90) return Support::no("needs compute capability 9.0 exactly");
  return supports(problem);
}

std::size_t hopper_states_bytes(const Problem& problem) { return states_bytes(problem, true); }
void hopper_forward(Context& context, const Problem& problem, const Inputs& inputs, const Outputs& outputs) {
  forward(context, problem, inputs, outputs, true);
}

}  // namespace flashgla::ops::gated_linear_attention::cuda
