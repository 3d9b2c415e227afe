// How the library's errors become Python's.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <string>
#include <utility>

#include "flashgla/base/error.h"

namespace flashgla::python {

// The message, with an argument that the operator calls otherwise named as in __init__.py.
inline std::string with_names_of_python(const Error& error) {
  static constexpr std::pair<const char*, const char*> kNames[] = {
      {"h0", "initial_state"}, {"z0", "initial_state's z"}, {"ht", "final_state"},        {"d_ht", "d_final_state"},
      {"h", "state"},          {"z", "state's z"},          {"d_zt", "d_final_state's z"}};
  if (error.operation() != "gated_linear_attention") return error.what();
  const std::string head = error.operation() + ": ";
  for (const auto& [ours, theirs] : kNames) {
    if (error.argument() == ours) return head + theirs + (error.what() + head.size() + error.argument().size());
  }
  return error.what();
}

// Error becomes ValueError. Extensions share their translators, the last one first: all of them call this one.
inline void translate_errors() {
  nanobind::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      PyErr_SetString(PyExc_ValueError, with_names_of_python(error).c_str());
    }
  });
}

}  // namespace flashgla::python
