#include <gtest/gtest.h>

#include "flashgla/ops/state_space/implementations.h"
#include "flashgla/ops/state_space/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"

namespace flashgla::ops::state_space {
namespace {

TEST(StateSpace, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  for (const Form& form : {Form{1, 1, 1, 1, 1}, Form{7, 3, 20, 1, 9}, Form{9, 4, 64, 2, 33, false},
                           Form{70, 8, 300, 4, 16}, Form{33, 6, 8, 1, 300}, Form{0, 2, 4, 1, 4}}) {
    EXPECT_EQ(testing::check_conformance(forward_case(form), coverage), "");
    for (const DType dtype : {DType::f32, DType::bf16}) {
      EXPECT_EQ(testing::check_conformance(backward_case(form, dtype), coverage), "");
      EXPECT_EQ(testing::check_conformance(backward_case(form, dtype, true), coverage), "");
      EXPECT_EQ(testing::check_conformance(gate_case(form, false, dtype), coverage), "");
      EXPECT_EQ(testing::check_conformance(gate_case(form, true, dtype), coverage), "");
    }
  }
  // Heads of one vector, of a warp's, and more rows than a block of sums has.
  for (const Form& form : {Form{3, 6, 8, 2, 8}, Form{517, 3, 64, 1, 24}, Form{19, 2, 256, 2, 40, false}}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      EXPECT_EQ(testing::check_conformance(backward_case(form, dtype, true), coverage), "");
    }
  }
  for (const Form& form : {Form{5, 8, 520, 1, 1}, Form{3, 5, 2000, 1, 1}}) {  // of four vectors a thread, and more
    for (const DType dtype : {DType::f32, DType::bf16}) {
      EXPECT_EQ(testing::check_conformance(gate_case(form, false, dtype), coverage), "");
      EXPECT_EQ(testing::check_conformance(gate_case(form, true, dtype), coverage), "");
    }
  }
  EXPECT_EQ(coverage.missing(), "");
}

TEST(StateSpace, BehindTheConvolutionAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  const std::vector<ConvolvedForm> forms = {
      {{6, 2, 3, 1, 4}, 2},
      {{300, 4, 8, 2, 12}, 2, 4, {}, false, true},
      {{40, 8, 16, 2, 8}, 1, 3, {2, 40}},
      {{9, 4, 8, 2, 4}, 3, 4, {}, true},
      // Of heads of 64 channels, which have a form of their own on GPUs: lines shorter than the filter, of one token
      // more than groups have, of several chunks; packed, one empty and some shorter than the filter, one that ends a
      // chunk; with states, and with gradients of B and C of each head.
      {{4, 3, 64, 1, 24}, 2},
      {{66, 4, 64, 1, 16, false}, 2},
      {{301, 5, 64, 1, 128}, 1},
      {{130, 3, 64, 1, 24, false}, 1, 4, {0, 1, 64, 64, 66, 130}},
      {{77, 6, 64, 2, 8}, 1, 4, {32, 35, 76, 77}},
      {{18, 2, 64, 1, 16}, 2, 4, {}, false, true},
      {{18, 6, 64, 1, 16}, 1, 4, {}, true},
  };
  for (const ConvolvedForm& form : forms) {
    EXPECT_EQ(testing::check_conformance(convolved_forward_case(form), coverage), "");
    for (const DType dtype : {DType::f32, DType::bf16}) {
      EXPECT_EQ(testing::check_conformance(convolved_backward_case(form, dtype), coverage), "");
    }
  }
  EXPECT_EQ(coverage.missing(), "");
}

// The loss is a product with each output: with u through B and C as every head uses them, and x through the gate.
TEST(StateSpace, GradientsAgreeWithFiniteDifferences) {
  Context context;
  const Form form{3, 4, 3, 2, 5};
  const auto random = [](const Shape& shape, std::uint64_t seed) {
    return testing::random_normal(shape, DType::f64, seed);
  };
  const auto empty = [](const Shape& shape) { return Tensor::empty(shape, DType::f64); };
  const Shape heads = form.wide(4), inner = form.wide(12), all = form.wide(form.channels());
  const Tensor c = random(all, 1), bias = random(Shape({form.channels()}), 2), raw = random(heads, 3);
  const Tensor dt_bias = random(Shape({4}), 4), a_log = random(Shape({4}), 5), skip = random(Shape({4}), 6);
  const Tensor dv = random(inner, 7), dk = random(form.keys(), 8), dq = random(form.keys(), 9), dg = random(heads, 10);
  const Tensor o = random(inner, 11), z = random(inner, 12), dy = random(inner, 13);
  const Tensor weight = random(Shape({12}), 14), rstd = empty(Shape({3}));
  const Tensor u = empty(all), v = empty(inner), g = empty(heads), y = empty(inner);
  const Inputs inputs{c, bias, raw, dt_bias, a_log};
  const TensorView x = u->slice(1, 0, 12);
  const auto loss = [&] {
    forward(context, inputs, {u, v, g});
    gate_norm(context, {o, x, skip, z}, weight, 1e-5, y, rstd);
    double sum = testing::dot(v, dv) + testing::dot(g, dg) + testing::dot(y, dy);
    for (std::int64_t i = 0; i < dk->numel(); ++i) {
      const std::int64_t row = i / 20, h = i / 5 % 4, state = h / 2 * 5 + i % 5;
      const double* states = u.as<double>() + row * form.channels() + 12;
      sum += dk.as<double>()[i] * states[state] + dq.as<double>()[i] * states[10 + state];
    }
    return sum;
  };
  loss();
  const Tensor ds = empty(inner), dz = empty(inner), dc = empty(all), draw = empty(heads);
  const auto zeros = [](std::int64_t size) { return Tensor::zeros({size}, DType::f64); };
  const Tensor dweight = zeros(12), dbias = zeros(form.channels()), ddt_bias = zeros(4), da_log = zeros(4),
               dskip = zeros(4);
  gate_norm_backward(context, {o, x, skip, z}, weight, rstd, dy, ds, dz, dweight);
  backward(context, inputs, skip, {dv, ds, dk, dq, dg}, {dc, draw, dbias, ddt_bias, da_log, dskip});
  EXPECT_EQ(testing::check_gradient("dc", c, dc, loss), "");
  EXPECT_EQ(testing::check_gradient("draw", raw, draw, loss), "");
  EXPECT_EQ(testing::check_gradient("ds", o, ds, loss), "");
  EXPECT_EQ(testing::check_gradient("dz", z, dz, loss), "");
  EXPECT_EQ(testing::check_gradient("dweight", weight, dweight, loss), "");
  EXPECT_EQ(testing::check_gradient("dbias", bias, dbias, loss), "");
  EXPECT_EQ(testing::check_gradient("ddt_bias", dt_bias, ddt_bias, loss), "");
  EXPECT_EQ(testing::check_gradient("da_log", a_log, da_log, loss), "");
  EXPECT_EQ(testing::check_gradient("dskip", skip, dskip, loss), "");
}

TEST(StateSpace, RefusesBadArgumentsByName) {
  Context context;
  const auto zeros = [](const Shape& shape) { return Tensor::zeros(shape, DType::f32); };
  const Tensor c = zeros({3, 12}), raw = zeros({3, 2}), head = zeros({2}), u = zeros({3, 12}), v = zeros({3, 8}),
               g = zeros({3, 2});
  const auto error = [&](const Inputs& inputs, const Outputs& outputs) {
    return testing::error_of([&] { forward(context, inputs, outputs); });
  };
  EXPECT_EQ(error({c, {}, raw, head, head}, {u, v, g}), "no error");
  EXPECT_EQ(error({c, {}, zeros({3, 3}), head, head}, {u, v, g}),
            "state_space: raw has 3 heads; expected a divisor of 8");
  EXPECT_EQ(error({c, {}, raw, head, head}, {u, zeros({3, 9}), g}),
            "state_space: raw has 2 heads; expected a divisor of 9");
  EXPECT_EQ(error({c, {}, raw, head, v}, {u, v, g}),
            "state_space: a_log has shape [3,8]; expected [2] (as the channels it belongs to)");
  const Tensor weight = zeros({8}), rstd = zeros({3});
  EXPECT_EQ(testing::error_of([&] {
              gate_norm(context, {v, v, zeros({3}), v}, weight, 1e-5, v, rstd);
            }),
            "state_space: skip has shape [3]; expected [H], a divisor of 8");
  EXPECT_EQ(testing::error_of([&] {
              gate_norm(context, {v, v, head, v}, head, 1e-5, v, rstd);
            }),
            "state_space: weight has shape [2]; expected [8] (as the channels it belongs to)");
}

}  // namespace
}  // namespace flashgla::ops::state_space
