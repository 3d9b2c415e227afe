#include "flashgla/eval/windows.h"

#include <algorithm>
#include <cmath>

#include "flashgla/base/error.h"
#include "flashgla/base/memory.h"

namespace flashgla::eval {

std::vector<Window> windows_of(std::int64_t tokens, std::int64_t length, std::int64_t stride) {
  if (length < 1) throw Error("evaluate", "window", "is " + std::to_string(length), "1 or more tokens");
  if (stride < 1 || stride > length) {
    throw Error("evaluate", "stride", "is " + std::to_string(stride),
                "1 .. " + std::to_string(length) + " (the window)");
  }
  std::vector<Window> windows;
  std::int64_t last = std::min(length, tokens - 1);  // the last token predicted so far
  if (last < 1) return windows;
  windows.push_back({0, 1, last});
  while (last < tokens - 1) {
    const std::int64_t end = std::min(last + stride, tokens - 1);
    windows.push_back({end - length, last + 1, end});
    last = end;
  }
  return windows;
}

LossReader::LossReader(Context& context, model::LanguageModel& model) : context_(context), model_(model) {
  if (model.dtype() == DType::f64) throw Error("evaluate: a model in f64 is for checking gradients; load it as f32");
  if (context.architecture().matrix_units && model.dtype() == DType::bf16) model.set_inference_dtype(DType::bf16);
}

std::vector<float> LossReader::losses(const std::vector<std::int32_t>& tokens, const std::vector<std::int32_t>& targets,
                                      const std::vector<std::int32_t>& bounds, model::DecodeState* state) {
  const auto total = static_cast<std::int64_t>(tokens.size());
  const ArenaScope scope(context_.scratch());
  const auto put = [&](const std::vector<std::int32_t>& values, const Shape& shape) {
    const TensorView tensor = context_.scratch().tensor(shape, DType::i32, "losses: tokens");
    copy_memory(tensor.data, tensor.device, values.data(), Device::cpu(), tensor.bytes());
    return tensor;
  };
  const TensorView ids = put(tokens, Shape({1, total})), wanted = put(targets, Shape({1, total}));
  const Shape bounds_shape({static_cast<std::int64_t>(bounds.size())});
  const TensorView device_bounds = put(bounds, bounds_shape);
  const TensorView host(const_cast<std::int32_t*>(bounds.data()), bounds_shape);
  nn::Pass pass{context_};
  pass.sequences = {device_bounds, host, 0};
  const TensorView out = context_.scratch().tensor(Shape({total}), DType::f32, "losses");
  model_.evaluate(pass, ids, wanted, out, state);
  context_.queue().synchronize();
  std::vector<float> losses(tokens.size());
  copy_memory(losses.data(), Device::cpu(), out.data, out.device, out.bytes());
  if (std::any_of(losses.begin(), losses.end(), [](float loss) { return std::isnan(loss); })) {
    throw Error("evaluate: a token's loss is NaN; the model's weights may be damaged");
  }
  return losses;
}

std::vector<double> LossReader::windows(std::span<const Piece> pieces) {
  std::vector<std::int32_t> tokens, targets, bounds = {0};
  for (const auto& [document, window] : pieces) {
    for (std::int64_t i = window.begin; i < window.end; ++i) {
      tokens.push_back(document[static_cast<std::size_t>(i)]);
      targets.push_back(i + 1 >= window.first ? document[static_cast<std::size_t>(i + 1)] : -1);
    }
    bounds.push_back(static_cast<std::int32_t>(tokens.size()));
  }
  const std::vector<float> each = losses(tokens, targets, bounds, nullptr);
  std::vector<double> sums(pieces.size(), 0.0);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    for (std::int32_t j = bounds[i]; j < bounds[i + 1]; ++j) sums[i] += each[static_cast<std::size_t>(j)];
  }
  return sums;
}

std::vector<float> LossReader::carried(std::span<const std::int32_t> tokens, std::int64_t length) {
  if (tokens.size() < 2) return {};
  model::DecodeState state = model_.make_state(1, static_cast<std::int64_t>(tokens.size()) - 1);
  return carried(tokens, length, state);
}

std::vector<float> LossReader::carried(std::span<const std::int32_t> tokens, std::int64_t length,
                                       model::DecodeState& state) {
  const auto predicted = static_cast<std::int64_t>(tokens.size()) - 1;
  std::vector<float> all;
  for (std::int64_t begin = 0; begin < predicted; begin += length) {
    const std::int64_t end = std::min(begin + length, predicted);
    const std::vector<std::int32_t> read(tokens.begin() + begin, tokens.begin() + end);
    const std::vector<std::int32_t> targets(tokens.begin() + begin + 1, tokens.begin() + end + 1);
    const std::vector<float> some = losses(read, targets, {0, static_cast<std::int32_t>(end - begin)}, &state);
    state.history[0].add(read);
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

}  // namespace flashgla::eval
