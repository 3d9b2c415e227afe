#include "flashgla/ops/linear_step/linear_step.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "flashgla/ops/aligned_rows.h"
#include "flashgla/ops/linear_step/implementations.h"
#include "flashgla/ops/quantised_linear/quantised_linear.h"
#include "flashgla/ops/rotary/rotary.h"

namespace flashgla::ops::linear_step {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kStreamCuda, kTensorCoresCuda, kPackedCuda, kComposedCuda,
                                         kStream,     kComposed,        kReference};
#else
  static const Implementation table[] = {kStream, kComposed, kReference};
#endif
  return table;
}

namespace {

void check_prologue(const Arguments& arguments, const Inputs& inputs) {
  const std::int64_t in = inputs.x.size(1);
  if (inputs.gate && inputs.prologue != Prologue::head_norm) {
    arguments.fail("gate", "is present", "none without the prologue head_norm");
  }
  if (inputs.prologue == Prologue::none) {
    arguments.check_absent("norm_weight", inputs.norm_weight, "without a norm");
    return;
  }
  if (!(inputs.epsilon >= 0.0)) arguments.fail("epsilon", "is " + std::to_string(inputs.epsilon), "at least 0");
  std::int64_t size = in;
  if (inputs.prologue == Prologue::head_norm) {
    size = inputs.head_size;
    if (size < 1 || in % size != 0) {
      arguments.fail("head_size", "is " + std::to_string(size),
                     "a divisor of " + std::to_string(in) + " (x's columns)");
    }
    if (inputs.gate) arguments.check("gate", inputs.gate, inputs.x.dtype, inputs.x.shape, "x");
  }
  if (inputs.norm_weight) {
    arguments.check("norm_weight", inputs.norm_weight, parameters_of(inputs.x.dtype), Shape({size}),
                    inputs.prologue == Prologue::head_norm ? "head_size" : "x's columns", Layout::contiguous);
  }
}

void check_rotary(const Arguments& arguments, const Inputs& inputs, const Layer& layer, const Options& options) {
  const Rotary& rotary = options.rotary;
  if (options.epilogue != Epilogue::store) {
    arguments.fail("turned", "is " + std::to_string(layer.turned), "0 with another epilogue than store");
  }
  if (rotary.head_size < 2 || rotary.head_size % 2 != 0) {
    arguments.fail("rotary.head_size", "is " + std::to_string(rotary.head_size), "an even number");
  }
  if (layer.turned > layer.y.size(1) || layer.turned % rotary.head_size != 0) {
    arguments.fail("turned", "is " + std::to_string(layer.turned),
                   "whole heads of " + std::to_string(rotary.head_size) + " of y's columns");
  }
  if (!(rotary.base > 1.0)) arguments.fail("rotary.base", "is " + std::to_string(rotary.base), "more than 1");
  if (rotary.positions) {
    arguments.check("rotary.positions", rotary.positions, DType::i32, Shape({inputs.x.size(0)}), "x's rows",
                    Layout::contiguous);
  }
}

void turn(Context& context, const Layer& layer, const Rotary& rotary) {
  TensorView heads = layer.y.slice(1, 0, layer.turned);
  heads.shape = Shape({heads.size(0), 1, layer.turned / rotary.head_size, rotary.head_size});
  heads.stride[1] = heads.stride[0];
  heads.stride[2] = rotary.head_size;
  heads.stride[3] = 1;
  rotary::run(context, heads, rotary.positions, {}, rotary.base, rotary::Direction::forward, heads);
}

}  // namespace

void turn_first(std::span<Layer> layers, std::int64_t columns) {
  for (Layer& layer : layers) {
    layer.turned = std::min(columns, layer.y.size(1));
    columns -= layer.turned;
  }
}

void run(Context& context, const Inputs& inputs, std::span<const Layer> layers, const Options& options) {
  const Arguments arguments("linear_step", context);
  const TensorView& x = inputs.x;
  arguments.check("x", x, {DType::f64, DType::f32, DType::bf16});
  arguments.check_rank("x", x, 2);
  check_prologue(arguments, inputs);
  if (layers.empty() || layers.size() > kMostLayers) {
    arguments.fail("layers", "are " + std::to_string(layers.size()), "one to eight");
  }
  if (options.epilogue == Epilogue::log_sigmoid && !(options.normalizer > 0.0)) {
    arguments.fail("normalizer", "is " + std::to_string(options.normalizer), "a positive number");
  }
  const DTypes parameters = x.dtype == DType::f32 ? DTypes{DType::f32, DType::bf16} : DTypes{x.dtype};
  const std::int64_t halves = options.epilogue == Epilogue::swiglu ? 2 : 1;
  Problem problem{x.size(0),
                  x.size(1),
                  inputs.prologue == Prologue::head_norm ? x.size(1) / inputs.head_size : 1,
                  x.dtype,
                  layers[0].weight.dtype,
                  layers.size(),
                  0,
                  rows_are_aligned(x),
                  true};
  if (inputs.gate) problem.aligned = problem.aligned && rows_are_aligned(inputs.gate);
  std::int64_t columns = 0;
  bool turns = false;
  const bool gpu = context.device().kind == Device::Kind::cuda;
  for (const Layer& layer : layers) {
    const bool wider = x.dtype == DType::bf16 && options.epilogue == Epilogue::store;
    arguments.check("y", layer.y, wider ? DTypes{DType::f32, DType::bf16} : DTypes{x.dtype});
    arguments.check_rank("y", layer.y, 2);
    if (layer.y.size(0) != x.size(0)) {
      arguments.fail("y", "has shape " + to_string(layer.y.shape),
                     "[" + std::to_string(x.size(0)) + ",O] (as x's rows)");
    }
    const char* const as = halves == 2 ? "twice y's columns, x's columns" : "y's columns, x's columns";
    const Shape shape({halves * layer.y.size(1), x.size(1)});
    if (quantised_linear::is_packed(layer.weight) && (x.dtype != DType::bf16 || gpu)) {
      const Shape packed =
          quantised_linear::packed_shape(quantised_linear::format_of(layer.weight), shape[0], shape[1]);
      arguments.check("weight", layer.weight, DType::u8, packed, as, Layout::contiguous);
      problem.weight_dtype = DType::u8;
      problem.whole_panels =
          problem.whole_panels && (halves == 1 || layer.y.size(1) % quantised_linear::kPanelRows == 0);
    } else {
      arguments.check("weight", layer.weight, parameters, shape, as, Layout::contiguous);
      if (problem.beside_packed != DType::f32) problem.beside_packed = layer.weight.dtype;
    }
    if (problem.weight_dtype != DType::u8 && layer.weight.dtype != problem.weight_dtype) {
      arguments.fail("weight", std::string("has dtype ") + name_of(layer.weight.dtype),
                     std::string(name_of(problem.weight_dtype)) + " (as the first layer's)");
    }
    if (layer.bias) {
      if (halves == 2) arguments.fail("bias", "is present", "none with swiglu");
      arguments.check("bias", layer.bias, parameters_of(x.dtype), Shape({layer.y.size(1)}), "y's columns",
                      Layout::contiguous);
    }
    if (layer.turned != 0) check_rotary(arguments, inputs, layer, options);
    problem.aligned = problem.aligned && rows_are_aligned(layer.weight);
    columns += layer.y.size(1);
    if (layer.turned > 0) turns = true;
  }
  if (turns) problem.columns = columns;
  if (x.size(0) == 0) return;
  const Implementation& row =
      select("linear_step", implementations(), problem, context.architecture(), context.forced_implementation());
  row.run(context, inputs, layers, options);
  if (row.turns > 0 && options.rotary.head_size % row.turns == 0) return;
  for (const Layer& layer : layers) {
    if (layer.turned > 0) turn(context, layer, options.rotary);
  }
}

}  // namespace flashgla::ops::linear_step
