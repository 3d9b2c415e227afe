// The row of the table that runs on CUDA.
#include "flashgla/ops/embedding/cuda/cuda.h"

#include "flashgla/ops/embedding/implementations.h"

namespace flashgla::ops::embedding {

const Implementation kCuda{"cuda", Device::Kind::cuda,
                           [](const Problem& problem, const Architecture&) {
                             return supports_f32_and_bf16({problem.dtype, problem.table_dtype});
                           },
                           cuda::forward, cuda::backward};

}  // namespace flashgla::ops::embedding
