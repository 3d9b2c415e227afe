// Options::sums_over_heads: q and k the same for all heads, dq and dk the sums over them.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "flashgla/ops/gated_linear_attention/tests/test_support.h"
#include "testing/compare.h"
#include "testing/conformance.h"

namespace flashgla::ops::gated_linear_attention {
namespace {

// [B,T,H,K] as all heads share one row.
TensorView for_all_heads(const TensorView& one, std::int64_t heads) {
  TensorView view = one;
  view.shape[2] = heads;
  view.stride[2] = 0;
  return view;
}

Tensor summed_over_heads(const TensorView& view) {
  const std::int64_t rows = view.size(0) * view.size(1), heads = view.size(2), channels = view.size(3);
  Tensor sum = Tensor::zeros(Shape({view.size(0), view.size(1), 1, channels}), DType::f64);
  const auto* from = static_cast<const double*>(view.data);
  for (std::int64_t i = 0; i < rows * heads * channels; ++i) {
    sum.as<double>()[i / (heads * channels) * channels + i % channels] += from[i];
  }
  return sum;
}

void expect_sums(const Case& c, const Implementation& row, Device device) {
  CaseData data = make_data(c);
  data.in.q.stride[2] = data.in.k.stride[2] = 0;
  const Results expected = reference_results(data, c.states, true);
  const Tensor dq = summed_over_heads(expected.d_in.dq), dk = summed_over_heads(expected.d_in.dk);
  data.options.sums_over_heads = true;
  const CaseData there = on_device(data, device);
  const Problem problem = describe(there.in, there.options);
  for (const bool keep : {true, false}) {
    SCOPED_TRACE(keep ? "states kept" : "no states");
    const auto run_once = [&] {
      Results results = make_results(there, c.states, keep ? states_bytes_of(device, row.name, problem) : 0);
      std::vector<Tensor> sums;
      for (TensorView* gradient : {&results.d_in.dq, &results.d_in.dk}) {
        sums.push_back(Tensor::zeros(dq->shape, DType::bf16, device));
        testing::fill_with_nan(sums.back()->data, static_cast<std::size_t>(dq->numel()) * 2, device);
        *gradient = for_all_heads(sums.back(), problem.heads);
      }
      run_planned(device, row.name, [&](Context& context) { forward(context, there.in, results.out, there.options); });
      run_planned(device, row.name, [&](Context& context) {
        backward(context, there.in, results.out, there.d_out, results.d_in, there.options);
      });
      for (TensorView* gradient : {&results.d_in.dq, &results.d_in.dk}) *gradient = gradient->slice(2, 0, 1);
      Results here = on_cpu(results);
      for (Tensor& sum : sums) here.storage.push_back(std::move(sum));
      return here;
    };
    const Results actual = run_once(), again = run_once();
    expect_same_bits(outputs_of(again), outputs_of(actual));
    expect_same_bits(gradients_of(again), gradients_of(actual));
    expect_all_close(outputs_of(actual), outputs_of(expected), c.dtype);
    Results summed = expected;
    summed.d_in.dq = dq;
    summed.d_in.dk = dk;
    expect_all_close(gradients_of(actual), gradients_of(summed), c.dtype);
  }
}

TEST(SharedKeys, SumsOverHeadsAgreeWithTheReference) {
  int rows = 0;
  for (const Device device : test_devices()) {
    if (device.kind != Device::Kind::cuda) continue;
    const Context context(device);
    for (const Implementation& row : implementations()) {
      if (row.device != device.kind || context.architecture().cuda_capability < 80) continue;
      if (std::string(row.name) == "cuda_sm90" && context.architecture().cuda_capability != 90) continue;
      ++rows;
      const Case plain{.batch = 2,
                       .length = 200,
                       .query_heads = 6,
                       .heads = 6,
                       .key_dim = 128,
                       .value_dim = 64,
                       .gate = GateKind::scalar,
                       .dtype = DType::bf16};
      std::vector<Case> cases{plain};
      for (const GateValues values : {GateValues::extreme, GateValues::times_16, GateValues::resets}) {
        cases.push_back(plain);
        cases.back().gate_values = values;
      }
      cases.push_back(plain);
      cases.back().key_dim = 64;
      cases.back().gate_dtype = DType::bf16;
      cases.push_back(plain);
      cases.back().lengths = {70, 0, 1, 64, 129};
      cases.push_back(plain);
      cases.back().strided = true;
      cases.back().length = 63;
      cases.push_back(plain);
      cases.back().states = false;
      cases.back().query_heads = cases.back().heads = 1;
      for (const Case& c : cases) {
        SCOPED_TRACE(std::string(row.name) + ", " + describe_case(c) + ", " + name_of(c.gate_values));
        expect_sums(c, row, device);
      }
    }
  }
  if (rows == 0) GTEST_SKIP() << "no implementation here sums over heads";
}

TEST(SharedKeys, RefusesByName) {
  CaseData data = make_data({.length = 20, .key_dim = 64, .value_dim = 64, .gate = GateKind::scalar});
  data.options.sums_over_heads = true;
  EXPECT_EQ(testing::error_of([&] { describe(data.in, data.options); }),
            "gated_linear_attention: q has stride 64 over its heads; expected 0 with sums_over_heads");
  Context context;
  data.in.q.stride[2] = data.in.k.stride[2] = 0;
  EXPECT_FALSE(sums_over_heads(context, data.in, {}));
}

}  // namespace
}  // namespace flashgla::ops::gated_linear_attention
