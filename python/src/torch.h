// PyTorch's calls: tensors read, results made and the operator run in one step out of Python, without linking to
// PyTorch.
#pragma once

#include <array>

#include "operands.h"

namespace flashgla::python {

struct ExchangeApi;  // DLPack's C exchange API (torch.cpp)

// Tensors are handed over as those of Inputs in its order, options as those of options_of, in tuples; None: absent.
// Results are new contiguous tensors, or None where they are not wanted. All is on q's device and its current stream.
class Torch {
 public:
  // `torch`: the module. `api`: torch.Tensor.__dlpack_c_exchange_api__, by which tensors are read where they lie; where
  // it is None, or of another version, they are read by way of DLPack capsules.
  Torch(nb::object torch, nb::handle api);

  bool has_exchange_api() const { return api_ != nullptr; }
  // Whether results are made without PyTorch's dispatcher.
  bool has_quick_empty() const { return !empty_cpu_.is_none(); }

  // How a call of these tensors goes, the first three of which are there. Past PyTorch's dispatcher where all are of
  // PyTorch's own classes and lie in memory as they are read (is_neg), the first is on a CPU or GPU, and nothing
  // traces, transforms or watches.
  enum Way { kByDispatcher, kPast, kPastWithGradients };
  int way(nb::tuple tensors) const;

  // Sequences shorter than this on average keep no states: there are hardly any, and backward makes them.
  static constexpr std::int64_t kKeepFrom = 64;

  // (o, ht, zt, states). `keep`: states are for a backward.
  nb::tuple forward(nb::tuple tensors, nb::tuple options, bool final_state, bool keep) const;

  // Gradients of the first seven tensors, in their dtypes: of those that are there and `wanted`, a sequence of bool.
  nb::tuple backward(nb::tuple tensors, nb::tuple options, nb::handle o, nb::handle states, nb::handle d_o,
                     nb::handle d_ht, nb::handle d_zt, nb::sequence wanted) const;

  // o of one token; h and z are written in place. Options are those of options_of that a step has.
  nb::object step(nb::handle q, nb::handle k, nb::handle v, nb::handle g, nb::handle gv, nb::handle h, nb::handle z,
                  nb::tuple options) const;

 private:
  class Reader;
  class DeviceGuard;

  struct Made;

  Made empty(nb::handle like, const Shape& shape, DType dtype, Device device) const;
  Place place(nb::handle q, Device device) const;

  const ExchangeApi* api_ = nullptr;
  nb::object c_, to_dlpack_, empty_, get_num_threads_;
  nb::object empty_cpu_, empty_cuda_;  // none: not there
  nb::object tensor_, parameter_, is_neg_;
  nb::object dispatch_modes_, function_modes_, tracing_state_, transforms_, is_grad_enabled_;
  std::array<nb::object, 8> dtypes_;  // of DType
};

}  // namespace flashgla::python
