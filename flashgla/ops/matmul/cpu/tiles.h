// Cuts the M x N plane of a product into tiles, and a long K beside a small plane into parts: functions of the shape
// alone, so that the bits of a result do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flashgla::ops::matmul {

struct Tiles {
  std::int64_t m, n;        // sizes of the plane
  std::int64_t rows, cols;  // sizes of a tile; those at the lower and right edges are smaller

  std::int64_t down() const { return (m + rows - 1) / rows; }
  std::int64_t across() const { return (n + cols - 1) / cols; }
  std::int64_t count() const { return down() * across(); }
};

struct Tile {
  std::int64_t row, col, rows, cols;
};

// Pieces of at most `largest`, of equal size but for rounding up to a multiple.
inline std::int64_t even_piece(std::int64_t size, std::int64_t pieces, std::int64_t multiple) {
  const std::int64_t piece = (size + pieces - 1) / pieces;
  return std::min(size, (piece + multiple - 1) / multiple * multiple);
}

// Pieces of work that a product should have: many threads are left idle with fewer.
constexpr std::int64_t kWantedPieces = 16;

// Tiles of up to 512 x 512, where oneDNN packs its operands at no visible cost. Smaller ones where there would be fewer
// than wanted: down to 64 to have four, which two threads need; for more, down to 256.
inline Tiles tiles_of(std::int64_t m, std::int64_t n) {
  constexpr std::int64_t kLargest = 512, kSmallest = 64, kSmallestOfMany = 256, kFew = 4;
  std::int64_t down = (m + kLargest - 1) / kLargest;
  std::int64_t across = (n + kLargest - 1) / kLargest;
  auto tiles = [&] { return Tiles{m, n, even_piece(m, down, 16), even_piece(n, across, 64)}; };
  while (tiles().count() < kWantedPieces) {
    const bool taller = tiles().rows >= tiles().cols;
    const std::int64_t least = tiles().count() < kFew ? kSmallest : kSmallestOfMany;
    if (std::max(tiles().rows, tiles().cols) < 2 * least) break;
    (taller ? down : across) *= 2;
  }
  return tiles();
}

// Into how many parts K is cut, whose sums are added in their order: gradients of weights are small planes of long
// sums.
inline std::int64_t parts_of_k(const Tiles& tiles, std::int64_t k) {
  constexpr std::int64_t kShortest = 1024;
  std::int64_t parts = 1;
  while (tiles.count() * parts < kWantedPieces && k >= 2 * parts * kShortest) parts *= 2;
  return parts;
}

// Neighbouring tasks share columns of b, which the caches then hold.
inline Tile tile_at(const Tiles& tiles, std::int64_t index) {
  const std::int64_t row = index % tiles.down() * tiles.rows;
  const std::int64_t col = index / tiles.down() * tiles.cols;
  return {row, col, std::min(tiles.rows, tiles.m - row), std::min(tiles.cols, tiles.n - col)};
}

}  // namespace flashgla::ops::matmul
