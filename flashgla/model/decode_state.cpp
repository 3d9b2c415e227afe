#include "flashgla/model/decode_state.h"

#include "flashgla/base/memory.h"

namespace flashgla::model {

DecodeState::DecodeState(std::vector<std::vector<mixers::StateEntry>> layouts, std::int64_t sequences, Device device)
    : sequences_(sequences), layouts_(std::move(layouts)) {
  if (sequences <= 0) throw Error("decode state", "sequences", "is " + std::to_string(sequences), "at least 1");
  std::int64_t elements = 0;
  DType dtype = DType::f32;
  for (const auto& layout : layouts_) {
    for (const mixers::StateEntry& entry : layout) {
      if (elements > 0 && entry.dtype != dtype) throw Error("decode state: entries of more than one dtype");
      dtype = entry.dtype;
      elements += entry.shape.numel();
    }
  }
  memory_ = Tensor::zeros(Shape({elements}), dtype, device);
  for (std::size_t i = 0; i < layouts_.size(); ++i) layers_.push_back(layer_of(memory_, i));
  history.resize(static_cast<std::size_t>(sequences));
}

mixers::LayerState DecodeState::layer_of(const TensorView& flat, std::size_t index) const {
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < index; ++i) {
    for (const mixers::StateEntry& entry : layouts_[i]) begin += entry.shape.numel();
  }
  mixers::LayerState layer;
  for (const mixers::StateEntry& entry : layouts_[index]) {
    const std::int64_t end = begin + entry.shape.numel();
    layer.push_back(flat.slice(0, begin, end).reshape(entry.shape));
    begin = end;
  }
  return layer;
}

void DecodeState::reset() {
  zero_memory(memory_->data, memory_->bytes(), memory_->device);
  history.assign(static_cast<std::size_t>(sequences_), {});
}

void DecodeState::reset_sequence(std::int64_t i) {
  for (const mixers::LayerState& layer : layers_) {
    for (const TensorView& entry : layer) {
      const TensorView part = entry.select(0, i);
      zero_memory(part.data, part.bytes(), part.device);
    }
  }
  history[static_cast<std::size_t>(i)] = {};
}

void DecodeState::History::add(std::span<const std::int32_t> some) {
  for (const std::int32_t token : some) add(token);
}

void DecodeState::History::add(std::int32_t token) {
  ++tokens;
  hash = (hash ^ (static_cast<std::uint32_t>(token) + 0x9e3779b97f4a7c15u)) * 0xbf58476d1ce4e5b9u;
  hash ^= hash >> 29;
}

}  // namespace flashgla::model
