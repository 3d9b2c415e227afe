// What the extension flashgla._models is made of: one function a class.
#pragma once

#include <nanobind/nanobind.h>

namespace flashgla::python {

void bind_tokenizer(nanobind::module_& m);
void bind_language_model(nanobind::module_& m);  // after bind_tokenizer

}  // namespace flashgla::python
