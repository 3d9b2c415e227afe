#include "flashgla/ops/quantised_linear/quantised_linear.h"

#include <vector>

#include "flashgla/ops/aligned_rows.h"
#include "flashgla/ops/quantised_linear/blocks.h"
#include "flashgla/ops/quantised_linear/implementations.h"
#ifdef FLASHGLA_CUDA
#include "flashgla/ops/quantised_linear/cuda/cuda.h"
#endif

namespace flashgla::ops::quantised_linear {

std::span<const Implementation> implementations() {
  static const std::vector<Implementation> rows = [] {
    std::vector<Implementation> available;
    for (const Implementation& row : {
#ifdef FLASHGLA_CUDA
           kFewRowsCuda, kDecodedCuda,
#endif
#if defined(__x86_64__)
               kVnni, kAvx512, kAvx2,
#endif
               kPortable, kDecoded, kReference
         }) {
      if (row.available()) available.push_back(row);
    }
    return available;
  }();
  return rows;
}

const char* name_of(Format format) { return format == Format::q8 ? "q8" : "q4"; }

Shape packed_shape(Format format, std::int64_t rows, std::int64_t columns) {
  return Shape({(rows + kPanelRows - 1) / kPanelRows, (columns + kGroup - 1) / kGroup, block_bytes(format)});
}

bool is_packed(const TensorView& weight) {
  return weight.dtype == DType::u8 && weight.rank() == 3 &&
         (weight.size(2) == block_bytes(Format::q8) || weight.size(2) == block_bytes(Format::q4));
}

Format format_of(const TensorView& weight) {
  if (!is_packed(weight)) throw Error("quantised linear: a tensor " + to_string(weight.shape) + " is no packed matrix");
  return weight.size(2) == block_bytes(Format::q8) ? Format::q8 : Format::q4;
}

namespace {

void check_weight(const Arguments& arguments, const TensorView& weight, std::int64_t rows, std::int64_t columns) {
  arguments.check("weight", weight, DType::u8, Layout::contiguous);
  if (!is_packed(weight)) {
    arguments.fail("weight", "has shape " + to_string(weight.shape), "[panels,groups,544] (q8) or [panels,groups,288]");
  }
  const Shape expected = packed_shape(format_of(weight), rows, columns);
  if (!(weight.shape == expected)) {
    arguments.fail("weight", "has shape " + to_string(weight.shape),
                   to_string(expected) + " (of " + to_string(Shape({rows, columns})) + ")");
  }
}

}  // namespace

void run(Context& context, const TensorView& x, const TensorView& weight, const TensorView& y, const Options& options) {
  const Arguments arguments("quantised linear", context);
  arguments.check("x", x, {DType::f64, DType::f32, DType::bf16});
  arguments.check_rank("x", x, 2);
  arguments.check("y", y, x.dtype == DType::bf16 ? DTypes{DType::f32, DType::bf16} : DTypes{x.dtype});
  arguments.check_rank("y", y, 2);
  if (y.size(0) != x.size(0)) {
    arguments.fail("y", "has shape " + to_string(y.shape), "[" + std::to_string(x.size(0)) + ",N] (as x's rows)");
  }
  check_weight(arguments, weight, y.size(1), x.size(1));
  if (options.bias) {
    arguments.check("bias", options.bias, parameters_of(x.dtype), Shape({y.size(1)}), "y's columns",
                    Layout::contiguous);
  }
  if (options.addend) {
    arguments.check("addend", options.addend, y.dtype, y.shape, "y");
    if (options.accumulate) arguments.fail("addend", "is present", "none with accumulate");
  }
  if (y.numel() == 0) return;
  const Problem problem{x.size(0), y.size(1), x.size(1), x.dtype, format_of(weight), rows_are_aligned(x)};
  select("quantised linear", implementations(), problem, context.architecture(), context.forced_implementation())
      .run(context, x, weight, y, matmul::added_in_place(context, y, options));
}

void multiply(Context& context, const TensorView& x, const TensorView& weight, const TensorView& y,
              const Options& options) {
  if (is_packed(weight)) return quantised_linear::run(context, x, weight, y, options);
  matmul::run(context, x, weight.transpose(0, 1), y, options);
}

void look_up(Context& context, const TensorView& tokens, const TensorView& weight, std::int64_t rows,
             const TensorView& y) {
  const Arguments arguments("quantised look-up", context);
  arguments.check("tokens", tokens, DType::i32, Layout::contiguous);
  const bool gpu = context.device().kind == Device::Kind::cuda;
  arguments.check("y", y, gpu ? DTypes{DType::f32, DType::bf16} : DTypes{DType::f32});
  const TensorView out = y.as_rows();
  check_weight(arguments, weight, rows, out.size(1));
  if (out.size(0) != tokens.numel()) {
    arguments.fail("y", "has shape " + to_string(y.shape), std::to_string(tokens.numel()) + " rows (as tokens)");
  }
#ifdef FLASHGLA_CUDA
  if (gpu) return cuda::look_up(context, tokens, weight, rows, out);
#endif
  if (context.planning()) return;
  const auto* ids = tokens.as<std::int32_t>();
  for (std::int64_t r = 0; r < out.size(0); ++r) {
    if (ids[r] < 0 || ids[r] >= rows) {
      arguments.fail("tokens", "holds " + std::to_string(ids[r]) + " at position " + std::to_string(r),
                     "0 to " + std::to_string(rows - 1));
    }
  }
  const Blocks blocks(weight);
  parallel_for_blocks(context, out.size(0), 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      blocks.read_row(ids[r], out.size(1), out.as<float>() + r * out.stride[0]);
    }
  });
}

void decode(Context& context, const TensorView& weight, std::int64_t first, const TensorView& values) {
  const Arguments arguments("quantised decode", context);
  const bool gpu = context.device().kind == Device::Kind::cuda;
  arguments.check("values", values, gpu ? DTypes{DType::f32, DType::bf16} : DTypes{DType::f64, DType::f32, DType::bf16},
                  Layout::contiguous);
  arguments.check_rank("values", values, 2);
  check_weight(arguments, weight, is_packed(weight) ? weight.size(0) * kPanelRows : 0, values.size(1));
  if (first < 0 || first + values.size(0) > weight.size(0) * kPanelRows) {
    arguments.fail("values", "has rows to " + std::to_string(first + values.size(0)),
                   "at most " + std::to_string(weight.size(0) * kPanelRows) + " of them");
  }
#ifdef FLASHGLA_CUDA
  if (gpu) return cuda::decode(context, weight, first, values);
#endif
  if (context.planning()) return;
  const Blocks blocks(weight);
  const std::int64_t columns = values.size(1);
  parallel_for_blocks(context, values.size(0), kPanelRows, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> row(static_cast<std::size_t>(columns));
    for (std::int64_t r = begin; r < end; ++r) {
      blocks.read_row(first + r, columns, row.data());
      copy(TensorView(row.data(), Shape({columns})), values.select(0, r));
    }
  });
}

}  // namespace flashgla::ops::quantised_linear
