// Few rows of x by a packed matrix: bound by its bytes. Each row of panels is read once, by one thread, from its first
// byte to its last.
#include "flashgla/ops/quantised_linear/cpu/kernel.h"

namespace flashgla::ops::quantised_linear {

void run_packed(Context& context, const TensorView& x, const TensorView& weight, const TensorView& y,
                const Options& options, const Kernel& kernel) {
  const std::int64_t rows = x.size(0), groups = weight.size(1);
  const ArenaScope scope(context.scratch());
  const TensorView codes = context.scratch().tensor({rows, groups, kCodeBytes}, DType::u8, "quantised: rows of x");
  const TensorView offsets = context.scratch().tensor({rows, groups}, DType::i32, "quantised: rows of x");
  const TensorView scales = context.scratch().tensor({rows, groups}, DType::f32, "quantised: rows of x");
  if (context.planning()) return;
  const Activations all{codes.as<std::uint8_t>(), offsets.as<std::int32_t>(), scales.as<float>()};
  const auto encode = [&](std::int64_t m) {
    const Activations row{all.codes + m * groups * kCodeBytes, all.offsets + m * groups, all.scales + m * groups};
    kernel.encode(x.as<float>() + m * x.stride[0], x.size(1), groups, row);
  };
  if (rows <= 2) {  // less than it takes to tell others
    for (std::int64_t m = 0; m < rows; ++m) encode(m);
  } else {
    parallel_for(context, rows, encode);
  }
  const Call call{format_of(weight), weight.as<std::uint8_t>(), groups, all, y, options};
  const std::int64_t panels_a_task = rows <= 2 ? 4 : 1;
  parallel_for_ranges(context, weight.size(0), panels_a_task,
                      [&](std::int64_t begin, std::int64_t end) { kernel.multiply(call, begin, end); });
}

namespace {

template <const Kernel& kKernel>
void run_by(Context& context, const TensorView& x, const TensorView& weight, const TensorView& y,
            const Options& options) {
  run_packed(context, x, weight, y, options, kKernel);
}

Support any_rows(const Problem& problem, const Architecture&) {
  return problem.dtype == DType::f32 ? Support::yes() : Support::no("x is not f32");
}

// Many are faster as a product of f32.
Support few_rows(const Problem& problem, const Architecture& architecture) {
  return problem.m > 16 ? Support::no("M is more than 16") : any_rows(problem, architecture);
}

}  // namespace

#if defined(__x86_64__)
const Implementation kVnni{"vnni", Device::Kind::cpu, any_rows, run_by<kVnniKernel>, has_vnni};
const Implementation kAvx512{"avx512", Device::Kind::cpu, any_rows, run_by<kAvx512Kernel>, has_avx512};
const Implementation kAvx2{"avx2", Device::Kind::cpu, few_rows, run_by<kAvx2Kernel>, has_avx2};
#endif
const Implementation kPortable{"portable", Device::Kind::cpu, few_rows, run_by<kPortableKernel>, [] { return true; }};

}  // namespace flashgla::ops::quantised_linear
