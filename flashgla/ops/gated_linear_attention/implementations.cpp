#include "flashgla/ops/gated_linear_attention/implementations.h"

#include <algorithm>
#include <iterator>

#include "flashgla/ops/gated_linear_attention/cpu/cpu.h"
#ifdef FLASHGLA_CUDA
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#endif
#include "flashgla/ops/gated_linear_attention/reference.h"

namespace flashgla::ops::gated_linear_attention {

#ifdef FLASHGLA_CUDA
namespace {

template <bool hopper>
constexpr Implementation cuda_row(const char* name) {
  return {.name = name,
          .device = Device::Kind::cuda,
          .supports = [](const Problem& p, const Architecture& a) { return cuda::supports(p, a, hopper); },
          .states_bytes = [](const Problem& p) { return cuda::states_bytes(p, hopper); },
          .takes_logits = true,
          .forward = [](Context& context, const Problem& p, const Inputs& in,
                        const Outputs& out) { cuda::forward(context, p, in, out, hopper); },
          .backward = [](Context& context, const Problem& p, const Inputs& in, const Outputs& out,
                         const OutputGradients& d_out,
                         const InputGradients& d_in) { cuda::backward(context, p, in, out, d_out, d_in, hopper); },
          .step = cuda::step,
          .takes_projection = cuda::takes_projection,
          .plan =
              [](const Problem& p, const Inputs& in, const Outputs& out, const Architecture& a) {
                return to_string(cuda::make_plan(p, cuda::layout_of(p, in, out), a, hopper));
              },
          .sums_over_heads = true,
          .takes_ring = cuda::takes_ring,
          .step_with_ring = cuda::step_with_ring,
          .fold = cuda::fold};
}

}  // namespace
#endif

std::span<const Implementation> implementations() {
  static constexpr Implementation rows[] = {
#ifdef FLASHGLA_CUDA
      cuda_row<true>("cuda_sm90"),
      cuda_row<false>("cuda_portable"),
#endif
      {"cpu_chunk", Device::Kind::cpu, chunk::supports, chunk::states_bytes, false, chunk::forward, chunk::backward,
       nullptr},
      {"cpu_recurrent", Device::Kind::cpu, recurrent::supports, recurrent::states_bytes, false, recurrent::forward,
       recurrent::backward, recurrent::step, recurrent::takes_projection},
      {"cpu_parallel", Device::Kind::cpu, parallel::supports, parallel::states_bytes, false, parallel::forward,
       parallel::backward, nullptr},
      {"reference", Device::Kind::cpu, reference::supports, reference::states_bytes, true, reference::forward,
       reference::backward, reference::step, nullptr, nullptr, false, nullptr, nullptr, reference::fold},
  };
  return rows;
}

std::vector<Implementation> implementations_with(bool (*does)(const Implementation&)) {
  std::vector<Implementation> some;
  std::ranges::copy_if(implementations(), std::back_inserter(some), does);
  return some;
}

}  // namespace flashgla::ops::gated_linear_attention
