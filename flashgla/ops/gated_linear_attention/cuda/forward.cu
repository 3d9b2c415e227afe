// Rows of the table: what they take, and how forward is put together from the kernels.

#include "flashgla/base/cuda/device.h"
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/estimates.h"
#include "flashgla/ops/gated_linear_attention/cuda/f32_tiles/f32_tiles.h"
#include "flashgla/ops/gated_linear_attention/cuda/features/features.h"
#include "flashgla/ops/gated_linear_attention/cuda/forward/two_pass.h"
#include "flashgla/ops/gated_linear_attention/cuda/launch.h"
#include "flashgla/ops/gated_linear_attention/cuda/tiles/row_maps.h"
#include "flashgla/ops/gated_linear_attention/cuda/value_gates/value_gates.h"

namespace flashgla::ops::gated_linear_attention::cuda {

namespace {

constexpr std::int64_t kMostKeys = 512;
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
  if (p.algorithm == Algorithm::parallel) return Support::no("has no parallel form");
  return Support::yes();
}

// Whether the kernels whose tiles are bf16 take it.
bool in_bf16_tiles(const Problem& p, const Params& params) {
  const auto fits = [](const Strided& s, int element) { return s.token * element * kChunk < (std::int64_t{1} << 31); };
  return p.dtype == DType::bf16 && fits(params.q, 2) && fits(params.k, 2) && fits(params.v, 2) && fits(params.o, 2) &&
         fits(params.g, 4);
}

// Whether narrow heads can go in one pass.
bool fits_one_pass(const Problem& p, const Params& params) {
  return params.fit_one_pass() && (p.gate != GateKind::key || p.gate_dtype == DType::bf16);
}

// The same for wider heads, up to two key tiles, on Hopper, where no states are kept: what the backward wants beside
// them is not made on the way. Rows come by tensor maps.
bool fits_one_wide_pass(const Problem& p, const Params& params) {
  const auto mapped = [&](const Strided& s) { return has_row_map(params, s); };
  const bool gate_fits = p.gate != GateKind::key || (p.gate_dtype == DType::bf16 && mapped(params.g));
  return params.states == nullptr && params.key_dim <= 2 * kTile && params.key_dim % 8 == 0 &&
         params.value_dim % 8 == 0 && gate_fits && mapped(params.q) && mapped(params.k) && mapped(params.v) &&
         mapped(params.o);
}

}  // namespace

bool goes_by_chunks(const Problem& p) {
  const bool has_its_own = p.gate == GateKind::key_value && p.dtype == DType::bf16;  // gates_values_by_chunks
  return !has_its_own && p.feature_map == FeatureMap::identity && !p.normalize && p.key_dim >= kFewChannels &&
         p.value_dim >= kFewChannels && p.algorithm != Algorithm::recurrent &&
         p.batch * p.length > kShortSequence * p.sequences;
}

bool forward_fits_one_pass(const Problem& problem, const Params& params) {
  return goes_by_chunks(problem) && in_bf16_tiles(problem, params) && fits_one_pass(problem, params);
}

namespace {

// What the backward by chunks finds beside the states, after a forward that has no use for it itself. Where rows of q,
// k or a key gate are too far apart the backward does not go by chunks either.
void keep_prepared(Context& context, const Problem& problem, const Params& params, bool hopper) {
  const auto fits = [](const Strided& s) { return s.token < (std::int64_t{1} << 24); };
  if (params.states == nullptr || !params.keeps_prepared() || !backward_in_chunks(problem) || !fits(params.q) ||
      !fits(params.k) || (problem.gate == GateKind::key && !fits(params.g))) {
    return;
  }
  const ArenaScope scope(context.scratch());
  const Prepared kept = kept_prepared(params, hopper);
  const PlainRows rows = kept.plain ? PlainRows::plan(context, params) : PlainRows{};
  if (context.planning()) return;
  hopper ? launch_preparation<TensorCore90>(context, params, kept, rows, false)
         : launch_preparation<TensorCore80>(context, params, kept, rows, false);
}

void run(Context& context, const Problem& problem, const Params& params, bool hopper) {
  const bool chunks = goes_by_chunks(problem), narrow = in_bf16_tiles(problem, params);
  if (chunks && narrow) {
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
    keep_prepared(context, problem, params, hopper);
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
  if (goes_through_features(problem)) {
    return forward_through_features(
        context, problem, inputs, outputs,
        [&](const Problem& p, const Inputs& in, const Outputs& out) { forward(context, p, in, out, hopper); });
  }
  if (gates_values_by_chunks(problem) && value_gates_fit(inputs, outputs)) {
    return forward_with_value_gates(context, problem, inputs, outputs, hopper);
  }
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

static std::size_t states_bytes(const Problem& problem, bool hopper) {
  if (goes_through_features(problem)) return states_bytes(without_features(problem), hopper);
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
