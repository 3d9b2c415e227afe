#include <gtest/gtest.h>

#include <cmath>

#include "flashgla/base/memory.h"
#include "flashgla/ops/dropout/implementations.h"
#include "flashgla/ops/dropout/mask.h"
#include "flashgla/ops/dropout/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/devices.h"
#include "testing/random.h"

namespace flashgla::ops::dropout {
namespace {

// A mask whose numbers lie on a device.
struct Numbers {
  Tensor step, micro_batch;
  Numbers(double at, std::int32_t micro, Device device)
      : step(Tensor::empty({1}, DType::f64, device)), micro_batch(Tensor::empty({1}, DType::i32, device)) {
    copy_memory(step->data, device, &at, Device::cpu(), sizeof at);
    copy_memory(micro_batch->data, device, &micro, Device::cpu(), sizeof micro);
  }
};

Tensor ones(const Shape& shape, DType dtype) {
  Tensor x = Tensor::empty(shape, dtype);
  fill(x, 1.0);
  return x;
}

// What becomes of ones, on the CPU.
Tensor dropped(Device device, DType dtype, std::int64_t count, double probability, std::uint64_t seed = 1,
               std::int64_t place = 2, double step = 3, std::int32_t micro_batch = 4) {
  Context context(device);
  const Numbers numbers(step, micro_batch, device);
  const Tensor x = testing::copied_to(ones(Shape({count}), dtype), device);
  run(context, x, {}, x, {probability, seed, place, numbers.step, numbers.micro_batch});
  context.queue().synchronize();
  return testing::copied_to(x, Device::cpu());
}

TEST(Dropout, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  for (const Shape& shape : {Shape({1, 1}), Shape({7, 65}), Shape({2, 3, 33}), Shape({3, 20000}), Shape({0, 4})}) {
    for (const double probability : {0.0, 0.1, 0.75}) {
      for (const bool sum : {false, true}) {
        EXPECT_EQ(testing::check_conformance(case_of(shape, probability, sum), coverage), "");
      }
    }
  }
  EXPECT_EQ(coverage.missing(), "");
}

TEST(Dropout, EveryDeviceAndDTypeDropsTheSame) {
  constexpr std::int64_t kCount = 40001;
  const Tensor expected = dropped(Device::cpu(), DType::f64, kCount, 0.3);
  for (const Device device : testing::test_devices()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Tensor own = testing::converted(dropped(device, dtype, kCount, 0.3), DType::f64);
      for (std::int64_t i = 0; i < kCount; ++i) {
        ASSERT_EQ(own.as<double>()[i] == 0.0, expected.as<double>()[i] == 0.0) << i;
      }
    }
  }
}

TEST(Dropout, KeepsTheMeanAndDropsTheShareAsked) {
  constexpr std::int64_t kCount = 1 << 20;
  for (const double probability : {0.0, 0.01, 0.2, 0.5, 0.9}) {
    const Tensor x = dropped(Device::cpu(), DType::f64, kCount, probability);
    double zeros = 0.0, total = 0.0;
    for (std::int64_t i = 0; i < kCount; ++i) {
      zeros += x.as<double>()[i] == 0.0 ? 1.0 : 0.0;
      total += x.as<double>()[i];
    }
    // Five standard deviations of a binomial, and the rounding of p.
    const double spread = 5.0 * std::sqrt(probability * (1.0 - probability) / kCount) + 0x1p-17;
    EXPECT_NEAR(zeros / kCount, probability, spread);
    EXPECT_NEAR(total / kCount, 1.0, spread / (1.0 - probability));
  }
}

TEST(Dropout, EachPartOfTheKeyChangesTheMask) {
  constexpr std::int64_t kCount = 4096;
  const Tensor own = dropped(Device::cpu(), DType::f32, kCount, 0.5);
  EXPECT_TRUE(testing::same_bits(own, dropped(Device::cpu(), DType::f32, kCount, 0.5)));
  const Tensor others[] = {dropped(Device::cpu(), DType::f32, kCount, 0.5, 2),
                           dropped(Device::cpu(), DType::f32, kCount, 0.5, 1, 3),
                           dropped(Device::cpu(), DType::f32, kCount, 0.5, 1, 2, 4),
                           dropped(Device::cpu(), DType::f32, kCount, 0.5, 1, 2, 3, 5)};
  for (const Tensor& other : others) {
    std::int64_t same = 0;
    for (std::int64_t i = 0; i < kCount; ++i) same += own.as<float>()[i] == other.as<float>()[i] ? 1 : 0;
    EXPECT_NEAR(static_cast<double>(same), 0.5 * kCount, 5.0 * 0.5 * std::sqrt(kCount));
  }
}

TEST(Dropout, WorksInPlaceOfEither) {
  Context context;
  const Shape shape({5, 700});
  const Numbers numbers(1.0, 0, Device::cpu());
  const Mask mask{0.25, 9, 1, numbers.step, numbers.micro_batch};
  const Tensor x = testing::random_normal(shape, DType::bf16, 1),
               residual = testing::random_normal(shape, DType::bf16, 2);
  const Tensor out = Tensor::empty(shape, DType::bf16);
  run(context, x, residual, out, mask);
  const Tensor x2 = testing::converted(x, DType::bf16), residual2 = testing::converted(residual, DType::bf16);
  run(context, x2, residual, x2, mask);
  run(context, x, residual2, residual2, mask);
  EXPECT_TRUE(testing::same_bits(x2, out));
  EXPECT_TRUE(testing::same_bits(residual2, out));
}

TEST(Dropout, RefusesBadArgumentsByName) {
  Context context;
  const Numbers numbers(0.0, 0, Device::cpu());
  const Tensor a = Tensor::zeros({4, 6}, DType::f32), b = Tensor::zeros({4, 5}, DType::f32);
  const Mask mask{0.5, 1, 0, numbers.step, numbers.micro_batch};
  auto error = [&](const TensorView& x, const TensorView& residual, Mask changed) {
    return testing::error_of([&] { run(context, x, residual, x, changed); });
  };
  EXPECT_EQ(error(a, b, mask), "dropout: residual has shape [4,5]; expected [4,6] (as x)");
  EXPECT_EQ(error(a.view().slice(1, 0, 3), {}, mask),
            "dropout: x of shape [4,3] is not contiguous; expected contiguous memory");
  Mask changed = mask;
  changed.probability = 1.0;
  EXPECT_EQ(error(a, {}, changed), "dropout: mask.probability is 1.000000; expected in [0, 1)");
  changed = mask;
  changed.place = -1;
  EXPECT_EQ(error(a, {}, changed), "dropout: mask.place is -1; expected 0 to 65535");
  changed = mask;
  changed.step = {};
  EXPECT_EQ(error(a, {}, changed), "dropout: mask.step is absent; expected a tensor");
}

}  // namespace
}  // namespace flashgla::ops::dropout
