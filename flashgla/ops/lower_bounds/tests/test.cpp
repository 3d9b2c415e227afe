#include <gtest/gtest.h>

#include "flashgla/ops/lower_bounds/lower_bounds.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/devices.h"
#include "testing/random.h"

namespace flashgla::ops::lower_bounds {
namespace {

TEST(LowerBounds, RiseByTheLayersShares) {
  Context context;
  const Tensor w = Tensor::zeros({4, 3}, DType::f32), bound = Tensor::empty({3}, DType::f32);
  for (const std::int64_t layer : {1, 2, 3}) {
    forward(context, w, layer, bound);
    for (int d = 0; d < 3; ++d) EXPECT_FLOAT_EQ(bound.as<float>()[d], static_cast<float>(layer) / 4.0f);
  }
}

TEST(LowerBounds, GradientAgreesWithFiniteDifferences) {
  Context context;
  const Tensor w = testing::random_normal({5, 7}, DType::f64, 1), dbound = testing::random_normal({7}, DType::f64, 2);
  const Tensor bound = Tensor::empty({7}, DType::f64), dw = Tensor::zeros({5, 7}, DType::f64);
  for (const std::int64_t layer : {1, 3, 4}) {
    testing::fill_normal(dw, 1, 0.0);
    backward(context, w, layer, dbound, dw);
    const auto loss = [&] {
      forward(context, w, layer, bound);
      return testing::dot(bound, dbound);
    };
    EXPECT_EQ(testing::check_gradient("dw", w, dw, loss), "");
  }
}

TEST(LowerBounds, EveryDeviceFollowsF64) {
  for (const Device device : testing::test_devices()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const std::int64_t channels : {1, 200}) {
        const Tensor w = testing::random_normal({6, channels}, dtype, 1, 3.0);
        const Tensor dbound = testing::random_normal({channels}, DType::f32, 2);
        const Tensor exact = Tensor::empty({channels}, DType::f64), exact_dw = Tensor::zeros(w->shape, DType::f64);
        Context cpu;
        forward(cpu, testing::converted(w, DType::f64), 2, exact);
        backward(cpu, testing::converted(w, DType::f64), 2, testing::converted(dbound, DType::f64), exact_dw);
        Context context(device);
        const Tensor there = testing::copied_to(w, device), d_there = testing::copied_to(dbound, device);
        const Tensor bound = Tensor::empty({channels}, DType::f32, device);
        const Tensor dw = Tensor::zeros(w->shape, DType::f32, device);
        forward(context, there, 2, bound);
        backward(context, there, 2, d_there, dw);
        context.queue().synchronize();
        EXPECT_EQ(testing::check_close("bound", testing::copied_to(bound, Device::cpu()), exact, 1e-6), "");
        EXPECT_EQ(testing::check_close("dw", testing::copied_to(dw, Device::cpu()), exact_dw, 1e-6), "");
      }
    }
  }
}

TEST(LowerBounds, RefusesBadArgumentsByName) {
  Context context;
  const Tensor w = Tensor::zeros({4, 3}, DType::f32), bound = Tensor::zeros({3}, DType::f32);
  EXPECT_EQ(testing::error_of([&] { forward(context, w, 0, bound); }), "lower_bounds: layer is 0; expected 1 to 3");
  EXPECT_EQ(testing::error_of([&] { forward(context, w, 4, bound); }), "lower_bounds: layer is 4; expected 1 to 3");
  EXPECT_EQ(testing::error_of([&] { forward(context, w, 1, w); }),
            "lower_bounds: bound has shape [4,3]; expected [3] (as w's columns)");
}

}  // namespace
}  // namespace flashgla::ops::lower_bounds
