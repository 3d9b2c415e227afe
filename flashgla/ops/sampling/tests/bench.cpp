#include <vector>

#include "flashgla/ops/sampling/implementations.h"
#include "testing/devices.h"
#include "testing/operator_bench.h"
#include "testing/random.h"

namespace flashgla::ops::sampling {

// Draws of a vocabulary of 32,000; equality of all implementations is the test's to show.
void bench(const testing::BenchOptions& options) {
  constexpr std::int64_t kVocabulary = 32000;
  struct Row {
    const char* name;
    Options options;
  };
  const Row rows[] = {{"plain", {1.0}}, {"greedy", {0.0}}, {"top-k 40, top-p 0.95", {0.8, 40, 0.95}}};
  for (const Row& row : rows) {
    for (const std::int64_t sequences : {1, 64}) {
      const std::string problem = "N" + std::to_string(sequences) + " V32000 " + row.name;
      if (!options.wants(problem)) continue;
      const Tensor logits =
          testing::copied_to(testing::random_normal({sequences, kVocabulary}, DType::f32, 1, 3.0), options.device);
      const Tensor positions = Tensor::zeros({sequences}, DType::i32, options.device);
      const Tensor tokens = Tensor::zeros({sequences}, DType::i32, options.device);
      for (const Implementation& implementation : implementations()) {
        if (implementation.device != options.device.kind || !options.wants_implementation(implementation.name))
          continue;
        Context context(options.device, options.threads);
        context.force_implementation(implementation.name);
        testing::BenchRow result;
        result.operation = "sampling";
        result.implementation = implementation.name;
        result.problem = problem;
        result.bytes = 4.0 * static_cast<double>(logits->numel());
        result.milliseconds = testing::median_milliseconds(
            context, [&] { run(context, logits, {}, positions, tokens, row.options); }, options.seconds);
        options.report(result);
      }
    }
  }
}

}  // namespace flashgla::ops::sampling
