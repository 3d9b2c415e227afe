// The estimates by themselves, which are plain C++: that cuts of time are whole for sizes of all kinds, and that what
// was measured to be fastest on an H200 (forward/README.md, "Which form") is chosen. Needs no GPU.
#include "flashgla/ops/gated_linear_attention/cuda/estimates.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>

#include "flashgla/ops/gated_linear_attention/cuda/plan.h"

namespace flashgla::ops::gated_linear_attention::cuda {
namespace {

constexpr int kMultiprocessors = 132;

Params problem(std::int64_t batch, std::int64_t length, int heads, int key_dim, int value_dim, GateKind gate) {
  Params p;
  p.sequences.count = batch;
  p.sequences.length = length;
  p.sequences.most_chunks = batch * p.sequences.chunks_each();
  p.heads = heads;
  p.key_dim = key_dim;
  p.value_dim = value_dim;
  p.gate = gate;
  return p;
}

// One row of tokens, in `count` sequences.
Params packed(std::int64_t count, std::int64_t length, int heads, int key_dim, int value_dim) {
  Params p = problem(1, length, heads, key_dim, value_dim, GateKind::key);
  p.sequences.packed = true;
  p.sequences.count = count;
  p.sequences.most_chunks = length / kChunk + count;
  return p;
}

ForwardForm fastest(const Params& p) {
  const bool one_pass_fits = p.key_dim <= kTile && p.value_dim <= 2 * kTile;
  return fastest_form(p, one_pass_fits, p.key_dim <= 2 * kTile, kMultiprocessors);
}

bool in_one_kernel(const Params& p) { return one_kernel_is_faster(p, kMultiprocessors); }

TEST(Estimates, CutsAreWholeAndTimesFinite) {
  for (const std::int64_t count : {0, 1, 2, 7, 64, 5000}) {
    for (const std::int64_t length : {0, 1, 63, 64, 65, 4096, 1 << 20}) {
      for (const auto& [K, V] : {std::pair{1, 1}, {64, 64}, {65, 192}, {128, 65}, {256, 512}, {257, 64}, {512, 512}}) {
        for (const int multiprocessors : {1, 20, kMultiprocessors, 400}) {
          for (const bool in_one_row : {false, true}) {
            for (const GateKind gate : {GateKind::none, GateKind::constant, GateKind::scalar, GateKind::key}) {
              Params p = in_one_row ? packed(count, length, 4, K, V) : problem(count, length, 4, K, V, gate);
              p.gate = gate;
              for (const Direction direction : {Direction::forward, Direction::backward}) {
                const TimeCut cut = cut_time(p, direction, multiprocessors);
                const std::int64_t all = p.sequences.chunks_each();
                ASSERT_GE(cut.segments, 1);
                if (cut.segments > 1) {  // they cover all of one sequence, and none is empty
                  ASSERT_GE(std::int64_t{cut.segments} * cut.chunks, all);
                  ASSERT_LT((std::int64_t{cut.segments} - 1) * cut.chunks, all);
                }
              }
              for (const double microseconds :
                   {one_pass_microseconds(p, multiprocessors), wide_pass_microseconds(p, multiprocessors),
                    two_passes_microseconds(p, multiprocessors), one_kernel_backward_microseconds(p, multiprocessors),
                    backward_by_chunks_microseconds(p, multiprocessors)}) {
                ASSERT_TRUE(std::isfinite(microseconds) && microseconds > 0.0);
              }
            }
          }
        }
      }
    }
  }
}

// Each the fastest that was measured, by 5% or more.
TEST(Estimates, FormsAreThoseThatWereFastest) {
  struct Measured {
    std::int64_t batch, length;
    int heads, key_dim, value_dim;
    GateKind gate;
    ForwardForm form;
  };
  const Measured list[] = {{64, 512, 4, 64, 64, GateKind::key, ForwardForm::one_pass},
                           {64, 512, 4, 64, 64, GateKind::none, ForwardForm::one_pass},
                           {1, 64, 4, 64, 64, GateKind::key, ForwardForm::one_pass},
                           {8, 512, 4, 64, 64, GateKind::none, ForwardForm::one_pass},
                           {16, 1024, 4, 64, 64, GateKind::key, ForwardForm::one_wide_pass},
                           {32, 1024, 4, 64, 64, GateKind::scalar, ForwardForm::one_wide_pass},
                           {1, 2048, 4, 64, 64, GateKind::key, ForwardForm::two_passes},
                           {1, 4096, 4, 64, 64, GateKind::none, ForwardForm::two_passes},
                           {16, 2048, 4, 128, 256, GateKind::key, ForwardForm::one_wide_pass},
                           {8, 2048, 4, 128, 256, GateKind::key, ForwardForm::one_wide_pass},
                           {1, 2048, 4, 128, 256, GateKind::key, ForwardForm::two_passes},
                           {32, 512, 4, 128, 128, GateKind::key, ForwardForm::one_wide_pass},
                           {16, 2048, 4, 64, 256, GateKind::constant, ForwardForm::one_wide_pass},
                           {1, 1024, 4, 128, 512, GateKind::key, ForwardForm::two_passes}};
  for (const Measured& m : list) {
    SCOPED_TRACE("B" + std::to_string(m.batch) + " T" + std::to_string(m.length) + " K" + std::to_string(m.key_dim) +
                 " V" + std::to_string(m.value_dim));
    EXPECT_EQ(fastest(problem(m.batch, m.length, m.heads, m.key_dim, m.value_dim, m.gate)), m.form);
  }
}

TEST(Estimates, TimeIsCutWhereThatWasFaster) {
  const auto segments = [](const Params& p, Direction direction = Direction::forward) {
    return cut_time(p, direction, kMultiprocessors).segments;
  };
  EXPECT_EQ(segments(problem(1, 32768, 4, 256, 512, GateKind::key)), 8);
  EXPECT_EQ(segments(problem(1, 2048, 4, 256, 512, GateKind::key)), 8);
  EXPECT_EQ(segments(problem(8, 4096, 4, 256, 512, GateKind::key)), 1);  // fills the card
  EXPECT_EQ(segments(problem(8, 512, 4, 256, 256, GateKind::key)), 1);   // 39.4 us, in two segments 53.0
  EXPECT_EQ(segments(problem(4, 512, 4, 256, 512, GateKind::key)), 1);   // 31.8, 45.6
  EXPECT_EQ(segments(problem(4, 2048, 4, 256, 256, GateKind::key)), 4);  // 80.5, uncut 94.3
  EXPECT_LT(segments(problem(1, 8192, 4, 64, 64, GateKind::key)), 32);   // 32.4 in 16, 32.9 in 32
  // Two key tiles: the backward alone, forward and backward 47.3 us, uncut 49.8; neither, 59.8, uncut 58.1.
  EXPECT_EQ(segments(problem(1, 640, 4, 128, 128, GateKind::key)), 1);
  EXPECT_EQ(segments(problem(1, 640, 4, 128, 128, GateKind::key), Direction::backward), 5);
  EXPECT_EQ(segments(problem(2, 768, 4, 128, 256, GateKind::key), Direction::backward), 1);
  EXPECT_GT(segments(packed(1, 32768, 4, 256, 512)), 1);
  // Packed sequences: where the longest is known, and where it is not, so that one may have nearly all tokens.
  Params several = packed(4, 32768, 4, 256, 512);
  EXPECT_GT(segments(several), 1);  // of 20000, 8000, 4000 and 768 tokens 332 us, uncut 746
  Params alike = packed(64, 32768, 4, 256, 512);
  EXPECT_GT(segments(alike), 1);
  alike.sequences.longest = 512;
  EXPECT_EQ(segments(alike), 1);
  Params skewed = packed(44, 32768, 4, 256, 512);
  EXPECT_GT(segments(skewed), 1);
  skewed.sequences.longest = 30000;
  EXPECT_GT(segments(skewed), 1);  // 383 us, uncut 980
}

// Where the longest is not known, up to how long it may be for one pass and one kernel: with a chunk more these are no
// longer what a call goes by whose longest is known.
TEST(Estimates, LongSequencesGoByTwoPasses) {
  for (const int heads : {4, 16}) {
    for (const std::int64_t count : {2, 16, 64, 200}) {
      const Params p = packed(count, 65536, heads, 64, 64);
      const TimeCut cut = cut_time(with_one_long(p), Direction::forward, kMultiprocessors);
      ASSERT_GT(cut.segments, 1);
      const Params alike = with_all_alike(p), one_long = with_one_long(p);
      EXPECT_EQ(fastest(one_long), ForwardForm::two_passes);
      EXPECT_FALSE(in_one_kernel(one_long));
      const auto with_longest = [&](std::int64_t chunks) {
        Params longest = p;
        longest.sequences.longest = chunks * kChunk;
        return longest;
      };
      const std::int64_t of_alike = (65536 / count + kChunk - 1) / kChunk;
      if (fastest(alike) != ForwardForm::two_passes) {
        const std::int64_t chunks = most_chunks_of_form(p, fastest(alike), cut, kMultiprocessors);
        EXPECT_GE(chunks, of_alike);
        ASSERT_LT(chunks, 1024);
        EXPECT_NE(fastest(with_longest(chunks + 1)), fastest(alike));
      }
      if (in_one_kernel(alike)) {
        const std::int64_t chunks = most_chunks_of_one_kernel(p, cut, kMultiprocessors);
        EXPECT_GE(chunks, of_alike);
        ASSERT_LT(chunks, 1024);
        EXPECT_FALSE(in_one_kernel(with_longest(chunks + 1)));
      }
    }
  }
}

TEST(Estimates, OneKernelBackwardsWhereThatWasFaster) {
  for (const GateKind gate : {GateKind::none, GateKind::constant, GateKind::scalar, GateKind::key}) {
    EXPECT_TRUE(in_one_kernel(problem(32, 2048, 16, 64, 64, gate)));
    EXPECT_TRUE(in_one_kernel(problem(32, 2048, 4, 64, 64, gate)));  // 128 heads, four less than multiprocessors
    EXPECT_TRUE(in_one_kernel(problem(1, 64, 4, 64, 64, gate)));
    EXPECT_FALSE(in_one_kernel(problem(1, 4096, 4, 64, 64, gate)));
  }
  EXPECT_FALSE(in_one_kernel(problem(8, 1024, 4, 64, 64, GateKind::key)));
  EXPECT_TRUE(in_one_kernel(problem(8, 1024, 4, 64, 64, GateKind::none)));
}

}  // namespace
}  // namespace flashgla::ops::gated_linear_attention::cuda
