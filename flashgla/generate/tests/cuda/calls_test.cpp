// What the loop of decoding may not ask of CUDA. It waits for each draw's tokens by an event.
#include <gtest/gtest.h>

#include "flashgla/base/memory.h"
#include "flashgla/generate/decoding.h"
#include "flashgla/model/tests/cases.h"
#include "testing/cuda/counted_calls.h"

namespace flashgla::generate {
namespace {

// Calls of 30 tokens, from the eleventh on.
int calls_of(model::LanguageModel& model, std::int64_t sequences) {
  constexpr int kTokens = 40;
  Context context(Device::cuda());
  Session session(model, sequences);
  session.state.reserve(kTokens);
  Decoding decoding(context, model, session, {.temperature = 0.8, .top_k = 40, .top_p = 0.9});
  int before = 0;
  for (int t = 0; t < kTokens; ++t) {
    if (t == 10) before = testing::cuda_calls;
    decoding.draw();
    decoding.tokens();
    decoding.step();
  }
  const int calls = testing::cuda_calls - before;
  context.queue().synchronize();
  return calls;
}

TEST(CudaCalls, DecodingAllocatesNothingAndWaitsForNothingElse) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
  const model::ModelConfig config = model::preset("gla-tiny");
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t sequences : {1, 3, 8, 64, 65, 256}) {
      model::LanguageModel model(config, dtype, Device::cuda(), false);
      model.parameters().initialize(1);
      if (dtype == DType::bf16) model.set_inference_dtype(DType::bf16);
      EXPECT_EQ(calls_of(model, sequences), 0) << sequences;
    }
  }
}

class CudaCallsOf : public ::testing::TestWithParam<model::SmallModel> {};
INSTANTIATE_TEST_SUITE_P(Models, CudaCallsOf, ::testing::ValuesIn(model::small_models()),
                         [](const auto& model) { return model.param.name; });

TEST_P(CudaCallsOf, DecodingAreNone) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
  for (const std::int64_t sequences : {1, 17}) {
    model::LanguageModel model(GetParam().config, DType::bf16, Device::cuda(), false);
    model.parameters().initialize(1);
    EXPECT_EQ(calls_of(model, sequences), 0) << sequences;
  }
}

}  // namespace
}  // namespace flashgla::generate
