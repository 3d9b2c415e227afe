#include "flashgla/ops/step_outcome/step_outcome.h"

#include "flashgla/ops/step_outcome/implementations.h"

namespace flashgla::ops::step_outcome {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCuda, kReference};
#else
  static const Implementation table[] = {kReference};
#endif
  return table;
}

namespace {

const Shape kOne({1});
constexpr DTypes kWide{DType::f32, DType::f64};
constexpr DTypes kAny{DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32, DType::u16, DType::u8};

const Implementation& selected(const char* operation, const Context& context) {
  return select(operation, implementations(), Problem{}, context.architecture(), context.forced_implementation());
}

}  // namespace

void sum(Context& context, const TensorView& x, const TensorView& total, bool accumulate) {
  const Arguments arguments("sum", context);
  arguments.check("x", x, kWide, Layout::contiguous);
  arguments.check_rank("x", x, 1);
  arguments.check("total", total, DType::f64, kOne, "one sum");
  const Implementation& implementation = selected("sum", context);
  if (!context.planning()) implementation.sum(context, x, total, accumulate);
}

void clear_unless(Context& context, const TensorView& made, const TensorView& view) {
  const Arguments arguments("clear_unless", context);
  arguments.check("made", made, DType::f64, kOne, "one flag");
  arguments.check("view", view, kAny, Layout::contiguous);
  const Implementation& implementation = selected("clear_unless", context);
  if (!context.planning()) implementation.clear_unless(context, made, view);
}

void find_unless(Context& context, const TensorView& made, const TensorView& x, const TensorView& first) {
  const Arguments arguments("find_unless", context);
  arguments.check("made", made, DType::f64, kOne, "one flag");
  arguments.check("x", x, kWide, Layout::contiguous);
  arguments.check("first", first, DType::i64, kOne, "one position");
  const Implementation& implementation = selected("find_unless", context);
  if (!context.planning()) implementation.find_unless(context, made, x, first);
}

}  // namespace flashgla::ops::step_outcome
