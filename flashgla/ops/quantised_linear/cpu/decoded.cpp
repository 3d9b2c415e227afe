// Many rows of x: panels of the weight's rows as f32 in scratch memory, columns of the product that `matmul` computes.
#include <algorithm>

#include "flashgla/ops/matmul/matmul.h"
#include "flashgla/ops/quantised_linear/cpu/kernel.h"

namespace flashgla::ops::quantised_linear {

namespace {

const Kernel& best_kernel() {
#if defined(__x86_64__)
  if (has_avx512()) return kAvx512Kernel;
  if (has_avx2()) return kAvx2Kernel;
#endif
  return kPortableKernel;
}

void run_decoded(Context& context, const TensorView& x, const TensorView& weight, const TensorView& y,
                 const Options& options) {
  constexpr std::int64_t kElements = std::int64_t{4} << 20, kMultiple = 512;  // whole tiles of matmul's
  const std::int64_t columns = y.size(1), groups = weight.size(1), panels = weight.size(0);
  const std::int64_t width =
      std::min(panels * kPanelRows,
               std::max(kMultiple, kElements / std::max(x.size(0), groups * kGroup) / kMultiple * kMultiple));
  const ArenaScope scope(context.scratch());
  const TensorView decoded =
      context.scratch().tensor({groups * kGroup, width}, DType::f32, "quantised: weights in f32");
  const Format format = format_of(weight);
  const Kernel& kernel = best_kernel();
  for (std::int64_t begin = 0; begin < columns; begin += width) {
    const std::int64_t end = std::min(columns, begin + width), first = begin / kPanelRows;
    if (!context.planning()) {
      const auto* bytes = weight.as<std::uint8_t>();
      parallel_for(context, (end - begin + kPanelRows - 1) / kPanelRows, [&](std::int64_t panel) {
        kernel.decode(format, bytes + (first + panel) * groups * block_bytes(format), groups,
                      decoded.as<float>() + panel * kPanelRows, width);
      });
    }
    matmul::Options own{options.accumulate, options.bias ? options.bias.slice(0, begin, end) : TensorView()};
    matmul::run(context, x, decoded.slice(0, 0, x.size(1)).slice(1, 0, end - begin), y.slice(1, begin, end), own);
  }
}

}  // namespace

const Implementation kDecoded{"decoded", Device::Kind::cpu,
                              [](const Problem& problem, const Architecture&) {
                                return problem.dtype == DType::f32 ? Support::yes() : Support::no("x is not f32");
                              },
                              run_decoded, [] { return true; }};

}  // namespace flashgla::ops::quantised_linear
