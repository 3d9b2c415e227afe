#include "flashgla/ops/positions/positions.h"

#include "flashgla/ops/arguments.h"
#ifdef FLASHGLA_CUDA
#include "flashgla/ops/positions/cuda/advance.h"
#endif

namespace flashgla::ops::positions {

void advance(Context& context, const TensorView& positions, const TensorView& bounds, std::int64_t length) {
  const Arguments arguments("positions", context);
  arguments.check("positions", positions, DType::i32, Layout::contiguous);
  arguments.check_rank("positions", positions, 1);
  const std::int64_t sequences = positions.size(0);
  if (bounds) {
    arguments.check("bounds", bounds, DType::i32, Shape({sequences + 1}), "positions' size + 1", Layout::contiguous);
  }
  if (context.planning()) return;
  auto* values = positions.as<std::int32_t>();
  const std::int32_t* ends = bounds ? bounds.as<std::int32_t>() : nullptr;
#ifdef FLASHGLA_CUDA
  if (positions.device.kind == Device::Kind::cuda) {
    return cuda::advance(values, ends, sequences, static_cast<std::int32_t>(length), context.stream());
  }
#endif
  for (std::int64_t n = 0; n < sequences; ++n) {
    values[n] += ends != nullptr ? ends[n + 1] - ends[n] : static_cast<std::int32_t>(length);
  }
}

}  // namespace flashgla::ops::positions
