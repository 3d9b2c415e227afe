// Launcher of the backward: kernels for Hopper alone.
#include "flashgla/ops/softmax_attention/cuda/hopper/backward_keys.cuh"
#include "flashgla/ops/softmax_attention/cuda/hopper/backward_queries.cuh"
#include "flashgla/ops/softmax_attention/cuda/hopper/launch.h"
#include "flashgla/ops/softmax_attention/cuda/schedule.h"

namespace flashgla::ops::softmax_attention::cuda::hopper {

namespace {

using flashgla::cuda::Begin;

template <int D>
void launch(const Context& context, const Call& call, const PackedTile* packed, const RowSums& sums, const Inputs& in,
            const TensorView& d_o, const InputGradients& gradients) {
  const auto stream = static_cast<cudaStream_t>(context.stream());
  using OfKeys = KeyPlan<D>;
  using OfQueries = QueryPlan<D>;
  static_assert(OfKeys::keys == OfQueries::rows);  // tiles of one table
  static_assert(OfKeys::bytes <= 227 * 1024 && OfQueries::bytes <= 227 * 1024);
  const double row = 4.0 * D;  // of keys and values, or of queries and their gradients
  const Schedule by_keys =
      schedule_of(call, packed, OfKeys::keys, call.groups, row * call.length * call.group(), false);
  const KeyMaps key_maps{map_of(in.q, OfKeys::queries), map_of(d_o, OfKeys::queries), map_of(in.k, OfKeys::keys),
                         map_of(in.v, OfKeys::keys)};
  flashgla::cuda::launch("softmax_attention dk, dv", key_gradients_kernel<D>, blocks_of(context, by_keys),
                         OfKeys::threads, OfKeys::bytes, stream, Begin::beside_previous, call, by_keys, key_maps, sums,
                         Strided(gradients.dk), Strided(gradients.dv));
  const Schedule by_queries =
      schedule_of(call, packed, OfQueries::rows, call.heads, row * (call.length + call.rows) / call.group(), true);
  const QueryMaps query_maps{map_of(in.q, OfQueries::rows),      map_of(d_o, OfQueries::rows),
                             map_of(in.k, OfQueries::keys),      map_of(in.v, OfQueries::keys),
                             map_of(in.past_k, OfQueries::keys), map_of(in.past_v, OfQueries::keys)};
  flashgla::cuda::launch("softmax_attention dq", query_gradients_kernel<D>, blocks_of(context, by_queries),
                         OfQueries::threads, OfQueries::bytes, stream, Begin::beside_previous, call, by_queries,
                         query_maps, sums, Strided(gradients.dq));
}

}  // namespace

void backward(Context& context, const Inputs& in, const Outputs& out, const TensorView& d_o,
              const InputGradients& gradients, const Options& options) {
  const ArenaScope scope(context.scratch());
  const RowSums sums = row_sums(context, in, out, d_o);
  const PackedTile* packed = packed_tiles(context, in, KeyPlan<64>::keys);
  if (context.planning() || in.q.numel() == 0) return;
  const Call call = call_of(in, options);
  call.key_dim == 64 ? launch<64>(context, call, packed, sums, in, d_o, gradients)
                     : launch<128>(context, call, packed, sums, in, d_o, gradients);
}

}  // namespace flashgla::ops::softmax_attention::cuda::hopper
