#include "flashgla/base/random.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <set>
#include <vector>

#include "flashgla/base/memory.h"
#include "flashgla/base/tensor.h"
#ifdef FLASHGLA_CUDA
#include "flashgla/base/cuda/tests/random_draws.h"
#endif

namespace flashgla::random {
namespace {

constexpr std::int64_t kDraws = 10'000'000;

// Known answers of Random123 1.14 (tests/kat_vectors: philox4x32 10).
TEST(Random, IsPhilox4x32WithTenRounds) {
  EXPECT_EQ(Stream(0, static_cast<Use>(0)).words(0).first, 0xe169c58d6627e8d5u);
  EXPECT_EQ(Stream(0, static_cast<Use>(0)).words(0).second, 0x9b00dbd8bc57ac4cu);
  const Stream ones(~0ull, static_cast<Use>(0xff), ~0ull);
  EXPECT_EQ(ones.words(~0ull).first, 0x41c83b0e408f276du);
  EXPECT_EQ(ones.words(~0ull).second, 0x6d5451fda20bc7c6u);
  const Stream pi(0x299f31d0a4093822u, static_cast<Use>(0x85), 0x0370734413198a2eu);
  EXPECT_EQ(pi.words(0x00a308d3243f6a88u).first, 0x94fdccebd16cfe09u);
  EXPECT_EQ(pi.words(0x00a308d3243f6a88u).second, 0x24126ea15001e420u);
}

// Runs and state files of this version depend on these bits; they may change only together with kVersion.
TEST(Random, BitsOfThisVersion) {
  std::uint64_t uniforms = 0, normals = 0, below = 0;
  const Stream stream(1, Use::parameters, 2);
  for (std::uint64_t i = 0; i < 100'000; ++i) {
    uniforms = std::rotl(uniforms, 1) ^ std::bit_cast<std::uint64_t>(stream.uniform(i));
    normals = std::rotl(normals, 1) ^ std::bit_cast<std::uint64_t>(stream.normal(i));
    below = std::rotl(below, 1) ^ stream.below(i, 1000003);
  }
  EXPECT_EQ(kVersion, 2);
  EXPECT_EQ(uniforms, 10065565899537321448u);
  EXPECT_EQ(normals, 14072219388774010510u);
  EXPECT_EQ(below, 12927463512012370194u);
}

TEST(Random, EveryArgumentMakesOtherDraws) {
  std::set<std::uint64_t> seen;
  std::size_t count = 0;
  for (const std::uint64_t seed : {0ull, 1ull, 1ull << 32, 1ull << 63}) {
    for (const Use use : {Use::tests, Use::parameters, Use::sampling, Use::data_order, Use::data_offset,
                          Use::validation, Use::stories, Use::dropout}) {
      for (const std::uint64_t stream : {0ull, 1ull, 1ull << 32, 1ull << 63}) {
        for (const std::uint64_t index : {0ull, 1ull, 1ull << 32, 1ull << 55}) {
          const Words words = Stream(seed, use, stream).words(index);
          seen.insert(words.first);
          seen.insert(words.second);
          count += 2;
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), count);
}

TEST(Random, UniformsStayInsideAndFillTheInterval) {
  EXPECT_EQ(to_uniform(0), 0x1p-53);
  EXPECT_EQ(to_uniform(~0ull), 1.0 - 0x1p-53);
  const Stream stream(3, Use::tests);
  std::vector<std::int64_t> cells(1000);
  double sum = 0.0, squares = 0.0;
  for (std::int64_t i = 0; i < kDraws; ++i) {
    const double u = stream.uniform(static_cast<std::uint64_t>(i)) - 0.5;
    sum += u;
    squares += u * u;
    ++cells[static_cast<std::size_t>((u + 0.5) * 1000.0)];
  }
  const double n = static_cast<double>(kDraws);
  EXPECT_LT(std::abs(sum / n), 5.0 * std::sqrt(1.0 / 12.0 / n));
  EXPECT_LT(std::abs(squares / n - 1.0 / 12.0), 5.0 * std::sqrt(1.0 / 180.0 / n));
  double chi = 0.0;
  for (const std::int64_t cell : cells)
    chi += (static_cast<double>(cell) - n / 1000.0) * (static_cast<double>(cell) - n / 1000.0) / (n / 1000.0);
  EXPECT_LT(std::abs(chi - 999.0), 5.0 * std::sqrt(2.0 * 999.0));
}

TEST(Random, NormalsHaveTheirMomentsAndTails) {
  std::vector<double> draws(static_cast<std::size_t>(kDraws));
  const Stream stream(4, Use::tests);
  fill_normals(stream, 0, kDraws, draws.data());
  const double n = static_cast<double>(kDraws);
  std::array<double, 5> moments = {};
  std::array<std::int64_t, 6> beyond = {};  // |x| above 0, 1, .. 5
  double product = 0.0;                     // of the two of a pair
  for (std::size_t i = 0; i < draws.size(); ++i) {
    double power = 1.0;
    for (double& moment : moments) {
      moment += power;
      power *= draws[i];
    }
    for (std::size_t k = 0; k < beyond.size(); ++k) beyond[k] += std::abs(draws[i]) > static_cast<double>(k);
    if (i % 2 == 1) product += draws[i - 1] * draws[i];
  }
  // Five standard errors each; Var(x^k) = 1, 2, 15, 96.
  const std::array<double, 5> expected = {1.0, 0.0, 1.0, 0.0, 3.0}, variance = {0.0, 1.0, 2.0, 15.0, 96.0};
  for (std::size_t k = 1; k < moments.size(); ++k) {
    EXPECT_LT(std::abs(moments[k] / n - expected[k]), 5.0 * std::sqrt(variance[k] / n)) << "moment " << k;
  }
  EXPECT_LT(std::abs(product / (n / 2.0)), 5.0 * std::sqrt(1.0 / (n / 2.0)));
  for (std::size_t k = 1; k < beyond.size(); ++k) {
    const double share = std::erfc(static_cast<double>(k) / std::sqrt(2.0));
    EXPECT_LT(std::abs(static_cast<double>(beyond[k]) - n * share), 5.0 * std::sqrt(n * share)) << "beyond " << k;
  }
}

// ln, sin and cos of our own against the mathematical library's.
TEST(Random, NormalsAreThoseOfTheFormula) {
  const Stream stream(5, Use::tests);
  constexpr double kRoundings = 8.0 * 0x1p-53;
  const auto expect_close = [&](double actual, double expected) {
    EXPECT_LE(std::abs(actual - expected), kRoundings * std::abs(expected)) << expected;
  };
  for (std::uint64_t i = 0; i < 100'000; ++i) {
    const double u = stream.uniform(i);
    for (const double each : {u, u * 0x1p-20, 1.0 - u * 0x1p-20, 0x1p-53, 1.0 - 0x1p-53}) {
      expect_close(minus_two_log(each), -2.0 * std::log(each));
    }
    expect_close(sin_half_pi(u - 0.5), std::sin(std::acos(0.0) * (u - 0.5)));
    expect_close(cos_half_pi(u - 0.5), std::cos(std::acos(0.0) * (u - 0.5)));
  }
  // The quadrants, at radius sqrt(2 ln 2): the angle's fraction 1/2 is f = 0 but for half an interval.
  const double radius = std::sqrt(2.0 * std::log(2.0));
  const std::array<Normals, 4> axes = {Normals{radius, 0}, {0, radius}, {-radius, 0}, {0, -radius}};
  for (std::uint64_t quadrant = 0; quadrant < 4; ++quadrant) {
    const Normals drawn = to_normals({1ull << 63, quadrant << 62 | 1ull << 61});
    EXPECT_NEAR(drawn.first, axes[quadrant].first, 1e-14);
    EXPECT_NEAR(drawn.second, axes[quadrant].second, 1e-14);
  }
}

TEST(Random, BlocksHaveTheBitsOfSingleDraws) {
  const Stream stream(6, Use::tests, 9);
  std::array<double, 1001> block;
  fill_normals(stream, 500, 1001, block.data());
  for (std::size_t i = 0; i < block.size(); ++i) {
    EXPECT_EQ(std::bit_cast<std::uint64_t>(block[i]), std::bit_cast<std::uint64_t>(stream.normal(500 + i)));
  }
}

TEST(Random, BelowIsEvenlySpread) {
  const Stream stream(7, Use::tests);
  std::array<int, 7> counts = {};
  for (std::uint64_t i = 0; i < 700'000; ++i) ++counts[stream.below(i, 7)];
  for (const int count : counts) EXPECT_NEAR(count, 100'000, 5 * 300);
  EXPECT_EQ(stream.below(0, 1), 0u);
}

#ifdef FLASHGLA_CUDA
TEST(Random, KernelsDrawTheSameBits) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  constexpr std::int64_t kPairs = kDraws / 2;
  const Device device = Device::cuda(0);
  const Stream stream(8, Use::tests, 3);
  const Tensor normals = Tensor::empty(Shape({2 * kPairs}), DType::f64, device);
  const Tensor uniforms = Tensor::empty(Shape({kPairs}), DType::f64, device);
  const Tensor below = Tensor::empty(Shape({kPairs}), DType::i64, device);
  draw_on_cuda(stream, kPairs, normals.as<double>(), uniforms.as<double>(),
               reinterpret_cast<std::uint64_t*>(below.as<std::int64_t>()));
  const auto on_host = [](const Tensor& tensor) {
    std::vector<std::uint64_t> words(static_cast<std::size_t>(tensor->numel()));
    copy_memory(words.data(), Device::cpu(), tensor->data, tensor->device, tensor->bytes());
    return words;
  };
  const std::vector<std::uint64_t> drawn = on_host(normals), drawn_uniforms = on_host(uniforms),
                                   drawn_below = on_host(below);
  std::vector<double> expected(2 * kPairs);
  fill_normals(stream, 0, 2 * kPairs, expected.data());
  std::int64_t differing = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) differing += std::bit_cast<std::uint64_t>(expected[i]) != drawn[i];
  for (std::size_t i = 0; i < kPairs; ++i) {
    differing += std::bit_cast<std::uint64_t>(stream.uniform(i)) != drawn_uniforms[i];
    differing += stream.below(i, 1000003) != drawn_below[i];
  }
  EXPECT_EQ(differing, 0);
}
#endif

}  // namespace
}  // namespace flashgla::random
