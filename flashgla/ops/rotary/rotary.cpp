#include "flashgla/ops/rotary/rotary.h"

#include "flashgla/ops/rotary/implementations.h"

namespace flashgla::ops::rotary {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCuda, kSimd, kReference};
#else
  static const Implementation table[] = {kSimd, kReference};
#endif
  return table;
}

void run(Context& context, const TensorView& x, const TensorView& positions, const TensorView& cu_seqlens, double base,
         Direction direction, const TensorView& y) {
  const Arguments arguments("rotary", context);
  arguments.check("x", x, kFloating);
  arguments.check_rank("x", x, 4);
  if (x.size(3) % 2 != 0) arguments.fail("x", "has " + std::to_string(x.size(3)) + " channels", "an even number");
  arguments.check("y", y, x.dtype, x.shape, "x");
  if (cu_seqlens) {
    arguments.check("cu_seqlens", cu_seqlens, DType::i32, Layout::contiguous);
    arguments.check_rank("cu_seqlens", cu_seqlens, 1);
    if (x.size(0) != 1) arguments.fail("x", "has shape " + to_string(x.shape), "a batch of 1 with cu_seqlens");
    if (cu_seqlens.size(0) < 2) arguments.fail("cu_seqlens", "has shape " + to_string(cu_seqlens.shape), "[N+1]");
  }
  const std::int64_t sequences = sequences_of(x, cu_seqlens);
  if (positions) {
    arguments.check("positions", positions, DType::i32, Shape({sequences}), "sequences", Layout::contiguous);
  }
  if (!(base > 1.0)) throw Error("rotary", "base", "is " + std::to_string(base), "more than 1");
  const Implementation& implementation = select("rotary", implementations(), Problem{x.dtype, x.size(3)},
                                                context.architecture(), context.forced_implementation());
  if (!context.planning()) implementation.run(context, x, positions, cu_seqlens, base, direction, y);
}

}  // namespace flashgla::ops::rotary
