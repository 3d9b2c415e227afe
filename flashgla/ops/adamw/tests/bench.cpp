#include "flashgla/ops/adamw/implementations.h"
#include "flashgla/ops/adamw/tests/cases.h"
#include "testing/operator_bench.h"

namespace flashgla::ops::adamw {

void bench(const testing::BenchOptions& options) {
  std::vector<testing::OperatorBench> benches;
  const bool on_cpu = options.device.kind == Device::Kind::cpu;
  const std::int64_t count = on_cpu ? 4 << 20 : 64 << 20;
  for (const Form& form : kForms) {
    const testing::OperatorCase timed = step_case(count, form), checked = step_case(1001, form);
    benches.push_back(testing::bytes_bound("adamw step", (on_cpu ? "4M " : "64M ") + std::string(form.name),
                                           timed.dtypes.front(), timed, checked));
    if (form.master == DType::u16) benches.back().bytes += 2.0 * static_cast<double>(count);  // it is written too
  }
  testing::run_benches(benches, testing::names_of(implementations()), options);
}

}  // namespace flashgla::ops::adamw
