#include "flashgla/model/calibration.h"

#include <algorithm>

#include "flashgla/ops/matmul/matmul.h"

namespace flashgla::model {

namespace {

std::string parent_of(const std::string& name) {  // "model.layers.0.attn" of "model.layers.0.attn.q_proj.weight"
  const std::size_t matrix = name.rfind('.', name.rfind('.') - 1);
  return name.substr(0, matrix);
}

// Removes what observes, whatever happens.
struct Observers {
  explicit Observers(const std::vector<nn::Parameter*>& parameters) : all(parameters) {}
  ~Observers() {
    for (nn::Parameter* parameter : all) parameter->observe = nullptr;
  }
  Observers(const Observers&) = delete;
  Observers& operator=(const Observers&) = delete;
  const std::vector<nn::Parameter*>& all;
};

}  // namespace

Calibration::Calibration(Context& context, LanguageModel& model, std::span<const std::int32_t> tokens,
                         std::int64_t length, bool products) {
  if (tokens.empty() || length < 1) throw Error("calibration: the text has no tokens");
  const std::vector<nn::Parameter*>& parameters = model.parameters().parameters();
  const Observers observers(parameters);
  for (nn::Parameter* parameter : parameters) {
    if (parameter->quantisation == nn::Quantisation::none) continue;
    parameter->observe = [this, products, name = parameter->name](Context& own, const TensorView& x) {
      add(own, name, x, products);
    };
  }
  const auto total = static_cast<std::int64_t>(tokens.size());
  for (std::int64_t begin = 0; begin < total; begin += length) {
    const std::int64_t count = std::min(length, total - begin);
    const ArenaScope scope(context.scratch());
    nn::Pass pass{context};
    const TensorView ids(const_cast<std::int32_t*>(tokens.data()) + begin, DType::i32, Shape({1, count}));
    const TensorView hidden =
        context.scratch().tensor(Shape({count, model.config().hidden_size}), model.activation_dtype(), "calibration");
    model.hidden_states(pass, ids, hidden);
  }
  for (Rows* rows : {&squares_, &products_}) {
    for (const auto& [name, sums] : *rows) {
      auto* values = sums.as<float>();
      for (std::int64_t i = 0; i < sums->numel(); ++i) values[i] /= static_cast<float>(total);
    }
  }
  // Parts of a layer follow its first weight, which alone has been heard of.
  const nn::Parameter* first = nullptr;
  for (const nn::Parameter* parameter : parameters) {
    if (parameter->shape.rank() != 2) continue;
    if (squares_.contains(parameter->name)) first = parameter;
    const bool part = first != nullptr && parent_of(first->name) == parent_of(parameter->name) &&
                      first->shape[1] == parameter->shape[1];
    if (part) first_of_[parameter->name] = first->name;
  }
}

void Calibration::add(Context& context, const std::string& name, const TensorView& x, bool products) {
  const std::int64_t columns = x.size(1);
  Tensor& sums = squares_[name];
  if (!sums) sums = Tensor::zeros({columns}, DType::f32);
  parallel_for_blocks(context, columns, 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t k = begin; k < end; ++k) {
      double total = 0.0;
      for (std::int64_t m = 0; m < x.size(0); ++m) {
        const auto value = static_cast<double>(x.as<float>()[m * x.stride[0] + k]);
        total += value * value;
      }
      sums.as<float>()[k] += static_cast<float>(total);
    }
  });
  if (!products) return;
  Tensor& all = products_[name];
  if (!all) all = Tensor::zeros({columns, columns}, DType::f32);
  ops::matmul::run(context, x.transpose(0, 1), x, all, {.accumulate = true});
}

TensorView Calibration::find(const Rows& rows, const nn::Parameter& parameter) const {
  const auto first = first_of_.find(parameter.name);
  const auto row = first == first_of_.end() ? rows.end() : rows.find(first->second);
  return row == rows.end() ? TensorView() : row->second.view();
}

}  // namespace flashgla::model
