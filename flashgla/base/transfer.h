// Transfer: much data between the host and a device, through pinned pieces, so that reading (or writing) a file and
// copying go on at the same time. On the CPU nothing is copied: callers see the memory itself.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "flashgla/base/queue.h"

namespace flashgla {

class Transfer {
 public:
  // Copies are queued on the copy lane of a queue of its own: who owns the memory sees to it that nothing else that is
  // queued writes it meanwhile (or, to the host, that what was to be written has been).
  explicit Transfer(Device device);
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // fill(piece, begin, bytes) writes bytes [begin, begin + bytes) of what is to come to dst. They have arrived after
  // finish().
  void to_device(void* dst, std::size_t bytes,
                 const std::function<void(void* piece, std::size_t begin, std::size_t bytes)>& fill);
  // take(piece, begin, bytes) reads bytes [begin, begin + bytes) of src, in order.
  void to_host(const void* src, std::size_t bytes,
               const std::function<void(const void* piece, std::size_t begin, std::size_t bytes)>& take);
  void finish();

 private:
  static constexpr std::size_t kPiece = std::size_t{32} << 20;
  struct Piece {
    explicit Piece(const Queue& queue);
    std::shared_ptr<void> memory;
    Event copied;
  };

  Queue queue_;
  std::vector<std::unique_ptr<Piece>> pieces_;  // two; none on the CPU
  std::size_t next_ = 0;
};

}  // namespace flashgla
