// Few rows of x by a packed matrix: bound by its bytes. Each row of panels is read once, by one thread, from its first
// byte to its last.
#include "flashgla/base/cut.h"
#include "flashgla/ops/quantised_linear/cpu/kernel.h"

namespace flashgla::ops::quantised_linear {

Activations take_activations(Arena& scratch, std::int64_t rows, std::int64_t groups) {
  const char* const label = "quantised: rows of x";
  const auto count = static_cast<std::size_t>(rows * groups);
  return {static_cast<std::uint8_t*>(scratch.allocate(count * kCodeBytes, label)),
          static_cast<std::int32_t*>(scratch.allocate(count * sizeof(std::int32_t), label)),
          static_cast<float*>(scratch.allocate(count * sizeof(float), label))};
}

void encode(Context& context, const TensorView& x, std::int64_t groups, const Kernel& kernel, const Activations& to) {
  const auto row = [&](std::int64_t m) {
    const Activations there{to.codes + m * groups * kCodeBytes, to.offsets + m * groups, to.scales + m * groups};
    kernel.encode(x.as<float>() + m * x.stride[0], x.size(1), groups, there);
  };
  if (x.size(0) > 2) return parallel_for(context, x.size(0), row);
  for (std::int64_t m = 0; m < x.size(0); ++m) row(m);  // less than it takes to tell others
}

void run_packed(Context& context, const TensorView& x, const TensorView& weight, const TensorView& y,
                const Options& options, const Kernel& kernel) {
  const std::int64_t rows = x.size(0), groups = weight.size(1);
  const ArenaScope scope(context.scratch());
  const Activations all = take_activations(context.scratch(), rows, groups);
  if (context.planning()) return;
  encode(context, x, groups, kernel, all);
  const Call call{format_of(weight), weight.as<std::uint8_t>(), groups, all, y, options};
  const std::int64_t panels_at_once = rows <= 2 ? rows_at_once(call.panel_bytes()) : 1;
  parallel_for_ranges(context, weight.size(0), panels_at_once,
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

const Kernel& kernel_of_few_rows(const Context& context) {
  const Problem problem{1, 1, 1, DType::f32, Format::q8};
  [[maybe_unused]] const char* const name =
      select("quantised linear", implementations(), problem, context.architecture(), context.forced_implementation())
          .name;
#if defined(__x86_64__)
  if (name == kVnni.name) return kVnniKernel;
  if (name == kAvx512.name) return kAvx512Kernel;
  if (name == kAvx2.name) return kAvx2Kernel;
#endif
  return kPortableKernel;
}

}  // namespace flashgla::ops::quantised_linear
