#include <gtest/gtest.h>

#include "flashgla/ops/feature_map/implementations.h"
#include "flashgla/ops/feature_map/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::feature_map {
namespace {

constexpr Map kMaps[] = {Map::as_is, Map::relu, Map::elu_plus_one, Map::both_signs, Map::dpfp};

TEST(FeatureMap, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  for (const Map map : kMaps) {
    for (const bool divide : {false, true}) {
      // A lone feature divided by its sum is 1 but for the epsilon: its gradient is what is left when all else cancels.
      for (const Shape& shape : {Shape({3, divide ? 17 : 1}), Shape({2, 3, 5, 33}), Shape({0, 8}), Shape({7, 64}),
                                 Shape({5, 24}), Shape({4, 8}), Shape({3, 300}), Shape({3, 512}), Shape({2, 1000})}) {
        EXPECT_EQ(testing::check_conformance(case_of(shape, {map, divide}, false), coverage), "");
        EXPECT_EQ(testing::check_conformance(case_of(shape, {map, divide}, true), coverage), "");
      }
    }
  }
  EXPECT_EQ(coverage.missing(), "");
}

TEST(FeatureMap, GradientsAgreeWithFiniteDifferences) {
  Context context;
  for (const Map map : kMaps) {
    for (const bool divide : {false, true}) {
      for (const std::int64_t channels : {1, 2, 5}) {
        const Shape shape({3, channels}), features = features_of_shape(shape, map);
        const Tensor x = testing::random_normal(shape, DType::f64, 1, 0.6, 0.9);
        const Tensor dy = testing::random_normal(features, DType::f64, 2);
        const Tensor y = Tensor::empty(features, DType::f64), dx = Tensor::empty(shape, DType::f64);
        backward(context, x, dy, dx, {map, divide});
        const auto loss = [&] {
          forward(context, x, y, {map, divide});
          return testing::dot(y, dy);
        };
        EXPECT_EQ(testing::check_gradient("dx", x, dx, loss), "") << static_cast<int>(map) << divide << channels;
      }
    }
  }
}

// By hand: r of (2, -3) is (2, 0, 0, 3).
TEST(FeatureMap, FeaturesAreThoseOfTheirDefinitions) {
  Context context;
  const auto made = [&](std::vector<float> x, const Options& options) {
    std::vector<float> y(static_cast<std::size_t>(features_of(options.map, static_cast<std::int64_t>(x.size()))));
    forward(context, TensorView(x.data(), Shape({static_cast<std::int64_t>(x.size())})),
            TensorView(y.data(), Shape({static_cast<std::int64_t>(y.size())})), options);
    return y;
  };
  EXPECT_EQ(made({2.0f, -3.0f}, {Map::dpfp}), (std::vector<float>{6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 6, 4, 0, 0, 9}));
  const std::vector<float> large = made({1000.0f, -1.0f}, {Map::both_signs});
  EXPECT_EQ(large, (std::vector<float>{1, 0, 0, 0}));
  EXPECT_FLOAT_EQ(made({1.0f, 3.0f}, {Map::as_is, true})[1], 3.0f / 4.0001f);
}

TEST(FeatureMap, RefusesBadArgumentsByName) {
  Context context;
  const Tensor x = Tensor::zeros({4, 6}, DType::f32), wide = Tensor::zeros({4, 12}, DType::f32);
  const auto error = [&](const TensorView& y, const Options& options) {
    return testing::error_of([&] { forward(context, x, y, options); });
  };
  EXPECT_EQ(error(wide, {Map::both_signs}), "no error");
  EXPECT_EQ(error(wide, {Map::dpfp}), "feature_map: y has shape [4,12]; expected [4,48] (as the features of x)");
  EXPECT_EQ(testing::error_of([&] { backward(context, x, x, wide, {}); }),
            "feature_map: dx has shape [4,12]; expected [4,6] (as x)");
}

}  // namespace
}  // namespace flashgla::ops::feature_map
