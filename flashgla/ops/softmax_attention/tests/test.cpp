#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "flashgla/base/memory.h"
#include "flashgla/ops/softmax_attention/by_cudnn.h"
#include "flashgla/ops/softmax_attention/implementations.h"
#include "flashgla/ops/softmax_attention/library.h"
#include "flashgla/ops/softmax_attention/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"
#ifdef FLASHGLA_CUDA
#include "flashgla/ops/softmax_attention/cuda/cudnn/library.h"
#endif

namespace flashgla::ops::softmax_attention {
namespace {

std::vector<Form> forms() {
  return {
      {Shape({2, 9, 2, 8}), 2},
      {Shape({1, 1, 1, 4}), 1},
      {Shape({1, 130, 4, 20}), 2, 24},
      {Shape({2, 70, 3, 16}), 1, 0, 5},
      {Shape({1, 200, 2, 33}), 2, 17, 80},
      {Shape({1, 140, 2, 16}), 1, 0, 0, {0, 65, 65, 140}},
      {Shape({2, 70, 2, 16}), 1, 0, 0, {}, {3, 130}, 140},              // a cache with room
      {Shape({1, 90, 2, 16}), 2, 0, 12, {20, 21, 90}, {0, 40, 5}, 12},  // a ring
      {Shape({2, 0, 2, 16}), 1},
  };
}

// Of the widths that matrix units have kernels for, whose tiles are of 64 to 192 tokens.
std::vector<Form> wide_forms() {
  return {
      {Shape({2, 150, 4, 40}), 2, 24},
      {Shape({1, 140, 2, 96}), 1, 0, 0, {0, 70, 133, 140}},
      {Shape({1, 90, 2, 72}), 1, 128, 40, {20, 21, 90}, {0, 100, 5}, 40},
      {Shape({2, 200, 2, 64}), 1},
      {Shape({1, 270, 2, 64}), 2},
      {Shape({1, 260, 2, 128}), 2},
      {Shape({2, 131, 6, 128}), 2},
      {Shape({1, 290, 1, 64}), 1, 0, 70},
      {Shape({1, 400, 1, 64}), 1, 0, 0, {0, 130, 131, 131, 387, 400}},
      {Shape({1, 200, 1, 128}), 1, 0, 50, {70, 140, 200}},
      {Shape({2, 140, 1, 64}), 1, 0, 0, {}, {0, 135}, 280},
      {Shape({1, 200, 2, 64}), 1, 0, 150, {20, 21, 200}, {0, 400, 90}, 150},
      {Shape({1, 70, 2, 128}), 1, 0, 0, {}, {210}, 300},
  };
}

TEST(SoftmaxAttention, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  std::vector<Form> all = forms();
  const std::vector<Form> wide = wide_forms();
  all.insert(all.end(), wide.begin(), wide.end());
  for (const Form& form : all) {
    EXPECT_EQ(testing::check_conformance(forward_case(form), coverage), "");
    EXPECT_EQ(testing::check_conformance(backward_case(form), coverage), "");
    if (form.rows == 0) continue;
    EXPECT_EQ(testing::check_conformance(append_case(form, true), coverage), "");
    EXPECT_EQ(testing::check_conformance(append_case(form, false), coverage), "");
  }
  for (Form form : all) {
    form.dropout = 0.3;
    for (const testing::OperatorCase& one : {forward_case(form), backward_case(form)}) {
      testing::Coverage with_dropout(implementations());
      EXPECT_EQ(testing::check_conformance(one, with_dropout), "");
    }
  }
  const std::string missing = coverage.missing();
  if (missing == "cudnn ") {  // which need not be there
    Context context(Device::cuda());
    EXPECT_THAT(describe_library(context), ::testing::HasSubstr("not cuDNN: "));
  } else {
    EXPECT_EQ(missing, "");
  }
}

TEST(SoftmaxAttention, StepsAgreeWithTheReference) {
  testing::Coverage coverage(implementations());
  Form many{Shape({70, 1, 8, 16}), 8, 0, 0, {}, {}, 60};  // more heads than a GPU takes at once
  for (std::int32_t n = 0; n < 70; ++n) many.positions.push_back(n * 7 % 60);
  for (const Form& form : {Form{Shape({3, 1, 4, 20}), 2, 24, 0, {}, {0, 255, 700}, 701},
                           Form{Shape({3, 1, 2, 16}), 1, 0, 300, {}, {2, 299, 1000}, 300},
                           Form{Shape({2, 1, 3, 64}), 3, 0, 0, {}, {40, 699}, 700},
                           Form{Shape({2, 1, 10, 128}), 2, 0, 90, {}, {40, 699}, 130},
                           Form{Shape({1, 1, 1, 64}), 1, 0, 0, {}, {4500}, 4600},
                           // parts of a head that are a cluster's
                           Form{Shape({3, 1, 16, 64}), 16, 0, 0, {}, {0, 255, 700}, 701},
                           Form{Shape({3, 1, 16, 64}), 16, 0, 90, {}, {40, 89, 699}, 90},
                           Form{Shape({4, 1, 40, 128}), 10, 0, 0, {}, {0, 1, 300, 700}, 701},
                           Form{Shape({2, 1, 40, 20}), 40, 24, 0, {}, {100, 699}, 700}, many}) {
    EXPECT_EQ(testing::check_conformance(step_case(form), coverage), "");
  }
}

// Of what is begun early nothing shows in the values.
TEST(SoftmaxAttention, StepsOverSettledCachesHaveTheSameBits) {
  for (const Device device : testing::test_devices()) {
    Context context(device, 2);
    const auto random = [&](const Shape& shape, DType dtype, std::uint64_t seed) {
      return testing::copied_to(testing::random_normal(shape, dtype, seed), device);
    };
    const Tensor q = random({2, 20, 64}, DType::f32, 1), k = random({2, 20, 64}, DType::f32, 2);
    const Tensor v = random({2, 20, 64}, DType::f32, 3);
    const Tensor given = Tensor::zeros({2}, DType::i32);
    given.as<std::int32_t>()[0] = 499;
    given.as<std::int32_t>()[1] = 3;
    const Tensor positions = testing::copied_to(given, device);
    const auto outputs = [&](bool settled) {
      const Tensor k_cache = random({2, 500, 20, 64}, DType::bf16, 4),
                   v_cache = random({2, 500, 20, 64}, DType::bf16, 5);
      const Tensor o = Tensor::empty({2, 20, 64}, DType::f32, device);
      context.queue().synchronize();
      step(context, q, {k, v, settled}, k_cache, v_cache, positions, o, {});
      return std::pair{testing::copied_to(o, Device::cpu()), testing::copied_to(k_cache, Device::cpu())};
    };
    const auto [o, cache] = outputs(false);
    const auto [settled_o, settled_cache] = outputs(true);
    EXPECT_TRUE(testing::same_bits(o, settled_o));
    EXPECT_TRUE(testing::same_bits(cache, settled_cache));
  }
}

TEST(SoftmaxAttention, GradientsAgreeWithFiniteDifferences) {
  Context context;
  const Tensor step = Tensor::zeros({1}, DType::f64), micro_batch = Tensor::zeros({1}, DType::i32);
  for (const auto& [window, dropout] : {std::pair<std::int64_t, double>{0, 0.0}, {3, 0.0}, {0, 0.4}, {3, 0.4}}) {
    const Form form{Shape({1, 7, 4, 3}), 2, 5, window, {3, 3, 7}, {4, 0, 2}, 4};
    std::int32_t bounds[] = {0, 3, 3, 7}, positions[] = {4, 0, 2};
    const auto random = [](const Shape& shape, std::uint64_t seed) {
      return testing::random_normal(shape, DType::f64, seed);
    };
    const Tensor q = random(form.q, 1), k = random(form.shape_of(2, 3), 2), v = random(form.shape_of(2, 5), 3);
    const Tensor past_k = random(form.cache(3), 4), past_v = random(form.cache(5), 5);
    const Tensor d_o = random(form.shape_of(4, 5), 6), o = Tensor::empty(d_o->shape, DType::f64);
    const Tensor lse = Tensor::empty({1, 7, 4}, DType::f64);
    const Inputs inputs{q, k, v, past_k, past_v, {positions, Shape({3})}, {bounds, Shape({4})}};
    const Options options{0.7, window, {dropout, 1, 2, step, micro_batch}};
    const Tensor dq = Tensor::empty(q->shape, DType::f64), dk = Tensor::empty(k->shape, DType::f64),
                 dv = Tensor::empty(v->shape, DType::f64);
    forward(context, inputs, {o, lse}, options);
    backward(context, inputs, {o, lse}, d_o, {dq, dk, dv}, options);
    const auto loss = [&] {
      forward(context, inputs, {o, {}}, options);
      return testing::dot(o, d_o);
    };
    EXPECT_EQ(testing::check_gradient("dq", q, dq, loss), "");
    EXPECT_EQ(testing::check_gradient("dk", k, dk, loss), "");
    EXPECT_EQ(testing::check_gradient("dv", v, dv, loss), "");
  }
}

// A whole sequence at once, in two calls with a cache, and token by token.
TEST(SoftmaxAttention, StepsAndPiecesEqualTheWhole) {
  Context context;
  Tensor positions;
  const auto append_to = [&](const TensorView& x, const TensorView& cache) {
    const Appended one{x, {}, cache};
    append(context, {&one, 1}, positions, {});
  };
  const std::int64_t length = 13;
  for (const std::int64_t window : {0, 4}) {
    const std::int64_t rows = window > 0 ? window : length;
    const Form form{Shape({1, length, 2, 6}), 1, 0, window, {}, {0}, rows};
    const Tensor q = testing::random_normal(form.q, DType::f64, 1),
                 k = testing::random_normal(form.shape_of(1, 6), DType::f64, 2);
    const Tensor v = testing::random_normal(form.shape_of(1, 6), DType::f64, 3), o = Tensor::empty(form.q, DType::f64);
    forward(context, {q, k, v}, {o, {}}, {0.0, window});
    for (const std::int64_t cut : {1, 5, 12}) {
      const Tensor k_cache = Tensor::zeros(form.cache(6), DType::f64),
                   v_cache = Tensor::zeros(form.cache(6), DType::f64);
      positions = Tensor::zeros({1}, DType::i32);
      append_to(k->slice(1, 0, cut), k_cache);
      append_to(v->slice(1, 0, cut), v_cache);
      positions.as<std::int32_t>()[0] = static_cast<std::int32_t>(cut);
      const Tensor rest = Tensor::empty({1, length - cut, 2, 6}, DType::f64);
      forward(context,
              {q->slice(1, cut, length),
               k->slice(1, cut, length),
               v->slice(1, cut, length),
               k_cache,
               v_cache,
               positions,
               {}},
              {rest, {}}, {0.0, window});
      EXPECT_EQ(testing::check_close("o", rest, o->slice(1, cut, length), 1e-13), "") << cut;
    }
    const Tensor k_cache = Tensor::zeros(form.cache(6), DType::f64), v_cache = Tensor::zeros(form.cache(6), DType::f64);
    const Tensor token = Tensor::empty({1, 2, 6}, DType::f64);
    positions = Tensor::zeros({1}, DType::i32);
    for (std::int64_t t = 0; t < length; ++t) {
      positions.as<std::int32_t>()[0] = static_cast<std::int32_t>(t);
      append_to(k->slice(1, t, t + 1), k_cache);
      append_to(v->slice(1, t, t + 1), v_cache);
      step(context, q->select(1, t), {}, k_cache, v_cache, positions, token, {0.0, window});
      EXPECT_EQ(testing::check_close("o", token, o->select(1, t), 1e-13), "") << t;
    }
  }
}

Problem whole_problem(Direction direction, std::int64_t channels, const Shape& q) {
  Problem problem{DType::bf16, DType::bf16, channels, channels};
  problem.regular = problem.whole = problem.training = true;
  problem.direction = direction;
  problem.batch = q[0];
  problem.length = q[1];
  problem.heads = problem.groups = q[2];
  return problem;
}

TEST(SoftmaxAttention, CudnnGetsWhatItIsFasterAt) {
  const Architecture hopper{Device::Kind::cuda, 90}, ampere{Device::Kind::cuda, 80};
  const Shape q({4, 4096, 16});
  for (const Direction direction : {Direction::forward, Direction::backward}) {
    const Problem wide = whole_problem(direction, 128, q);
    EXPECT_TRUE(cudnn_is_faster(wide, hopper));
    EXPECT_FALSE(cudnn_is_faster(wide, ampere));
    EXPECT_TRUE(cudnn_takes(whole_problem(direction, 64, q), hopper));
    EXPECT_FALSE(cudnn_is_faster(whole_problem(direction, 64, q), hopper));
    EXPECT_FALSE(cudnn_is_faster(whole_problem(direction, 128, Shape({8, 2048, 16})), hopper));
    EXPECT_FALSE(cudnn_is_faster(whole_problem(direction, 128, Shape({1, 4096, 16})), hopper));
    for (bool Problem::*needed : {&Problem::whole, &Problem::regular}) {
      Problem other = wide;
      other.*needed = false;
      EXPECT_FALSE(cudnn_takes(other, hopper));
    }
    Problem other = wide;
    other.training = false;
    EXPECT_FALSE(cudnn_is_faster(other, hopper));
    other = wide;
    other.dropout = true;
    EXPECT_FALSE(cudnn_takes(other, hopper));
    other = wide;
    other.dtype = other.past = DType::f32;
    EXPECT_FALSE(cudnn_takes(other, hopper));
    EXPECT_FALSE(cudnn_takes(whole_problem(direction, 128, Shape({0, 4096, 16})), hopper));
    EXPECT_FALSE(cudnn_takes(whole_problem(direction, 128, Shape({2, 0, 16})), hopper));
  }
  // Two rows of 4,096 tokens take a GiB, a head of 16,384 half of one: parts of fewer rows or heads are slower.
  for (const std::int64_t batch : {4, 6, 8}) {
    EXPECT_TRUE(cudnn_is_faster(whole_problem(Direction::backward, 128, Shape({batch, 4096, 16})), hopper)) << batch;
  }
  for (const std::int64_t batch : {5, 7}) {
    EXPECT_FALSE(cudnn_is_faster(whole_problem(Direction::backward, 128, Shape({batch, 4096, 16})), hopper)) << batch;
  }
  EXPECT_FALSE(cudnn_is_faster(whole_problem(Direction::backward, 128, Shape({1, 16384, 17})), hopper));
  EXPECT_TRUE(cudnn_is_faster(whole_problem(Direction::backward, 128, Shape({1, 16384, 16})), hopper));
  EXPECT_FALSE(cudnn_takes(whole_problem(Direction::backward, 128, Shape({1, 32768, 16})), hopper));
  EXPECT_TRUE(cudnn_takes(whole_problem(Direction::forward, 128, Shape({1, 32768, 16})), hopper));
}

TEST(SoftmaxAttention, PartsOfCudnnsBackwardAreWholeHeadsWithinTheirBytes) {
  for (const std::int64_t batch : {1, 3, 8}) {
    for (const std::int64_t length : {64, 1000, 2048, 8192, 16384, 40000}) {
      for (const std::int64_t groups : {1, 4, 16}) {
        const std::int64_t heads = 16;
        const CudnnPart part = cudnn_part(batch, length, heads, groups);
        const std::int64_t head = 2 * length * length;
        if (part.rows == 0) {
          EXPECT_GT(head * heads / groups, kMostCudnnWorkspace * 9 / 10);
          continue;
        }
        EXPECT_EQ(batch % part.rows, 0);
        EXPECT_EQ(groups % part.groups, 0);
        EXPECT_TRUE(part.rows == 1 || part.groups == groups);
        EXPECT_LE(head * part.rows * part.groups * (heads / groups), part.bytes);
        EXPECT_LE(part.bytes, kMostCudnnWorkspace);
      }
    }
  }
  EXPECT_EQ(cudnn_part(8, 2048, 16, 16).rows, 8);
}

TEST(SoftmaxAttention, AChangeOfLibraryIsSaid) {
  EXPECT_EQ(notice_of_change("", ""), "");
  EXPECT_EQ(notice_of_change("cuDNN 9.19.0", "cuDNN 9.19.0"), "");
  EXPECT_EQ(notice_of_change("cuDNN 9.19.0", ""),
            "softmax attention was computed by cuDNN 9.19.0, and here it is by FlashGLA's kernels: results may differ "
            "in their last bits");
  EXPECT_EQ(notice_of_change("", "cuDNN 9.20.1"),
            "softmax attention was computed by FlashGLA's kernels, and here it is by cuDNN 9.20.1: results may differ "
            "in their last bits; FLASHGLA_CUDNN=off computes it as before");
  Context context;
  EXPECT_EQ(library_of(context), "");
  EXPECT_EQ(describe_library(context), "FlashGLA's kernels");
}

#ifdef FLASHGLA_CUDA
TEST(SoftmaxAttention, CudnnThatIsNotThereOrSwitchedOffIsNamedSo) {
  for (const char* said : {"off", "/nowhere", "/", "libm.so.6"}) {
    const cuda::cudnn::Library library = cuda::cudnn::open_library(said);
    EXPECT_EQ(library.name, "") << said;
    EXPECT_NE(library.missing, "") << said;
  }
}

// Of rows of a batch, of heads of a row.
TEST(SoftmaxAttention, CudnnInPartsAgreesWithTheKernels) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
  const Device device = Device::cuda();
  for (const Form& form : {Form{Shape({4, 4096, 16, 128}), 16}, Form{Shape({1, 8192, 16, 128}), 4}}) {
    ASSERT_LT(cudnn_part(form.q[0], form.q[1], form.q[2], form.groups).groups *
                  cudnn_part(form.q[0], form.q[1], form.q[2], form.groups).rows,
              form.q[0] * form.groups);
    const Shape keys = form.shape_of(form.groups, 128);
    const auto random = [&](const Shape& shape, std::uint64_t seed) {
      return testing::copied_to(testing::random_normal(shape, DType::bf16, seed), device);
    };
    const Tensor q = random(form.q, 1), k = random(keys, 2), v = random(keys, 3), d_o = random(form.q, 4);
    std::vector<std::vector<Tensor>> results;
    for (const char* name : {"cudnn", "cuda_hopper"}) {
      Context context(device);
      context.force_implementation(name);
      const Tensor o = Tensor::empty(form.q, DType::bf16, device), dq = Tensor::empty(form.q, DType::bf16, device);
      const Tensor dk = Tensor::empty(keys, DType::bf16, device), dv = Tensor::empty(keys, DType::bf16, device);
      const Tensor lse = Tensor::empty({form.q[0], form.q[1], form.q[2]}, DType::f32, device);
      const std::string error = testing::error_of([&] {
        forward(context, {q, k, v}, {o, lse}, {});
        backward(context, {q, k, v}, {o, lse}, d_o, {dq, dk, dv}, {});
        context.queue().synchronize();
      });
      if (error != "no error") GTEST_SKIP() << error;
      results.emplace_back();
      for (const Tensor& each : {o, lse, dq, dk, dv}) results.back().push_back(testing::copied_to(each, Device::cpu()));
    }
    const char* const names[] = {"o", "lse", "dq", "dk", "dv"};
    for (std::size_t i = 0; i < std::size(names); ++i) {
      EXPECT_EQ(testing::check_close(names[i], results[0][i], results[1][i], i == 1 ? 1e-5 : 1e-2), "");
    }
  }
}
#endif

TEST(SoftmaxAttention, RefusesBadArgumentsByName) {
  Context context;
  const Tensor q = Tensor::zeros({1, 3, 4, 8}, DType::f32), k = Tensor::zeros({1, 3, 3, 8}, DType::f32);
  const Tensor good = Tensor::zeros({1, 3, 2, 8}, DType::f32), o = Tensor::zeros({1, 3, 4, 8}, DType::f32);
  const auto error = [&](const Inputs& inputs) {
    return testing::error_of([&] { forward(context, inputs, {o, {}}, {}); });
  };
  EXPECT_EQ(error({q, k, k}), "softmax_attention: k has 3 heads; expected a divisor of q's 4");
  EXPECT_EQ(error({q, good, k}), "softmax_attention: v has shape [1,3,3,8]; expected [1,3,2,8] (as k)");
  EXPECT_EQ(error({q, good, good, good, good}), "softmax_attention: positions is absent; expected a tensor");
  std::int32_t past_the_end[] = {0, 2, 4};
  EXPECT_EQ(error({q, good, good, {}, {}, {}, {past_the_end, Shape({3})}}),
            "softmax_attention: cu_seqlens holds 4 at position 2; expected 3 (q's length)");
  EXPECT_EQ(testing::error_of([&] {
              forward(context, {q, good, good}, {o, {}}, {0.0, -1});
            }),
            "softmax_attention: window is -1; expected 0 or more");
}

}  // namespace
}  // namespace flashgla::ops::softmax_attention
