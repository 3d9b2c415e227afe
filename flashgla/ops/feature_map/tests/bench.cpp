#include "flashgla/ops/feature_map/implementations.h"
#include "flashgla/ops/feature_map/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::feature_map {

namespace {
struct Timed {
  const char* name;
  Options options;
};
constexpr Timed kTimed[] = {{"both_signs", {Map::both_signs, false}},
                            {"elu_plus_one, divided", {Map::elu_plus_one, true}},
                            {"dpfp", {Map::dpfp, false}}};
}  // namespace

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  for (const testing::DTypePair dtypes : testing::f32_and_bf16()) {
    for (const Timed& timed : kTimed) {
      // Tokens and heads of a 1.3B model on a GPU; on a CPU of one with a fourth of its width.
      const Shape shape = options.device.kind == Device::Kind::cuda ? Shape({16384, 16, 128}) : Shape({2048, 4, 128});
      const Shape small({9, 2, 40});
      const std::string problem = std::string(timed.name) + " " + to_string(shape) + " " + name_of(dtypes.activation);
      for (const bool backward : {false, true}) {
        benches.push_back(testing::bytes_bound(backward ? "feature_map backward" : "feature_map forward", problem,
                                               dtypes, case_of(shape, timed.options, backward),
                                               case_of(small, timed.options, backward)));
      }
    }
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::feature_map
