// positions.h on CUDA.
#pragma once

#include <cstdint>

namespace flashgla::ops::positions::cuda {

// Queued on the stream (cudaStream_t). bounds may be null.
void advance(std::int32_t* positions, const std::int32_t* bounds, std::int64_t sequences, std::int32_t length,
             void* stream);

// `before` and `bounds` may be null; rows of `length` tokens without bounds.
void of_tokens(const std::int32_t* before, const std::int32_t* bounds, std::int64_t sequences, std::int32_t* out,
               std::int64_t tokens, std::int64_t length, void* stream);

}  // namespace flashgla::ops::positions::cuda
