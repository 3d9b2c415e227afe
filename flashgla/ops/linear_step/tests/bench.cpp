#include "flashgla/base/names.h"
#include "flashgla/ops/linear_step/implementations.h"
#include "flashgla/ops/linear_step/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::linear_step {

// The products of a token of gla-1.3b.
void bench(const testing::BenchOptions& options) {
  struct Row {
    const char* name;
    std::int64_t in, out;
    Form form;
  };
  const Row rows[] = {
      {"q k v g", 2048, 4112, {Prologue::rms_norm, Epilogue::store, 1, false, true, false, 2048}},
      {"gates", 16, 1024, {Prologue::none, Epilogue::log_sigmoid, 1, false, false, true}},
      {"o", 2048, 2048, {Prologue::head_norm, Epilogue::add, 4, true, true}},
      {"gate up", 2048, 5632, {Prologue::rms_norm, Epilogue::swiglu, 1, false, true}},
      {"down", 5632, 2048, {Prologue::none, Epilogue::add}},
      {"head", 2048, 32000, {Prologue::rms_norm, Epilogue::store, 1, false, true}},
  };
  std::vector<testing::OperatorBench> benches;
  for (const Row& row : rows) {
    for (const std::int64_t batch : {1, 4, 8, 64}) {
      // As generation has them.
      const testing::DTypePair dtypes{batch <= 8 ? DType::f32 : DType::bf16, DType::bf16};
      benches.push_back(testing::bytes_bound(
          std::string("linear_step ") + row.name,
          "N" + std::to_string(batch) + " " + std::to_string(row.in) + " " + name_of(dtypes.activation), dtypes,
          step_case(batch, row.in, row.out, row.form), step_case(batch, row.in, 40, row.form)));
    }
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::linear_step
