// Pass: what one forward, and the backward after it, work with.
#pragma once

#include <cstdint>
#include <string_view>

#include "flashgla/base/context.h"

namespace flashgla::nn {

// What forward keeps for backward; the rest is computed again. Results are the same bits in every class.
enum class Recompute : std::uint8_t {
  nothing,      // keep everything
  activations,  // recompute normalisations, gates and activation functions
  block,        // keep each block's input only; its backward runs forward again
};

const char* name_of(Recompute recompute);
Recompute recompute_from_name(std::string_view name);  // throws Error that lists the names

// Modules keep views of what they saved between a forward and the backward that follows it (one of each at a time);
// the memory is `saved`'s, released by the caller after backward.
struct Pass {
  Context& context;
  Arena* saved = nullptr;  // null: inference, nothing is kept and backward must not follow
  Recompute recompute = Recompute::nothing;
  TensorView cu_seqlens;  // i32 [N+1] for packed sequences (then batch is 1); absent: each row is a sequence

  bool training() const { return saved != nullptr; }

  // Where forward puts a tensor that backward reads.
  Arena& keep() const { return saved ? *saved : context.scratch(); }
  // The same for one that backward can compute again without a projection or a scan.
  Arena& keep_or_recompute() const { return recompute == Recompute::nothing ? keep() : context.scratch(); }
};

}  // namespace flashgla::nn
