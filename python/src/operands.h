// One call of gated_linear_attention: its inputs and options, and the ways to run it.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "array.h"
#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"

namespace flashgla::python {

namespace gla = ops::gated_linear_attention;

// Where a call runs. `stream`: cudaStream_t, null on CPU. `threads` 0: as many as a process should use (base/team.h).
// `allocate`: so many bytes on the call's device and stream, which stay until the place is gone; none: the library's
// own memory, kept for the next call.
struct Place {
  void* stream = nullptr;
  int threads = 0;
  std::function<void*(Device, std::size_t)> allocate;
};
// `stream` as an integer; `allocate`: None, or a function of bytes that returns an Array of as many.
Place place_of(std::uintptr_t stream, int threads, nb::object allocate);

// Calls with a context of the device there; where the place allocates, twice, first planning.
void run(Device device, const Place& place, const std::function<void(Context&)>& call);
std::size_t states_bytes(Device device, const gla::Problem& problem);

nb::tuple to_tuple(std::span<const std::int64_t> numbers);

// TypeError names what is of another type than it must be.
gla::Options options_of(nb::handle scale, nb::handle algorithm, nb::handle feature_map, nb::handle normalize,
                        nb::handle float32_math, nb::handle max_seqlen, nb::handle gate_logit_normalizer,
                        nb::handle gate_clamp_min);
// Of a step.
gla::Options options_of(nb::handle scale, nb::handle feature_map, nb::handle normalize,
                        nb::handle gate_logit_normalizer, nb::handle gate_clamp_min);

class Operands {
 public:
  Operands(Views views, const gla::Inputs& inputs, const gla::Options& options);

  // Of inputs on a CUDA device one of this capability (90: Hopper) answers, whether there is such a device or not.
  std::size_t states_bytes(int cuda_capability) const;
  // Shapes and dtypes of the outputs: o, (ht, zt) by name.
  nb::tuple output_shapes() const;
  const char* dtype() const { return name_of(problem_.dtype); }
  const char* state_dtype() const { return problem_.dtype == DType::f64 ? "f64" : "f32"; }

  void forward(const gla::Outputs& outputs, const Place& place) const;
  void backward(const gla::Outputs& outputs, const gla::OutputGradients& output_gradients,
                const gla::InputGradients& input_gradients, const Place& place) const;

 private:
  Views views_;  // of the inputs
  gla::Inputs inputs_;
  gla::Options options_;
  gla::Problem problem_;
};

void step(const gla::StepInputs& inputs, const TensorView& h, const TensorView& z, const TensorView& o,
          const gla::Options& options, const Place& place);

}  // namespace flashgla::python
