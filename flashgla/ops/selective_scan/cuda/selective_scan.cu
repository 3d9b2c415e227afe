// The row of the table that runs on CUDA.
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/selective_scan/cuda/backward.cuh"
#include "flashgla/ops/selective_scan/cuda/forward.cuh"
#include "flashgla/ops/selective_scan/implementations.h"
#include "flashgla/ops/weight_in_f32.h"

namespace flashgla::ops::selective_scan {

namespace {

using bf16 = __nv_bfloat16;

// One token of each sequence: a thread a channel.
template <class T>
__global__ void __launch_bounds__(cuda::kThreads)
    step_kernel(cuda::Call<T> call, std::int64_t sequences, float* h, cuda::Lines<T> y) {
  flashgla::cuda::wait_for_previous();
  const std::int64_t item = std::int64_t{blockIdx.x} * cuda::kThreads + threadIdx.x;
  if (item >= sequences * call.channels) return;
  const std::int64_t n = item / call.channels, e = item % call.channels;
  const float x = cuda::to_float(call.x.row(n, 0)[e]), z = cuda::to_float(call.z.row(n, 0)[e]);
  const float dt = cuda::softplus(cuda::to_float(call.raw.row(n, 0)[e]) + call.dt_bias[e]);
  float* state = h + item * call.states;
  float sum = call.skip[e] * x;
  for (int k = 0; k < call.states; ++k) {
    const float decay = ops::cuda::power_of_two(-expf(call.a_log[e * call.states + k]) * cuda::kLog2E * dt);
    const float next = fmaf(decay, state[k], dt * x * cuda::to_float(call.b.row(n, 0)[k]));
    sum = fmaf(cuda::to_float(call.c.row(n, 0)[k]), next, sum);
    state[k] = next;
  }
  y.row(n, 0)[e] = cuda::from_float<T>(sum * z * ops::cuda::sigmoid(z));
}

std::int64_t tiles_of(const Sizes& sizes) { return (sizes.channels + cuda::kBlockChannels - 1) / cuda::kBlockChannels; }

std::size_t cuda_kept_bytes(const Inputs& inputs) {
  const Sizes sizes(inputs);
  const std::int64_t slots = sizes.rows / cuda::kChunk + sizes.sequences + 1;
  return static_cast<std::size_t>(slots * tiles_of(sizes) * cuda::kBlockChannels * cuda::kStates) * sizeof(float);
}

// Parameters in f32, in scratch where they are not.
struct Parameters {
  const float *dt_bias, *a_log, *skip;
};

Parameters parameters_of(Context& context, const Inputs& in) {
  const auto wide = [&](const TensorView& view) {
    return weight_in_f32(context, view.reshape(Shape({view.numel()})), view.numel());
  };
  return {wide(in.dt_bias), wide(in.a_log), wide(in.skip)};
}

template <class T>
cuda::Call<T> call_of(const Inputs& in, const Sizes& sizes, const Parameters& parameters, const TensorView& kept) {
  return {cuda::Lines<T>(in.x),
          cuda::Lines<T>(in.raw),
          cuda::Lines<T>(in.z),
          cuda::Lines<T>(in.b),
          cuda::Lines<T>(in.c),
          parameters.dt_bias,
          parameters.a_log,
          parameters.skip,
          static_cast<const float*>(in.h0.data),
          static_cast<const std::int32_t*>(in.cu_seqlens.data),
          sizes.length,
          static_cast<int>(sizes.channels),
          static_cast<int>(sizes.states),
          tiles_of(sizes),
          static_cast<float4*>(kept.data)};
}

// Calls run(T()) with the kernels' type for the inputs'.
template <class Run>
void with_type(const Inputs& in, const Run& run) {
  in.x.dtype == DType::f32 ? run(float{}) : run(bf16{});
}

void cuda_forward(Context& context, const Inputs& in, const Outputs& out) {
  const ArenaScope scope(context.scratch());
  const Parameters parameters = parameters_of(context, in);
  if (context.planning()) return;
  const Sizes sizes(in);
  with_type(in, [&](auto zero) {
    using T = decltype(zero);
    ops::cuda::queue_kernel(context, "selective_scan", cuda::forward_kernel<T>, sizes.sequences * tiles_of(sizes),
                            cuda::kThreads, 0, call_of<T>(in, sizes, parameters, out.kept),
                            out.y ? cuda::Lines<T>(out.y) : cuda::Lines<T>(), static_cast<float*>(out.ht.data));
  });
}

void cuda_backward(Context& context, const Inputs& in, const TensorView& kept_before, const TensorView& dy,
                   const InputGradients& to) {
  Arena& scratch = context.scratch();
  const ArenaScope scope(scratch);
  TensorView kept = kept_before;
  if (!kept) {
    kept = scratch.tensor({static_cast<std::int64_t>(cuda_kept_bytes(in))}, DType::u8, "selective_scan: states");
    cuda_forward(context, in, {{}, {}, kept});
  }
  const Sizes sizes(in);
  const std::int64_t tiles = tiles_of(sizes);
  const Parameters parameters = parameters_of(context, in);
  const TensorView partial = scratch.tensor({tiles, sizes.rows, 2 * cuda::kStates}, DType::f32, "selective_scan: sums");
  const TensorView da_log =
      scratch.tensor({sizes.sequences, sizes.channels * sizes.states}, DType::f32, "selective_scan: sums");
  const TensorView dskip = scratch.tensor({sizes.sequences, sizes.channels}, DType::f32, "selective_scan: sums");
  if (!context.planning()) {
    with_type(in, [&](auto zero) {
      using T = decltype(zero);
      const cuda::Gradients<T> gradients{cuda::Lines<T>(dy),
                                         cuda::Lines<T>(to.dx),
                                         cuda::Lines<T>(to.draw),
                                         cuda::Lines<T>(to.dz),
                                         static_cast<float*>(partial.data),
                                         static_cast<float*>(da_log.data),
                                         static_cast<float*>(dskip.data),
                                         sizes.rows};
      ops::cuda::queue_kernel(context, "selective_scan", cuda::backward_kernel<T>, sizes.sequences * tiles,
                              cuda::kThreads, static_cast<int>(sizeof(cuda::BackwardShared)),
                              call_of<T>(in, sizes, parameters, kept), gradients);
      const std::int64_t sums = sizes.rows * 2 * cuda::kStates;
      ops::cuda::queue_kernel(context, "selective_scan", cuda::sum_kernel<T>,
                              (sums + cuda::kThreads - 1) / cuda::kThreads, cuda::kThreads, 0,
                              static_cast<const float*>(partial.data), tiles, sizes.rows, sizes.length,
                              static_cast<int>(sizes.states), cuda::Lines<T>(to.db), cuda::Lines<T>(to.dc));
    });
  }
  elementwise::column_sum(context, da_log, to.da_log.reshape(Shape({to.da_log.numel()})), true);
  elementwise::column_sum(context, dskip, to.dskip, true);
}

void cuda_step(Context& context, const Inputs& in, const TensorView& state, const TensorView& y) {
  const ArenaScope scope(context.scratch());
  const Parameters parameters = parameters_of(context, in);
  if (context.planning()) return;
  const auto as_batch = [](const TensorView& view) {  // [N,...] as [N,1,...]
    TensorView batch(view.data, view.dtype, Shape({view.size(0), 1, view.size(1)}), view.device);
    batch.stride = {view.stride[0], view.stride[0], view.stride[1]};
    return batch;
  };
  Inputs batch = in;
  for (TensorView* view : {&batch.x, &batch.raw, &batch.z, &batch.b, &batch.c}) *view = as_batch(*view);
  const Sizes sizes(batch);
  with_type(in, [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t items = sizes.sequences * sizes.channels;
    ops::cuda::queue_kernel(context, "selective_scan", step_kernel<T>, (items + cuda::kThreads - 1) / cuda::kThreads,
                            cuda::kThreads, 0, call_of<T>(batch, sizes, parameters, {}), sizes.sequences,
                            static_cast<float*>(state.data), cuda::Lines<T>(as_batch(y)));
  });
}

}  // namespace

const Implementation kCuda{"cuda",
                           Device::Kind::cuda,
                           [](const Problem& problem, const Architecture&) {
                             if (problem.states > cuda::kStates) {
                               return Support::no("at most " + std::to_string(cuda::kStates) + " states a channel");
                             }
                             return supports_f32_and_bf16({problem.dtype});
                           },
                           cuda_kept_bytes,
                           cuda_forward,
                           cuda_backward,
                           cuda_step};

}  // namespace flashgla::ops::selective_scan
