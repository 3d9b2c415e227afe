#include "flashgla/base/transfer.h"

#include <algorithm>

#include "flashgla/base/memory.h"

namespace flashgla {

Transfer::Piece::Piece(const Queue& queue) : memory(allocate_pinned_memory(kPiece)), copied(queue) {}

Transfer::Transfer(Device device) : queue_(device) {
  if (device == Device::cpu()) return;
  queue_.activate();
  for (int i = 0; i < 2; ++i) pieces_.push_back(std::make_unique<Piece>(queue_));
}

Transfer::~Transfer() = default;

void Transfer::to_device(void* dst, std::size_t bytes,
                         const std::function<void(void*, std::size_t, std::size_t)>& fill) {
  if (pieces_.empty()) {
    if (bytes > 0) fill(dst, 0, bytes);
    return;
  }
  queue_.activate();
  for (std::size_t begin = 0; begin < bytes; begin += kPiece) {
    Piece& piece = *pieces_[next_++ % pieces_.size()];
    const std::size_t part = std::min(kPiece, bytes - begin);
    piece.copied.synchronize();
    fill(piece.memory.get(), begin, part);
    queue_.copy(static_cast<std::byte*>(dst) + begin, piece.memory.get(), part, Lane::copies);
    piece.copied.record(Lane::copies);
  }
}

void Transfer::to_host(const void* src, std::size_t bytes,
                       const std::function<void(const void*, std::size_t, std::size_t)>& take) {
  if (pieces_.empty()) {
    if (bytes > 0) take(src, 0, bytes);
    return;
  }
  // One piece ahead: the next one comes while take has this one.
  const auto ask = [&](std::size_t begin) {
    Piece& piece = *pieces_[(next_ + begin / kPiece) % pieces_.size()];
    queue_.copy(piece.memory.get(), static_cast<const std::byte*>(src) + begin, std::min(kPiece, bytes - begin),
                Lane::copies);
    piece.copied.record(Lane::copies);
  };
  queue_.activate();
  if (bytes > 0) ask(0);
  for (std::size_t begin = 0; begin < bytes; begin += kPiece) {
    if (begin + kPiece < bytes) ask(begin + kPiece);
    Piece& piece = *pieces_[(next_ + begin / kPiece) % pieces_.size()];
    piece.copied.synchronize();
    take(piece.memory.get(), begin, std::min(kPiece, bytes - begin));
  }
}

void Transfer::finish() {
  if (pieces_.empty()) return;
  queue_.synchronize(Lane::copies);
}

}  // namespace flashgla
