// The extension flashgla._flashgla: conversion of arguments and nothing else. Its users are the modules beside it.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>

#include "errors.h"
#include "flashgla/base/names.h"
#include "operands.h"
#include "torch.h"

namespace nb = nanobind;
using namespace nb::literals;
using flashgla::python::Array;
using flashgla::python::Operands;
using flashgla::python::Torch;
using flashgla::python::Views;
namespace gla = flashgla::ops::gated_linear_attention;

NB_MODULE(_flashgla, m) {
  m.doc() = "Arrays as views, and the operator gated_linear_attention on them. flashgla.__init__ is the public face.";
  flashgla::python::translate_errors();

  nb::class_<Array>(m, "Array", "Memory of another library's array, not copied; kept alive.")
      .def(nb::init<nb::object, bool, std::optional<std::string>>(), "source"_a, "writable"_a = false,
           "dtype"_a = nb::none())
      .def_static("without_memory", &Array::without_memory, "shape"_a, "dtype"_a, "device"_a)
      .def_static("empty", &Array::empty, "shape"_a, "dtype"_a, "device"_a)
      .def("to_dlpack", &Array::to_dlpack)
      .def("wait", &Array::wait)
      .def_prop_ro("device", [](const Array& array) { return name_of(array.view.device); })
      .def_prop_ro("dtype", [](const Array& array) { return flashgla::name_of(array.view.dtype); })
      .def_prop_ro("shape", [](const Array& array) {
        return std::vector<std::int64_t>(array.view.shape.begin(), array.view.shape.end());
      });

  // Arrays of one call are named as in gated_linear_attention.h; None: absent.
  nb::class_<Operands>(m, "Operands", "The inputs and options of one call, validated. Keeps the inputs alive.")
      .def(
          "__init__",
          [](Operands* self, nb::handle q, nb::handle k, nb::handle v, nb::handle g, nb::handle gv, nb::handle h0,
             nb::handle z0, nb::handle cu_seqlens, nb::handle scale, nb::handle algorithm, nb::handle feature_map,
             nb::handle normalize, nb::handle float32_math, nb::handle max_seqlen, nb::handle gate_logit_normalizer,
             nb::handle gate_clamp_min) {
            Views views;
            const gla::Inputs inputs{views(q),  views(k),  views(v),  views(g),
                                     views(gv), views(h0), views(z0), views(cu_seqlens)};
            new (self) Operands(std::move(views), inputs,
                                flashgla::python::options_of(scale, algorithm, feature_map, normalize, float32_math,
                                                             max_seqlen, gate_logit_normalizer, gate_clamp_min));
          },
          "q"_a, "k"_a, "v"_a, "g"_a.none(), "gv"_a.none(), "h0"_a.none(), "z0"_a.none(), "cu_seqlens"_a.none(),
          "scale"_a.none(), "algorithm"_a.none(), "feature_map"_a.none(), "normalize"_a.none(), "float32_math"_a.none(),
          "max_seqlen"_a.none(), "gate_logit_normalizer"_a.none(), "gate_clamp_min"_a.none())
      .def("states_bytes", &Operands::states_bytes, "cuda_capability"_a)
      .def("output_shapes", &Operands::output_shapes)
      .def_prop_ro("dtype", &Operands::dtype)
      .def_prop_ro("state_dtype", &Operands::state_dtype)
      .def(
          "forward",
          [](const Operands& self, nb::handle o, nb::handle ht, nb::handle zt, nb::handle states, std::uintptr_t stream,
             int threads, nb::object allocate) {
            Views views;
            self.forward({views(o), views(ht), views(zt), views(states)},
                         flashgla::python::place_of(stream, threads, std::move(allocate)));
          },
          "o"_a, "ht"_a.none(), "zt"_a.none(), "states"_a.none(), "stream"_a, "threads"_a, "allocate"_a.none())
      .def(
          "backward",
          [](const Operands& self, nb::handle o, nb::handle states, nb::handle d_o, nb::handle d_ht, nb::handle d_zt,
             nb::handle dq, nb::handle dk, nb::handle dv, nb::handle dg, nb::handle dgv, nb::handle dh0, nb::handle dz0,
             std::uintptr_t stream, int threads, nb::object allocate) {
            Views views;
            self.backward({views(o), {}, {}, views(states)}, {views(d_o), views(d_ht), views(d_zt)},
                          {views(dq), views(dk), views(dv), views(dg), views(dgv), views(dh0), views(dz0)},
                          flashgla::python::place_of(stream, threads, std::move(allocate)));
          },
          "o"_a.none(), "states"_a.none(), "d_o"_a, "d_ht"_a.none(), "d_zt"_a.none(), "dq"_a.none(), "dk"_a.none(),
          "dv"_a.none(), "dg"_a.none(), "dgv"_a.none(), "dh0"_a.none(), "dz0"_a.none(), "stream"_a, "threads"_a,
          "allocate"_a.none());

  m.def(
      "step",
      [](nb::handle q, nb::handle k, nb::handle v, nb::handle g, nb::handle gv, nb::handle h, nb::handle z,
         nb::handle o, nb::handle scale, nb::handle feature_map, nb::handle normalize, nb::handle gate_logit_normalizer,
         nb::handle gate_clamp_min, std::uintptr_t stream, int threads, nb::object allocate) {
        Views views;
        flashgla::python::step(
            {views(q), views(k), views(v), views(g), views(gv)}, views(h), views(z), views(o),
            flashgla::python::options_of(scale, feature_map, normalize, gate_logit_normalizer, gate_clamp_min),
            flashgla::python::place_of(stream, threads, std::move(allocate)));
      },
      "q"_a, "k"_a, "v"_a, "g"_a.none(), "gv"_a.none(), "h"_a, "z"_a.none(), "o"_a, "scale"_a.none(),
      "feature_map"_a.none(), "normalize"_a.none(), "gate_logit_normalizer"_a.none(), "gate_clamp_min"_a.none(),
      "stream"_a, "threads"_a, "allocate"_a.none());

  nb::class_<Torch>(m, "Torch", "Calls from PyTorch: tensors in, tensors out.")
      .def(nb::init<nb::object, nb::handle>(), "torch"_a, "exchange_api"_a.none())
      .def_prop_ro("has_exchange_api", &Torch::has_exchange_api)
      .def_prop_ro("has_quick_empty", &Torch::has_quick_empty)
      .def_prop_ro_static("KEEP_FROM", [](nb::handle) { return Torch::kKeepFrom; })
      .def("way", &Torch::way, "tensors"_a)
      .def("forward", &Torch::forward, "tensors"_a, "options"_a, "final_state"_a, "keep"_a)
      .def("backward", &Torch::backward, "tensors"_a, "options"_a, "o"_a.none(), "states"_a.none(), "d_o"_a,
           "d_ht"_a.none(), "d_zt"_a.none(), "wanted"_a)
      .def("step", &Torch::step, "q"_a, "k"_a, "v"_a, "g"_a.none(), "gv"_a.none(), "h"_a, "z"_a.none(), "options"_a);

  m.attr("version") = FLASHGLA_VERSION;
#ifdef FLASHGLA_CUDA
  m.attr("with_cuda") = true;
#else
  m.attr("with_cuda") = false;
#endif
}
