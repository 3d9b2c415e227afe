// Bad input is refused with the argument's name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "flashgla/ops/gated_linear_attention/tests/cases.h"

namespace flashgla::ops::gated_linear_attention {
namespace {

// Bad input: each is refused with the argument's name.
struct Bad {
  const char* argument;
  std::function<void(CaseData&, Results&)> spoil;
};

class Refusals : public ::testing::Test {
 protected:
  // Spoils one argument of a good call, and expects forward or backward to name it.
  void expect_refused(const Case& c, const Bad& bad) {
    SCOPED_TRACE(bad.argument);
    CaseData data = make_data(c);
    Results results = make_results(data, true, 0);
    Context context;
    context.force_implementation("reference");
    forward(context, data.in, results.out, data.options);
    bad.spoil(data, results);
    try {
      forward(context, data.in, results.out, data.options);
      backward(context, data.in, results.out, data.d_out, results.d_in, data.options);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), bad.argument) << error.what();
      EXPECT_THAT(error.what(), ::testing::StartsWith("gated_linear_attention: " + std::string(bad.argument) + " "));
    }
  }
  TensorView other(const Shape& shape, DType dtype = DType::f32) {
    storage_.push_back(Tensor::zeros(shape, dtype));
    return storage_.back();
  }
  TensorView offsets(std::vector<std::int32_t> values) {
    storage_.push_back(Tensor::empty(Shape({static_cast<std::int64_t>(values.size())}), DType::i32));
    std::memcpy(storage_.back()->data, values.data(), values.size() * sizeof(std::int32_t));
    return storage_.back();
  }
  std::vector<Tensor> storage_;
};

TEST_F(Refusals, NameTheArgument) {
  const Case key{.name = "key", .batch = 2, .length = 9, .query_heads = 4, .heads = 2, .key_dim = 3, .value_dim = 5};
  const Bad bads[] = {
      {"q", [&](CaseData& d, Results&) { d.in.q = {}; }},
      {"q",
       [&](CaseData& d, Results&) {
         d.in.q = other(Shape({2, 9, 4}));
       }},
      {"q",
       [&](CaseData& d, Results&) {
         d.in.q = other(Shape({2, 0, 4, 3}));
       }},
      {"q",
       [&](CaseData& d, Results&) {
         d.in.q = other(Shape({2, 9, 4, 3}), DType::i32);
       }},
      {"q",
       [&](CaseData& d, Results&) {
         d.in.q.device = Device::cuda(0);
         d.in.k.device = d.in.v.device = d.in.g.device = d.in.h0.device = Device::cuda(0);
       }},
      {"q",
       [&](CaseData& d, Results&) {
         d.in.q = other(Shape({2, 9, 3, 4})).transpose(2, 3);
       }},
      {"k", [&](CaseData& d, Results&) { d.in.k = {}; }},
      {"k",
       [&](CaseData& d, Results&) {
         d.in.k = other(Shape({2, 9, 3, 3}));
       }},
      {"k",
       [&](CaseData& d, Results&) {
         d.in.k = other(Shape({2, 9, 2, 4}));
       }},
      {"k",
       [&](CaseData& d, Results&) {
         d.in.k = other(Shape({2, 9, 2, 3}), DType::bf16);
       }},
      {"k",
       [&](CaseData& d, Results&) {
         d.in.k = other(Shape({2, 8, 2, 3}));
       }},
      {"v",
       [&](CaseData& d, Results&) {
         d.in.v = other(Shape({2, 9, 4, 5}));
       }},
      {"v", [&](CaseData& d, Results&) { d.in.v.device = Device::cuda(0); }},
      {"g",
       [&](CaseData& d, Results&) {
         d.in.g = other(Shape({2, 9, 2, 5}));
       }},
      {"g",
       [&](CaseData& d, Results&) {
         d.in.g = other(Shape({2, 9}));
       }},
      {"g", [&](CaseData& d, Results&) { d.in.g = other(Shape({4})); }},
      {"g",
       [&](CaseData& d, Results&) {
         d.in.g = other(Shape({2, 9, 2, 3}), DType::bf16);
       }},
      {"g",
       [&](CaseData& d, Results&) {
         d.in.g = other(Shape({2, 9, 3, 2})).transpose(2, 3);
       }},
      {"g",
       [&](CaseData& d, Results&) {
         d.in.g = other(Shape({2, 9, 2}));
         d.in.gv = other(Shape({2, 9, 2, 5}));
       }},
      {"gv",
       [&](CaseData& d, Results&) {
         d.in.gv = other(Shape({2, 9, 2, 3}));
       }},
      {"h0",
       [&](CaseData& d, Results&) {
         d.in.h0 = other(Shape({2, 4, 3, 5}));
       }},
      {"h0",
       [&](CaseData& d, Results&) {
         d.in.h0 = other(Shape({2, 2, 3, 5}), DType::bf16);
       }},
      {"h0",
       [&](CaseData& d, Results&) {
         d.in.h0 = other(Shape({2, 2, 5, 3})).transpose(2, 3);
       }},
      {"z0",
       [&](CaseData& d, Results&) {
         d.in.z0 = other(Shape({2, 2, 3}));
       }},
      {"scale", [&](CaseData& d, Results&) { d.options.scale = std::numeric_limits<double>::quiet_NaN(); }},
      {"normalize", [&](CaseData& d, Results&) { d.options.normalize = true; }},
      {"o", [&](CaseData&, Results& r) { r.out.o = {}; }},
      {"o",
       [&](CaseData&, Results& r) {
         r.out.o = other(Shape({2, 9, 2, 5}));
       }},
      {"o", [&](CaseData&, Results& r) { r.out.o.stride[1] = 0; }},
      {"ht",
       [&](CaseData&, Results& r) {
         r.out.ht = other(Shape({2, 2, 5, 3}));
       }},
      {"zt",
       [&](CaseData&, Results& r) {
         r.out.zt = other(Shape({2, 2, 3}));
       }},
      {"states", [&](CaseData&, Results& r) { r.out.states = other(Shape({7}), DType::u8); }},
      {"d_o", [&](CaseData& d, Results&) { d.d_out.d_o = {}; }},
      {"d_o",
       [&](CaseData& d, Results&) {
         d.d_out.d_o = other(Shape({2, 9, 4, 5}), DType::f64);
       }},
      {"d_ht",
       [&](CaseData& d, Results&) {
         d.d_out.d_ht = other(Shape({1, 2, 3, 5}));
       }},
      {"d_zt",
       [&](CaseData& d, Results&) {
         d.d_out.d_zt = other(Shape({2, 2, 3}));
       }},
      {"dq",
       [&](CaseData&, Results& r) {
         r.d_in.dq = other(Shape({2, 9, 2, 3}));
       }},
      {"dk", [&](CaseData&, Results& r) { r.d_in.dk.stride[0] = 0; }},
      {"dv",
       [&](CaseData&, Results& r) {
         r.d_in.dv = other(Shape({2, 9, 2, 5}), DType::f16);
       }},
      {"dg",
       [&](CaseData&, Results& r) {
         r.d_in.dg = other(Shape({2, 9, 2, 3}), DType::bf16);
       }},
      {"dgv",
       [&](CaseData&, Results& r) {
         r.d_in.dgv = other(Shape({2, 9, 2, 5}));
       }},
      {"dh0",
       [&](CaseData&, Results& r) {
         r.d_in.dh0 = other(Shape({2, 2, 3, 4}));
       }},
      {"dz0",
       [&](CaseData&, Results& r) {
         r.d_in.dz0 = other(Shape({2, 2, 3}));
       }},
      {"cu_seqlens",
       [&](CaseData& d, Results&) {
         d.in.cu_seqlens = other(Shape({2, 1}), DType::i32);
       }},
      {"cu_seqlens", [&](CaseData& d, Results&) { d.in.cu_seqlens = other(Shape({3}), DType::f32); }},
      {"q",
       [&](CaseData& d, Results&) {
         d.in.cu_seqlens = offsets({0, 4, 9});
       }},
  };
  for (const Bad& bad : bads) expect_refused(key, bad);
}

TEST_F(Refusals, NameBadPacking) {
  const Case packed{.name = "packed", .heads = 2, .key_dim = 3, .value_dim = 5, .lengths = {4, 5}};
  for (const std::vector<std::int32_t>& values :
       {std::vector<std::int32_t>{1, 4, 9}, {0, 10, 9}, {0, 4, 8}, {0, -1, 9}}) {
    expect_refused(packed, {"cu_seqlens", [&](CaseData& d, Results&) { d.in.cu_seqlens = offsets(values); }});
  }
}

TEST_F(Refusals, NameBadMaxSeqlen) {
  const Case whole{.name = "whole", .heads = 2, .key_dim = 3, .value_dim = 5};
  Case packed = whole;
  packed.name = "packed";
  packed.lengths = {4, 5};
  expect_refused(whole, {"max_seqlen", [](CaseData& d, Results&) { d.options.max_seqlen = 5; }});
  expect_refused(packed, {"max_seqlen", [](CaseData& d, Results&) { d.options.max_seqlen = -1; }});
  expect_refused(packed, {"max_seqlen", [](CaseData& d, Results&) { d.options.max_seqlen = 4; }});
}

TEST_F(Refusals, NameBadLogits) {
  const Case key{.name = "key", .heads = 2, .key_dim = 3, .value_dim = 5};
  Case constant = key;
  constant.gate = GateKind::constant;
  Case none = key;
  none.gate = GateKind::none;
  const auto normalizer = [](double x) {
    return Bad{"gate_logit_normalizer", [x](CaseData& d, Results&) { d.options.gate_logit_normalizer = x; }};
  };
  expect_refused(key, normalizer(-1.0));
  expect_refused(key, normalizer(std::numeric_limits<double>::infinity()));
  expect_refused(constant, normalizer(16.0));
  expect_refused(none, normalizer(16.0));
  expect_refused(key, {"gate_clamp_min", [](CaseData& d, Results&) { d.options.gate_clamp_min = -1.0; }});
  expect_refused(key, {"gate_clamp_min", [](CaseData& d, Results&) {
                         d.options.gate_logit_normalizer = 16.0;
                         d.options.gate_clamp_min = 0.5;
                       }});
}

TEST_F(Refusals, Steps) {
  Context context;
  const TensorView q = other(Shape({2, 4, 3})), k = other(Shape({2, 2, 3})), v = other(Shape({2, 2, 5}));
  const TensorView h = other(Shape({2, 2, 3, 5})), o = other(Shape({2, 4, 5}));
  step(context, {.q = q, .k = k, .v = v}, h, {}, o);
  auto expect = [&](const char* argument, const StepInputs& in, const TensorView& state, const TensorView& z,
                    const TensorView& out) {
    SCOPED_TRACE(argument);
    try {
      step(context, in, state, z, out);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), argument) << error.what();
    }
  };
  expect("h", {.q = q, .k = k, .v = v}, {}, {}, o);
  expect("h", {.q = q, .k = k, .v = v}, other(Shape({2, 4, 3, 5})), {}, o);
  expect("h", {.q = q, .k = k, .v = v}, other(Shape({2, 2, 3, 5}), DType::f16), {}, o);
  expect("z", {.q = q, .k = k, .v = v}, h, other(Shape({2, 2, 3})), o);
  expect("o", {.q = q, .k = k, .v = v}, h, {}, other(Shape({2, 2, 5})));
  expect("g", {.q = q, .k = k, .v = v, .g = other(Shape({2, 4}))}, h, {}, o);
  expect("k", {.q = q, .k = other(Shape({2, 2, 4})), .v = v}, h, {}, o);

  const TensorView x = other(Shape({2, 4})), weight = other(Shape({6, 4})), bias = other(Shape({6}));
  const auto projected = [&](const TensorView& from, const TensorView& by, const TensorView& with) {
    return StepInputs{.q = q, .k = k, .v = v, .projection = {from, by, with}};
  };
  const Options logits{.gate_logit_normalizer = 16.0};
  EXPECT_TRUE(step_projects(context, projected(x, weight, bias), h, logits));
  EXPECT_TRUE(step_projects(context, projected(x, weight, {}), h, logits));
  const auto expect_projection = [&](const char* argument, const StepInputs& in, const Options& options) {
    SCOPED_TRACE(argument);
    try {
      step(context, in, h, {}, o, options);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), argument) << error.what();
    }
  };
  expect_projection("projection", projected(x, weight, bias), {});
  context.force_implementation("reference");  // which is given log gates
  EXPECT_FALSE(step_projects(context, projected(x, weight, bias), h, logits));
  expect_projection("projection", projected(x, weight, bias), logits);
  context.force_implementation("");
  expect_projection("projection.x", projected({}, weight, bias), logits);
  expect_projection("projection.x", projected(other(Shape({3, 4})), weight, bias), logits);
  expect_projection("projection.x", projected(other(Shape({2, 4}), DType::f64), weight, bias), logits);
  expect_projection("projection.weight", projected(x, other(Shape({6, 5})), bias), logits);
  expect_projection("projection.weight", projected(x, other(Shape({6, 4}), DType::f16), bias), logits);
  expect_projection("projection.bias", projected(x, weight, other(Shape({5}))), logits);
  StepInputs both = projected(x, weight, bias);
  both.g = other(Shape({2, 2, 3}));
  expect_projection("g", both, logits);
}

TEST(Names, RoundTripAndRefuse) {
  EXPECT_EQ(gate_kind_from_name(name_of(GateKind::key_value)), GateKind::key_value);
  EXPECT_EQ(algorithm_from_name(name_of(Algorithm::chunk_recomputed)), Algorithm::chunk_recomputed);
  EXPECT_EQ(feature_map_from_name(name_of(FeatureMap::relu)), FeatureMap::relu);
  try {
    gate_kind_from_name("vector");
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "gated_linear_attention: gate is 'vector'; expected one of none, constant, scalar, key, key_value");
  }
}

}  // namespace
}  // namespace flashgla::ops::gated_linear_attention
