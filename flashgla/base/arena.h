// Stack allocator for everything that lives shorter than the program: workspaces, scratch, saved activations.
// The same code that allocates can be run once in planning mode, which only adds up sizes: the memory plan is the
// record of that dry run and so cannot disagree with the real one.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "flashgla/base/tensor.h"

namespace flashgla {

class Arena {
 public:
  explicit Arena(Device device = Device::cpu()) : device_(device) {}
  // Over memory that the caller owns and keeps alive; never grows.
  Arena(void* memory, std::size_t bytes, Device device);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // 64-byte aligned (256 on CUDA). Label: what the bytes are, for the plan's table ("gla: q, k, v").
  // Throws Error when the arena is frozen and full.
  void* allocate(std::size_t bytes, const char* label = "scratch");
  TensorView tensor(const Shape& shape, DType dtype, const char* label = "scratch");

  using Mark = std::size_t;
  Mark mark() const { return used_; }
  void release(Mark mark);  // everything allocated since the mark

  std::size_t used() const { return used_; }
  std::size_t peak() const { return peak_; }

  // Planning: addresses are not backed by memory and must not be touched.
  void begin_planning();
  // Ends the dry run; from now the arena holds exactly its peak (one block), and allocating more is an Error.
  void commit_plan();
  bool planning() const { return planning_; }
  // A dry run of `work` and its plan: afterwards the arena is one block of what `work` takes, and frozen, so that work
  // recorded in a graph finds its addresses again. For as long as that lasts; grow_again() ends it.
  void plan(const std::function<void()>& work);
  void grow_again() { frozen_ = false; }
  // Ends the dry run; from now the arena is memory that the caller owns and keeps alive, and never grows. May be called
  // again, after another dry run or without one, while nothing is allocated.
  void borrow(void* memory, std::size_t bytes);
  // Bytes live at the moment of the peak, by label.
  const std::map<std::string, std::size_t>& plan() const { return plan_at_peak_; }

 private:
  struct Block {
    std::byte* memory;
    std::size_t begin;  // position of the block's first byte in the arena
    std::size_t bytes;
    std::shared_ptr<void> owner;
  };
  void add_block(std::size_t begin, std::size_t bytes);

  Device device_;
  std::vector<Block> blocks_;
  std::size_t used_ = 0;
  std::size_t peak_ = 0;
  bool planning_ = false;
  bool frozen_ = false;
  struct Record {
    std::size_t end;
    std::size_t bytes;
    const char* label;
  };
  std::vector<Record> live_;  // only while planning
  std::map<std::string, std::size_t> plan_at_peak_;
};

// Releases what was allocated in its lifetime.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaScope() { arena_.release(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  Arena::Mark mark_;
};

}  // namespace flashgla
