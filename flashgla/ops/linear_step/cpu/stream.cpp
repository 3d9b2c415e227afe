// Few rows in f32: one parallel region over the columns of all layers, bound by the bytes of their weights. A thread
// goes through its columns' weights and then through the epilogue of these columns.
#include "flashgla/ops/matmul/cpu/stream.h"

#include <algorithm>
#include <array>
#include <limits>

#include "flashgla/ops/linear_step/cpu/walk.h"
#include "flashgla/ops/linear_step/implementations.h"
#include "flashgla/ops/quantised_linear/cpu/kernel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "flashgla/ops/linear_step/cpu/stream.cpp"
// clang-format off
#include "hwy/foreach_target.h"  // comes first
#include "flashgla/base/cpu/simd_math.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace flashgla::ops::linear_step {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace simd = flashgla::simd::HWY_NAMESPACE;
using simd::VF32;

// y = gate sigmoid(gate) up
void Swiglu(const float* gate, const float* up, float* y, std::int64_t count) {
  simd::map([](VF32 g, VF32 u) { return hn::Mul(hn::Mul(g, simd::sigmoid(simd::F32(), g)), u); }, count, y, gate, up);
}

void LogSigmoid(float* y, std::int64_t count, float scale, float least) {
  const simd::F32 d;
  simd::map([&](VF32 a) { return hn::Max(hn::Mul(simd::log_sigmoid(d, a), hn::Set(d, scale)), hn::Set(d, least)); },
            count, y, y);
}

}  // namespace HWY_NAMESPACE
}  // namespace flashgla::ops::linear_step
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace flashgla::ops::linear_step {

HWY_EXPORT(Swiglu);
HWY_EXPORT(LogSigmoid);

namespace {

// u as the kernels of the weights' dtypes read it.
struct Arranged {
  TensorView beside_f32, beside_bf16;
  quantised_linear::Activations integers{};
  const quantised_linear::Kernel* kernel = nullptr;

  Arranged(Context& context, const TensorView& u, std::span<const Layer> layers) {
    Arena& scratch = context.scratch();
    const char* const label = "linear step: inputs";
    for (const Layer& layer : layers) {
      if (layer.weight.dtype == DType::u8 && kernel == nullptr) {
        kernel = &quantised_linear::kernel_of_few_rows(context);
        integers = quantised_linear::take_activations(scratch, u.size(0), layer.weight.size(1));
        if (!context.planning()) quantised_linear::encode(context, u, layer.weight.size(1), *kernel, integers);
      }
      TensorView& floats = layer.weight.dtype == DType::f32 ? beside_f32 : beside_bf16;
      if (layer.weight.dtype == DType::u8 || floats) continue;
      floats = scratch.tensor(matmul::arranged_shape(u), DType::f32, label);
      if (!context.planning()) matmul::arrange(u, layer.weight.dtype, floats);
    }
  }
};

// A layer's columns in the region.
struct Work {
  const Layer* layer = nullptr;
  TensorView product;  // what the products go to: y, or gate and up beside each other
  // Columns come by whole rows of the weight, or panels of them: so many to each, so many of these, and at once.
  std::int64_t unit = 1, rows = 0, at_once = 1;

  Work() = default;
  Work(Context& context, const Layer& of, std::int64_t halves) : layer(&of), product(of.y) {
    const std::int64_t out = of.y.size(1);
    if (halves == 2) {
      product = context.scratch().tensor(Shape({of.y.size(0), 2 * out}), DType::f32, "linear step: gate and up");
    }
    const bool packed = of.weight.dtype == DType::u8;
    if (packed) unit = quantised_linear::kPanelRows;
    rows = (out + unit - 1) / unit;
    const bool streams = !packed || of.y.size(0) <= 2;
    if (streams) at_once = rows_at_once(halves * static_cast<std::int64_t>(of.weight.bytes()) / of.weight.size(0));
  }

  // Columns [begin, end) of the product; bytes of packed weights go by whole panels.
  void multiply(const Arranged& u, std::int64_t begin, std::int64_t end, bool accumulate) const {
    const TensorView& weight = layer->weight;
    if (weight.dtype == DType::u8) {
      constexpr std::int64_t kRows = quantised_linear::kPanelRows;
      const quantised_linear::Call call{quantised_linear::format_of(weight),
                                        weight.as<std::uint8_t>(),
                                        weight.size(1),
                                        u.integers,
                                        product,
                                        {accumulate, layer->bias}};
      return u.kernel->multiply(call, begin / kRows, (end + kRows - 1) / kRows);
    }
    matmul::stream_columns(weight.dtype == DType::f32 ? u.beside_f32 : u.beside_bf16, weight.transpose(0, 1), product,
                           {accumulate, layer->bias}, begin, end);
  }

  // Rows [first, last) of the weight, or panels.
  void run(const Arranged& u, std::int64_t first, std::int64_t last, const Options& options) const {
    const std::int64_t out = layer->y.size(1), begin = first * unit, end = std::min(last * unit, out);
    multiply(u, begin, end, options.epilogue == Epilogue::add);
    if (options.epilogue == Epilogue::swiglu) multiply(u, out + begin, out + end, false);
    for (std::int64_t n = 0; n < layer->y.size(0); ++n) {
      float* y = layer->y.as<float>() + n * layer->y.stride[0] + begin;
      if (options.epilogue == Epilogue::swiglu) {
        const float* gate = product.as<float>() + n * product.stride[0] + begin;
        HWY_DYNAMIC_DISPATCH(Swiglu)(gate, gate + out, y, end - begin);
      } else if (options.epilogue == Epilogue::log_sigmoid) {
        HWY_DYNAMIC_DISPATCH(LogSigmoid)
        (y, end - begin, static_cast<float>(1.0 / options.normalizer), static_cast<float>(options.clamp_min));
      }
    }
  }
};

void stream(Context& context, const Inputs& inputs, std::span<const Layer> layers, const Options& options) {
  const ArenaScope scope(context.scratch());
  const TensorView u = run_prologue(context, inputs);
  const Arranged arranged(context, u, layers);
  std::array<Work, kMostLayers> works;
  Walk walk;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    works[i] = Work(context, layers[i], options.epilogue == Epilogue::swiglu ? 2 : 1);
    walk.add(layers[i], works[i].rows, works[i].at_once);
  }
  if (context.planning()) return;
  walk.share_out(context.threads());
  const auto work_on = [&](std::size_t layer, std::int64_t begin, std::int64_t end) {
    works[layer].run(arranged, begin, end, options);
  };
  run_on_team(walk.cut(), work_on, Order::of_this_thread().after(walk));
}

Support few_rows_in_f32(const Problem& problem, const Architecture&) {
  if (problem.dtype != DType::f32) return Support::no("x is not f32");
  if (problem.rows > matmul::kMostStreamedRows) return Support::no("more than 16 rows");
  if (!problem.whole_panels) return Support::no("packed rows of up begin within a panel");
  return Support::yes();
}

}  // namespace

const Implementation kStream{"cpu_stream", Device::Kind::cpu, few_rows_in_f32, stream};

}  // namespace flashgla::ops::linear_step
#endif
