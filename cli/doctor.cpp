// flashgla doctor: says what this machine can run, and checks that it does.
#include <fmt/core.h>
#include <hwy/highway.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>

#include "bench/benches.h"
#ifdef FLASHGLA_CUDA
#include "bench/cuda/ceilings.h"
#endif
#include "cli/commit.h"
#include "cli/gnuplot.h"
#include "cli/progress.h"
#include "cli/say.h"
#include "cli/verbs.h"
#include "flashgla/base/context.h"
#include "flashgla/base/memory.h"
#include "flashgla/base/names.h"
#include "flashgla/base/threads.h"
#include "flashgla/ops/gated_linear_attention/implementations.h"
#include "flashgla/ops/matmul/plans.h"
#include "flashgla/ops/quantised_linear/implementations.h"
#include "flashgla/ops/quantised_linear/quantise.h"
#include "flashgla/ops/softmax_attention/library.h"
#include "testing/compare.h"
#include "testing/random.h"

namespace flashgla::cli {

namespace {

namespace gla = ops::gated_linear_attention;

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown processor";
}

// Of those that the kernels are compiled for.
std::string instruction_sets() {
  const std::int64_t targets = hwy::SupportedTargets();
  std::string names;
  if (targets & HWY_AVX3) names += "AVX-512, ";
  if (targets & HWY_AVX2) names += "AVX2, ";
  if (targets & HWY_NEON) names += "NEON, ";
  return names + "portable baseline";
}

struct Report {
  bool healthy = true;
  void line(const char* what, const std::string& finding) { print("  {:<22} {}\n", what, finding); }
  void problem(const char* what, const std::string& finding, const std::string& remedy) {
    healthy = false;
    print("  {:<22} PROBLEM: {}; {}\n", what, finding, remedy);
  }
};

// ", by forward; backward; how states lie", where an implementation has several ways.
std::string name_of_plan(const gla::Implementation& implementation, const Context& context, const gla::Inputs& inputs,
                         const gla::Outputs& outputs) {
  if (implementation.plan == nullptr) return "";
  return ", by " + implementation.plan(gla::describe(inputs, {}), inputs, outputs, context.architecture());
}

// Runs each implementation of the operator on one small problem and compares it with the reference.
void check_implementations(Report& report, Device device) {
  constexpr std::int64_t kBatch = 2, kLength = 100, kHeads = 2, kKey = 32, kValue = 48;
  const Tensor q = testing::random_normal({kBatch, kLength, kHeads, kKey}, DType::f32, 1);
  const Tensor k = testing::random_normal({kBatch, kLength, kHeads, kKey}, DType::f32, 2);
  const Tensor v = testing::random_normal({kBatch, kLength, kHeads, kValue}, DType::f32, 3);
  const Tensor g = Tensor::empty({kBatch, kLength, kHeads, kKey}, DType::f32);
  for (std::int64_t i = 0; i < g->numel(); ++i) {
    g.as<float>()[i] = static_cast<float>(std::log(testing::uniform(4, static_cast<std::uint64_t>(i))));
  }
  const Tensor expected = Tensor::empty(v->shape, DType::f32);
  {
    Context context;
    context.force_implementation("reference");
    gla::forward(context, {.q = q, .k = k, .v = v, .g = g}, {.o = expected});
  }
  for (const gla::Implementation& implementation : gla::implementations()) {
    if (implementation.device != device.kind) continue;
    const std::string what = std::string("kernel ") + implementation.name;
    Context context(device);
    context.force_implementation(implementation.name);
    auto here = [&](const Tensor& tensor) {
      Tensor moved = Tensor::empty(tensor->shape, tensor->dtype, device);
      copy_memory(moved->data, device, tensor->data, Device::cpu(), tensor->bytes());
      return moved;
    };
    try {
      const Tensor dq = here(q), dk = here(k), dv = here(v), dg = here(g);
      const Tensor out = Tensor::empty(v->shape, DType::f32, device);
      const gla::Inputs inputs{.q = dq, .k = dk, .v = dv, .g = dg};
      gla::forward(context, inputs, {.o = out});
      const Tensor back = Tensor::empty(v->shape, DType::f32);
      copy_memory(back->data, Device::cpu(), out->data, device, back->bytes());
      const std::string wrong = testing::check_close("o", back, expected, 2e-5);
      if (wrong.empty()) {
        const std::string plan = name_of_plan(implementation, context, inputs, {.o = out});
        report.line(what.c_str(),
                    fmt::format("right (relative error {:.1e}){}", testing::difference(back, expected).relative, plan));
      } else {
        report.problem(what.c_str(), wrong, "please report this with the processor's name");
      }
    } catch (const Error& error) {
      report.line(what.c_str(), fmt::format("not for this problem or machine: {}", error.what()));
    }
  }
}

// The same of products with weights of 8 and 4 bits, the first of which a step takes.
void check_quantised(Report& report) {
  namespace quantised = ops::quantised_linear;
  constexpr std::int64_t kRows = 3, kIn = 100, kOut = 40;
  const Tensor x = testing::random_normal({kRows, kIn}, DType::f32, 1);
  const Tensor values = testing::random_normal({kOut, kIn}, DType::f32, 2);
  for (const quantised::Implementation& implementation : quantised::implementations()) {
    if (implementation.device != Device::Kind::cpu) continue;
    const std::string what = std::string("q8, q4 by ") + implementation.name;
    double error = 0.0;
    std::string wrong;
    for (const quantised::Format format : {quantised::Format::q8, quantised::Format::q4}) {
      const Tensor packed = Tensor::zeros(quantised::packed_shape(format, kOut, kIn), DType::u8);
      const Tensor expected = Tensor::empty({kRows, kOut}, DType::f32), y = Tensor::empty({kRows, kOut}, DType::f32);
      Context context;
      quantised::quantise(context, values, {}, packed);
      context.force_implementation("reference");
      quantised::run(context, x, packed, expected);
      context.force_implementation(implementation.name);
      quantised::run(context, x, packed, y);
      wrong += testing::check_close(quantised::name_of(format), y, expected, 1e-4);
      error = std::max(error, testing::difference(y, expected).relative);
    }
    if (wrong.empty()) {
      report.line(what.c_str(), fmt::format("right (relative error {:.1e})", error));
    } else {
      report.problem(what.c_str(), wrong, "please report this with the processor's name");
    }
  }
}

#ifdef FLASHGLA_CUDA
// From this process' first touch of the driver to the first result of forward and backward: nothing is compiled or
// tuned when a kernel first runs, so this is CUDA's own start and little else.
void time_first_call(Report& report, std::chrono::steady_clock::time_point begin) {
  const Device device = Device::cuda(0);
  const Shape shape({4, 512, 40, 64});
  const Tensor x = Tensor::zeros(shape, DType::bf16, device), o = Tensor::zeros(shape, DType::bf16, device);
  const Tensor dq = Tensor::zeros(shape, DType::bf16, device), dk = Tensor::zeros(shape, DType::bf16, device);
  Context context(device);
  const gla::Inputs inputs{.q = x, .k = x, .v = x, .g = x};
  gla::forward(context, inputs, {.o = o});
  gla::backward(context, inputs, {.o = o}, {.d_o = x}, {.dq = dq, .dk = dk});
  BFloat16 first;
  copy_memory(&first, Device::cpu(), dk->data, device, sizeof(first));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::string plan;
  for (const gla::Implementation& row : gla::implementations()) {
    const bool runs = row.device == device.kind && row.supports(gla::describe(inputs, {}), context.architecture());
    if (plan.empty() && runs) plan = row.name + name_of_plan(row, context, inputs, {.o = o});
  }
  report.line("first call on CUDA",
              fmt::format("{:.2f} s, CUDA's start included; bf16 4x512, 40 heads of 64/64: {}", seconds, plan));
}
#endif

#ifdef FLASHGLA_CUDA
// The card, what its memory and its matrix units reach, and the libraries that the program found.
void describe_device(Report& report, Device device) {
  const std::string name = name_of(device);
  const bench::Card card = bench::describe_card(device);
  report.line(name.c_str(), card.product);
  report.line("", card.versions);
  testing::BenchOptions options;
  options.device = device;
  options.seconds = 0.1;
  for (const testing::BenchRow& row : bench::measure_ceilings(options)) {
    if (row.operation == bench::kCopyCeiling) {
      report.line("", fmt::format("{:.2f} TB/s copied ({})", row.bytes / row.milliseconds * 1e-9, row.problem));
    } else if (row.operation == bench::kTensorCeiling) {
      report.line("", fmt::format("{:.0f} TFLOP/s multiplied ({})", row.flops / row.milliseconds * 1e-9, row.problem));
    }
  }
  try {
    Context context(device);
    report.line("", "products: " + ops::matmul::library_of(context));
    report.line("", "softmax attention: " + ops::softmax_attention::describe_library(context));
  } catch (const Error& error) {
    report.problem(name.c_str(), error.what(), "training and generation there need it");
  }
}
#endif

void run_doctor() {
  Report report;
  print("FlashGLA {} ({}) on {}\n", FLASHGLA_VERSION, source_commit(), processor_name());
  const Context context;
  report.line("threads", std::to_string(context.threads()) + " (" + choose_threads().why + ")");
  report.line("instruction sets", instruction_sets());
  const double memory = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
  report.line("memory", format_bytes(memory));
  const std::filesystem::space_info space = std::filesystem::space(".");
  report.line("free disk here", format_bytes(static_cast<double>(space.available)));
  if (space.available < (std::uintmax_t{1} << 30)) {
    report.problem("free disk here", "less than 1 GB", "checkpoints may not fit");
  }
  if (has_gnuplot()) {
    report.line("gnuplot", "found: `flashgla plot` writes PNG");
  } else {
    report.line("gnuplot", "missing: `flashgla plot` draws nothing (Debian: gnuplot-nox)");
  }
#ifdef FLASHGLA_CUDA
  const auto before_cuda = std::chrono::steady_clock::now();
  const int devices = cuda_device_count();
  if (devices > 0) time_first_call(report, before_cuda);
  try {
    const Context any(Device::cuda(0));
    report.line("CUDA", fmt::format("{} device(s)", devices));
  } catch (const Error& error) {
    report.line("CUDA", std::string("built in, but ") + error.what());
  }
  for (int index = 0; index < devices; ++index) describe_device(report, Device::cuda(index));
#else
  const int devices = 0;
  report.line("CUDA", "not in this build (configure with -DFLASHGLA_CUDA=ON)");
#endif
  check_implementations(report, Device::cpu());
  check_quantised(report);
  for (int index = 0; index < devices; ++index) check_implementations(report, Device::cuda(index));
  print("{}\n", report.healthy ? "All is well. Next: flashgla train --help" : "Something needs attention: see above.");
  if (!report.healthy) throw Error("doctor: at least one check failed");
}

}  // namespace

void add_doctor(CLI::App& app) {
  app.add_subcommand("doctor",
                     "Says what this machine can run (processor, memory, GPUs, programs) and checks its kernels")
      ->callback(run_doctor);
}

}  // namespace flashgla::cli
