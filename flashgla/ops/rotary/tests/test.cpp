#include <gtest/gtest.h>

#include "flashgla/ops/rotary/implementations.h"
#include "flashgla/ops/rotary/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::rotary {
namespace {

TEST(Rotary, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  for (const Direction direction : {Direction::forward, Direction::inverse}) {
    for (const auto& one :
         {one_case(Shape({2, 70, 3, 10}), direction, {}, {}),
          one_case(Shape({3, 1, 2, 64}), direction, {0, 7, 100000}, {}),
          one_case(Shape({2, 33, 3, 128}), direction, {}, {}), one_case(Shape({1, 5, 70, 128}), direction, {3}, {}),
          one_case(Shape({2, 2, 31, 130}), direction, {}, {}),
          one_case(Shape({1, 90, 2, 34}), direction, {5, 0, 2000, 1}, {0, 3, 3, 60, 90}),
          one_case(Shape({2, 0, 2, 4}), direction, {1, 2}, {})}) {
      EXPECT_EQ(testing::check_conformance(one, coverage), "");
    }
  }
  EXPECT_EQ(coverage.missing(), "");
}

// The inverse is the transpose: <y, R x> = <R^-1 y, x>; and scores depend on distances alone.
TEST(Rotary, TurnsBackAndKeepsScores) {
  Context context;
  const Shape shape({1, 5, 2, 8});
  const Tensor x = testing::random_normal(shape, DType::f64, 1), dy = testing::random_normal(shape, DType::f64, 2);
  const Tensor y = Tensor::empty(shape, DType::f64), dx = Tensor::empty(shape, DType::f64);
  const Tensor positions = Tensor::zeros({1}, DType::i32);
  positions.as<std::int32_t>()[0] = 17;
  run(context, x, positions, {}, 1e4, Direction::forward, y);
  run(context, dy, positions, {}, 1e4, Direction::inverse, dx);
  EXPECT_NEAR(testing::dot(y, dy), testing::dot(x, dx), 1e-12);
  const double score = testing::dot(y->slice(1, 0, 1), y->slice(1, 3, 4));
  positions.as<std::int32_t>()[0] = 1017;
  run(context, x, positions, {}, 1e4, Direction::forward, y);
  EXPECT_NEAR(testing::dot(y->slice(1, 0, 1), y->slice(1, 3, 4)), score, 1e-12);
  run(context, y, positions, {}, 1e4, Direction::inverse, y);
  EXPECT_EQ(testing::check_close("x", y, x, 1e-14), "");
}

TEST(Rotary, RefusesBadArgumentsByName) {
  Context context;
  const Tensor x = Tensor::zeros({2, 3, 2, 6}, DType::f32), odd = Tensor::zeros({2, 3, 2, 5}, DType::f32);
  EXPECT_EQ(testing::error_of([&] { run(context, odd, {}, {}, 1e4, Direction::forward, odd); }),
            "rotary: x has 5 channels; expected an even number");
  EXPECT_EQ(testing::error_of([&] { run(context, x, Tensor::zeros({3}, DType::i32), {}, 1e4, Direction::forward, x); }),
            "rotary: positions has shape [3]; expected [2] (as sequences)");
  EXPECT_EQ(testing::error_of([&] { run(context, x, {}, {}, 0.0, Direction::forward, x); }),
            "rotary: base is 0.000000; expected more than 1");
}

}  // namespace
}  // namespace flashgla::ops::rotary
