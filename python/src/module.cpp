// The extension flashgla._flashgla: conversion of arguments and nothing else. Its users are the modules beside it.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>

#include "flashgla/base/names.h"
#include "operands.h"

namespace nb = nanobind;
using namespace nb::literals;
using flashgla::python::Array;
using flashgla::python::Operands;
using flashgla::python::Place;
using flashgla::python::view_of;
namespace gla = flashgla::ops::gated_linear_attention;

namespace {

// The message, with an argument that the operator calls otherwise named as in __init__.py.
std::string with_names_of_python(const flashgla::Error& error) {
  static constexpr std::pair<const char*, const char*> kNames[] = {
      {"h0", "initial_state"}, {"z0", "initial_state's z"}, {"ht", "final_state"},        {"d_ht", "d_final_state"},
      {"h", "state"},          {"z", "state's z"},          {"d_zt", "d_final_state's z"}};
  const std::string head = error.operation() + ": ";
  for (const auto& [ours, theirs] : kNames) {
    if (error.argument() == ours) return head + theirs + (error.what() + head.size() + error.argument().size());
  }
  return error.what();
}

}  // namespace

NB_MODULE(_flashgla, m) {
  m.doc() = "Arrays as views, and the operator gated_linear_attention on them. flashgla.__init__ is the public face.";
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const flashgla::Error& error) {
      PyErr_SetString(PyExc_ValueError, with_names_of_python(error).c_str());
    }
  });

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

  // Arrays of one call are named as in gated_linear_attention.h; None: absent. They are kept alive by Operands.
  nb::class_<Operands>(m, "Operands", "The inputs and options of one call, validated.")
      .def(
          "__init__",
          [](Operands* self, const Array& q, const Array& k, const Array& v, const Array* g, const Array* gv,
             const Array* h0, const Array* z0, const Array* cu_seqlens, nb::handle scale, const std::string& algorithm,
             const std::string& feature_map, bool normalize, const std::string& float32_math, nb::handle max_seqlen,
             nb::handle gate_logit_normalizer, nb::handle gate_clamp_min) {
            const gla::Inputs inputs{q.view,      k.view,      v.view,      view_of(g),
                                     view_of(gv), view_of(h0), view_of(z0), view_of(cu_seqlens)};
            new (self)
                Operands(inputs, flashgla::python::options_of(scale, algorithm, feature_map, normalize, float32_math,
                                                              max_seqlen, gate_logit_normalizer, gate_clamp_min));
          },
          "q"_a, "k"_a, "v"_a, "g"_a.none(), "gv"_a.none(), "h0"_a.none(), "z0"_a.none(), "cu_seqlens"_a.none(),
          "scale"_a.none(), "algorithm"_a, "feature_map"_a, "normalize"_a, "float32_math"_a, "max_seqlen"_a.none(),
          "gate_logit_normalizer"_a.none(), "gate_clamp_min"_a.none(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
          nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>(), nb::keep_alive<1, 7>(),
          nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>())
      .def("states_bytes", &Operands::states_bytes)
      .def("output_shapes", &Operands::output_shapes)
      .def_prop_ro("dtype", &Operands::dtype)
      .def_prop_ro("state_dtype", &Operands::state_dtype)
      .def(
          "forward",
          [](const Operands& self, const Array& o, const Array* ht, const Array* zt, const Array* states,
             std::uintptr_t stream, int threads, nb::object allocate) {
            self.forward({o.view, view_of(ht), view_of(zt), view_of(states)}, {stream, threads, std::move(allocate)});
          },
          "o"_a, "ht"_a.none(), "zt"_a.none(), "states"_a.none(), "stream"_a, "threads"_a, "allocate"_a.none())
      .def(
          "backward",
          [](const Operands& self, const Array* o, const Array* states, const Array& d_o, const Array* d_ht,
             const Array* d_zt, const Array* dq, const Array* dk, const Array* dv, const Array* dg, const Array* dgv,
             const Array* dh0, const Array* dz0, std::uintptr_t stream, int threads, nb::object allocate) {
            self.backward(
                {view_of(o), {}, {}, view_of(states)}, {d_o.view, view_of(d_ht), view_of(d_zt)},
                {view_of(dq), view_of(dk), view_of(dv), view_of(dg), view_of(dgv), view_of(dh0), view_of(dz0)},
                {stream, threads, std::move(allocate)});
          },
          "o"_a.none(), "states"_a.none(), "d_o"_a, "d_ht"_a.none(), "d_zt"_a.none(), "dq"_a.none(), "dk"_a.none(),
          "dv"_a.none(), "dg"_a.none(), "dgv"_a.none(), "dh0"_a.none(), "dz0"_a.none(), "stream"_a, "threads"_a,
          "allocate"_a.none());

  m.def(
      "step",
      [](const Array& q, const Array& k, const Array& v, const Array* g, const Array* gv, const Array& h,
         const Array* z, const Array& o, nb::handle scale, const std::string& feature_map, bool normalize,
         nb::handle gate_logit_normalizer, nb::handle gate_clamp_min, std::uintptr_t stream, int threads,
         nb::object allocate) {
        flashgla::python::step({q.view, k.view, v.view, view_of(g), view_of(gv)}, h.view, view_of(z), o.view,
                               flashgla::python::options_of(scale, "automatic", feature_map, normalize, "ieee",
                                                            nb::none(), gate_logit_normalizer, gate_clamp_min),
                               {stream, threads, std::move(allocate)});
      },
      "q"_a, "k"_a, "v"_a, "g"_a.none(), "gv"_a.none(), "h"_a, "z"_a.none(), "o"_a, "scale"_a.none(), "feature_map"_a,
      "normalize"_a, "gate_logit_normalizer"_a.none(), "gate_clamp_min"_a.none(), "stream"_a, "threads"_a,
      "allocate"_a.none());

  m.attr("version") = FLASHGLA_VERSION;
#ifdef FLASHGLA_CUDA
  m.attr("with_cuda") = true;
#else
  m.attr("with_cuda") = false;
#endif
}
