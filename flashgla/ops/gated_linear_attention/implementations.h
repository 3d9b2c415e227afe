// The table behind the operator. A row is everything that dispatch, test and bench need to know of an implementation.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "flashgla/ops/dispatch.h"
#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"
#include "flashgla/ops/gated_linear_attention/ring.h"

namespace flashgla::ops::gated_linear_attention {

struct Implementation {
  const char* name;
  Device::Kind device;
  Support (*supports)(const Problem&, const Architecture&);
  std::size_t (*states_bytes)(const Problem&);
  // Workspace comes from context.scratch(); arguments are validated already. takes_logits: forward and backward do,
  // else they are given log gates (logits.h), as all steps but the reference's are.
  bool takes_logits;
  void (*forward)(Context&, const Problem&, const Inputs&, const Outputs&);
  void (*backward)(Context&, const Problem&, const Inputs&, const Outputs&, const OutputGradients&,
                   const InputGradients&);
  // null: this implementation has no decoding step, selection passes on.
  void (*step)(Context&, const Problem&, const StepInputs&, const TensorView& h, const TensorView& z,
               const TensorView& o);
  // Whether step computes such a gate itself, beside states of that dtype; null: never, it is given the log gates.
  bool (*takes_projection)(const Context&, const Problem&, const GateProjection&, DType state) = nullptr;
  // Names the kernels of "forward; backward; kept states" for tensors that lie like these; null: there is one way.
  std::string (*plan)(const Problem&, const Inputs&, const Outputs&, const Architecture&) = nullptr;
  bool sums_over_heads = false;  // whether supports is to be asked for problems with it
  // A step beside a ring, of problems that it takes; null: the ring is folded in, and step does the rest.
  bool (*takes_ring)(const Problem&) = nullptr;
  void (*step_with_ring)(Context&, const Problem&, const StepInputs&, const Ring&, const TensorView& h,
                         const TensorView& o) = nullptr;
  void (*fold)(Context&, const Ring&, const TensorView& h, const TensorView& to) = nullptr;  // null: another row's
};

// Best first, reference last.
std::span<const Implementation> implementations();
// Those of them that do.
std::vector<Implementation> implementations_with(bool (*does)(const Implementation&));

}  // namespace flashgla::ops::gated_linear_attention
