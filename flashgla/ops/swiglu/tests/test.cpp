#include <gtest/gtest.h>

#include "flashgla/ops/elementwise/elementwise.h"
#include "flashgla/ops/swiglu/implementations.h"
#include "flashgla/ops/swiglu/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/devices.h"
#include "testing/random.h"

namespace flashgla::ops::swiglu {
namespace {

TEST(Swiglu, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  for (const Shape& shape : {Shape({1, 1}), Shape({7, 65}), Shape({2, 3, 33}), Shape({3, 20000}), Shape({0, 4})}) {
    testing::OperatorCase both = forward_case(shape);
    both.dtypes.push_back({DType::f32, DType::bf16});
    EXPECT_EQ(testing::check_conformance(both, coverage), "");
    for (const bool again : {false, true}) {
      EXPECT_EQ(testing::check_conformance(backward_case(shape, again), coverage), "");
    }
  }
  EXPECT_EQ(coverage.missing(), "");
}

TEST(Swiglu, GradientsAgreeWithFiniteDifferences) {
  Context context;
  const Shape shape({3, 8});
  const Tensor gate = testing::random_normal(shape, DType::f64, 1, 2.0),
               up = testing::random_normal(shape, DType::f64, 2);
  const Tensor dy = testing::random_normal(shape, DType::f64, 3), y = Tensor::empty(shape, DType::f64);
  const Tensor dgate = Tensor::empty(shape, DType::f64), dup = Tensor::empty(shape, DType::f64);
  backward(context, gate, up, dy, dgate, dup);
  auto loss = [&] {
    forward(context, gate, up, y);
    return testing::dot(y, dy);
  };
  EXPECT_EQ(testing::check_gradient("dgate", gate, dgate, loss), "");
  EXPECT_EQ(testing::check_gradient("dup", up, dup, loss), "");
}

// As the MLP has them: rows of one tensor twice as wide, aligned and not.
TEST(Swiglu, HalvesOfOneTensorGiveWhatTheirCopiesGive) {
  for (const Device device : testing::test_devices()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const std::int64_t width : {1, 24, 100, 1000, 5632}) {
        Context context(device);
        const Shape shape({5, width});
        const Tensor both = testing::copied_to(testing::random_normal({5, 2 * width}, dtype, 1), device);
        const Tensor dy = testing::copied_to(testing::random_normal(shape, dtype, 2), device);
        const TensorView gate = both->slice(1, 0, width), up = both->slice(1, width, 2 * width);
        const Tensor gate_alone = Tensor::empty(shape, dtype, device), up_alone = Tensor::empty(shape, dtype, device);
        const Tensor y = Tensor::empty(shape, dtype, device), y_alone = Tensor::empty(shape, dtype, device);
        elementwise::convert(context, gate, gate_alone);
        elementwise::convert(context, up, up_alone);
        auto same = [&](const TensorView& a, const TensorView& b) {
          const Tensor dense = Tensor::empty(shape, dtype, device);
          elementwise::convert(context, a, dense);
          context.queue().synchronize();
          return testing::same_bits(testing::copied_to(dense, Device::cpu()), testing::copied_to(b, Device::cpu()));
        };
        forward(context, gate, up, y);
        forward(context, gate_alone, up_alone, y_alone);
        EXPECT_TRUE(same(y, y_alone)) << width;
        backward(context, gate_alone, up_alone, dy, gate_alone, up_alone);
        backward(context, gate, up, dy, gate, up, dy);
        EXPECT_TRUE(same(gate, gate_alone)) << width;
        EXPECT_TRUE(same(up, up_alone)) << width;
        EXPECT_TRUE(same(dy, y)) << width;
      }
    }
  }
}

TEST(Swiglu, WorksInPlace) {
  Context context;
  const Shape shape({5, 70});
  const Tensor gate = testing::random_normal(shape, DType::f32, 1), up = testing::random_normal(shape, DType::f32, 2);
  const Tensor dy = testing::random_normal(shape, DType::f32, 3), y = Tensor::empty(shape, DType::f32);
  const Tensor dgate = Tensor::empty(shape, DType::f32), dup = Tensor::empty(shape, DType::f32);
  forward(context, gate, up, y);
  backward(context, gate, up, dy, dgate, dup);
  const Tensor gate2 = testing::converted(gate, DType::f32), up2 = testing::converted(up, DType::f32);
  backward(context, gate2, up2, dy, gate2, up2);
  EXPECT_TRUE(testing::same_bits(gate2, dgate));
  EXPECT_TRUE(testing::same_bits(up2, dup));
  const Tensor gate3 = testing::converted(gate, DType::f32), up3 = testing::converted(up, DType::f32);
  backward(context, gate3, up3, dy, gate3, up3, dy);
  EXPECT_TRUE(testing::same_bits(gate3, dgate));
  EXPECT_TRUE(testing::same_bits(up3, dup));
  EXPECT_TRUE(testing::same_bits(dy, y));
  forward(context, gate, up, up);
  EXPECT_TRUE(testing::same_bits(up, y));
}

TEST(Swiglu, RefusesBadArgumentsByName) {
  Context context;
  const Tensor a = Tensor::zeros({4, 6}, DType::f32), b = Tensor::zeros({4, 5}, DType::f32);
  const Tensor half = Tensor::zeros({4, 6}, DType::bf16);
  auto error = [&](const TensorView& gate, const TensorView& up, const TensorView& y) {
    return testing::error_of([&] { forward(context, gate, up, y); });
  };
  EXPECT_EQ(error(a, b, a), "swiglu: up has shape [4,5]; expected [4,6] (as gate)");
  EXPECT_EQ(error(a, half, a), "swiglu: up has dtype bf16; expected f32");
  EXPECT_EQ(error(a, a, TensorView()), "swiglu: y is absent; expected a tensor");
  EXPECT_EQ(error(a.view().transpose(0, 1), a, a), "swiglu: gate has stride 6 in its last dimension; expected 1");
}

}  // namespace
}  // namespace flashgla::ops::swiglu
