#include <gtest/gtest.h>

#include "flashgla/base/memory.h"
#include "flashgla/ops/positions/positions.h"
#include "testing/conformance.h"
#include "testing/devices.h"

namespace flashgla::ops::positions {
namespace {

Tensor integers(const std::vector<std::int32_t>& values) {
  Tensor tensor = Tensor::empty(Shape({static_cast<std::int64_t>(values.size())}), DType::i32);
  std::copy(values.begin(), values.end(), tensor.as<std::int32_t>());
  return tensor;
}

std::vector<std::int32_t> values_of(const TensorView& tensor) {
  std::vector<std::int32_t> values(static_cast<std::size_t>(tensor.numel()));
  copy_memory(values.data(), Device::cpu(), tensor.data, tensor.device, tensor.bytes());
  return values;
}

TEST(Positions, AdvanceByLengthsOfSequences) {
  for (const Device device : testing::test_devices()) {
    Context context(device);
    const Tensor positions = testing::copied_to(integers({5, 0, 7}), device);
    advance(context, positions, testing::copied_to(integers({0, 4, 4, 9}), device), 0);
    context.queue().synchronize();
    EXPECT_EQ(values_of(positions), (std::vector<std::int32_t>{9, 0, 12}));
    advance(context, positions, {}, 3);
    context.queue().synchronize();
    EXPECT_EQ(values_of(positions), (std::vector<std::int32_t>{12, 3, 15}));
  }
}

TEST(Positions, OfTokens) {
  for (const Device device : testing::test_devices()) {
    Context context(device);
    const Tensor positions = testing::copied_to(integers({5, 0}), device);
    const Tensor rows = Tensor::empty({2, 3}, DType::i32, device), packed = Tensor::empty({1, 4}, DType::i32, device);
    of_tokens(context, positions, {}, rows);
    context.queue().synchronize();
    EXPECT_EQ(values_of(rows), (std::vector<std::int32_t>{5, 6, 7, 0, 1, 2}));
    of_tokens(context, {}, {}, rows);
    context.queue().synchronize();
    EXPECT_EQ(values_of(rows), (std::vector<std::int32_t>{0, 1, 2, 0, 1, 2}));
    // Sequences of one token, none, none, and three.
    const Tensor four = testing::copied_to(integers({9, 8, 7, 6}), device);
    of_tokens(context, four, testing::copied_to(integers({0, 1, 1, 1, 4}), device), packed);
    context.queue().synchronize();
    EXPECT_EQ(values_of(packed), (std::vector<std::int32_t>{9, 6, 7, 8}));
  }
}

TEST(Positions, RefusesBadArgumentsByName) {
  Context context;
  const Tensor positions = integers({1, 2});
  EXPECT_EQ(testing::error_of([&] { advance(context, Tensor::zeros({2}, DType::f32), {}, 1); }),
            "positions: positions has dtype f32; expected i32");
  EXPECT_EQ(testing::error_of([&] {
              advance(context, positions, integers({0, 1}), 1);
            }),
            "positions: bounds has shape [2]; expected [3] (as positions' size + 1)");
}

}  // namespace
}  // namespace flashgla::ops::positions
