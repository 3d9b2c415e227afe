// Launcher of the forward: kernels for Hopper alone.
#include "flashgla/ops/softmax_attention/cuda/hopper/forward.cuh"
#include "flashgla/ops/softmax_attention/cuda/hopper/launch.h"
#include "flashgla/ops/softmax_attention/cuda/schedule.h"

namespace flashgla::ops::softmax_attention::cuda::hopper {

namespace {

template <int D>
void forward_of(Context& context, const Inputs& in, const Outputs& out, const Options& options) {
  using Plan = ForwardPlan<D>;
  static_assert(Plan::bytes <= 227 * 1024);
  const ArenaScope scope(context.scratch());
  const PackedTile* packed = packed_tiles(context, in, Plan::rows);
  if (context.planning() || in.q.numel() == 0) return;
  const Call call = call_of(in, options);
  const double bytes = 4.0 * D * (call.length + call.rows) / call.group();  // a head's keys and values
  const Schedule schedule = schedule_of(call, packed, Plan::rows, call.heads, bytes, true);
  const ForwardMaps maps{map_of(in.q, Plan::rows), map_of(in.k, Plan::keys), map_of(in.v, Plan::keys),
                         map_of(in.past_k, Plan::keys), map_of(in.past_v, Plan::keys)};
  flashgla::cuda::launch("softmax_attention forward", forward_kernel<D>, blocks_of(context, schedule), Plan::threads,
                         Plan::bytes, static_cast<cudaStream_t>(context.stream()),
                         flashgla::cuda::Begin::beside_previous, call, schedule, maps, Strided(out.o),
                         out.lse ? out.lse.as<float>() : nullptr);
}

}  // namespace

void forward(Context& context, const Inputs& in, const Outputs& out, const Options& options) {
  in.q.size(3) == 64 ? forward_of<64>(context, in, out, options) : forward_of<128>(context, in, out, options);
}

}  // namespace flashgla::ops::softmax_attention::cuda::hopper
