// The row of the operator's table, and its launchers.
#include "flashgla/ops/cuda/queue_kernel.cuh"
#include "flashgla/ops/softmax_attention/cuda/schedule.h"
#include "flashgla/ops/softmax_attention/cuda/tensor_cores/backward.cuh"
#include "flashgla/ops/softmax_attention/cuda/tensor_cores/forward.cuh"

namespace flashgla::ops::softmax_attention::cuda::tensor_cores {

namespace {

namespace house = flashgla::ops::cuda;

// Calls run(channels) with those that tiles have, 32, 64 or 128.
template <class Run>
void with_channels(const Call& call, const Run& run) {
  const int channels = std::max(call.key_dim, call.value_dim);
  if (channels <= 32) return run(std::integral_constant<int, 32>());
  if (channels <= 64) return run(std::integral_constant<int, 64>());
  run(std::integral_constant<int, 128>());
}

void forward(Context& context, const Inputs& in, const Outputs& out, const Options& options) {
  const ArenaScope scope(context.scratch());
  const PackedTile* packed = packed_tiles(context, in, kBlockRows);
  if (context.planning() || in.q.numel() == 0) return;
  const Call call = call_of(in, options);
  const double bytes = 2.0 * (call.key_dim + call.value_dim) * (call.length + call.rows) / call.group();
  const Schedule schedule = schedule_of(call, packed, kBlockRows, call.heads, bytes, true);
  with_channels(call, [&](auto channels) {
    with_dropped(call, options, [&](auto dropped) {
      house::queue_kernel(context, "softmax_attention forward", forward_kernel<channels, decltype(dropped)>,
                          schedule.count(), kThreads, ForwardPlan<channels>::bytes, call, schedule, Strided(out.o),
                          out.lse ? out.lse.as<float>() : nullptr, dropped);
    });
  });
}

void backward(Context& context, const Inputs& in, const Outputs& out, const TensorView& d_o,
              const InputGradients& gradients, const Options& options) {
  const ArenaScope scope(context.scratch());
  const RowSums sums = row_sums(context, in, out, d_o);
  const PackedTile* packed = packed_tiles(context, in, kBlockRows);
  if (context.planning() || in.q.numel() == 0) return;
  const Call call = call_of(in, options);
  const double row = 2.0 * (call.key_dim + call.value_dim);  // of keys and values, or of queries and their gradients
  const Schedule by_keys = schedule_of(call, packed, kBlockRows, call.groups, row * call.length * call.group(), false);
  const Schedule by_queries =
      schedule_of(call, packed, kBlockRows, call.heads, row * (call.length + call.rows) / call.group(), true);
  with_channels(call, [&](auto channels) {
    with_dropped(call, options, [&](auto dropped) {
      using Drop = decltype(dropped);
      using Plan = BackwardPlan<channels>;
      house::queue_kernel(context, "softmax_attention dk, dv", key_gradients_kernel<channels, Drop>, by_keys.count(),
                          kThreads, Plan::bytes, call, by_keys, Strided(d_o), sums, Strided(gradients.dk),
                          Strided(gradients.dv), dropped);
      house::queue_kernel(context, "softmax_attention dq", query_gradients_kernel<channels, Drop>, by_queries.count(),
                          kThreads, Plan::bytes, call, by_queries, Strided(d_o), sums, Strided(gradients.dq), dropped);
    });
  });
}

Support supports(const Problem& problem, const Architecture& architecture) {
  if (architecture.cuda_capability < 80) return Support::no("needs compute capability 8.0");
  if (problem.dtype != DType::bf16 || problem.past != DType::bf16) return Support::no("takes bf16");
  if (std::max(problem.key_dim, problem.value_dim) > 128 || problem.key_dim % 8 != 0 || problem.value_dim % 8 != 0) {
    return Support::no("takes keys and values of a multiple of 8 channels, at most 128");
  }
  if (!problem.regular) return Support::no("takes rows at multiples of 16 bytes and a positive scale");
  return Support::yes();
}

}  // namespace

}  // namespace flashgla::ops::softmax_attention::cuda::tensor_cores

namespace flashgla::ops::softmax_attention {

const Implementation kCudaTensorCores{"cuda_tensor_cores",
                                      Device::Kind::cuda,
                                      cuda::tensor_cores::supports,
                                      cuda::tensor_cores::forward,
                                      cuda::tensor_cores::backward,
                                      cuda::append,
                                      cuda::step,
                                      true};

}  // namespace flashgla::ops::softmax_attention
