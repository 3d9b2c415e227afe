#include "flashgla/ops/gated_linear_attention/implementations.h"

#include "flashgla/ops/gated_linear_attention/cpu/cpu.h"
#ifdef FLASHGLA_CUDA
#include "flashgla/ops/gated_linear_attention/cuda/cuda.h"
#include "flashgla/ops/gated_linear_attention/cuda/recurrent/step_ring.h"
#endif
#include "flashgla/ops/gated_linear_attention/reference.h"

namespace flashgla::ops::gated_linear_attention {

std::span<const Implementation> implementations() {
  static constexpr Implementation rows[] = {
#ifdef FLASHGLA_CUDA
      {"cuda_sm90", Device::Kind::cuda, cuda::hopper_supports, cuda::hopper_states_bytes, true, cuda::hopper_forward,
       cuda::hopper_backward, cuda::step, cuda::takes_projection, cuda::hopper_plan, true, cuda::takes_ring,
       cuda::step_with_ring, cuda::fold},
      {"cuda_portable", Device::Kind::cuda, cuda::portable_supports, cuda::portable_states_bytes, true,
       cuda::portable_forward, cuda::portable_backward, cuda::step, cuda::takes_projection, cuda::portable_plan, true,
       cuda::takes_ring, cuda::step_with_ring, cuda::fold},
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

}  // namespace flashgla::ops::gated_linear_attention
