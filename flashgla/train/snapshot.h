// Snapshot: a copy of a run's tensors on their own device, made between two steps, which a checkpoint is written from
// while training goes on.
#pragma once

#include <cstddef>
#include <vector>

#include "flashgla/base/context.h"
#include "flashgla/model/safetensors.h"

namespace flashgla::train {

class Snapshot {
 public:
  // Takes memory for copies of these contiguous blocks.
  Snapshot(const std::vector<TensorView>& blocks, Device device);

  // Queues the copies.
  void take(const Queue& queue);
  // Where the copy of a block, or of a part of one, lies.
  TensorView of(const TensorView& tensor) const;
  std::vector<model::NamedTensor> of(std::vector<model::NamedTensor> tensors) const;

  // Memory that a snapshot of these takes.
  static std::size_t bytes_for(const std::vector<TensorView>& blocks);

 private:
  std::vector<TensorView> blocks_;
  Tensor memory_;
};

}  // namespace flashgla::train
