// What the loop of decoding may not ask of CUDA. It waits for each draw's tokens by an event.
#include <gtest/gtest.h>

#include "flashgla/base/memory.h"
#include "flashgla/generate/decoding.h"
#include "testing/cuda/counted_calls.h"

namespace flashgla::generate {
namespace {

TEST(CudaCalls, DecodingAllocatesNothingAndWaitsForNothingElse) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "no GPU";
  model::ModelConfig config = model::preset("gla-tiny");
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t sequences : {1, 3, 8, 64, 65}) {
      model::LanguageModel model(config, dtype, Device::cuda(), false);
      model.parameters().initialize(1);
      if (dtype == DType::bf16) model.set_inference_dtype(DType::bf16);
      Context context(Device::cuda());
      Session session(model, sequences);
      Decoding decoding(context, model, session, {.temperature = 0.8, .top_k = 40, .top_p = 0.9});
      int before = 0;
      for (int t = 0; t < 40; ++t) {
        if (t == 10) before = testing::cuda_calls;
        decoding.draw();
        decoding.tokens();
        decoding.step();
      }
      EXPECT_EQ(testing::cuda_calls - before, 0) << sequences;
      context.queue().synchronize();
    }
  }
}

}  // namespace
}  // namespace flashgla::generate
