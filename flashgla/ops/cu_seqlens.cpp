#include "flashgla/ops/cu_seqlens.h"

namespace flashgla::ops {

void check_cu_seqlens(const Arguments& arguments, const Context& context, const TensorView& cu_seqlens, const char* of,
                      const TensorView& x, DTypes dtypes) {
  arguments.check("cu_seqlens", cu_seqlens, dtypes, Layout::contiguous);
  arguments.check_rank("cu_seqlens", cu_seqlens, 1);
  if (cu_seqlens.size(0) < 1) arguments.fail("cu_seqlens", "has shape [0]", "[N+1]");
  if (x.size(0) != 1) arguments.fail(of, "has shape " + to_string(x.shape), "a batch of 1 with cu_seqlens");
  if (context.planning() || context.device().kind != Device::Kind::cpu) return;
  const std::int64_t last = cu_seqlens.size(0) - 1, length = x.size(1);
  std::int64_t before = 0;
  for (std::int64_t n = 0; n <= last; ++n) {
    const std::int64_t bound = boundary(cu_seqlens, n);
    std::string expected;
    if (n == 0 && bound != 0) {
      expected = "0";
    } else if (bound < before) {
      expected = "no less than the one before";
    } else if (n == last && bound != length) {
      expected = std::to_string(length) + " (" + of + "'s length)";
    }
    if (!expected.empty()) {
      arguments.fail("cu_seqlens", "holds " + std::to_string(bound) + " at position " + std::to_string(n), expected);
    }
    before = bound;
  }
}

}  // namespace flashgla::ops
