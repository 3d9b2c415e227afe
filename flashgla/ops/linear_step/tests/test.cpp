#include <gtest/gtest.h>

#include <cstring>

#include "flashgla/base/memory.h"
#include "flashgla/ops/linear_step/implementations.h"
#include "flashgla/ops/linear_step/tests/cases.h"
#include "testing/compare.h"
#include "testing/random.h"

namespace flashgla::ops::linear_step {
namespace {

TEST(LinearStep, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  const Form forms[] = {
      {},
      {Prologue::none, Epilogue::store, 1, false, false, true},
      {Prologue::rms_norm, Epilogue::store, 1, false, true, false, 24},
      {Prologue::rms_norm, Epilogue::swiglu, 1, false, true},
      {Prologue::head_norm, Epilogue::add, 4, true, true},
      {Prologue::head_norm, Epilogue::add, 2, false, false},
      {Prologue::none, Epilogue::log_sigmoid, 1, false, false, true},
      {Prologue::none, Epilogue::add},
  };
  for (const Form& form : forms) {
    for (const std::int64_t rows : {1, 2, 3, 5, 9}) {
      // 5632 takes several turns of the register buffers; 136 leaves lanes without a vector; 20 is no whole vector.
      for (const std::int64_t in : {16, 20, 136, 192, 2048, 5632}) {
        if (in == 2048 && rows != 1 && rows != 5) continue;
        if (in == 5632 && (rows != 3 || form.prologue != Prologue::none)) continue;
        EXPECT_EQ(testing::check_conformance(step_case(rows, in, 37, form), coverage), "");
      }
    }
  }
  // Heads that are turned: all columns or some, ends within a block's groups, more than one angle a thread, widths that
  // the fused kernel leaves.
  for (const Form& form :
       {Form{.prologue = Prologue::rms_norm, .norm_weight = true, .head_size = 4, .turned = 8},
        Form{.bias = true, .second_out = 24, .head_size = 12, .turned = 48}, Form{.head_size = 6, .turned = 36}}) {
    for (const std::int64_t rows : {1, 2, 3, 5}) {
      for (const std::int64_t in : {16, 64, 136}) {
        EXPECT_EQ(testing::check_conformance(step_case(rows, in, form.second_out ? 36 : 40, form), coverage), "");
      }
    }
  }
  const Form wide{.prologue = Prologue::rms_norm, .second_out = 512, .head_size = 1024, .turned = 18432};
  for (const std::int64_t rows : {4, 7}) {
    EXPECT_EQ(testing::check_conformance(step_case(rows, rows == 7 ? 64 : 16, 20480, wide), coverage), "");
  }
  // Packed weights, beside floats or alone: panels and groups that end early, warps without groups, several panels a
  // block, and more than it keeps sums of.
  for (const auto format : {quantised_linear::Format::q8, quantised_linear::Format::q4}) {
    for (Form form : forms) {
      form.packed = format;
      if (form.second_out > 0) form.second_out = 35;
      for (const std::int64_t rows : {1, 2, 3, 8, 9}) {
        for (const std::int64_t in : {16, 136, 256, 2048}) {
          if (in == 2048 && rows != 1 && rows != 8) continue;
          const std::int64_t out = form.epilogue == Epilogue::swiglu ? 48 : 37;
          EXPECT_EQ(testing::check_conformance(step_case(rows, in, out, form), coverage), "");
        }
      }
    }
    Form form{.prologue = Prologue::rms_norm, .head_size = 8, .turned = 24, .packed = format};
    EXPECT_EQ(testing::check_conformance(step_case(2, 64, 40, form), coverage), "");
    if (cuda_device_count() == 0) continue;
    form = {.prologue = Prologue::rms_norm, .packed = format};
    EXPECT_EQ(testing::check_conformance(step_case(1, 64, 40000, form), coverage), "");
    EXPECT_EQ(testing::check_conformance(step_case(7, 64, 9000, form), coverage), "");
    form.epilogue = Epilogue::swiglu;
    EXPECT_EQ(testing::check_conformance(step_case(4, 2816, 4800, form), coverage), "");
  }
  // Rows of the weights that one block takes in one tile of tensor cores, in several, and in several turns.
  for (const std::int64_t out : {700, 5000, 16001}) {
    for (const Form& form : {Form{Prologue::rms_norm, Epilogue::swiglu, 1, false, true},
                             Form{Prologue::head_norm, Epilogue::add, 4, true, true}, Form{.bias = true}}) {
      EXPECT_EQ(testing::check_conformance(step_case(8, 128, out, form), coverage), "");
    }
  }
  EXPECT_EQ(coverage.missing(), "");
}

// Of up to four sequences, and of five to eight.
TEST(LinearStep, ASequencesValuesDoNotDependOnItsNeighbours) {
  for (const Device device : testing::test_devices()) {
    Context context(device, 2);
    const Tensor weight = testing::copied_to(testing::random_normal({40, 256}, DType::bf16, 1), device);
    const Tensor x = testing::copied_to(testing::random_normal({8, 256}, DType::f32, 2), device);
    const Tensor given = Tensor::zeros({8}, DType::i32);
    for (std::int32_t n = 0; n < 8; ++n) given.as<std::int32_t>()[n] = 300 * n;
    const Tensor positions = testing::copied_to(given, device);
    // Rows begin to end of x, by themselves.
    const auto values = [&](std::int64_t begin, std::int64_t end) {
      const Tensor y = Tensor::empty({end - begin, 40}, DType::f32, device);
      const Layer layer{weight, {}, y, 16};
      run(context, {x->slice(0, begin, end), Prologue::rms_norm}, {&layer, 1},
          {.rotary = {1e4, 8, positions->slice(0, begin, end)}});
      return testing::copied_to(y, Device::cpu());
    };
    const Tensor four = values(0, 4), eight = values(0, 8);
    for (std::int64_t n = 0; n < 4; ++n) {
      EXPECT_TRUE(testing::same_bits(values(n, n + 1), four->slice(0, n, n + 1))) << n;
      EXPECT_TRUE(testing::same_bits(values(n, n + 5), eight->slice(0, n, n + 5))) << n;
    }
  }
}

TEST(LinearStep, RefusesBadArgumentsByName) {
  Context context;
  const Tensor x = Tensor::zeros({2, 8}, DType::f32), weight = Tensor::zeros({6, 8}, DType::f32);
  const Tensor y = Tensor::zeros({2, 6}, DType::f32), half = Tensor::zeros({2, 3}, DType::f32);
  const Tensor wrong = Tensor::zeros({5}, DType::f32);
  const auto error = [&](const Inputs& inputs, const Layer& layer, Epilogue epilogue = Epilogue::store) {
    return testing::error_of([&] { run(context, inputs, {&layer, 1}, {epilogue}); });
  };
  EXPECT_EQ(error({x}, {weight, {}, y}), "no error");
  EXPECT_EQ(error({x}, {weight, {}, half}, Epilogue::swiglu), "no error");
  EXPECT_EQ(error({x}, {weight, {}, half}),
            "linear_step: weight has shape [6,8]; expected [3,8] (as y's columns, x's columns)");
  EXPECT_EQ(error({x}, {weight, wrong, y}), "linear_step: bias has shape [5]; expected [6] (as y's columns)");
  EXPECT_EQ(error({x}, {weight, wrong, half}, Epilogue::swiglu),
            "linear_step: bias is present; expected none with swiglu");
  EXPECT_EQ(error({x, Prologue::none, wrong}, {weight, {}, y}),
            "linear_step: norm_weight is present; expected none without a norm");
  EXPECT_EQ(error({x, Prologue::head_norm, {}, 1e-6, 3}, {weight, {}, y}),
            "linear_step: head_size is 3; expected a divisor of 8 (x's columns)");
  EXPECT_EQ(error({x, Prologue::rms_norm, {}, 1e-6, 0, x}, {weight, {}, y}),
            "linear_step: gate is present; expected none without the prologue head_norm");
  Options turning;
  turning.rotary = {1e4, 4, {}};
  const auto turned = [&](std::int64_t columns, const Options& options) {
    const Layer layer{weight, {}, y, columns};
    return testing::error_of([&] { run(context, {x}, {&layer, 1}, options); });
  };
  EXPECT_EQ(turned(4, turning), "no error");
  EXPECT_EQ(turned(6, turning), "linear_step: turned is 6; expected whole heads of 4 of y's columns");
  EXPECT_EQ(turned(4, {}), "linear_step: rotary.head_size is 0; expected an even number");
  turning.rotary.base = 1.0;
  EXPECT_EQ(turned(4, turning), "linear_step: rotary.base is 1.000000; expected more than 1");
  turning.epilogue = Epilogue::add;
  EXPECT_EQ(turned(4, turning), "linear_step: turned is 4; expected 0 with another epilogue than store");
  EXPECT_EQ(testing::error_of([&] { run(context, {x}, {}); }), "linear_step: layers are 0; expected one to eight");
}

}  // namespace
}  // namespace flashgla::ops::linear_step
