#include "flashgla/base/arena.h"

#include <algorithm>

#include "flashgla/base/memory.h"

namespace flashgla {

namespace {
std::size_t align_up(std::size_t value, std::size_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}
constexpr std::size_t kSmallestBlock = std::size_t{1} << 20;
// Planned addresses start here: never null, never mapped.
constexpr std::size_t kPlanningBase = 4096;
}  // namespace

Arena::Arena(void* memory, std::size_t bytes, Device device) : device_(device), frozen_(true) {
  blocks_.push_back({static_cast<std::byte*>(memory), 0, bytes, nullptr});
}

Arena::~Arena() = default;

void Arena::add_block(std::size_t begin, std::size_t bytes) {
  auto owner = allocate_memory(bytes, device_);
  auto* memory = static_cast<std::byte*>(owner.get());
  blocks_.push_back({memory, begin, bytes, std::move(owner)});
}

void* Arena::allocate(std::size_t bytes, const char* label) {
  const std::size_t alignment = device_.kind == Device::Kind::cpu ? 64 : 256;
  bytes = align_up(std::max<std::size_t>(bytes, 1), alignment);
  if (planning_) {
    live_.push_back({used_ + bytes, bytes, label});
    used_ += bytes;
    if (used_ > peak_) {
      peak_ = used_;
      plan_at_peak_.clear();
      for (const Record& record : live_) plan_at_peak_[record.label] += record.bytes;
    }
    return reinterpret_cast<void*>(kPlanningBase + used_ - bytes);
  }
  for (Block& block : blocks_) {
    const std::size_t begin = std::max(used_, block.begin);
    if (begin + bytes <= block.begin + block.bytes) {
      used_ = begin + bytes;
      peak_ = std::max(peak_, used_);
      return block.memory + (begin - block.begin);
    }
  }
  if (frozen_) {
    throw Error("arena: " + std::to_string(bytes) + " bytes for '" + label + "' do not fit; " + std::to_string(used_) +
                " in use, planned peak " + std::to_string(peak_));
  }
  // Blocks that lie wholly above the position in use are free: replace them by one that is large enough.
  while (!blocks_.empty() && blocks_.back().begin >= used_) blocks_.pop_back();
  const std::size_t begin = blocks_.empty() ? 0 : blocks_.back().begin + blocks_.back().bytes;
  add_block(begin, std::max({bytes, kSmallestBlock, begin}));
  used_ = begin + bytes;
  peak_ = std::max(peak_, used_);
  return blocks_.back().memory;
}

TensorView Arena::tensor(const Shape& shape, DType dtype, const char* label) {
  const std::size_t bytes = static_cast<std::size_t>(shape.numel()) * size_of(dtype);
  return TensorView(allocate(bytes, label), dtype, shape, device_);
}

void Arena::release(Mark mark) {
  used_ = mark;
  while (!live_.empty() && live_.back().end > mark) live_.pop_back();
}

void Arena::begin_planning() {
  if (used_ != 0) throw Error("arena: planning must begin while nothing is allocated");
  blocks_.clear();
  planning_ = true;
  frozen_ = false;
  peak_ = 0;
  plan_at_peak_.clear();
}

void Arena::commit_plan() {
  planning_ = false;
  used_ = 0;
  live_.clear();
  if (peak_ > 0) add_block(0, peak_);
  frozen_ = true;
}

void Arena::plan(const std::function<void()>& work) {
  begin_planning();
  try {
    work();
  } catch (...) {
    used_ = peak_ = 0;
    commit_plan();
    grow_again();
    throw;
  }
  commit_plan();
}

void Arena::borrow(void* memory, std::size_t bytes) {
  if (!planning_ && used_ != 0) throw Error("arena: memory can be borrowed only while nothing is allocated");
  planning_ = false;
  used_ = 0;
  live_.clear();
  blocks_.clear();
  blocks_.push_back({static_cast<std::byte*>(memory), 0, bytes, nullptr});
  frozen_ = true;
}

}  // namespace flashgla
