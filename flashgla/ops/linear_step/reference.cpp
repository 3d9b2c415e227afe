// The definition, in f64.
#include <algorithm>
#include <cmath>
#include <vector>

#include "flashgla/ops/elements.h"
#include "flashgla/ops/linear_step/implementations.h"
#include "flashgla/ops/quantised_linear/quantised_linear.h"

namespace flashgla::ops::linear_step {

namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// log sigmoid(x) without overflow.
double log_sigmoid(double x) { return std::min(x, 0.0) - std::log1p(std::exp(-std::abs(x))); }

std::vector<double> prologue(const Inputs& inputs, std::int64_t row) {
  const Elements x(inputs.x), weight(inputs.norm_weight), gate(inputs.gate);
  const std::int64_t in = x.length();
  std::vector<double> u(static_cast<std::size_t>(in));
  const auto at = [&](std::int64_t i) -> double& { return u[static_cast<std::size_t>(i)]; };
  for (std::int64_t i = 0; i < in; ++i) at(i) = x(row, i);
  if (inputs.prologue == Prologue::none) return u;
  const std::int64_t size = inputs.prologue == Prologue::head_norm ? inputs.head_size : in;
  for (std::int64_t begin = 0; begin < in; begin += size) {
    double squares = 0.0;
    for (std::int64_t i = begin; i < begin + size; ++i) squares += at(i) * at(i);
    const double r = 1.0 / std::sqrt(squares / static_cast<double>(size) + inputs.epsilon);
    for (std::int64_t i = begin; i < begin + size; ++i) {
      at(i) *= r * (inputs.norm_weight ? weight(i - begin) : 1.0);
      if (inputs.gate) at(i) *= gate(row, i) * sigmoid(gate(row, i));
    }
  }
  return u;
}

void reference(Context& context, const Inputs& inputs, std::span<const Layer> given, const Options& options) {
  if (context.planning()) return;
  std::vector<Layer> layers(given.begin(), given.end());
  std::vector<Tensor> decoded;  // packed weights as floats
  for (Layer& layer : layers) {
    if (!quantised_linear::is_packed(layer.weight)) continue;
    const std::int64_t rows = layer.y.size(1) * (options.epilogue == Epilogue::swiglu ? 2 : 1);
    decoded.push_back(Tensor::empty({rows, inputs.x.size(1)}, DType::f64));
    quantised_linear::decode(context, layer.weight, 0, decoded.back());
    layer.weight = decoded.back();
  }
  parallel_for(context, inputs.x.size(0), [&](std::int64_t row) {
    const std::vector<double> u = prologue(inputs, row);
    for (const Layer& layer : layers) {
      const Elements weight(layer.weight), bias(layer.bias), y(layer.y);
      const auto dot = [&](std::int64_t o) {
        double total = layer.bias ? bias(o) : 0.0;
        for (std::size_t i = 0; i < u.size(); ++i) total += weight(o, static_cast<std::int64_t>(i)) * u[i];
        return total;
      };
      const std::int64_t out = y.length();
      for (std::int64_t o = 0; o < out; ++o) {
        const double a = dot(o);
        switch (options.epilogue) {
          case Epilogue::store:
            y.set(row, o, a);
            break;
          case Epilogue::add:
            y.add(row, o, a);
            break;
          case Epilogue::swiglu:
            y.set(row, o, a * sigmoid(a) * dot(out + o));
            break;
          case Epilogue::log_sigmoid:
            y.set(row, o, std::max(log_sigmoid(a) / options.normalizer, options.clamp_min));
            break;
        }
      }
    }
  });
}

}  // namespace

const Implementation kReference{"reference", Device::Kind::cpu,
                                [](const Problem&, const Architecture&) { return Support::yes(); }, reference};

}  // namespace flashgla::ops::linear_step
