#include "flashgla/ops/embedding/embedding.h"

#include "flashgla/ops/embedding/implementations.h"

namespace flashgla::ops::embedding {

std::span<const Implementation> implementations() {
  static const Implementation table[] = {
#ifdef FLASHGLA_CUDA
      kCuda,
#endif
      kSimd, kReference};
  return table;
}

namespace {

const Implementation& selected(const Context& context, DType dtype, DType table_dtype) {
  return select("embedding", implementations(), Problem{dtype, table_dtype}, context.architecture(),
                context.forced_implementation());
}

void check_tokens(const Arguments& arguments, const Context& context, const TensorView& tokens, const TensorView& table,
                  const char* rows_name, const TensorView& rows, const TensorView& bad_token) {
  if (bad_token) arguments.check("bad_token", bad_token, DType::i32, Shape({1}), "one number");
  arguments.check("tokens", tokens, DType::i32, Layout::contiguous);
  if (rows_of(rows.shape) != tokens.numel() || rows.rank() < 1 || rows.size(-1) != table.size(1)) {
    arguments.fail(
        rows_name, "has shape " + to_string(rows.shape),
        std::to_string(tokens.numel()) + " rows (as tokens) of " + std::to_string(table.size(1)) + " (as the table)");
  }
  if (context.planning() || context.device().kind != Device::Kind::cpu) return;  // a GPU kernel checks its own
  const auto* token = tokens.as<std::int32_t>();
  for (std::int64_t i = 0; i < tokens.numel(); ++i) {
    if (token[i] < 0 || token[i] >= table.size(0)) {
      arguments.fail("tokens", "holds " + std::to_string(token[i]) + " at position " + std::to_string(i),
                     "0 to " + std::to_string(table.size(0) - 1));
    }
  }
}

}  // namespace

void forward(Context& context, const TensorView& tokens, const TensorView& table, const TensorView& y,
             const TensorView& bad_token) {
  const Arguments arguments("embedding", context);
  arguments.check("y", y, kFloating);
  arguments.check("table", table, y.dtype == DType::f32 ? DTypes{DType::f32, DType::bf16} : DTypes{y.dtype});
  arguments.check_rank("table", table, 2);
  check_tokens(arguments, context, tokens, table, "y", y, bad_token);
  selected(context, y.dtype, table.dtype).forward(context, tokens, table, y, bad_token);
}

void backward(Context& context, const TensorView& tokens, const TensorView& dy, const TensorView& dtable,
              const TensorView& bad_token) {
  const Arguments arguments("embedding", context);
  arguments.check("dy", dy, kFloating);
  arguments.check("dtable", dtable, accumulator_of(dy.dtype));
  arguments.check_rank("dtable", dtable, 2);
  check_tokens(arguments, context, tokens, dtable, "dy", dy, bad_token);
  selected(context, dy.dtype, dtable.dtype).backward(context, tokens, dy, dtable, bad_token);
}

}  // namespace flashgla::ops::embedding
