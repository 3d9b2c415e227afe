#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "flashgla/base/float16.h"
#include "flashgla/ops/quantised_linear/blocks.h"
#include "flashgla/ops/quantised_linear/gptq.h"
#include "flashgla/ops/quantised_linear/implementations.h"
#include "flashgla/ops/quantised_linear/tests/cases.h"
#include "testing/compare.h"
#include "testing/devices.h"

namespace flashgla::ops::quantised_linear {
namespace {

constexpr Format kFormats[] = {Format::q8, Format::q4};

Tensor packed_of(const TensorView& values, Format format, const TensorView& importance = {}) {
  Context context;
  Tensor packed = Tensor::zeros(packed_shape(format, values.size(0), values.size(1)), DType::u8);
  quantise(context, values, importance, packed);
  return packed;
}

Tensor decoded(const TensorView& packed, const Shape& shape) {
  Context context;
  Tensor values = Tensor::empty(shape, DType::f32);
  decode(context, packed, 0, values);
  return values;
}

std::vector<Implementation> of_the_cpu() {
  std::vector<Implementation> rows;
  for (const Implementation& row : implementations()) {
    if (row.device == Device::Kind::cpu) rows.push_back(row);
  }
  return rows;
}

TEST(QuantisedLinear, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  for (const Format format : kFormats) {
    for (const Form form : {Form{}, Form{true, false}, Form{false, true}, Form{true, true}}) {
      for (const std::int64_t rows : {1, 2, 3, 4, 7, 16, 17}) {
        EXPECT_EQ(testing::check_conformance(linear_case(format, rows, 96, 37, form), coverage), "");
      }
    }
    EXPECT_EQ(testing::check_conformance(linear_case(format, 1, 1, 1), coverage), "");
    EXPECT_EQ(testing::check_conformance(linear_case(format, 3, 45, 16), coverage), "");
    EXPECT_EQ(testing::check_conformance(linear_case(format, 2, 1000, 130), coverage), "");
    EXPECT_EQ(testing::check_conformance(linear_case(format, 40, 130, 1100), coverage), "");
    for (const Form form : {Form{false, false, true}, Form{true, true, true}}) {
      EXPECT_EQ(testing::check_conformance(linear_case(format, 9, 136, 200, form), coverage), "");
      EXPECT_EQ(testing::check_conformance(linear_case(format, 3, 45, 37, form), coverage), "");
      for (const std::int64_t rows : {1, 16, 17, 33, 64, 65}) {  // those of a GPU's kernel for few of them
        EXPECT_EQ(testing::check_conformance(linear_case(format, rows, 328, 200, form), coverage), "");
      }
      EXPECT_EQ(testing::check_conformance(linear_case(format, 40, 1096, 2100, form), coverage), "");
    }
  }
  EXPECT_EQ(coverage.missing(), "");
}

// Integers within a group, groups in order: there is one right answer, bit for bit.
TEST(QuantisedLinear, EveryInstructionSetHasTheSameBits) {
  for (const Format format : kFormats) {
    const Tensor values = testing::random_normal({70, 203}, DType::f32, 1);
    const Tensor packed = packed_of(values, format);
    const Tensor x = testing::random_normal({5, 203}, DType::f32, 2);
    x.as<float>()[7] = 3e4f;  // beside which the others of its group nearly vanish
    Tensor expected;
    for (const Implementation& row : of_the_cpu()) {
      if (!row.supports({5, 70, 203, DType::f32, format}, {}) || row.name == std::string("decoded") ||
          row.name == std::string("reference")) {
        continue;
      }
      Context context(Device::cpu(), 2);
      context.force_implementation(row.name);
      Tensor y = Tensor::empty({5, 70}, DType::f32);
      run(context, x, packed, y);
      for (std::int64_t m = 0; m < 5; ++m) {  // and whatever the other rows are
        const Tensor alone = Tensor::empty({1, 70}, DType::f32);
        run(context, x->slice(0, m, m + 1), packed, alone);
        EXPECT_TRUE(testing::same_bits(alone, y->slice(0, m, m + 1))) << row.name;
      }
      if (expected) {
        EXPECT_TRUE(testing::same_bits(y, expected)) << row.name << " " << name_of(format);
      } else {
        expected = std::move(y);
      }
    }
  }
}

TEST(QuantisedLinear, LargestSumsDoNotOverflow) {
  for (const Format format : kFormats) {
    for (const float sign : {1.0f, -1.0f}) {
      const Tensor values = Tensor::empty({16, 32}, DType::f32);
      fill(values, -127.0);
      const Tensor packed = packed_of(values, format);
      const Tensor x = Tensor::empty({1, 32}, DType::f32);
      fill(x, 1.0 * sign);
      for (const Implementation& row : of_the_cpu()) {
        Context context;
        context.force_implementation(row.name);
        const Tensor y = Tensor::empty({1, 16}, DType::f32);
        run(context, x, packed, y);
        for (std::int64_t n = 0; n < 16; ++n) EXPECT_FLOAT_EQ(y.as<float>()[n], -127.0f * 32.0f * sign) << row.name;
      }
    }
  }
}

TEST(QuantisedLinear, WhatIsNotFiniteInXIsNotFiniteInY) {
  const Tensor packed = packed_of(testing::random_normal({16, 64}, DType::f32, 1), Format::q4);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const Tensor x = testing::random_normal({2, 64}, DType::f32, 2);
    x.as<float>()[40] = bad;
    for (const Implementation& row : of_the_cpu()) {
      Context context;
      context.force_implementation(row.name);
      const Tensor y = Tensor::empty({2, 16}, DType::f32);
      run(context, x, packed, y);
      for (std::int64_t n = 0; n < 16; ++n) {
        EXPECT_FALSE(std::isfinite(y.as<float>()[n])) << row.name;
        EXPECT_TRUE(std::isfinite(y.as<float>()[16 + n])) << row.name;
      }
    }
  }
}

// Rows and tokens as floats are the CPU's, bit for bit, on every device; of a token that is none a GPU makes NaN.
TEST(QuantisedLinear, DecodedRowsAreTheSameOnEveryDevice) {
  const std::int64_t rows = 70, columns = 203;
  const Tensor values = testing::random_normal({rows, columns}, DType::f32, 1);
  const Tensor tokens = Tensor::zeros({3}, DType::i32);
  tokens.as<std::int32_t>()[0] = 69, tokens.as<std::int32_t>()[2] = 17;
  for (const Device device : testing::test_devices()) {
    Context context(device);
    for (const Format format : kFormats) {
      const Tensor packed = packed_of(values, format);
      const Tensor there = testing::copied_to(packed, device), ids = testing::copied_to(tokens, device);
      for (const DType dtype : {DType::f32, DType::bf16}) {
        const Tensor expected = Tensor::empty({51, columns}, dtype);
        Context cpu;
        decode(cpu, packed, 19, expected);
        const Tensor decoded = Tensor::empty({51, columns}, dtype, device);
        decode(context, there, 19, decoded);
        EXPECT_TRUE(testing::same_bits(testing::copied_to(decoded, Device::cpu()), expected));
        if (dtype == DType::bf16 && device == Device::cpu()) continue;
        const Tensor looked_up = Tensor::empty({3, columns}, dtype, device);
        look_up(context, ids, there, rows, looked_up);
        const Tensor host = testing::copied_to(looked_up, Device::cpu());
        EXPECT_TRUE(testing::same_bits(host->slice(0, 0, 1), expected->slice(0, 50, 51)));
      }
    }
    if (device == Device::cpu()) continue;
    tokens.as<std::int32_t>()[1] = 70;
    const Tensor looked_up = Tensor::empty({3, columns}, DType::f32, device);
    look_up(context, testing::copied_to(tokens, device), testing::copied_to(packed_of(values, Format::q8), device),
            rows, looked_up);
    const Tensor host = testing::copied_to(looked_up, Device::cpu());
    EXPECT_TRUE(std::isnan(host.as<float>()[columns]));
    EXPECT_TRUE(std::isfinite(host.as<float>()[2 * columns]));
    tokens.as<std::int32_t>()[1] = 0;
  }
}

TEST(QuantisedLinear, ErrorsAreThoseOfTheFormats) {
  const Tensor values = testing::random_normal({64, 512}, DType::f32, 3, 0.02);
  // Of normal numbers: 8 bits, 5 significant ones beside the largest of 32; measured once.
  EXPECT_LT(testing::difference(decoded(packed_of(values, Format::q8), values->shape), values).relative, 0.0055);
  EXPECT_LT(testing::difference(decoded(packed_of(values, Format::q4), values->shape), values).relative, 0.075);
}

TEST(QuantisedLinear, ImportanceMovesTheErrorToWhatMattersLess) {
  const Tensor values = testing::random_normal({64, 64}, DType::f32, 4);
  const Tensor importance = Tensor::empty({64}, DType::f32);
  for (std::int64_t k = 0; k < 64; ++k) importance.as<float>()[k] = k % 2 ? 100.0f : 1.0f;
  const auto weighted = [&](const Tensor& packed) {
    const Tensor back = decoded(packed, values->shape);
    double error = 0.0;
    for (std::int64_t i = 0; i < values->numel(); ++i) {
      const double rest = back.as<float>()[i] - values.as<float>()[i];
      error += static_cast<double>(importance.as<float>()[i % 64]) * rest * rest;
    }
    return error;
  };
  EXPECT_LT(weighted(packed_of(values, Format::q4, importance)), 0.9 * weighted(packed_of(values, Format::q4)));
}

// On inputs that go together, columns that come later make up for the errors of earlier ones.
TEST(QuantisedLinear, GptqLowersTheErrorOfTheOutputs) {
  constexpr std::int64_t kRows = 37, kColumns = 96, kInputs = 256, kSources = 12;
  const Tensor values = testing::random_normal({kRows, kColumns}, DType::f32, 1, 0.02);
  const Tensor sources = testing::random_normal({kInputs, kSources}, DType::f64, 2);
  const Tensor mix = testing::random_normal({kSources, kColumns}, DType::f64, 3);
  const Tensor x = testing::random_normal({kInputs, kColumns}, DType::f32, 4, 0.3);
  const Tensor products = Tensor::zeros({kColumns, kColumns}, DType::f32);
  for (std::int64_t i = 0; i < kInputs; ++i) {
    float* row = x.as<float>() + i * kColumns;
    for (std::int64_t k = 0; k < kColumns; ++k) {
      for (std::int64_t s = 0; s < kSources; ++s) {
        row[k] += static_cast<float>(sources.as<double>()[i * kSources + s] * mix.as<double>()[s * kColumns + k]);
      }
    }
    for (std::int64_t k = 0; k < kColumns * kColumns; ++k) {
      products.as<float>()[k] += row[k / kColumns] * row[k % kColumns] / static_cast<float>(kInputs);
    }
  }
  Context context;
  const auto error = [&](const TensorView& packed) {
    const Tensor back = decoded(packed, values->shape);
    double sum = 0.0;
    for (std::int64_t i = 0; i < kInputs; ++i) {
      for (std::int64_t n = 0; n < kRows; ++n) {
        double rest = 0.0;
        for (std::int64_t k = 0; k < kColumns; ++k) {
          rest += static_cast<double>(x.as<float>()[i * kColumns + k]) *
                  (back.as<float>()[n * kColumns + k] - values.as<float>()[n * kColumns + k]);
        }
        sum += rest * rest;
      }
    }
    return std::sqrt(sum);
  };
  for (const Format format : kFormats) {
    const Tensor packed = packed_of(values, format);
    const double before = error(packed);
    compensate(context, values, products, packed);
    EXPECT_LT(error(packed), 0.6 * before) << name_of(format);
  }
}

TEST(QuantisedLinear, ExtremeScales) {
  const Tensor values = Tensor::zeros({3, 64}, DType::f32);
  values.as<float>()[0] = 6e-8f;     // a scale below the least of f16: zero
  values.as<float>()[64] = 1e-5f;    // a subnormal one
  values.as<float>()[128] = 5.0e6f;  // nearly the largest
  for (const Format format : kFormats) {
    const Tensor back = decoded(packed_of(values, format), values->shape);
    EXPECT_NEAR(back.as<float>()[0], 0.0f, 6e-8f);
    EXPECT_NEAR(back.as<float>()[64], 1e-5f, 4e-6f);
    EXPECT_NEAR(back.as<float>()[128], 5.0e6f, format == Format::q8 ? 3e3f : 1e4f);  // q4 has no zero for the others
  }
}

TEST(QuantisedLinear, LookUpAndDecodeReadTheSame) {
  for (const Format format : kFormats) {
    const Tensor packed = packed_of(testing::random_normal({40, 50}, DType::f32, 5), format);
    const Tensor all = decoded(packed, {40, 50});
    const Tensor tokens = Tensor::empty({3}, DType::i32);
    const std::int32_t ids[] = {39, 0, 17};
    std::memcpy(tokens->data, ids, sizeof(ids));
    const Tensor rows = Tensor::empty({3, 50}, DType::f32);
    Context context;
    look_up(context, tokens, packed, 40, rows);
    for (std::int64_t r = 0; r < 3; ++r) {
      EXPECT_TRUE(testing::same_bits(rows->slice(0, r, r + 1), all->slice(0, ids[r], ids[r] + 1)));
    }
    tokens.as<std::int32_t>()[1] = 40;
    EXPECT_EQ(testing::error_of([&] { look_up(context, tokens, packed, 40, rows); }),
              "quantised look-up: tokens holds 40 at position 1; expected 0 to 39");
  }
}

TEST(QuantisedLinear, RefusesByName) {
  Context context;
  const Tensor values = testing::random_normal({20, 40}, DType::f32, 6);
  const Tensor packed = packed_of(values, Format::q8), x = Tensor::zeros({2, 40}, DType::f32);
  const Tensor y = Tensor::zeros({2, 20}, DType::f32), wide = Tensor::zeros({2, 40}, DType::f32);
  const auto error = [&](const TensorView& weight, const TensorView& out) {
    return testing::error_of([&] { run(context, x, weight, out); });
  };
  EXPECT_EQ(error(packed, y), "no error");
  EXPECT_EQ(error(packed, wide), "quantised linear: weight has shape [2,2,544]; expected [3,2,544] (of [40,40])");
  EXPECT_EQ(error(values, y), "quantised linear: weight has dtype f32; expected u8");
  const Tensor bytes = Tensor::zeros({2, 2, 100}, DType::u8);
  EXPECT_EQ(error(bytes, y),
            "quantised linear: weight has shape [2,2,100]; expected [panels,groups,544] (q8) or [panels,groups,288]");
  for (const double bad : {std::nan(""), HUGE_VAL, 1e7}) {
    const std::array<std::int64_t, 2> at = {3, 5};
    store_element(values, at, bad);
    const std::string said = testing::error_of([&] { quantise(context, values, {}, packed); });
    EXPECT_NE(said.find("at [3,5]"), std::string::npos) << said;
  }
}

}  // namespace
}  // namespace flashgla::ops::quantised_linear
