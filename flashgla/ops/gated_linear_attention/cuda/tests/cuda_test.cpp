// What only the CUDA rows are asked: every kernel path (cuda_paths.h), memory beyond
// 32-bit offsets, a million tokens. The shared cases and laws of test.cpp run on CUDA too.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "flashgla/base/memory.h"
#include "flashgla/ops/gated_linear_attention/cuda/tests/cuda_paths.h"
#include "flashgla/ops/gated_linear_attention/cuda/tests/path_plans.h"
#include "flashgla/ops/gated_linear_attention/tests/spot_check.h"
#include "flashgla/ops/gated_linear_attention/tests/test_support.h"
#include "testing/compare.h"
#include "testing/random.h"
#ifdef FLASHGLA_CUDA
#include "flashgla/base/cuda/check.h"
#include "flashgla/base/cuda/device.h"
#endif

namespace flashgla::ops::gated_linear_attention {
namespace {

TEST(Cuda, DevicePresent) {
  if (cuda_device_count() == 0)
    GTEST_SKIP() << "no CUDA device (or a build without CUDA): the CUDA rows are not tested here";
}

#ifdef FLASHGLA_CUDA

const Device kCuda = Device::cuda(0);

class CudaPaths : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

// The kernels that a case takes are those that it is for, on the device that they were written down for. On others it
// takes what there is.
void expect_plan(const Case& c, const CaseData& host, const Implementation& row, bool keep) {
  static const std::map<std::string, PathPlans> plans = path_plans();
  const Architecture architecture = Context(kCuda).architecture();
  if (architecture.cuda_capability != 90 || architecture.multiprocessors != 132) return;
  const CaseData data = on_device(host, kCuda);
  const Problem problem = describe(data.in, data.options);
  const Results results = make_results(data, c.states, keep ? row.states_bytes(problem) : 0);
  EXPECT_EQ(row.plan(problem, data.in, results.out, architecture),
            plans.at(c.name).of(row.name == std::string("cuda_sm90"), keep));
}

// Right, the same bits in a second run, and with states kept and recomputed.
TEST_P(CudaPaths, RightAndRepeatable) {
  const Case& c = GetParam();
  const CaseData data = make_data(c);
  const Problem problem = describe(data.in, data.options);
  ExpectedResults expected(data, c.states);
  for_each_implementation(problem, [&](Device device, const Implementation& row) {
    if (device.kind != Device::Kind::cuda) return;
    for (const bool keep : {true, false}) {
      SCOPED_TRACE(keep ? "states kept" : "no states");
      expect_plan(c, data, row, keep);
      const Results actual = run(device, row.name, data, c.states, keep, true);
      expected.expect_close(actual);
      const Results again = run(device, row.name, data, c.states, keep, true);
      expect_same_bits(outputs_of(again), outputs_of(actual));
      expect_same_bits(gradients_of(again), gradients_of(actual));
    }
  });
}

// Each kernel once, without the reference: what compute-sanitizer, which slows them down a hundredfold, is given.
TEST_P(CudaPaths, EveryElementIsFinite) {
  const Case& c = GetParam();
  const CaseData data = make_data(c);
  for_each_implementation(describe(data.in, data.options), [&](Device device, const Implementation& row) {
    if (device.kind != Device::Kind::cuda) return;
    const auto expect_finite = [](const std::vector<NamedView>& views) {
      for (const NamedView& view : views) EXPECT_TRUE(testing::difference(view.view, view.view).finite) << view.name;
    };
    const Results actual = run(device, row.name, data, c.states, true, true);
    expect_finite(outputs_of(actual));
    expect_finite(gradients_of(actual));
    expect_finite(outputs_of(run(device, row.name, data, c.states, false, false)));  // wide heads go in one pass
  });
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaPaths, ::testing::ValuesIn(path_cases()),
                         [](const auto& parameter) { return parameter.param.name; });

// A debug build looks for the tag of the plan behind states: these are of no forward.
TEST(CudaDeathTest, StatesOfNoForwardStopTheDevice) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  if (cuda::states_tag_bytes() == 0) GTEST_SKIP() << "states have no tag in this build";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto go = [] {
    const CaseData data = on_device(make_data({.dtype = DType::bf16, .gate_dtype = DType::bf16}), kCuda);
    Context context(kCuda);
    const Results results = make_results(data, false, states_bytes(context, describe(data.in, data.options)));
    try {
      backward(context, data.in, results.out, data.d_out, results.d_in, data.options);
      context.queue().synchronize();
    } catch (const Error& error) {
      std::fputs(error.what(), stderr);
      std::exit(1);
    }
    std::exit(0);
  };
  EXPECT_EXIT(go(), ::testing::ExitedWithCode(1), "");
}

// Kernels take the scale's logarithm into the gates' exponents, and its sign apart.
TEST(Cuda, NegativeScale) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  const auto check = [](GateKind kind, GateValues values, std::int64_t batch, std::int64_t key_dim) {
    SCOPED_TRACE(std::string(name_of(kind)) + (values == GateValues::trained ? " trained, " : " extreme, ") +
                 std::to_string(key_dim) + " key channels");
    CaseData data = make_data({.batch = batch,
                               .length = 130,
                               .query_heads = 4,
                               .heads = 4,
                               .key_dim = key_dim,
                               .value_dim = 64,
                               .gate = kind,
                               .gate_values = values,
                               .dtype = DType::bf16,
                               .gate_dtype = DType::bf16});
    data.options.scale = -0.3;
    expect_reference_results(data, true);
  };
  for (const GateKind kind : {GateKind::none, GateKind::constant, GateKind::scalar, GateKind::key}) {
    for (const GateValues values : {GateValues::trained, GateValues::extreme}) {
      if (kind == GateKind::none && values == GateValues::extreme) continue;
      check(kind, values, 34, 64);
      // 1.2% off in dg alone with extreme constant gates: backward/README.md, "What can go wrong".
      if (kind != GateKind::constant) check(kind, values, 2, 128);
    }
  }
}

// One row of values, or of the output's gradient, for all tokens, as an expanded tensor or the gradient of a sum has
// it: TMA cannot take such rows, which are copied to ones that it can.
TEST(Cuda, OneRowForAllTokens) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  for (const GateKind kind : {GateKind::none, GateKind::constant, GateKind::key, GateKind::key_value}) {
    for (const std::int64_t key_dim : {64, 128}) {
      for (const bool of_values : {true, false}) {
        SCOPED_TRACE(std::string(name_of(kind)) + " gate, " + std::to_string(key_dim) + " key channels, one row of " +
                     (of_values ? "v" : "d_o"));
        CaseData data = make_data({.batch = 2,
                                   .length = 203,
                                   .query_heads = 4,
                                   .heads = 2,
                                   .key_dim = key_dim,
                                   .value_dim = 128,
                                   .gate = kind,
                                   .dtype = DType::bf16,
                                   .gate_dtype = DType::bf16});
        (of_values ? data.in.v : data.d_out.d_o).stride[1] = 0;
        expect_reference_results(data, true);
      }
    }
  }
}

// Without gates wide heads' q and k are read as they lie; with a scale that could not be left to the ends they are
// prepared as with gates.
TEST(Cuda, RowsWithoutGates) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  const std::int64_t B = 2, T = 203, H = 4, G = 2, K = 128;
  const auto check = [&](const std::string& what, const auto& change) {
    SCOPED_TRACE(what);
    CaseData data = make_data({.batch = B,
                               .length = T,
                               .query_heads = H,
                               .heads = G,
                               .key_dim = K,
                               .value_dim = 192,
                               .gate = GateKind::none,
                               .dtype = DType::bf16});
    change(data);
    expect_reference_results(data, true);
  };
  check("one row of q for all tokens", [](CaseData& data) { data.in.q.stride[1] = 0; });
  check("one row of k for all tokens", [](CaseData& data) { data.in.k.stride[1] = 0; });
  check("one head of k for all", [](CaseData& data) { data.in.k.stride[2] = 0; });
  check("rows of q and k beside each other, an element off 16 bytes", [&](CaseData& data) {
    data.storage.push_back(testing::random_normal(Shape({B, T, (H + G) * K + 3}), DType::bf16, 77));
    const TensorView rows = data.storage.back();
    data.in.q = rows.slice(2, 1, 1 + H * K).split_last(H);
    data.in.k = rows.slice(2, 1 + H * K, 1 + (H + G) * K).split_last(G);
  });
  for (const double scale : {-0.3, 1e-8, 1e-12, 1e12}) {
    check("scale " + ::testing::PrintToString(scale), [&](CaseData& data) { data.options.scale = scale; });
  }
}

// The same of narrow heads, whose backward in one kernel goes on from states kept at every fourth chunk.
TEST(Cuda, NarrowRowsThatAreOne) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  for (const GateKind gate : {GateKind::none, GateKind::scalar}) {
    for (const bool queries : {true, false}) {
      SCOPED_TRACE(name_of(gate));
      CaseData data = make_data({.batch = 34,
                                 .length = 390,
                                 .query_heads = 4,
                                 .heads = 4,
                                 .key_dim = 64,
                                 .value_dim = 64,
                                 .gate = gate,
                                 .dtype = DType::bf16,
                                 .gate_dtype = DType::bf16});
      (queries ? data.in.q : data.in.k).stride[1] = 0;
      expect_reference_results(data, true);
    }
  }
}

// Forms are chosen by the longest sequence, known or not; that of 1 token is not true.
TEST(Cuda, RightWhateverTheLongestSequence) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  for (const std::int64_t key_dim : {64, 128, 256}) {
    for (const GateKind gate : {GateKind::none, GateKind::key}) {
      const CaseData data = make_data({.query_heads = 4,
                                       .heads = 4,
                                       .key_dim = key_dim,
                                       .value_dim = key_dim,
                                       .gate = gate,
                                       .dtype = DType::bf16,
                                       .gate_dtype = DType::bf16,
                                       .lengths = {30, 0, 2000, 64, 5, 100, 1}});
      const Results expected = reference_results(data, true, true);
      for (const std::int64_t longest : {0, 1, 2000, 2200}) {
        SCOPED_TRACE(std::string(name_of(gate)) + " gate, " + std::to_string(key_dim) + " channels, " +
                     std::to_string(longest));
        CaseData hinted = data;
        hinted.options.max_seqlen = longest;
        for_each_implementation(describe(data.in, data.options), [&](Device device, const Implementation& row) {
          if (device.kind != Device::Kind::cuda) return;
          const Results actual = run(device, row.name, hinted, true, true, true);
          expect_all_close(outputs_of(actual), outputs_of(expected), DType::bf16);
          expect_all_close(gradients_of(actual), gradients_of(expected), DType::bf16);
        });
      }
    }
  }
}

// More sequences and heads than a grid has rows, one of them cut.
TEST(Cuda, OneLongSequenceAmongVeryMany) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  Case c{.query_heads = 4,
         .heads = 4,
         .key_dim = 16,
         .value_dim = 16,
         .dtype = DType::bf16,
         .gate_dtype = DType::bf16,
         .lengths = std::vector<std::int64_t>(17000, 1)};
  c.lengths.front() = c.lengths.back() = 200;
  c.lengths[5000] = 300000;
  c.tells_longest = true;
  const CaseData data = make_data(c);
  const SpotCheck check(data, true);
  const CaseData moved = on_device(data, kCuda);
  for_each_implementation(describe(data.in, data.options), [&](Device device, const Implementation& row) {
    if (device.kind != Device::Kind::cuda) return;
    const Results results = make_results(moved, true, row.states_bytes(describe(moved.in, moved.options)));
    run_planned(device, row.name, [&](Context& x) { forward(x, moved.in, results.out, moved.options); });
    run_planned(device, row.name,
                [&](Context& x) { backward(x, moved.in, results.out, moved.d_out, results.d_in, moved.options); });
    double error = 0.0;
    EXPECT_EQ(check.compare(results, true, &error), "");
  });
}

// Tensors that are not where 16 bytes begin, in widths that are multiples of them: each alone, and all.
TEST(Cuda, TensorsAnElementOff) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const GateKind gate : {GateKind::scalar, GateKind::key, GateKind::key_value}) {
      CaseData data = make_data({.batch = 2,
                                 .length = 203,
                                 .query_heads = 4,
                                 .heads = 2,
                                 .key_dim = 72,
                                 .value_dim = 64,
                                 .gate = gate,
                                 .dtype = dtype});
      const std::pair<const char*, TensorView*> tensors[] = {{"q", &data.in.q},   {"k", &data.in.k},
                                                             {"v", &data.in.v},   {"g", &data.in.g},
                                                             {"gv", &data.in.gv}, {"d_o", &data.d_out.d_o}};
      const auto move_off = [&](TensorView& view) {
        if (!view) return;
        data.storage.push_back(Tensor::empty(Shape({view.numel() + 1}), view.dtype));
        const TensorView to = data.storage.back().view().slice(0, 1, view.numel() + 1).reshape(view.shape);
        copy(view, to);
        view = to;
      };
      for (const auto& [name, view] : tensors) {
        if (!*view) continue;
        SCOPED_TRACE(std::string(name_of(dtype)) + ", " + name_of(gate) + " gate, " + name);
        const TensorView before = *view;
        move_off(*view);
        expect_reference_results(data, true);
        *view = before;
      }
      SCOPED_TRACE(std::string(name_of(dtype)) + ", " + name_of(gate) + " gate, all");
      for (const auto& [name, view] : tensors) move_off(*view);
      expect_reference_results(data, true);
    }
  }
}

// Where the caller allows it, f32 products are rounded to tf32, which has f16's 11 bits: its tolerance, and other bits
// than without.
TEST(Cuda, Float32MathIsHonoured) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  for (const GateKind gate : {GateKind::key, GateKind::key_value}) {
    for (const GateValues values : {GateValues::trained, GateValues::extreme}) {
      const Case c{.length = 203, .key_dim = 100, .value_dim = 72, .gate = gate, .gate_values = values};
      const CaseData exact = make_data(c);
      CaseData rounded = make_data(c);
      rounded.options.float32_math = Float32Math::tf32;
      const Results expected = reference_results(exact, true, true);
      for_each_implementation(describe(exact.in, exact.options), [&](Device device, const Implementation& row) {
        if (device.kind != Device::Kind::cuda) return;
        const Results f32 = run(device, row.name, exact, true, false, true);
        const Results tf32 = run(device, row.name, rounded, true, false, true);
        expect_all_close(outputs_of(f32), outputs_of(expected), DType::f32);
        expect_all_close(outputs_of(tf32), outputs_of(expected), DType::f16);
        expect_all_close(gradients_of(tf32), gradients_of(expected), DType::f16);
        EXPECT_FALSE(testing::same_bits(tf32.out.o, f32.out.o));
      });
    }
  }
}

// Groups of one block run ahead of one another as far as barriers let them, which a wrong count shows only now and
// then: in the one pass of wide heads, without gates over keys, in one call of some thousands.
TEST(Cuda, ThousandsOfCallsAgree) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  using enum GateKind;
  for (const auto& [kind, gate_dtype] : {std::pair(none, DType::bf16), std::pair(constant, DType::bf16),
                                         std::pair(key, DType::bf16), std::pair(key, DType::f32)}) {
    SCOPED_TRACE(std::string(name_of(kind)) + " " + name_of(gate_dtype));
    const CaseData host = make_data({.batch = 16,
                                     .length = 2048,
                                     .query_heads = 4,
                                     .heads = 4,
                                     .key_dim = 128,
                                     .value_dim = 256,
                                     .gate = kind,
                                     .dtype = DType::bf16,
                                     .gate_dtype = gate_dtype,
                                     .states = false});
    const CaseData data = on_device(host, kCuda);
    for_each_implementation(describe(data.in, data.options), [&](Device device, const Implementation& row) {
      if (device.kind != Device::Kind::cuda || row.name != std::string("cuda_sm90")) return;
      const Results results = make_results(data, false, 0);
      Context context(kCuda);
      context.force_implementation(row.name);
      const auto call = [&](int times) {
        for (int i = 0; i < times; ++i) forward(context, data.in, results.out, data.options);
        return on_cpu(results);
      };
      const Results once = call(1), often = call(10000);
      expect_same_bits(outputs_of(often), outputs_of(once));
    });
  }
}

// Memory that a test of large offsets needs; without data where the device has not that much.
Tensor large(std::int64_t elements, DType dtype) {
  try {
    return Tensor::empty(Shape({elements}), dtype, kCuda);
  } catch (const Error&) {
    return {};
  }
}

// Two rows of a batch, 2^31 elements apart: offsets do not fit 32 bits on any of the paths.
TEST(Cuda, OffsetsBeyond32Bits) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  constexpr std::int64_t kApart = (std::int64_t{1} << 31) + 64;
  constexpr std::int64_t kRoom = std::int64_t{1} << 27;
  const Tensor memory = large(kApart + kRoom, DType::bf16);
  if (!memory) GTEST_SKIP() << "less than 5 GB of device memory";
  const Case narrow{.batch = 2,
                    .length = 70,
                    .query_heads = 68,
                    .heads = 68,
                    .key_dim = 64,
                    .value_dim = 64,
                    .dtype = DType::bf16,
                    .gate_dtype = DType::bf16};
  Case wide = narrow;
  wide.query_heads = wide.heads = 2;
  wide.key_dim = 128;
  wide.value_dim = 200;
  Case values = wide;
  values.gate = GateKind::key_value;
  Case tokens = values;
  tokens.key_dim = 6;
  for (const Case& c : {narrow, wide, values, tokens}) {
    SCOPED_TRACE(describe_case(c));
    const CaseData near = make_data(c);
    const Results expected = reference_results(near, true, true);
    std::int64_t used = 0;
    auto far = [&](const TensorView& view) {
      TensorView result = view;
      result.device = kCuda;
      result.data = memory.as<BFloat16>() + used;
      result.stride[0] = kApart;
      used += view.numel() / view.size(0) + 64;
      EXPECT_LT(used, kRoom);
      return result;
    };
    auto move = [&](const TensorView& from, const TensorView& to) {
      for (std::int64_t b = 0; b < from.size(0); ++b) {
        const TensorView x = from.select(0, b), y = to.select(0, b);
        copy_memory(y.data, y.device, x.data, x.device, x.bytes());
      }
    };
    CaseData data = on_device(near, kCuda);
    const std::pair<const TensorView*, TensorView*> inputs[] = {
        {&near.in.q, &data.in.q}, {&near.in.k, &data.in.k},   {&near.in.v, &data.in.v},
        {&near.in.g, &data.in.g}, {&near.in.gv, &data.in.gv}, {&near.d_out.d_o, &data.d_out.d_o}};
    for (const auto& [from, to] : inputs) {
      if (!*from) continue;
      *to = far(*from);
      move(*from, *to);
    }
    for_each_implementation(describe(data.in, data.options), [&](Device device, const Implementation& row) {
      if (device.kind != Device::Kind::cuda) return;
      const std::size_t kept = row.states_bytes(describe(data.in, data.options));
      const std::int64_t inputs_end = used;
      const Results near_results = make_results(near, true, 0);
      const Results device_results = make_results(on_device(near, kCuda), true, kept);
      Results spread;
      spread.out = device_results.out;
      spread.d_in = device_results.d_in;
      const std::pair<const TensorView*, TensorView*> outputs[] = {
          {&near_results.out.o, &spread.out.o},     {&near_results.d_in.dq, &spread.d_in.dq},
          {&near_results.d_in.dk, &spread.d_in.dk}, {&near_results.d_in.dv, &spread.d_in.dv},
          {&near_results.d_in.dg, &spread.d_in.dg}, {&near_results.d_in.dgv, &spread.d_in.dgv}};
      for (const auto& [at, to] : outputs) {
        if (!*at) continue;
        *to = far(*at);
        move(*at, *to);  // NaN
      }
      run_planned(device, row.name, [&](Context& x) { forward(x, data.in, spread.out, data.options); });
      run_planned(device, row.name,
                  [&](Context& x) { backward(x, data.in, spread.out, data.d_out, spread.d_in, data.options); });
      for (const auto& [at, to] : outputs) {
        if (*at) move(*to, *at);
      }
      Results actual = on_cpu(device_results);
      actual.out.o = near_results.out.o;
      actual.d_in = near_results.d_in;
      actual.d_in.dh0 = mirrored(spread.d_in.dh0, Device::cpu(), actual.storage);
      expect_all_close(outputs_of(actual), outputs_of(expected), c.dtype);
      expect_all_close(gradients_of(actual), gradients_of(expected), c.dtype);
      used = inputs_end;
    });
  }
}

// More than 2^31 elements in each of q, k, v, g, o: one row of a batch, many times over. The first and the last row
// are compared with the reference, and the middle one must hold the first one's bits.
TEST(Cuda, MoreThan2To31Elements) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  const Case c{.batch = 1,
               .length = 2100,
               .query_heads = 16,
               .heads = 16,
               .key_dim = 64,
               .value_dim = 64,
               .dtype = DType::bf16,
               .gate_dtype = DType::bf16,
               .states = false};
  const CaseData one = make_data(c);
  const SpotCheck check(one, true);
  const std::int64_t rows = (std::int64_t{1} << 31) / one.in.q.numel() + 2;
  CaseData many;
  many.options = one.options;
  std::vector<Tensor> storage;
  auto repeated = [&](const TensorView& view) {
    const Tensor tensor = large(rows * view.numel(), view.dtype);
    if (!tensor) throw Error("not enough memory");
    storage.push_back(tensor);
    for (std::int64_t done = 0; done < rows; done = done == 0 ? 1 : std::min(2 * done, rows)) {
      const std::int64_t count = done == 0 ? 1 : std::min(done, rows - done);
      const std::size_t bytes = view.bytes();
      auto* memory = static_cast<unsigned char*>(tensor->data);
      copy_memory(memory + static_cast<std::size_t>(done) * bytes, kCuda, done == 0 ? view.data : memory,
                  done == 0 ? Device::cpu() : kCuda, static_cast<std::size_t>(count) * bytes);
    }
    Shape shape = view.shape;
    shape[0] = rows;
    return TensorView(tensor->data, view.dtype, shape, kCuda);
  };
  auto empty_like = [&](const TensorView& view) {
    storage.push_back(Tensor::empty(view.shape, view.dtype, kCuda));
    return storage.back().view();
  };
  try {
    many.in = {.q = repeated(one.in.q), .k = repeated(one.in.k), .v = repeated(one.in.v), .g = repeated(one.in.g)};
    many.d_out.d_o = repeated(one.d_out.d_o);
    const Problem problem = describe(many.in, many.options);
    ASSERT_GT(many.in.q.numel(), std::int64_t{1} << 31);
    Results results;
    results.out.o = empty_like(many.in.v);
    results.d_in = {.dq = empty_like(many.in.q),
                    .dk = empty_like(many.in.k),
                    .dv = empty_like(many.in.v),
                    .dg = empty_like(many.in.g)};
    for_each_implementation(problem, [&](Device device, const Implementation& row) {
      if (device.kind != Device::Kind::cuda) return;
      const Tensor states =
          Tensor::empty(Shape({static_cast<std::int64_t>(row.states_bytes(problem))}), DType::u8, device);
      for (const bool keep : {true, false}) {
        SCOPED_TRACE(keep ? "states kept" : "no states");
        results.out.states = keep ? states.view() : TensorView();
        Context context(device);
        context.force_implementation(row.name);
        std::vector<NamedView> all = outputs_of(results);
        for (const NamedView& view : gradients_of(results)) all.push_back(view);
        for (const NamedView& view : all) {
          for (const std::int64_t b : {std::int64_t{0}, rows / 2, rows - 1}) {
            const TensorView row_of_batch = view.view.slice(0, b, b + 1);
            fill_with_nan(row_of_batch.data, row_of_batch.bytes(), device);
          }
        }
        forward(context, many.in, results.out, many.options);
        backward(context, many.in, results.out, many.d_out, results.d_in, many.options);
        auto row_results = [&](std::int64_t b) {
          Results part;
          part.out.o = results.out.o.slice(0, b, b + 1);
          part.d_in = results.d_in;
          for (TensorView* view : {&part.d_in.dq, &part.d_in.dk, &part.d_in.dv, &part.d_in.dg})
            *view = view->slice(0, b, b + 1);
          return part;
        };
        double error = 0.0;
        EXPECT_EQ(check.compare(row_results(0), true, &error), "");
        EXPECT_EQ(check.compare(row_results(rows - 1), true, &error), "");
        const Results first = on_cpu(row_results(0)), middle = on_cpu(row_results(rows / 2));
        expect_same_bits(outputs_of(middle), outputs_of(first));
        expect_same_bits(gradients_of(middle), gradients_of(first));
      }
    });
  } catch (const Error& error) {
    if (std::string(error.what()).find("memory") == std::string::npos) throw;
    GTEST_SKIP() << "not enough device memory: " << error.what();
  }
}

TEST(Cuda, AMillionTokens) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  for (const std::int64_t V : {64, 256}) {
    const Case c{.batch = 1,
                 .length = (1 << 20) + 7,
                 .query_heads = 1,
                 .heads = 1,
                 .key_dim = V == 64 ? 64 : 128,
                 .value_dim = V,
                 .dtype = DType::bf16,
                 .gate_dtype = DType::bf16,
                 .states = false};
    SCOPED_TRACE(describe_case(c));
    const CaseData host = make_data(c);
    const SpotCheck check(host, true);
    const CaseData data = on_device(host, kCuda);
    for_each_implementation(describe(data.in, data.options), [&](Device device, const Implementation& row) {
      if (device.kind != Device::Kind::cuda) return;
      for (const bool keep : {true, false}) {
        SCOPED_TRACE(keep ? "states kept" : "no states");
        const Problem problem = describe(data.in, data.options);
        const Results results = make_results(data, false, keep ? row.states_bytes(problem) : 0);
        run_planned(device, row.name, [&](Context& x) { forward(x, data.in, results.out, data.options); });
        run_planned(device, row.name,
                    [&](Context& x) { backward(x, data.in, results.out, data.d_out, results.d_in, data.options); });
        double error = 0.0;
        EXPECT_EQ(check.compare(results, true, &error), "");
      }
    });
  }
}

#endif

}  // namespace
}  // namespace flashgla::ops::gated_linear_attention
