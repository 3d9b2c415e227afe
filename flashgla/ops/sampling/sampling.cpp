#include "flashgla/ops/sampling/sampling.h"

#include <cmath>
#include <sstream>

#include "flashgla/ops/sampling/implementations.h"

namespace flashgla::ops::sampling {

namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 20;

void require(bool ok, const char* name, double value, const char* expected) {
  if (ok) return;
  std::ostringstream text;
  text << "is " << value;
  throw Error("sampling", name, text.str(), expected);
}

}  // namespace

std::span<const Implementation> implementations() {
#ifdef FLASHGLA_CUDA
  static const Implementation table[] = {kCuda, kSelect, kReference};
#else
  static const Implementation table[] = {kSelect, kReference};
#endif
  return table;
}

void Options::validate() const {
  require(temperature >= 0.0 && std::isfinite(temperature), "temperature", temperature, "0 (greedy) or more");
  require(top_k >= 0, "top_k", static_cast<double>(top_k), "0 (all) or more");
  require(top_p > 0.0 && top_p <= 1.0, "top_p", top_p, "in (0, 1]");
  require(min_p >= 0.0 && min_p <= 1.0, "min_p", min_p, "in [0, 1]");
  require(repetition_penalty > 0.0 && std::isfinite(repetition_penalty), "repetition_penalty", repetition_penalty,
          "a positive number");
}

void run(Context& context, const TensorView& logits, const TensorView& seen, const TensorView& positions,
         const TensorView& tokens, const Options& options, std::int64_t first_sequence) {
  options.validate();
  const Arguments arguments("sampling", context);
  arguments.check("logits", logits, DType::f32);
  arguments.check_rank("logits", logits, 2);
  const std::int64_t sequences = logits.size(0), vocabulary = logits.size(1);
  if (vocabulary < 1 || vocabulary > kMostTokens) {
    arguments.fail("logits", "has shape " + to_string(logits.shape), "[N,V] with V from 1 to 2^20");
  }
  if (seen) arguments.check("seen", seen, DType::u8, logits.shape, "logits");
  arguments.check("positions", positions, DType::i32, Shape({sequences}), "logits' rows", Layout::contiguous);
  arguments.check("tokens", tokens, DType::i32, Shape({sequences}), "logits' rows", Layout::contiguous);
  if (sequences == 0) return;
  select("sampling", implementations(), Problem{sequences, vocabulary}, context.architecture(),
         context.forced_implementation())
      .run(context, logits, seen, positions, tokens, options, first_sequence);
}

void mark_seen(Context& context, const TensorView& tokens, const TensorView& bounds, const TensorView& seen) {
  const Arguments arguments("sampling", context);
  arguments.check("seen", seen, DType::u8, Layout::contiguous);
  arguments.check_rank("seen", seen, 2);
  arguments.check("tokens", tokens, DType::i32, Layout::contiguous);
  if (bounds) {
    arguments.check("bounds", bounds, DType::i32, Shape({seen.size(0) + 1}), "seen's rows + 1", Layout::contiguous);
  } else if (!(tokens.shape == Shape({seen.size(0)}))) {
    arguments.fail("tokens", "has shape " + to_string(tokens.shape),
                   "[" + std::to_string(seen.size(0)) + "] (seen's rows)");
  }
  if (seen.size(0) == 0) return;
  select("sampling", implementations(), Problem{seen.size(0), seen.size(1)}, context.architecture(),
         context.forced_implementation())
      .mark_seen(context, tokens, bounds, seen);
}

}  // namespace flashgla::ops::sampling
