#include "flashgla/train/snapshot.h"

namespace flashgla::train {

namespace {
// Of each block's copy.
std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }
}  // namespace

std::size_t Snapshot::bytes_for(const std::vector<TensorView>& blocks) {
  std::size_t sum = 0;
  for (const TensorView& block : blocks) sum += aligned(block.bytes());
  return sum;
}

Snapshot::Snapshot(const std::vector<TensorView>& blocks, Device device) : blocks_(blocks) {
  memory_ = Tensor::empty({static_cast<std::int64_t>(bytes_for(blocks))}, DType::u8, device);
}

void Snapshot::take(const Queue& queue) {
  for (const TensorView& block : blocks_) queue.copy(of(block).data, block.data, block.bytes());
}

TensorView Snapshot::of(const TensorView& tensor) const {
  const auto* begin = static_cast<std::byte*>(tensor.data);
  auto* place = static_cast<std::byte*>(memory_->data);
  for (const TensorView& block : blocks_) {
    const auto* first = static_cast<std::byte*>(block.data);
    if (begin >= first && begin + tensor.bytes() <= first + block.bytes()) {
      TensorView copy = tensor;
      copy.data = place + (begin - first);
      return copy;
    }
    place += aligned(block.bytes());
  }
  throw Error("snapshot: asked for a tensor that it does not hold");
}

std::vector<model::NamedTensor> Snapshot::of(std::vector<model::NamedTensor> tensors) const {
  for (model::NamedTensor& row : tensors) row.tensor = of(row.tensor);
  return tensors;
}

}  // namespace flashgla::train
