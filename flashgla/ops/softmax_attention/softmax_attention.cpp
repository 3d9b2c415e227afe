#include "flashgla/ops/softmax_attention/softmax_attention.h"

#include <array>
#include <cmath>

#include "flashgla/ops/dropout/mask.h"
#include "flashgla/ops/softmax_attention/by_cudnn.h"
#include "flashgla/ops/softmax_attention/implementations.h"

namespace flashgla::ops::softmax_attention {

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCudnn, kCudaHopper, kCudaTensorCores, kCudaGeneral, kTiles, kReference};
#else
  static const Implementation table[] = {kTiles, kReference};
#endif
  return table;
}

namespace {

constexpr const char* kName = "softmax_attention";

const Implementation& selected(const Context& context, const Problem& problem) {
  const std::string& forced = context.forced_implementation();
  std::span<const Implementation> table = implementations();
#ifdef FLASHGLA_CUDA
  // cuDNN's row comes first, for what it is faster at.
  if (forced != kCudnn.name && !cudnn_is_faster(problem, context.architecture())) table = table.subspan(1);
#endif
  return select(kName, table, problem, context.architecture(), forced);
}

bool has_regular_rows(const TensorView& view) {
  bool regular = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0;
  for (int dim = 0; dim + 1 < view.rank(); ++dim) {
    regular = regular &&
              (view.size(dim) == 1 ||
               (view.stride[dim] > 0 && static_cast<std::size_t>(view.stride[dim]) * size_of(view.dtype) % 16 == 0));
  }
  return regular;
}

Problem describe(Direction direction, const Inputs& in, const Options& options,
                 std::initializer_list<const TensorView*> others) {
  Problem problem{in.q.dtype, in.past_k ? in.past_k.dtype : in.q.dtype, in.q.size(3), in.v.size(3)};
  problem.direction = direction;
  problem.training = direction == Direction::backward || options.training;
  problem.batch = in.q.size(0);
  problem.length = in.q.size(1);
  problem.heads = in.q.size(2);
  problem.groups = in.k.size(2);
  problem.whole = !in.past_k && !in.cu_seqlens && (options.window == 0 || options.window >= problem.length);
  problem.dropout = options.dropout.probability > 0.0;
  problem.regular = options.scale > 0.0 && has_regular_rows(in.q) && has_regular_rows(in.k) && has_regular_rows(in.v) &&
                    has_regular_rows(in.past_k) && has_regular_rows(in.past_v) &&
                    std::all_of(others.begin(), others.end(), [](const auto* view) { return has_regular_rows(*view); });
  return problem;
}

Options completed(Options options, std::int64_t key_dim) {
  if (options.scale == 0.0) options.scale = 1.0 / std::sqrt(static_cast<double>(key_dim));
  if (options.window < 0) throw Error(kName, "window", "is " + std::to_string(options.window), "0 or more");
  return options;
}

void check_dropout(const Arguments& arguments, const dropout::Mask& mask) {
  if (mask.probability != 0.0) dropout::check(arguments, mask);
}

void check_positions(const Arguments& arguments, const TensorView& positions, std::int64_t sequences) {
  arguments.check("positions", positions, DType::i32, Shape({sequences}), "sequences", Layout::contiguous);
}

void check_inputs(const Arguments& arguments, const Context& context, const Inputs& in) {
  arguments.check("q", in.q, kFloating);
  arguments.check_rank("q", in.q, 4);
  arguments.check("k", in.k, in.q.dtype);
  arguments.check_rank("k", in.k, 4);
  const std::int64_t groups = in.k.size(2);
  if (groups < 1 || in.q.size(2) % groups != 0) {
    arguments.fail("k", "has " + std::to_string(groups) + " heads", "a divisor of q's " + std::to_string(in.q.size(2)));
  }
  arguments.check("k", in.k, in.q.dtype, Shape({in.q.size(0), in.q.size(1), groups, in.q.size(3)}), "q");
  arguments.check_rank("v", in.v, 4);
  arguments.check("v", in.v, in.q.dtype, Shape({in.q.size(0), in.q.size(1), groups, in.v.size(3)}), "k");
  if (in.cu_seqlens) check_cu_seqlens(arguments, context, in.cu_seqlens, "q", in.q);
  if (!in.past_k && !in.past_v) return;
  const std::int64_t sequences = sequences_of(in.q, in.cu_seqlens);
  arguments.check("past_k", in.past_k, kFloating, Layout::contiguous);
  arguments.check_rank("past_k", in.past_k, 4);
  const std::int64_t rows = in.past_k.size(1);
  arguments.check("past_k", in.past_k, kFloating, Shape({sequences, rows, groups, in.k.size(3)}), "sequences and k");
  arguments.check("past_v", in.past_v, in.past_k.dtype, Shape({sequences, rows, groups, in.v.size(3)}), "past_k and v",
                  Layout::contiguous);
  check_positions(arguments, in.positions, sequences);
}

void check_outputs(const Arguments& arguments, const Inputs& in, const Outputs& out, bool lse) {
  arguments.check("o", out.o, in.q.dtype, Shape({in.q.size(0), in.q.size(1), in.q.size(2), in.v.size(3)}), "q and v");
  if (lse || out.lse) {
    arguments.check("lse", out.lse, accumulator_of(in.q.dtype), Shape({in.q.size(0), in.q.size(1), in.q.size(2)}), "q",
                    Layout::contiguous);
  }
}

}  // namespace

void forward(Context& context, const Inputs& inputs, const Outputs& outputs, const Options& options) {
  const Arguments arguments(kName, context);
  check_inputs(arguments, context, inputs);
  check_outputs(arguments, inputs, outputs, false);
  check_dropout(arguments, options.dropout);
  const Options complete = completed(options, inputs.q.size(3));
  selected(context, describe(Direction::forward, inputs, complete, {&outputs.o}))
      .forward(context, inputs, outputs, complete);
}

void backward(Context& context, const Inputs& inputs, const Outputs& outputs, const TensorView& d_o,
              const InputGradients& gradients, const Options& options) {
  const Arguments arguments(kName, context);
  check_inputs(arguments, context, inputs);
  check_outputs(arguments, inputs, outputs, true);
  check_dropout(arguments, options.dropout);
  arguments.check("d_o", d_o, inputs.q.dtype, outputs.o.shape, "o");
  arguments.check("dq", gradients.dq, inputs.q.dtype, inputs.q.shape, "q");
  arguments.check("dk", gradients.dk, inputs.q.dtype, inputs.k.shape, "k");
  arguments.check("dv", gradients.dv, inputs.q.dtype, inputs.v.shape, "v");
  const Options complete = completed(options, inputs.q.size(3));
  selected(context, describe(Direction::backward, inputs, complete,
                             {&outputs.o, &d_o, &gradients.dq, &gradients.dk, &gradients.dv}))
      .backward(context, inputs, outputs, d_o, gradients, complete);
}

void append(Context& context, std::span<const Appended> tensors, const TensorView& positions,
            const TensorView& cu_seqlens) {
  const Arguments arguments(kName, context);
  if (tensors.empty()) return;
  for (const auto& [x, before, cache] : tensors) {
    arguments.check("x", x, tensors[0].x.dtype);
    arguments.check("x", x, kFloating);
    arguments.check_rank("x", x, 4);
    if (cu_seqlens) check_cu_seqlens(arguments, context, cu_seqlens, "x", x);
    const std::int64_t sequences = sequences_of(x, cu_seqlens);
    if (positions) check_positions(arguments, positions, sequences);
    arguments.check("cache", cache, tensors[0].cache.dtype, Layout::contiguous);
    arguments.check_rank("cache", cache, 4);
    arguments.check("cache", cache, kFloating, Shape({sequences, cache.size(1), x.size(2), x.size(3)}),
                    "sequences and x");
    if (cache.size(1) == 0) arguments.fail("cache", "has no rows", "at least one");
    if (before) arguments.check("before", before, cache.dtype, cache.shape, "cache", Layout::contiguous);
  }
  const auto& [x, before, cache] = tensors[0];
  selected(context, {x.dtype, cache.dtype, x.size(3), x.size(3)}).append(context, tensors, positions, cu_seqlens);
}

void step(Context& context, const TensorView& q, const Token& token, const TensorView& k_cache,
          const TensorView& v_cache, const TensorView& positions, const TensorView& o, const Options& options) {
  const Arguments arguments(kName, context);
  arguments.check("q", q, kFloating);
  arguments.check_rank("q", q, 3);
  const std::int64_t sequences = q.size(0);
  arguments.check("k_cache", k_cache, kFloating, Layout::contiguous);
  arguments.check_rank("k_cache", k_cache, 4);
  const std::int64_t rows = k_cache.size(1), groups = k_cache.size(2);
  arguments.check("k_cache", k_cache, kFloating, Shape({sequences, rows, groups, q.size(2)}), "q");
  if (groups < 1 || rows < 1 || q.size(1) % groups != 0) {
    arguments.fail("k_cache", "has shape " + to_string(k_cache.shape),
                   "rows, and a divisor of q's " + std::to_string(q.size(1)) + " heads");
  }
  arguments.check_rank("v_cache", v_cache, 4);
  arguments.check("v_cache", v_cache, k_cache.dtype, Shape({sequences, rows, groups, v_cache.size(3)}), "k_cache",
                  Layout::contiguous);
  check_positions(arguments, positions, sequences);
  arguments.check("o", o, q.dtype, Shape({sequences, q.size(1), v_cache.size(3)}), "q and v_cache");
  if (token.k || token.v) {
    arguments.check("k", token.k, q.dtype, Shape({sequences, groups, q.size(2)}), "k_cache");
    arguments.check("v", token.v, q.dtype, Shape({sequences, groups, v_cache.size(3)}), "v_cache");
  }
  const Implementation& row = selected(context, {q.dtype, k_cache.dtype, q.size(2), v_cache.size(3)});
  const Options complete = completed(options, q.size(2));
  if (!token.k || row.step_appends) return row.step(context, q, token, k_cache, v_cache, positions, o, complete);
  const auto of_call = [](const TensorView& x) {  // [N,1,heads,channels]
    TensorView view = x;
    view.shape = Shape({x.size(0), 1, x.size(1), x.size(2)});
    for (int dim = 3; dim > 0; --dim) view.stride[static_cast<std::size_t>(dim)] = x.stride[dim - 1];
    return view;
  };
  const std::array<Appended, 2> both = {Appended{of_call(token.k), {}, k_cache},
                                        Appended{of_call(token.v), {}, v_cache}};
  row.append(context, both, positions, {});
  row.step(context, q, {}, k_cache, v_cache, positions, o, complete);
}

double mean_keys(double length, double window) {
  if (window <= 0.0 || window >= length) return (length + 1.0) / 2.0;
  return window - window * (window - 1.0) / (2.0 * length);
}

double forward_flops(double key_dim, double value_dim, double length, double window) {
  return 2.0 * (key_dim + value_dim) * mean_keys(length, window);
}

double training_flops(double key_dim, double value_dim, double length, double window) {
  return forward_flops(key_dim, value_dim, length, window) +
         2.0 * (3.0 * key_dim + 2.0 * value_dim) * mean_keys(length, window);
}

}  // namespace flashgla::ops::softmax_attention
