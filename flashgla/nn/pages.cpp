#include "flashgla/nn/pages.h"

#include <unistd.h>

#include <cstddef>
#include <cstdint>

#include "flashgla/base/team.h"

namespace flashgla::nn {

namespace {

// Matrices that are read in one region, and who reads which of their rows.
struct Region {
  struct Matrix {
    TensorView rows;
    std::int64_t row_bytes = 0;
  };
  std::vector<Matrix> matrices;
  Cut cut;
};

std::vector<Region> regions_of(const std::vector<Parameter*>& parameters, int threads) {
  std::vector<Region> regions;
  for (const Parameter* parameter : parameters) {
    const TensorView& value = parameter->value;
    if (value.numel() == 0) continue;
    const auto row_bytes = static_cast<std::int64_t>(value.bytes()) / value.size(0);
    Region* const open = parameter->streamed == Streamed::alone || regions.empty() ? nullptr : &regions.back();
    if (open != nullptr && parameter->streamed == Streamed::behind && are_adjacent(open->matrices.back().rows, value)) {
      open->matrices.back().rows.shape[0] += value.size(0);
    } else if (open != nullptr && open->matrices.size() < Cut::kMostMatrices) {
      open->matrices.push_back({value, row_bytes});
    } else {
      regions.push_back({{{value, row_bytes}}, {}});
    }
  }
  for (Region& region : regions) {
    for (const Region::Matrix& matrix : region.matrices) {
      region.cut.add(matrix.rows.size(0), rows_at_once(matrix.row_bytes));
    }
    region.cut.share_out(threads);
  }
  return regions;
}

void write_pages(volatile std::byte* memory, std::size_t bytes) {
  static const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::size_t to_next = page - reinterpret_cast<std::uintptr_t>(memory) % page;
  if (bytes > 0) memory[0] = std::byte{0};
  for (std::size_t at = to_next; at < bytes; at += page) memory[at] = std::byte{0};
}

}  // namespace

void place_pages(const std::vector<Parameter*>& parameters, int threads) {
  const std::vector<Region> regions = regions_of(parameters, threads);
  Cut members;
  int most = 1;
  for (const Region& region : regions) most = std::max(most, region.cut.shares());
  members.add(most, 1);
  members.share_out(most);
  const NobodyHelps each_its_own;
  run_on_team(members, [&](std::size_t, std::int64_t begin, std::int64_t end) {
    for (auto member = static_cast<int>(begin); member < end; ++member) {
      for (const Region& region : regions) {
        if (member >= region.cut.shares()) continue;
        for (std::size_t i = 0; i < region.matrices.size(); ++i) {
          const Region::Matrix& matrix = region.matrices[i];
          const Cut::Rows rows = region.cut.rows_of(i, member);
          write_pages(static_cast<std::byte*>(matrix.rows.data) + rows.begin * matrix.row_bytes,
                      static_cast<std::size_t>((rows.end - rows.begin) * matrix.row_bytes));
        }
      }
    }
  });
}

}  // namespace flashgla::nn
