#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "flashgla/base/names.h"
#include "flashgla/ops/step_outcome/implementations.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/devices.h"
#include "testing/random.h"

namespace flashgla::ops::step_outcome {
namespace {

using testing::copied_to;

double scalar(const Tensor& tensor) { return *copied_to(tensor, Device::cpu()).as<double>(); }

Tensor scalar_on(Device device, double value) {
  const Tensor host = Tensor::empty({1}, DType::f64);
  *host.as<double>() = value;
  return copied_to(host, device);
}

TEST(StepOutcome, SumsAreTheSameBitsOnEveryDevice) {
  for (const std::int64_t count : {1, 31, 1024, 1025, 5000, 16384}) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      const Tensor x = testing::random_normal({count}, dtype, static_cast<std::uint64_t>(count), 3.0);
      double plain = 0.0;
      for (std::int64_t i = 0; i < count; ++i) plain += load_element(x, std::array{i});
      Context cpu;
      const Tensor expected = scalar_on(Device::cpu(), 0.0);
      sum(cpu, x, expected, false);
      EXPECT_NEAR(scalar(expected), plain, 1e-12 * static_cast<double>(count));
      for (const Device device : testing::test_devices()) {
        Context context(device);
        const Tensor total = scalar_on(device, std::numeric_limits<double>::quiet_NaN());
        const Tensor here = copied_to(x, device);
        sum(context, here, total, false);
        context.queue().synchronize();
        EXPECT_EQ(scalar(total), scalar(expected)) << name_of(device) << " " << count;
        sum(context, here, total, true);
        context.queue().synchronize();
        EXPECT_EQ(scalar(total), 2.0 * scalar(expected)) << name_of(device) << " " << count;
      }
    }
  }
}

TEST(StepOutcome, ClearsWhatAnUpdateThatWasNotMadeLeaves) {
  for (const Device device : testing::test_devices()) {
    Context context(device);
    for (const double made : {0.0, 1.0}) {
      const Tensor x = testing::random_normal({1003}, DType::f32, 1);
      const Tensor here = copied_to(x, device);
      clear_unless(context, scalar_on(device, made), here.view().slice(0, 1, 1002));
      context.queue().synchronize();
      const Tensor after = copied_to(here, Device::cpu());
      for (std::int64_t i = 0; i < 1003; ++i) {
        const bool cleared = made == 0.0 && i > 0 && i < 1002;
        ASSERT_EQ(after.as<float>()[i], cleared ? 0.0f : x.as<float>()[i]) << i;
      }
    }
  }
}

TEST(StepOutcome, FindsTheFirstElementThatIsNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const Device device : testing::test_devices()) {
    Context context(device);
    const Tensor first = copied_to(Tensor::zeros({1}, DType::i64), device);
    const auto found = [&](const Tensor& x, double made) {
      const Tensor here = copied_to(x, device);
      find_unless(context, scalar_on(device, made), here, first);
      context.queue().synchronize();
      return *copied_to(first, Device::cpu()).as<std::int64_t>();
    };
    const Tensor x = testing::random_normal({300000}, DType::f32, 2);
    EXPECT_EQ(found(x, 0.0), -1);
    x.as<float>()[299999] = std::nanf("");
    EXPECT_EQ(found(x, 0.0), 299999);
    x.as<float>()[4242] = -kInfinity;
    EXPECT_EQ(found(x, 0.0), 4242);
    EXPECT_EQ(found(x, 1.0), -1);
  }
}

TEST(StepOutcome, RefusesBadArgumentsByName) {
  Context context;
  const Tensor x = Tensor::zeros({1}, DType::f32), one = Tensor::zeros({1}, DType::f64);
  const Tensor four = Tensor::zeros({4}, DType::f64);
  EXPECT_EQ(testing::error_of([&] { sum(context, x, x, false); }), "sum: total has dtype f32; expected f64");
  EXPECT_EQ(testing::error_of([&] { clear_unless(context, four, x); }),
            "clear_unless: made has shape [4]; expected [1] (as one flag)");
  EXPECT_EQ(testing::error_of([&] { find_unless(context, one, x, one); }),
            "find_unless: first has dtype f64; expected i64");
}

}  // namespace
}  // namespace flashgla::ops::step_outcome
