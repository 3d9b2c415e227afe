// The row of the table that runs on CUDA: pieces of rows as on the CPU, with bf16 logits where x is bf16, in whose
// place their gradient comes.
#include <algorithm>

#include "flashgla/ops/cross_entropy/cuda/losses.h"
#include "flashgla/ops/cross_entropy/implementations.h"
#include "flashgla/ops/matmul/matmul.h"

namespace flashgla::ops::cross_entropy {

namespace {

// A function of the shape alone. 256 MiB are 4096 rows of 32,000 bf16 logits, enough for products at full speed.
std::int64_t rows_per_piece(std::int64_t rows, std::int64_t row_bytes) {
  constexpr std::int64_t kBytes = std::int64_t{256} << 20, kMultiple = 128;
  return std::min(rows, std::max(kMultiple, kBytes / row_bytes / kMultiple * kMultiple));
}

void cuda_run(Context& context, const Inputs& inputs, const Scores& scores, const Gradients& gradients) {
  const std::int64_t rows = inputs.x.size(0), words = inputs.weight.size(0);
  const DType dtype = inputs.x.dtype;
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  const std::int64_t padded = (words * element + 15) / 16 * 16 / element;  // each row begins at a multiple of 16 bytes
  const std::int64_t piece = rows_per_piece(rows, padded * element);
  if (rows == 0) return;
  ArenaScope scope(context.scratch());
  const TensorView buffer = context.scratch().tensor({piece, padded}, dtype, "cross_entropy: logits");
  const auto* targets = inputs.targets.as<std::int32_t>();
  for (std::int64_t begin = 0; begin < rows; begin += piece) {
    const std::int64_t end = std::min(rows, begin + piece);
    const TensorView logits = buffer.slice(0, 0, end - begin).slice(1, 0, words);
    const TensorView x = inputs.x.slice(0, begin, end);
    matmul::run(context, x, inputs.weight.transpose(0, 1), logits);
    if (!context.planning()) {
      cuda::take_losses(context, logits, targets + begin, scores.losses.as<float>() + begin,
                        static_cast<bool>(gradients.dx), gradients.scale,
                        static_cast<std::int32_t*>(inputs.bad_target.data), begin);
      if (scores.hits) cuda::take_hits(context, logits, targets + begin, scores.hits.as<float>() + begin);
    }
    if (!gradients.dx) continue;
    matmul::run(context, logits, inputs.weight, gradients.dx.slice(0, begin, end));
    if (!gradients.dweight) continue;
    matmul::Options accumulate;
    accumulate.accumulate = true;
    matmul::run(context, logits.transpose(0, 1), x, gradients.dweight, accumulate);
  }
}

}  // namespace

const Implementation kCuda{"cuda", Device::Kind::cuda,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.weight_dtype});
                           },
                           cuda_run};

}  // namespace flashgla::ops::cross_entropy
