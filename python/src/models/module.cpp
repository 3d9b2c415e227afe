// The extension flashgla._models: tokenizers and language models. It is apart from flashgla._flashgla, so that the
// operators load none of the libraries behind it.
#include <nanobind/nanobind.h>

#include "bindings.h"
#include "flashgla/base/error.h"

namespace nb = nanobind;

NB_MODULE(_models, m) {
  m.doc() = "Tokenizers and language models. flashgla.LanguageModel and flashgla.Tokenizer are the public face.";
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const flashgla::Error& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    }
  });
  flashgla::python::bind_tokenizer(m);
  flashgla::python::bind_language_model(m);
}
