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

void of_tokens(Context& context, const TensorView& positions, const TensorView& bounds, const TensorView& out) {
  const Arguments arguments("positions", context);
  arguments.check("out", out, DType::i32, Layout::contiguous);
  arguments.check_rank("out", out, 2);
  if (bounds) {
    arguments.check("bounds", bounds, DType::i32, Layout::contiguous);
    arguments.check_rank("bounds", bounds, 1);
    if (out.size(0) != 1) arguments.fail("out", "has shape " + to_string(out.shape), "[1,T] with bounds");
  }
  const std::int64_t sequences = bounds ? bounds.size(0) - 1 : out.size(0);
  if (positions) {
    arguments.check("positions", positions, DType::i32, Shape({sequences}), "the sequences", Layout::contiguous);
  }
  if (context.planning()) return;
  const std::int32_t* before = positions ? positions.as<std::int32_t>() : nullptr;
  const std::int32_t* ends = bounds ? bounds.as<std::int32_t>() : nullptr;
  auto* values = out.as<std::int32_t>();
#ifdef FLASHGLA_CUDA
  if (out.device.kind == Device::Kind::cuda) {
    return cuda::of_tokens(before, ends, sequences, values, out.numel(), out.size(1), context.stream());
  }
#endif
  std::int64_t n = 0;
  for (std::int64_t i = 0; i < out.numel(); ++i) {
    if (ends != nullptr) {
      while (n + 1 < sequences && ends[n + 1] <= i) ++n;
    } else {
      n = i / out.size(1);
    }
    const std::int64_t begin = ends != nullptr ? ends[n] : n * out.size(1);
    values[i] = static_cast<std::int32_t>((before != nullptr ? before[n] : 0) + i - begin);
  }
}

}  // namespace flashgla::ops::positions
