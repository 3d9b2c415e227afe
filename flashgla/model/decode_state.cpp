#include "flashgla/model/decode_state.h"

#include <xxhash.h>

#include <algorithm>

#include "flashgla/base/memory.h"

namespace flashgla::model {

namespace {

// Entries begin at multiples of this, as operators like them.
constexpr std::int64_t kAlignment = 256;

std::int64_t bytes_of(const mixers::StateEntry& entry) {
  return entry.shape.numel() * static_cast<std::int64_t>(size_of(entry.dtype));
}
std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

DecodeState::DecodeState(LayoutsOf layouts_of, std::int64_t sequences, std::int64_t capacity, Device device,
                         const mixers::MostTokens& most_tokens)
    : layouts_of_(std::move(layouts_of)),
      sequences_(sequences),
      capacity_(0),
      most_tokens_(most_tokens),
      device_(device) {
  if (sequences <= 0) throw Error("decode state", "sequences", "is " + std::to_string(sequences), "at least 1");
  layouts_ = layouts_of_(sequences, 0);
  std::int64_t constant = 0;
  for (const auto& layout : layouts_) {
    for (const mixers::StateEntry& entry : layout) constant += entry.growing ? 0 : aligned(bytes_of(entry));
  }
  constant_ = Tensor::zeros(Shape({std::max(constant, kAlignment)}), DType::u8, device);
  positions_ = Tensor::zeros(Shape({sequences}), DType::i32, device);
  for (const auto& layout : layouts_of_(1, 1)) {
    for (const mixers::StateEntry& entry : layout) {
      if (entry.growing) bytes_per_token_ += static_cast<std::size_t>(bytes_of(entry));
    }
  }
  growing_.resize(layouts_.size());
  for (std::size_t i = 0; i < layouts_.size(); ++i) layers_.push_back(layer_of(constant_, i));
  history.resize(static_cast<std::size_t>(sequences));
  reserve(capacity);
}

std::size_t DecodeState::bytes() const {
  return constant_->bytes() + positions_->bytes() + bytes_per_token_ * static_cast<std::size_t>(sequences_ * capacity_);
}

bool DecodeState::has_ring() const {
  const auto holds = [](const mixers::StateEntry& entry) { return entry.ring; };
  return std::any_of(layouts_.begin(), layouts_.end(),
                     [&](const auto& layout) { return std::any_of(layout.begin(), layout.end(), holds); });
}

void DecodeState::reserve(std::int64_t capacity) {
  if (capacity <= capacity_) return;
  if (capacity > most_tokens_.count) {
    throw Error("decode state", "tokens", "are to be " + std::to_string(capacity) + " a sequence",
                "at most the " + std::to_string(most_tokens_.count) + " " + most_tokens_.what);
  }
  const Layouts larger = layouts_of_(sequences_, capacity);
  for (std::size_t i = 0; i < larger.size(); ++i) {
    std::vector<Tensor> entries;
    for (const mixers::StateEntry& entry : larger[i]) {
      if (!entry.growing) continue;
      const Tensor more = Tensor::zeros(entry.shape, entry.dtype, device_);
      if (capacity_ > 0) {
        const TensorView old = growing_[i][entries.size()];
        for (std::int64_t n = 0; n < sequences_; ++n) {
          const TensorView rows = old.select(0, n);
          copy_memory(more->select(0, n).data, device_, rows.data, device_, rows.bytes());
        }
      }
      entries.push_back(more);
    }
    growing_[i] = std::move(entries);
  }
  layouts_ = larger;
  capacity_ = capacity;
  for (std::size_t i = 0; i < layers_.size(); ++i) layers_[i] = layer_of(constant_, i);
}

mixers::LayerState DecodeState::layer_of(const TensorView& constant, std::size_t index) const {
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < index; ++i) {
    for (const mixers::StateEntry& entry : layouts_[i]) begin += entry.growing ? 0 : aligned(bytes_of(entry));
  }
  mixers::LayerState layer;
  std::size_t growing = 0;
  for (const mixers::StateEntry& entry : layouts_[index]) {
    if (entry.growing) {
      // Without room there is no memory, but a view that is present and has no rows.
      layer.push_back(capacity_ > 0 ? growing_[index][growing].view()
                                    : TensorView(constant.data, entry.dtype, entry.shape, constant.device));
      ++growing;
      continue;
    }
    layer.emplace_back(static_cast<std::byte*>(constant.data) + begin, entry.dtype, entry.shape, constant.device);
    begin += aligned(bytes_of(entry));
  }
  return layer;
}

void DecodeState::reset() {
  // Rows of growing entries need no zeros: those before the position are all that is read.
  zero_memory(constant_->data, constant_->bytes(), device_);
  zero_memory(positions_->data, positions_->bytes(), device_);
  history.assign(static_cast<std::size_t>(sequences_), {});
}

void DecodeState::copy_sequence(std::int64_t i, const DecodeState& from, std::int64_t from_i) {
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    if (layers_[layer].size() != from.layers_[layer].size()) {
      throw Error("decode state: a sequence is copied between states of which one has a ring");
    }
    for (std::size_t entry = 0; entry < layers_[layer].size(); ++entry) {
      const TensorView to = layers_[layer][entry].select(0, i);
      const TensorView source = from.layers_[layer][entry].select(0, from_i);
      if (source.bytes() > to.bytes()) throw Error("decode state: a sequence is copied to a state with less room");
      copy_memory(to.data, to.device, source.data, source.device, source.bytes());
    }
  }
  const TensorView position = positions_->slice(0, i, i + 1);
  const TensorView source = from.positions_->slice(0, from_i, from_i + 1);
  copy_memory(position.data, position.device, source.data, source.device, source.bytes());
  history[static_cast<std::size_t>(i)] = from.history[static_cast<std::size_t>(from_i)];
}

void DecodeState::queue_reset(const Queue& queue) const {
  queue.zero(constant_->data, constant_->bytes());
  queue.zero(positions_->data, positions_->bytes());
}

void DecodeState::queue_reset_sequence(const Queue& queue, std::int64_t i) const {
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    for (std::size_t entry = 0; entry < layers_[layer].size(); ++entry) {
      if (layouts_[layer][entry].growing) continue;
      const TensorView part = layers_[layer][entry].select(0, i);
      queue.zero(part.data, part.bytes());
    }
  }
  const TensorView position = positions_->slice(0, i, i + 1);
  queue.zero(position.data, position.bytes());
}

void DecodeState::History::add(std::span<const std::int32_t> some) {
  for (const std::int32_t token : some) add(token);
}

void DecodeState::History::add(std::int32_t token) {
  ++tokens;
  hash = XXH3_64bits_withSeed(&token, sizeof token, hash);
}

}  // namespace flashgla::model
