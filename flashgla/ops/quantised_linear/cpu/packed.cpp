// Few rows of x by a packed matrix: bound by its bytes. Each row of panels is read once, by one thread, from its first
// byte to its last.
#include <algorithm>

#include "flashgla/ops/quantised_linear/cpu/kernel.h"

namespace flashgla::ops::quantised_linear {

namespace {
constexpr std::int64_t kMostRows = 16;
constexpr std::int64_t kBytesPerTask = 32 * 1024;
}  // namespace

Support supports_packed(const Problem& problem) {
  if (problem.m > kMostRows) return Support::no("M is more than 16");
  if (problem.dtype != DType::f32) return Support::no("x is not f32");
  return Support::yes();
}

void run_packed(Context& context, const TensorView& x, const TensorView& weight, const TensorView& y,
                const Options& options, const Kernel& kernel) {
  const std::int64_t rows = x.size(0), groups = weight.size(1);
  const ArenaScope scope(context.scratch());
  const TensorView codes = context.scratch().tensor({rows, groups, kCodeBytes}, DType::u8, "quantised: rows of x");
  const TensorView offsets = context.scratch().tensor({rows, groups}, DType::i32, "quantised: rows of x");
  const TensorView scales = context.scratch().tensor({rows, groups}, DType::f32, "quantised: rows of x");
  if (context.planning()) return;
  const Activations all{codes.as<std::uint8_t>(), offsets.as<std::int32_t>(), scales.as<float>()};
  for (std::int64_t m = 0; m < rows; ++m) {
    const Activations row{all.codes + m * groups * kCodeBytes, all.offsets + m * groups, all.scales + m * groups};
    kernel.encode(x.as<float>() + m * x.stride[0], x.size(1), groups, row);
  }
  const Call call{format_of(weight), weight.as<std::uint8_t>(), groups, all, y, options};
  const std::int64_t grain = std::max<std::int64_t>(1, kBytesPerTask / std::max<std::int64_t>(1, call.panel_bytes()));
  parallel_for_blocks(context, weight.size(0), grain,
                      [&](std::int64_t begin, std::int64_t end) { kernel.multiply(call, begin, end); });
}

namespace {

template <const Kernel& kKernel>
void run_by(Context& context, const TensorView& x, const TensorView& weight, const TensorView& y,
            const Options& options) {
  run_packed(context, x, weight, y, options, kKernel);
}

Support supports(const Problem& problem, const Architecture&) { return supports_packed(problem); }

}  // namespace

#if defined(__x86_64__)
const Implementation kVnni{"vnni", Device::Kind::cpu, supports, run_by<kVnniKernel>, has_vnni};
const Implementation kAvx512{"avx512", Device::Kind::cpu, supports, run_by<kAvx512Kernel>, has_avx512};
const Implementation kAvx2{"avx2", Device::Kind::cpu, supports, run_by<kAvx2Kernel>, has_avx2};
#endif
const Implementation kPortable{"portable", Device::Kind::cpu, supports, run_by<kPortableKernel>, [] { return true; }};

}  // namespace flashgla::ops::quantised_linear
